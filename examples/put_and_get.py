"""Store two versions of a blob in a local store and read them back, whole and in part.

python examples/put_and_get.py FOLDER
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path

import nearkin


def make_dump(seed: int, lines: int = 40_000) -> bytes:
    """Return text that stands for a database dump."""
    draw = random.Random(seed)  # noqa: S311 (not a secret)
    return b"".join(b"INSERT INTO items VALUES (%d, %d);\n" % (line, draw.getrandbits(64)) for line in range(lines))


def main() -> None:
    """Put, get, list and verify."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="folder of the store; created if it does not exist")
    folder: Path = parser.parse_args().folder

    first = make_dump(seed=1)
    second = first[:500_000] + b"-- one line was added\n" + first[500_000:]
    with nearkin.open_store(folder, create=True) as store:
        for data in (first, second):
            result = store.put("db.dump", data, metadata={"host": "db1"})
            print(
                f"version {result.info.version}: {result.ledger.logical_bytes:,} bytes, "
                f"{result.ledger.stored_bytes:,} stored"
            )

        newest = store.get("db.dump").read()
        oldest = store.get("db.dump", version=1).read()
        part = store.get("db.dump", start=500_000, stop=500_021).read()
        print(f"versions equal what was stored: {(oldest, newest) == (first, second)}")
        print(f"bytes 500,000 to 500,020: {bytes(part).decode()}")

        try:
            store.get("no such key")
        except nearkin.NotFound as err:
            print(f"error: {err}")

        for info in store.versions(all_versions=True):
            print(f"{info.key} version {info.version}: {info.size_bytes:,} bytes, {info.digest}")
        print(f"damaged objects: {len(store.verify().damage)}")


if __name__ == "__main__":
    main()

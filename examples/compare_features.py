"""Compare feature algorithms: store the files of a folder with each and print what was stored.

python examples/compare_features.py FOLDER              files in order of name, as versions of one key

`nearkin bench store --corpus FOLDER` measures speed too, next to other tools.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import nearkin

ALGORITHMS = ("none", "finesse", "ntransform", "odess")


def store_with(algorithm: str, files: list[Path]) -> tuple[int, int, int]:
    """Return logical bytes, stored bytes and delta chunks of a new store with one algorithm."""
    # `first-fit` selects bases by super-features alone; the default tries the neighbours of earlier bases first.
    settings = nearkin.load(None, {"features": {"algorithm": algorithm}, "base": {"policy": "first-fit"}})[0]
    with (
        tempfile.TemporaryDirectory() as folder,
        nearkin.open_store(Path(folder) / "store", settings=settings, create=True) as store,
    ):
        ledgers = [store.put("files", file).ledger for file in files]
    return (
        sum(ledger.logical_bytes for ledger in ledgers),
        sum(ledger.stored_bytes for ledger in ledgers),
        sum(ledger.delta_chunks for ledger in ledgers),
    )


def main() -> None:
    """Print one line for each algorithm."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    files = sorted(path for path in parser.parse_args().folder.iterdir() if path.is_file())
    if not files:
        parser.error("the folder has no files")

    print(f"{'algorithm':<12} {'logical bytes':>14} {'stored bytes':>14} {'delta chunks':>12} {'reduction':>9}")
    for algorithm in ALGORITHMS:
        logical_bytes, stored_bytes, delta_chunks = store_with(algorithm, files)
        reduction = logical_bytes / stored_bytes
        print(f"{algorithm:<12} {logical_bytes:>14,} {stored_bytes:>14,} {delta_chunks:>12,} {reduction:>9.2f}")


if __name__ == "__main__":
    main()

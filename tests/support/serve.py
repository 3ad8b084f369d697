"""Run `make serve`.

Invariant: an existing store is served unchanged; an empty one is filled with demonstration data.

The data are three keys whose versions resemble one another as real ones do: an archive of these sources with edits, a
database dump with changed records, a disk image. Nothing is downloaded.
"""

from __future__ import annotations

import io
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

from nearkin.lab import generated_data
from nearkin.store import open_store

STORE = Path(".serve/store")
SOURCES = Path(open_store.__code__.co_filename).parent
VERSIONS = 4
EDITED_OF = 9
"""One of this many files is edited from one version of the archive to the next."""
DUMP_BYTES = 3_000_000
IMAGE_MEBIBYTES = 4


def fill(folder: Path) -> None:
    """Fill the store in a folder if it is empty."""
    with open_store(folder, create=True) as store:
        if not store.stats().versions:
            print(f"filling {folder} with {3 * VERSIONS} versions of three keys", flush=True)
            for key, data, metadata in demo_blobs():
                store.put(key, data, metadata=metadata)


def demo_blobs() -> Iterator[tuple[str, bytes, dict[str, str]]]:
    """Yield (key, content, metadata) in the order of their versions."""
    dump = generated_data.records_like(DUMP_BYTES, 1)
    for version in range(VERSIONS):
        yield "releases/nearkin.tar", _archive(version), {"release": f"0.{version}"}
        yield "db/shop.dump", dump, {"host": "db1"}
        yield "images/web.img", b"".join(generated_data.vm_image(IMAGE_MEBIBYTES, 1, version)), {}
        dump = generated_data.mutate(dump, version, edits=60, edit_bytes_max=400)


def _archive(version: int) -> bytes:
    """Return the package's sources as a tar; every EDITED_OF-th file differs from the version before."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as tar:
        for number, path in enumerate(sorted(SOURCES.rglob("*.py"))):
            edits = sum(number % EDITED_OF == edition % EDITED_OF for edition in range(1, version + 1))
            data = path.read_bytes() + f"# release {edits}\n".encode() * edits
            entry = tarfile.TarInfo(str(path.relative_to(SOURCES)))
            entry.size = len(data)
            tar.addfile(entry, io.BytesIO(data))
    return made.getvalue()


if __name__ == "__main__":
    fill(Path(sys.argv[1]) if len(sys.argv) > 1 else STORE)

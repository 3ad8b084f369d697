"""Compare long histories with and without gathering.

Invariant: every version read is compared with the file that was put.

    python -m benchmarks.long_history [-c rdb] [--versions 40] [--every 4] [--merge-block-bytes 4MiB] [--keep N]

Puts versions in order, does a GC run after every few, and prints after each run the peak memory, the stored bytes, the
last put, and reads of the oldest and the newest version: wall and CPU seconds, and MB decoded. `--keep`: only the last
N versions are kept; the runs then have a grace of 0. Figures: docs/benchmarks/history.md, ADR 33.
"""

from __future__ import annotations

import argparse
import hashlib
import resource
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nearkin import Store, open_store
from nearkin.lab.corpora import find_corpora
from nearkin_shared.config.loader import with_changes
from nearkin_shared.config.settings import Settings
from nearkin_shared.reading.read_plan import BlockName
from nearkin_shared.storage.containers import ContainerStore
from nearkin_shared.types import U8
from tests.support.data.stores import stored_bytes

KEY = "k"


@contextmanager
def decoding() -> Iterator[Callable[[], float]]:
    """Yield a function that returns the MB of blocks decoded since its last call."""
    real, decoded_bytes = ContainerStore.cache_blocks, [0]

    def cache_blocks(self: ContainerStore, names: Sequence[BlockName], decoded: Sequence[U8]) -> None:
        decoded_bytes[0] += sum(map(len, decoded))
        real(self, names, decoded)

    def take_decoded() -> float:
        found, decoded_bytes[0] = decoded_bytes[0] / 1e6, 0
        return found

    ContainerStore.cache_blocks = cache_blocks  # type: ignore[method-assign]
    try:
        yield take_decoded
    finally:
        ContainerStore.cache_blocks = real  # type: ignore[method-assign]


def timed(work: Callable[[], Any], decoded: Callable[[], float]) -> str:
    """Return the wall and CPU seconds of a call and the MB decoded for it, as a table cell."""
    decoded()
    started, cpu_started = time.perf_counter(), time.process_time()
    work()
    return f"{time.perf_counter() - started:6.2f} {time.process_time() - cpu_started:6.2f} s {decoded():6.0f} MB"


def read(store: Store, version: int, file: Path) -> None:
    """Read a version, and compare it with its file."""
    found = hashlib.sha256()
    for part in store.get(KEY, version).pieces():
        found.update(part)
    with file.open("rb") as whole:
        assert found.digest() == hashlib.file_digest(whole, "sha256").digest(), version


def main() -> None:
    """Print one row per GC run."""
    given = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    given.add_argument("-c", "--corpus", default="rdb")
    given.add_argument("--versions", type=int, default=40)
    given.add_argument("--every", type=int, default=4, help="puts between GC runs")
    given.add_argument("--merge-block-bytes", default="4MiB", help="size of merged blocks; 0: never")
    given.add_argument("--keep", type=int, help="versions that stay; without: all")
    chosen = given.parse_args()
    (corpus,) = find_corpora([chosen.corpus], chosen.versions)
    changes: dict[str, dict[str, object]] = {"gc": {"merge_block_bytes": chosen.merge_block_bytes}}
    if chosen.keep is not None:
        changes = {"gc": {**changes["gc"], "grace_seconds": 0}, "deletion": {"undelete_seconds": 0}}
    settings = with_changes(Settings(), changes)
    print("version, peak MiB, stored MB; put, GC run, oldest read, newest read: wall s, CPU s, decoded")
    with tempfile.TemporaryDirectory() as folder, decoding() as decoded:
        root = Path(folder, "s")
        for number, file in enumerate(corpus.paths, 1):
            with open_store(root, settings=settings, create=True) as store:
                put = timed(lambda store=store, file=file: store.put(KEY, file), decoded)  # type: ignore[misc]
                if chosen.keep is not None and number > chosen.keep:
                    store.delete(KEY, number - chosen.keep)
            if number % chosen.every:
                continue
            with open_store(root, settings=settings, create=True) as store:
                gc_run = timed(store.gc, decoded)
            oldest = max(1, number - chosen.keep + 1) if chosen.keep else 1
            reads = []
            for version in (oldest, number):
                with open_store(root, settings=settings, read_only=True) as store:
                    path = corpus.paths[version - 1]
                    reads.append(timed(lambda s=store, v=version, p=path: read(s, v, p), decoded))  # type: ignore[misc]
            peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
            stored_mb = stored_bytes(root) / 1e6
            print(f"{number:7} {peak_mib:5} {stored_mb:8.2f}; {put}; {gc_run}; {reads[0]}; {reads[1]}", flush=True)


if __name__ == "__main__":
    main()

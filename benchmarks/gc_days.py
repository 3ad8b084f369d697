"""Compare a store after 30 days of garbage collection with a fresh store.

Invariant: the compared stores hold the same versions, written the same way.

Three keys are put every day, each slightly changed; the last 7 versions of each are kept, and there is one GC run a
day. At the end the store's bytes are compared with those of a fresh store of the remaining versions.

    python -m benchmarks.gc_days [--edits stretches|small] [--days 30] [--keep 7]      one row a gc.compact_below
    python -m benchmarks.gc_days --mode all [--delete-every 7] [--scale 4]             one row a gc.mode

Rows touched are those of the ledger that nominates garbage
(services/maintenance/nearkin_maintenance/gc/reference_counts.py), per put, deletions included.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nearkin import open_store
from nearkin.lab.generated_data import mutate, random_bytes, records_like, text_like
from nearkin_maintenance import ReferenceCounts
from nearkin_maintenance.gc import gc_run
from nearkin_maintenance.gc.mark import LiveSet
from nearkin_shared.config.loader import with_changes
from nearkin_shared.config.settings import Settings
from nearkin_shared.config.storage import GC_MODES, MARK_SWEEP
from tests.support.data.stores import stored_bytes
from tests.support.fakes.clock import DAY

STRETCH_BYTES = 32 * 1024


def stretches(content: bytes, draw: random.Random, share: float) -> bytes:
    """Change a share of the bytes in stretches of 32 KiB: half of them replaced, half edited."""
    data = bytearray(content)
    for _ in range(max(1, int(len(data) * share / STRETCH_BYTES))):
        at = draw.randrange(len(data) - STRETCH_BYTES)
        before = bytes(data[at : at + STRETCH_BYTES])
        after = mutate(before, draw.randrange(1 << 30), edits=200)
        data[at : at + STRETCH_BYTES] = (
            after if draw.random() < 0.5 else draw.randbytes(STRETCH_BYTES // 2).hex().encode()
        )
    return bytes(data)


def small(content: bytes, draw: random.Random, share: float) -> bytes:
    """Change a share of the bytes in edits of 200 bytes spread over the content: almost every chunk, every day."""
    data = bytearray(content)
    for _ in range(int(len(data) * share / 200)):
        at = draw.randrange(len(data) - 400)
        data[at : at + 200] = draw.randbytes(100).hex().encode()
    return bytes(data)


Edit = Callable[[bytes, random.Random, float], bytes]


@dataclass(slots=True)
class LedgerCounts:
    """Figures that the GC runs report of their ledger."""

    touched: int = 0
    marked: int = 0


@contextmanager
def count_updates() -> Iterator[LedgerCounts]:
    """Collect the figures of every ledger update."""
    found, real = LedgerCounts(), ReferenceCounts.update

    def update(ledger: ReferenceCounts, *rest: Any) -> Any:
        candidates = real(ledger, *rest)
        found.touched += candidates.touched
        return candidates

    live_set = LiveSet

    def marking(*rest: Any, **more: Any) -> Any:
        found.marked += 1
        return live_set(*rest, **more)

    ReferenceCounts.update = update  # type: ignore[assignment,method-assign]
    vars(gc_run)["LiveSet"] = marking
    try:
        yield found
    finally:
        ReferenceCounts.update = real  # type: ignore[method-assign]
        vars(gc_run)["LiveSet"] = live_set


def run(compact_below: float, edit: Edit, given: argparse.Namespace, mode: str = MARK_SWEEP) -> str:
    """Return one row of the table."""
    with count_updates() as counts:
        return _run(compact_below, edit, given, mode, counts)


def _run(compact_below: float, edit: Edit, given: argparse.Namespace, mode: str, counts: LedgerCounts) -> str:
    days, keep, scale = given.days, given.keep, given.scale
    now, draw = [1_764_000_000.0], random.Random(1)
    changes: dict[str, dict[str, object]] = {
        "deletion": {"undelete_seconds": 0},
        "gc": {
            "mode": mode,
            "grace_seconds": DAY // 2,
            "compact_below": compact_below,
            "bytes_per_second": 1 << 40,
            "merge_block_bytes": given.merge_block_bytes,
        },
        "index": {"map_bytes": 1 << 30},
    }
    chosen = with_changes(Settings(), changes)
    contents = {
        "text": text_like(3_000_000 * scale, 1),
        "records": records_like(3_000_000 * scale, 2),
        "mixed": random_bytes(1_000_000 * scale, 3) + text_like(1_000_000 * scale, 4),
    }
    live: dict[tuple[str, int], bytes] = {}
    rewritten, cpu_seconds, puts = 0, 0.0, 0
    with tempfile.TemporaryDirectory() as folder:
        root, fresh = Path(folder, "kept"), Path(folder, "fresh")
        with open_store(root, settings=chosen, clock=lambda: now[0], create=True) as store:
            for day in range(days + 2):
                for key in contents if day < days else ():
                    if day:
                        contents[key] = edit(contents[key], draw, draw.uniform(0.01, 0.05))
                    version = store.put(key, contents[key]).info.version
                    puts += 1
                    live[key, version] = contents[key]
                    for old in range(1, version - keep + 1) if day % given.delete_every == 0 else ():
                        if (key, old) in live:
                            store.delete(key, old)
                            del live[key, old]
                now[0] += DAY
                began = time.process_time()
                rewritten += store.gc().containers_rewritten
                cpu_seconds += time.process_time() - began
            marked, touched = counts.marked, counts.touched
            if store.verify().damage or any(store.get(*name).read() != content for name, content in live.items()):
                raise SystemExit("a version is damaged")
            held = store.gc(dry_run=True).held
        with open_store(fresh, settings=chosen, create=True) as store:
            for (key, _), content in sorted(live.items(), key=lambda entry: (entry[0][1], entry[0][0])):
                store.put(key, content)
        if given.mode:
            return (
                f"{mode:<14} {stored_bytes(root):>12,} {stored_bytes(root) / stored_bytes(fresh):>6.2f} {marked:>7} "
                f"{touched / puts:>12.1f} {cpu_seconds / (days + 2):>14.3f}"
            )
        ratio = stored_bytes(root) / stored_bytes(fresh)
        return (
            f"{compact_below:<14} {stored_bytes(root):>12,} {stored_bytes(fresh):>12,} {ratio:>6.2f} {rewritten:>10} "
            f"{cpu_seconds:>6.1f} {held['bases']:>12,} {held['shared_blocks']:>12,}"
        )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--edits", choices=["stretches", "small"], default="stretches")
    parser.add_argument("--days", type=int, default=30)
    parser.add_argument("--keep", type=int, default=7)
    parser.add_argument("--compact-below", type=float, nargs="+", default=[0.0, 0.5, 0.8, 0.9])
    parser.add_argument("--mode", nargs="+", choices=["all", *GC_MODES], help="compare modes, at compact_below 0.9")
    parser.add_argument("--delete-every", type=int, default=1, help="days between deletions of what is not kept")
    parser.add_argument("--scale", type=int, default=1, help="times 8 MB")
    parser.add_argument("--merge-block-bytes", default="4MiB", help="size of merged blocks; 0: never")
    given = parser.parse_args()
    edit = stretches if given.edits == "stretches" else small
    if given.mode:
        print("mode                 stored  ratio  marked  rows per put  CPU s a gc day")
        for mode in GC_MODES if "all" in given.mode else given.mode:
            print(run(0.9, edit, given, mode), flush=True)
        return
    print("compact_below        stored        fresh  ratio  rewritten  CPU s  held: bases shared blocks")
    for compact_below in given.compact_below:
        print(run(compact_below, edit, given), flush=True)


if __name__ == "__main__":
    main()

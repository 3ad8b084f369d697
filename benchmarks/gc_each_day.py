"""Measure the contents of a collected store on each day.

Invariant: each day's fresh store receives that day's live versions.

As gc_days.py, but measured each day after its puts, its deletions and its GC run, and by kind of bytes:

    python -m benchmarks.gc_each_day [--edits stretches|small] [--days 30] [--keep 7] [--scale 1]

Columns, each minus the fresh store's value and in per cent of the fresh store:

`live`     block shares that versions read
`bases`    block shares needed only as bases of live chunks
`pending`  block shares that are pending delete
`shared`   block shares of dead chunks in blocks that are still needed
`names`    directories
`rest`     manifests, tombstones, records

`due` is the ratio if all data pending delete were deleted; `highest` the highest ratio of the day, measured after its
puts and after every GC run.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import mean

import numpy as np

from benchmarks.gc_cost import system_bytes
from benchmarks.gc_days import small, stretches
from nearkin import Store, open_store
from nearkin.lab.generated_data import random_bytes, records_like, text_like
from nearkin_maintenance.gc.mark import LiveSet, mask_of
from nearkin_maintenance.gc.roots import find_roots
from nearkin_shared.config.loader import with_changes
from nearkin_shared.config.settings import Settings
from nearkin_shared.config.storage import GC_MODES, MARK_SWEEP
from nearkin_shared.formats import container_layout
from tests.support.data.stores import stored_bytes
from tests.support.fakes.clock import DAY

PARTS = ("live", "bases", "pending", "shared", "names", "rest")
Contents = dict[str, bytes]
Live = dict[tuple[str, int], bytes]


@dataclass(frozen=True, slots=True)
class Day:
    """End of a day: bytes of the store and of the fresh store, bytes written and CPU seconds of the GC runs."""

    day: int
    stored: int
    highest: int
    """Highest number of stored bytes after the puts and deletions, and after each GC run."""
    fresh: int
    parts: dict[str, int]
    fresh_parts: dict[str, int]
    written_bytes: int
    content_bytes: int
    rewritten: int
    cpu_seconds: float

    @property
    def ratio(self) -> float:
        """Return the stored bytes divided by those of the fresh store."""
        return self.stored / self.fresh


def parts_of(store: Store) -> dict[str, int]:
    """Return the bytes of a store by kind; a chunk's share of its block is an estimate."""
    objects, manifests = store._containers.of(None), store._manifests
    roots = find_roots(manifests, 0)
    live_set = LiveSet(objects, manifests, [version.manifest for version in roots.kept])
    needed, record = live_set.transitive_closure(live_set.chunks), store._condemned.read()
    found, total = dict.fromkeys(PARTS, 0), 0
    none = np.zeros(0, np.bool_)
    for container, size_bytes in objects.ids():
        directory = objects.directory(container)
        chunks, blocks = directory.chunks, directory.blocks
        ratio = (blocks.stored + float(container_layout.BLOCK.size)) / np.maximum(blocks.raw, 1)
        shares = chunks.encoded * ratio[chunks.blocks]
        live_mask = mask_of(live_set.chunks.get(container, none), len(chunks))
        held = mask_of(needed.get(container, none), len(chunks))
        pending_mask = np.zeros(len(chunks), np.bool_)
        if container in record:
            pending_mask[record[container].chunks] = True
        found["live"] += int(shares[live_mask].sum())
        found["bases"] += int(shares[held & ~live_mask].sum())
        found["pending"] += int(shares[pending_mask & ~held].sum())
        found["shared"] += int(shares[~pending_mask & ~held].sum())
        total += size_bytes
    found["names"] = total - sum(found.values())
    found["rest"] = stored_bytes(store.root) - total
    return found


def history(edits: str, days: int, scale: int) -> Iterator[Contents]:
    """Yield the contents of the keys on each day."""
    draw, edit = Random(1), {"small": small, "stretches": stretches}[edits]
    contents = {
        "text": text_like(3_000_000 * scale, 1),
        "records": records_like(3_000_000 * scale, 2),
        "mixed": random_bytes(1_000_000 * scale, 3) + text_like(1_000_000 * scale, 4),
    }
    for day in range(days):
        contents = {
            key: edit(content, draw, draw.uniform(0.01, 0.05)) if day else content for key, content in contents.items()
        }
        yield contents


def fresh_store(live: Live, chosen: Settings) -> tuple[int, dict[str, int]]:
    """Return the bytes of a fresh store of these versions, put in their order, in total and by kind."""
    with tempfile.TemporaryDirectory() as folder, open_store(folder, settings=chosen, create=True) as store:
        for (key, _), content in sorted(live.items(), key=lambda entry: (entry[0][1], entry[0][0])):
            store.put(key, content)
        return stored_bytes(store.root), parts_of(store)


def run(given: argparse.Namespace, known: dict[int, tuple[int, dict[str, int]]]) -> Iterator[Day]:
    """Yield the days of a store. `known`: fresh stores by day, filled in."""
    now, live = [1_764_000_000.0], Live()
    changes = {
        "deletion": {"undelete_seconds": 0},
        "gc": {
            "mode": given.mode,
            "grace_seconds": given.grace_seconds,
            "compact_below": given.compact_below,
            "bytes_per_second": 1 << 40,
        },
        "index": {"map_bytes": 1 << 30},
    }
    chosen = with_changes(Settings(), changes)
    with (
        tempfile.TemporaryDirectory() as folder,
        open_store(folder, settings=chosen, clock=lambda: now[0], create=True) as store,
    ):
        for day, contents in enumerate(history(given.edits, given.days, given.scale)):
            for key, content in contents.items():
                version = store.put(key, content).info.version
                live[key, version] = content
                if version > given.keep:
                    store.delete(key, version - given.keep)
                    del live[key, version - given.keep]
            _, before = system_bytes()
            began, rewritten, sizes = time.process_time(), 0, [stored_bytes(store.root)]
            for _ in range(given.gc_runs):
                now[0] += DAY / given.gc_runs
                rewritten += store.gc().containers_rewritten
                sizes.append(stored_bytes(store.root))
            cpu_seconds, (_, after) = time.process_time() - began, system_bytes()
            if day not in known:
                known[day] = fresh_store(live, chosen)
            yield Day(
                day,
                sizes[-1],
                max(sizes),
                known[day][0],
                parts_of(store),
                known[day][1],
                after - before,
                sum(map(len, contents.values())),
                rewritten,
                cpu_seconds,
            )
        if store.verify().damage or any(store.get(*name).read() != content for name, content in live.items()):
            raise SystemExit("a version is damaged")


def main() -> None:
    """Print a row a day, and the means once versions end."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--edits", choices=["stretches", "small"], default="stretches")
    parser.add_argument("--days", type=int, default=30)
    parser.add_argument("--keep", type=int, default=7)
    parser.add_argument("--scale", type=int, default=1, help="times 8 MB")
    parser.add_argument("--mode", choices=GC_MODES, default=MARK_SWEEP)
    parser.add_argument("--compact-below", type=float, default=0.9)
    parser.add_argument(
        "--gc-runs", type=int, default=2, help="GC runs a day: with 2 the second frees what the first marks"
    )
    parser.add_argument("--grace-seconds", type=int, default=Settings().gc.grace_seconds)
    parser.add_argument("--fresh", type=Path, help="keep the fresh stores' figures in this file, or take them from it")
    given = parser.parse_args()
    known: dict[int, tuple[int, dict[str, int]]] = {}
    if given.fresh is not None and given.fresh.exists():
        known = {int(day): (size, parts) for day, (size, parts) in json.loads(given.fresh.read_text()).items()}
    print(" day     stored      fresh  ratio    due highest | % of fresh:", *(f"{part:>9}" for part in PARTS), end="")
    print(" | written MB  rewritten  CPU s")
    days = []
    for day in run(given, known):
        days.append(day)
        due, highest = (day.stored - day.parts["pending"]) / day.fresh, day.highest / day.fresh
        print(
            f"{day.day:>4} {day.stored:>10,} {day.fresh:>10,} {day.ratio:>6.3f} {due:>6.3f} {highest:>7.3f}", end=" |"
        )
        print(" " * 12, end=" ")
        print(*(f"{(day.parts[p] - day.fresh_parts[p]) / day.fresh * 100:>9.1f}" for p in PARTS), end="")
        print(f" | {day.written_bytes / 1e6:>10.2f} {day.rewritten:>10} {day.cpu_seconds:>6.2f}", flush=True)
    if given.fresh is not None:
        given.fresh.write_text(json.dumps(known))
    ended = days[given.keep :]
    over, highest = [day.ratio for day in ended], max(day.highest / day.fresh for day in ended)
    written, content = mean(day.written_bytes for day in ended), mean(day.content_bytes for day in ended)
    print(
        f"{given.edits}: days {given.keep} to {given.days - 1}: ratio {min(over):.3f} to {max(over):.3f}, mean "
        f"{mean(over):.3f}, highest moment {highest:.3f}; GC runs write {written / 1e6:.2f} MB a day for "
        f"{content / 1e6:.1f} MB of content, {mean(day.cpu_seconds for day in ended):.2f} CPU s"
    )


if __name__ == "__main__":
    main()

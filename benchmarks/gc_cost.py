"""Measure the cost of a GC run, day by day.

Invariant: every store receives the same number of changed bytes a day.

Three keys are put every day with some changed stretches, of as many bytes whatever the store's size. The last 5
versions are kept; there is one GC run a day. Bytes read and written are those of the process's system calls
(/proc/self/io), the index included.

    python -m benchmarks.gc_cost --scales 1 2 4 --modes mark-sweep hybrid --days 14 --out gc-cost
    python -m benchmarks.gc_cost --versions 1000 10000 --deleted 1      one deletion among many (gc_deletion.py)

Writes OUT.json, OUT.md and, with matplotlib, OUT.svg and OUT.png.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.gc_days import count_updates, stretches
from benchmarks.gc_deletion import deletion_table, measure_deletions
from nearkin import open_store
from nearkin.lab.generated_data import random_bytes, records_like, text_like
from nearkin_shared.config.loader import with_changes
from nearkin_shared.config.settings import Settings
from nearkin_shared.config.storage import GC_MODES, MARK_SWEEP
from tests.support.data.stores import stored_bytes
from tests.support.fakes.clock import DAY

WARM_DAYS = 7
"""Days before the first version ends and can be collected."""
KEEP = 5


@dataclass(frozen=True, slots=True)
class Day:
    """Figures of one day: its puts and its GC run."""

    mode: str
    scale: int
    day: int
    changed_bytes: int
    stored_bytes: int
    read_bytes: int
    written_bytes: int
    rows_touched: int
    marked: bool
    cpu_seconds: float


def system_bytes() -> tuple[int, int]:
    """Return what this process has read and written by system calls."""
    counters = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(counters["rchar"]), int(counters["wchar"])


def run(mode: str, scale: int, days: int) -> list[Day]:
    """Return the days of one store."""
    now, draw, found = [1_764_000_000.0], random.Random(1), []
    gc = {"mode": mode, "grace_seconds": DAY // 2, "bytes_per_second": 1 << 40}
    chosen = with_changes(Settings(), {"deletion": {"undelete_seconds": 0}, "gc": gc, "index": {"map_bytes": 1 << 30}})
    contents = {
        "text": text_like(3_000_000 * scale, 1),
        "records": records_like(3_000_000 * scale, 2),
        "mixed": random_bytes(1_000_000 * scale, 3) + text_like(1_000_000 * scale, 4),
    }
    with (
        tempfile.TemporaryDirectory() as folder,
        count_updates() as counts,
        open_store(folder, settings=chosen, clock=lambda: now[0], create=True) as store,
    ):
        for day in range(days):
            changed = 0
            for key, before in list(contents.items()):
                contents[key] = stretches(before, draw, draw.uniform(0.01, 0.05) / scale) if day else before
                result = store.put(key, contents[key])
                changed += result.ledger.unique_bytes
                if result.info.version > KEEP:
                    store.delete(key, result.info.version - KEEP)
            now[0] += DAY
            touched, marked = counts.touched, counts.marked
            read, written = system_bytes()
            began = time.process_time()
            store.gc()
            cpu_seconds = time.process_time() - began
            read_after, written_after = system_bytes()
            found.append(
                Day(
                    mode,
                    scale,
                    day,
                    changed,
                    stored_bytes(store.root),
                    read_after - read,
                    written_after - written,
                    counts.touched - touched,
                    counts.marked > marked,
                    cpu_seconds,
                )
            )
    return found


def table(days: list[Day]) -> str:
    """Return the means of each store's days, once versions end, as Markdown."""
    lines = [
        "| `gc.mode` | content | stored MB | changed MB a day | runs that mark | read MB | written MB | rows | CPU s |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for mode, scale in dict.fromkeys((day.mode, day.scale) for day in days):
        some = [day for day in days if (day.mode, day.scale) == (mode, scale) and day.day >= WARM_DAYS]
        if not some:
            continue
        means = {name: mean(getattr(day, name) for day in some) for name in Day.__slots__[3:]}
        lines.append(
            f"| `{mode}` | {8 * scale} MB | {means['stored_bytes'] / 1e6:.1f} | {means['changed_bytes'] / 1e6:.2f} | "
            f"{sum(day.marked for day in some)} of {len(some)} | {means['read_bytes'] / 1e6:.2f} | "
            f"{means['written_bytes'] / 1e6:.2f} | {means['rows_touched']:.0f} | {means['cpu_seconds']:.2f} |"
        )
    return "\n".join(lines) + "\n"


def draw(days: list[Day], out: Path) -> None:
    """Draw the bytes read and written and the CPU time of each day's GC run against the bytes changed that day."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    shown = [
        ("read_bytes", "read, MB", 1e6),
        ("written_bytes", "written, MB", 1e6),
        ("cpu_seconds", "processor time, s", 1.0),
    ]
    modes = list(dict.fromkeys(day.mode for day in days))
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "nearkin", "font.size": 9}):
        figure = Figure(figsize=(4.2 * len(shown), 3.4 * len(modes)), layout="constrained")
        grid: Any = figure.subplots(len(modes), len(shown), squeeze=False)
        for row, mode in zip(grid, modes, strict=True):
            for place, (name, label, unit) in zip(row, shown, strict=True):
                for scale in dict.fromkeys(day.scale for day in days):
                    some = [d for d in days if (d.mode, d.scale) == (mode, scale) and d.day >= WARM_DAYS]
                    place.scatter(
                        [d.changed_bytes / 1e6 for d in some],
                        [getattr(d, name) / unit for d in some],
                        label=f"{8 * scale} MB",
                        s=18,
                    )
                place.set(xlabel="changed that day, MB", ylabel=label, title=mode)
                place.set_xlim(left=0)
                place.set_ylim(bottom=0)
                place.grid(alpha=0.25)
        grid[0][0].legend(title="content", frameon=False)
        for kind in ("svg", "png"):
            figure.savefig(out.with_suffix(f".{kind}"), dpi=144, metadata={"Date": None} if kind == "svg" else None)


def main() -> None:
    """Measure, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scales", type=int, nargs="+", default=[1, 2, 4], help="times 8 MB of content")
    parser.add_argument("--modes", nargs="+", choices=GC_MODES, default=[MARK_SWEEP, "hybrid"])
    parser.add_argument("--days", type=int, default=21)
    parser.add_argument("--versions", type=int, nargs="+", help="small versions, of which some are deleted")
    parser.add_argument("--deleted", type=int, default=1, help="versions to delete, with --versions")
    parser.add_argument("--out", type=Path, default=Path("gc-cost"))
    given = parser.parse_args()
    if given.versions:
        rows = deletion_table(measure_deletions(given.modes, given.versions, given.deleted))
        given.out.with_suffix(".md").write_text(rows)
        print(rows, end="")
        return
    days = []
    for mode in given.modes:
        for scale in given.scales:
            days += run(mode, scale, given.days)
    given.out.with_suffix(".json").write_text(json.dumps([asdict(day) for day in days], indent=1))
    given.out.with_suffix(".md").write_text(table(days))
    print(table(days), end="")
    try:
        draw(days, given.out)
    except ModuleNotFoundError as err:
        print(f"no chart: {err.name} is not installed; pip install 'nearkin[bench]'")


if __name__ == "__main__":
    main()

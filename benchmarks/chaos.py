"""Run the chaos test: `python -m benchmarks.chaos --blobs 300 --kills 40 [--seed N]`.

The exit code is 1 if a promise was broken.
"""

from __future__ import annotations

import argparse
import json
import secrets
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from nearkin_maintenance.gc.gc_run import SERVICE_MODES
from tests.support.engines.chaos import MODES, Chaos, ChaosFleet


def main() -> None:
    """Run and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blobs", type=int, default=300)
    parser.add_argument("--kills", type=int, default=40)
    parser.add_argument("--seed", type=int, default=secrets.randbelow(1_000_000))
    parser.add_argument("--mode", choices=MODES, default="split", help="which stages share a process")
    parser.add_argument("--edge", action="store_true", help="the gateway deduplicates")
    parser.add_argument("--gc-mode", choices=SERVICE_MODES, help="collect garbage every second, in this mode")
    parser.add_argument("--shards", type=int, choices=range(3), default=0, help="index shards in place of Redis")
    parser.add_argument("--keep", type=Path, help="work in this folder and leave it there")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="nearkin-chaos-") as folder:
        place = chosen.keep or Path(folder)
        counts = chosen.seed, chosen.blobs, chosen.kills
        fleet = ChaosFleet(chosen.mode, chosen.edge, chosen.gc_mode, chosen.shards)
        report = Chaos(place, *counts, print_line, fleet).run()
    print(json.dumps(asdict(report), indent=1))
    sys.exit(1 if report.problems else 0)


def print_line(line: str) -> None:
    """Print a line of progress."""
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()

"""Compare the CPU time and memory of two builds of Nearkin, in turn, in one run.

    python -m benchmarks.two_builds OLD/.venv/bin/python NEW/.venv/bin/python --runs 5 NAME=FILE,FILE ...

For each group of files: a new store, one put a file as versions of one key, the newest and the oldest restored. CPU
seconds are user and system time of that process, without its start, which is measured by `nearkin --help`. The builds
start first in turn, so that neither always finds caches warm.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from nearkin_shared.utils.frozen import frozen

START = "start, CPU ms"
MEASURED = ("put, CPU s", "get newest, CPU s", "get oldest, CPU s", "peak MB")
CHILD = """
import json, resource, sys, time
import nearkin
folder, *files = sys.argv[1:]
def write(store, version):
    with open(folder + "/restored", "wb") as target:
        store.get("k", version).write_to(target)
marks = [time.process_time()]
with nearkin.open_store(folder + "/store", create=True) as store:
    for name in files:
        with open(name, "rb") as file:
            store.put("k", file)
    marks.append(time.process_time())
    for version in (len(files), 1):
        write(store, version)
        marks.append(time.process_time())
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000
print(json.dumps([*(after - before for before, after in zip(marks, marks[1:])), peak]))
"""
"""Runs under both builds: only what the Python API of 0.1 has."""


@frozen
class Build:
    """A build, by the Python of its virtual environment."""

    name: str
    python: Path

    def measure(self, files: Sequence[str]) -> dict[str, float]:
        """Put and get files in a process of this build; return its figures by name."""
        with tempfile.TemporaryDirectory() as folder:
            done = subprocess.run(
                [self.python, "-c", CHILD, folder, *files], check=True, capture_output=True, text=True, env=_plain()
            )
        return dict(zip(MEASURED, json.loads(done.stdout), strict=True))

    def measure_start(self) -> float:
        """Return the CPU time of `nearkin --help`, ms."""
        before = os.times()
        command = self.python.with_name("nearkin")
        subprocess.run([command, "--help"], check=True, stdout=subprocess.DEVNULL, env=_plain())
        after = os.times()
        spent = after.children_user - before.children_user + after.children_system - before.children_system
        return 1000 * spent


def _plain() -> dict[str, str]:
    """Return the environment without settings, and with bytecode, which a start without it would compile."""
    return {name: text for name, text in os.environ.items() if not name.startswith(("NEARKIN_", "PYTHONDONT"))}


def _print_rows(group: str, found: dict[tuple[str, str], list[float]]) -> None:
    for name in dict.fromkeys(name for name, _ in found):
        old, new = found[name, "old"], found[name, "new"]
        ratio = statistics.median(new) / statistics.median(old)
        print(
            f"| {group} | {name} | {statistics.median(old):.4g} | {statistics.median(new):.4g} | {ratio:.3f} |",
            flush=True,
        )


def main() -> None:
    """Run as a command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("groups", nargs="+", metavar="NAME=FILE,FILE")
    parser.add_argument("--runs", type=int, default=5)
    given = parser.parse_args()
    builds = [Build("old", given.old.absolute()), Build("new", given.new.absolute())]
    print("| data | figure, median | old | new | new / old |\n|---|---|---|---|---|")
    starts: dict[tuple[str, str], list[float]] = defaultdict(list)
    for run in range(4 * given.runs):
        for build in builds[:: -1 if run % 2 else 1]:
            starts[START, build.name].append(build.measure_start())
    _print_rows("`--help`", starts)
    for group in given.groups:
        name, _, files = group.partition("=")
        found: dict[tuple[str, str], list[float]] = defaultdict(list)
        for run in range(given.runs):
            for build in builds[:: -1 if run % 2 else 1]:
                for figure, value in build.measure(files.split(",")).items():
                    found[figure, build.name].append(value)
        _print_rows(name, found)


if __name__ == "__main__":
    main()

"""Mutation engine: plant one mistake a rule and show that the test of that rule fails.

Each table `mutants/*.toml` lists mutants: the rule (an invariant or a security rule), the mistake as a sentence, the
module, the source text `old` that is replaced by `new`, and the tests that must fail.
`python tests/support/mutation.py` runs all of them or those named; `tests/fault/test_mutants.py` runs a sample.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import tomllib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import click

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
TABLES = HERE / "mutants"
RUN_SECONDS_MAX = 180
"""Time limit of one run: a mutant that makes its test wait for ever counts as caught by the time limit."""
OUTPUT_CHARACTERS = 2000
"""Characters of a run's output that are shown for a mutant that was not caught."""
TESTS_FAILED_EXIT_CODE = 1


class Outcome(Enum):
    """Result of one mutant."""

    CAUGHT = "caught"  # a test that the mutant names failed
    MISSED = "missed"  # all tests passed
    STALE = "stale"  # the mutant was not planted, or pytest could not run its tests


@dataclass(frozen=True, slots=True)
class Mutant:
    """One mistake. `tests` are pytest node ids relative to the root of the project."""

    name: str
    rule: str
    mistake: str
    module: str
    old: str
    new: str
    tests: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Run:
    """One run of the tests of a mutant."""

    mutant: Mutant
    outcome: Outcome
    seconds: float
    output: str


def read_mutants(folder: Path = TABLES) -> dict[str, Mutant]:
    """Return all mutants by name. Raises ValueError for a name that two mutants share."""
    mutants: dict[str, Mutant] = {}
    for table in sorted(folder.glob("*.toml")):
        for name, row in tomllib.loads(table.read_text()).items():
            if name in mutants:
                raise ValueError(f"{table.name}: mutant {name!r} is in another table too; rename one")
            mutants[name] = _mutant(name, row)
    return mutants


def _mutant(name: str, row: Mapping[str, Any]) -> Mutant:
    return Mutant(name, **{**row, "tests": tuple(row["tests"])})


def run_mutant(mutant: Mutant) -> Run:
    """Run the tests of one mutant in a process of its own that has the mutant planted."""
    planted = json.dumps({"module": mutant.module, "old": mutant.old, "new": mutant.new})
    search_path = os.pathsep.join(filter(None, (str(HERE), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PLANTED_MUTANT": planted, "PYTHONPATH": search_path}
    environment.pop("PYTEST_XDIST_WORKER", None)  # else the run would look for the servers of this run's workers
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:schemathesis",
        "-p",
        "mutant_plugin",
        "-m",
        "",  # tests of `make soak`, too
    ]
    started = time.perf_counter()
    try:
        done = subprocess.run(
            [*command, *mutant.tests],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=RUN_SECONDS_MAX,
        )
    except subprocess.TimeoutExpired:
        return Run(mutant, Outcome.CAUGHT, time.perf_counter() - started, "time limit reached")
    return Run(mutant, _outcome(done.returncode), time.perf_counter() - started, done.stdout[-OUTPUT_CHARACTERS:])


def _outcome(exit_code: int) -> Outcome:
    if exit_code == TESTS_FAILED_EXIT_CODE or exit_code < 0:  # negative: a signal ended the process
        return Outcome.CAUGHT
    return Outcome.MISSED if exit_code == 0 else Outcome.STALE


@click.command()
@click.argument("names", nargs=-1)
@click.option("--jobs", type=click.IntRange(1, 64), default=2, show_default=True, help="runs at the same time")
def main(names: tuple[str, ...], jobs: int) -> None:
    """Plant each mutant named, or all of them, and print which were caught by their tests."""
    mutants = read_mutants()
    unknown = sorted(set(names) - mutants.keys())
    if unknown:
        raise click.UsageError(f"unknown mutant {', '.join(unknown)}; choose from {', '.join(mutants)}")
    chosen = [mutants[name] for name in names] or list(mutants.values())
    failed = 0
    with ThreadPoolExecutor(jobs) as pool:
        for run in pool.map(run_mutant, chosen):
            click.echo(f"{run.outcome.value}\t{run.seconds:.1f} s\t{run.mutant.rule}\t{run.mutant.name}")
            if run.outcome is not Outcome.CAUGHT:
                failed += 1
                click.echo(run.output, err=True)
    click.echo(f"{len(chosen) - failed} of {len(chosen)} mutants caught")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()

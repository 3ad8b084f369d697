"""Run the crash engine for long: `python -m tests.support.engines.soak --kills 2000 --seed 7`.

    RUNS/20261127-154452-seed-7/run.json        seed, arguments and, at the end, the outcome with its violations
                                journal.jsonl   settings of each store, calls of each child before it starts, its end
                                store-62, store-62-copies    of a run that ended with a violation

Invariant: the seed is printed and written before anything else, and the same seed repeats the run.
"""

from __future__ import annotations

import errno
import json
import logging
import random
import shutil
import sys
import tempfile
import time
import timeit
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import click

from nearkin_shared.utils.failpoints import STORE_POINTS, failpoint
from tests.support.engines.crash import VARIANTS, Campaign, Outcome
from tests.support.engines.power_cut import WORKLOADS, explore, fail_each


@click.command()
@click.option("--kills", default=2000, show_default=True, help="children to kill")
@click.option("--seed", type=int, help="of an earlier run, to do it again; by lot")
@click.option(
    "--folder",
    type=click.Path(path_type=Path),
    help="where stores are made, created if missing; a temporary folder",
)
@click.option(
    "--runs",
    type=click.Path(path_type=Path),
    default=Path("soak-runs"),
    show_default=True,
    help="where seed, calls and violations of each run are kept",
)
@click.option("--points", help="failpoints to die at, with commas between; all")
@click.option("--disk", is_flag=True, help="instead: every power cut and every failing call of each short workload")
@click.option("--cost", is_flag=True, help="say what a failpoint costs that is not armed, and end")
def soak(
    kills: int, seed: int | None, folder: Path | None, runs: Path, points: str | None, *, disk: bool, cost: bool
) -> None:
    """Kill stores at failpoints, and check after each kill that nothing acknowledged is lost."""
    logging.getLogger("nearkin").setLevel(logging.ERROR)  # each rebuild would be logged
    if cost:
        click.echo(f"{min(timeit.repeat(_pass, number=1_000_000, repeat=5)) * 1000:.0f} ns a passing, unarmed")
        return
    if folder is not None:
        _make_folder(folder)
    if disk:
        _power_cuts(folder)
        return
    chosen = tuple(points.split(",")) if points else tuple(STORE_POINTS)
    seed = random.SystemRandom().randrange(1 << 32) if seed is None else seed
    click.echo(f"seed {seed}, {kills} kills over {len(chosen)} failpoints")
    record = RunRecord(runs, seed, {"kills": kills, "points": list(chosen)})
    click.echo(f"run {record.folder}")
    stores_folder = Path(tempfile.mkdtemp(prefix="nearkin-soak-", dir=folder))
    campaign = Campaign(stores_folder, seed, variants=VARIANTS, points=chosen, journal=record.append)
    outcome = campaign.outcome
    try:
        outcome = campaign.run(kills, _progress)
    finally:
        record.finish(outcome, stores_folder)
    click.echo(json.dumps(asdict(outcome), indent=1))
    shutil.rmtree(stores_folder)
    if outcome.violations:
        click.echo(f"seed {seed}: {outcome.violations[0]}\nkept in {record.folder}", err=True)
        sys.exit(1)
    missed = [point for point in chosen if not outcome.by_point.get(point)]
    click.echo(f"failpoints that killed no process: {', '.join(missed) or 'none'}")


def _make_folder(folder: Path) -> None:
    """Make the folder for stores. Raises BadParameter."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as err:
        raise click.BadParameter(f'"{folder}": {(err.strerror or str(err)).lower()}', param_hint="--folder") from err


class RunRecord:
    """Files of one run."""

    def __init__(self, runs: Path, seed: int, arguments: Mapping[str, object]) -> None:
        name = f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-seed-{seed}"
        self.folder = (runs / name).resolve()
        self.folder.mkdir(parents=True, exist_ok=True)
        self._run = {"seed": seed, **arguments}
        self._write(self._run)

    def append(self, entry: Mapping[str, object]) -> None:
        """Append an entry to the journal; it is flushed to the kernel before the child starts."""
        with (self.folder / "journal.jsonl").open("a") as file:
            file.write(json.dumps(entry) + "\n")

    def finish(self, outcome: Outcome, stores: Path) -> None:
        """Write the outcome; move the store of a violation, and its copies, to the run's folder."""
        self._write({**self._run, "outcome": asdict(outcome)})
        if outcome.violations:
            for path in stores.iterdir():
                shutil.move(path, self.folder / path.name)

    def _write(self, run: Mapping[str, object]) -> None:
        (self.folder / "run.json").write_text(json.dumps(run, indent=1) + "\n")


def _progress(outcome: Outcome) -> None:
    click.echo(f"{outcome.kills} kills, {outcome.stores} stores, {outcome.calls} calls, {outcome.seconds:.0f} s")


def _power_cuts(folder: Path | None) -> None:
    for name, workload in WORKLOADS.items():
        with tempfile.TemporaryDirectory(prefix="nearkin-torn-", dir=folder) as stores_folder:
            explored = explore(Path(stores_folder) / "cut", workload)
            full = fail_each(Path(stores_folder) / "full", workload, error=errno.ENOSPC)
            bad = fail_each(Path(stores_folder) / "bad", workload, error=errno.EIO)
        click.echo(
            f"{name}: {explored.prefixes} prefixes, {explored.worlds} worlds; a full disk at each of {full.failures} "
            f"calls, an error at each of {bad.failures}"
        )


def _pass() -> None:
    failpoint("put.begun")


if __name__ == "__main__":
    soak()

"""Measure backups of a tree that changes from version to version.

Each state of the tree is put into one live folder, of which only the changed files are written again. Every tool backs
it up: in turn, in the reverse order every other version. Then the newest state is backed up once more, restored,
and single files of it are read.

Invariant: one run, one core, one file system, the same folder for all tools; every restore is compared.
"""

from __future__ import annotations

import os
import resource
import shutil
import statistics
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain
from pathlib import Path

from nearkin.lab.measure import CommandFailed, Cost, RunPlan, pin_to_core, same_bytes, sha1_mbps, stored_bytes
from nearkin.lab.measurement_record import Corpus, LeftOut, MeasurementRecord, Row, cell, spread
from nearkin.lab.tools.base_tool import MissingPeer
from nearkin.lab.tools.tree_tools import TreeTool
from nearkin_shared.errors import NearkinError, PermanentError

COLUMNS = (("first", "first"), ("put", "later"), ("again", "again"), ("restore", "restore all"), ("file", "one file"))
"""Measured commands: the name in figures, and in tables."""
MEASURED = (
    *(f"{name}_{kind}" for name, _ in COLUMNS for kind in ("seconds", "cpu_seconds")),
    "first_bytes", "growth_bytes", "again_bytes", "stored_bytes", "put_peak_bytes", "get_peak_bytes",
)  # fmt: skip
"""The figures of a row. `put` is the mean of the versions behind the first, `growth` their mean stored bytes."""
FILES_READ = 5
"""Single files that are read, evenly spread over the names."""
_FAILURES = (OSError, ValueError, KeyError, subprocess.SubprocessError)


def run(
    corpora: Sequence[Corpus],
    tools: Sequence[type[TreeTool]],
    plan: RunPlan,
    *,
    work: Path | None,
    save: Callable[[MeasurementRecord], object] = lambda _: None,
) -> MeasurementRecord:
    """Measure every installed tool over every corpus, `plan.runs` times.

    work: a folder on the file system to measure; None: the temporary folder's. `save` is called with the record after
    each repetition. Raises PermanentError when nothing at all could be measured.
    """
    record = MeasurementRecord("trees", plan.command, plan.core, plan.runs, plan.warmups, corpora)
    record.details = {"peak_bytes_never_below": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}
    versions: dict[type[TreeTool], str] = {}
    with pin_to_core(plan.core):
        for tool in tools:
            try:
                versions[tool] = tool.version()
            except (MissingPeer, CommandFailed) as missing:
                record.left_out.append(LeftOut(tool.name, str(missing), tool.install))
        for corpus in corpora:
            found: dict[type[TreeTool], list[dict[str, float]]] = {tool: [] for tool in versions}
            before = list(record.rows)
            for number in range(-plan.warmups, plan.runs):
                sha1 = sha1_mbps()
                measured = _Repetition(corpus, list(versions), work, plan, number, record.left_out).run()
                if number < 0:
                    continue
                record.sha1_8k_mbps.append(sha1)
                for tool, figures in measured.items():
                    found[tool].append(figures)
                record.rows = before + [
                    _row(corpus, tool, versions[tool], values) for tool, values in found.items() if values
                ]
                save(record)
    if not record.rows:
        raise PermanentError(f"nothing was measured: {'; '.join(one.text() for one in record.left_out_once())}")
    return record


def _row(corpus: Corpus, tool: type[TreeTool], version: str, found: Sequence[dict[str, float]]) -> Row:
    figures = {name: spread(one.get(name) for one in found) for name in MEASURED}
    return Row(corpus.name, "trees", tool.name, tool.settings, version, tool.ours, figures)


class _Repetition:
    """One pass over all versions with all tools."""

    def __init__(
        self,
        corpus: Corpus,
        tools: Sequence[type[TreeTool]],
        work: Path | None,
        plan: RunPlan,
        number: int,
        left_out: list[LeftOut],
    ) -> None:
        self._corpus = corpus
        self._classes = tools
        self._work = work
        self._plan = plan
        self._number = number
        self._left_out = left_out
        self._costs: dict[TreeTool, dict[str, list[Cost]]] = {}
        self._kept: dict[TreeTool, list[int]] = {}

    def run(self) -> dict[type[TreeTool], dict[str, float]]:
        """Return the figures of each tool that did all of it."""
        # absolute: kopia refuses any other; resolved: borg and restic store a path as it is given
        folder = Path(tempfile.mkdtemp(prefix="nearkin-bench-trees-", dir=self._work)).resolve()
        tools: list[TreeTool] = []
        try:
            for kind in self._classes:
                (folder / kind.name).mkdir()
                tools.append(kind(folder / kind.name))
            for tool in tools:
                self._costs[tool], self._kept[tool] = {}, []
                self._attempt(tool, tool.create)
            self._back_up(tools, folder / "live")
            for tool in list(self._costs):
                self._attempt(tool, partial(self._restore, tool, folder / "live", folder / "restored"))
            return {type(tool): self._figures(tool) for tool in self._costs}
        finally:
            for tool in tools:
                with suppress(NearkinError, *_FAILURES):
                    tool.close()
            shutil.rmtree(folder, ignore_errors=True)

    def _attempt(self, tool: TreeTool, action: Callable[[], object]) -> None:
        """Do one step of a tool; leave the tool out from the first step on that fails."""
        if tool not in self._costs:
            return
        try:
            action()
        except (NearkinError, *_FAILURES) as err:
            why = str(err) if isinstance(err, NearkinError) else f"{type(err).__name__}: {err}"
            self._left_out.append(LeftOut(tool.name, f"{self._corpus.name}: {why}"))
            del self._costs[tool]

    def _back_up(self, tools: Sequence[TreeTool], live: Path) -> None:
        states = self._corpus.paths
        for version, state in enumerate([*states, states[-1]], start=1):
            self._report(version)
            update_tree(live, state)
            kind = "first" if version == 1 else "put" if version <= len(states) else "again"
            for tool in tools if (version + self._number) % 2 else tools[::-1]:
                self._attempt(tool, partial(self._put, tool, version, live, kind))

    def _put(self, tool: TreeTool, version: int, live: Path, kind: str) -> None:
        self._costs[tool].setdefault(kind, []).append(tool.put(version, live))
        rebuildable = sum(stored_bytes(tool.repository / name) for name in tool.inside)
        self._kept[tool].append(stored_bytes(tool.repository) - rebuildable)

    def _restore(self, tool: TreeTool, live: Path, target: Path) -> None:
        newest = len(self._corpus.paths)
        target.mkdir()
        try:
            self._costs[tool]["restore"] = [tool.get(newest, target)]
            difference = first_difference(live, tool.restored(target, live))
            if difference:
                raise CommandFailed(f"{tool.name}: version {newest} differs after the restore: {difference}")
        finally:
            shutil.rmtree(target)
        files = sorted(path for path in live.rglob("*") if path.is_file() and path.stat().st_size)
        for path in files[:: max(1, len(files) // FILES_READ)][:FILES_READ]:
            cost = tool.get_file(newest, live, str(path.relative_to(live)), target)
            self._costs[tool].setdefault("file", []).append(cost)
            if not same_bytes(path, target):
                raise CommandFailed(f"{tool.name}: {path.name} of version {newest} differs")
            target.unlink()

    def _figures(self, tool: TreeTool) -> dict[str, float]:
        costs, kept = self._costs[tool], self._kept[tool]
        last = len(self._corpus.paths)
        puts = [*costs["first"], *costs.get("put", [])]
        figures: dict[str, float] = {
            "first_bytes": kept[0],
            "again_bytes": kept[last] - kept[last - 1],
            "stored_bytes": kept[last - 1],
            "put_peak_bytes": max(cost.peak_bytes for cost in puts),
            "get_peak_bytes": costs["restore"][0].peak_bytes,
        }
        if last > 1:
            figures["growth_bytes"] = (kept[last - 1] - kept[0]) / (last - 1)
        for name, found in costs.items():
            middle = statistics.median if name == "file" else statistics.mean
            figures[f"{name}_seconds"] = middle([cost.seconds for cost in found])
            figures[f"{name}_cpu_seconds"] = middle([cost.cpu_seconds for cost in found])
        return figures

    def _report(self, version: int) -> None:
        if self._plan.steps:
            versions = len(self._corpus.paths) + 1
            done = (self._number + self._plan.warmups) * versions + version - 1
            total = (self._plan.runs + self._plan.warmups) * versions
            self._plan.steps(done, total, f"{self._corpus.name}: version {version}")


def update_tree(live: Path, state: Path) -> None:
    """Make `live` equal to `state`; files that are equal already are not touched."""
    live.mkdir(parents=True, exist_ok=True)
    wanted = {path.name: path for path in state.iterdir()}
    for path in live.iterdir():
        other = wanted.get(path.name)
        if other is None or other.is_dir() != path.is_dir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    for name, path in sorted(wanted.items()):
        target = live / name
        if path.is_dir():
            update_tree(target, path)
        elif not target.exists() or not same_bytes(path, target):
            shutil.copyfile(path, target)


def first_difference(one: Path, other: Path) -> str | None:
    """Return the first path at which two trees differ in names or bytes, or None."""
    names = sorted({*os.listdir(one), *(os.listdir(other) if other.is_dir() else [])})
    for name in names:
        first, second = one / name, other / name
        if not first.exists() or not second.exists() or first.is_dir() != second.is_dir():
            return str(first)
        if first.is_dir():
            if deeper := first_difference(first, second):
                return deeper
        elif not same_bytes(first, second):
            return str(first)
    return None


def markdown(record: MeasurementRecord) -> list[str]:
    """Return the tables of every corpus, each with Nearkin's figures by the best peer's."""
    return list(chain.from_iterable(_corpus_lines(record, corpus) for corpus in record.corpora))


def _corpus_lines(record: MeasurementRecord, corpus: Corpus) -> list[str]:
    rows = [row for row in record.rows if row.corpus == corpus.name]
    titles = [title for _, title in COLUMNS]
    lines = [
        f"## {corpus.name}: {len(corpus.paths)} states of {corpus.logical_bytes / len(corpus.paths) / 1e6:.1f} MB",
        "",
        "Seconds of one command by the clock, file system synced; in brackets seconds of processor time. `later`: mean"
        " of the versions behind the first; `one file`: the median of a few. Growth: stored bytes of a later version.",
        "",
        f"| tool | {' | '.join(titles)} | first, MB | growth, kB | again, kB | memory put / get, MB |",
        f"|{'---|' * (len(titles) + 5)}",
    ]
    for row in rows:
        times = [_times(row, name) for name, _ in COLUMNS]
        memory = f"{_plain(row, 'put_peak_bytes', 1e6, 0)} / {_plain(row, 'get_peak_bytes', 1e6, 0)}"
        stored = [_plain(row, "first_bytes", 1e6, 2), _plain(row, "growth_bytes", 1e3, 1)]
        cells = [*times, *stored, _plain(row, "again_bytes", 1e3, 1), memory]
        lines.append(f"| {f'**{row.tool}**' if row.ours else row.tool} | {' | '.join(cells)} |")
    lines += ["", *(f"- {row.tool}: {row.version}; {row.settings}" for row in rows)]
    return [*lines, *_by_best(rows), ""]


def _times(row: Row, name: str) -> str:
    return f"{cell(row.figures[f'{name}_seconds'], 2)} ({_plain(row, f'{name}_cpu_seconds', 1, 2)})"


def _plain(row: Row, name: str, unit: float, digits: int) -> str:
    figure = row.figures[name]
    return "-" if figure is None else f"{figure.median / unit:.{digits}f}"


_COMPARED = (
    ("growth", "growth_bytes"),
    *((f"{title}, {word}", f"{name}_{kind}") for kind, word in (("seconds", "clock"), ("cpu_seconds", "processor"))
      for name, title in COLUMNS),
)  # fmt: skip


def _by_best(rows: Sequence[Row]) -> list[str]:
    """Return a table of Nearkin's figures relative to the best tool; below 1 is better."""
    mine = [row for row in rows if row.ours]
    others = [row for row in rows if not row.ours]
    if not mine or not others:
        return []
    lines = ["", "| | best other tool | nearkin by it |", "|---|---|---|"]
    for title, name in _COMPARED:
        known = [(figure.median, row.tool) for row in others if (figure := row.figures[name]) is not None]
        own = mine[0].figures[name]
        if known and own is not None and min(known)[0]:
            best, tool = min(known)
            lines.append(f"| {title} | {tool} | {own.median / best:.2f} |")
    return lines

"""Record the measurements of a suite.

MB is 10^6 bytes, speeds are MB/s, ratios are plain numbers. A figure that a tool cannot have is None, never 0.

Invariant: a figure keeps every measured value; medians are computed from them, once.
"""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from nearkin.lab.measure import stored_bytes
from nearkin_shared.utils.frozen import frozen
from nearkin_shared.utils.terminal import printable

RECORD_FORMAT = 1
"""Of the JSON; a field that changes its meaning raises it, a new one does not."""


@frozen
class Spread:
    """One figure: its values in the order they were measured, at least one."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        """The middle value; of an even number, the mean of the middle two."""
        return statistics.median(self.values)

    @property
    def low(self) -> float:
        """The smallest value."""
        return min(self.values)

    @property
    def high(self) -> float:
        """The largest value."""
        return max(self.values)

    def as_json(self) -> dict[str, object]:
        """Return it as the JSON has it."""
        return {"median": self.median, "low": self.low, "high": self.high, "values": list(self.values)}

    def text(self, digits: int = 0) -> str:
        """Return the median, with half the range as a percentage if there are several values."""
        if len(self.values) == 1 or not self.median or self.low == self.high:
            return f"{self.median:.{digits}f}"
        return f"{self.median:.{digits}f} ±{50 * (self.high - self.low) / self.median:.0f} %"


Figures = Mapping[str, Spread | None]


def spread(values: Iterable[float | None]) -> Spread | None:
    """Return the figure of these values, None where there is none."""
    known = tuple(float(value) for value in values if value is not None)
    return Spread(known) if known else None


def cell(figure: Spread | None, digits: int = 0) -> str:
    """Return a figure as a table has it: `-` where a tool cannot have it."""
    return "-" if figure is None else figure.text(digits)


def table_cell_name(name: str) -> str:
    """Return a name as a table has it: one line, and no `|` of it ends a cell."""
    return printable(name).replace("|", "\\|")


def speed(figure: Spread | None) -> str:
    """Return a speed as a table has it, with a decimal where it is below 10."""
    return cell(figure, 0 if figure is None or figure.median >= 10 else 1)


@frozen
class Row:
    """One tool with its settings over one corpus.

    `group` separates rows that must not be compared with one another.
    """

    corpus: str
    group: str
    tool: str
    settings: str
    version: str
    ours: bool
    figures: Figures

    def as_json(self) -> dict[str, object]:
        """Return it as the JSON has it."""
        figures = {name: None if figure is None else figure.as_json() for name, figure in self.figures.items()}
        return {
            "corpus": self.corpus,
            "group": self.group,
            "tool": self.tool,
            "settings": self.settings,
            "version": self.version,
            "ours": self.ours,
            "figures": figures,
        }


@frozen
class LeftOut:
    """A tool that did not run: why, and what to do about it."""

    tool: str
    why: str
    remedy: str = ""

    def text(self) -> str:
        """Return it as one line."""
        return f"{self.tool}: {self.why}{f'; {self.remedy}' if self.remedy else ''}"

    def as_json(self) -> dict[str, object]:
        """Return it as the JSON has it."""
        return {"tool": self.tool, "why": self.why, "remedy": self.remedy}


@frozen
class Corpus:
    """Files, or folders, in the order they are taken, oldest first; at least one, none empty."""

    name: str
    paths: Sequence[Path]

    @property
    def logical_bytes(self) -> int:
        """The lengths of all files, summed."""
        return sum(stored_bytes(path) for path in self.paths)

    def as_json(self) -> dict[str, object]:
        """Return it as the JSON has it."""
        names = [printable(path.name) for path in self.paths]  # lone surrogates are no JSON to most readers
        return {"name": self.name, "files": names, "logical_bytes": self.logical_bytes}


def machine_json() -> dict[str, object]:
    """Return the conditions of the figures: processor, cores, system, versions, load."""
    from nearkin import __version__
    from nearkin_shared.kernels.selection import CHOSEN

    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    return {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "architecture": platform.machine(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "nearkin": __version__,
        "kernels": CHOSEN,
        "load_1_minute": load,
    }


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or "unknown")


@dataclass(slots=True)
class MeasurementRecord:
    """One run of a room."""

    room: str
    command: str
    core: int | None
    runs: int
    warmups: int
    corpora: Sequence[Corpus]
    rows: list[Row] = field(default_factory=list)
    left_out: list[LeftOut] = field(default_factory=list)
    sha1_8k_mbps: list[float] = field(default_factory=list)
    """One stream of OpenSSL's SHA-1 over 8 KiB blocks, measured once per repetition."""
    details: dict[str, object] = field(default_factory=dict)
    """The JSON values that only this suite has."""
    machine: dict[str, object] = field(default_factory=machine_json)

    def left_out_once(self) -> list[LeftOut]:
        """Return the peers that did not run, each reason once.

        A tool is searched for again for each corpus and in each repetition.
        """
        return list(dict.fromkeys(self.left_out))

    def as_json(self) -> dict[str, object]:
        """Return the whole record as JSON values."""
        sha1 = spread(self.sha1_8k_mbps)
        return {
            "format": RECORD_FORMAT,
            "room": self.room,
            "command": self.command,
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": self.machine,
            "core": self.core,
            "runs": self.runs,
            "warmups": self.warmups,
            "corpora": [corpus.as_json() for corpus in self.corpora],
            "sha1_8k_mbps": None if sha1 is None else sha1.as_json(),
            "rows": [row.as_json() for row in self.rows],
            "left_out": [tool.as_json() for tool in self.left_out_once()],
            **self.details,
        }

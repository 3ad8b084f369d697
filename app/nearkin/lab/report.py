"""Write a record as files.

FOLDER/SUITE.md, FOLDER/SUITE.json and the charts FOLDER/SUITE.svg and .png; a later run of a suite replaces them.

Invariant: a folder that cannot be written is refused before anything is measured; each file appears complete.
"""

from __future__ import annotations

import importlib.util
import json
import os
import tempfile
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from nearkin.lab.measurement_record import MeasurementRecord, Spread
from nearkin_shared.errors import BadInput, ConfigError, StoreUnavailable

KINDS = ("svg", "png")
EXTRA = "pip install 'nearkin[bench]'"


def check_folder(folder: Path, option: str = "--out") -> None:
    """Make the folder if need be. Raises BadInput where no file can be written to it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise BadInput(f'{option} "{folder}": {error.strerror}; name a folder that can be written to') from error


def chart_kinds(words: Sequence[str]) -> tuple[tuple[str, ...], str | None]:
    """Return the kinds of chart to draw, and what to say where none can be drawn.

    words: `svg`, `png`, `none`; empty: both where matplotlib is installed. Raises ConfigError where a kind is asked for
    and it is not.
    """
    if "none" in words:
        return (), None
    if importlib.util.find_spec("matplotlib") is not None:
        return tuple(dict.fromkeys(words)) or KINDS, None
    if words:
        raise ConfigError(f"--chart {words[0]}: matplotlib is not installed; {EXTRA}, or --chart none")
    return (), f"no chart: matplotlib is not installed; {EXTRA}"


def markdown(record: MeasurementRecord) -> str:
    """Return the tables, and above them what they depend on."""
    # the room that ran is imported already; the others would only add to the memory that no child's peak is below
    tables: list[str] = import_module(f"nearkin.lab.suites.{record.room}_suite").markdown(record)
    machine = record.machine
    core = "not pinned" if record.core is None else f"core {record.core} of {machine['cores']}"
    load = machine["load_1_minute"]
    sha1 = Spread(tuple(record.sha1_8k_mbps))
    lines = [
        f"# nearkin bench {record.room}",
        "",
        f"    {record.command}",
        "",
        f"{machine['cpu']}, {core}{f', load {load:.1f} when it began' if isinstance(load, float) else ''}; "
        f"{machine['system']}, Python {machine['python']}, "
        f"nearkin {machine['nearkin']} ({machine['kernels']} kernels).",
        f"{record.warmups} to warm up, then {record.runs} that count: medians, ± half the range. MB is 10^6 bytes.",
        f"One stream of OpenSSL's SHA-1 over 8 KiB blocks, through hashlib: {sha1.median:.0f} MB/s"
        f" ({sha1.low:.0f} to {sha1.high:.0f}).",
        "",
        *tables,
    ]
    if record.left_out:
        lines += ["Left out:", "", *(f"- {one.text()}" for one in record.left_out_once()), ""]
    return "\n".join(lines)


def write(record: MeasurementRecord, folder: Path, kinds: Sequence[str]) -> list[Path]:
    """Write the table, the JSON and the charts; return their paths.

    Charts of an earlier run are removed. Raises StoreUnavailable, such as on a full disk.
    """
    from nearkin.lab import report_charts

    drawn = report_charts.draw(record, kinds) if kinds else {}
    contents = {
        f"{record.room}.md": markdown(record).encode(errors="backslashreplace"),
        f"{record.room}.json": (json.dumps(record.as_json(), indent=1) + "\n").encode(),
        **{f"{record.room}.{kind}": content for kind, content in drawn.items()},
    }
    for name in (f"{record.room}.{kind}" for kind in KINDS):
        if name not in contents:
            _remove(folder / name)
    return [_write(folder / name, content) for name, content in contents.items()]


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise StoreUnavailable(f"{path}: {error.strerror}") from error


def _write(path: Path, content: bytes) -> Path:
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        try:
            partial.write_bytes(content)
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise StoreUnavailable(f"{path}: {error.strerror}") from error
    return path

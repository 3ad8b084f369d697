"""Print the results of commands.

A record's JSON form is in `nearkin_shared.results_json`; reports that only a local store gives have theirs here.

Invariant: with `--json` stdout is exactly one JSON value (with `--progress` one a line); keys never steer the terminal.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC
from typing import TYPE_CHECKING

from nearkin.cli.session import is_quiet
from nearkin_shared.results import HOST, PATHS, TAGS
from nearkin_shared.results_json import info_json, kinds
from nearkin_shared.savings_table import human_bytes, ledger_table, plural
from nearkin_shared.utils.terminal import printable, to_json

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console

    from nearkin_shared.reading.read_stats import ReadCosts
    from nearkin_shared.results import (
        Damage,
        Deletion,
        Explanation,
        IndexReport,
        Ledger,
        RebuildReport,
        SegmentExplained,
        Stats,
        VersionInfo,
    )


def print_version(*, as_json: bool) -> None:
    """Print the versions of Nearkin and Python, and the kernels in use.

    Raises ConfigError if the configured kernels do not exist.
    """
    from platform import python_version

    from nearkin import __version__
    from nearkin_shared.kernels.selection import CHOSEN

    if as_json:
        print_json({"version": __version__, "python": python_version(), "kernels": CHOSEN})
    else:
        print_line(f"nearkin {__version__} (Python {python_version()}, {CHOSEN} kernels)")


WRAPPED_CHARACTERS_MIN = 16
"""Narrowest column in which wrapped text is readable."""
COLUMN_MARGIN = 3
"""Characters between two columns of a table."""
UNREADABLE_NAMED = 10
"""A listing's one line of what it left out names so many; `verify` names all."""


def print_line(line: str) -> None:
    """Print one line for people to stdout."""
    print(line)


def report(line: str) -> None:
    """Print one line about the command's effect to stdout; --quiet omits it."""
    if not is_quiet():
        print_line(line)


def notice(line: str) -> None:
    """Print one line for people to stderr; --quiet omits it."""
    if not is_quiet():
        warn(line)


def warn(line: str) -> None:
    """Print one line about a failure to stderr, with --quiet too."""
    to_stderr(f"nearkin: {line}")


def to_stderr(line: str) -> None:
    """Print one line to stderr, or nowhere if stderr is closed.

    With a closed stderr print() would write to stdout, which is for data.
    """
    if sys.stderr is not None:
        print(line, file=sys.stderr)


def print_json(value: object) -> None:
    """Print one JSON value by `to_json`; ASCII only, so that no terminal or locale changes it."""
    print(to_json(value, indent=2))


def console() -> Console:
    """Return a console for tables on stdout.

    Nothing is taken for markup, and a pipe gets lines of any width. A pipe whose reader has ended raises
    BrokenPipeError, as print() does, in place of rich's SystemExit(1).
    """
    from rich.console import Console

    class Tables(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError

    terminal = sys.stdout is not None and sys.stdout.isatty()  # None: it was closed, and print() prints nothing
    width = None if terminal else 10_000
    return Tables(markup=False, highlight=False, emoji=False, width=width)


def print_table(
    names: Sequence[str], rows: Sequence[Sequence[str]], *, whole: Iterable[str] = (), right: Iterable[str] = ()
) -> None:
    """Print rows under column names; a cell is never cut.

    Columns `whole` stay on one line, others wrap; those `right` are aligned to the right. If a terminal leaves less
    than WRAPPED_CHARACTERS_MIN to each wrapped column, a row is printed as a line per cell instead.
    """
    from rich.box import SIMPLE
    from rich.table import Table

    screen, unbroken, aligned = console(), {*whole}, {*right}
    widths = {name: max(map(len, (name, *(row[at] for row in rows)))) for at, name in enumerate(names)}
    fixed = sum(widths[name] for name in unbroken) + COLUMN_MARGIN * len(names)
    wrapped = [name for name in names if name not in unbroken]
    least = sum(min(widths[name], WRAPPED_CHARACTERS_MIN) for name in wrapped)
    if fixed + least > screen.width:
        for row in rows:
            lines = Table.grid("", "", padding=(0, 1))
            lines.columns[0].no_wrap, lines.columns[1].overflow = True, "fold"
            for name, cell in zip(names, row, strict=True):
                lines.add_row(name, cell)
            screen.print(lines)
            screen.print("")
        return
    table = Table(box=SIMPLE, pad_edge=False)
    for name in names:
        table.add_column(
            name,
            no_wrap=name in unbroken,
            overflow="fold",
            justify="right" if name in aligned else "left",
            min_width=widths[name] if name in unbroken else None,
        )
    for row in rows:
        table.add_row(*row)
    screen.print(table)


def print_ledger(ledger: Ledger, seconds: float, title: str) -> None:
    """Print one line and the ledger below it as a table."""
    print_line(title)
    console().print(ledger_table(ledger, seconds))


def version_json(info: VersionInfo) -> dict[str, object]:
    """Convert a version to JSON, with its tags, host and paths."""
    return {**info_json(info), "tags": list(info.tags), "host": info.host or None, "paths": list(info.paths)}


def info_lines(info: VersionInfo) -> Iterable[str]:
    """Yield a version for people, a field a line."""
    for name, value in info_json(info).items():
        if name == "metadata":
            shown = dict(_source_texts(info))
            yield from (f"{field:<12}{text}" for field, text in shown.items())
            for meta_name, meta_value in info.metadata.items():
                if meta_name not in shown:
                    yield f"{'meta':<12}{printable(f'{meta_name}={meta_value}')}"
        elif name == "size_bytes":
            yield f"{'size':<12}{info.size_bytes:,} bytes"
        elif name == "retain_until" and value is not None:
            yield f"{'retained':<12}until {value}"
        elif value is not None and value is not False:
            yield f"{name:<12}{printable(str(value))}"


def version_line(info: VersionInfo) -> str:
    """Return a version as one line of `ls`; the key comes last, since it alone has no width."""
    created = info.created.astimezone(UTC).isoformat()[:19]  # strftime takes four times as long
    return f"{created}Z  {human_bytes(info.size_bytes):>8}  v{info.version:<4}  {printable(info.key)}"


def _source_texts(info: VersionInfo) -> Iterable[tuple[str, str]]:
    """Yield tags, host and paths of a version, those that it has."""
    for name, text in ((TAGS, ", ".join(info.tags)), (HOST, info.host), (PATHS, " ".join(info.paths))):
        if text:
            yield name, printable(text)


def described_line(info: VersionInfo) -> str:
    """Return a version as one line of `ls --versions`; tags, host and paths come last."""
    texts = "; ".join(f"{name} {text}" for name, text in _source_texts(info))
    return f"{version_line(info)}  # {texts}" if texts else version_line(info)


def deletion_line(deletion: Deletion) -> str:
    """Return a deleted version as one line of `ls --deleted`, with fields of any width last."""
    deleted, until = (
        moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ") for moment in (deletion.deleted, deletion.until)
    )
    who = printable(deletion.who) or "-"
    reason = f"  # {printable(deletion.reason)}" if deletion.reason else ""
    return f"{deleted}  until {until}  v{deletion.version:<4}  {who}  {printable(deletion.key)}{reason}"


def unreadable(broken: Sequence[Damage]) -> str:
    """Return one line that names the first few unreadable versions and counts the rest."""
    names = [f"{key!r} version {version}" for damage in broken for key, version in damage.versions]
    more = f" and {len(names) - UNREADABLE_NAMED} more" if len(names) > UNREADABLE_NAMED else ""
    return f"{', '.join(names[:UNREADABLE_NAMED])}{more} cannot be read: {broken[0].problem}: run `nearkin verify`"


def describe_index(report: IndexReport, chunks: int) -> str:
    """Describe an index of so many chunks."""
    memory = "in the page cache" if report.memory_bytes is None else f"{human_bytes(report.memory_bytes)} of memory"
    return f"{report.kind}: {plural(chunks, 'chunk')}, {memory}, expected loss {report.missed_share:.2%}"


def print_stats(stats: Stats, index_folder: Path | None = None) -> None:
    """Print a store's sums for people; `index_folder` of a local store."""
    from rich.box import SIMPLE
    from rich.table import Table

    held = f"{plural(stats.versions, 'version')} of {plural(stats.keys, 'key')}"
    if stats.deleted_versions:
        held += f" (and {plural(stats.deleted_versions, 'version')} deleted, {human_bytes(stats.deleted_bytes)})"
    print_ledger(stats.ledger, stats.seconds, f"{held} in {plural(stats.containers, 'container')}")
    if stats.checkpoints:
        print_line(
            f"checkpoints  {stats.checkpoints:,} of unfinished backups with {human_bytes(stats.checkpoint_bytes)}, "
            "counted as stored bytes only"
        )
    parts = Table(box=SIMPLE, pad_edge=False)
    parts.add_column("where the stored bytes lie")
    parts.add_column("bytes", justify="right")
    parts.add_column("share", justify="right")
    for name, part_bytes in sorted(stats.parts.items(), key=lambda part: -part[1]):
        share = part_bytes / stats.ledger.stored_bytes if stats.ledger.stored_bytes else 0.0
        parts.add_row(name.replace("_", " "), human_bytes(part_bytes), f"{share:.1%}")
    console().print(parts)
    lookups = stats.base_cache_hits + stats.base_cache_misses
    print_line(f"metadata     {human_bytes(stats.metadata_bytes)}{_by_chunk(stats)}")
    where = "" if index_folder is None else f" in {printable(str(index_folder))}"
    print_line(f"index        {human_bytes(stats.index_bytes)}{where} (can be rebuilt; not counted as stored)")
    if stats.index is not None:
        print_line(f"             {describe_index(stats.index, stats.ledger.raw_chunks + stats.ledger.delta_chunks)}")
    print_line(f"segments     {stats.segments:,}{_sketches(stats.sketches)}")
    depths = (f"{depth}: {plural(count, 'chunk')}" for depth, count in sorted(stats.depths.items()))
    print_line(f"depths       {', '.join(depths) or '-'}")
    _say_found(stats.found_by)
    if lookups:  # of the process that was asked: a command of its own has done none
        print_line(f"base cache   {stats.base_cache_hits:,} of {lookups:,} lookups hit")


def _by_chunk(stats: Stats) -> str:
    """Return what metadata a chunk has, of the kinds of chunks that there are."""
    logical, fresh = stats.metadata_bytes_per_chunk, stats.metadata_bytes_per_fresh_chunk
    names = [f"{logical:.1f} B a logical chunk"] * bool(logical) + [f"{fresh:.1f} B a fresh one"] * bool(fresh)
    return f": {', '.join(names)}" if names else ""


def costs_json(costs: ReadCosts) -> dict[str, int]:
    """Return what a get had to read as JSON has it."""
    return {
        "containers": len(costs.containers),
        "directory_reads": costs.directory_reads,
        "block_reads": costs.block_reads,
        "blocks_decoded": costs.blocks_decoded,
        "bytes": costs.bytes_read,
    }


def costs_line(costs: ReadCosts) -> str:
    """Return what a get had to read, for people."""
    return (
        f"read {human_bytes(costs.bytes_read)} of {plural(len(costs.containers), 'container')}: "
        f"{plural(costs.directory_reads, 'directory', 'directories')}, {plural(costs.block_reads, 'block')}"
    )


def rebuild_json(report: RebuildReport) -> dict[str, object]:
    """Return an index rebuild as JSON has it."""
    return {
        "containers": report.containers,
        "chunks": report.chunks,
        "segments": report.segments,
        "versions": report.versions,
        "skipped": list(report.skipped),
        "seconds": report.seconds,
    }


def rebuild_lines(report: RebuildReport) -> Iterable[str]:
    """Yield an index rebuild for people."""
    for name in report.skipped:
        yield f"skipped, cannot be read: {printable(name)}"
    read = ", ".join(
        (plural(report.containers, "container"), plural(report.segments, "segment"), plural(report.chunks, "chunk"))
    )
    yield f"index rebuilt from {read}, {plural(report.versions, 'version')} in {report.seconds:.2f} s"


def print_explanation(explanation: Explanation, *, segments: bool) -> None:
    """Print how a version is kept for people: with `segments` a line a segment, then the sum."""
    from rich.box import SIMPLE
    from rich.table import Table

    if segments:
        print_line("segment      offset     length  chunks   dup  zero  delta   raw  stored about")
        for segment in explanation.segments:
            print_line(_segment_line(segment))
        print_line("")
    info = explanation.info
    table = Table(
        title=f"{printable(info.key)} version {info.version}", title_justify="left", box=SIMPLE, pad_edge=False
    )
    table.add_column("kept as")
    for name in ("chunks", "bytes", "stored about"):
        table.add_column(name, justify="right")
    for kind, (count, length_bytes, stored_bytes) in kinds(explanation):
        table.add_row(kind, f"{count:,}", human_bytes(length_bytes), human_bytes(stored_bytes))
    console().print(table)
    known = sum(segment.known for segment in explanation.segments)
    sketches = _sketches(Counter(segment.sketch for segment in explanation.segments if segment.sketch))
    print_line(f"segments     {len(explanation.segments):,}, of them {known:,} already stored{sketches}")
    _say_found(explanation.found_by)


def _sketches(sketches: Mapping[str, int]) -> str:
    return "".join(f"; {count:,} by {printable(name)}" for name, count in sorted(sketches.items()))


def _say_found(found_by: Mapping[str, int]) -> None:
    """Print which policy found how many bases; where super-features did, each."""
    from nearkin_shared.results import by_policy, policy_of

    found, names = sum(found_by.values()), []
    for policy, count in by_policy(found_by).items():
        parts = [f"{name} {found_by[name]:,}" for name in sorted(found_by) if policy_of(name) == policy != name]
        share = f"{count / found:.1%}{': ' if parts else ''}{', '.join(parts)}"
        names.append(f"{policy} {count:,} ({share})")
    if names:
        print_line(f"bases found  {printable(', '.join(names))}")


def _segment_line(segment: SegmentExplained) -> str:
    counts = dict.fromkeys(("duplicate", "zero", "delta", "raw"), 0)
    stored_bytes = 0
    for chunk in segment.chunks:
        counts[chunk.kind] = counts.get(chunk.kind, 0) + 1
        stored_bytes += chunk.stored_estimate_bytes if chunk.kind in ("delta", "raw") else 0
    return (
        f"{segment.sequence:>7} {segment.offset:>11} {segment.length_bytes:>10} {len(segment.chunks):>7} "
        f"{counts['duplicate']:>5} {counts['zero']:>5} {counts['delta']:>6} {counts['raw']:>5}  "
        f"{'already stored' if segment.known else human_bytes(stored_bytes)}"
    )

"""Measure whole stores.

Versions are put oldest first; the newest and the oldest are read back, timed; the newest is put again, all of it
known; then every other version is read back too, not timed.

Invariant: one run, one core, one file system; every version is read back and compared.
"""

from __future__ import annotations

import resource
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import chain
from pathlib import Path

from nearkin.lab.measure import (
    CommandFailed,
    Cost,
    RunPlan,
    pin_to_core,
    read_through,
    same_bytes,
    sha1_mbps,
    stored_bytes,
)
from nearkin.lab.measurement_record import Corpus, LeftOut, MeasurementRecord, Row, Spread, cell, speed, spread
from nearkin.lab.tools.base_tool import MissingPeer, Peer
from nearkin_shared.errors import NearkinError, PermanentError

MEASURED = (
    "put_mbps", "first_put_mbps", "later_put_mbps", "put_again_mbps", "get_newest_mbps", "get_oldest_mbps",
    "put_cpu_mbps", "put_again_cpu_mbps", "get_newest_cpu_mbps", "get_oldest_cpu_mbps",
    "put_seconds", "upkeep_seconds", "sync_seconds", "put_peak_bytes", "get_peak_bytes", "stored_bytes", "aside_bytes",
    "put_again_bytes", "reduction", "put_again_by_sha1",
)  # fmt: skip
"""The figures of a row. Speeds are logical bytes by wall seconds, with the start of the process and `sync`; `cpu`: by
seconds of processor time, which is more reliable if the machine has other work to do.
"""


def run(
    corpora: Sequence[Corpus],
    peers: Sequence[type[Peer]],
    plan: RunPlan,
    *,
    work: Path | None,
    upkeep_every: int | None = None,
    save: Callable[[MeasurementRecord], object] = lambda _: None,
) -> MeasurementRecord:
    """Measure every installed peer over every corpus, `plan.runs` times.

    work: a folder on the file system to measure; None: the temporary folder's. Before the first repetition every
    program is started once and every file is read once; `plan.warmups` whole repetitions are not counted.
    `upkeep_every`: after so many versions each store does its maintenance, which no put counts. `save` is called with
    the record after each repetition: a whole run takes long, and an early end must not lose all of it. Raises
    PermanentError when nothing at all could be measured.
    """
    record = MeasurementRecord("store", plan.command, plan.core, plan.runs, plan.warmups, corpora)
    floor_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    record.details = {"peak_bytes_never_below": floor_bytes}
    with pin_to_core(plan.core):
        versions = _installed_peers(peers, record)
        repetitions = range(-plan.warmups, plan.runs)
        total, done = len(corpora) * len(versions) * len(repetitions), 0
        for corpus in corpora:
            read_through(corpus.paths)
            found: dict[type[Peer], list[dict[str, float | None]]] = {peer: [] for peer in versions}
            before = list(record.rows)
            for number in repetitions:  # all stores in each, so that a slow minute affects every store
                sha1 = sha1_mbps()
                if number >= 0:
                    record.sha1_8k_mbps.append(sha1)
                for peer in versions:
                    if plan.steps:
                        plan.steps(done, total, f"{corpus.name}: {peer.name}")
                    done += 1
                    try:
                        figures = measure(peer, corpus, work, upkeep_every)
                    except (CommandFailed, MissingPeer) as error:
                        record.left_out.append(LeftOut(peer.name, f"{corpus.name}: {error}"))
                        continue
                    again = figures["put_again_mbps"]
                    figures["put_again_by_sha1"] = None if again is None else again / sha1
                    if number >= 0:
                        found[peer].append(figures)
                rows = [_row(corpus, peer, versions[peer], figures) for peer, figures in found.items() if figures]
                record.rows = before + rows
                if rows:
                    save(record)
    if not record.rows:
        raise PermanentError(f"nothing was measured: {'; '.join(one.text() for one in record.left_out_once())}")
    return record


def _installed_peers(peers: Sequence[type[Peer]], record: MeasurementRecord) -> dict[type[Peer], str]:
    versions: dict[type[Peer], str] = {}
    for peer in peers:
        try:
            versions[peer] = peer.version()
        except (MissingPeer, CommandFailed) as missing:
            record.left_out.append(LeftOut(peer.name, str(missing), peer.install))
    return versions


def _row(corpus: Corpus, peer: type[Peer], version: str, found: list[dict[str, float | None]]) -> Row:
    figures = {name: spread(one[name] for one in found) for name in MEASURED}
    return Row(corpus.name, "store", peer.name, peer.settings, version, peer.ours, figures)


def measure(
    peer_class: type[Peer], corpus: Corpus, work: Path | None, upkeep_every: int | None
) -> dict[str, float | None]:
    """Put every version, get the newest and oldest, put the newest again, and read all back.

    Raises CommandFailed when a command fails or a version differs after a restore, MissingPeer.
    """
    sources = corpus.paths
    # absolute: kopia refuses any other
    folder = Path(tempfile.mkdtemp(prefix=f"nearkin-bench-{peer_class.name}-", dir=work)).absolute()
    try:
        with ExitStack() as ends:
            peer = peer_class(folder)
            peer.create()
            ends.callback(peer.close)
            return _through(peer, sources, upkeep_every)
    except NearkinError:
        raise
    except (OSError, ValueError, KeyError, subprocess.SubprocessError) as error:  # its files or answers are amiss
        raise CommandFailed(f"{peer_class.name}: {type(error).__name__}: {error}") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _through(peer: Peer, sources: Sequence[Path], upkeep_every: int | None) -> dict[str, float | None]:
    sizes = [source.stat().st_size for source in sources]
    puts, upkeep = list[Cost](), list[Cost]()
    for number, source in enumerate(sources if peer.appends else (), start=1):
        puts.append(_put(peer, number, source))
        if upkeep_every and number % upkeep_every == 0 and (cost := peer.upkeep()):
            upkeep.append(cost)
    if not peer.appends:
        puts.append(peer.put_history(sources))
    stored = _kept_bytes(peer)
    target = peer.folder / "restored"
    gets: dict[int, Cost] = {}
    for number in dict.fromkeys([len(sources), 1]):  # the newest, then the oldest
        gets[number] = _got(peer, number, sources[number - 1], target)
    aside = stored_bytes(peer.folder) - stored
    again = _put(peer, len(sources) + 1, sources[-1]) if peer.appends else None
    again_bytes = _kept_bytes(peer) - stored if again else None
    for number in range(2, len(sources)):
        _got(peer, number, sources[number - 1], target)
    seconds = sum(cost.seconds for cost in puts)
    later_seconds = sum(cost.seconds for cost in puts[1:])
    return {
        "put_mbps": sum(sizes) / seconds / 1e6,
        "first_put_mbps": sizes[0] / puts[0].seconds / 1e6 if peer.appends else None,
        "later_put_mbps": sum(sizes[1:]) / later_seconds / 1e6 if later_seconds else None,
        "put_again_mbps": sizes[-1] / again.seconds / 1e6 if again else None,
        "get_newest_mbps": sizes[-1] / gets[len(sources)].seconds / 1e6,
        "get_oldest_mbps": sizes[0] / gets[1].seconds / 1e6,
        "put_cpu_mbps": sum(sizes) / _cpu_seconds(*puts) / 1e6,
        "put_again_cpu_mbps": sizes[-1] / _cpu_seconds(again) / 1e6 if again else None,
        "get_newest_cpu_mbps": sizes[-1] / _cpu_seconds(gets[len(sources)]) / 1e6,
        "get_oldest_cpu_mbps": sizes[0] / _cpu_seconds(gets[1]) / 1e6,
        "put_seconds": seconds,
        "upkeep_seconds": sum(cost.seconds for cost in upkeep) if upkeep else None,
        "sync_seconds": sum(cost.sync_seconds for cost in puts),
        "put_peak_bytes": max(cost.peak_bytes for cost in puts),
        "get_peak_bytes": max(cost.peak_bytes for cost in gets.values()),
        "stored_bytes": stored,
        "aside_bytes": aside,
        "put_again_bytes": again_bytes,
        "reduction": sum(sizes) / stored,
    }


def _cpu_seconds(*costs: Cost) -> float:
    return max(1e-6, sum(cost.cpu_seconds for cost in costs))  # a clock that ticks in ms may not have moved


def _kept_bytes(peer: Peer) -> int:
    rebuildable = sum(stored_bytes(peer.repository / name) for name in peer.inside)
    return stored_bytes(peer.repository) - rebuildable


def _put(peer: Peer, number: int, source: Path) -> Cost:
    read_through([source])  # a machine short of memory, or one that gives it back to its host, may have dropped it
    return peer.put(number, source)


def _got(peer: Peer, number: int, source: Path, target: Path) -> Cost:
    cost = peer.get(number, target)
    if not same_bytes(source, target):
        raise CommandFailed(f"{peer.name}: version {number} differs after the restore")
    target.unlink()
    return cost


def markdown(record: MeasurementRecord) -> list[str]:
    """Return the tables of every corpus, each with Nearkin's figures by the best peer's."""
    return list(chain.from_iterable(_corpus_lines(record, corpus) for corpus in record.corpora))


def _corpus_lines(record: MeasurementRecord, corpus: Corpus) -> list[str]:
    rows = [row for row in record.rows if row.corpus == corpus.name]
    lines = [
        f"## {corpus.name}: {len(corpus.paths)} versions, {corpus.logical_bytes / 1e6:.1f} MB",
        "",
        "Speeds in MB/s of logical data, file system synced. Memory is the peak of one process, never below the"
        f" {_never_below(record) / 1e6:.0f} MB of the one that started it. `-`: it has none.",
        "",
        "| store | put all | put first | put later | put again | get newest | get oldest | memory put / get, MB"
        " | stored, MB | aside, MB | reduction |",
        f"|{'---|' * 11}",
    ]
    for row in rows:
        speeds = " | ".join(speed(row.figures[name]) for name in MEASURED[:6])
        memory = " / ".join(_megabytes(row, name, 0) for name in ("put_peak_bytes", "get_peak_bytes"))
        kept = " | ".join(_megabytes(row, name, 2) for name in ("stored_bytes", "aside_bytes"))
        name = f"**{row.tool}**" if row.ours else row.tool
        lines.append(f"| {name} | {speeds} | {memory} | {kept} | {cell(row.figures['reduction'], 2)} |")
    lines += [
        "",
        "By processor time, which other work on the machine changes little; the system's writing out is not in it:",
        "",
        "| store | put all | put again | get newest | get oldest |",
        f"|{'---|' * 5}",
        *(f"| {row.tool} | {' | '.join(speed(row.figures[name]) for name in _BY_CPU)} |" for row in rows),
    ]
    lines += ["", *(f"- {row.tool}: {row.version}; {row.settings}" for row in rows)]
    upkeep = [f"{row.tool} {cell(figure, 2)}" for row in rows if (figure := row.figures["upkeep_seconds"])]
    if upkeep:
        lines += ["", f"Seconds of all upkeep, which is in no speed: {', '.join(upkeep)}."]
    again = [f"{row.tool} {cell(row.figures['put_again_by_sha1'], 2)}" for row in rows if row.ours]
    if again:
        lines += ["", f"Put again, by one stream of OpenSSL's SHA-1 over 8 KiB blocks: {', '.join(again)}."]
    return [*lines, *_by_best(rows), *_by_solid(rows), ""]


_BY_CPU = ("put_cpu_mbps", "put_again_cpu_mbps", "get_newest_cpu_mbps", "get_oldest_cpu_mbps")


def _never_below(record: MeasurementRecord) -> int:
    floor_bytes = record.details["peak_bytes_never_below"]
    assert isinstance(floor_bytes, int)
    return floor_bytes


def _megabytes(row: Row, name: str, digits: int) -> str:
    figure = row.figures[name]
    return "-" if figure is None else f"{figure.median / 1e6:.{digits}f}"


_COMPARED = (
    ("put all, MB/s", "put_mbps"),
    ("put later, MB/s", "later_put_mbps"),
    ("put again, MB/s", "put_again_mbps"),
    ("get newest, MB/s", "get_newest_mbps"),
    ("get oldest, MB/s", "get_oldest_mbps"),
    ("put all, MB/s of processor time", "put_cpu_mbps"),
    ("put again, MB/s of processor time", "put_again_cpu_mbps"),
    ("get newest, MB/s of processor time", "get_newest_cpu_mbps"),
    ("get oldest, MB/s of processor time", "get_oldest_cpu_mbps"),
    ("reduction", "reduction"),
)


def _solid(row: Row) -> bool:
    return not row.ours and row.figures["first_put_mbps"] is None


def _by_best(rows: Sequence[Row]) -> list[str]:
    """Return a table of Nearkin's figures relative to the best peers that are stores.

    Solid archives are no stores. Each ratio of medians has the least and largest ratio of single repetitions,
    measured in the same minutes.
    """
    mine = [row for row in rows if row.ours]
    others = [row for row in rows if not row.ours and not _solid(row)]
    if not mine or not others:
        return []
    titles = " | ".join(f"{row.tool} | by best" for row in mine)
    lines = ["", f"| | best other store | {titles} |", f"|{'---|' * (2 + 2 * len(mine))}"]
    for title, name in _COMPARED:
        known = [(figure, row.tool) for row in others if (figure := row.figures[name]) is not None]
        if not known:
            continue
        best, tool = max(known, key=lambda one: one[0].median)
        cells = " | ".join(_ratio_cells(row.figures[name], best) for row in mine)
        lines.append(f"| {title} | {best.median:.1f} ({tool}) | {cells} |")
    return lines


def _ratio_cells(figure: Spread | None, best: Spread) -> str:
    if figure is None:
        return "- | -"
    cells = f"{figure.median:.1f} | {figure.median / best.median:.2f}"
    if len(figure.values) != len(best.values) or len(best.values) < 2 or not best.low:  # a repetition failed
        return cells
    repetitions = [mine / theirs for mine, theirs in zip(figure.values, best.values, strict=True)]
    return (
        f"{cells} ({min(repetitions):.2f} to {max(repetitions):.2f})" if min(repetitions) != max(repetitions) else cells
    )


def _by_solid(rows: Sequence[Row]) -> list[str]:
    solid = [row for row in rows if _solid(row)]
    mine = [row for row in rows if row.ours]
    shares = [
        f"{row.tool} {figure.median / theirs.median:.3f} of {archive.tool}"
        for archive in solid
        for row in mine
        if (figure := row.figures["reduction"]) and (theirs := archive.figures["reduction"])
    ]
    return ["", f"Reduction by the solid archive's: {', '.join(shares)}."] if shares else []

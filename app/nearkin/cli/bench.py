"""Run `nearkin bench`.

Invariant: an argument that can be refused is refused before a corpus is fetched, made or measured.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import click

from nearkin.cli.session import AsWrittenGroup, current_session, json_option
from nearkin_shared.errors import BadInput, StoreUnavailable
from nearkin_shared.utils.terminal import to_json

if TYPE_CHECKING:
    from nearkin.lab.measure import RunPlan
    from nearkin.lab.measurement_record import Corpus, MeasurementRecord

RUNS_MAX = 99
PAIRS_MAX = 20_000

_Command = TypeVar("_Command", bound=Callable[..., Any])


@click.group(cls=AsWrittenGroup)
def bench() -> None:
    """Measure Nearkin next to its peers, on one core, in one run.

    nearkin bench store                              # put and get ten versions: against restic, borg, kopia, zstd
    nearkin bench store --corpus /backups/db --runs 3
    nearkin bench pairs --corpus mutated             # feature algorithms and delta codecs
    nearkin bench kernels                            # single functions, by OpenSSL's SHA-1
    nearkin bench index                              # memory and speed of kinds of index
    nearkin bench trees                              # back up ten weekly states of a folder: restic, borg, kopia

    Each writes a table (Markdown), a record (JSON) and a chart (SVG, PNG) to the folder of --out.

    Corpora, made or fetched once and kept ($NEARKIN_CACHE): botocore, rdb (needs a Redis server), vm (vm-debian as
    root with debootstrap, else vm-synthetic), mutated (needs nothing). A folder is a corpus too: a file a version, in
    order of name.
    """


class _BenchOptions(NamedTuple):
    """The options that every room has."""

    corpora: tuple[str, ...]
    versions: int | None
    peers: list[str]
    runs: int
    warmups: int
    core: int | None
    out: Path
    charts: tuple[str, ...]
    work: Path | None = None
    """None, too, for a room that writes nothing while it measures."""


def _room_options(
    runs: int, warmups: int, peers: str, versions: str, corpora: tuple[str, ...] = ("botocore",)
) -> Callable[[_Command], _Command]:
    """Add the options that every room has; the room's own defaults are shown in its help."""
    folder = click.Path(path_type=Path)
    options = (
        click.option(
            "-c",
            "--corpus",
            "corpora",
            metavar="NAME|DIR",
            multiple=True,
            default=corpora,
            help=f"What to measure over; repeatable, or NAME,NAME [{','.join(corpora)}].",
        ),
        click.option(
            "--versions",
            metavar="N",
            type=click.IntRange(1, 1000),
            help=f"Take only the first N versions of each [{versions}].",
        ),
        click.option("--peers", metavar="NAME,...", help=f"Which peers, or none [{peers}]."),
        click.option(
            "--runs",
            metavar="N",
            type=click.IntRange(1, RUNS_MAX),
            default=runs,
            help=f"Repetitions; medians and spread are shown [{runs}].",
        ),
        click.option(
            "--warmups",
            metavar="N",
            type=click.IntRange(0, RUNS_MAX),
            default=warmups,
            help=f"Repetitions before these that do not count [{warmups}].",
        ),
        click.option(
            "--core", metavar="N", type=click.IntRange(0, 4095), help="The core that all of it runs on [the last]."
        ),
        click.option(
            "-o",
            "--out",
            metavar="DIR",
            type=folder,
            default=Path("bench-results"),
            help="Where table, record and chart go; those of an earlier run are replaced [bench-results].",
        ),
        click.option(
            "--chart",
            "charts",
            type=click.Choice(["svg", "png", "none"]),
            multiple=True,
            help="Which charts; repeatable [both, where matplotlib is installed].",
        ),
        json_option,
    )

    def decorate(command: _Command) -> _Command:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


_work_option = click.option(
    "--work",
    metavar="DIR",
    type=click.Path(path_type=Path),
    help="Measure on this folder's file system [temporary].",
)


def _choose(peers: str | None, default: str, **given: Any) -> _BenchOptions:
    words = (default if peers is None else peers).split(",")
    return _BenchOptions(peers=[] if words == ["none"] else [word for word in words if word], **given)


_STORE_PEERS = "restic,borg,kopia,zstd-long"
_STORE_VERSIONS = "all of a folder; botocore 10, rdb 5, vm 3, vm-debian 3, vm-synthetic 2, mutated 6"


@bench.command("store")
@click.option(
    "--upkeep-every",
    metavar="N",
    type=click.IntRange(1, 1000),
    help="After every N versions nearkin gc, restic prune, borg compact, kopia maintenance [never].",
)
@_work_option
@_room_options(3, 0, _STORE_PEERS, _STORE_VERSIONS)
def store_(peers: str | None, upkeep_every: int | None, **given: Any) -> None:
    """Put and get whole versions and compare Nearkin with other stores.

    nearkin bench store --corpus botocore --versions 3 --runs 1
    nearkin bench store --corpus botocore,rdb,vm --runs 3
    nearkin bench store --peers nearkin-embedded,borg-fine,zstd-long
    nearkin bench store --corpus rdb --versions 16 --upkeep-every 4 --runs 1
    NEARKIN_DELTA__MAX_DEPTH=4 nearkin bench store --peers none

    Peers: restic, borg, kopia, zstd-long (`zstd -3` and `-9 --long=31` over the whole history); or one setting of a
    peer, such as borg-fine. Nearkin runs as a command (nearkin) and as one process (nearkin-embedded, and under the
    profile archive), unless one is named, also with another profile: nearkin@finesse-paper. Programs that are not
    installed are left out: the table reports how to install them.

    Puts are durable, and every version is read back and compared. A whole run of botocore takes about half an hour:
    table and record are written after every repetition.
    """
    from nearkin.cli.output import notice
    from nearkin.lab import report
    from nearkin.lab.suites import store_suite
    from nearkin.lab.tools.nearkin_tool import Nearkin, as_set
    from nearkin.lab.tools.peer_tools import choose_peers

    asked = _choose(peers, _STORE_PEERS, **given)
    config = current_session().config
    chosen = [as_set(peer, config) if issubclass(peer, Nearkin) else peer for peer in choose_peers(asked.peers)]

    failed: list[StoreUnavailable] = []

    def save(record: MeasurementRecord) -> None:
        # without charts: matplotlib would stay in the memory of this process, and no child's peak is seen below that
        try:
            report.write(record, asked.out, ())
        except StoreUnavailable as error:  # there may be room by the end, and all is printed in any case
            if not failed and not current_session().as_json:
                notice(f"{error}; continues measuring")
            failed.append(error)

    def measure(corpora: list[Corpus], plan: RunPlan) -> MeasurementRecord:
        return store_suite.run(corpora, chosen, plan, work=asked.work, upkeep_every=upkeep_every, save=save)

    _run("store", asked, None, measure)


_PAIR_PEERS = "xdelta3-command,zstd-patch-from"
_PAIR_VERSIONS = 5


@bench.command()
@click.option(
    "--pairs",
    "pairs_max",
    metavar="N",
    type=click.IntRange(1, PAIRS_MAX),
    default=300,
    help="Pairs that the codecs are compared over; a command starts one process each [300].",
)
@_work_option
@_room_options(3, 1, _PAIR_PEERS, f"at most {_PAIR_VERSIONS}")
def pairs(peers: str | None, pairs_max: int, **given: Any) -> None:
    """Find similar chunks, and encode them against one another.

    nearkin bench pairs --corpus botocore,rdb,vm
    nearkin bench pairs --corpus /backups/db --pairs 1000 --peers none

    How well each feature algorithm finds pairs and how fast it is (the Finesse paper's Table 3 and Figure 4), then what
    each delta codec makes of a sample of these pairs. Peers: xdelta3-command, zstd-patch-from.
    """
    from nearkin.lab.suites import pairs_suite

    asked = _choose(peers, _PAIR_PEERS, **given)
    codecs = pairs_suite.choose_codecs(asked.peers)

    def measure(corpora: list[Corpus], plan: RunPlan) -> MeasurementRecord:
        return pairs_suite.run(corpora, codecs, plan, pairs_max=pairs_max, work=asked.work)

    _run("pairs", asked, _PAIR_VERSIONS, measure)


_KERNEL_PEERS = "all"
_KERNEL_VERSIONS = 3


@bench.command()
@click.option("--against", metavar="DIR", type=click.Path(path_type=Path), help="Compare with kernels built elsewhere.")
@_room_options(7, 1, _KERNEL_PEERS, f"at most {_KERNEL_VERSIONS}")
def kernels(peers: str | None, against: Path | None, **given: Any) -> None:
    """Run single functions: chunkers, hashes, features, delta codecs.

    nearkin bench kernels --corpus mutated
    nearkin bench kernels --against ../before/shared/nearkin_shared/kernels/native
    NEARKIN_CPU=avx2 nearkin bench kernels       # as on a machine without AVX-512

    Each repetition runs every kernel over 16 MiB, after one stream of OpenSSL's SHA-1 over 8 KiB blocks. Peers:
    openssl, hashlib, zstd-prefix and others, which the error for an unknown name lists.
    """
    from nearkin.lab.suites import kernels_suite

    asked = _choose(peers, _KERNEL_PEERS, **given)
    chosen = kernels_suite.choose_kernels(list(kernels_suite.PEERS) if asked.peers == ["all"] else asked.peers, against)

    def measure(corpora: list[Corpus], plan: RunPlan) -> MeasurementRecord:
        return kernels_suite.run(corpora, chosen, plan)

    _run("kernels", asked, _KERNEL_VERSIONS, measure)


_TREE_PEERS = "restic,borg,kopia"


@bench.command()
@_work_option
@_room_options(3, 0, _TREE_PEERS, "10, all of a folder", ("packages", "home"))
def trees(peers: str | None, **given: Any) -> None:
    """Back up a folder that changes from week to week, and restore it.

    nearkin bench trees --corpus home --runs 1
    nearkin bench trees --corpus packages,home --peers restic,borg-fine
    nearkin bench trees --corpus /backups/weekly       # one folder a version, in order of name

    Corpora: packages (site-packages over releases of three packages, fetched with pip), home (generated), small and
    small-200k (10,000 and 200,000 files of 1 to 8 KiB). All tools back up the same live folder in turn; then it is
    backed up again unchanged, restored and compared, and single files are read. Peers: restic, borg, kopia; or one
    setting of a peer, such as borg-fine.
    """
    from nearkin.lab import report
    from nearkin.lab.suites import trees_suite
    from nearkin.lab.tools.tree_tools import choose_tree_tools

    asked = _choose(peers, _TREE_PEERS, **given)
    if any(chart != "none" for chart in asked.charts):
        raise BadInput(f"--chart {asked.charts[0]}: bench trees draws no chart; leave it out")
    asked = asked._replace(charts=("none",))
    tools = choose_tree_tools(asked.peers)

    def save(record: MeasurementRecord) -> None:
        report.write(record, asked.out, ())

    def measure(corpora: list[Corpus], plan: RunPlan) -> MeasurementRecord:
        return trees_suite.run(corpora, tools, plan, work=asked.work, save=save)

    _run("trees", asked, None, measure)


@bench.command()
@click.option(
    "--chunks", metavar="N,...", default="100000,1000000", help="Numbers of chunks [100000,1000000], such as 1e7."
)
@click.option(
    "--kinds", metavar="NAME,...", default="exact,tablets", help="exact, tablets, sampled, tags [exact,tablets]."
)
@click.option(
    "-c", "--corpus", "corpora", metavar="NAME|DIR,...", help="Put these in place of generated chunks; compare bytes."
)
@click.option("--core", metavar="N", type=click.IntRange(0, 4095), help="The core that all of it runs on [any].")
@_work_option
@json_option
def index(chunks: str, kinds: str, corpora: str | None, core: int | None, work: Path | None) -> None:
    """Fill kinds of index with generated chunks: memory, disk, lookups, opening.

    nearkin bench index --chunks 1e6,1e7
    nearkin bench index --chunks 1e9 --kinds tags      # the tag table of `index.kind = "tablets"` alone
    nearkin bench index --corpus botocore,rdb          # stored bytes by kind and share of hooks

    Prints a Markdown table, or with --json one line a row. `known`: names of a stream in the order of storing, new:
    names that no index has. Times are CPU microseconds of one chunk; those of `cold` are wall time, after the files
    of the index left the page cache.
    """
    from nearkin.lab.corpora import find_corpora
    from nearkin.lab.suites import index_loss, index_suite

    measured: Iterator[index_suite.IndexFigures | index_loss.LossFigures]
    if corpora is None:
        measured = index_suite.run([_count_of(word) for word in chunks.split(",")], kinds.split(","), core, work)
    else:
        measured = index_loss.run(find_corpora([corpora], None), core, work)
    rows = []
    for figures in measured:
        rows.append(figures)
        if current_session().as_json:
            click.echo(to_json(asdict(figures)))
    if not current_session().as_json:
        click.echo(index_suite.table_of(rows))


def _count_of(word: str) -> int:
    """Return a whole number, which may be written as 1e9."""
    try:
        return int(float(word))
    except (ValueError, OverflowError) as err:
        raise BadInput(f'--chunks "{word}": want numbers, such as 1000000 or 1e6') from err


def _run(
    room: str, asked: _BenchOptions, versions_at_most: int | None, measure: Callable[..., MeasurementRecord]
) -> None:
    """Check the options, get the corpora, measure, write, and print the table or the record."""
    from nearkin.cli.output import notice, print_json, print_line
    from nearkin.cli.progress import steps_bar
    from nearkin.lab import report
    from nearkin.lab.corpora import check_corpora, find_corpora
    from nearkin.lab.measure import RunPlan, choose_core
    from nearkin.lab.tree_corpora import check_trees, find_trees
    from nearkin_shared.utils.terminal import printable

    session = current_session()
    if session.store is not None or session.server is not None:
        raise BadInput("bench makes stores of its own, below --work: leave out --store and --server")
    if room != "store" and session.config is not None:
        raise BadInput(
            f"--config {session.config}: bench {room} runs single functions, which take no settings: leave it out"
        )
    core = choose_core(asked.core)
    kinds, cannot_draw = report.chart_kinds(asked.charts)
    if room == "trees":
        check_trees(asked.corpora, asked.versions)
    else:
        check_corpora(asked.corpora, asked.versions, versions_at_most)
    report.check_folder(asked.out)
    if asked.work is not None:
        report.check_folder(asked.work, "--work")
    if cannot_draw and not session.as_json:
        notice(cannot_draw)
    if room == "trees":
        corpora = find_trees(asked.corpora, asked.versions)
    else:
        corpora = find_corpora(asked.corpora, asked.versions, versions_at_most)
    command = printable(shlex.join(["nearkin", *sys.argv[1:]]))
    with steps_bar(f"bench {room}", shown=not session.as_json) as steps:
        record = measure(corpora, RunPlan(core, asked.runs, asked.warmups, command, steps))
    try:
        written = report.write(record, asked.out, kinds)
    finally:  # a full disk must not take along what was measured
        if session.as_json:
            print_json(record.as_json())
        else:
            print_line(report.markdown(record))
    if not session.as_json:
        notice(f"written: {', '.join(map(str, written))}")

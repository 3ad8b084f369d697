"""Define the commands.

nearkin [--store FOLDER | --server URL] [--config FILE] [--json] COMMAND ...      these may also follow the command

Invariant: a command checks its arguments, then its settings, then opens the store; a refused argument opens no store.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import click

from nearkin.cli.session import (
    AsWrittenGroup,
    Session,
    TakesCommand,
    complete_file,
    current_session,
    force_option,
    shared_options,
)
from nearkin_shared.errors import BadInput

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from nearkin.kind_counts import KindCount
    from nearkin.store import Store

_HELP = {"help_option_names": ["-h", "--help"]}
_ELSEWHERE = {
    "backup": "backup_command",
    "bench": "bench",
    "completion": "completion",
    "copy": "copy",
    "dlq": "dlq",
    "diff": "diff",
    "docs": "docs",
    "drill": "drill_command",
    "dump": "dump",
    "export": "export",
    "find": "find",
    "forget": "forget",
    "gc": "maintenance_commands",
    "get": "get",
    "import-tar": "import_tar",
    "init": "init",
    "keys": "keys",
    "ls": "ls",
    "mount": "mount",
    "rebuild-index": "maintenance_commands",
    "repair": "maintenance_commands",
    "restore": "restore_command",
    "serve": "serve",
    "token": "serve",
    "verify": "maintenance_commands",
    "webdav": "webdav",
}
"""Modules of commands that are imported once one of these is called: a put starts 5 ms sooner."""


_FOREIGN = {
    "check": "verify",
    "compact": "gc",
    "create": "backup",
    "delete": "rm",
    "extract": "restore",
    "list": "ls",
    "prune": "gc",
    "snapshots": "ls --versions",
    "versions": "ls --versions",
}
"""Commands of restic and borg that have another name here."""


class _Commands(AsWrittenGroup):
    """The commands of this module, and those elsewhere."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return a command and its arguments.

        Raises click.UsageError, for a command of restic or borg with its name here.
        """
        if args and args[0] in _FOREIGN:
            raise click.UsageError(f"No such command {args[0]!r}: it is `nearkin {_FOREIGN[args[0]]}` here", ctx)
        return super().resolve_command(ctx, args)

    def list_commands(self, context: click.Context) -> list[str]:
        """Return all names, in order."""
        return sorted([*super().list_commands(context), *_ELSEWHERE])

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        """Return a command, None where there is none of that name."""
        if name not in _ELSEWHERE:
            return super().get_command(context, name)
        command: click.Command = getattr(import_module(f"nearkin.cli.{_ELSEWHERE[name]}"), name.replace("-", "_"))
        return command


def _show_version(context: click.Context, _option: click.Parameter, wanted: bool) -> None:
    if wanted and not context.resilient_parsing:  # completion parses a line that is not finished
        from nearkin.cli.output import print_version

        print_version(as_json=context.ensure_object(Session).as_json)
        context.exit()


@click.group(cls=_Commands, context_settings=_HELP)
@click.option("--version", is_flag=True, expose_value=False, callback=_show_version, help="Show the version and exit.")
@shared_options
def nearkin() -> None:
    """Keep blobs: each chunk as its nearest kin plus the difference.

    export NEARKIN_STORE=/var/lib/nearkin
    nearkin init                         # once: creates the store
    nearkin backup home /home/ana        # version 1 of the key "home": a tree of folders and files
    nearkin restore home -o /tmp/home    # the newest version, every byte verified
    nearkin put db/dump monday.rdb       # version 1 of the key "db/dump": a file
    nearkin put db/dump tuesday.rdb      # version 2: only what is new is stored
    nearkin get db/dump -o restored.rdb  # the newest version, every byte verified
    nearkin stats                        # what was saved, and by which step

    The same with a gateway, whose token is read from NEARKIN_TOKEN alone:
    nearkin --server https://nearkin.example put db/dump monday.rdb

    Exit codes: 0 done, 1 failed, 2 wrong usage, 3 incomplete (an entry was not read or not restored), 4 not found,
    5 damaged, 6 no room, 7 precondition failed, 8 data of a later Nearkin, 10 no store, 11 locked, 12 wrong or missing
    key-encryption key, 129 hung up, 130 interrupted, 141 stdout closed, 143 terminated.
    """


@nearkin.command(cls=TakesCommand, options_metavar="[OPTIONS]")
@click.argument("key", metavar="KEY")
@click.argument("sources", metavar="FILE|-", nargs=-1, shell_complete=complete_file)
@click.option("--from-command", is_flag=True, help="Store what the command after -- writes to stdout, if it succeeds.")
@click.option("--allow-empty", is_flag=True, help="Store an empty version if stdin or the command gives nothing.")
@click.option("-r", "--recursive", is_flag=True, hidden=True)
@click.option(
    "--meta",
    metavar="NAME=VALUE",
    multiple=True,
    help="Metadata kept with the version; repeatable.",
)
@click.option(
    "--content-type",
    metavar="TYPE",
    help="Media type, such as text/csv: kept as metadata `content-type`; a gateway answers GET with it.",
)
@click.option("--sha256", metavar="HEX", help="Refuse the content unless its SHA-256 is this.")
@click.option("--if-match", metavar="DIGEST|*", help="Only if the newest version has this digest; * for any version.")
@click.option("--if-none-match", metavar="DIGEST|*", help="Only if the newest version has not; * for no version.")
@force_option
@shared_options
def put(
    key: str,
    sources: tuple[str, ...],
    from_command: bool,
    allow_empty: bool,
    recursive: bool,
    meta: tuple[str, ...],
    content_type: str | None,
    sha256: str | None,
    if_match: str | None,
    if_none_match: str | None,
) -> int:
    """Store a file as a new version of KEY ("-" reads stdin).

    nearkin put db/dump dump.rdb --meta host=db1
    nearkin put report.csv report.csv --content-type text/csv
    pg_dump shop | nearkin put db/shop -
    nearkin put db/shop --from-command -- pg_dump shop    # stores nothing if pg_dump fails
    nearkin put --if-none-match "*" lock mine    # only if the key has no version; else exit code 7

    The bytes that deltas saved in one put are an estimate, since blocks are compressed together with their bases;
    `nearkin stats` reports what they saved in the whole store.

    A folder is stored by `nearkin backup`.
    """
    from nearkin.cli.arguments import parse_metadata, parse_sha256
    from nearkin.cli.put import PutOptions, put_one

    if recursive:
        folder = sources[-1] if sources else key
        raise BadInput(f'put --recursive "{folder}": `nearkin backup KEY FOLDER` stores a folder as one version of KEY')
    metadata = parse_metadata(meta, content_type)
    digest = None if sha256 is None else parse_sha256(sha256)
    options = PutOptions(metadata, digest, if_match, if_none_match)
    source = sources[0] if sources else None
    if from_command:
        if source is None:
            raise BadInput("--from-command: give the command after --, as in: put KEY --from-command -- pg_dump shop")
        put_one(current_session(), key, source, options, command=sources, allow_empty=allow_empty)
        return 0
    if len(sources) > 1:
        raise click.UsageError(f"Got unexpected extra argument ({sources[1]})", click.get_current_context())
    if source is None:
        raise click.MissingParameter(param_hint="'FILE'", param_type="argument")
    put_one(current_session(), key, source, options, allow_empty=allow_empty)
    return 0


@nearkin.command()
@click.argument("key", metavar="KEY[@VERSION]")
@click.option("--version", metavar="V", type=click.IntRange(min=1), help="This version alone.")
@click.option("--reason", metavar="TEXT", default="", help="Kept with the deletion; ls --deleted shows it.")
@click.option("--now", is_flag=True, help="Remove the bytes for good at once: no undelete, no grace.")
@click.option("--yes", is_flag=True, help="With --now: do not ask.")
@shared_options
def rm(key: str, version: int | None, reason: str, now: bool, yes: bool) -> None:
    """Delete KEY with all its versions, or one of them.

    Every reader stops seeing them at once; `nearkin undelete` brings them back within deletion.undelete_seconds (a
    week by default). Space is freed later.

    nearkin rm db/dump
    nearkin rm db/dump@2 --reason "wrong host"     # version 2 alone, as --version 2

    With --now, for a leaked secret or a full disk, every byte that only these versions need is removed before the
    command ends, also if they were deleted earlier. Nothing brings them back; restores that run meanwhile may fail.

    nearkin rm db/dump@2 --now
    """
    from nearkin.cli.rm import change, purge

    if yes and not now:
        raise BadInput("--yes: only with --now")
    if now:
        purge(key, version, reason, confirmed=yes)
        return
    change("delete", "deleted", key, version, reason)


@nearkin.command()
@click.argument("key", metavar="KEY[@VERSION]")
@click.option("--version", metavar="V", type=click.IntRange(min=1), help="This version alone.")
@click.option("--reason", metavar="TEXT", default="", help="Kept with what was done.")
@shared_options
def undelete(key: str, version: int | None, reason: str) -> None:
    """Bring back what the latest rm or forget took.

    Through a server, and after a GC run by retention.policies, each version was deleted on its own: name it.

    nearkin ls --deleted
    nearkin undelete db/dump
    nearkin undelete db/dump@2
    """
    from nearkin.cli.rm import change

    change("undelete", "undeleted", key, version, reason)


@nearkin.command()
@click.argument("key", metavar="KEY[@VERSION]")
@click.option("--version", metavar="V", type=click.IntRange(min=1), help="This version instead of the newest.")
@click.option("--until", metavar="TIME", help="Retain it until this time (UTC): 2027-11-20, 2027-11-20T18:00Z.")
@click.option("--for", "duration", metavar="TIME", help="Retain it this long from now: 36h, 90d, 7y.")
@click.option("--reason", metavar="TEXT", default="", help="Stored with the extension.")
@shared_options
def retain(key: str, version: int | None, until: str | None, duration: str | None, reason: str) -> None:
    """Retain one version of KEY: nothing deletes it before then.

    nearkin retain db/dump --for 90d
    nearkin retain db/dump@2 --until 2034-01-01 --reason "tax audit"     # as --version 2

    A retention is extended, never shortened: an earlier time than the one that holds is refused. Through a gateway
    this needs a token with the scope delete.
    """
    from nearkin.cli.retain import retain as extend

    extend(key, version, until, duration, reason)


@nearkin.command()
@click.argument("key", metavar="KEY[@VERSION]")
@click.option("--version", metavar="V", type=click.IntRange(min=1), help="This version instead of the newest.")
@shared_options
def info(key: str, version: int | None) -> None:
    """Show one version: size, digests, time, metadata.

    A version of a backup has tags, the host, the paths that were stored, and the root that names in it count from.

    nearkin info db/dump@2                         # as --version 2
    nearkin info home@36h                          # the version of that time
    """
    from nearkin.cli.arguments import check_key
    from nearkin.cli.output import info_lines, print_json, print_line, version_json
    from nearkin.cli.tree_location import find_root, resolve_key
    from nearkin_shared.utils.terminal import printable

    session = current_session()
    check_key(key)
    with session.open() as store:
        found = store.info(*resolve_key(store, "info", key, version))
        root = find_root(store, found)
    if session.as_json:
        print_json({**version_json(found), "root": root})
        return
    for line in info_lines(found):
        print_line(line)
    if root is not None:
        print_line(f"{'root':<12}{printable(root)}")


@nearkin.command()
@click.option("--by", "by_kind", type=click.Choice(["kind"]), help="By kind of content; reads all versions.")
@shared_options
def stats(by_kind: str | None) -> None:
    """Show what the store holds and what each step saved.

    nearkin stats
    nearkin stats --by kind                                             # media, databases, ...: see chunker.rules
    nearkin stats --json | jq .reduction_ratio

    DCR and DCE are defined as in the Finesse paper, over the chunks that delta compression received. Metadata
    are all bytes except blocks, parity and quarantine. Bases found are counted by base.policy, those of first-fit by
    super-feature too (SF0 is the first); bases that a GC run chose are "gathered" or "reference".
    """
    from nearkin.cli.output import print_json, print_stats
    from nearkin_shared.results_json import stats_json

    session = current_session()
    if by_kind:
        from nearkin.kind_counts import sum_kinds

        _show_kinds(session, sum_kinds)
        return
    with session.open() as store:
        found = store.stats()
        folder: Path | None = getattr(store, "index_folder", None)  # a server has none to show
    if session.as_json:
        print_json(stats_json(found))
        return
    print_stats(found, folder)


@nearkin.command()
@click.argument("key", metavar="KEY[@VERSION]")
@click.option("--version", metavar="V", type=click.IntRange(min=1), help="This version instead of the newest.")
@click.option("--segments", is_flag=True, help="Each segment too; with --json each chunk of it.")
@click.option("--kinds", is_flag=True, help="By kind of content instead; reads the version.")
@shared_options
def explain(key: str, version: int | None, segments: bool, kinds: bool) -> None:
    """Show how a version is stored, chunk by chunk.

    For deltas the command also shows how their bases were found, in the terms of stats, and for segments the worker
    that computed their super-features.

    nearkin explain db/dump
    nearkin explain db/dump@2
    nearkin explain db/dump --segments --json | jq '.segments[0].chunks'
    nearkin explain home --kinds                                        # media, databases, ...: see chunker.rules
    """
    from nearkin.cli.arguments import check_key
    from nearkin.cli.output import print_explanation, print_json
    from nearkin.cli.tree_location import resolve_key
    from nearkin_shared.results_json import explain_json

    session = current_session()
    check_key(key)
    if kinds:
        from nearkin.kind_counts import count_kinds

        if segments:
            raise BadInput("--kinds counts a whole version: not with --segments")
        _show_kinds(session, lambda store: count_kinds(store, *resolve_key(store, "explain", key, version)))
        return
    with session.open() as store:
        explanation = store.explain(*resolve_key(store, "explain", key, version))
    if session.as_json:
        print_json(explain_json(explanation, segments=segments))
    else:
        print_explanation(explanation, segments=segments)


def _show_kinds(session: Session, count: Callable[[Store], Mapping[str, KindCount]]) -> None:
    """Print counts by kind of content. Raises BadInput for a server."""
    from dataclasses import asdict

    from nearkin.cli.output import print_json, print_table
    from nearkin.store import Store
    from nearkin_shared.savings_table import human_bytes

    with session.open() as store:
        if not isinstance(store, Store):
            raise BadInput("kinds of content: a server does not count them; run the command at the store")
        found = count(store)
    if session.as_json:
        print_json({"kinds": {kind: asdict(each) for kind, each in found.items()}})
        return
    names = ("kind", "bytes", "chunks", "stored about")
    rows = [
        (kind, human_bytes(each.logical_bytes), f"{each.chunks:,}", human_bytes(each.stored_estimate_bytes))
        for kind, each in found.items()
    ]
    print_table(names, rows, whole=names, right=names[1:])


@nearkin.command()
@click.argument("names", metavar="[NAME]...", nargs=-1)
@click.option("--set", "changes", metavar="NAME=VALUE", multiple=True, help="Change a running server; repeatable.")
@click.option("--local", is_flag=True, help="This command's own settings, even if a server is named.")
@shared_options
def config(names: tuple[str, ...], changes: tuple[str, ...], local: bool) -> None:
    """Show settings, their values and where they came from.

    All of them; or those of NAME, a setting or a section such as gc, and what they take and do.

    nearkin config delta base.policy
    nearkin --config nearkin.toml config
    nearkin --store /backup config chunker profile                      # of the store, where nothing else is set
    NEARKIN_DELTA__MAX_DEPTH=1 nearkin config --json
    nearkin --server http://127.0.0.1:8080 config                       # what the services run with
    nearkin --server http://127.0.0.1:8080 config --set features.algorithm=odess
    """
    from nearkin.cli.arguments import parse_changes
    from nearkin.cli.config import (
        chosen,
        local_settings,
        print_described_settings,
        print_index,
        print_settings,
        server_settings,
    )

    session = current_session()
    described, patch = chosen(names) if names else None, parse_changes(changes)
    server = None if local else session.load()[0].server
    if server is None and patch:
        raise BadInput("--set changes running services: name their --server; settings of your own go into --config")
    rows = local_settings(session) if server is None else server_settings(session, server, patch)
    if described is None:
        print_settings(session, rows)
    else:
        print_described_settings(session, rows, described)
        if server is None and any(each.name.startswith("index.") for each in described):
            print_index(session)


@nearkin.command()
@shared_options
def version() -> None:
    """Show the version of this command, as --version does.

    nearkin version --json
    """
    from nearkin.cli.output import print_version

    print_version(as_json=current_session().as_json)

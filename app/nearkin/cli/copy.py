"""`nearkin copy`: copy keys from another store."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

import click

from nearkin.cli.session import AsWritten, Session, complete_folder, current_session, force_option, shared_options
from nearkin_shared.errors import BadInput, NotFound

if TYPE_CHECKING:
    from nearkin.cli.key_patterns import KeyPattern
    from nearkin.client.sync import RemoteStore
    from nearkin.store import Store
    from nearkin.store_copy import CopiedVersion, Failure, KeyPlan
    from nearkin_shared.results import Damage, VersionInfo

TOKEN_VARIABLE = "NEARKIN_FROM_TOKEN"  # noqa: S105 - its name


@click.command(cls=AsWritten)
@click.argument("patterns", metavar="[KEY|GLOB]...", nargs=-1)
@click.option(
    "--from",
    "source",
    metavar="SRC",
    required=True,
    shell_complete=complete_folder,
    help="The store to copy from: a folder or a server's URL.",
)
@click.option(
    "--from-config",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Settings of SRC, such as its storage.key_file, if they differ.",
)
@click.option("--prefix", metavar="TEXT", default="", help="Store each key under TEXT followed by the key.")
@click.option("--literal", is_flag=True, help="Take * ? [ in KEY as they are.")
@click.option(
    "--skip-damaged", is_flag=True, help="Also copy the versions after a damaged one, which is then left out."
)
@click.option("--dry-run", is_flag=True, help="Show what would be copied; change nothing.")
@force_option
@shared_options
def copy(
    patterns: tuple[str, ...],
    source: str,
    from_config: Path | None,
    prefix: str,
    literal: bool,
    skip_damaged: bool,
    dry_run: bool,
) -> int:
    """Copy versions of keys from the store SRC to this store.

    All keys, or each KEY and those that match a GLOB. All versions of a key are copied, oldest first, with metadata and
    creation time; numbers are given by this store. Only versions that are newer than the newest one already here are
    copied, so a second run copies what is new, and an interrupted run continues where it ended. Each version is
    verified (BLAKE3) before it is committed here.

    A key stops at a version that is damaged in SRC; others go on, and the exit code is 3. A server keeps its own
    creation time: there the original one is kept as metadata (nearkin-created).

    nearkin --store /backup copy --from /var/lib/nearkin
    nearkin --store /backup copy --from /var/lib/nearkin db/dump 'images/*'
    nearkin --server https://nearkin.example copy --from /var/lib/nearkin
    nearkin --store /mirror copy --from https://nearkin.example --dry-run --json

    NEARKIN_FROM_TOKEN is the token of SRC if that is a server (default: NEARKIN_TOKEN).
    """
    from nearkin.cli.arguments import check_prefix
    from nearkin.cli.exit_codes import ExitCode
    from nearkin.cli.key_patterns import KeyPattern, parse_key_or_glob
    from nearkin.cli.progress import bytes_bar
    from nearkin.store_copy import Copier

    session = current_session()
    check_prefix(prefix)
    wanted = [parse_key_or_glob(text, literal=literal) for text in patterns] or [KeyPattern("", lambda _key: True)]
    _check_not_same(session, source, prefix)
    started = time.perf_counter()
    with _open_source(session, source, from_config) as origin, session.open(read_only=dry_run) as target:
        plans = _make_plans(origin, target, wanted, patterns, prefix, skip_damaged=skip_damaged)
        total_bytes = sum(info.size_bytes for plan in plans for info in plan.pending)
        if dry_run:
            failures = [plan.failure for plan in plans if plan.failure is not None]
            _print_plan(session, plans, failures)
            return ExitCode.INCOMPLETE if failures else ExitCode.DONE
        with bytes_bar("copy", total_bytes, shown=not session.as_json) as progress:
            copier = Copier(origin, target, skip_damaged=skip_damaged, progress=progress)
            copied = list(copier.run(plans))
    _print_copied(session, copied, plans, copier.failures, time.perf_counter() - started)
    return ExitCode.INCOMPLETE if copier.failures else ExitCode.DONE


@contextmanager
def _open_source(session: Session, source: str, config: Path | None) -> Iterator[Store | RemoteStore]:
    """Open SRC for reading. Raises NotFound, ConfigError."""
    import os

    origin = Session()
    origin.config, origin.use_environment = config or session.config, config is None
    origin.as_json, origin.quiet = session.as_json, session.quiet
    if source.startswith(("http://", "https://")):
        origin.server = source
        settings, _ = origin.load()
        token = os.environ.get(TOKEN_VARIABLE)
        with origin.connect(source, settings, token) as remote:
            yield remote
        return
    origin.store = source
    with origin.open_folder() as store:
        yield store


def _check_not_same(session: Session, source: str, prefix: str) -> None:
    """Raise BadInput if a key would be copied onto itself."""
    from nearkin.cli.arguments import store_folder

    settings, server = session.choose()
    if source.startswith(("http://", "https://")):
        same = server is not None and server.rstrip("/") == source.rstrip("/")
    else:
        same = server is None and store_folder(source).resolve() == store_folder(settings.store).resolve()
    if same and not prefix:
        raise BadInput(f"copy: {source} is the target too; name another store, or give --prefix")


def _make_plans(
    origin: Store | RemoteStore,
    target: Store | RemoteStore,
    wanted: Sequence[KeyPattern],
    named: Sequence[str],
    prefix: str,
    *,
    skip_damaged: bool,
) -> list[KeyPlan]:
    """List both stores and plan each key.

    Raises NotFound for an argument that matches nothing.
    """
    from nearkin.store_copy import Failure, KeyPlan, plan_key

    plans: dict[str, KeyPlan] = {}
    for number, pattern in enumerate(wanted):
        source, damaged = _list_by_key(origin, pattern.prefix, pattern.matches)
        there, unreadable = _list_by_key(target, prefix + pattern.prefix, lambda _key: True)
        if named and not source and not damaged:
            raise NotFound(f"{named[number]!r}: the source has no such key; `nearkin ls` lists its keys")
        for key in sorted(source.keys() | damaged.keys()):
            copy_key = prefix + key
            if copy_key in unreadable:  # which version it is a copy of is unknown
                version, problem = next(iter(unreadable[copy_key].items()))
                reason = f"version {version} of {copy_key!r} in the target cannot be read: {problem}"
                first = source[key][0].version if key in source else 1
                plans[key] = KeyPlan(key, copy_key, (), 0, Failure(key, first, reason))
                continue
            plans[key] = plan_key(
                key,
                copy_key,
                source.get(key, []),
                there.get(copy_key, []),
                damaged.get(key, {}),
                skip_damaged=skip_damaged,
            )
    return list(plans.values())


def _list_by_key(
    store: Store | RemoteStore, prefix: str, matches: Callable[[str], bool]
) -> tuple[dict[str, list[VersionInfo]], dict[str, dict[int, str]]]:
    """Return versions by key, ascending, and the unreadable versions with their reasons."""
    broken: list[Damage] = []
    listed = [info for info in store.versions(prefix, all_versions=True, broken=broken.append) if matches(info.key)]
    found = {
        key: sorted(infos, key=lambda info: info.version) for key, infos in groupby(listed, key=lambda info: info.key)
    }
    damaged: dict[str, dict[int, str]] = {}
    for damage in broken:
        for key, version in damage.versions:
            if matches(key):
                damaged.setdefault(key, {})[version] = damage.problem
    return found, damaged


def _failures_json(failures: Sequence[Failure]) -> list[dict[str, object]]:
    return [{"key": one.key, "version": one.version, "reason": one.reason} for one in failures]


def _print_plan(session: Session, plans: Sequence[KeyPlan], failures: Sequence[Failure]) -> None:
    from nearkin.cli.output import print_json, print_line, version_line
    from nearkin_shared.results_json import info_json
    from nearkin_shared.savings_table import human_bytes, plural

    pending = [info for plan in plans for info in plan.pending]
    present = sum(plan.present for plan in plans)
    total_bytes = sum(info.size_bytes for info in pending)
    if session.as_json:
        versions = [info_json(info) for info in pending]
        summary = {"dry_run": True, "versions": versions, "present": present, "bytes": total_bytes}
        print_json({**summary, "failures": _failures_json(failures)})
        return
    for info in pending:
        print_line(version_line(info))
    _warn_failures(failures)
    print_line(f"would copy {plural(len(pending), 'version')} ({human_bytes(total_bytes)}); {present:,} already there")


def _print_copied(
    session: Session,
    copied: Sequence[CopiedVersion],
    plans: Sequence[KeyPlan],
    failures: Sequence[Failure],
    seconds: float,
) -> None:
    from nearkin.cli.output import print_json, report
    from nearkin_shared.results_json import info_json
    from nearkin_shared.savings_table import format_speed, human_bytes, plural

    present = sum(plan.present for plan in plans)
    total_bytes = sum(one.source.size_bytes for one in copied)
    if session.as_json:
        versions = [{**info_json(one.target), "source_version": one.source.version} for one in copied]
        summary = {"dry_run": False, "versions": versions, "present": present, "bytes": total_bytes}
        print_json({**summary, "failures": _failures_json(failures), "seconds": seconds})
        return
    _warn_failures(failures)
    report(
        f"copied {plural(len(copied), 'version')} ({human_bytes(total_bytes)}) in {seconds:.2f} s, "
        f"{format_speed(total_bytes, seconds)}; {present:,} already there"
    )


def _warn_failures(failures: Sequence[Failure]) -> None:
    from nearkin.cli.output import warn
    from nearkin_shared.utils.terminal import printable

    for one in failures:
        warn(f"not copied: {printable(one.key)} from version {one.version} on: {printable(one.reason)}")

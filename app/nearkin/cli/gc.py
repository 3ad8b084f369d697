"""Run `nearkin gc`.

Invariant: a dry run prints what a GC run then frees, to the byte, unless something changes in between.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC
from typing import TYPE_CHECKING, Any

from nearkin.cli.exit_codes import ExitCode
from nearkin.cli.session import current_session
from nearkin_shared.errors import GcPaused

if TYPE_CHECKING:
    from nearkin.client.sync import RemoteStore
    from nearkin.store import Store
    from nearkin_shared.results import GcReport

REASONS = {
    "undelete": "only by versions that are deleted and can be brought back",
    "bases": "by live chunks whose base they are: no version reads them",
    "pending_delete": "by nothing: pending delete until the grace is over",
    "shared_blocks": "by what it shares a block or container with",
}


RUN_SECONDS_MAX = 3600.0
"""Seconds that a command waits for a GC run of a server; the run continues afterwards."""
POLL_SECONDS = 0.5


def collect(*, dry_run: bool, deleted_too: bool) -> ExitCode:
    """Do a GC run or a dry run and print its result; a server is asked and waited for.

    Return DAMAGED if versions, tombstones or retention records were removed, else DONE.
    """
    from nearkin.cli.output import print_json, print_line
    from nearkin.cli.output import report as report_line
    from nearkin.cli.progress import steps_bar
    from nearkin_shared.results_json import gc_json

    session = current_session()
    settings, server = session.choose()
    if server is not None and not dry_run:
        with session.connect(server, settings) as remote:
            last = _run_on_server(remote)
        if session.as_json:
            print_json(last)
        else:
            for line in status_lines(last):
                report_line(line)
        return ExitCode.DAMAGED if last.get("rolled_back_keys") else ExitCode.DONE
    with session.open_local(read_only=dry_run) as store, steps_bar("gc", shown=not session.as_json) as steps:
        report = store.gc(dry_run=dry_run, deleted_too=deleted_too, steps=steps)
    if session.as_json:
        print_json(gc_json(report))
    else:
        show = print_line if dry_run else report_line
        for line in gc_lines(report):
            show(line)
    return ExitCode.DAMAGED if report.rolled_back_keys else ExitCode.DONE


def _run_on_server(store: RemoteStore) -> Mapping[str, Any]:
    """Start a GC run of a server and return its result once it has ended."""
    from nearkin_shared.errors import StoreUnavailable

    before = _has_ended(store.change_gc("run"))
    deadline = time.monotonic() + RUN_SECONDS_MAX
    while _has_ended(state := store.gc_state()) == before:
        if state["paused"] is not None:
            raise GcPaused(f"garbage collection was paused by {state['paused']['by']} before the GC run ended")
        if time.monotonic() > deadline:
            raise StoreUnavailable(f"no GC run has ended in {RUN_SECONDS_MAX:.0f} s; see `nearkin gc --status`")
        time.sleep(POLL_SECONDS)
    last: Mapping[str, Any] = state["last"]
    if last["failure"]:
        raise StoreUnavailable(f"the GC run did not end: {last['failure']}")
    return last


def _has_ended(state: Mapping[str, Any]) -> object:
    return (state["last"] or {}).get("ended")


def warn_if_rolled_back(store: Store | RemoteStore) -> None:
    """Report on stderr that keys of a local store have lost objects.

    These are newest versions, tombstones and retention records; a listing does not show it. No manifest is read.
    """
    from nearkin.cli.output import warn
    from nearkin.store import Store
    from nearkin_shared.savings_table import plural

    if not isinstance(store, Store):
        return
    removed, without_records = store.rolled_back_keys(), store.keys_without_records()
    if removed:
        warn(f"{plural(removed, 'key')} lost their newest version, which was removed: `nearkin verify` names them")
    if without_records:
        warn(
            f"{plural(without_records, 'key')} lost a tombstone or retention record, which was removed: deleted "
            "versions may be listed, or undeleted ones not; `nearkin verify` names them"
        )


def change(action: str) -> None:
    """Pause or resume collection, or print its state, here or behind a server."""
    from nearkin.cli.output import print_json, print_line
    from nearkin.store import Store
    from nearkin_shared.results_json import gc_state_json
    from nearkin_shared.savings_table import plural
    from nearkin_shared.storage.deletions import user_and_host
    from nearkin_shared.utils.terminal import printable

    session = current_session()
    with session.open(read_only=action == "status") as store:
        if isinstance(store, Store):
            if action == "pause":
                store.pauses.pause(user_and_host())
            elif action == "resume":
                store.pauses.resume()
            state = gc_state_json(store.gc_state())
        else:
            state = store.gc_state() if action == "status" else store.change_gc(action)
    if session.as_json:
        print_json(state)
        return
    paused, last = state["paused"], state.get("last")
    by = None if paused is None else printable(paused["by"]) or "an unknown process"
    print_line("not paused" if paused is None else f"paused       since {paused['since']} by {by}")
    if state.get("pending_delete_containers"):
        containers = plural(state["pending_delete_containers"], "container")
        print_line(f"pending      {containers}, due for deletion from {state['due']} on")
    if last is not None:
        print_line(f"last GC run  {last['ended']}{': ' + printable(last['failure']) if last['failure'] else ''}")
        if not last["failure"]:
            for line in status_lines(last):
                print_line(line)


def status_lines(last: Mapping[str, Any]) -> Iterator[str]:
    """Yield a GC run that a server reports, as text."""
    from nearkin_shared.savings_table import plural

    gone = ", ".join(
        (
            f"{plural(last['versions'], 'version')} for good",
            plural(last["containers_deleted"], "container"),
            f"{last['containers_rewritten']:,} rewritten",
        )
    )
    yield f"{freed_bytes_net('freed', last['freed_bytes'])}: {gone}"
    yield from _reasons_for_nothing(last)
    if last["due"]:
        condemned = plural(last["pending_delete_containers"], "container")
        yield f"pending      {condemned}: about {last['pending_delete_bytes']:,} bytes more from {last['due']} on"
    if last.get("finished_erasures"):
        yield f"erased       {plural(last['finished_erasures'], 'tenant')}: keys and objects are removed"
        yield from remaining_lines(last["remaining"])
    if last["forgotten"]:
        yield f"deleted      {plural(last['forgotten'], 'version')} that retention.policies do not keep"


def freed_bytes_net(frees: str, size_bytes: int) -> str:
    """Return how many bytes a GC run frees, as text.

    Its record, or what it encoded again, may take more bytes than it deleted.
    """
    if size_bytes >= 0:
        return f"{frees} {size_bytes:,} bytes"
    return f"{frees} nothing yet, and takes {-size_bytes:,} bytes"


def _reasons_for_nothing(report: Mapping[str, Any]) -> Iterator[str]:
    """Yield why a GC run freed nothing, from its JSON form; nothing if it removed something.

    A maintenance worker of an earlier release reports neither deleted versions nor recent containers.
    """
    from nearkin_shared.savings_table import plural

    if report["freed_bytes"] > 0 or report["versions"] or report["containers_deleted"]:
        return
    undeletable, recent = report.get("undeletable_versions"), report.get("recent_containers")
    if undeletable:
        yield (
            f"kept         {plural(undeletable, 'deleted version')} in the undelete window or retained, with "
            "checkpoints of backups: `nearkin ls --deleted` lists all others, `nearkin gc --now` removes those that "
            "are not retained"
        )
    if recent:
        yield (
            f"kept         {plural(recent, 'container')} created less than two graces ago (gc.grace_seconds): "
            "services may still commit versions that use them"
        )
    if undeletable == 0 and not recent and not report["pending_delete_containers"]:
        yield "nothing to free: no version is deleted, and no data are pending delete"


def gc_lines(report: GcReport) -> Iterator[str]:
    """Yield the report of a GC run as text."""
    from nearkin_shared.results_json import gc_json, remaining_json
    from nearkin_shared.savings_table import plural

    frees = "would free" if report.dry_run else "freed"
    gone = ", ".join(
        (
            f"{plural(report.versions, 'version')} for good",
            plural(report.containers_deleted, "container"),
            f"{report.containers_rewritten:,} rewritten",
        )
    )
    yield f"{freed_bytes_net(frees, report.freed_bytes)}: {gone}"
    yield from _reasons_for_nothing(gc_json(report))
    if report.due is not None:
        condemned = plural(report.pending_delete_containers, "container")
        bytes_more = f"{report.pending_delete_bytes:,} bytes more"
        yield (
            f"pending      {condemned}: {bytes_more if report.dry_run else f'about {bytes_more}'} from "
            f"{report.due.astimezone(UTC):%Y-%m-%dT%H:%M:%SZ} on (gc.grace_seconds)"
        )
    if report.finished_erasures:
        yield f"erased       {plural(report.finished_erasures, 'tenant')}: keys and objects are removed"
        yield from remaining_lines(remaining_json(report.remaining))
    if report.pending_erasures:
        yield f"erasures     {plural(report.pending_erasures, 'tenant')} in the grace of an erasure"
    if report.rolled_back_keys:
        keys = plural(report.rolled_back_keys, "key")
        yield f"rolled back  {keys} of which a version, mark or retention record was removed: `nearkin verify` names it"
    if report.refused_records:
        records = plural(report.refused_records, "record")
        yield f"refused      {records} not authenticated by the store's key: `nearkin verify` names them"
    if report.forgotten:
        deleted = "would delete" if report.dry_run else "deleted"
        yield f"{deleted:<12} {plural(report.forgotten, 'version')} that retention.policies do not keep"
    for reason, size_bytes in report.held.items():
        if size_bytes:
            yield f"held         {size_bytes:,} bytes {REASONS.get(reason, reason)}"


def remaining_lines(copies: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the copies that an erasure does not reach, from their JSON form, one a line."""
    if copies:
        yield "out of the reach of the erasure:"
    for copy in copies:
        ends = f", until {copy['until']} at the latest" if copy["until"] else ""
        yield f"  {copy['place']:<16} {copy['holds']}{ends}: {copy['remedy']}"

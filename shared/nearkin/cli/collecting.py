"""`nearkin gc`. Invariant: what a dry run prints is what a round then frees, to the byte, if nothing else happens."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC
from typing import TYPE_CHECKING

from nearkin.cli.session import current_session

if TYPE_CHECKING:
    from nearkin.records import GcReport

REASONS = {
    "undelete": "only by versions that are deleted and can be brought back",
    "bases": "by chunks that lean on it: no version reads it",
    "condemned": "by nothing: condemned, and waiting for its time",
    "beside": "by what it shares a block or container with",
}


def collect(*, dry_run: bool, deleted_too: bool) -> None:
    """Do a round, or look what it would do, and print what it did."""
    from nearkin.cli.output import print_json, say
    from nearkin.formats.answers import gc_json

    session = current_session()
    with session.open_local(read_only=dry_run) as store:
        report = store.gc(dry_run=dry_run, deleted_too=deleted_too)
    if session.as_json:
        print_json(gc_json(report))
    else:
        for line in gc_lines(report):
            say(line)


def gc_lines(report: GcReport) -> Iterator[str]:
    """Yield a round for people."""
    from nearkin.cli.ledger import counted

    frees = "would free" if report.dry_run else "freed"
    gone = ", ".join(
        (
            f"{counted(report.versions, 'version')} for good",
            counted(report.containers_deleted, "container"),
            f"{report.containers_rewritten:,} rewritten",
        )
    )
    yield f"{frees} {report.freed_bytes:,} bytes: {gone}"
    if report.due is not None:
        condemned = counted(report.condemned_containers, "container")
        yield (
            f"condemned    {condemned}: {report.freed_later_bytes:,} bytes more from "
            f"{report.due.astimezone(UTC):%Y-%m-%dT%H:%M:%SZ} on (gc.grace_seconds)"
        )
    if report.forgotten:
        deleted = "would delete" if report.dry_run else "deleted"
        yield f"{deleted:<12} {counted(report.forgotten, 'version')} that retention.policies do not keep"
    for reason, size_bytes in report.held.items():
        if size_bytes:
            yield f"held         {size_bytes:,} bytes {REASONS.get(reason, reason)}"

"""Define the commands that check, repair and collect a store.

They are in a module of their own, read once one of them is asked for: a put starts sooner.
"""

from __future__ import annotations

from pathlib import Path

import click

from nearkin.cli.exit_codes import ExitCode
from nearkin.cli.session import AsWritten, current_session, shared_options
from nearkin_shared.errors import BadInput


@click.command(cls=AsWritten)
@click.argument("key", metavar="[KEY[@VERSION]]", required=False)
@click.option("--version", metavar="V", type=click.IntRange(min=1), help="With KEY: this version alone.")
@click.option("--sample", metavar="SHARE", help="Read only this share of the containers: 1% or 0.01.")
@click.option("--seed", metavar="NUMBER", type=click.IntRange(0), help="Draw the sample by this; printed with it.")
@click.option("--since", metavar="TIME", help="Read only containers written since: 2026-11-20, 2026-11-20T18:00Z, 36h.")
@shared_options
def verify(key: str | None, version: int | None, sample: str | None, seed: int | None, since: str | None) -> int:
    """Check every checksum and fingerprint, and the index.

    Exit code 5 if anything is damaged; the report names the versions it touches.

    With KEY only the containers are read that its versions (with --version: one of them) depend on. A server's KEY is
    downloaded and compared with its BLAKE3.

    nearkin verify
    nearkin verify db/dump
    nearkin verify db/dump@2 --json               # as --version 2
    nearkin verify --sample 1%
    nearkin verify --since 2d --json | jq .damage
    """
    from nearkin.cli.verify import verify as verify_store

    if key is not None:
        from nearkin.cli.key_verification import verify_key

        given = [name for name, value in (("sample", sample), ("seed", seed), ("since", since)) if value is not None]
        if given:
            raise BadInput(f"--{given[0]}: not with KEY, whose containers are all read")
        return verify_key(key, version)
    if version is not None:
        raise BadInput("--version: only with KEY")
    return verify_store(sample, seed, since)


@click.command(cls=AsWritten)
@click.option(
    "--from",
    "files",
    metavar="FILE",
    multiple=True,
    type=click.Path(path_type=Path),
    help="A copy of a damaged object, or content that was put once; may be given again.",
)
@shared_options
def repair(files: tuple[Path, ...]) -> int:
    """Repair damaged objects as far as possible.

    The command verifies everything first. Damaged objects are repaired from their parity (storage.parity), from
    copies given with --from, or from the same chunks elsewhere in the store; the rest stays in quarantine until its
    content is put again. Readable bytes are never removed. Exit code 5 if damage remains.

    nearkin repair
    nearkin repair --from /backup/containers/1a200/1a20082bad40bb55.nkc
    nearkin repair --from dump-of-last-week.sql
    """
    from nearkin.cli.verify import repair as repair_store

    return repair_store(files)


@click.command(cls=AsWritten)
@click.option("--dry-run", is_flag=True, help="Report what a GC run would free and what retains the rest.")
@click.option("--deleted-too", is_flag=True, help="With --dry-run: as if nothing deleted could come back any more.")
@click.option("--pause", is_flag=True, help="Start no GC runs, and end an active one before its next step.")
@click.option("--resume", is_flag=True, help="Allow GC runs again.")
@click.option("--now", is_flag=True, help="Remove all that is deleted at once, whatever time it has left.")
@click.option("--yes", is_flag=True, help="With --now: do not ask.")
@click.option(
    "--status",
    is_flag=True,
    help="Show whether GC is paused and what is pending delete; of a server also the last run.",
)
@shared_options
def gc(dry_run: bool, deleted_too: bool, pause: bool, resume: bool, status: bool, now: bool, yes: bool) -> int:
    """Free the bytes that no version needs, in one GC run.

    Versions whose undelete window is over are removed at once. Data that no version needs any more become pending
    delete, and a later GC run frees them after gc.grace_seconds (12 hours by default). At its end a GC run deletes
    the versions that retention.policies do not keep, as rm does.

    Exit code 5 if a version, tombstone or retention record that an earlier run listed was removed: nothing of a
    removed version is freed before it is restored, or given up by nearkin rebuild-index.

    put, get, rm and all reading commands continue meanwhile: a put waits for one step of the run, about 0.1 s. A GC
    run does not start while another process writes; if `nearkin serve` runs, start it there with --server.

    nearkin gc --dry-run
    nearkin gc --dry-run --deleted-too       # what the latest rm will have freed in the end
    nearkin gc --json | jq .freed_bytes
    nearkin gc --pause                       # for commands, gateways and maintenance workers
    nearkin gc --now                         # the disk is full: remove all deleted versions, irrevocably
    """
    from nearkin.cli.gc import change, collect
    from nearkin.cli.rm import purge

    actions = [name for name, given in (("pause", pause), ("resume", resume), ("status", status)) if given]
    if len(actions) + dry_run + now > 1:
        raise BadInput("--dry-run, --now, --pause, --resume, --status: one of them")
    if yes and not now:
        raise BadInput("--yes: only with --now")
    if now:
        purge(None, None, "", confirmed=yes)
        return ExitCode.DONE
    if actions:
        change(actions[0])
        return ExitCode.DONE
    if deleted_too and not dry_run:
        raise BadInput("--deleted-too: only with --dry-run")
    return collect(dry_run=dry_run, deleted_too=deleted_too)


@click.command("rebuild-index", cls=AsWritten)
@shared_options
def rebuild_index() -> int:
    """Rebuild the index from the stored objects.

    Versions whose manifests were removed are dropped.

    Exit code 5 if some stored objects cannot be read; these are left out.

    nearkin rebuild-index
    """
    from nearkin.cli.output import print_json, rebuild_json, rebuild_lines
    from nearkin.cli.output import report as report_line
    from nearkin.cli.progress import count_bar

    session = current_session()
    with session.open_local(read_only=False) as store, count_bar("rebuild", shown=not session.as_json) as progress:
        report = store.rebuild_index(progress=progress)
    if session.as_json:
        print_json(rebuild_json(report))
    else:
        for line in rebuild_lines(report):
            report_line(line)
    return ExitCode.DAMAGED if report.skipped else ExitCode.DONE

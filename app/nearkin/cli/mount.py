# size: one command in a module of its own, imported when it is called
"""Run `nearkin mount`.

Invariant: it ends with code 0 if it is unmounted or interrupted.
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import click

from nearkin.cli.session import AsWritten, complete_folder, current_session, shared_options


@click.command(cls=AsWritten)
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path), shell_complete=complete_folder)
@click.option("--allow-other", is_flag=True, help="Let other users in; modes and owners of the entries then apply.")
@shared_options
def mount(folder: Path, allow_other: bool) -> None:
    """Mount the store, read-only, in the empty folder DIR.

    Ctrl-C or `fusermount -u DIR` unmounts it.

    DIR/KEY/7 is version 7 of KEY: a folder for a tree, a file for a version of put. DIR/KEY/latest and
    DIR/KEY/2026-11-28T10:15:00Z are symlinks to versions. New versions appear within 10 seconds. A part of a key that
    could be the name of a version, such as the 3 of home/3, is shown as %33. Damaged data is an input/output error.

    nearkin mount /mnt/backups &
    diff -r /home/ana /mnt/backups/home/latest
    fusermount -u /mnt/backups

    Needs FUSE: pip install 'nearkin[mount]', and the package fuse3 of the distribution.
    """
    from nearkin.cli.output import print_line, report
    from nearkin.trees.fuse_mount import check_mount_point, load_fuse, mount_store
    from nearkin.trees.mounted_store import MountedStore
    from nearkin_shared.utils.terminal import printable, to_json

    session = current_session()
    load_fuse()
    check_mount_point(folder)

    def announce() -> None:
        if session.as_json:
            print_line(to_json({"folder": str(folder)}))  # one line, so that a waiting reader knows its end
        else:
            command = printable(f"fusermount -u {shlex.quote(str(folder))}")
            report(f"mounted at {printable(str(folder))}; Ctrl-C or `{command}` unmounts it")
        if sys.stdout is not None:
            sys.stdout.flush()

    with session.open() as store:
        mount_store(MountedStore(store), folder, announce, allow_other=allow_other)

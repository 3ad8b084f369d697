# size: one command in a module of its own, imported when it is called
"""`nearkin init`: create a store, the only command that does."""

from __future__ import annotations

import click

from nearkin.cli.session import AsWritten, current_session, shared_options
from nearkin_shared.errors import BadInput


@click.command(cls=AsWritten)
@click.argument("folder", metavar="[PATH]", required=False)
@shared_options
def init(folder: str | None) -> None:
    """Create a store in a new or empty folder.

    nearkin init /mnt/backups/nearkin
    NEARKIN_STORE=/mnt/backups/nearkin nearkin init

    No other command creates one: where a disk is not mounted, put fails and does not fill the disk below it.
    On a network filesystem set index.path too (NEARKIN_INDEX__PATH=/var/cache/nearkin; docs/reference/filesystems.md).
    """
    from nearkin.cli.arguments import store_folder
    from nearkin.cli.output import print_json, print_line
    from nearkin_shared.utils.signals import interrupts_wait
    from nearkin_shared.utils.terminal import printable

    session = current_session()
    if folder is not None:
        if session.store is not None:
            raise BadInput(f"store {session.store!r} and {folder!r}: name one of them")
        session.store = folder
    settings, server = session.choose()
    if server is not None:
        raise BadInput("init: creates a local store, name it with --store; services create theirs (storage.create)")
    path = store_folder(settings.store)
    with interrupts_wait():
        from nearkin.store import create_store

    with create_store(path, settings=settings) as store:
        root, store_id = str(store.root), store.store_id
    if session.as_json:
        print_json({"store": root, "id": store_id})
    else:
        print_line(f"created store {store_id[:8]} at {printable(root)}")

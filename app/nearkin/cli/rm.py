"""Run `nearkin rm` and `nearkin undelete`.

Invariant: exit code 0 means that the change is durable, for every reader.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Literal

from nearkin.cli.session import current_session
from nearkin_shared.errors import BadInput, NotFound

if TYPE_CHECKING:
    from nearkin.store_copy import AnyStore

WARNING = (
    "This cannot be undone: `nearkin undelete` brings nothing back, the undelete window and the grace of garbage "
    "collection are passed over, and restores that run meanwhile may fail."
)


def change(what: Literal["delete", "undelete"], done: str, key: str, version: int | None, reason: str) -> None:
    """Delete or undelete, and print how many versions that were."""
    from nearkin.cli.arguments import check_key
    from nearkin.cli.output import print_json, report
    from nearkin.cli.tree_location import resolve_key
    from nearkin_shared.savings_table import plural
    from nearkin_shared.utils.terminal import printable

    session = current_session()
    check_key(key)
    with session.open(read_only=False) as store:
        has_deleted = partial(_is_deleted, store) if what == "undelete" else None
        key, version = resolve_key(store, "rm" if what == "delete" else what, key, version, has_deleted)
        count = (store.delete if what == "delete" else store.undelete)(key, version, reason=reason)
    if session.as_json:
        print_json({"key": key, "version": version, done: count})
    else:
        report(f"{done} {plural(count, 'version')} of {printable(key)}")


def purge(key: str | None, version: int | None, reason: str, *, confirmed: bool) -> None:
    """Delete versions of a key and remove their bytes at once.

    Without a key, the bytes of all deleted versions are removed.
    """
    from contextlib import suppress

    from nearkin.cli.arguments import check_key
    from nearkin.cli.gc import gc_lines
    from nearkin.cli.output import print_json, print_line
    from nearkin.cli.progress import steps_bar
    from nearkin.cli.tree_location import is_existing_key, resolve_key
    from nearkin_shared.results_json import gc_json

    session = current_session()
    if session.choose()[1] is not None:
        raise BadInput("--now: not through a gateway; stop it, and run the same on its host with --store FOLDER")
    if key is not None:
        check_key(key)
    _confirm(key, version, confirmed=confirmed)
    with session.open_local(read_only=False) as store, steps_bar("purge", shown=not session.as_json) as steps:
        count = 0
        store.pauses.check()  # before anything is deleted: its bytes could not be removed
        if key is not None:
            key, version = resolve_key(
                store, "rm", key, version, lambda name: is_existing_key(store, name) or _is_deleted(store, name)
            )
            with suppress(NotFound):  # deleted earlier: `purge` raises if it never existed
                count = store.delete(key, version, reason=reason)
        report = store.purge(key, version, steps=steps)
    if session.as_json:
        print_json({"key": key, "version": version, "deleted": count, **gc_json(report)})
        return
    for line in gc_lines(report):
        print_line(line)


def _is_deleted(store: AnyStore, key: str) -> bool:
    """Return whether a key has deleted versions."""
    return any(one.key == key for one in store.list_deleted(key))


def _confirm(key: str | None, version: int | None, *, confirmed: bool) -> None:
    """Ask for confirmation on a terminal.

    Raises BadInput without a terminal, or if the answer is no.
    """
    import sys

    import click

    from nearkin_shared.utils.terminal import printable

    if confirmed:
        return
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise BadInput("--now: removes bytes for good; pass --yes to run without a terminal")
    what = (
        "all that is deleted" if key is None else f"{printable(key)}{'' if version is None else f' version {version}'}"
    )
    click.echo(WARNING, err=True)
    if not click.confirm(f"Remove {what} for good?", err=True):
        raise BadInput("--now: not confirmed; nothing was removed")

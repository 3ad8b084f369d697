"""`nearkin rm` and `nearkin undelete`. Invariant: exit code 0 means that it is done, durably, for every reader."""

from __future__ import annotations

from typing import Literal

from nearkin.cli.session import current_session


def change(what: Literal["delete", "undelete"], done: str, key: str, version: int | None, reason: str) -> None:
    """Delete or undelete, and print how many versions that were."""
    from nearkin.cli.arguments import check_key
    from nearkin.cli.ledger import counted
    from nearkin.cli.output import print_json, report
    from nearkin.printing import printable

    session = current_session()
    check_key(key)
    with session.open(read_only=False) as store:
        count = (store.delete if what == "delete" else store.undelete)(key, version, reason=reason)
    if session.as_json:
        print_json({"key": key, "version": version, done: count})
    else:
        report(f"{done} {counted(count, 'version')} of {printable(key)}")

"""`nearkin config`. Invariant: settings have one form, (name, value, source), whoever runs with them.

No secret is among them: `nearkin.config.load` hides its own, the gateway those of the services.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nearkin.cli.session import Session

SettingRows = Mapping[str, tuple[object, str]]
"""By dotted name: the value and where it came from."""


def local_settings(session: Session) -> SettingRows:
    """Return the settings of commands on this machine."""
    _, origins = session.load()
    return {name: (origin.value, origin.source) for name, origin in origins.items()}


def server_settings(session: Session, server: str, patch: Mapping[str, object]) -> SettingRows:
    """Return the settings that the services behind a server run with, once `patch` is merged in."""
    settings, _ = session.load()
    with session.connect(server, settings) as store:
        told = store.change_config(patch) if patch else store.config()
    source = f"{server} revision {told['revision']}" if "revision" in told else server
    return {name: (value, source) for name, value in _flat(told.get("settings", told), "")}


def print_settings(session: Session, rows: SettingRows) -> None:
    """Print settings as a table or as JSON."""
    from nearkin.cli.output import console, print_json
    from nearkin.printing import printable

    if session.as_json:
        print_json({name: {"value": value, "source": source} for name, (value, source) in rows.items()})
        return
    from rich.box import SIMPLE
    from rich.table import Table

    table = Table("setting", "value", "source", box=SIMPLE, pad_edge=False)
    for name, (value, source) in rows.items():
        table.add_row(printable(name), "-" if value is None else printable(str(value)), printable(source))
    console().print(table)


def _flat(tree: Any, prefix: str) -> Iterator[tuple[str, object]]:
    for name, value in tree.items() if isinstance(tree, Mapping) else ():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value

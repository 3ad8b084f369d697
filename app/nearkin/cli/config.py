"""Run `nearkin config`.

No secret is shown: `nearkin_shared.config.settings.load` hides its own, the gateway those of the services.

Invariant: settings have one form, (name, value, source), in commands and in services.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from nearkin_shared.errors import BadInput, NearkinError

if TYPE_CHECKING:
    from nearkin.cli.session import Session
    from nearkin_shared.config.reference import SettingDoc
    from nearkin_shared.config.settings import Settings

SettingRows = Mapping[str, tuple[object, str]]
"""By dotted name: the value and where it came from."""


def local_settings(session: Session) -> SettingRows:
    """Return the settings of commands on this machine, with those that the store records."""
    settings, origins = session.load()
    rows = {name: (origin.value, origin.source) for name, origin in origins.items()}
    return rows if settings.store is None else {**rows, **_store_settings(session, settings)}


def _store_settings(session: Session, settings: Settings) -> SettingRows:
    """Return the settings that the local store records.

    If the store cannot be opened there are none: settings can be shown without it.
    """
    from dataclasses import asdict

    from nearkin_shared.config.loader import displayed_value
    from nearkin_shared.config.settings import FIXED_FIELDS

    try:
        with session.open_folder() as store:
            if store.chunking is None:
                return {}
            used, given = dict(_flat(asdict(store.settings), "")), dict(_flat(asdict(settings), ""))
            recorded = store.chunking.values()
    except (NearkinError, OSError):
        return {}
    profile = f"profile {store.settings.profile} of the store"
    changed = {
        name: (displayed_value(name, value), profile)
        for name, value in used.items()
        if name not in FIXED_FIELDS and value != given.get(name)
    }
    ours = {name for name, value in recorded.items() if name not in session.explicit and used[name] == value}
    return changed | {name: (used[name], "store") for name in ours}


def server_settings(session: Session, server: str, patch: Mapping[str, object]) -> SettingRows:
    """Return the settings of the services behind a server, after `patch` is merged in."""
    settings, _ = session.load()
    with session.connect(server, settings) as store:
        answer = store.change_config(patch) if patch else store.config()
    source = f"{server} revision {answer['revision']}" if "revision" in answer else server
    return {name: (value, source) for name, value in _flat(answer.get("settings", answer), "")}


def chosen(names: Sequence[str]) -> list[SettingDoc]:
    """Return the settings and sections of these names, with their descriptions.

    Raises BadInput for a name that is neither.
    """
    from nearkin_shared.config.reference import describe_settings

    known = list(describe_settings())
    found: dict[str, SettingDoc] = {}
    for name in names:
        some = {
            each.name: each for each in known if each.name == name or each.name.startswith((f"{name}.", f"{name}["))
        }
        if not some:
            near = get_close_matches(name, {part for each in known for part in (each.name, each.name.split(".")[0])})
            hint = f"; did you mean {' or '.join(near)}?" if near else "; `nearkin config` lists them all"
            raise BadInput(f'setting "{name}": there is none, and no such section{hint}')
        found |= some
    return list(found.values())


def print_described_settings(session: Session, rows: SettingRows, settings: Sequence[SettingDoc]) -> None:
    """Print some settings with their allowed values and effects, as a table or as JSON."""
    from nearkin.cli.output import print_json, print_table
    from nearkin_shared.utils.terminal import printable

    if session.as_json:
        parts = {each.name: {"takes": each.wants, "meaning": each.meaning, "hot": each.hot} for each in settings}
        values = {name: {"value": value, "source": source} for name, (value, source) in rows.items()}
        print_json({name: values.get(name, {}) | part for name, part in parts.items()})
        return
    lines = []
    for each in settings:
        value, source = rows.get(each.name, (None, "-"))
        shown = _written(value)
        meaning = f"{each.meaning} (hot)" if each.hot else each.meaning
        lines.append((each.name, shown, printable(source), each.wants.replace("`", ""), meaning.replace("`", "")))
    print_table(("setting", "value", "source", "takes", "effect"), lines, whole=("setting",))


def print_index(session: Session) -> None:
    """Print kind, memory and expected loss of the local store's index, if there is one."""
    from nearkin.cli.output import describe_index, print_line

    if session.as_json or session.load()[0].store is None:
        return
    try:
        with session.open_folder() as store:
            stats = store.stats()
    except (NearkinError, OSError):
        return
    if stats.index is not None:
        print_line(f"index: {describe_index(stats.index, stats.ledger.raw_chunks + stats.ledger.delta_chunks)}")


def print_settings(session: Session, rows: SettingRows) -> None:
    """Print settings as a table or as JSON."""
    from nearkin.cli.output import print_json, print_table
    from nearkin_shared.utils.terminal import printable

    if session.as_json:
        print_json({name: {"value": value, "source": source} for name, (value, source) in rows.items()})
        return
    lines = [(printable(name), _written(value), printable(source)) for name, (value, source) in rows.items()]
    print_table(("setting", "value", "source"), lines, whole=("setting",))


def _written(value: object) -> str:
    """Return a value as a file of settings has it, a dash for none."""
    from nearkin_shared.utils.terminal import printable

    if isinstance(value, bool):
        return str(value).lower()
    return "-" if value is None else printable(str(value))


def _flat(tree: Any, prefix: str) -> Iterator[tuple[str, object]]:
    for name, value in tree.items() if isinstance(tree, Mapping) else ():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value

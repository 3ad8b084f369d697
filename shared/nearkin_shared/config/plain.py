"""Read plain settings without pydantic.

Importing pydantic and building its validators takes 100 ms: a command with one setting took 0.25 s, and takes 0.15 s
without. A value is plain if its type determines it, or if its text has only one interpretation.

Invariant: pydantic would accept every value accepted here, with the same result; all other values are left to it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import is_dataclass, replace
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, NamedTuple, Union, get_args, get_origin, get_type_hints

from nearkin_shared.config.settings import Settings
from nearkin_shared.config.validators import Rule, SizeRange
from nearkin_shared.limits import GIB, KIB, MIB

UNITS = {"kb": 1000, "mb": 1000**2, "gb": 1000**3, "kib": KIB, "mib": MIB, "gib": GIB}
_NUMBER = r"[0-9]{1,9}"
_SIZE = rf"(?ai)([0-9]{{1,6}})({'|'.join(UNITS)})|[0-9]{{1,15}}"
"""Values below 2^53, because pydantic counts in floats."""
_BOOLS = {"true": True, "false": False}
SECTIONS: Mapping[str, Any] = {
    name: field.default for name, field in Settings.__dataclass_fields__.items() if is_dataclass(field.default)
}


class _Kind(NamedTuple):
    """The values that a field accepts: one type, and a rule if there is one."""

    of: type
    rule: Rule | None


class _NotPlain(ValueError):
    """A value that pydantic must validate."""


def make_plain_settings(values: Mapping[str, Any]) -> Settings | None:
    """Return the settings made of nested values; None if a value is not plain or is refused."""
    try:
        changes = _section_values(None, {name: value for name, value in values.items() if name not in SECTIONS})
        for name in values.keys() & SECTIONS.keys():
            if not isinstance(values[name], Mapping):
                return None
            changes[name] = replace(SECTIONS[name], **_section_values(name, values[name]))
        return replace(Settings(), **changes)
    except ValueError:  # pydantic then finds the same error and reports it
        return None


def nest_values(variables: Mapping[str, str]) -> dict[str, Any] | None:
    """Return nested values from text by names such as `tenant` and `features__algorithm`.

    None if a name is not that of a field that takes a single value.
    """
    found: dict[str, Any] = {}
    for name, text in variables.items():
        section, separator, field = name.partition("__")
        if separator and section in SECTIONS and field in _field_kinds(section):
            found.setdefault(section, {})[field] = text
        elif not separator and name in _field_kinds(None):
            found[name] = text
        else:
            return None
    return found


def _section_values(section: str | None, values: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the values of one section. Raises ValueError if one is refused or not plain."""
    if not values:
        return {}
    kinds = _field_kinds(section)
    if not values.keys() <= kinds.keys():
        raise _NotPlain
    return {name: _convert_value(kinds[name], value) for name, value in values.items()}


def _convert_value(kind: _Kind, value: object) -> Any:
    if isinstance(value, str) and kind.of is not str:
        value = _parse_text(kind, value)
    if type(value) is not kind.of:  # True is an int to isinstance
        raise _NotPlain
    return value if kind.rule is None else kind.rule.check(value)


def _parse_text(kind: _Kind, text: str) -> object:
    """Parse a text that has one interpretation only; None for any other."""
    if kind.of is bool:
        return _BOOLS.get(text)
    if kind.of is int and isinstance(kind.rule, SizeRange):
        size = re.fullmatch(_SIZE, text)
        return size and (int(size[1]) * UNITS[size[2].lower()] if size[2] else int(text))
    return int(text) if kind.of is int and re.fullmatch(_NUMBER, text) else None


@cache
def _field_kinds(section: str | None) -> dict[str, _Kind]:
    """Return the fields of a section (None: of Settings) that take text, a number or a bool."""
    owner = Settings if section is None else type(SECTIONS[section])
    hints = get_type_hints(owner, include_extras=True).items()
    return {name: kind for name, hint in hints if (kind := _field_kind(hint, None)) is not None}


def _field_kind(hint: Any, rule: Rule | None) -> _Kind | None:
    if get_origin(hint) is Annotated:
        inner, *notes = get_args(hint)
        rules = [note for note in notes if isinstance(note, Rule)]
        return _field_kind(inner, rules[0]) if len(rules) == len(notes) == 1 and rule is None else None
    if get_origin(hint) in (Union, UnionType):
        others = [each for each in get_args(hint) if each is not NoneType]
        return _field_kind(others[0], rule) if len(others) == 1 else None
    return _Kind(hint, rule) if hint in (str, int, bool, float) else None

# size: fields of a form, apart from the pages that show them
"""Describe run-time settings as fields of a form.

Invariant: a field lists the values that the setting accepts; the API validates them.
"""

from __future__ import annotations

from typing import Any

from nearkin_shared.config.runtime import rule_of
from nearkin_shared.config.settings import HOT_FIELDS, Settings
from nearkin_shared.config.validators import NameChoice, NumberRange
from nearkin_shared.utils.frozen import frozen


@frozen
class SettingField:
    """One run-time setting: `choices` of a name, bounds of a number, neither for a flag."""

    name: str
    section: str
    field: str
    value: Any
    changed: bool
    """By PATCH, over the file."""
    choices: tuple[str, ...] = ()
    least: int | None = None
    most: int | None = None

    @property
    def stops_service(self) -> bool:
        """Return whether this is the switch that stops all work."""
        return self.name == "service.paused"


def hot_fields(settings: Settings, changes: dict[str, dict[str, Any]]) -> list[tuple[str, list[SettingField]]]:
    """Return (section, its fields)."""
    found: dict[str, list[SettingField]] = {}
    for name in sorted(HOT_FIELDS):
        section, _, field = name.partition(".")
        holder = getattr(settings, section)
        rule = rule_of(name)
        found.setdefault(section, []).append(
            SettingField(
                name=name,
                section=section,
                field=field,
                value=getattr(holder, field),
                changed=field in changes.get(section, {}),
                choices=rule.known if isinstance(rule, NameChoice) else (),
                least=rule.least if isinstance(rule, NumberRange) else None,
                most=rule.most if isinstance(rule, NumberRange) else None,
            )
        )
    return list(found.items())

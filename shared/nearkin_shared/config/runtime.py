# size: one reason to change, the JSON schema of settings that change at run time
"""Derive the JSON schema of changes of hot settings.

Invariant: types and bounds are those of the settings themselves; none is written twice.
"""

from __future__ import annotations

from typing import Annotated, Any, get_args, get_origin, get_type_hints

from nearkin_shared.config.settings import HOT_FIELDS, Settings
from nearkin_shared.config.validators import NameChoice, NumberRange, SizeRange


def rule_of(name: str) -> object:
    """Return the rule of a setting by its dotted name; None if its type is enough."""
    section, _, field = name.partition(".")
    hint = get_type_hints(type(getattr(Settings(), section)), include_extras=True)[field]
    return get_args(hint)[1] if get_origin(hint) is Annotated else None


def changes_schema(*, nullable: bool = False) -> dict[str, Any]:
    """Return the JSON schema of changes: sections of hot fields; `nullable`: of a merge patch."""
    sections: dict[str, dict[str, Any]] = {}
    for name in sorted(HOT_FIELDS):
        section, _, field = name.partition(".")
        schema = _rule_schema(rule_of(name))
        sections.setdefault(section, {})[field] = {"anyOf": [schema, {"type": "null"}]} if nullable else schema
    return {
        "type": "object",
        "properties": {
            section: {"type": "object", "properties": fields, "additionalProperties": False}
            for section, fields in sections.items()
        },
        "additionalProperties": False,
    }


def _rule_schema(rule: object) -> dict[str, Any]:
    match rule:
        case NameChoice():
            return {"type": "string", "enum": list(rule.known)}
        case SizeRange():  # or text with a unit, such as `8KiB`
            return {"type": ["integer", "string"], "minimum": rule.least, "maximum": rule.most}
        case NumberRange():
            return {"type": "integer", "minimum": rule.least, "maximum": rule.most}
        case None:
            return {"type": "boolean"}
    raise TypeError(f"rule {rule!r}: no JSON schema; add a case to _rule_schema")

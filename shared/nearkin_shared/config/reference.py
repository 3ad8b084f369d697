"""Describe the settings for users.

    describe_settings() -> SettingDoc("delta.max_depth", "1 to 63", 4, "Deltas to ...", hot=True, secret=False), ...

Python drops docstrings of fields when it compiles, so they are read from the source, which every installation has.

Invariant: each description is the docstring below the field; none is written twice.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from itertools import pairwise
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from nearkin_shared.config import validators
from nearkin_shared.config.settings import FIXED_FIELDS, HOT_FIELDS, SECRETS, Settings
from nearkin_shared.limits import GIB, KIB, MIB
from nearkin_shared.utils.frozen import frozen

_UNITS = ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB"))
_PLAIN = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}


@frozen
class SettingDoc:
    """A setting: dotted name, accepted values, default and description."""

    name: str
    wants: str
    default: object
    meaning: str
    hot: bool
    secret: bool


@frozen
class SettingSection:
    """A section ("" for settings outside of sections): its description and its settings."""

    name: str
    meaning: str
    settings: tuple[SettingDoc, ...]


def sections() -> list[SettingSection]:
    """Return all sections that have settings, in the order of `nearkin config`."""
    found = {"": SettingSection("", "Settings of every command.", tuple(_settings(Settings, "")))}
    for field in fields(Settings):
        section = _section_of(get_type_hints(Settings)[field.name])
        if section is not None and (settings := tuple(_settings(section, f"{field.name}."))):
            meaning = inspect.cleandoc(section.__doc__ or "")
            found[field.name] = SettingSection(field.name, meaning, settings)
    return list(found.values())


def describe_settings() -> Iterator[SettingDoc]:
    """Yield all settings, section by section."""
    for section in sections():
        yield from section.settings


def _settings(section: type[Any], prefix: str) -> Iterator[SettingDoc]:
    hints, descriptions = get_type_hints(section, include_extras=True), _read_descriptions(section)
    for field in fields(section):
        kind, name = hints[field.name], f"{prefix}{field.name}"
        if _section_of(kind) is not None or name in FIXED_FIELDS:
            continue
        default = field.default
        yield SettingDoc(
            name, _describe_type(kind), default, descriptions.get(field.name, ""), name in HOT_FIELDS, name in SECRETS
        )
        if get_origin(kind) is tuple and (entry := _section_of(get_args(kind)[0])) is not None:
            yield from _settings(entry, f"{name}[].")


def _section_of(kind: Any) -> type[Any] | None:
    return kind if isinstance(kind, type) and is_dataclass(kind) else None


def _describe_type(kind: Any) -> str:
    """Describe the accepted values of a field in a few words."""
    rule: object = None
    plain, optional = field_type(kind)
    if get_origin(plain) is Annotated:
        plain, rule = get_args(plain)
        plain, unset = field_type(plain)
        optional |= unset
    description = _rule_of_type(rule) or ("tables" if get_origin(plain) is tuple else _PLAIN.get(plain, "text"))
    return f"{description}, or unset" if optional else description


def field_type(kind: Any) -> tuple[Any, bool]:
    """Return the type of a field when it is set, and whether it may be unset."""
    if get_origin(kind) not in (UnionType, Union):
        return kind, False
    return next(part for part in get_args(kind) if part is not NoneType), NoneType in get_args(kind)


def _rule_of_type(rule: object) -> str | None:
    description: str | None = None
    match rule:
        case validators.NameChoice():
            description = ", ".join(f"`{name}`" for name in rule.known)
        case validators.NameList():
            description = f"`none`, `all`, or a list of {', '.join(f'`{name}`' for name in rule.known)}"
        case validators.SizeRange():
            description = f"bytes, {format_units(rule.least)} to {format_units(rule.most)}"
        case validators.NumberRange():
            description = f"{rule.least} to {rule.most}"
        case validators.ShareRange():
            description = f"a share, 0 to {rule.most:g}"
        case validators.ParityScheme():
            description = "`none`, or `rs-K-M`"
        case validators.ServerUrl():
            description = "a URL"
        case validators.LocalFolder():
            description = "an absolute path, or one that starts with ~"
        case validators.TopicTenants():
            description = "a list, a table, or text with commas"
        case validators.Origins() | validators.ShardUrls():
            description = "a list, or text with commas"
        case validators.TagLists():
            description = "a list"
        case validators.ObjectPrefix():
            description = "a folder of names that ends in /"
    return description


def format_units(size_bytes: int) -> str:
    """Format bytes by the largest binary unit that divides them: 64 KiB, 1000."""
    for unit, name in _UNITS:
        if size_bytes and size_bytes % unit == 0:
            return f"{size_bytes // unit} {name}"
    return str(size_bytes)


def _read_descriptions(section: type[Any]) -> Mapping[str, str]:
    """Return the docstring below each field of a class, as one line."""
    (made,) = ast.parse(inspect.getsource(section)).body
    assert isinstance(made, ast.ClassDef)
    found = {}
    for field, after in pairwise(made.body):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(after, ast.Expr)
            and isinstance(after.value, ast.Constant)
            and isinstance(after.value.value, str)
        ):
            found[field.target.id] = " ".join(after.value.value.split())
    return found

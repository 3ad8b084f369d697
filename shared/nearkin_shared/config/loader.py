"""Load settings from their sources and validate them.

Precedence, lowest to highest: built-in defaults, profile, TOML file, `NEARKIN_*` variables, explicit overrides.

Invariant: the error for a refused value names the field, the value and the accepted values.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from nearkin_shared.config import settings as config_settings
from nearkin_shared.config.plain import SECTIONS, make_plain_settings, nest_values
from nearkin_shared.config.settings import FIXED_FIELDS, HIDDEN, PROFILES, SECRETS, Settings
from nearkin_shared.config.validators import InvalidValue, UnknownName
from nearkin_shared.errors import ConfigError, choose
from nearkin_shared.utils.terminal import printable
from nearkin_shared.utils.url_masking import mask_urls

if TYPE_CHECKING:
    from pydantic import ValidationError

ENVIRONMENT_PREFIX = "NEARKIN_"
OTHER_VARIABLES = frozenset({"kernels", "cpu", "cache", "debug", "failpoint", "from_token"})
"""`NEARKIN_` names that are not settings: read before settings exist, or by tools."""
FILE_BYTES_MAX = 1 << 20
UNSET_SOURCES = frozenset({"default", "profile"})
"""First words of the sources of values that the user did not set."""
TABLES_DEPTH_MAX = 32
"""Bound of nested tables; the settings use three levels."""


class Origin(NamedTuple):
    """The value of a setting as it may be displayed, and its source.

    `source` is `default`, `profile NAME`, `file PATH`, `environment NAME` or `argument`.
    """

    value: object
    source: str


def load(
    config_file: str | Path | None = None,
    overrides: Mapping[str, object] | None = None,
    *,
    use_environment: bool = True,
) -> tuple[Settings, dict[str, Origin]]:
    """Return the settings and, by dotted name, the origin of each.

    `overrides` is nested as the settings are. Raises ConfigError, one line, for any value that is refused.
    """
    layers: list[tuple[str, dict[str, Any]]] = []
    if config_file is not None:
        layers.append((f"file {config_file}", _read_toml(Path(config_file))))
    if use_environment:
        layers.append(("environment", _read_environment()))
    if overrides:
        layers.append(("argument", {name: value for name, value in overrides.items() if value is not None}))
    for source, layer in layers:
        for name, _ in _flatten(layer):
            if name in FIXED_FIELDS:
                _refuse_removed(name, {name: source})
    source, profile = next(
        ((source, layer["profile"]) for source, layer in reversed(layers) if "profile" in layer), ("default", "default")
    )
    if not isinstance(profile, str) or profile not in PROFILES:
        refused = choose("profile", _written_form(profile), PROFILES)
        raise ConfigError(f"{refused}{_set_by('profile', {'profile': source})}")
    layers.insert(0, (f"profile {profile}", {name: dict(values) for name, values in PROFILES[profile].items()}))
    merged: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for source, layer in layers:
        _merge(merged, layer, source, sources, "")
    settings = _validate(merged, sources)
    return settings, {
        name: Origin(displayed_value(name, value), _name_source(_source_of(name, sources), name))
        for name, value in _flatten(asdict(settings))
        if name not in FIXED_FIELDS
    }


def explicit_names(origins: Mapping[str, Origin]) -> frozenset[str]:
    """Return the dotted names of the settings that a file, the environment or an argument set."""
    return frozenset(name for name, origin in origins.items() if origin.source.split(" ")[0] not in UNSET_SOURCES)


def with_changes(settings: Settings, changes: Mapping[str, object]) -> Settings:
    """Merge nested `changes` into `settings` and validate the result.

    Merges as RFC 7396 does, without deletion.
    """
    merged = asdict(settings)
    _merge(merged, changes, "argument", {}, "")
    return _validate(merged, {})


def _validate(merged: Mapping[str, Any], sources: Mapping[str, str]) -> Settings:
    plain = make_plain_settings(merged)
    if plain is not None:
        return plain
    for name, _ in _flatten(merged):
        if name not in FIXED_FIELDS:
            _refuse_removed(name, sources)
    from pydantic import TypeAdapter, ValidationError

    try:
        return TypeAdapter(Settings).validate_python(merged)
    except ValidationError as err:
        raise _one_line(err, sources) from err


def _refuse_removed(name: str, sources: Mapping[str, str]) -> None:
    """Raise ConfigError if the setting became a constant, or part of another setting."""
    from nearkin_shared.config.removed import removal_text

    refusal = removal_text(name)
    if refusal is not None:
        raise ConfigError(f"{name}: {refusal}{_set_by(name, sources)}")


def _read_toml(path: Path) -> dict[str, Any]:
    import tomllib  # 2 ms, and most commands read no config file

    try:
        with path.open("rb") as file:
            text = file.read(FILE_BYTES_MAX + 1)
        if len(text) > FILE_BYTES_MAX:
            raise ConfigError(f'config file "{path}": larger than {FILE_BYTES_MAX:,} bytes; use a smaller file')
        found = tomllib.loads(text.decode("utf-8-sig"))  # some editors write a byte order mark
    except FileNotFoundError as err:
        raise ConfigError(f'config file "{path}": no such file; check the path') from err
    except OSError as err:
        raise ConfigError(f'config file "{path}": {err.strerror or err}') from err
    except (ValueError, RecursionError) as err:  # invalid TOML; a number of 5,000 digits is a ValueError too
        raise ConfigError(f'config file "{path}": {err}') from err
    _check_depth(found, path)
    return found


def _check_depth(found: object, path: Path) -> None:
    """Refuse tables nested deeper than TABLES_DEPTH_MAX. Raises ConfigError."""
    level = [found]
    for _ in range(TABLES_DEPTH_MAX):
        level = [
            below
            for value in level
            for below in (value.values() if isinstance(value, dict) else value if isinstance(value, list) else ())
        ]
    if level:
        raise ConfigError(
            f'config file "{path}": tables or lists nested at depth {TABLES_DEPTH_MAX} or more; reduce the nesting'
        )


def _read_environment() -> dict[str, Any]:
    # Ignore case, as pydantic-settings does below; of two variables that differ only in case the last one counts.
    folded = {name.lower(): text for name, text in os.environ.items()}
    head = ENVIRONMENT_PREFIX.lower()
    named = {name.removeprefix(head): text for name, text in folded.items() if name.startswith(head)}
    for name in sorted(named):
        first, *below = name.split("__")
        _refuse_removed(name.replace("__", "."), {name.replace("__", "."): "environment"})
        known = first in Settings.__dataclass_fields__ or first in OTHER_VARIABLES
        if not known or (below and first not in SECTIONS and first not in OTHER_VARIABLES):
            names = [f"{section}__{field}" for section in SECTIONS for field in _fields(section)]
            near = _close_names(name, [*names, *(each for each in _fields(None) if each not in SECTIONS)])
            hint = _or_listed([f"{ENVIRONMENT_PREFIX}{each.upper()}" for each in near])
            raise ConfigError(f"environment {ENVIRONMENT_PREFIX}{name.upper()}: no such setting; {hint}")
    plain = nest_values({name: text for name, text in named.items() if name.split("__")[0] not in OTHER_VARIABLES})
    if plain is not None:
        return plain
    from pydantic import create_model
    from pydantic_settings import BaseSettings as FromEnvironment
    from pydantic_settings import EnvSettingsSource

    fields: dict[str, Any] = {name: (field.type, None) for name, field in Settings.__dataclass_fields__.items()}
    model = create_model("Environment", __base__=FromEnvironment, __module__=config_settings.__name__, **fields)
    model.model_rebuild(_types_namespace=vars(config_settings))
    try:
        return EnvSettingsSource(model, env_prefix=ENVIRONMENT_PREFIX, env_nested_delimiter="__")()
    except Exception as err:  # pydantic-settings raises its own type for a section given as invalid JSON
        section = next((each for each in SECTIONS if f'"{each}"' in str(err)), None)
        if section is None:
            raise ConfigError(f"NEARKIN_* variables: {err}") from err
        name, settable = f"{ENVIRONMENT_PREFIX}{section.upper()}", _fields(section)
        if not settable:
            raise ConfigError(f"environment {name}: {_section_remedy(section)}") from err
        single = f"{name}__{settable[0].upper()}"
        raise ConfigError(f"environment {name}: not valid JSON; set one value, such as {single}") from err


def _merge(into: dict[str, Any], layer: Mapping[str, Any], source: str, sources: dict[str, str], prefix: str) -> None:
    for name, value in layer.items():
        if isinstance(value, Mapping):
            below = into.setdefault(name, {})
            if not isinstance(below, dict):
                raise ConfigError(
                    f'{prefix}{name} "{below}": a single value, but it has settings below it; remove one of the two'
                )
            _merge(below, value, source, sources, f"{prefix}{name}.")
        else:
            into[name] = value
            sources[f"{prefix}{name}"] = source


def _flatten(tree: Mapping[str, Any], prefix: str = "") -> list[tuple[str, object]]:
    flat: list[tuple[str, object]] = []
    for name, value in tree.items():
        if isinstance(value, Mapping):
            flat += _flatten(value, f"{prefix}{name}.")
        else:
            flat.append((f"{prefix}{name}", value))
    return flat


def _source_of(name: str, sources: Mapping[str, str]) -> str:
    """Return the source that set a field; a table is set by its parts."""
    return sources.get(name) or next((sources[part] for part in sources if part.startswith(f"{name}.")), "default")


def displayed_value(name: str, value: object) -> object:
    """Return a setting as it may be displayed: without secrets and passwords in URLs."""
    if name in SECRETS:
        return HIDDEN if value is not None else value
    return mask_urls(value) if isinstance(value, str) else value


def _name_source(source: str, name: str) -> str:
    return f"environment NEARKIN_{name.replace('.', '__').upper()}" if source == "environment" else source


def _one_line(err: ValidationError, sources: Mapping[str, str]) -> ConfigError:
    """Return the error for the first invalid value: field, value, remedy and source."""
    first = err.errors()[0]
    field = ".".join(str(part) for part in first["loc"])
    source = _set_by(field, sources)
    cause = first.get("ctx", {}).get("error")
    given = _written_form(displayed_value(field, first["input"]))
    if isinstance(cause, UnknownName):
        return ConfigError(f"{choose(field, given, cause.known)}{source}")
    if isinstance(cause, InvalidValue):
        return ConfigError(f'{field} "{given}": {cause}{source}')
    if cause is not None:  # an error of a section, or of all settings: the text names fields and values itself
        return ConfigError(f"{field}: {cause}{_set_together(field, str(cause), sources)}" if field else str(cause))
    if first["type"] == "unexpected_keyword_argument":
        section, dot, name = field.rpartition(".")
        near = [f"{section}{dot}{each}" for each in _close_names(name, _fields(section) if dot else _fields(None))]
        for each in near:  # a misspelled secret is masked as the secret is
            given = _written_form(displayed_value(each, given))
        # a section's values may be secrets
        named = field if isinstance(first["input"], Mapping) else f'{field} "{given}"'
        return ConfigError(f"{named}: no such setting; {_or_listed(near)}{source}")
    if first["type"] == "dataclass_type" and field in SECTIONS:
        return ConfigError(f'{field} "{given}": {_section_remedy(field)}{source}')
    message = f"{first['msg'][0].lower()}{first['msg'][1:]}{_takes(field)}"
    return ConfigError(f'{field} "{given}": {message}{source}')


def _takes(field: str) -> str:
    from nearkin_shared.config.reference import describe_settings

    return next((f"; takes {each.wants.replace('`', '')}" for each in describe_settings() if each.name == field), "")


def _written_form(value: object) -> str:
    """Return a value as a file or a variable contains it, with passwords in URLs masked."""
    if isinstance(value, bool):
        return str(value).lower()
    return printable(mask_urls(str(value)))


def _fields(section: str | None) -> list[str]:
    """Return the names of settings in a section; for None those of Settings, with sections.

    Empty if there is no such section.
    """
    if section is None:
        return list(Settings.__dataclass_fields__)
    names = type(SECTIONS[section]).__dataclass_fields__ if section in SECTIONS else ()
    return [name for name in names if f"{section}.{name}" not in FIXED_FIELDS]


def _section_remedy(section: str) -> str:
    """Return the remedy for a section that is given as a single value."""
    from nearkin_shared.config.removed import REMOVED

    if _fields(section):
        return f"a section, not a single value; `nearkin config {section}` lists its settings"
    constants = [f"{name} = {value}" for name, value in REMOVED.items() if name.startswith(f"{section}.")]
    return f"no longer a section, its settings are constants ({', '.join(constants)}); remove it"


def _close_names(name: str, known: Sequence[str]) -> list[str]:
    from difflib import get_close_matches

    return get_close_matches(name, known, n=2, cutoff=0.75)


def _or_listed(near: Sequence[str]) -> str:
    """Return the remedy for an unknown name."""
    return f"did you mean {' or '.join(near)}?" if near else "`nearkin config` lists all settings"


def _set_together(section: str, text: str, sources: Mapping[str, str]) -> str:
    """Return the sources that set those settings of a section that an error text names."""
    words = set(re.findall(r"\w+", text))
    named = [name for name in sources if name.startswith(f"{section}.") and name.rpartition(".")[2] in words]
    message = dict.fromkeys(_name_source(sources[name], name) for name in named if sources[name] != "default")
    return f" (set by {', '.join(message)})" if message else ""


def _set_by(name: str, sources: Mapping[str, str]) -> str:
    source = _source_of(name, sources)
    if source == "default":  # a part of a list or table: its source set the whole value
        name, source = next(((part, sources[part]) for part in sources if name.startswith(f"{part}.")), (name, source))
    return f" (set by {_name_source(source, name)})" if source != "default" else ""

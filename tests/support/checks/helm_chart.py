"""Write and check the documents of the Helm chart.

Invariant: its README and the schema of `config` agree with values.yaml and with the settings.

python -m tests.support.checks.helm_chart            writes all, in the folder deploy/helm/nearkin
values.yaml     `# -- text` above a value is its row in README.md
Settings        fields, names and bounds are `properties.config` of values.schema.json; secrets are omitted
REMOVED         files/removed_settings.json; the schema lets them pass, so that a template names the remedy
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import yaml

from nearkin_shared.config import settings as config_settings
from nearkin_shared.config import validators
from nearkin_shared.config.reference import field_type
from nearkin_shared.config.removed import REMOVED, REPLACED, removal_text
from nearkin_shared.config.settings import FIXED_FIELDS, HOT_FIELDS, SECRETS, Settings
from nearkin_shared.limits import TENANT_BYTES_MAX

CHART = Path("deploy/helm/nearkin")
BEGIN, END = "<!-- values: begin -->", "<!-- values: end -->"
NOT_IN_A_CHART = frozenset({"store", "server", "auth.tokens_file"}) | SECRETS | FIXED_FIELDS
"""Settings of a command line, secrets, constants, and what the chart sets itself."""
BYTES_PATTERN = r"^[0-9]+(\.[0-9]+)?\s*([KMGT]i?)?B?$"
NO_PASSWORD = r"^[a-z+]+://[^@]*$"


# --- the schema of `config` ------------------------------------------------------------------------------------------


def config_schema() -> dict[str, Any]:
    """Return the JSON schema of the chart's `config`."""
    schema = {"description": "Settings by section, as `nearkin config` lists them.", **_section(Settings, "")}
    for name in removed_settings():
        section, _, field = name.partition(".")
        empty = {"type": "object", "additionalProperties": False, "properties": {}}
        schema["properties"].setdefault(section, empty)["properties"][field] = {"deprecated": True}
    return schema


def removed_settings() -> dict[str, str]:
    """Return why each removed setting is refused, by dotted name."""
    return {name: refusal for name in sorted({*REMOVED, *REPLACED}) if (refusal := removal_text(name)) is not None}


def _section(section: type[Any], prefix: str) -> dict[str, Any]:
    hints = get_type_hints(section, include_extras=True)
    found = {}
    for field in fields(section):
        name = f"{prefix}{field.name}"
        kind = hints[field.name]
        if name in NOT_IN_A_CHART:
            continue
        if is_dataclass(kind) and isinstance(kind, type):
            below = _section(kind, f"{name}.")
            if below["properties"]:
                found[field.name] = below
        elif get_origin(kind) is tuple and is_dataclass(get_args(kind)[0]):
            found[field.name] = {"type": "array", "items": _section(get_args(kind)[0], f"{name}.")}
        else:
            found[field.name] = _value(kind) | ({"description": "hot"} if name in HOT_FIELDS else {})
            if name in config_settings.SECRET_URLS:
                found[field.name]["pattern"] = NO_PASSWORD
    return {"type": "object", "additionalProperties": False, "properties": found}


def _value(kind: Any) -> dict[str, Any]:
    """Return the schema of one field; a rule that JSON Schema cannot express is left to the services."""
    plain, _ = field_type(kind)
    rule: object = None
    if get_origin(plain) is Annotated:
        plain, rule = get_args(plain)
        plain, _ = field_type(plain)
    return _rule_of_type(rule) or {"type": {bool: "boolean", int: "integer"}.get(plain, "string")}


def _rule_of_type(rule: object) -> dict[str, Any] | None:
    found: dict[str, Any] | None = None
    match rule:
        case validators.NameChoice():
            found = {"type": "string", "enum": list(rule.known)}
        case validators.SizeRange():
            number = {"type": "integer", "minimum": rule.least, "maximum": rule.most}
            found = {"anyOf": [number, {"type": "string", "pattern": BYTES_PATTERN}]}
        case validators.NumberRange():
            found = {"type": "integer", "minimum": rule.least, "maximum": rule.most}
        case validators.ShareRange():
            found = {"type": "number", "minimum": 0, "maximum": rule.most}
        case validators.Text():
            found = {"type": "string", "minLength": 1, "maxLength": rule.bytes_max}
        case validators.TenantName():
            found = {"type": "string", "minLength": 1, "maxLength": TENANT_BYTES_MAX}
        case validators.MatchingText():
            found = {"type": "string", "pattern": f"^{rule.pattern}$"}
        case validators.Origins() | validators.ShardUrls() | validators.TagLists():
            found = {"type": "array", "items": {"type": "string", "minLength": 1}}
        case validators.TopicTenants():
            text = {"type": "string", "minLength": 1}
            found = {"anyOf": [{"type": "array", "items": text}, {"type": "object", "additionalProperties": text}]}
    return found


def with_config(schema: str) -> str:
    """Return values.schema.json with the current settings."""
    tree = json.loads(schema)
    tree["properties"]["config"] = config_schema()
    return json.dumps(tree, indent=2) + "\n"


# --- the table of values ---------------------------------------------------------------------------------------------


def rows(values: str) -> Iterator[tuple[str, object, str]]:
    """Yield (dotted name, default, description) of every value that has one."""
    lines = values.splitlines()
    root = yaml.compose(values)

    def walk(node: Any, prefix: str) -> Iterator[tuple[str, object, str]]:
        for key, value in node.value:
            name = f"{prefix}{key.value}"
            line, column = key.start_mark.line, key.start_mark.column
            documented = (
                _description_above(lines, line) if not lines[line][:column].strip() else ""
            )  # else it shares another value's line
            if documented:
                yield name, yaml.safe_load(yaml.serialize(value)), documented
            if isinstance(value, yaml.MappingNode):
                yield from walk(value, f"{name}.")

    yield from walk(root, "")


def _description_above(lines: list[str], line: int) -> str:
    """Return the description that ends just above a line, "" if there is none."""
    comment: list[str] = []
    while line > 0 and lines[line - 1].lstrip().startswith("#"):
        line -= 1
        comment.insert(0, lines[line].lstrip(" #"))
        if lines[line].lstrip().startswith("# -- "):
            return " ".join(comment).removeprefix("-- ")
    return ""


def undocumented_values(values: str) -> list[str]:
    """Return the values that have no description and no described parent."""
    documented = {name for name, _, _ in rows(values)}

    def walk(tree: dict[str, Any], prefix: str) -> Iterator[str]:
        for key, value in tree.items():
            name = f"{prefix}{key}"
            if name in documented:
                continue
            if isinstance(value, dict) and value:
                yield from walk(value, f"{name}.")
            else:
                yield name

    return list(walk(yaml.safe_load(values), ""))


def with_values(readme: str, values: str) -> str:
    """Return README.md with the current table of values."""
    table = ["| value | default | |", "|---|---|---|"]
    for name, default, text in rows(values):
        shown = json.dumps(default).replace("|", "\\|")
        table.append(f"| `{name}` | `{shown}` | {re.sub('[|]', chr(92) + '|', text)} |")
    before, _, rest = readme.partition(BEGIN)
    after = rest.partition(END)[2]
    return "\n".join([f"{before}{BEGIN}", *table, f"{END}{after}"])


def main(chart: Path = CHART) -> int:
    """Write the documents that derive from values.yaml and the settings."""
    values = (chart / "values.yaml").read_text()
    if missing := undocumented_values(values):
        print(f"{chart / 'values.yaml'}: no `# --` above {', '.join(missing)}", file=sys.stderr)
        return 1
    for path, made in (
        (chart / "values.schema.json", with_config((chart / "values.schema.json").read_text())),
        (chart / "README.md", with_values((chart / "README.md").read_text(), values)),
        (chart / "files/removed_settings.json", json.dumps(removed_settings(), indent=2) + "\n"),
    ):
        path.write_text(made)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

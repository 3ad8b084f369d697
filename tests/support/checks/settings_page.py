"""Write the page of all settings.

Invariant: the page states the same as the source for each field, or a test fails.

python -m tests.support.checks.settings_page     writes docs/reference/settings.md
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from nearkin_shared.config.reference import SettingDoc, SettingSection, format_units, sections

PAGE = Path("docs/reference/settings.md")
HEAD = """# Settings

Made from the source by `python -m tests.support.checks.settings_page`; `nearkin config SECTION` shows the same, with
the values in force. A setting comes from its default, from `profile`, from a TOML file (`--config FILE`: `[delta]`,
`max_depth = 2`), from a variable such as `NEARKIN_DELTA__MAX_DEPTH`, or from an option of the command: the later wins
([ADR 4](../adr/0004-plain-settings-without-pydantic.md)).
Sizes are numbers of bytes or texts such as `"8KiB"`. An invalid value is
refused by name when a process starts.

**hot**: running services take it from a changed file, or from `PATCH /v1/config`; all else needs a restart.
**secret**: shown as `***` wherever settings are shown.
"""
COLUMNS = "| setting | takes | default | what it does |\n|---|---|---|---|\n"


def page() -> str:
    """Return the page."""
    return HEAD + "".join(line for section in sections() for line in _section(section))


def _section(section: SettingSection) -> Iterator[str]:
    yield f"\n## {section.name or 'In no section'}\n\n{section.meaning}\n\n{COLUMNS}"
    for setting in section.settings:
        flags = [word for word, set_ in (("hot", setting.hot), ("secret", setting.secret)) if set_]
        does = f"{setting.meaning} **{', '.join(flags)}**" if flags else setting.meaning
        yield f"| `{setting.name}` | {setting.wants} | {_default(setting)} | {does} |\n".replace("|  |", "| |")


def _default(setting: SettingDoc) -> str:
    value = setting.default
    if value is None or value in ((), ""):
        return ""
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return format_units(value) if setting.wants.startswith("bytes") and isinstance(value, int) else f"`{value}`"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    sys.stdout.write(f"written: {PAGE}\n")

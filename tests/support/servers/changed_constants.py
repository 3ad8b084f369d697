"""Run the main program of a service with other values of constants that no setting changes.

    python -m tests.support.servers.changed_constants '{"kafka": {"upload_idle_seconds": 2}}' nearkin_chunker ARGUMENTS

Invariant: the program reads its settings as always; the constants are merged in before they are validated.
"""

from __future__ import annotations

import json
import runpy
import sys
from collections.abc import Mapping
from typing import Any

from nearkin_shared.config import loader
from nearkin_shared.config.settings import FIXED_FIELDS, Settings

Sections = Mapping[str, Mapping[str, object]]


def split_constants(config: Sections) -> tuple[dict[str, dict[str, object]], dict[str, dict[str, object]]]:
    """Return the settings of nested values, and their constants."""
    settings: dict[str, dict[str, object]] = {}
    constants: dict[str, dict[str, object]] = {}
    for section, values in config.items():
        settings[section] = {}
        for name, value in values.items():
            chosen = constants if f"{section}.{name}" in FIXED_FIELDS else settings
            chosen.setdefault(section, {})[name] = value
    return settings, constants


def change_constants(constants: Sections) -> None:
    """Let all settings that this process loads have other values of constants."""
    validate = loader._validate

    def validate_changed(merged: Mapping[str, Any], sources: Mapping[str, str]) -> Settings:
        tree = {name: dict(value) if isinstance(value, Mapping) else value for name, value in merged.items()}
        for section, values in constants.items():
            tree.setdefault(section, {}).update(values)
        return validate(tree, sources)

    loader._validate = validate_changed


if __name__ == "__main__":
    given, module, *arguments = sys.argv[1:]
    change_constants(json.loads(given))
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)

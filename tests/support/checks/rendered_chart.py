"""Read the objects of a rendered chart."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from nearkin_shared.config.loader import load
from nearkin_shared.config.settings import Settings

Render = Callable[..., list[dict[str, Any]]]
"""Renders the chart with the given values; returns its objects."""


def of_kind(objects: list[dict[str, Any]], *kinds: str) -> dict[str, dict[str, Any]]:
    """Return the objects of these kinds by name."""
    return {one["metadata"]["name"]: one for one in objects if one["kind"] in kinds}


def settings_of(objects: list[dict[str, Any]], folder: Path, name: str = "store-nearkin") -> Settings:
    """Return the settings of a ConfigMap, which is written to `folder`."""
    file = folder / f"{name}.toml"
    file.write_text(of_kind(objects, "ConfigMap")[name]["data"]["nearkin.toml"])
    return load(file)[0]


def changed(before: list[dict[str, Any]], after: list[dict[str, Any]]) -> set[tuple[str, str]]:
    """Return kind and name of the objects that two renderings do not have alike."""

    def keyed(objects: list[dict[str, Any]]) -> dict[tuple[str, str], str]:
        return {(one["kind"], one["metadata"]["name"]): yaml.safe_dump(one) for one in objects}

    first, second = keyed(before), keyed(after)
    return {key for key in first.keys() | second.keys() if first.get(key) != second.get(key)}

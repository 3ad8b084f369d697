"""Test how `KEY[@VERSION][:/PATH]` is read: the longest key that exists applies."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from nearkin.cli.tree_location import (
    CANDIDATES_MAX,
    ResolvedLocation,
    TreeLocation,
    find_location,
    parse_location,
    resolve_location,
)
from nearkin_shared.errors import BadInput, NotFound

if TYPE_CHECKING:
    from nearkin.store import Store


class Keys:
    """A store with three versions of each key, made on three days."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._keys = set(keys)

    def info(self, key: str, version: int | None = None) -> Any:
        if key not in self._keys or version not in (None, 1, 2, 3):
            raise NotFound(f"key {key!r} version {version}: the store has none")
        return self._version(key, version or 3)

    def versions(self, prefix: str, *, all_versions: bool, broken: object) -> list[Any]:
        return [self._version(prefix, number) for number in (1, 2, 3)]

    def list_deleted(self, prefix: str, *, broken: object) -> list[Any]:
        return []

    def _version(self, key: str, number: int) -> Any:
        return SimpleNamespace(key=key, version=number, created=datetime(2026, 11, number, tzinfo=UTC))


def resolve(text: str, *keys: str) -> tuple[Any, ...]:
    return tuple(resolve_location(cast("Store", Keys(keys)), text))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("home", ("home", 3, None)),
        ("home@2", ("home", 2, None)),
        ("home@latest", ("home", 3, None)),
        ("home@latest:/etc", ("home", 3, b"etc")),
        ("home:/", ("home", 3, b"")),
        ("home:", ("home", 3, b"")),
        ("home:/etc/fstab", ("home", 3, b"etc/fstab")),
        ("home@1:/etc//./fstab/", ("home", 1, b"etc/fstab")),
        ("home@2026-11-02:/etc", ("home", 2, b"etc")),
        ("home@2026-11-02T18:00Z:/etc", ("home", 2, b"etc")),
        ("home@3:/a:/b@1", ("home", 3, b"a:/b@1")),
        ("home:/caf\udce9", ("home", 3, b"caf\xe9")),
    ],
)
def test_location_names_version_and_path(text: str, expected: tuple[object, ...]) -> None:
    assert resolve(text, "home") == expected


@pytest.mark.parametrize(
    ("text", "keys", "expected"),
    [
        ("home@2", ("home", "home@2"), ("home@2", 3, None)),
        ("home@2:/etc", ("home", "home@2"), ("home@2", 3, b"etc")),
        ("home@2@1:/etc", ("home", "home@2"), ("home@2", 1, b"etc")),
        ("home:/etc", ("home", "home:/etc"), ("home:/etc", 3, None)),
        ("home:/etc:/x", ("home", "home:/etc"), ("home:/etc", 3, b"x")),
        ("me@example.org", ("me@example.org", "me"), ("me@example.org", 3, None)),
        ("me@example.org@1:/x", ("me@example.org",), ("me@example.org", 1, b"x")),
        ("home:", ("home", "home:"), ("home:", 3, None)),
        ("a/b:c@36", ("a/b:c@36",), ("a/b:c@36", 3, None)),
    ],
)
def test_longest_existing_key_applies(text: str, keys: tuple[str, ...], expected: tuple[object, ...]) -> None:
    assert resolve(text, *keys) == expected


def test_location_of_no_key_is_not_found() -> None:
    with pytest.raises(NotFound, match=r"key 'hom@2:/x': the store has none, nor 'hom@2' or 'hom'; `nearkin ls`"):
        resolve("hom@2:/x", "home")
    with pytest.raises(NotFound, match="key 'home' version 4"):
        resolve("home@4", "home")
    with pytest.raises(NotFound, match="had no version at 2026-10-01"):
        resolve("home@2026-10-01", "home")
    assert find_location(cast("Store", Keys(())), "home") is None


def test_location_path_with_parent_is_refused() -> None:
    with pytest.raises(BadInput, match=r"has \.\. or a name above 255 bytes"):
        resolve("home:/../etc", "home")


def test_parse_bounds_candidates() -> None:
    assert parse_location("home@3:/etc")[-1] == TreeLocation("home", "3", "/etc")
    assert len(parse_location("k" + ":/a" * 200)) == CANDIDATES_MAX
    with pytest.raises(BadInput, match="not valid UTF-8"):
        parse_location("\udcff")
    with pytest.raises(BadInput, match="must not be empty"):
        parse_location("")
    assert ResolvedLocation("home", 3, None).label == "home@3"

"""Parse and resolve `KEY[@VERSION][:/PATH]`: a version, or a folder or file in a tree.

    home              the newest version            home@3:/etc          a folder of version 3
    home@latest       the same
    home:/etc/fstab   a file of the newest one      home@36h:/etc        of the version of 36 hours ago
    home@2026-11-20T18:00Z                          the version of that time

A key may contain @ and :/ itself. Every split of the text is a candidate; of those whose key exists, the one with the
longest key applies, so that an exact existing key always wins.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from nearkin_shared.errors import BadInput, Corrupt, NearkinError, NotFound

if TYPE_CHECKING:
    from nearkin.store_copy import AnyStore
    from nearkin_shared.reading.tree_reader import TreeReader
    from nearkin_shared.results import VersionInfo

CANDIDATES_MAX = 64
"""Splits that are tried; each costs a lookup of its key."""
LATEST = "latest"
"""The VERSION that is the newest, as in restic and in the folders of `nearkin mount`."""
_NUMBER = re.compile(r"[0-9]{1,18}", re.ASCII)


class TreeLocation(NamedTuple):
    """A split of a text into its parts; the key may not exist."""

    key: str
    version: str | None = None
    """A number, `latest`, or a time as `get --at` accepts; None: the newest."""
    path: str | None = None
    """From the root of the tree; None: the text has none."""


class ResolvedLocation(NamedTuple):
    """An existing version, and a path in it that may not exist."""

    key: str
    version: int
    path: bytes | None
    """From the root of the tree, without a leading slash; None: the text has none."""

    @property
    def label(self) -> str:
        """The text that names the version: `KEY@VERSION`."""
        return f"{self.key}@{self.version}"


def parse_location(text: str) -> list[TreeLocation]:
    """Return the possible meanings of a text, the longest key first.

    Raises BadInput if the text is no key, and no part of it is one.
    """
    from nearkin.cli.arguments import check_key

    found: dict[TreeLocation, None] = {}
    for head, path in _split_paths(text):
        for location in _split_version(head, path):
            if _is_key(location.key):
                found[location] = None
    if not found:
        check_key(text)
    return sorted(found, key=lambda location: -len(location.key))[:CANDIDATES_MAX]


def _split_paths(text: str) -> Iterator[tuple[str, str | None]]:
    yield text, None
    if text.endswith(":"):
        yield text[:-1], ""
    for match in re.finditer(":(?=/)", text):
        yield text[: match.start()], text[match.end() :]


def _split_version(head: str, path: str | None) -> Iterator[TreeLocation]:
    yield TreeLocation(head, None, path)
    key, at, version = head.rpartition("@")
    if at and is_version(version):
        yield TreeLocation(key, version, path)


def is_version(text: str) -> bool:
    """Return whether a text has the form of a VERSION: a number, `latest` or a time."""
    from datetime import UTC, datetime

    from nearkin.cli.verify import parse_moment

    if text == LATEST or _NUMBER.fullmatch(text):
        return True
    try:
        parse_moment("version", text, datetime.now(UTC))
    except BadInput:
        return False
    return True


def _is_key(text: str) -> bool:
    from nearkin.cli.arguments import check_key

    try:
        check_key(text)
    except BadInput:
        return False
    return True


def resolve_location(store: AnyStore, text: str) -> ResolvedLocation:
    """Return the version that a text names.

    Raises BadInput, NotFound (no such key or version), Corrupt.
    """
    location = find_location(store, text)
    if location is None:
        first, *others = (repr(one.key) for one in parse_location(text))
        also = f", nor {' or '.join(others)}" if others else ""
        remedy = _path_remedy(store, text) or _version_remedy(store, text) or "`nearkin ls` lists the keys"
        raise NotFound(f"key {first}: the store has none{also}; {remedy}")
    return resolve_version(store, location)


def _version_remedy(store: AnyStore, text: str) -> str | None:
    """Return what a VERSION is if the text is an existing key, @ and no version."""
    for head, _ in _split_paths(text):
        key, at, version = head.rpartition("@")
        if at and not is_version(version) and _is_key(key) and is_existing_key(store, key):
            return (
                f"VERSION of {key!r} is a number, `latest` or a time, such as 3, 36h or 2026-11-20T18:00Z; without "
                "@VERSION the newest applies"
            )
    return None


def _path_remedy(store: AnyStore, text: str) -> str | None:
    """Return the location with a slash if the text is an existing key, a colon and a path."""
    for match in islice(re.finditer(":(?=[^/])", text), CANDIDATES_MAX):
        head = text[: match.start()]
        splits = [one for one in _split_version(head, None) if _is_key(one.key)]
        if any(is_existing_key(store, one.key) for one in splits):
            return f"PATH begins with /: {shlex.quote(f'{head}:/{text[match.end() :]}')}"
    return None


def find_location(store: AnyStore, text: str) -> TreeLocation | None:
    """Return the split with the longest key that exists; None if none does. Raises BadInput."""
    return next((location for location in parse_location(text) if is_existing_key(store, location.key)), None)


def is_existing_key(store: AnyStore, key: str) -> bool:
    """Return whether a key has a version."""
    try:
        store.info(key)
    except NotFound:
        return False
    except Corrupt:  # the caller's own read of it reports the damage
        return True
    return True


def is_tree_key(store: AnyStore, key: str) -> bool:
    """Return whether the newest version of a key exists, can be read, and is a tree."""
    try:
        return store.info(key).is_tree
    except NearkinError:  # such as a token that may only list
        return False


def find_root(store: AnyStore, info: VersionInfo) -> str | None:
    """Return the folder that a tree stores; None if it is of no folder, or cannot be read."""
    if not info.is_tree:
        return None
    try:
        return os.fsdecode(store.tree(info.key, info.version).summary.root) or None
    except NearkinError:  # such as a token that may only list
        return None


def resolve_version(store: AnyStore, location: TreeLocation) -> ResolvedLocation:
    """Return the number of the version that a split names. Raises BadInput, NotFound, Corrupt."""
    from nearkin_shared.reading.tree_reader import tree_path

    path = None if location.path is None else tree_path(os.fsencode(location.path))
    version = location.version
    if version is None or version == LATEST:
        number = store.info(location.key).version
    elif _NUMBER.fullmatch(version):
        number = store.info(location.key, int(version)).version
    else:
        from nearkin.cli.version_at import find_version_at

        number = find_version_at(store, location.key, version)
    return ResolvedLocation(location.key, number, path)


def resolve_key(
    store: AnyStore, command: str, text: str, version: int | None, exists: Callable[[str], bool] | None = None
) -> tuple[str, int | None]:
    """Return key and version that `KEY[@VERSION]` and --version name.

    None: no version is named. A number is not looked up. `exists`: whether a key is one to apply, by default one with
    a version. Raises BadInput, and of a time NotFound and Corrupt.
    """
    named = [one for one in parse_location(text) if one.version is not None]
    has = exists or partial(is_existing_key, store)
    found = next((one for one in (TreeLocation(text), *named) if has(one.key)), None) if named else None
    if found is None or found.version is None:
        return text, version
    label = f"{found.key}@{found.version}"
    if found.path is not None:
        raise BadInput(f"{command} {text!r}: names an entry of a tree, and {command} takes a version, here {label!r}")
    if version is not None:
        raise BadInput(f"{command} {text!r}: names a version: not with --version")
    if _NUMBER.fullmatch(found.version):
        return found.key, int(found.version)
    return found.key, resolve_version(store, found).version


def open_tree(store: AnyStore, location: ResolvedLocation) -> TreeReader:
    """Open the tree of a version.

    Raises BadInput if it is a blob without entries, and as `Store.tree` does.
    """
    from nearkin_shared.utils.terminal import printable

    try:
        return store.tree(location.key, location.version)
    except Corrupt as err:
        if store.info(location.key, location.version).is_tree:
            raise
        name = printable(repr(location.key))
        raise BadInput(
            f"key {name} version {location.version}: is a blob of `nearkin put`, not a tree; `nearkin get` writes it"
        ) from err

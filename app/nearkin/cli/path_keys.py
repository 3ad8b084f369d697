"""Refuse a path, or a version or entry of another key, as KEY of what is stored.

A key is any text, so that a path, NAME@3 or NAME:/PATH may be one. Versions under such a key stay readable and the key
may be continued; a new one is refused where the command line was probably written without KEY, or would hide version 3
or an entry of NAME from every command that reads.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from nearkin_shared.errors import BadInput, NearkinError, NotFound
from nearkin_shared.utils.terminal import printable
from nearkin_shared.validation import names_before_path, version_name_refusal

if TYPE_CHECKING:
    from nearkin.store_copy import AnyStore

_PATH_STARTS = ("/", "./", "../", "~")
_ENTRY = re.compile(r"([^/:][^:]*):/([^/].*)", re.DOTALL)
"""NAME:/PATH, and no URL."""
_HEADS_MAX = 64
"""Of a key: parts before a colon that are examined."""


def check_new_key(store: AnyStore, key: str, paths: Sequence[str], command: str) -> None:
    """Refuse a path, or a version or an entry of another key, as KEY.

    A key of the store is accepted, and one that is the only path too. URLs are keys.

    Raises BadInput.
    """
    check_no_version(store, key, command, paths[0] if paths else "")
    entry = _ENTRY.fullmatch(key)
    if entry is not None and not _has_key(store, key):
        example = " ".join(shlex.quote(text) for text in (f"{entry[1]}-{entry[2].replace('/', '-')}", *paths[:1]))
        raise BadInput(
            f"KEY {key!r}: names the entry /{entry[2]} of the key {entry[1]!r}, and the store has no such key; "
            f"versions have numbers, and another key has another name: nearkin {command} {example}"
        )
    if not _is_like_path(key) or list(paths) == [key] or _has_key(store, key):
        return
    example = " ".join(shlex.quote(text) for text in (_name_of(key), key, *paths[:1]))
    raise BadInput(
        f"KEY {key!r}: looks like a path, and the store has no such key; KEY is a name of your choice, before the "
        f"paths: nearkin {command} {example}"
    )


def check_new_key_of_file(store: AnyStore, key: str, source: str, command: str) -> None:
    """Refuse the path of another file or folder, or a version of another key, as KEY.

    A key of the store is accepted.

    The source - is stdin, which may have the path of any file as its key. Raises BadInput.
    """
    check_no_version(store, key, command, source)
    if source in (key, "-") or not _is_like_path(key) or not os.path.lexists(key) or _has_key(store, key):
        return
    example = " ".join(shlex.quote(text) for text in (_name_of(source), source))
    raise BadInput(
        f"KEY {key!r}: is the path of a file or folder, and the store has no such key; KEY is a name of your choice, "
        f"before the one file to store: nearkin {command} {example}"
    )


def check_no_version(store: AnyStore, key: str, command: str, source: str) -> None:
    """Refuse a version or an entry of another key, if the store has no such key.

    NAME@VERSION, NAME@VERSION:PATH and NAME:/PATH, if the store has NAME. Raises BadInput.
    """
    names = (*names_before_path(key), *_names_before_version(key))
    name = next((name for name in names if _has_key(store, name)), None)
    if name is None or _has_key(store, key):
        return
    example = " ".join(shlex.quote(text) for text in (name, source) if text)
    raise version_name_refusal(key, name, f"`nearkin {command} {example}`")


def describe_other_kind(store: AnyStore, key: str, *, is_tree: bool) -> str | None:
    """Return a line if the newest version and the next one differ in kind, else None."""
    try:
        newest = store.info(key)
    except NearkinError:  # such as a token that may only write
        return None
    if newest.is_tree == is_tree:
        return None
    kinds = ("a blob of `nearkin put`", "a tree of `nearkin backup`")
    return (
        f"key {printable(repr(key))}: its newest version, {newest.version}, is {kinds[newest.is_tree]}, and this one "
        f"is {kinds[is_tree]}; `nearkin rm --version` deletes a version that was meant for another key"
    )


def _names_before_version(key: str) -> Iterator[str]:
    """Yield NAME for each reading of a key as NAME@VERSION or NAME@VERSION:PATH."""
    from nearkin.cli.tree_location import is_version

    if "@" not in key:
        return
    ends = [at for at, character in enumerate(key) if character == ":"][:_HEADS_MAX]
    for end in (*ends, len(key)):
        name, _, version = key[:end].rpartition("@")
        if name and is_version(version):
            yield name


def _is_like_path(text: str) -> bool:
    """Return whether a text has the form of a path, or is a folder with a last slash."""
    if text.startswith(_PATH_STARTS) or text in (".", ".."):
        return True
    return text.endswith("/") and os.path.isdir(text)


def _has_key(store: AnyStore, key: str) -> bool:
    try:
        store.info(key)
    except NotFound:
        return False
    return True


def _name_of(path: str) -> str:
    """Return the last name of a path, as an example of a key."""
    return os.path.basename(os.path.abspath(path)) or "root"

"""Refuse a path as KEY, before anything is stored under it.

A key is any text, so that a path may be one. Versions under such a key stay readable and the key may be continued; a
new one is refused where the command line was probably written without KEY.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING

from nearkin_shared.errors import BadInput, NotFound

if TYPE_CHECKING:
    from nearkin.store_copy import AnyStore

_PATH_STARTS = ("/", "./", "../", "~")


def check_new_key(store: AnyStore, key: str, paths: Sequence[str], command: str) -> None:
    """Refuse a path as KEY.

    A key of the store is accepted, and one that is the only path too.

    Raises BadInput.
    """
    if not _is_like_path(key) or list(paths) == [key] or _has_key(store, key):
        return
    example = " ".join(shlex.quote(text) for text in (_name_of(key), key, *paths[:1]))
    raise BadInput(
        f"KEY {key!r}: looks like a path, and the store has no such key; KEY is a name of your choice, before the "
        f"paths: nearkin {command} {example}"
    )


def check_new_key_of_file(store: AnyStore, key: str, source: str, command: str) -> None:
    """Refuse the path of another file or folder as KEY.

    A key of the store is accepted.

    The source - is stdin, which may have the path of any file as its key. Raises BadInput.
    """
    if source in (key, "-") or not _is_like_path(key) or not os.path.lexists(key) or _has_key(store, key):
        return
    example = " ".join(shlex.quote(text) for text in (_name_of(source), source))
    raise BadInput(
        f"KEY {key!r}: is the path of a file or folder, and the store has no such key; KEY is a name of your choice, "
        f"before the one file to store: nearkin {command} {example}"
    )


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

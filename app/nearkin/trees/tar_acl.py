"""Convert the text of a POSIX ACL, as tar stores it, to the extended attribute of Linux.

    user::rw-,user:ana:r--,group::r--,mask::rw-,other::---

    version u32 = 2, then for each entry: tag u16, permissions u16, id u32

Invariant: an ACL that is equal to a mode has no attribute.
"""

from __future__ import annotations

from collections.abc import Callable
from struct import Struct

ACL_BYTES_MAX = 65_536
"""Of an attribute, as Linux allows."""
_VERSION = Struct("<I")
_ENTRY = Struct("<HHI")
_TAGS = {
    ("user", False): 1,
    ("user", True): 2,
    ("group", False): 4,
    ("group", True): 8,
    ("mask", False): 16,
    ("other", False): 32,
}
_SHORT = {"u": "user", "g": "group", "m": "mask", "o": "other"}
_NO_ID = (1 << 32) - 1
_MODE_TAGS = {1, 4, 32}


def encode_acl(text: str, find_user: Callable[[str], int | None], find_group: Callable[[str], int | None]) -> bytes:
    """Return the attribute for a text; empty if it is equal to a mode.

    `find_user` and `find_group` return the number of a name. Raises ValueError.
    """
    found = []
    for line in text.replace("\n", ",").split(","):
        plain = line.partition("#")[0].strip()
        if plain:
            found.append(_entry(plain, find_user, find_group))
    if {tag for tag, _, _ in found} <= _MODE_TAGS:
        return b""
    encoded = _VERSION.pack(2) + b"".join(
        _ENTRY.pack(tag, permissions, number) for tag, number, permissions in sorted(found)
    )
    if len(encoded) > ACL_BYTES_MAX:
        raise ValueError(f"{len(found)} entries")
    return encoded


def _entry(
    text: str, find_user: Callable[[str], int | None], find_group: Callable[[str], int | None]
) -> tuple[int, int, int]:
    """Return (tag, id, permissions). Raises ValueError."""
    if text.count(":") < 2:
        raise ValueError(f"entry {text[:80]!r}")
    kind, name, rights, *number = text.split(":")
    kind = _SHORT.get(kind, kind)
    tag = _TAGS.get((kind, bool(name)))
    if tag is None or set(rights) - set("rwx-") or len(number) > 1:
        raise ValueError(f"entry {text[:80]!r}")
    permissions = sum(bit for letter, bit in (("r", 4), ("w", 2), ("x", 1)) if letter in rights)
    if not name:
        return tag, _NO_ID, permissions
    identity = _identity(name, number, find_user if kind == "user" else find_group)
    if identity is None or not 0 <= identity < _NO_ID:
        raise ValueError(f"{kind} {name[:80]!r} has no number")
    return tag, identity, permissions


def _identity(name: str, number: list[str], find: Callable[[str], int | None]) -> int | None:
    for text in (*number, name):
        if text.isascii() and text.isdigit() and len(text) <= 10:
            return int(text)
    return find(name)

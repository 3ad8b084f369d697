# size: escapes of untrusted text, apart from number formats
"""Display keys and other text of callers so that two different texts never look the same.

Invariant: invisible characters appear as escapes; the tooltip of a shortened key has the whole key.
"""

from __future__ import annotations

from markupsafe import Markup

from nearkin_shared.utils.terminal import printable

KEY_CHARACTERS_MAX = 56
"""Longer keys lose their middle: beginning and end tell keys apart."""
BLANK_CHARACTERS = frozenset("\u034f\u115f\u1160\u17b4\u17b5\u180b\u180c\u180d\u180f\u2800\u3164\uffa0") | {
    chr(code) for code in (*range(0xFE00, 0xFE10), *range(0xE0100, 0xE01F0))
}
"""Characters without a shape that Python calls printable: fillers, joiners, variation selectors."""


def visible(text: str) -> str:
    r"""Return `text` with escapes (`\u200b`) for invisible characters and spaces at its ends."""
    stripped = text.strip(" ")
    before = len(text) - len(text.lstrip(" ")) if stripped else len(text)
    after = len(text) - len(text.rstrip(" ")) if stripped else 0
    inner = "".join(_escape(c) if c in BLANK_CHARACTERS else c for c in printable(stripped))
    return "\\x20" * before + inner + "\\x20" * after


def short(text: str) -> Markup:
    """Return HTML of a key; a long one without its middle, and whole in the tooltip."""
    shown = visible(text)
    if len(shown) <= KEY_CHARACTERS_MAX:
        return Markup("{}").format(shown)
    half = KEY_CHARACTERS_MAX // 2
    return Markup('<span title="{}">{}…{}</span>').format(shown, shown[: half - 1], shown[-half:])


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode()

# size: the syntax of patterns changes apart from the checks of arguments
"""Select keys by prefix or by glob.

db/        every key that starts with db/
db/*.sql   glob (fnmatch): * any characters, / included; ? one character; [abc] one of these; [*] the character *
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable
from typing import NamedTuple

from nearkin.cli.arguments import check_prefix
from nearkin_shared.errors import BadInput
from nearkin_shared.limits import KEY_BYTES_MAX

_MAGIC = re.compile(r"[*?\[]")
_RANGE = re.compile("(.)-(.)", re.DOTALL)
PATTERN_CHARACTERS_MAX = 4 * KEY_BYTES_MAX


class KeyPattern(NamedTuple):
    """What to list, and which of the listed keys to keep."""

    prefix: str
    """Every matching key starts with this: only such keys are listed."""
    matches: Callable[[str], bool]


def parse_prefix_or_glob(text: str, *, literal: bool = False) -> KeyPattern:
    """Read a prefix, or a glob if it has one of `*?[` and is not `literal`. Raises BadInput."""
    if not literal and _MAGIC.search(text):
        return _parse_glob(text)
    return KeyPattern(check_prefix(text), lambda _key: True)


def parse_key_or_glob(text: str, *, literal: bool = False) -> KeyPattern:
    """Read one key, or a glob if it has one of `*?[` and is not `literal`. Raises BadInput."""
    from nearkin.cli.arguments import check_key

    if not literal and _MAGIC.search(text):
        return _parse_glob(text)
    check_key(text)
    return KeyPattern(text, lambda key: key == text)


def check_glob(text: str, more: str = "") -> None:
    """Refuse a glob with a [ that has no ], or a range that ends before it starts.

    `more` is a further remedy. Raises BadInput.
    """
    start = text.find("[")
    while start != -1:
        first = start + 1 + (text[start + 1 : start + 2] == "!")
        end = text.find("]", first + 1)  # as the first character ] is one of these
        if end == -1:
            raise BadInput(f"pattern {text!r}: a [ has no ]; write [[] for the character itself{more}")
        for low, high in _RANGE.findall(text[first:end]):
            if low > high:
                raise BadInput(
                    f"pattern {text!r}: the range {low}-{high} ends before it starts; write the lower character "
                    f"first{more}"
                )
        start = text.find("[", end)


def _parse_glob(text: str) -> KeyPattern:
    if len(text) > PATTERN_CHARACTERS_MAX:
        raise BadInput(f"pattern {text[:40]!r}...: {len(text):,} characters, at most {PATTERN_CHARACTERS_MAX:,}")
    check_prefix(text, "pattern")
    check_glob(text, "; --literal takes the text as it is")
    magic = _MAGIC.search(text)
    assert magic is not None  # the callers looked
    expression = re.compile(fnmatch.translate(text))  # its groups are atomic: no backtracking explosion
    return KeyPattern(text[: magic.start()], lambda key: expression.match(key) is not None)

"""Decide preconditions of a put: the newest version that a key must or must not have.

Invariant: the decision needs the newest visible version only, and no I/O, so that the committer can decide again after
another put took the version number.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from nearkin_shared.errors import BadInput, PreconditionFailed
from nearkin_shared.results import VersionInfo
from nearkin_shared.utils.frozen import frozen

ANY = "*"
"""Matches every version, whatever its content."""
PRECONDITION = "precondition-failed"
"""Reason in the result of a conditional put that was refused; also the name of the gateway's problem."""
DIGESTS_MAX = 32
"""Digests that one precondition may list: 2.3 KB of the end message."""
_DIGEST = re.compile("blake3:[0-9a-f]{64}", re.ASCII)

Tags = tuple[str, ...]
"""`(ANY,)`, or digests; empty: matches no version."""


@frozen
class Precondition:
    """The conditions on a key's newest version when a put commits; None: no condition."""

    if_match: Tags | None = None
    if_none_match: Tags | None = None

    def check(self, key: str, newest: VersionInfo | None) -> None:
        """Check the newest visible version (None: there is none). Raises PreconditionFailed."""
        digest = None if newest is None else newest.digest
        found = "no version" if newest is None else f"version {newest.version} ({newest.digest})"
        if self.if_match is not None and not _matches(self.if_match, digest):
            raise PreconditionFailed(
                f"key {key!r}: precondition failed: If-Match {_list_tags(self.if_match)}, and the key has {found}; "
                "nothing was stored: read the newest version and try again"
            )
        if self.if_none_match is not None and _matches(self.if_none_match, digest):
            raise PreconditionFailed(
                f"key {key!r}: precondition failed: If-None-Match {_list_tags(self.if_none_match)}, and the key has "
                f"{found}; nothing was stored"
            )


def precondition_of(if_match: str | None, if_none_match: str | None) -> Precondition | None:
    """Return the precondition of two arguments: `*`, or a digest as `VersionInfo.digest`.

    Raises BadInput.
    """
    if if_match is None and if_none_match is None:
        return None
    return Precondition(_argument("if_match", if_match), _argument("if_none_match", if_none_match))


def tags_of(name: str, texts: Collection[str]) -> Tags:
    """Return the tags among `texts` that a version can have.

    Raises BadInput for more than DIGESTS_MAX.
    """
    if ANY in texts:
        return (ANY,)
    digests = tuple(dict.fromkeys(text for text in texts if _DIGEST.fullmatch(text)))
    if len(digests) > DIGESTS_MAX:
        raise BadInput(f"{name}: lists {len(digests)} digests: want at most {DIGESTS_MAX}")
    return digests


def checked_tags(name: str, value: object) -> Tags | None:
    """Return the tags of a message's field, or None if it has none. Raises ValueError."""
    if value is None:
        return None
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        raise ValueError(f"{name}: want a list of texts")
    if len(value) > DIGESTS_MAX or any(text != ANY and not _DIGEST.fullmatch(text) for text in value):
        raise ValueError(f"{name}: want at most {DIGESTS_MAX} digests, or {ANY!r}")
    return tuple(value)


def _argument(name: str, text: str | None) -> Tags | None:
    if text is None:
        return None
    if not isinstance(text, str) or (text != ANY and not _DIGEST.fullmatch(text)):
        raise BadInput(f"{name} {text!r:.100}: want {ANY!r} or a digest such as blake3:HEX, as `nearkin info` shows it")
    return (text,)


def _matches(tags: Tags, digest: str | None) -> bool:
    return digest is not None and (ANY in tags or digest in tags)


def _list_tags(tags: Tags) -> str:
    return ", ".join(tags[:2]) + (f" and {len(tags) - 2} more" if len(tags) > 2 else "") if tags else "(no digest)"

"""Validate keys, metadata and outputs that callers pass in."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from numbers import Integral
from pathlib import Path
from typing import BinaryIO, Protocol, cast

from blake3 import blake3

from nearkin_shared.errors import BadInput
from nearkin_shared.formats.manifest import encode_metadata
from nearkin_shared.formats.tombstone import REASON_BYTES_MAX
from nearkin_shared.limits import KEY_BYTES_MAX
from nearkin_shared.utils.sparse_file import Output

Progress = Callable[[int], None]
"""Called with the bytes read or written since the last call."""


class BinaryReader(Protocol):
    """File open for reading bytes; `read` returns b"" at the end."""

    def read(self, size: int, /) -> bytes | None:
        """Return up to `size` bytes."""


Source = os.PathLike[str] | BinaryReader | bytes | bytearray | memoryview
"""Content of a put: the path of a file, a file-like object, or bytes."""


def normalize_source(source: Source) -> Path | BinaryIO | bytes:
    """Return a path as Path, bytes of any type as bytes, and a file as it is. Raises BadInput."""
    if isinstance(source, os.PathLike):
        return Path(os.fsdecode(source))
    if isinstance(source, bytes | bytearray | memoryview):
        return bytes(source)
    if not hasattr(source, "read"):
        raise BadInput(f"source of type {type(source).__name__}: want a path, bytes, or a file open for reading bytes")
    return cast("BinaryIO", source)


RESERVED_PREFIX = ".nearkin/"
"""Keys with this prefix are Nearkin's own, such as unfinished backups; listings leave them out."""
CHECKPOINT_PREFIX = f"{RESERVED_PREFIX}checkpoints/"


def check_key(key: str) -> None:
    """Refuse a key that cannot be listed. Other UTF-8 is accepted: a key is never a path."""
    size_bytes = len(_encode(key, "key"))
    if not size_bytes:
        raise BadInput('key "": want at least one character')
    if size_bytes > KEY_BYTES_MAX:
        raise BadInput(f"key of {size_bytes} bytes ({key[:20]!r}...): want at most {KEY_BYTES_MAX} bytes of UTF-8")
    if "\0" in key:
        raise BadInput(f"key {key!r}: has a NUL character; use another separator, such as /")


def is_reserved_key(key: str) -> bool:
    """Return whether a key is Nearkin's own."""
    return key.startswith(RESERVED_PREFIX)


def check_user_key(key: str) -> None:
    """Refuse a key that `check_key` refuses, or that is reserved."""
    check_key(key)
    if is_reserved_key(key):
        raise BadInput(f"key {key!r}: keys that start with {RESERVED_PREFIX} are reserved; choose another")


HEADS_MAX = 16
"""Of a key: parts before `:/` that are looked up."""
_NUMBERED = re.compile(r"(.+)@[0-9]{1,19}", re.ASCII | re.DOTALL)


def name_of_numbered(key: str) -> str | None:
    """Return NAME if a key is NAME@NUMBER, as the command line names version NUMBER of NAME."""
    matched = _NUMBERED.fullmatch(key)
    return None if matched is None else matched[1]


def names_before_path(key: str) -> list[str]:
    """Return NAME of each reading of a key as NAME:/PATH, an entry of the tree NAME.

    The first HEADS_MAX; `NAME:` is the root of the tree.
    """
    ends = [at for at in range(1, len(key)) if key.startswith(":/", at)][:HEADS_MAX]
    if len(key) > 1 and key.endswith(":"):
        ends.append(len(key) - 1)
    return [key[:end] for end in ends]


def names_hidden_by(key: str) -> list[str]:
    """Return the keys of which a key is the name of an entry or of a numbered version."""
    heads = [*names_before_path(key), key]
    numbered = (name_of_numbered(head) for head in heads)
    return list(dict.fromkeys([*heads[:-1], *(name for name in numbered if name is not None)]))


def version_name_refusal(key: str, name: str, remedy: str) -> BadInput:
    """Return the error of a new key that names a version, or an entry, of the key `name`."""
    what = "an entry of its tree" if ":" in key[len(name) :] else "one of its versions"
    return BadInput(
        f"KEY {key!r}: the store has the key {name!r}, so that this is the name of {what}, and no such "
        f"key; the next version of {name!r} is stored by {remedy}, another key has another name"
    )


def checkpoint_key_of(key: str) -> str:
    """Return the key of the unfinished versions of a key: checkpoints of its backups."""
    return f"{CHECKPOINT_PREFIX}{blake3(key.encode()).hexdigest(length=16)}"


def check_stored_key(key: str) -> None:
    """Refuse a key that `check_key` refuses, or that is reserved and of no checkpoint."""
    if key.startswith(CHECKPOINT_PREFIX):
        check_key(key)
    else:
        check_user_key(key)


def is_listed_key(key: str, prefix: str) -> bool:
    """Return whether a listing shows a key: a reserved one only if `prefix` is reserved."""
    return not is_reserved_key(key) or prefix.startswith(RESERVED_PREFIX)


def check_prefix(prefix: str) -> None:
    """Refuse a prefix that no key can have."""
    _encode(prefix, "prefix")


CONTENT_TYPE = "content-type"
"""Name of the media type in a version's metadata."""
CONTENT_TYPE_CHARACTERS_MAX = 255
OCTET_STREAM = "application/octet-stream"
_NAME = r"[!#$%&'*+.^_`|~0-9A-Za-z-]+"
_MEDIA_TYPE = re.compile(rf'{_NAME}/{_NAME}(?:[ \t]*;[ \t]*{_NAME}=(?:{_NAME}|"[\t !#-\[\]-~]*"))*', re.ASCII)


def check_metadata(metadata: Mapping[str, str]) -> None:
    """Refuse metadata that is not text or too large."""
    if not isinstance(metadata, Mapping):
        raise BadInput(f"metadata {metadata!r:.100}: want names and values of text")
    encode_metadata(metadata)


def is_media_type(text: str) -> bool:
    """Return whether `text` is a media type, with its parameters (RFC 9110, 8.3.1)."""
    return len(text) <= CONTENT_TYPE_CHARACTERS_MAX and _MEDIA_TYPE.fullmatch(text) is not None


def content_type(metadata: Mapping[str, str]) -> str:
    """Return the media type of a version; octet-stream if it has none or an invalid one."""
    text = metadata.get(CONTENT_TYPE, "")
    return text if is_media_type(text) else OCTET_STREAM


def check_version(version: int) -> None:
    """Refuse an invalid version number."""
    if not isinstance(version, Integral) or not 1 <= version < 1 << 64:
        raise BadInput(f"version {version!r:.100}: want a whole number; versions count from 1")


def check_bound(name: str, value: int) -> None:
    """Refuse an invalid position in a version."""
    if not isinstance(value, Integral):
        raise BadInput(f"{name} {value!r:.100}: want a whole number of bytes")


def check_reason(reason: str) -> None:
    """Refuse a reason of a deletion that its tombstone cannot hold."""
    size_bytes = len(_encode(reason, "reason"))
    if size_bytes > REASON_BYTES_MAX:
        raise BadInput(f"reason of {size_bytes} bytes ({reason[:20]!r}...): want at most {REASON_BYTES_MAX} of UTF-8")


def _encode(text: str, name: str) -> bytes:
    if not isinstance(text, str):
        raise BadInput(f"{name} {text!r:.100}: want text, not {type(text).__name__}")
    try:
        return text.encode()
    except UnicodeEncodeError as err:
        raise BadInput(f"{name} {text!r:.100}: is not valid UTF-8 (position {err.start})") from err


def write_pieces(pieces: Iterable[memoryview], file: BinaryIO, progress: Progress | None) -> int:
    """Write pieces to a file and return the bytes written; zeros become holes.

    Holes (`sparse_file.py`) are made only at the end of the file. Raises BadInput for a file that accepts no bytes
    without
    an error.
    """
    written = 0
    with Output(file) as output:
        for piece in pieces:
            output.write(piece)
            written += len(piece)
            if progress is not None:
                progress(len(piece))
    return written

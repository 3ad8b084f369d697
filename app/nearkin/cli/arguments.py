"""Check the arguments of the command line.

Bytes of the command line that are not UTF-8 arrive as lone surrogates; a key or metadata never holds one.

Invariant: an argument that is refused here is refused before a store is opened.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from nearkin_shared.errors import BadInput, ConfigError
from nearkin_shared.savings_table import plural

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)
_RANGE = re.compile(r"([0-9]{0,19})-([0-9]{0,19})", re.ASCII)  # 19 digits: any offset below 2**63
_SIZE = re.compile(r"([0-9]{1,18})(?:\.([0-9]{1,9}))? ?([kmgtp]?)(i?)(b?)", re.ASCII | re.IGNORECASE)
_SAMPLE = re.compile(r"([0-9]{0,9}(?:\.[0-9]{0,9})?)(%?)", re.ASCII)


class ByteRange(NamedTuple):
    """A range `A-B`, `A-` or `-N` as in HTTP (RFC 9110, section 14.1.2).

    Both ends are included; `-N` names the last N bytes.
    """

    first: int | None
    last: int | None

    def resolve(self, size_bytes: int) -> tuple[int, int]:
        """Return start and stop (the byte after the last) in a blob of `size_bytes`.

        Raises BadInput if the range starts after the end.
        """
        if self.first is None:
            return max(0, size_bytes - (self.last or 0)), size_bytes
        if self.first >= size_bytes:
            raise BadInput(f"range starts at byte {self.first}: the blob has {plural(size_bytes, 'byte')}")
        return self.first, size_bytes if self.last is None else min(self.last + 1, size_bytes)


def parse_range(text: str) -> ByteRange:
    """Read a `--range`. Raises BadInput."""
    match = _RANGE.fullmatch(text)
    if match is None or text == "-":
        raise BadInput(f"range {text!r}: want A-B, A- or -N in bytes, such as 0-99 for the first hundred")
    first, last = (int(part) if part else None for part in match.groups())
    if first is None and last == 0:
        raise BadInput(f"range {text!r}: want at least one byte")
    if first is not None and last is not None and last < first:
        raise BadInput(f"range {text!r}: ends before it starts")
    return ByteRange(first, last)


def parse_sample(text: str) -> float:
    """Read a `--sample`, `1%` or `0.01`, as a fraction above 0 and at most 1. Raises BadInput."""
    match = _SAMPLE.fullmatch(text)
    if match is not None and match[1] not in ("", "."):
        fraction = float(match[1]) / (100 if match[2] else 1)
        if 0 < fraction <= 1:
            return fraction
    raise BadInput(f"sample {text!r}: want a share above 0 and up to 1, such as 1% or 0.01")


def parse_size(name: str, text: str) -> int:
    """Read a size such as 4096, 100MB (10^6), 100M (the same) or 1.5GiB (2^30).

    Raises BadInput.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None or (match[4] and not match[3]):
        raise BadInput(f"{name} {text!r}: want a size such as 4096, 100MB or 1.5GiB")
    power = " kmgtp".index(match[3].lower() or " ")
    unit = 1 << 10 * power if match[4] else int(10 ** (3 * power))
    whole, fraction = int(match[1]), match[2] or "0"
    return whole * unit + int(fraction) * unit // int(10 ** len(fraction))


def parse_metadata(pairs: Sequence[str], media_type: str | None = None) -> dict[str, str]:
    """Read `--meta name=value` options, and `--content-type`. Raises BadInput."""
    metadata: dict[str, str] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not name or not equals:
            raise BadInput(f"metadata {pair!r}: want name=value")
        if not _is_utf8(pair):
            raise BadInput(f"metadata {pair!r}: not valid UTF-8")
        if name in metadata:
            raise BadInput(f"metadata {name!r}: given twice")
        metadata[name] = value
    if media_type is not None:
        from nearkin_shared.validation import CONTENT_TYPE, is_media_type

        if not is_media_type(media_type):
            raise BadInput(
                f"--content-type {media_type!r:.100}: want a media type such as text/csv or application/json"
            )
        if CONTENT_TYPE in metadata:
            raise BadInput(f"--content-type and --meta {CONTENT_TYPE}=...: give one of them")
        metadata[CONTENT_TYPE] = media_type
    return metadata


def parse_changes(pairs: Sequence[str]) -> dict[str, object]:
    """Read `--set section.name=value` options as a nested merge patch. Raises BadInput."""
    import json

    changes: dict[str, object] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        *sections, last = name.split(".")
        if not equals or not all((*sections, last)):
            raise BadInput(f"setting {pair!r}: want name=value, such as features.algorithm=odess")
        below: dict[str, object] = changes
        for section in sections:
            inner = below.setdefault(section, {})
            if not isinstance(inner, dict):
                raise BadInput(f"setting {pair!r}: {section} is given a value too")
            below = inner
        if last in below:
            raise BadInput(f"setting {name!r}: given twice")
        try:
            value: object = json.loads(text)
        except (ValueError, RecursionError):
            value = text
        below[last] = value if isinstance(value, bool | int | float | str) else text
    return changes


def parse_sha256(text: str) -> bytes:
    """Read a `--sha256` as 32 bytes. Raises BadInput."""
    if re.fullmatch("[0-9a-fA-F]{64}", text, re.ASCII) is None:
        raise BadInput(f"sha256 {text!r}: want 64 hex digits, as sha256sum prints them")
    return bytes.fromhex(text)


def check_key(key: str, what: str = "key") -> str:
    """Return `key` if a store takes it: UTF-8, 1 to KEY_BYTES_MAX bytes. Raises BadInput."""
    from nearkin_shared.limits import KEY_BYTES_MAX

    if not key:
        raise BadInput(f"{what} '': must not be empty")
    return check_prefix(key, what, KEY_BYTES_MAX)


def check_prefix(prefix: str, what: str = "prefix", bytes_max: int | None = None) -> str:
    """Return `prefix` if it is UTF-8. Raises BadInput."""
    if not _is_utf8(prefix):
        raise BadInput(
            f"{what} {prefix!r}: not valid UTF-8, as every key must be: convert the name, for example with "
            "`iconv -f latin1 -t utf8`"
        )
    if bytes_max is not None and len(prefix.encode()) > bytes_max:
        raise BadInput(f"{what} {prefix[:40]!r}...: {len(prefix.encode())} bytes, at most {bytes_max}")
    return prefix


def store_folder(text: str | None) -> Path:
    """Return the folder that `--store` or NEARKIN_STORE names: a path or a `file://` URL.

    Raises ConfigError.
    """
    if text is None:
        raise ConfigError("no store given: use --store FOLDER or --server URL, or set NEARKIN_STORE or NEARKIN_SERVER")
    if not text:
        raise ConfigError('store "": want a folder or a file:// URL')
    match = _SCHEME.fullmatch(text)
    if match is None:
        return Path(text)
    scheme = match[1].lower()
    if scheme != "file":
        if scheme in ("http", "https"):
            raise ConfigError(f"store {scheme}://: a gateway's URL is given with --server or NEARKIN_SERVER")
        raise ConfigError(f"store {scheme}://: not in this build; give a folder or a file:// URL")
    from urllib.parse import unquote_to_bytes

    host, _, path = match[2].partition("/")
    if host not in ("", "localhost"):
        raise ConfigError(f'store "{text}": file:// URLs have three slashes, such as file:///var/lib/nearkin')
    folder = unquote_to_bytes("/" + path)
    if b"\0" in folder:
        raise ConfigError(f'store "{text}": a path holds no NUL byte')
    return Path(os.fsdecode(folder))


def check_source(path: Path) -> os.stat_result:
    """Return the status of a readable file.

    Raises BadInput if the file is missing, a folder or not readable.
    """
    try:
        status = path.stat()
        if stat.S_ISDIR(status.st_mode):
            raise BadInput(f'source "{path}": is a folder; `nearkin backup` stores folders')
        if stat.S_ISREG(status.st_mode):  # a pipe must not be opened twice
            path.open("rb").close()
    except (OSError, ValueError) as err:
        raise BadInput(f'source "{path}": {_reason(err)}') from err
    return status


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _reason(err: OSError | ValueError) -> str:
    return (err.strerror or str(err)).lower() if isinstance(err, OSError) else str(err)

"""Read and write the headers of tus.

Invariant: extensions not in `EXTENSIONS` are refused.
"""

from __future__ import annotations

import base64
import re

from starlette.datastructures import Headers

from nearkin_gateway.http.problems import TUS_VERSION, Problem
from nearkin_shared.limits import KEY_BYTES_MAX
from nearkin_shared.utils.frozen import frozen
from nearkin_shared.validation import CONTENT_TYPE, check_metadata, check_user_key, is_media_type

EXTENSIONS = "creation,creation-with-upload,checksum,expiration,termination,concatenation"
METADATA_CHARACTERS_MAX = 128 * 1024
_SOURCE = re.compile("(?:[^\\s#?]*/)?uploads/([0-9a-f]{32})", re.ASCII)


@frozen
class Description:
    """The fields of `Upload-Metadata`; `key` is empty if a partial upload has none."""

    key: str
    metadata: dict[str, str]
    sha256: str | None


def parse_metadata(text: str, *, needs_key: bool) -> Description:
    """Return key, metadata and SHA-256 (hex) of `Upload-Metadata`.

    Raises Problem 400, BadInput.
    """
    if len(text) > METADATA_CHARACTERS_MAX:
        raise Problem(400, "bad-metadata", f"Upload-Metadata: want at most {METADATA_CHARACTERS_MAX} characters")
    found: dict[str, str] = {}
    for pair in filter(None, (part.strip() for part in text.split(","))):
        name, _, value = pair.partition(" ")
        try:
            decoded = base64.b64decode(value.strip(), validate=True).decode()
        except ValueError as err:  # binascii.Error, UnicodeDecodeError, and what is not ASCII
            raise Problem(400, "bad-metadata", f"Upload-Metadata {name:.60}: want base64 of UTF-8") from err
        if name in found:
            raise Problem(400, "bad-metadata", f"Upload-Metadata {name:.60}: is there twice")
        found[name] = decoded
    key = found.pop("key", None)
    if key is None and needs_key:
        raise Problem(400, "bad-metadata", 'Upload-Metadata: want "key" with the blob\'s key in base64')
    if key is not None:
        if len(key.encode()) > KEY_BYTES_MAX:
            raise Problem(400, "key-too-long", f"key of {len(key.encode())} bytes: want at most {KEY_BYTES_MAX}")
        check_user_key(key)
    sha256 = found.pop("sha256", None)
    if sha256 is not None and re.fullmatch("[0-9a-fA-F]{64}", sha256, re.ASCII) is None:
        raise Problem(400, "bad-digest", "Upload-Metadata sha256: want 64 hex digits")
    if is_media_type(found.get("filetype", "")):  # as tus clients name it
        found.setdefault(CONTENT_TYPE, found["filetype"])
    check_metadata(found)
    return Description(key or "", found, sha256)


def parse_concat(text: str | None, partials_max: int) -> tuple[str, ...] | None:
    """Return the partial uploads of `Upload-Concat: final;URL URL`.

    () for `partial`, None without header. Only the id at the end of a URL counts: a gateway may be reached by several
    names. Raises Problem 400.
    """
    if text is None:
        return None
    kind, separator, urls = text.strip().partition(";")
    if kind.strip() == "partial" and not separator:
        return ()
    if kind.strip() != "final" or not urls.strip():
        raise Problem(400, "bad-concat", f'Upload-Concat {text:.60}: want "partial", or "final;" with URLs of uploads')
    found = []
    for url in urls.split():
        match = _SOURCE.fullmatch(url)
        if match is None:
            raise Problem(400, "bad-concat", f"Upload-Concat {url:.200}: is not the Location of an upload")
        found.append(match[1])
    if len(found) > partials_max:
        raise Problem(
            400, "bad-concat", f"Upload-Concat of {len(found)} partial uploads: want at most {partials_max} of them"
        )
    if len(set(found)) < len(found):
        raise Problem(400, "bad-concat", "Upload-Concat: names a partial upload twice")
    return tuple(found)


def check_version(given: str | None) -> None:
    """Refuse another version of tus. Raises Problem 412."""
    if given != TUS_VERSION:
        raise Problem(
            412,
            "tus-version",
            f"Tus-Resumable: {'is missing' if given is None else repr(given[:20])}, want {TUS_VERSION}",
            headers={"Tus-Version": TUS_VERSION},
        )


def check_extensions(headers: Headers) -> None:
    """Refuse extensions that are not offered. Raises Problem 400."""
    if "upload-defer-length" in headers:
        raise Problem(
            400, "not-offered", "Upload-Defer-Length: creation-defer-length is not offered; announce a length"
        )
    trailers = {name.strip().lower() for name in ",".join(headers.getlist("trailer")).split(",")}
    if "upload-checksum" in trailers:
        raise Problem(
            400, "not-offered", "Trailer Upload-Checksum: checksum-trailer is not offered; send it as a header"
        )

"""Parse digests and metadata of headers.

Invariant: announced digests are checked before the commit.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from collections.abc import AsyncIterator, Mapping
from urllib.parse import quote, unquote_to_bytes

from starlette.datastructures import Headers

from nearkin_gateway.blocking_threads import WorkerPool
from nearkin_gateway.http.problems import Problem
from nearkin_shared.validation import OCTET_STREAM, check_metadata, is_media_type

META_PREFIX = "x-nearkin-meta-"
META_HEADERS_MAX = 64
META_HEADER_BYTES_MAX = 16 * 1024
"""Metadata beyond either is left out of headers (clients stop at 100 headers); /v1/info/{key} has it all."""
_VALUE_SAFE = "!\"#$&'()*+,-./:;<=>?@[]^_`{|}~"
_NAME_SAFE = "!#$&'*+-.^_`|~"
ALGORITHMS: Mapping[str, str] = {"sha-512": "sha512", "md5": "md5", "sha": "sha1"}
"""Checked where `Content-Digest` has them, next to sha-256; other algorithms are ignored (RFC 9530, section 2)."""
_MEMBER = re.compile(r"([a-z*][a-z0-9_.*-]*)\s*=\s*:([A-Za-z0-9+/=]*):\s*(?:;.*)?", re.DOTALL)
_SHA256_MEMBER = re.compile(r"sha-256\s*=\s*:([A-Za-z0-9+/=]*):\s*(?:;.*)?", re.DOTALL)
_WANTED = re.compile(r"([a-z*][a-z0-9_.*-]*)\s*=\s*(10|[0-9])\s*(?:;.*)?", re.DOTALL)


def announced_sha256(headers: Headers) -> bytes | None:
    """Return the SHA-256 of `Content-Digest` (RFC 9530) or `X-Content-SHA256`. Raises Problem."""
    found: set[bytes] = set()
    for plain in headers.getlist("x-content-sha256"):
        if re.fullmatch("[0-9a-fA-F]{64}", plain, re.ASCII) is None:
            raise Problem(400, "bad-digest", f"X-Content-SHA256 {plain:.80}: want 64 hex digits")
        found.add(bytes.fromhex(plain))
    for name in ("content-digest", "repr-digest"):
        for member in ",".join(headers.getlist(name)).split(","):
            match = _SHA256_MEMBER.fullmatch(member.strip())
            if match is not None:
                found.add(_decode(match[1], name))
            elif member.strip().startswith("sha-256"):
                raise Problem(400, "bad-digest", f"{name} {member.strip():.80}: want sha-256=:BASE64:")
    if len(found) > 1:
        raise Problem(400, "bad-digest", "Content-Digest and X-Content-SHA256 announce different digests")
    return found.pop() if found else None


def announced_digests(headers: Headers) -> dict[str, bytes]:
    """Return digests of Content-Digest and Content-MD5 except SHA-256, by hashlib's names.

    Raises Problem.
    """
    found: dict[str, bytes] = {}
    for value in headers.getlist("content-md5"):
        _announce(found, "md5", value.strip(), "Content-MD5")
    for name in ("content-digest", "repr-digest"):
        for member in filter(None, (part.strip() for part in ",".join(headers.getlist(name)).split(","))):
            match = _MEMBER.fullmatch(member)
            if match is None:
                raise Problem(400, "bad-digest", f"{name} {member:.80}: want ALGORITHM=:BASE64:, such as sha-256=:...:")
            if match[1] in ALGORITHMS:
                _announce(found, ALGORITHMS[match[1]], match[2], name)
    return found


def _announce(found: dict[str, bytes], algorithm: str, text: str, name: str) -> None:
    want_bytes = hashlib.new(algorithm, usedforsecurity=False).digest_size
    try:
        data = base64.b64decode(text, validate=True)
    except ValueError as err:  # binascii.Error, and what is not ASCII
        raise Problem(400, "bad-digest", f"{name}: {algorithm} is not base64") from err
    if len(data) != want_bytes:
        raise Problem(400, "bad-digest", f"{name}: {algorithm} of {len(data)} bytes: want {want_bytes}")
    if found.setdefault(algorithm, data) != data:
        raise Problem(400, "bad-digest", f"{name}: announces two different {algorithm} digests")


async def check_digests(
    pieces: AsyncIterator[bytearray], announced: Mapping[str, bytes], hashing: WorkerPool
) -> AsyncIterator[bytearray]:
    """Yield the frames; raise Problem 400 before a commit if they do not match the digests."""
    hashers = {name: hashlib.new(name, usedforsecurity=False) for name in announced}

    def update(frame: bytearray) -> None:
        for hasher in hashers.values():
            hasher.update(frame)

    async for frame in pieces:
        if hashers:
            await hashing.run(update, frame)
        yield frame
    for name, hasher in hashers.items():
        if hasher.digest() != announced[name]:
            why = f"the body's {name} is {hasher.hexdigest()}, announced was {announced[name].hex()}"
            raise Problem(400, "digest-mismatch", f"{why}; nothing was stored")


def content_type_of(headers: Headers) -> str | None:
    """Return the `Content-Type` to store; None if absent, invalid, or plain octets."""
    text = headers.get("content-type", "").strip()
    return text if is_media_type(text) and text.lower() != OCTET_STREAM else None


def wants_sha256(headers: Headers) -> bool:
    """Return whether the caller asks for a SHA-256 (`Want-Repr-Digest: sha-256=10`, RFC 9530)."""
    return any(_weights(headers, name).get("sha-256") for name in ("want-repr-digest", "want-content-digest"))


def repr_digest(headers: Headers, blake3_hex: str, sha256_hex: str | None) -> str | None:
    """Return the `Repr-Digest` of a read, None without a digest to send.

    It has the digests that `Want-Repr-Digest` asks for, of those that are stored; else the SHA-256, unless the caller
    does not accept it (weight 0). `sha256_hex` None: the put did not ask to keep it, and a read does not compute it.
    """
    stored = {"blake3": blake3_hex} if sha256_hex is None else {"sha-256": sha256_hex, "blake3": blake3_hex}
    weights = _weights(headers, "want-repr-digest")
    wanted = sorted((name for name in stored if weights.get(name)), key=weights.__getitem__, reverse=True)
    if not wanted and "sha-256" in stored and "sha-256" not in weights:
        wanted = ["sha-256"]
    members = [f"{name}=:{base64.b64encode(bytes.fromhex(stored[name])).decode()}:" for name in wanted]
    return ", ".join(members) or None


def _weights(headers: Headers, name: str) -> dict[str, int]:
    """Return the weights of algorithms in a header, 0 to 10; other members are ignored."""
    members = (part.strip() for part in ",".join(headers.getlist(name)).split(","))
    return {match[1]: int(match[2]) for match in map(_WANTED.fullmatch, members) if match is not None}


def metadata_of(headers: Headers) -> dict[str, str]:
    """Return the decoded `X-Nearkin-Meta-NAME: VALUE` headers. Raises Problem, BadInput."""
    found: dict[str, str] = {}
    for name, value in headers.items():
        if name.startswith(META_PREFIX):
            try:
                decoded = unquote_to_bytes(name.removeprefix(META_PREFIX).encode("latin-1")).decode()
                text = unquote_to_bytes(value.encode("latin-1")).decode()
            except UnicodeDecodeError as err:
                raise Problem(
                    400, "bad-metadata", f"{name:.80}: is not UTF-8; percent-encode what is not ASCII"
                ) from err
            if not decoded or decoded in found:
                raise Problem(400, "bad-metadata", f"{name:.80}: want each name once, and not empty")
            found[decoded] = text
    check_metadata(found)
    return found


def metadata_headers(metadata: Mapping[str, str]) -> dict[str, str]:
    """Return metadata as headers: percent-encoded, with names that keep their case."""
    headers: dict[str, str] = {}
    for name, value in metadata.items():
        headers[META_PREFIX + _header_name(name)] = quote(value, safe=_VALUE_SAFE)
    size_bytes = sum(len(name) + len(value) + 4 for name, value in headers.items())
    if len(headers) > META_HEADERS_MAX or size_bytes > META_HEADER_BYTES_MAX:
        return {"X-Nearkin-Meta-Omitted": str(len(headers))}
    return headers


def _header_name(name: str) -> str:
    """Return a metadata name for a header: lower case is kept, other characters are escaped."""
    parts = []
    for c in name:
        if c.isascii() and (c.islower() or c.isdigit() or c in _NAME_SAFE):
            parts.append(c)
        else:
            parts.extend(f"%{byte:02X}" for byte in c.encode())
    return "".join(parts)


def _decode(text: str, name: str) -> bytes:
    try:
        data = base64.b64decode(text, validate=True)
    except binascii.Error as err:
        raise Problem(400, "bad-digest", f"{name}: sha-256 is not base64") from err
    if len(data) != 32:
        raise Problem(400, "bad-digest", f"{name}: sha-256 of {len(data)} bytes: want 32")
    return data

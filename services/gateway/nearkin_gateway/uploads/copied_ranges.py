"""Receive bodies of parts: new bytes, and ranges of other versions.

    request body -> parts -> frames and ranges, where the backend takes ranges
                          -> frames, with the bytes of ranges read from the sources, where it does not

Invariant (I9): the sources are of the caller's tenant: a version of the key that is put, and checkpoints of that key.
A source that is deleted, is no tree or is damaged ends the upload with BaseUnusable; nothing is stored.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from starlette.datastructures import Headers

from nearkin_gateway.http.problems import Problem
from nearkin_gateway.http.request_bodies import frames
from nearkin_gateway.state import Gateway
from nearkin_gateway.uploads.upload_service import UploadPiece
from nearkin_shared.errors import BadInput, BaseUnusable, Corrupt, NotFound
from nearkin_shared.formats.manifest import Manifest
from nearkin_shared.formats.tree_layout import FOOTER_BYTES, decode_footer
from nearkin_shared.formats.upload_parts import (
    BASE_HEADER,
    CHECKPOINTS_HEADER,
    PARTS_MEDIA_TYPE,
    CopiedRange,
    PartsDecoder,
    parse_versions,
)
from nearkin_shared.limits import FRAME_BYTES_MAX, MIB
from nearkin_shared.reading.copy_sources import CopySources, SourceVersion
from nearkin_shared.validation import checkpoint_key_of

if TYPE_CHECKING:
    from collections.abc import Iterator

VERSION_DIGITS_MAX = 19
COPY_BYTES = 4 * MIB
"""Bytes of a range that are read at once, and held: as much as a restore decodes together."""


def has_parts(headers: Headers) -> bool:
    """Return whether a put has a body of parts.

    Raises Problem for a header of one without its media type, or given twice.
    """
    for name in (BASE_HEADER, CHECKPOINTS_HEADER):
        if (lines := len(headers.getlist(name))) > 1:
            raise Problem(400, "bad-base", f"{name}: the request has it {lines} times; name all versions in one")
    media_type = headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type == PARTS_MEDIA_TYPE:
        return True
    for name in (BASE_HEADER, CHECKPOINTS_HEADER):
        if name in headers:
            raise Problem(400, "bad-base", f"{name}: want it with Content-Type {PARTS_MEDIA_TYPE} only")
    return False


def sources_of(key: str, headers: Headers) -> list[SourceVersion]:
    """Return the versions that a body of parts copies ranges of.

    Raises Problem, BadInput.
    """
    found: list[SourceVersion] = []
    text = headers.get(BASE_HEADER)
    if text is not None:
        if not (text.isascii() and text.isdecimal() and len(text) <= VERSION_DIGITS_MAX and int(text)):
            raise Problem(400, "bad-base", f"{BASE_HEADER} {text:.40}: want the number of a version of {key!r}")
        found.append(SourceVersion(key, int(text)))
    versions = headers.get(CHECKPOINTS_HEADER)
    if versions is not None:
        found += [SourceVersion(checkpoint_key_of(key), version) for version in parse_versions(versions)]
    return found


async def open_parts(
    gateway: Gateway, tenant: str, scopes: Collection[str], key: str, headers: Headers
) -> PartsReceiver | None:
    """Return the receiver of a body of parts; None for any other body.

    Raises Problem, BadInput, BaseUnusable, StoreUnavailable.
    """
    if not has_parts(headers):
        return None
    sources = sources_of(key, headers)
    if "read" not in scopes:
        raise Problem(
            403, "missing-scope", f"{PARTS_MEDIA_TYPE}: want a token with the scope read as well, or send all bytes"
        )
    for name in ("content-digest", "repr-digest", "content-md5", "x-content-sha256"):
        if name in headers:
            raise Problem(400, "bad-digest", f"{name}: not with a body of parts, which ends with its own digest")
    return PartsReceiver(gateway, await asyncio.to_thread(_read_manifests, gateway, tenant, sources))


def _read_manifests(gateway: Gateway, tenant: str, sources: Sequence[SourceVersion]) -> list[Manifest]:
    """Return the manifests of the sources. Raises BaseUnusable, StoreUnavailable."""
    found = []
    for source in sources:
        with source_errors(source):
            manifest = gateway.catalogue.manifest(tenant, source.key, source.version)
            if not manifest.info.is_tree:
                raise Corrupt("is no tree")
            found.append(manifest)
    return found


@contextmanager
def source_errors(source: SourceVersion) -> Iterator[None]:
    """Raise BaseUnusable for a source that is missing or damaged."""
    try:
        yield
    except (NotFound, Corrupt) as err:
        raise BaseUnusable(f"key {source.key!r} has no such tree to copy from: {err}") from err


class PartsReceiver:
    """The body of one upload, with the sources of its ranges."""

    def __init__(self, gateway: Gateway, sources: Sequence[Manifest]) -> None:
        self._gateway = gateway
        self._decoder = PartsDecoder([source.size_bytes for source in sources], int(gateway.bounds.body_bytes_max))
        self._sources = CopySources(sources, self._read_source)
        self._tail = b""
        """The last bytes of the result so far, as many as a footer has."""

    @property
    def sources(self) -> tuple[SourceVersion, ...] | None:
        """The versions that ranges are copied of; None for a backend that gets their bytes."""
        if not self._gateway.ingest.takes_ranges:
            return None
        return tuple(SourceVersion(source.key, source.version) for source in self._sources.manifests)

    def result_digest(self, found: bytes) -> bytes:
        """Return the digest of the version, `found` that of all bytes that were passed on."""
        if self._gateway.ingest.takes_ranges:
            assert self._decoder.digest is not None
            return self._decoder.digest
        return found

    def pieces(self, body: AsyncIterator[bytes]) -> AsyncIterator[UploadPiece]:
        """Yield frames of new bytes, and ranges where the backend takes them.

        Raises BadInput, BaseUnusable, StoreUnavailable.
        """
        return self._split(body) if self._gateway.ingest.takes_ranges else frames(self.expand(body))

    async def _split(self, body: AsyncIterator[bytes]) -> AsyncIterator[UploadPiece]:
        frame = bytearray()
        async for piece in body:
            for part in self._decoder.feed(piece):
                if isinstance(part, CopiedRange):
                    if frame:
                        yield frame
                        frame = bytearray()
                    yield part
                    continue
                left = part
                while left:
                    room = FRAME_BYTES_MAX - len(frame)
                    frame += left[:room]
                    left = left[room:]
                    if len(frame) == FRAME_BYTES_MAX:
                        yield frame
                        frame = bytearray()
        if frame:
            yield frame
        self._decoder.finish()

    async def expand(self, pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes | memoryview]:
        """Yield the bytes of the result. Raises BadInput, BaseUnusable, StoreUnavailable."""
        async for piece in pieces:
            for part in self._decoder.feed(piece):
                if isinstance(part, CopiedRange):
                    for start in range(part.start, part.stop, COPY_BYTES):
                        copied = await self._read(start, min(start + COPY_BYTES, part.stop))
                        self._keep_tail(copied)
                        yield copied
                else:
                    self._keep_tail(part)
                    yield part
        self._decoder.finish()
        try:
            decode_footer(self._tail, self._decoder.size_bytes, "body of parts")
        except Corrupt as err:
            raise BadInput(f"{err}; send all bytes of what is no tree") from err

    async def _read(self, start: int, stop: int) -> memoryview:
        source, window, first = self._sources.locate(start)
        with source_errors(SourceVersion(source.key, source.version)):
            return await asyncio.to_thread(window.read, start - first, stop - first)

    def _read_source(self, source: Manifest, start: int, stop: int) -> bytes:
        return self._gateway.catalogue.blob(source.tenant, source, start, stop).read()

    def _keep_tail(self, data: bytes | memoryview) -> None:
        self._tail = (self._tail + bytes(data[-FOOTER_BYTES:]))[-FOOTER_BYTES:]

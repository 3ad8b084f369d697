"""Receive bodies of parts: new bytes, and ranges of an earlier version of the same key.

    request body -> parts -> frames and ranges, where the backend takes ranges
                          -> frames, with the bytes of ranges read from the base, where it does not

Invariant (I9): the base is a version of the caller's tenant and of the key that is put. A base that is deleted, is no
tree or is damaged ends the upload with BaseUnusable; nothing is stored.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection
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
from nearkin_shared.formats.upload_parts import BASE_HEADER, PARTS_MEDIA_TYPE, CopiedRange, PartsDecoder
from nearkin_shared.limits import FRAME_BYTES_MAX, MIB
from nearkin_shared.reading.segment_window import SegmentWindow

if TYPE_CHECKING:
    from collections.abc import Iterator

VERSION_DIGITS_MAX = 19
COPY_BYTES = 4 * MIB
"""Bytes of a range that are read at once, and held: as much as a restore decodes together."""


def has_parts(headers: Headers) -> bool:
    """Return whether a put has a body of parts.

    Raises Problem for one of its two headers without the other.
    """
    media_type = headers.get("content-type", "").partition(";")[0].strip().lower()
    if (media_type == PARTS_MEDIA_TYPE) == (BASE_HEADER in headers):
        return BASE_HEADER in headers
    raise Problem(400, "bad-base", f"{BASE_HEADER}: want it with Content-Type {PARTS_MEDIA_TYPE}, and only with it")


async def open_base(
    gateway: Gateway, tenant: str, scopes: Collection[str], key: str, headers: Headers
) -> PartsReceiver | None:
    """Return the receiver of a body of parts; None for any other body.

    Raises Problem, BaseUnusable, StoreUnavailable.
    """
    if not has_parts(headers):
        return None
    text = headers[BASE_HEADER]
    if not (text.isascii() and text.isdecimal() and len(text) <= VERSION_DIGITS_MAX and int(text)):
        raise Problem(400, "bad-base", f"{BASE_HEADER} {text:.40}: want the number of a version of this key")
    if "read" not in scopes:
        raise Problem(
            403, "missing-scope", f"{BASE_HEADER}: want a token with the scope read as well, or send all bytes"
        )
    for name in ("content-digest", "repr-digest", "content-md5", "x-content-sha256"):
        if name in headers:
            raise Problem(400, "bad-digest", f"{name}: not with a body of parts, which ends with its own digest")
    with base_errors(key, int(text)):
        manifest = await asyncio.to_thread(gateway.catalogue.manifest, tenant, key, int(text))
        if not manifest.info.is_tree:
            raise Corrupt("is no tree")
    return PartsReceiver(gateway, manifest)


@contextmanager
def base_errors(key: str, version: int) -> Iterator[None]:
    """Raise BaseUnusable for a base that is missing or damaged."""
    try:
        yield
    except (NotFound, Corrupt) as err:
        raise BaseUnusable(f"{BASE_HEADER} {version}: key {key!r} has no such tree to copy from: {err}") from err


class PartsReceiver:
    """The body of one upload, with the base of its ranges."""

    def __init__(self, gateway: Gateway, base: Manifest) -> None:
        self._gateway, self._base = gateway, base
        self._decoder = PartsDecoder(base.size_bytes, int(gateway.bounds.body_bytes_max))
        self._window = SegmentWindow(base, self._read_base)
        self._tail = b""
        """The last bytes of the result so far, as many as a footer has."""

    @property
    def base_version(self) -> int | None:
        """The version that ranges are copied of; None for a backend that gets their bytes."""
        return self._base.version if self._gateway.ingest.takes_ranges else None

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
        with base_errors(self._base.key, self._base.version):
            return await asyncio.to_thread(self._window.read, start, stop)

    def _read_base(self, start: int, stop: int) -> bytes:
        return self._gateway.catalogue.blob(self._base.tenant, self._base, start, stop).read()

    def _keep_tail(self, data: bytes | memoryview) -> None:
        self._tail = (self._tail + bytes(data[-FOOTER_BYTES:]))[-FOOTER_BYTES:]

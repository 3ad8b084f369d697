"""Store resumable uploads in the object store.

Invariant: the parts of an upload form a chain without gap.

uploads/ID/meta                 the blob that it will become; created once
uploads/ID/parts/OFFSET         16 hex digits; each created once, so that of two writers at one offset one is refused:
                                its bytes, then CHECK_BYTES of their BLAKE3 and offset
uploads/ID/done                 committed, as which attempt; or why it never will be
uploads/ID/claim                of a partial upload: the id of the final upload that it is a part of (tus
concatenation)

Any gateway continues any upload: no state is kept in a process. All calls block: run them on a thread. In an
encrypted store all objects are encrypted under the tenant's keys; older releases used the store's, which can be read.
"""

from __future__ import annotations

import json
import logging
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import asdict, field
from typing import TypeVar

from blake3 import blake3
from pydantic import TypeAdapter, ValidationError

from nearkin_gateway.http.request_limits import Holders, Holdings, Shares
from nearkin_gateway.uploads.staged_bytes import StagedBytes
from nearkin_shared.errors import Corrupt, NearkinError, NotFound
from nearkin_shared.limits import FRAME_BYTES_MAX
from nearkin_shared.objectstore.base import AlreadyExists, ObjectStore
from nearkin_shared.objectstore.encrypted_store import put_new_of_tenant
from nearkin_shared.preconditions import Precondition
from nearkin_shared.utils.frozen import frozen

ROOT = "uploads"
ID_BYTES = 16
PART_BYTES = 4 * FRAME_BYTES_MAX
"""Most memory of a running PATCH; a part of this size is read back in one piece."""
CHECK_BYTES = 16
UNSEEN_SECONDS = 60.0
"""An upload that is whole and not handed over, or has parts and no meta, is left alone so long: it may be at work."""
ROOM_RETRY_SECONDS = 60
QUOTA_RETRY_SECONDS = 15 * 60.0
"""A sweep leaves a whole upload alone so long after a quota refused it: each try reads the sums of its tenant."""
WHOLE_SECONDS = 7 * 24 * 3600
"""An upload that is whole and cannot be handed over is kept so long after it would have expired."""
_ID = re.compile("[0-9a-f]{32}", re.ASCII)
_PART = re.compile("parts/([0-9a-f]{16})", re.ASCII)
Parsed = TypeVar("Parsed")
_log = logging.getLogger("nearkin.gateway")


class DamagedPart(Corrupt):
    """A staged part is damaged: the staged data end before it."""

    def __init__(self, number: str, offset: int, why: str) -> None:
        super().__init__(f"bytes from {offset} on, which were staged, are damaged: {why}")
        self.number, self.offset = number, offset


@frozen
class Meta:
    """The description of an upload. Times in microseconds since 1970."""

    tenant: str
    key: str
    length_bytes: int
    created_us: int
    expires_us: int
    metadata: Mapping[str, str] = field(default_factory=dict)
    sha256: str | None = None
    upload_metadata: str = ""
    """The header `Upload-Metadata` as the client sent it."""
    partial: bool = False
    """Stored as a part of a final upload only; `key` may be empty."""
    sources: tuple[str, ...] = ()
    """Ids of the partial uploads that a final upload concatenates, in order."""
    token: str = ""
    address: str = ""
    empty_expires_us: int = 0
    """When it expires while none of its bytes has arrived; 0: with the others."""
    precondition: Precondition | None = None
    """Checked where the version is committed."""

    @property
    def holders(self) -> Holders:
        """Return whose shares it counts against."""
        return Holders(self.tenant, self.token, self.address)

    @property
    def final(self) -> bool:
        """Return whether the upload is the concatenation of partial uploads."""
        return bool(self.sources)


@frozen
class UploadOutcome:
    """How an upload ended: `blob` the attempt's id in hex, or `failure`."""

    blob: str | None
    failure: str | None = None
    reason: str | None = None
    """Of a failure: PRECONDITION where the precondition refused it at the commit."""


@frozen
class StagedUpload:
    """An upload in the store. `parts` are (offset, bytes), in order, without a gap."""

    id: str
    meta: Meta
    parts: tuple[tuple[int, int], ...]
    done: UploadOutcome | None
    claim: str | None = None
    """The final upload that a partial upload belongs to."""
    sources: tuple[StagedUpload, ...] = ()
    """The partial uploads of a final upload that is not handed over; ends at the first one that is missing."""

    @property
    def offset(self) -> int:
        """Return how many bytes there are."""
        if self.done is not None:
            return self.meta.length_bytes  # its parts are removed
        return sum(part_bytes for _, part_bytes in self.parts) + sum(source.offset for source in self.sources)

    @property
    def whole(self) -> bool:
        """Return whether nothing is missing."""
        if self.done is not None:
            return True
        return len(self.sources) == len(self.meta.sources) and self.offset == self.meta.length_bytes

    @property
    def pending(self) -> bool:
        """Return whether the upload is complete and not committed; partial uploads never are."""
        return self.whole and self.done is None and not self.meta.partial

    @property
    def expired(self) -> bool:
        """Return whether its time is over. A complete upload is kept WHOLE_SECONDS longer.

        A claimed partial upload expires with its final upload (`Resumable.sweep`).
        """
        waits = WHOLE_SECONDS if self.pending else 0
        if self.meta.empty_expires_us and not self.offset and not self.whole:
            return self.meta.empty_expires_us < time.time_ns() // 1000
        return self.meta.expires_us + waits * 1_000_000 < time.time_ns() // 1000


class Resumable:
    """All resumable uploads of a store."""

    def __init__(self, objects: ObjectStore, uploads_max: int, shares: Shares | None = None) -> None:
        self._objects = objects
        self._open = Holdings("resumable uploads", uploads_max, shares or Shares(), "open")
        self.staged = StagedBytes()
        """The declared lengths of the open ones."""
        self._begun: dict[str, Meta] = {}
        """Those that began since the last sweep did."""
        self._ended: set[str] = set()
        """Those that ended since then: the sweep may have found them open."""
        self._suspects: dict[str, float] = {}
        self._refused: dict[str, float] = {}
        """When a quota refused a whole one, in seconds of the monotonic clock."""

    def reserve(self, meta: Meta) -> str:
        """Count an upload that will be created; return its id. Raises Problem as `check_room`.

        A reservation that is not used ends with the sweep after next.
        """
        self.check_room(meta.holders)
        number = os.urandom(ID_BYTES).hex()
        self._add(number, meta)
        return number

    def create(self, meta: Meta, reserved: str | None = None) -> str:
        """Create an upload, of a reservation if there is one; return its id.

        Raises StoreUnavailable.
        """
        number = reserved or os.urandom(ID_BYTES).hex()
        try:
            self._put(meta.tenant, f"{ROOT}/{number}/meta", json.dumps(asdict(meta)).encode())
        except BaseException:
            self._drop(number)
            raise
        self._add(number, meta)
        return number

    def _add(self, number: str, meta: Meta) -> None:
        self._begun[number] = meta
        self._open.add(number, meta.holders)
        self.staged.add(number, meta.tenant, meta.length_bytes)

    def _drop(self, number: str) -> None:
        self._ended.add(number)
        self._begun.pop(number, None)
        self._open.discard(number)
        self.staged.discard(number)

    def postpone(self, number: str) -> None:
        """Let sweeps leave a whole upload alone for QUOTA_RETRY_SECONDS: a quota refused it."""
        self._refused[number] = time.monotonic()

    def create_final(self, number: str, meta: Meta) -> StagedUpload:
        """Create a final upload under an id derived from its request; a repeat returns the same.

        1 meta  2 claims: a partial upload is removed with the final upload that claims it, and only then. Raises
        AlreadyExists if another final upload has claimed one of the partial uploads.
        """
        with suppress(AlreadyExists):
            self._put(meta.tenant, f"{ROOT}/{number}/meta", json.dumps(asdict(meta)).encode())  # 1
            self._add(number, meta)
        staged = self._load(number)
        if staged.done is None:
            try:
                for source in meta.sources:
                    self._claim(meta.tenant, source, number)  # 2
            except AlreadyExists:
                self._release(meta.sources, number)
                raise
        return staged

    def _claim(self, tenant: str, source: str, number: str) -> None:
        name = f"{ROOT}/{source}/claim"
        try:
            self._put(tenant, name, number.encode())
            self._drop(source)
        except AlreadyExists:
            if self._objects.get(name) != number.encode():
                raise

    def _release(self, sources: Sequence[str], number: str) -> None:
        """Take back a final upload: its partial uploads stay, without its claims."""
        for source in sources:
            if self._claimed_by(source, number):
                self._objects.delete(f"{ROOT}/{source}/claim")
        self._objects.delete(f"{ROOT}/{number}/meta")
        self._drop(number)

    def _claimed_by(self, source: str, number: str) -> bool:
        try:
            return self._objects.get(f"{ROOT}/{source}/claim") == number.encode()
        except NotFound:
            return False

    def check_room(self, holders: Holders) -> None:
        """Refuse one more upload. Raises Problem: 503 if all are open, 429 beyond a share."""
        self._open.check_room(holders, ROOM_RETRY_SECONDS)

    def load(self, tenant: str, number: str) -> StagedUpload:
        """Return an upload of a tenant.

        Raises NotFound: unknown, another's, expired or terminated.
        """
        missing = NotFound(f"upload {number!r:.60}: there is none; it may have expired")
        if _ID.fullmatch(number) is None:
            raise missing
        try:
            staged = self._load(number)
        except NotFound as err:
            raise missing from err
        if staged.meta.tenant != tenant or staged.expired:
            raise missing
        return staged

    def _put(self, tenant: str, name: str, data: bytes) -> None:
        """Write an object of an upload under the tenant's keys, so that an erasure removes it too."""
        put_new_of_tenant(self._objects, tenant, name, data)

    def stage(self, number: str, offset: int, data: bytes | bytearray, *, tenant: str) -> None:
        """Append a part to a tenant's upload. Raises AlreadyExists if another request wrote it."""
        name, whole = _part(number, offset), b"".join((data, _check(number, offset, data)))
        try:
            self._put(tenant, name, whole)
        except AlreadyExists:
            if self._objects.size_bytes(name) > CHECK_BYTES:
                raise
            self._objects.delete(name)  # it was cut short: no response named it, and no other process removes it
            self._put(tenant, name, whole)

    def read(self, staged: StagedUpload) -> Iterator[memoryview]:
        """Yield the parts' bytes. Raises DamagedPart, or NotFound (another gateway committed it)."""
        for source in staged.sources:
            yield from self.read(source)
        for offset, part_bytes in staged.parts:
            try:
                data = self._objects.get(_part(staged.id, offset))
            except Corrupt as err:
                raise DamagedPart(staged.id, offset, str(err)) from err
            content = memoryview(data)[: len(data) - CHECK_BYTES]
            if len(content) != part_bytes or data[-CHECK_BYTES:] != _check(staged.id, offset, content):
                raise DamagedPart(staged.id, offset, f"{_part(staged.id, offset)} is not what was written")
            yield content

    def drop(self, damaged: DamagedPart) -> None:
        """Remove an unreadable part: the chain ends before it until it is sent again."""
        self._objects.delete(_part(damaged.number, damaged.offset))

    def finish(self, staged: StagedUpload, done: UploadOutcome) -> UploadOutcome:
        """Record the outcome, then remove the parts; return the record that is valid."""
        try:
            self._put(staged.meta.tenant, f"{ROOT}/{staged.id}/done", json.dumps(asdict(done)).encode())
            self._drop(staged.id)
        except AlreadyExists:
            done = self._done(staged.id)
        for offset, _ in staged.parts:
            self._objects.delete(_part(staged.id, offset))
        self._remove_sources(staged.id, staged.meta)
        return done

    def _remove_sources(self, number: str, meta: Meta) -> None:
        """Remove the partial uploads that a final upload has claimed."""
        for source in meta.sources:
            if self._claimed_by(source, number):
                self.remove(source)

    def remove(self, number: str) -> None:
        """Remove an upload, its meta last, so that a sweep finds an unfinished removal."""
        with suppress(NotFound, Corrupt):  # before its own meta: until then a sweep comes back to it
            self._remove_sources(number, _parse(_META, self._objects.get(f"{ROOT}/{number}/meta"), number))
        names = [name for name, _ in self._objects.names(f"{ROOT}/{number}")]
        for name in sorted(names, key=lambda name: name.endswith("/meta")):
            self._objects.delete(name)
        self._drop(number)

    def sweep(self, hand_over: Callable[[StagedUpload], None]) -> None:
        """Remove what has expired; hand over what is whole and was left by a gateway that died.

        Costs a listing of `uploads/`, and one read for each upload. An error leaves an upload for the next time.
        """
        found: dict[str, set[str]] = {}
        self._begun, self._ended = {}, set()
        for name, _ in self._objects.names(ROOT):
            _, number, rest = (*name.split("/", 2), "", "")[:3]
            if _ID.fullmatch(number) is not None:
                found.setdefault(number, set()).add(rest.partition("/")[0])
        now, ended = time.monotonic(), {number for number, kinds in found.items() if "done" in kinds}
        self._suspects = {number: since for number, since in self._suspects.items() if number in found}
        # A copy: other threads may add to it.
        self._refused = {number: since for number, since in list(self._refused.items()) if number in found}
        still_open: dict[str, Meta] = {}
        for number, kinds in found.items():
            try:
                if "claim" in kinds:
                    self._sweep_claimed(number, found.keys() - ended, now)
                else:
                    meta = self._swept(number, kinds, now, hand_over)
                    if meta is not None:
                        still_open[number] = meta
            except NearkinError as err:
                _log.warning("upload %s: not swept: %s", number, err)
        # A sweep of thousands takes long, and more begin meanwhile.
        held = {number: meta for number, meta in {**self._begun, **still_open}.items() if number not in self._ended}
        self._open.replace({number: meta.holders for number, meta in held.items()})
        self.staged.replace({number: (meta.tenant, meta.length_bytes) for number, meta in held.items()})

    def _sweep_claimed(self, number: str, finals: Set[str], now: float) -> None:
        """Remove a claimed partial upload whose final upload is not in `finals`, the open ones."""
        with suppress(NotFound):  # its final upload was handed over meanwhile
            if self._objects.get(f"{ROOT}/{number}/claim").decode(errors="replace") in finals:
                self._suspects.pop(number, None)
            elif self._suspect(number, now):  # a final upload may be newer than the listing
                self.remove(number)

    def _swept(
        self, number: str, kinds: set[str], now: float, hand_over: Callable[[StagedUpload], None]
    ) -> Meta | None:
        """Return what the upload is to become, None where it is not open."""
        if "meta" not in kinds:
            if self._suspect(number, now):
                self.remove(number)
            return None
        staged = self._load(number)
        if staged.expired:
            _log.log(logging.ERROR if staged.pending else logging.INFO, "upload %s: expired", number)
            self.remove(number)
            return None
        if staged.done is not None:
            if staged.parts:
                self.finish(staged, staged.done)
            return None
        if staged.pending and self._suspect(number, now) and not self._is_postponed(number, now):
            hand_over(staged)
        return staged.meta

    def _is_postponed(self, number: str, now: float) -> bool:
        refused_at = self._refused.get(number)
        return refused_at is not None and now - refused_at < QUOTA_RETRY_SECONDS

    def _suspect(self, number: str, now: float) -> bool:
        return now - self._suspects.setdefault(number, now) >= UNSEEN_SECONDS

    def _load(self, number: str) -> StagedUpload:
        what = f"{ROOT}/{number}/meta"
        meta = _parse(_META, self._objects.get(what), what)
        parts, is_done, claim = [], False, None
        for name, size_bytes in self._objects.names(f"{ROOT}/{number}"):
            _, _, rest = name.split("/", 2)
            part = _PART.fullmatch(rest)
            if part is not None:
                parts.append((int(part[1], 16), size_bytes - CHECK_BYTES))
            is_done |= rest == "done"
            if rest == "claim":
                claim = self._objects.get(name).decode(errors="replace")
        parts.sort()
        chain, end = [], 0
        for offset, part_bytes in parts:
            if offset < end:
                continue  # left over from before a part was sent again with another size
            if offset != end or part_bytes <= 0:
                break
            chain.append((offset, part_bytes))
            end += part_bytes
        if is_done:
            return StagedUpload(number, meta, tuple(parts), self._done(number), claim)
        return StagedUpload(number, meta, tuple(chain), None, claim, self._sources(meta))

    def _sources(self, meta: Meta) -> tuple[StagedUpload, ...]:
        found: list[StagedUpload] = []
        with suppress(NotFound):
            for source in meta.sources:
                found.append(self._load(source))
        return tuple(found)

    def _done(self, number: str) -> UploadOutcome:
        what = f"{ROOT}/{number}/done"
        return _parse(_DONE, self._objects.get(what), what)


_META, _DONE = TypeAdapter(Meta), TypeAdapter(UploadOutcome)


def _parse(kind: TypeAdapter[Parsed], data: bytes, what: str) -> Parsed:
    try:
        return kind.validate_json(data, strict=True)
    except ValidationError as err:
        first = err.errors()[0]
        raise Corrupt(f"{what}: does not parse: {'.'.join(map(str, first['loc']))}: {first['msg']}") from err


def _check(number: str, offset: int, data: bytes | bytearray | memoryview) -> bytes:
    hasher = blake3(f"{number} {offset}".encode(), derive_key_context="nearkin 2026 part of a resumable upload")
    return hasher.update(data).digest(length=CHECK_BYTES)


def _part(number: str, offset: int) -> str:
    return f"{ROOT}/{number}/parts/{offset:016x}"

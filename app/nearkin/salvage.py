"""Read the intact parts of a damaged version; the rest becomes zeros and a list of holes.

segment readable          -> its chunks, verified as in every restore
chunks broken             -> read one by one; broken ones become zeros
lengths of chunks unknown -> chunks before and after them are placed from both ends; the part between is one hole

Only for callers that ask for it: every other read raises at the first damage (I8).

Invariant: a returned byte was verified by its fingerprint, or is in a hole.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import BinaryIO

import numpy as np
from blake3 import blake3

from nearkin_shared.errors import Corrupt, PermanentError
from nearkin_shared.fingerprints import Fingerprinter
from nearkin_shared.formats.manifest import Manifest
from nearkin_shared.reading.chunk_reader import ChunkReader
from nearkin_shared.reading.read_plan import ReadPlan
from nearkin_shared.reading.restore import segment_chunks
from nearkin_shared.results import VersionInfo
from nearkin_shared.storage.containers import ContainerStore, object_name
from nearkin_shared.types import U8, ZERO, ContainerId, Locations, offsets_of
from nearkin_shared.utils.frozen import frozen
from nearkin_shared.validation import Progress, write_pieces

ZEROS = bytes(1024 * 1024)


@frozen
class Hole:
    """A range of a version whose content is lost, and given out as zeros."""

    offset: int
    length_bytes: int
    object_name: str
    """The container that holds the lost chunks, or the manifest."""
    reason: str


@frozen
class _Part:
    """A range of chunks or segments: readable ones by their number, or a gap (None)."""

    number: int | None
    offset: int
    length_bytes: int


def place(lengths: Sequence[int | None], total: int) -> list[_Part]:
    """Return the offsets of parts in `total` bytes; one gap covers all unknown parts."""
    unknown = [number for number, length in enumerate(lengths) if length is None]
    first, last = (unknown[0], unknown[-1]) if unknown else (len(lengths), len(lengths))
    parts: list[_Part] = []
    start, stop = 0, total
    for number in range(first):
        length = min(lengths[number] or 0, total - start)
        parts.append(_Part(number, start, length))
        start += length
    after: list[_Part] = []
    for number in range(len(lengths) - 1, last, -1):
        length = min(lengths[number] or 0, stop - start)
        stop -= length
        after.append(_Part(number, stop, length))
    if stop > start:
        parts.append(_Part(None, start, stop - start))
    return parts + after[::-1]


class SalvagedBlob:
    """A version with holes: iterate it, or `write_to` a file; then `holes` is complete."""

    def __init__(self, manifest: Manifest, source: ContainerStore, fingerprinter: Fingerprinter) -> None:
        self.info: VersionInfo = manifest.info
        self.size_bytes: int = manifest.size_bytes
        self.holes: list[Hole] = []
        self._manifest = manifest
        self._source = source
        self._reader = ChunkReader(source)
        self._fingerprinter = fingerprinter

    @property
    def lost_bytes(self) -> int:
        """Return the bytes in holes."""
        return sum(hole.length_bytes for hole in self.holes)

    def __iter__(self) -> Iterator[memoryview]:
        """Yield verified bytes and zeros, `size_bytes` in all. Raises StoreUnavailable."""
        hasher = blake3()
        self.holes.clear()
        for piece in self._pieces():
            hasher.update(piece)
            yield piece
        if not self.holes and not self._manifest.is_tree and hasher.digest() != self._manifest.blake3:
            reason = "every chunk is sound, but the BLAKE3 of the whole differs: chunks are missing or in disorder"
            self.holes.append(Hole(0, self.size_bytes, self._named(), reason))

    def write_to(self, file: BinaryIO, progress: Progress | None = None) -> int:
        """Write all bytes; return how many. `progress` is called with the bytes of each piece."""
        return write_pieces(self, file, progress)

    def _pieces(self) -> Iterator[memoryview]:
        segments = self._manifest.segments
        known = self._manifest.lengths
        lengths: list[int | None] = [
            self._segment_length(number) if known is None else int(known[number]) for number in range(len(segments))
        ]
        for part in place(lengths, self.size_bytes):
            if part.number is None:
                name = self._named()
                if None in lengths:
                    name = object_name(ContainerId(int(segments.containers[lengths.index(None)])))
                yield from self._lose(part.offset, part.length_bytes, name, "lengths of its segments are unknown")
            else:
                yield from self._segment(part.number, part.offset, part.length_bytes)

    def _segment_length(self, number: int) -> int | None:
        try:
            chunks, _ = segment_chunks(self._one(number), self._source)
            return int(self._reader.plan(chunks).lengths.sum(dtype=np.int64))
        except PermanentError:
            return None

    def _one(self, number: int) -> Locations:
        return self._manifest.segments.take(slice(number, number + 1))

    def _segment(self, number: int, offset: int, length_bytes: int) -> Iterator[memoryview]:
        """Yield a segment's bytes; its whole length is a hole if its recipe cannot be read."""
        name = object_name(ContainerId(int(self._manifest.segments.containers[number])))
        try:
            chunks, _ = segment_chunks(self._one(number), self._source)
        except PermanentError as err:
            if isinstance(err, Corrupt):
                self._source.on_damage(err, Locations.empty(), self._source)
            yield from self._lose(offset, length_bytes, name, str(err))
            return
        whole = self._read_intact(chunks, length_bytes)
        if whole is not None:
            yield whole
            return
        self._source.on_damage(Corrupt(f"{self._named()}: a segment in {name} is damaged"), chunks, self._source)
        plans, problems = self._plan_each(chunks)
        lengths = [None if plan is None else int(plan.lengths[0]) for plan in plans]
        for part in place(lengths, length_bytes):
            at = offset + part.offset
            if part.number is None:
                lost = next((row for row, plan in enumerate(plans) if plan is None), 0)
                container = object_name(ContainerId(int(chunks.containers[lost]))) if len(chunks) else name
                reason = problems.get(lost, "the recipe is shorter than the segment")
                yield from self._lose(at, part.length_bytes, container, reason)
            else:
                yield from self._chunk(plans[part.number], at, part.length_bytes)

    def _read_intact(self, chunks: Locations, length_bytes: int) -> memoryview | None:
        """Return the bytes of a segment with intact chunks, which most are; None for another."""
        try:
            plan = self._reader.plan(chunks)
            if int(plan.lengths.sum(dtype=np.int64)) != length_bytes:
                return None
            payload: U8 = self._reader.fetch(plan)
        except PermanentError:
            return None
        return payload.data if self._is_sound(plan, payload) else None

    def _is_sound(self, plan: ReadPlan, payload: U8) -> bool:
        stored = np.flatnonzero(plan.locations.containers != np.uint64(ZERO))
        found = self._fingerprinter.name_chunks(payload, offsets_of(plan.lengths)[stored], plan.lengths[stored])
        return bool(np.all(found == plan.names[stored]))

    def _plan_each(self, chunks: Locations) -> tuple[list[ReadPlan | None], dict[int, str]]:
        """Return the plan of each chunk, None for an unreadable directory, and problems by row."""
        plans: list[ReadPlan | None] = [None] * len(chunks)
        problems: dict[int, str] = {}
        waiting = [(0, len(chunks))] if len(chunks) else []
        while waiting:
            first, last = waiting.pop()
            try:
                plan = self._reader.plan(chunks.take(slice(first, last)))
            except PermanentError as err:
                if last - first == 1:
                    problems[first] = str(err)
                    continue
                middle = (first + last) // 2
                waiting += [(first, middle), (middle, last)]
                continue
            for row in range(first, last):
                plans[row] = plan.take(slice(row - first, row - first + 1))
        return plans, problems

    def _chunk(self, plan: ReadPlan | None, offset: int, length_bytes: int) -> Iterator[memoryview]:
        """Yield the bytes of a chunk that matches its fingerprint, else zeros."""
        assert plan is not None  # `place` numbers only what has a length
        name = object_name(ContainerId(int(plan.locations.containers[0])))
        try:
            payload: U8 = self._reader.fetch(plan)
        except PermanentError as err:
            yield from self._lose(offset, length_bytes, name, str(err))
            return
        if not self._is_sound(plan, payload):
            yield from self._lose(offset, length_bytes, name, f"{name}: a chunk does not match its fingerprint")
            return
        yield payload.data[:length_bytes]

    def _lose(self, offset: int, length_bytes: int, name: str, reason: str) -> Iterator[memoryview]:
        """Note a hole, joined with the one before if that has the same cause, and yield its zeros."""
        last = self.holes[-1] if self.holes else None
        same = last is not None and (last.object_name, last.reason) == (name, reason)
        if last is not None and same and last.offset + last.length_bytes == offset:
            self.holes[-1] = Hole(last.offset, last.length_bytes + length_bytes, name, reason)
        else:
            self.holes.append(Hole(offset, length_bytes, name, reason))
        for start in range(0, length_bytes, len(ZEROS)):
            yield memoryview(ZEROS)[: min(len(ZEROS), length_bytes - start)]

    def _named(self) -> str:
        return f"{self.info.key!r} version {self.info.version}"

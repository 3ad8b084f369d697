r"""Encode and decode a body of parts: new bytes, and ranges of an earlier version.

    | NKPART\r\n | version 2 | flags 2 | records ... | end |

    1 | length 4 | bytes         new bytes
    2 | start 8 | stop 8         the bytes [start, stop) of the sources: the base, then the checkpoints, end to end
    3 | length 4 | bytes         nothing: sent so that a client without new bytes is not taken for a dead one
    0 | size 8 | digest 32 | BLAKE3 of all bytes of the body before it 32

A range is of one source. The ranges of each source ascend, so that no byte of it is copied twice
(docs/internals/formats/upload-parts.md).

Invariant (I8): a body that is cut, damaged or of another size than its end states is refused as a whole.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from struct import Struct
from typing import NamedTuple, TypeAlias

from blake3 import blake3

from nearkin_shared.errors import BadInput
from nearkin_shared.limits import KIB

PARTS_MEDIA_TYPE = "application/vnd.nearkin.parts"
BASE_HEADER = "Nearkin-Base"
CHECKPOINTS_HEADER = "Nearkin-Checkpoints"
CHECKPOINTS_MAX = 1000
"""Checkpoints of one body: 8 TB at the distance that they have at most."""
VERSION = 1
RECORDS_MAX = 1 << 20
"""Records of one body: 16 MB of ranges in memory; half a million changed files between unchanged ones."""
DATA_BYTES_MAX = 1 << 24
"""Of a record. The bytes are passed on as they arrive."""
IDLE_BYTES_MAX = 64 * KIB
"""Of a record without content."""
END, DATA, COPY, IDLE = range(4)
_RUN = re.compile("([1-9][0-9]{0,18})(?:-([1-9][0-9]{0,18}))?", re.ASCII)
_MAGIC = b"NKPART\r\n"
_HEAD = Struct("<8sHH")
_DATA = Struct("<BI")
_COPY = Struct("<BQQ")
_END = Struct("<BQ32s")
assert (_HEAD.size, _DATA.size, _COPY.size, _END.size) == (12, 5, 17, 41)  # docs/internals/formats/upload-parts.md
_DIGEST_BYTES = 32
_SIZES = {END: _END.size + _DIGEST_BYTES, DATA: _DATA.size, COPY: _COPY.size, IDLE: _DATA.size}
"""Of the fields of each kind of record."""


def format_versions(versions: Sequence[int]) -> str:
    """Return ascending version numbers as text: `1-3,7`."""
    runs: list[list[int]] = []
    for version in versions:
        if runs and runs[-1][1] == version - 1:
            runs[-1][1] = version
        else:
            runs.append([version, version])
    return ",".join(f"{first}" if first == last else f"{first}-{last}" for first, last in runs)


def parse_versions(text: str) -> list[int]:
    """Return the version numbers of `format_versions`. Raises BadInput."""
    versions: list[int] = []
    for run in text.split(","):
        match = _RUN.fullmatch(run.strip())
        first = int(match[1]) if match is not None else 0
        last = first if match is None or match[2] is None else int(match[2])
        if not (versions[-1] if versions else 0) < first <= last or last - first >= CHECKPOINTS_MAX - len(versions):
            raise BadInput(
                f"{CHECKPOINTS_HEADER} {text:.100}: want at most {CHECKPOINTS_MAX} version numbers, ascending: 1-3,7"
            )
        versions += range(first, last + 1)
    return versions


class CopiedRange(NamedTuple):
    """The bytes [start, stop) of the sources, which are end to end."""

    start: int
    stop: int


Part: TypeAlias = memoryview | CopiedRange
"""New bytes, or a range of a source."""


class PartsEncoder:
    """Writes a body of parts."""

    def __init__(self, write: Callable[[bytes | memoryview], object]) -> None:
        self._write = write
        self._hasher = blake3()
        self.records: int = 0
        self._put(_HEAD.pack(_MAGIC, VERSION, 0))

    def add_data(self, data: bytes | memoryview) -> None:
        """Append 1 to DATA_BYTES_MAX new bytes."""
        self._count_record(_DATA.pack(DATA, len(data)))
        self._put(data)

    def add_copy(self, start: int, stop: int) -> None:
        """Append the bytes [start, stop) of the sources."""
        self._count_record(_COPY.pack(COPY, start, stop))

    def add_idle(self, count: int) -> None:
        """Append `count` bytes that stand for nothing."""
        self._count_record(_DATA.pack(IDLE, count))
        self._put(bytes(count))

    def end(self, size_bytes: int, digest: bytes) -> None:
        """End the body. `size_bytes`, `digest`: of the result."""
        self._put(_END.pack(END, size_bytes, digest))
        self._write(self._hasher.digest())

    def _count_record(self, head: bytes) -> None:
        self.records += 1
        self._put(head)

    def _put(self, data: bytes | memoryview) -> None:
        self._hasher.update(data)
        self._write(data)


class PartsDecoder:
    """Decodes a body of parts as it arrives."""

    def __init__(self, source_bytes: Sequence[int], size_bytes_max: int) -> None:
        """`source_bytes`: of each source. `size_bytes_max`: of the result."""
        self._starts = [0, *accumulate(source_bytes)]
        self._stops = self._starts[:-1]
        """Of the last range of each source."""
        self._size_bytes_max = size_bytes_max
        self._hasher = blake3()
        self._head = bytearray()
        """The start of a record whose fields have not all arrived."""
        self._has_begun = False
        self._left = 0
        """Bytes of the record in progress that have not arrived."""
        self._is_idle = False
        self.records: int = 0
        self.size_bytes: int = 0
        """Of the result so far."""
        self.digest: bytes | None = None
        """Of the result, as the end states it; None before the end."""

    def feed(self, piece: bytes | memoryview) -> Iterator[Part]:
        """Yield what the next bytes of the body stand for. Raises BadInput."""
        left = memoryview(piece)
        while left:
            if self.digest is not None:
                raise BadInput(f"body of parts: {len(left)} bytes behind its end; send nothing after record 0")
            if self._left:
                taken = left[: self._left]
                self._hasher.update(taken)
                self._left -= len(taken)
                left = left[len(taken) :]
                if not self._is_idle:
                    yield taken
                continue
            wanted = self._head_bytes(left) - len(self._head)
            self._head += left[:wanted]
            is_whole = len(left) >= wanted
            left = left[wanted:]
            if is_whole:
                copied = self._take_head()
                if copied is not None:
                    yield copied

    def finish(self) -> None:
        """Check that the body is complete. Raises BadInput."""
        if self.digest is None:
            raise BadInput(
                f"body of parts: ends within record {self.records + 1}, without an end (record 0); send all of it"
            )

    def _head_bytes(self, left: memoryview) -> int:
        """Return the size of the fields of the record that begins."""
        if not self._has_begun:
            return _HEAD.size
        kind = self._head[0] if self._head else left[0]
        if kind not in _SIZES:
            raise BadInput(f"body of parts: record {self.records + 1} has kind {kind}; want one of {sorted(_SIZES)}")
        return _SIZES[kind]

    def _take_head(self) -> CopiedRange | None:
        """Begin the record whose fields are complete. Raises BadInput."""
        head, self._head = bytes(self._head), bytearray()
        if not self._has_begun:
            self._take_magic(head)
        elif head[0] == END:
            self._take_end(head)
            return None
        else:
            self.records += 1
            if self.records > RECORDS_MAX:
                raise BadInput(
                    f"body of parts: more than {RECORDS_MAX} records; join neighbouring ranges, or send bytes"
                )
        self._hasher.update(head)
        if not self._has_begun:
            self._has_begun = True
            return None
        if head[0] == COPY:
            return self._take_copy(head)
        self._take_length(head)
        return None

    def _take_magic(self, head: bytes) -> None:
        magic, version, flags = _HEAD.unpack(head)
        if magic != _MAGIC:
            raise BadInput(f"body of parts: begins with {magic!r}, want {_MAGIC!r}; send {PARTS_MEDIA_TYPE}")
        if version != VERSION or flags:
            raise BadInput(f"body of parts: version {version}, flags {flags}; want {VERSION} and 0: upgrade the server")

    def _take_length(self, head: bytes) -> None:
        kind, length = _DATA.unpack(head)
        most = IDLE_BYTES_MAX if kind == IDLE else DATA_BYTES_MAX
        if not 1 <= length <= most:
            raise BadInput(f"body of parts: record {self.records} has length {length}; want 1 to {most}")
        self._left, self._is_idle = length, kind == IDLE
        if kind == DATA:
            self._grow(length)

    def _take_copy(self, head: bytes) -> CopiedRange:
        _, start, stop = _COPY.unpack(head)
        number = min(bisect_right(self._starts, start), len(self._stops)) - 1
        first, end = (0, 0) if number < 0 else (self._stops[number], self._starts[number + 1])
        if not first <= start < stop <= end:
            raise BadInput(
                f"body of parts: record {self.records} copies bytes {start} to {stop}; want a range that is not empty "
                f"within {first} to {end}: ranges ascend, up to the end of their base or checkpoint"
            )
        self._stops[number] = stop
        self._grow(stop - start)
        return CopiedRange(start, stop)

    def _take_end(self, head: bytes) -> None:
        _, size_bytes, digest = _END.unpack_from(head)
        self._hasher.update(head[: _END.size])
        body_digest = head[_END.size :]
        if size_bytes != self.size_bytes:
            raise BadInput(f"body of parts: size {size_bytes} at its end, its records make {self.size_bytes} bytes")
        if body_digest != self._hasher.digest():
            raise BadInput(
                f"body of parts: BLAKE3 {body_digest.hex()} at its end, {self._hasher.hexdigest()} was received; "
                "send it again"
            )
        self.digest = digest

    def _grow(self, count: int) -> None:
        self.size_bytes += count
        if self.size_bytes > self._size_bytes_max:
            raise BadInput(
                f"body of parts: record {self.records} makes {self.size_bytes} bytes, the result may have "
                f"{self._size_bytes_max}; use several keys, or raise gateway.body_bytes_max"
            )

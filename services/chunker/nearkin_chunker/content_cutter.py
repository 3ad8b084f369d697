"""Cut items by the kind of their content.

An item is a blob, or a file between two forced cuts. It is a sequence of regions, each of one kind:

    tar          | headers and small members | member | headers ... | member |   a region each; a member is an item
    safetensors  | header | tensor | tensor | ...
    database     | pages, as many as its header states | the rest: other
    media        | dense: large chunks | not dense: like other, for PLAIN_BYTES at least | dense ...

Invariant: chunks and their kinds depend on the bytes of the item alone, in whatever pieces they arrive. No more than
HEADER_WAIT_BYTES_MAX of an item, or one chunk, wait uncut for later bytes.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import replace

import numpy as np

from nearkin_chunker.chunking_algorithms import Cut
from nearkin_chunker.content_sniffer import HEAD_BYTES, find_kind, is_dense, needed_bytes, postgres_pages
from nearkin_chunker.cut_state import START, CutState
from nearkin_chunker.tar_headers import BLOCK_BYTES, MEMBER_BYTES_MIN, content_bytes, padding_bytes
from nearkin_shared.config.reduction import KINDS, OTHER
from nearkin_shared.kernels import chunking
from nearkin_shared.limits import KIB, MIB, SEGMENT_BYTES_MAX
from nearkin_shared.types import U8, U32
from nearkin_shared.utils.frozen import frozen

LARGE_BYTES = 128 * KIB, 256 * KIB, SEGMENT_BYTES_MAX
"""Bounds of large chunks. They end by content: an edited tag at the front of a film moves no later chunk."""
PLAIN_BYTES = 1 * MIB
"""Content that is not dense, in an item for large chunks, is checked again after so many bytes."""
LARGE_KINDS = frozenset({"media", "compressed", "encrypted"})
_MEMBER_KINDS = frozenset({*LARGE_KINDS, "database"})
"""Kinds of a tar member: those whose state needs no list of borders."""
_NO_LENGTHS = np.zeros(0, np.uint32)


@frozen
class _Region:
    """A stretch of one kind; offsets are of the payload. The fields are those of CutState."""

    kind: str | None = None
    page_bytes: int = 0
    end: int | None = None
    plain_until: int = 0
    header: int | None = None
    borders: tuple[int, ...] = ()


class ContentCutter:
    """Cuts the items of one growing payload, one after another."""

    def __init__(self, rules: frozenset[str], plain: Cut, offset: int, state: CutState | None) -> None:
        """Begin at `offset` of the payload, in `state` or at the start of an item."""
        self._rules = rules
        self._plain = plain
        self._offset = offset
        self._region = _region_of(state or START, offset)
        self._marks = [(offset, self._region)]
        """(offset, region that applies from there on), in payload order."""
        self._headers: list[int] = []
        """Offsets of the tar headers that were walked over."""

    def cut(self, data: U8, final: bool) -> tuple[U32, U8]:
        """Return the lengths and kinds of the chunks that are certain at the start of `data`.

        `data` starts where the last call's chunks ended; `final`: the item ends with it.
        """
        lengths, kinds, base = [_NO_LENGTHS], [np.zeros(0, np.uint8)], self._offset
        while len(rest := data[self._offset - base :]):
            if self._offset == self._region.end:
                self._enter(self._following())
            elif 0 < self._region.plain_until <= self._offset:
                large = self._region.kind in LARGE_KINDS
                self._enter(replace(self._region, plain_until=0) if large else _Region(OTHER))
            elif self._region.kind is None:
                if not self._decide(rest, final):
                    break
            else:
                before = self._region
                cut, kind = self._cut_region(rest, final)
                if len(cut):
                    lengths.append(cut)
                    kinds.append(np.full(len(cut), KINDS.index(kind), np.uint8))
                    self._offset += int(cut.sum(dtype=np.int64))
                elif self._region is before:
                    break
        return np.concatenate(lengths), np.concatenate(kinds)

    def end_item(self) -> None:
        """End the item, all of whose bytes are cut; the next one starts here."""
        self._enter(_Region())

    def skip_to(self, offset: int) -> None:
        """Pass over chunks that were cut before; the next item starts at `offset`."""
        self._offset = offset
        self._enter(_Region())

    def state_at(self, offset: int) -> CutState:
        """Return the state at a chunk's start that this cutter has passed."""
        region = self._marks[bisect_right(self._marks, offset, key=lambda mark: mark[0]) - 1][1]
        header = region.header
        if header is not None and region.end is None:  # more headers of the region may have been walked over
            at = bisect_left(self._headers, offset)
            header = self._headers[at] if at < len(self._headers) else self._region.header
            assert header is not None
        return CutState(
            region.kind,
            region.page_bytes,
            None if region.end is None else region.end - offset,
            max(0, region.plain_until - offset),
            None if header is None else header - (offset if region.end is None else region.end),
            region.borders,
        )

    def _enter(self, region: _Region) -> None:
        self._region = region
        if self._marks[-1][0] == self._offset:
            self._marks.pop()
        self._marks.append((self._offset, region))

    def _following(self) -> _Region:
        """Return the region behind one whose end is reached."""
        region, offset = self._region, self._offset
        if region.header is not None and region.borders:
            size = region.borders[0]
            return _Region(end=offset + size, header=offset + size + padding_bytes(size))
        if region.header is not None:
            return _Region("tar", header=region.header)
        if region.borders:
            return _Region(region.kind, end=offset + region.borders[0], borders=region.borders[1:])
        return _Region(OTHER)

    def _decide(self, rest: U8, final: bool) -> bool:
        """Find the kind of the item that starts here; return False if that takes more bytes."""
        region, offset = self._region, self._offset
        rest, final = self._clip(rest, final)
        if len(rest) < needed_bytes(rest) and not final:
            return False
        is_member = region.header is not None
        found = find_kind(rest, self._rules & _MEMBER_KINDS if is_member else self._rules)
        end = region.end
        if found.size_bytes is not None and end is None:
            end = offset + found.size_bytes
        if found.borders:
            end = offset + found.borders[0]
        header = offset if found.kind == "tar" else region.header
        self._enter(_Region(found.kind, found.page_bytes, end, header=header, borders=found.borders[1:]))
        return True

    def _clip(self, rest: U8, final: bool) -> tuple[U8, bool]:
        """Return the bytes of the region, and whether it ends with them."""
        end = self._region.end
        if end is None or end - self._offset > len(rest):
            return rest, final
        return rest[: end - self._offset], True

    def _cut_region(self, rest: U8, final: bool) -> tuple[U32, str]:
        """Return certain chunks of one kind at the region's start; none if the region has changed."""
        region = self._region
        rest, final = self._clip(rest, final)
        kind = region.kind or OTHER
        if region.plain_until:
            return self._cut_stretch(rest, final), OTHER if kind in LARGE_KINDS else kind
        if kind == "tar" and region.end is None:
            return self._cut_headers(rest, final), kind
        if kind == "database":
            return self._cut_pages(rest, final), kind
        if kind in LARGE_KINDS:
            return self._cut_dense(rest, final), kind
        if kind == "safetensors":
            return chunking.leastcdc_cut(rest, *LARGE_BYTES, final=final), kind
        return self._plain(rest, final), kind

    def _cut_stretch(self, rest: U8, final: bool) -> U32:
        """Cut a stretch like other content, up to the first chunk that reaches its end."""
        lengths = self._plain(rest, final)
        reached = self._offset + np.cumsum(lengths, dtype=np.int64)
        count = int(np.searchsorted(reached, self._region.plain_until)) + 1
        return lengths[:count]

    def _cut_dense(self, rest: U8, final: bool) -> U32:
        """Cut large chunks, each of which starts densely; begin a plain stretch where none does."""
        if len(rest) < HEAD_BYTES and not final:
            return _NO_LENGTHS
        if not is_dense(rest):
            self._enter(replace(self._region, plain_until=self._offset + PLAIN_BYTES))
            return _NO_LENGTHS
        lengths = chunking.leastcdc_cut(rest, *LARGE_BYTES, final=final)
        start = 0
        for count, length in enumerate(lengths.tolist()):
            unknown = len(rest) - start < HEAD_BYTES and not final
            if count and (unknown or not is_dense(rest[start:])):
                return lengths[:count]
            start += length
        return lengths

    def _cut_pages(self, rest: U8, final: bool) -> U32:
        """Cut a database at its pages; without a stated size up to the first invalid page."""
        page_bytes = self._region.page_bytes
        if self._region.end is not None:
            return chunking.fixed_cut(rest, page_bytes, final=final)
        pages = postgres_pages(rest)
        if not pages and (final or len(rest) >= page_bytes):
            self._enter(_Region(OTHER))
        return np.full(pages, page_bytes, np.uint32)

    def _cut_headers(self, rest: U8, final: bool) -> U32:
        """Cut headers and small members, up to the content of the next large one."""
        offset, header = self._offset, self._region.header
        assert header is not None
        while header + BLOCK_BYTES <= offset + len(rest):
            at = header - offset
            size = content_bytes(rest[at : at + BLOCK_BYTES].tobytes())
            self._headers.append(header)
            if size is None:  # the end of the archive
                self._enter(_Region("tar", plain_until=header + BLOCK_BYTES))
                return _NO_LENGTHS
            if size >= MEMBER_BYTES_MIN:
                end = header + BLOCK_BYTES
                self._enter(_Region("tar", end=end, header=end, borders=(size,)))
                return _NO_LENGTHS
            header += BLOCK_BYTES + size + padding_bytes(size)
        if header != self._region.header:
            self._region = replace(self._region, header=header)
        return self._plain(rest if final else rest[: header - offset], final)


def _region_of(state: CutState, offset: int) -> _Region:
    """Return the region that a state describes, at `offset` of a payload."""
    end = None if state.left is None else offset + state.left
    header = None if state.header_left is None else (offset if end is None else end) + state.header_left
    return _Region(
        state.kind, state.page_bytes, end, offset + state.plain_left if state.plain_left else 0, header, state.borders
    )

"""Count chunks and bytes of stored versions by the kind of their content.

The content is read and its kinds are found as `chunker.rules` finds them, whatever rules it was cut by: the counts of a
store without rules show what rules would apply to.

Invariant: every chunk counts once, as the kind of its first byte.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import numpy as np

from nearkin.trees.tree_writer import FileBorders
from nearkin_chunker.chunking_algorithms import chunker
from nearkin_chunker.content_cutter import ContentCutter
from nearkin_shared.config.reduction import KINDS, RULED_KINDS
from nearkin_shared.limits import SEGMENT_BYTES_MAX
from nearkin_shared.utils.frozen import frozen

if TYPE_CHECKING:
    from nearkin.store import Store
    from nearkin_shared.config.reduction import ChunkerSettings
    from nearkin_shared.reading.tree_reader import TreeReader
    from nearkin_shared.results import Explanation


@frozen
class KindCount:
    """Chunks of one kind."""

    logical_bytes: int = 0
    chunks: int = 0
    stored_estimate_bytes: int = 0
    """Shares of blocks that these versions were the first to need; duplicates count 0.

    A block that several kinds share is divided by length, however well each compresses.
    """

    def __add__(self, other: KindCount) -> KindCount:
        """Return the sum of two counts."""
        return KindCount(
            self.logical_bytes + other.logical_bytes,
            self.chunks + other.chunks,
            self.stored_estimate_bytes + other.stored_estimate_bytes,
        )


def count_kinds(store: Store, key: str, version: int | None = None) -> dict[str, KindCount]:
    """Read a version and count its chunks by kind, in the order of KINDS.

    Raises as `Store.get` and `Store.explain` do.
    """
    explanation = store.explain(key, version)
    info = explanation.info
    tree = store.tree(key, info.version) if info.is_tree else None
    borders = iter(()) if tree is None else _borders(tree)
    spans = _find_spans(store.get(key, info.version).pieces(), borders, store.settings.chunker)
    return _count(explanation, spans)


def sum_kinds(store: Store) -> dict[str, KindCount]:
    """Read all versions of a store and count their chunks by kind.

    Raises as `count_kinds` does.
    """
    found: dict[str, KindCount] = {}
    for info in store.versions(all_versions=True):
        for kind, count in count_kinds(store, info.key, info.version).items():
            found[kind] = found.get(kind, KindCount()) + count
    return {kind: found[kind] for kind in KINDS if kind in found}


class _BorderRecorder:
    """Receives the ends of chunks that a tree writer would force."""

    def __init__(self) -> None:
        self.position = 0
        self.ends: list[int] = []

    def end_chunk(self, *, ends_segment: bool = False) -> None:
        """Record an end here."""
        if self.position and (not self.ends or self.ends[-1] != self.position):
            self.ends.append(self.position)


def _borders(tree: TreeReader) -> Iterator[int]:
    """Yield the offsets at which chunks of a tree end because files do."""
    recorder = _BorderRecorder()
    borders = FileBorders(recorder)
    for placed in tree.entries():
        if placed.entry.content_bytes:
            recorder.position = placed.start
            borders.begin(placed.entry.content_bytes)
            recorder.position = placed.stop
            borders.end(placed.entry.content_bytes)
            yield from recorder.ends[:-1]
            del recorder.ends[:-1]
    yield from recorder.ends
    yield from (bound for bound in tree.group_bounds() if bound > recorder.position)


def _find_spans(
    pieces: Iterable[bytes | memoryview], borders: Iterator[int], settings: ChunkerSettings
) -> Iterator[tuple[int, str]]:
    """Yield (bytes, kind) of consecutive spans of a content."""
    plain = chunker(settings, SEGMENT_BYTES_MAX)
    cutter = ContentCutter(frozenset(RULED_KINDS), plain, 0, None)
    rest, offset, border = b"", 0, next(borders, None)

    def spans(is_last: bool) -> Iterator[tuple[int, str]]:
        nonlocal rest, offset, border, cutter
        while True:
            ends = border is not None and border - offset <= len(rest)
            stop = border - offset if ends and border is not None else len(rest)
            lengths, kinds = cutter.cut(np.frombuffer(rest[:stop], np.uint8), ends or is_last)
            yield from zip(lengths.tolist(), [KINDS[kind] for kind in kinds.tolist()], strict=True)
            cut_bytes = int(lengths.sum(dtype=np.int64))
            rest, offset = rest[cut_bytes:], offset + cut_bytes
            if not ends:
                break
            cutter.end_item()
            border = next(borders, None)
        cutter = ContentCutter(frozenset(RULED_KINDS), plain, offset, cutter.state_at(offset))

    for piece in pieces:
        rest += bytes(piece)
        yield from spans(is_last=False)
    yield from spans(is_last=True)


def _count(explanation: Explanation, spans: Iterator[tuple[int, str]]) -> dict[str, KindCount]:
    found: dict[str, KindCount] = {}
    stop, kind = 0, KINDS[0]
    for segment in explanation.segments:
        for chunk in segment.chunks:
            while chunk.offset >= stop:
                length, kind = next(spans)
                stop += length
            one = KindCount(chunk.length_bytes, 1, chunk.stored_estimate_bytes)
            found[kind] = found.get(kind, KindCount()) + one
    return {kind: found[kind] for kind in KINDS if kind in found}

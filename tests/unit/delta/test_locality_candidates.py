"""Test locality candidates.

Each span gets its bases, shallower ones included, before the next one is read.
"""

from __future__ import annotations

import numpy as np
import pytest

from nearkin.lab.generated_data import random_bytes
from nearkin_delta import locality_candidates
from nearkin_delta.base_choice import Targets
from nearkin_delta.locality_candidates import SPANS_MAX, LocalityCandidates
from nearkin_shared.pipeline.stage import Contents, LookupRequest, LookupResults, Neighbours
from nearkin_shared.types import Locations, Pieces, bounds_of, offsets_of

CHUNK_BYTES = 8192
MAX_DEPTH = 4
NEIGHBOURS = 7
"""The container of the neighbours of each chunk; their bases are in OLDER."""
OLDER = 8


def chunk(seed: int, share: float = 0.0) -> bytes:
    """Return noise, of which `share` is replaced by other noise."""
    changed = int(CHUNK_BYTES * share)
    return random_bytes(changed, 1000 + seed) + random_bytes(CHUNK_BYTES, seed)[changed:]


class History:
    """Gaps of one chunk each with one old neighbour.

    Those of `crowded` differ too much from their chunk.
    """

    def __init__(self, count: int, overdeep: set[int], empty: frozenset[int] = frozenset()) -> None:
        self.count, self._crowded = count, overdeep
        lengths = np.full(count, CHUNK_BYTES, np.uint32)
        payload = np.frombuffer(b"".join(map(chunk, range(count))), np.uint8)
        self.targets = Targets(payload, offsets_of(lengths), lengths)
        with_neighbours = np.array([number for number in range(count) if number not in empty], np.uint32)
        sizes = np.isin(np.arange(count), with_neighbours).astype(np.int64)
        chunks = Locations(np.full(len(with_neighbours), NEIGHBOURS, np.uint64), with_neighbours)
        self.neighbours = Neighbours(np.ones(count, np.uint32), bounds_of(sizes), chunks, Locations.empty(count))

    def _contents(self, served: Locations, depth: int) -> Contents:
        shares = [0.12 if number in self._crowded else 0.02 for number in served.ordinals.tolist()]
        found = [chunk(number, share) for number, share in zip(served.ordinals.tolist(), shares, strict=True)]
        lengths = np.full(len(found), CHUNK_BYTES, np.uint32)
        pieces = Pieces.of(np.frombuffer(b"".join(found), np.uint8), offsets_of(lengths), lengths)
        return Contents(served, pieces, np.full(len(found), depth, np.uint8), np.ones(len(found), np.bool_))

    def run(self) -> tuple[LocalityCandidates, list[tuple[str, list[int]]]]:
        """Serve lookups until none is left.

        Return the candidates and each lookup's kind and chunks.
        """
        found, facts, served = (
            LocalityCandidates(self.targets, self.neighbours, MAX_DEPTH, no_deltas=True),
            LookupResults(),
            [],
        )
        while (reads := found.reads(facts)) is not None:
            served.append(self._question(reads))
            if reads.contents is not None:
                facts = LookupResults(contents=self._contents(reads.contents, MAX_DEPTH - 1), lower=facts.lower)
            else:
                assert reads.lower is not None
                assert reads.depth_below is not None
                above = Locations(np.full(len(reads.lower), OLDER, np.uint64), reads.lower.ordinals)
                facts = LookupResults(contents=facts.contents, lower=self._contents(above, reads.depth_below - 1))
        return found, served

    @staticmethod
    def _question(reads: LookupRequest) -> tuple[str, list[int]]:
        assert reads.no_deltas
        kind, served = ("contents", reads.contents) if reads.contents is not None else ("lower", reads.lower)
        assert served is not None
        return kind, served.ordinals.tolist()


def test_span_ascends_all_levels_before_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locality_candidates, "SPAN_BYTES", 2 * CHUNK_BYTES)
    found, served = History(6, overdeep={1, 4, 5}).run()
    assert served == [
        ("contents", [0, 1]),
        ("lower", [1]),
        ("contents", [2, 3]),
        ("contents", [4, 5]),
        ("lower", [4, 5]),
    ]
    assert found.found.all()
    chosen = {int(c) for part in found.parts for c in part.chunks[part.chosen.found]}
    assert chosen == set(range(6))
    moved = [part for part in found.parts if (part.bases.locations.containers == OLDER).all() and len(part.chunks)]
    assert sorted(int(c) for part in moved for c in part.chunks[part.chosen.found]) == [1, 4, 5]


def test_span_without_old_neighbours_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locality_candidates, "SPAN_BYTES", 2 * CHUNK_BYTES)
    found, served = History(6, overdeep=set(), empty=frozenset({2, 3, 5})).run()
    assert served == [("contents", [0, 1]), ("contents", [4])]
    assert found.found.tolist() == [True, True, False, False, True, False]
    nothing, served = History(3, overdeep=set(), empty=frozenset(range(3))).run()
    assert served == []
    assert not nothing.found.any()
    none, served = History(0, overdeep=set()).run()
    assert (served, none.parts) == ([], [])


def test_large_batch_has_bounded_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locality_candidates, "SPAN_BYTES", CHUNK_BYTES)
    found, served = History(50, overdeep=set()).run()
    assert len(served) == SPANS_MAX
    assert sorted(number for _, numbers in served for number in numbers) == list(range(50))
    assert found.found.all()


def test_many_spans_choose_the_bases_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, served = History(12, overdeep={0, 3, 9}).run()
    assert len(served) == 2
    monkeypatch.setattr(locality_candidates, "SPAN_BYTES", 3 * CHUNK_BYTES)
    parts, served = History(12, overdeep={0, 3, 9}).run()
    assert len(served) == 4 + 3
    assert bases(parts) == bases(whole)


def bases(found: LocalityCandidates) -> dict[int, list[tuple[int, int]]]:
    """Return the location of the bases of each chunk."""
    lie = {}
    for part in found.parts:
        chosen = part.chosen
        for row, of in enumerate(part.chunks.tolist()):
            rows = chosen.rows[chosen.bounds[row] : chosen.bounds[row + 1]]
            where = part.bases.locations.take(rows)
            if chosen.found[row]:
                lie[of] = list(zip(where.containers.tolist(), where.ordinals.tolist(), strict=True))
    return lie

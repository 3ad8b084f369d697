"""Test depth as a budget.

A chunk at the end of a full chain gets a shallower base before its base is outdated.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nearkin import open_store
from nearkin.lab.generated_data import mutate, random_bytes
from nearkin_delta import base_search, depth_limit, locality_candidates
from nearkin_delta.base_choice import PolicyChoice, Targets, join_choices, try_bases
from nearkin_delta.depth_limit import FULL_REST, GROWTH, find_overdeep, reduce_depth
from nearkin_shared.pipeline.stage import LOOKUP_PASSES_MAX, Contents, LookupRequest, LookupResults
from nearkin_shared.types import Locations, Pieces
from tests.support.data.stores import settings

MAX_DEPTH = 4
RECORDS, RECORD_BYTES = 1500, 300


def changed(content: bytes, share: float) -> bytes:
    """Return `content` with its first bytes replaced by noise: about this share differs."""
    return random_bytes(int(len(content) * share), 99) + content[int(len(content) * share) :]


def concatenated(chunks: list[bytes]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    lengths = np.array([len(chunk) for chunk in chunks], np.uint32)
    return np.frombuffer(b"".join(chunks), np.uint8), (np.cumsum(lengths) - lengths).astype(np.uint64), lengths


def contents(chunks: list[bytes], depths: list[int], first: int = 0) -> Contents:
    payload, offsets, lengths = concatenated(chunks)
    where = Locations(np.full(len(chunks), 7, np.uint64), np.arange(first, first + len(chunks), dtype=np.uint32))
    pieces = Pieces.of(payload, offsets, lengths)
    return Contents(where, pieces, np.array(depths, np.uint8), np.ones(len(chunks), np.bool_))


def tried(targets: Targets, bases: Contents) -> PolicyChoice:
    each = np.arange(len(targets) + 1, dtype=np.uint32)
    return PolicyChoice(
        np.arange(len(targets)), try_bases(targets, each, bases, each), bases, np.full(len(targets), 9, np.uint8)
    )


TARGET = random_bytes(8192, 1)
NEAR, FAR, OLD, OLDEST = (changed(TARGET, share) for share in (0.02, 0.12, 0.2, 0.9))


def test_rest_are_of_full_chains_and_differ_much() -> None:
    targets = Targets(*concatenated([TARGET] * 4))
    part = tried(targets, contents([NEAR, FAR, FAR, OLDEST], [3, 3, 2, 3]))
    assert part.chosen.found.tolist() == [True, True, True, False]
    rest = find_overdeep([part], MAX_DEPTH)
    assert rest is not None
    assert rest.chunks.tolist() == [1]
    assert (rest.asked.ordinals.tolist(), rest.depth_below, rest.ranks.tolist()) == (
        [1],
        3,
        [9],
    )
    assert find_overdeep([part], MAX_DEPTH + 1) is None, "a chain that is not full has no overdeep chunk"
    assert find_overdeep([tried(targets, contents([FAR] * 4, [0] * 4))], 1) is None, "depth 0 cannot be reduced"
    assert find_overdeep([], MAX_DEPTH) is None


def test_reduce_depth_ascends_until_a_base_fits_well() -> None:
    count = 3
    targets = Targets(*concatenated([TARGET] * count))
    parts: list[PolicyChoice] = [tried(targets, contents([FAR] * count, [3] * count))]
    rest = find_overdeep(parts, MAX_DEPTH)
    assert rest is not None
    # bases one level up fit the first chunk, two levels up the second; nothing fits the third
    above = [[FAR, OLD, OLDEST], [OLD, OLDEST], [OLDEST]]
    assert FULL_REST * GROWTH < 0.2 < FULL_REST * GROWTH**2
    for level, bases in enumerate(above, 1):
        assert rest is not None
        assert rest.depth_below == MAX_DEPTH - level
        assert len(rest.asked) == len(bases)
        found = contents(bases, [MAX_DEPTH - 1 - level] * len(bases), first=10 * level)
        parts, rest = reduce_depth(parts, rest, targets, found)
    assert rest is None, "there is no level below depth 0"
    chosen, bases_of = join_choices(count, parts)
    assert chosen.found.all()
    assert chosen.bounds.tolist() == [0, 1, 2, 3]
    assert chosen.depths.tolist() == [2, 1, 3]
    assert bases_of.locations.ordinals[chosen.rows].tolist() == [10, 20, 2]
    assert chosen.ranks.tolist() == [9, 9, 9]


def test_reduce_depth_ends_when_each_chunk_has_a_base() -> None:
    targets = Targets(*concatenated([TARGET]))
    part = tried(targets, contents([FAR], [3]))
    rest = find_overdeep([part], MAX_DEPTH)
    assert rest is not None
    parts, above = reduce_depth([part], rest, targets, contents([FAR], [0], first=5))
    assert above is None
    assert [one.chosen.found.tolist() for one in parts] == [[False], [True]]
    assert part.chosen.found.all(), "the first choice must not be changed in place"


def history(versions: int) -> list[bytes]:
    """Return versions of a table in which one record in thirty differs each time."""
    records = [random_bytes(RECORD_BYTES, number) for number in range(RECORDS)]
    made = []
    for version in range(versions):
        for number in range(version * 7919, version * 7919 + RECORDS // 30):
            row = number * 37 % RECORDS
            records[row] = random_bytes(RECORD_BYTES, 10_000 + version * RECORDS + row)
        made.append(b"".join(records))
    return made


@pytest.mark.parametrize("codec", ["patch", "xdelta3"])
def test_version_behind_a_full_chain_stores_its_changes_once(
    codec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    versions = history(24)

    def put(folder: str) -> list[int]:
        chosen = settings({"delta": {"codec": codec, "max_depth": MAX_DEPTH}})
        with open_store(tmp_path / folder, settings=chosen, create=True) as store:
            found = [store.put("k", content).ledger.delta_bytes for content in versions]
            assert max(store.stats().depths) == MAX_DEPTH
            for number, content in enumerate(versions, 1):
                assert store.get("k", version=number).read() == content
        return found

    with_care = put("with")
    monkeypatch.setattr(depth_limit, "FULL_REST", 9.0)
    without = put("without")
    assert with_care[:4] == without[:4], "a chain that is not full must be written alike"
    assert sum(with_care[12:]) < 0.7 * sum(without[12:])
    assert max(with_care[12:]) < 0.8 * max(without[12:])


@pytest.mark.parametrize("codec", ["patch", "xdelta3"])
def test_batch_of_many_spans_stays_within_lookup_passes(
    codec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lookups: list[int] = []
    reads = locality_candidates.LocalityCandidates.reads

    def counted(of: locality_candidates.LocalityCandidates, facts: LookupResults) -> LookupRequest | None:
        found = reads(of, facts)
        lookups[-1] += found is not None
        return found

    def begun(*given: Any, **more: Any) -> locality_candidates.LocalityCandidates:
        lookups.append(0)
        return locality_candidates.LocalityCandidates(*given, **more)

    monkeypatch.setattr(locality_candidates, "SPAN_BYTES", 1)
    monkeypatch.setattr(locality_candidates.LocalityCandidates, "reads", counted)
    monkeypatch.setattr(base_search, "LocalityCandidates", begun)
    monkeypatch.setattr(depth_limit, "FULL_REST", 0.0)  # so that all ascend all levels
    versions = history(10)
    with open_store(
        tmp_path / "s", settings=settings({"delta": {"codec": codec, "max_depth": MAX_DEPTH}}), create=True
    ) as store:
        for content in versions:
            store.put("k", content)
        for number, content in enumerate(versions, 1):
            assert store.get("k", version=number).read() == content
    most = locality_candidates.SPANS_MAX * (1 + depth_limit.LEVELS_MAX)
    assert 3 * locality_candidates.SPANS_MAX <= max(lookups) <= most, "most spans must ascend all levels, none further"
    others = 3 + depth_limit.LEVELS_MAX  # names and gaps, super-features, what these name, and shallower ones
    assert most + others <= LOOKUP_PASSES_MAX


def test_versions_that_change_everywhere_restore(tmp_path: Path) -> None:
    content = random_bytes(400_000, 5)
    with open_store(tmp_path / "s", create=True) as store:
        for number in range(12):
            content = mutate(content, number, edits=120, edit_bytes_max=400)
            store.put("k", content)
        assert store.get("k").read() == content

"""Test buffer leases: bases are read where they were decoded, with the bytes of `fetch`."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nearkin import Store, open_store
from nearkin.lab.generated_data import mutate, text_like
from nearkin_shared.errors import BadInput, NotFound
from nearkin_shared.formats.directory import CHUNK_ROW
from nearkin_shared.reading import block_decoder, buffer_leases, chunk_reader
from nearkin_shared.reading.base_reader import BaseReader
from nearkin_shared.reading.buffer_leases import BufferLeases
from nearkin_shared.reading.chunk_reader import ChunkReader
from nearkin_shared.reading.read_plan import ReadPlan, by_block
from nearkin_shared.storage.containers import ContainerStore
from nearkin_shared.types import U8, ZERO, ContainerId, Locations, Pieces
from tests.support.data.stores import SMALL
from tests.support.data.stores import settings as chosen

KEPT = pytest.mark.parametrize("store", ["patch", "xdelta3"], indirect=True)


@pytest.fixture
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    """Return a store of four versions in the codec's form, with zeros between."""
    content = text_like(400_000, 1) + bytes(200_000)
    with open_store(tmp_path / "s", settings=chosen(SMALL, {"delta": {"codec": request.param}}), create=True) as opened:
        for version in range(4):
            opened.put("k", content)
            content = mutate(content, version, edits=40, edit_bytes_max=60)
        yield opened


def containers(store: Store) -> ContainerStore:
    return store._containers


def everything(source: ContainerStore) -> Locations:
    """Return every chunk that is stored, and the zero chunk."""
    counts = {container: len(source.directory(container).chunks.lengths) for container, _ in source.ids()}
    ids = [np.full(count, container, np.uint64) for container, count in counts.items()]
    ordinals = [np.arange(count, dtype=np.uint32) for count in counts.values()]
    zero = np.array([ZERO], np.uint64), np.array([777], np.uint32)
    return Locations(np.concatenate([*ids, zero[0]]), np.concatenate([*ordinals, zero[1]]))


def bytes_of(pieces: Pieces) -> list[bytes]:
    rows = zip(pieces.which.tolist(), pieces.offsets.tolist(), pieces.lengths.tolist(), strict=True)
    return [bytes(pieces.buffers[buffer][first : first + length]) for buffer, first, length in rows]


def pairs_of(locations: Locations) -> list[tuple[int, int]]:
    return list(zip(locations.containers.tolist(), locations.ordinals.tolist(), strict=True))


def fetched(reader: ChunkReader, plan: ReadPlan) -> list[bytes]:
    return [bytes(part) for part in np.split(reader.fetch(plan), np.cumsum(plan.lengths)[:-1])]


@KEPT
@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(st.data())
def test_leased_bytes_equal_fetched_bytes(store: Store, data: st.DataObject) -> None:
    source, reader = containers(store), ChunkReader(containers(store))
    places = everything(source)
    plan = reader.plan(places)
    wanted = fetched(reader, plan)
    kept = data.draw(st.integers(0, 4), "one block in so many is cached")
    numbers = count()
    source.blocks.drop_if(lambda _: not kept or next(numbers) % kept > 0)
    rows = data.draw(st.lists(st.integers(0, len(places) - 1), min_size=1, max_size=60))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(buffer_leases, "LEASED_BYTES_MAX", data.draw(st.sampled_from([0, 100_000, 1 << 30])))
        patched.setattr(buffer_leases, "LEASED_SHARE", data.draw(st.sampled_from([1, 8, 1 << 30])))
        patched.setattr(chunk_reader, "WINDOW_BYTES", data.draw(st.sampled_from([1, 20_000, 1 << 30])))
        patched.setattr(block_decoder, "DECODED_BYTES_MAX", data.draw(st.sampled_from([1, 90_000, 1 << 30])))
        pieces = reader.lease(plan.take(np.array(rows)))
    assert bytes_of(pieces) == [wanted[row] for row in rows]


@pytest.mark.parametrize("store", ["patch"], indirect=True)
def test_mostly_needed_block_is_not_copied(store: Store) -> None:
    """Read a block of which much is needed where it was decoded."""
    source, reader = containers(store), ChunkReader(containers(store))
    plan = reader.plan(everything(source))
    by = by_block(plan, np.flatnonzero(plan.locations.containers != np.uint64(ZERO)))
    reader.fetch(plan)
    for visit, name in enumerate(by.names):
        rows = by.rows[by.bounds[visit] : by.bounds[visit + 1]]
        (decoded,) = source.cached_blocks([name])
        assert decoded is not None
        whole = reader.lease(plan.take(rows))
        assert all(whole.buffers[which] is decoded for which in whole.which)
        if plan.lengths[rows[0]] * buffer_leases.LEASED_SHARE < len(decoded):
            little = reader.lease(plan.take(rows[:1]))
            assert not np.shares_memory(little.buffers[little.which[0]], decoded)


@pytest.mark.parametrize("store", ["patch"], indirect=True)
def test_leases_are_bounded_in_bytes(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    source, reader = containers(store), ChunkReader(containers(store))
    plan = reader.plan(everything(source))
    for bound in (0, 150_000, 1 << 30):
        monkeypatch.setattr(buffer_leases, "LEASED_BYTES_MAX", bound)
        pieces = reader.lease(plan)
        names = set(zip(plan.locations.containers.tolist(), plan.blocks.tolist(), strict=True))
        blocks = source.cached_blocks(list(names))
        lent = [len(buffer) for buffer in pieces.buffers if any(buffer is block for block in blocks)]
        assert sum(lent) <= bound
        assert (sum(lent) > bound - 2 * 64 * 1024) == (bound < 1 << 30)
        assert len(set(pieces.which.tolist())) >= len(lent)


@pytest.mark.parametrize("store", ["patch"], indirect=True)
def test_block_in_several_windows_is_leased_once(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    source, reader = containers(store), ChunkReader(containers(store))
    plan = reader.plan(everything(source))
    plan = plan.take(plan.locations.containers != np.uint64(ZERO))
    names = by_block(plan, np.arange(len(plan))).names
    looked_up = source.blocks.hits + source.blocks.misses
    monkeypatch.setattr(chunk_reader, "WINDOW_BYTES", 30_000)
    monkeypatch.setattr(buffer_leases, "LEASED_SHARE", 1 << 30)
    pieces = reader.lease(plan)
    assert source.blocks.hits + source.blocks.misses - looked_up > len(
        names
    )  # a block for each window with a part of it
    assert len([buffer for buffer in pieces.buffers if len(buffer)]) == len(names)
    assert bytes_of(pieces) == fetched(reader, plan)


@pytest.mark.parametrize("store", ["patch"], indirect=True)
def test_decoded_blocks_are_leased_once(store: Store) -> None:
    """Lease blocks that had to be decoded too, and look them up once."""
    source, reader = containers(store), ChunkReader(containers(store))
    plan = reader.plan(everything(source))
    plan = plan.take((plan.depths == 0) & (plan.locations.containers != np.uint64(ZERO)))
    source.blocks.clear()
    before = source.blocks.misses
    pieces = reader.lease(plan)
    names = by_block(plan, np.arange(len(plan))).names
    assert source.blocks.misses - before == len(names)
    decoded = source.cached_blocks(names)
    assert all(any(buffer is one for one in decoded) for buffer in pieces.buffers if len(buffer))


@pytest.mark.parametrize("store", ["patch"], indirect=True)
def test_leased_buffer_survives_eviction(store: Store) -> None:
    """Keep leased bytes while the cache evicts them and reuses memory."""
    source, reader = containers(store), ChunkReader(containers(store))
    plan = reader.plan(everything(source))
    pieces = reader.lease(plan)
    wanted = bytes_of(pieces)
    source.blocks.clear()
    for _ in range(3):  # as much memory again, three times over, from the same pool
        taken = [source.buffers.take(len(buffer)) for buffer in pieces.buffers]
        for memory in taken:
            memory[:] = 0xFF
        del taken
    assert bytes_of(pieces) == wanted


@pytest.mark.parametrize("store", ["patch"], indirect=True)
def test_batch_bases_are_named_once_lost_omitted(store: Store) -> None:
    """Name the bytes of each base once, and none of lost bases."""
    source = containers(store)
    places = everything(source)
    plan = ChunkReader(source).plan(places)
    lost = ContainerId(int(places.containers[:-1].max()))
    twice = Locations.join([places, places])
    with pytest.MonkeyPatch.context() as patched:
        known = source.directory

        def directory(container: ContainerId) -> Any:
            if container == lost:
                raise NotFound("collected")
            return known(container)

        patched.setattr(source, "directory", directory)
        found = BaseReader(source).contents(twice)
    is_available = twice.containers != np.uint64(lost)
    assert (found.available == is_available).all()
    assert not found.pieces.lengths[~is_available].any()
    half = len(places)
    assert (found.pieces.lengths[:half] == np.where(is_available[:half], plan.lengths, 0)).all()
    for column in (found.pieces.which, found.pieces.offsets, found.pieces.lengths):
        assert (column[:half] == column[half:]).all()
    sound = np.flatnonzero(is_available[:half])
    assert bytes_of(found.pieces.take(sound)) == fetched(ChunkReader(source), plan.take(sound))


@pytest.mark.parametrize("store", ["patch"], indirect=True)
def test_ancestors_include_stream_neighbours(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    source = containers(store)
    reader, bases = ChunkReader(source), BaseReader(source)
    plan = reader.plan(everything(source))
    delta_locations = plan.locations.take(np.flatnonzero(plan.depths > 0))
    each = np.arange(0, len(delta_locations) + 1, 2, dtype=np.uint32)  # two in a group
    delta_locations = delta_locations.take(slice(0, int(each[-1])))
    alone = bases.contents(delta_locations, depth_below=1)
    found = bases.contents(delta_locations, depth_below=1, bounds=each)
    assert alone.bounds is None
    assert found.bounds is not None
    assert len(found.bounds) == len(each)
    assert len(found.locations) > len(delta_locations)
    places = pairs_of(found.locations)
    ancestors = pairs_of(alone.locations)
    rows = zip(pairs_of(plan.locations), plan.blocks.tolist(), plan.depths.tolist(), strict=True)
    block_of = {place: (place[0], block) for place, block, depth in rows if not depth}
    read = {block_of[place] for place in ancestors}
    at_hand = {place for place, block in block_of.items() if block in read}
    assert len(at_hand) < len(block_of)
    for group, (first, last) in enumerate(zip(found.bounds[:-1].tolist(), found.bounds[1:].tolist(), strict=True)):
        mine = ancestors[2 * group : 2 * group + 2]
        neighbours = {(c, o + step) for c, o in mine for step in (-1, 1)} - set(mine)
        assert places[first : first + 2] == mine
        assert set(places[first + 2 : last]) == neighbours & at_hand
        assert last - first - 2 == len(neighbours & at_hand)
    assert (found.depths == 0).all()
    assert found.available.all()
    assert bytes_of(found.pieces) == fetched(reader, reader.plan(found.locations))

    monkeypatch.setattr("nearkin_shared.reading.base_reader.NEIGHBOUR_BYTES_MAX", 0)
    assert len(bases.contents(delta_locations, depth_below=1, bounds=each).locations) == len(delta_locations)


def test_stream_neighbours_shrink_shifted_version(tmp_path: Path) -> None:
    """Use stream neighbours of ancestors as bases: a shifted version gets smaller."""
    content, versions = text_like(600_000, 3), list[bytes]()
    for version in range(4):
        versions.append(content)
        content = mutate(content, version, edits=60, edit_bytes_max=400)

    def stored(name: str) -> int:
        with open_store(tmp_path / name, settings=chosen(SMALL, {"delta": {"max_depth": 1}}), create=True) as opened:
            results = [opened.put("k", each) for each in versions]
            assert [b"".join(opened.get("k", number + 1)) for number in range(4)] == versions
        return results[-1].ledger.stored_bytes

    with_beside = stored("with")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("nearkin_shared.reading.base_reader.NEIGHBOUR_BYTES_MAX", 0)
        assert with_beside < 0.95 * stored("without")


def test_rows_that_leave_their_block_are_refused() -> None:
    rows = np.zeros(2, CHUNK_ROW)
    rows["lengths"] = rows["encoded"] = 10
    rows["positions"] = [0, 5]
    plan = ReadPlan(Locations(np.full(2, 7, np.uint64), np.arange(2, dtype=np.uint32)), rows)

    def take(size_bytes: int) -> U8:
        return np.zeros(size_bytes, np.uint8)

    blocks = by_block(plan, np.arange(2))
    BufferLeases(plan, take).use(blocks, [0], [np.zeros(15, np.uint8)])
    with pytest.raises(BadInput, match="leaves buffer 0 of 14 bytes"):
        BufferLeases(plan, take).use(blocks, [0], [np.zeros(14, np.uint8)])


@pytest.mark.parametrize("needed", [1, 2])
def test_block_is_leased_if_half_of_it_is_needed(needed: int) -> None:
    """A put that looks at slices of many merged blocks keeps the slices, not the blocks."""
    rows = np.zeros(needed, CHUNK_ROW)
    rows["lengths"] = rows["encoded"] = 30
    rows["positions"] = 30 * np.arange(needed)
    plan = ReadPlan(Locations(np.full(needed, 7, np.uint64), np.arange(needed, dtype=np.uint32)), rows)
    leases = BufferLeases(plan, lambda size_bytes: np.zeros(size_bytes, np.uint8))
    block = np.arange(90, dtype=np.uint8)
    leases.use(by_block(plan, np.arange(needed)), [0], [block])
    pieces = leases.finish(np.zeros(0, np.intp), np.zeros(0, np.uint8))
    assert bytes_of(pieces) == [bytes(block[30 * row : 30 * row + 30]) for row in range(needed)]
    assert any(buffer is block for buffer in pieces.buffers) == (needed == 2)

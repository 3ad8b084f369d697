"""Test reads of data in flight.

Of an open, a finished and a written container, also without cached blocks.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from nearkin.lab.generated_data import mutate, random_bytes
from nearkin_delta import handler as delta_handler
from nearkin_delta.container_builder import ContainerBuilder, Encodings, Prefixes
from nearkin_delta.finished_container import FinishedContainer
from nearkin_shared.config.reduction import BlockSettings, DeltaSettings
from nearkin_shared.errors import Corrupt, NotFound, RetryableError
from nearkin_shared.formats import container_layout
from nearkin_shared.formats.container import EncodedContainer
from nearkin_shared.limits import MIB
from nearkin_shared.objectstore.obstore_adapter import ObstoreObjectStore, memory_objects
from nearkin_shared.pipeline.lookups import NEIGHBOUR_BYTES_MAX, InFlight
from nearkin_shared.reading.chunk_reader import ChunkReader
from nearkin_shared.storage.containers import ContainerStore, object_name
from nearkin_shared.types import ContainerId, Locations, Pieces
from tests.support.data import samples

CONTAINER = ContainerId(99 << 20)
CHUNK_BYTES = 30_000
CHUNKS = 8
ORIGINALS = [random_bytes(CHUNK_BYTES, number) for number in range(CHUNKS)]
SECONDS = [mutate(content, 50, number) for number, content in enumerate(ORIGINALS)]
THIRDS = [mutate(content, 50, 100 + number) for number, content in enumerate(SECONDS)]


def chunks(contents: list[bytes], depth: int, first_base: int = 0) -> Encodings:
    """Return chunks of `depth`; above 0 each has one base in the same container."""
    count = len(contents)
    lengths, ends = packed(contents)
    payload = np.frombuffer(b"".join(contents), np.uint8)
    bases = Locations(np.full(count, CONTAINER, np.uint64), np.arange(first_base, first_base + count, dtype=np.uint32))
    found = Encodings(
        samples.names_of(lengths.tolist(), str(depth)),
        lengths,
        np.full(count, depth, np.uint8),
        (payload, np.zeros(0, np.uint8)),
        np.zeros(count, np.int32),
        ends - lengths,
        lengths,
        bases if depth else Locations.empty(count),
        np.zeros(count, np.uint8),
    )
    if not depth:
        return found
    below = (ORIGINALS, SECONDS)[depth - 1]
    sizes, ends = packed(below)
    payload = np.frombuffer(b"".join(below), np.uint8)
    prefixes = Prefixes(np.arange(count + 1, dtype=np.uint32), bases, Pieces.of(payload, ends - sizes, sizes))
    return replace(found, prefixes=prefixes)


def packed(contents: list[bytes]) -> tuple[np.ndarray, np.ndarray]:
    """Return (bytes of all chunks, end offset of each)."""
    sizes = np.array([len(content) for content in contents], np.uint32)
    return sizes, np.cumsum(sizes, dtype=np.uint64)


class World:
    """A container with blocks of depth 0, 1 and 2 based on one another; no block is cached."""

    def __init__(self) -> None:
        self.objects: ObstoreObjectStore = memory_objects()
        self.store = ContainerStore(self.objects, samples.DOMAIN, 1)
        self.in_flight = InFlight(self.store)
        small = BlockSettings(raw_bytes=64 * 1024, delta_bytes=64 * 1024, level=3)
        self.builder = ContainerBuilder(CONTAINER, samples.DOMAIN, small, DeltaSettings(), container_layout.PATCH)
        self.in_flight.open_only(self.builder)
        for depth, contents in enumerate((ORIGINALS, SECONDS, THIRDS)):
            self.builder.add(chunks(contents, depth, (depth - 1) * CHUNKS if depth else 0))

    def read(self) -> bytes:
        reader = ChunkReader(self.in_flight)
        ordinals = np.arange(3 * CHUNKS, dtype=np.uint32)
        return reader.fetch(reader.plan(Locations(np.full(len(ordinals), CONTAINER, np.uint64), ordinals))).tobytes()

    def finish(self) -> FinishedContainer:
        finished = self.builder.finish()
        self.in_flight.on_finished(finished)
        self.in_flight.open_only()
        return finished


@pytest.fixture
def world() -> World:
    return World()


WANTED = b"".join([*ORIGINALS, *SECONDS, *THIRDS])


def test_cache_makes_room_for_blocks_in_use() -> None:
    """A block that the cache evicted still takes memory as long as a batch looks at it."""
    store = ContainerStore(memory_objects(), samples.DOMAIN, 20 * MIB)
    in_flight = InFlight(store)

    def decode(first: int, count: int) -> list[np.ndarray]:
        blocks = in_flight.room_for([MIB] * count)
        in_flight.cache_blocks([(CONTAINER, first + number) for number in range(count)], blocks)
        return blocks

    decode(0, 20)
    assert store.blocks.used_bytes == 20 * MIB
    rooms = [in_flight.room(MIB) for _ in range(NEIGHBOUR_BYTES_MAX // MIB)]
    decode(20, 1)
    assert store.blocks.used_bytes == 20 * MIB
    rooms += [in_flight.room(MIB) for _ in range(5)]
    decode(21, 1)
    assert store.blocks.used_bytes == 15 * MIB
    del rooms
    decode(22, 5)
    assert store.blocks.used_bytes == 20 * MIB
    held = [block for first in range(100, 200, 10) for block in decode(first, 10)]
    assert len(held) * MIB > NEIGHBOUR_BYTES_MAX + 20 * MIB
    assert store.blocks.used_bytes == 10 * MIB, "only the block decoded last may be cached"
    assert store.room_for([MIB])[0].nbytes == MIB, "a restore must not evict blocks for its buffers"


def test_closed_patch_blocks_are_decoded_if_not_cached(world: World) -> None:
    """The blocks belong to an open container."""
    world.builder.close()
    world.builder.next_batch()
    world.builder.next_batch()
    kinds = world.builder.directory(CONTAINER).blocks.kinds.tolist()
    assert kinds.count(container_layout.PATCH) >= 2
    assert world.builder.open_block(world.builder.blocks - 1) is None
    assert world.read() == WANTED


def test_chunks_are_equal_before_and_after_the_write(world: World) -> None:
    assert world.read() == WANTED
    finished = world.finish()
    assert world.read() == WANTED
    sealed = finished.seal()
    assert world.read() == WANTED
    assert [sealed.size_bytes, sum(map(len, sealed.parts))] == [len(sealed.data)] * 2
    known, written_directory = finished.known, sealed.claims.directory
    for table in ("chunks", "segments", "prefixes"):
        assert vars_of(getattr(known, table)) == vars_of(getattr(written_directory, table)), table
    for column in ("raw", "kinds", "depths"):
        assert np.array_equal(getattr(known.blocks, column), getattr(written_directory.blocks, column))
    world.store.put(CONTAINER, sealed.parts)
    world.in_flight.durable(written_directory)
    assert world.read() == WANTED
    assert world.objects.get(object_name(CONTAINER)) == sealed.data


def test_directory_of_a_written_container_is_not_read(world: World) -> None:
    sealed = world.finish().seal()
    world.store.put(CONTAINER, sealed.parts)
    world.in_flight.durable(sealed.claims.directory)
    world.objects.delete(object_name(CONTAINER))
    assert world.store.directory(CONTAINER) is sealed.claims.directory
    world.store.evict(CONTAINER)
    with pytest.raises(NotFound):
        world.objects.get(object_name(CONTAINER))
    with pytest.raises(Exception, match="missing"):
        world.store.directory(CONTAINER)


def vars_of(table: object) -> list[object]:
    """Return the columns of a table as lists."""
    found: list[object] = []
    for name in type(table).__slots__:  # type: ignore[attr-defined]
        column = getattr(table, name)
        found += vars_of(column) if isinstance(column, Locations) else [name, column.tolist()]
    return found


def test_unwritable_container_is_no_fault_of_a_message(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    finished = world.finish()

    def broken(*_: object) -> None:
        raise Corrupt("a container just built: directory's checksum does not agree")

    monkeypatch.setattr(EncodedContainer, "read_back", broken)
    with pytest.raises(RetryableError, match="starting over"):
        delta_handler._encode_container(finished)

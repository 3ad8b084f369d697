"""Test the decoding of blocks with all their bases: in one call, or one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nearkin import Store, open_store
from nearkin.lab.generated_data import mutate, random_bytes, text_like
from nearkin_shared.errors import Corrupt, StoreUnavailable
from nearkin_shared.formats import container_layout
from nearkin_shared.kernels import zstd_frames
from nearkin_shared.objectstore.local import TOGETHER_BYTES_MAX
from nearkin_shared.reading import block_decoder
from nearkin_shared.reading.block_decoder import BlockDecoder
from nearkin_shared.reading.chunk_reader import ChunkReader
from nearkin_shared.reading.read_plan import BlockName
from nearkin_shared.storage.containers import ContainerStore, object_name
from nearkin_shared.types import U8
from nearkin_shared.utils.thread_pool import ThreadPool
from tests.support.data.stores import SMALL
from tests.support.data.stores import settings as chosen


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """Five versions, each a patch upon those before."""
    content = text_like(400_000, 1)
    with open_store(tmp_path / "s", settings=chosen(SMALL, {"delta": {"max_depth": 4}}), create=True) as opened:
        for version in range(5):
            opened.put("k", content)
            content = mutate(content, version, edits=40, edit_bytes_max=60)
        opened._containers.evict()
        yield opened


def blocks_of(source: ContainerStore) -> dict[BlockName, tuple[int, int]]:
    """Return kind and depth of each block."""
    tables = {container: source.directory(container).blocks for container, _ in source.ids()}
    return {
        (container, block): (int(table.kinds[block]), int(table.depths[block]))
        for container, table in tables.items()
        for block in range(len(table))
    }


def chains_of(source: ContainerStore) -> BlockDecoder:
    return BlockDecoder(source, ChunkReader(source).plan)


def dependents_of(source: ContainerStore, name: BlockName) -> set[BlockName]:
    """Return the block and all blocks that depend on it, directly or not."""
    reader, found = ChunkReader(source), {name}
    while True:
        more = set(found)
        for other, (kind, _) in blocks_of(source).items():
            if kind == container_layout.PATCH:
                plan = reader.plan(source.directory(other[0]).prefixes.of(other[1]))
                if found & set(zip(plan.locations.containers.tolist(), plan.blocks.tolist(), strict=True)):
                    more.add(other)
        if more == found:
            return found
        found = more


def equal_contents(found: Sequence[U8 | None], expected: Sequence[U8 | None]) -> bool:
    """Return whether all blocks are equal, or absent from both."""
    pairs = list(zip(found, expected, strict=True))
    return all(a is b if a is None or b is None else np.array_equal(a, b) for a, b in pairs)


def test_chain_is_decoded_in_one_call(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    source = store._containers
    calls, trips = list[int](), list[int]()
    plain, plain_ranges = zstd_frames.decode_frames, source._objects.get_ranges

    def decode_frames(frames: Any, *others: Any) -> Any:
        calls.append(len(frames))
        return plain(frames, *others)

    def get_ranges(name: str, starts: Any, ends: Any) -> Any:
        trips.append(len(starts))
        return plain_ranges(name, starts, ends)

    every = blocks_of(source)
    depths = {depth for _, depth in every.values()}
    assert len(depths) >= 4
    deepest = [name for name, (_, depth) in every.items() if depth == max(depths)]
    monkeypatch.setattr(block_decoder, "decode_frames", decode_frames)
    monkeypatch.setattr(source._objects, "get_ranges", get_ranges)
    found = chains_of(source).decode(deepest)
    assert all(content is not None for content in found)
    assert len(calls) == 1, "of whatever depth"
    assert sum(calls) > 2 * len(deepest)
    assert sum(trips) == sum(calls), "each block is read once"
    assert len(trips) == len({name[0] for name in every}), "and those of a container together"
    calls.clear()
    assert all(a is b for a, b in zip(chains_of(source).decode(deepest), found, strict=True))
    assert not calls, "they are cached"


@pytest.mark.parametrize("bound", [1, 100_000, 300_000])
def test_decoding_is_bounded_in_bytes(store: Store, monkeypatch: pytest.MonkeyPatch, bound: int) -> None:
    source = store._containers
    names = sorted(blocks_of(source))
    wanted = dict(zip(names, chains_of(source).decode(names), strict=True))
    source.evict()
    monkeypatch.setattr(block_decoder, "DECODED_BYTES_MAX", bound)
    found = dict[BlockName, U8 | None]()
    while len(found) < len(names):
        source.blocks.clear()
        taken = source.costs.blocks_decoded
        left = names[len(found) :]
        some = chains_of(source).decode(left)
        assert some, "one at least"
        found |= dict(zip(left, some, strict=False))
        assert source.blocks.used_bytes <= bound
        nothing = len(some) == 1 and some[0] is None
        assert nothing == (source.costs.blocks_decoded == taken)
    for name, content in found.items():
        assert content is None or equal_contents([content], [wanted[name]])
    assert any(content is not None for content in found.values()) == (bound > 1)
    assert store.verify().damage == ()


def test_concurrent_decoder_has_half_the_bound(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    source = store._containers
    names = sorted(blocks_of(source))
    wanted = chains_of(source).decode(names)
    monkeypatch.setattr(
        block_decoder, "DECODED_BYTES_MAX", sum(len(content) for content in wanted if content is not None)
    )
    taken = list[int]()

    def decoded() -> None:
        source.evict()
        found = chains_of(source).decode(names)
        assert equal_contents(found, wanted[: len(found)])
        taken.append(len(found))

    plain = zstd_frames.decode_frames

    def decode_concurrently(frames: Any, *others: Any) -> Any:
        monkeypatch.setattr(block_decoder, "decode_frames", plain)
        decoded()  # while what is around it has not ended
        return plain(frames, *others)

    monkeypatch.setattr(block_decoder, "decode_frames", decode_concurrently)
    decoded()
    decoded()
    assert taken[1:] == [len(names), len(names)], "alone, and concurrently with another and after it"
    assert 0 < taken[0] < len(names)


def test_sole_decoder_uses_other_threads(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    source, requests = store._containers, list[str]()
    names = sorted(blocks_of(source))
    wanted = chains_of(source).decode(names)

    class RecordingPool(ThreadPool):
        def run_on_all(self, work: Callable[[], None]) -> None:
            requests.append("share")
            super().run_on_all(work)

    with ThreadPoolExecutor(2) as threads:
        reader = block_decoder.BlockDecoder(source, ChunkReader(source).plan, RecordingPool(threads, 3))
        source.evict()
        found = reader.decode(names)
        assert requests, "they are there to be asked"
        assert equal_contents(found, wanted)
        requests.clear()
        source.evict()
        slot = block_decoder._decode_slots.take()  # another thread decodes
        reader.decode(names)
        assert not requests, "one thread for each restore of a gateway that has many"
        del slot
        source.evict()
        assert reader.decode(names)
        assert requests


def test_cached_block_keeps_its_own_memory_only(tmp_path: Path) -> None:
    """Copy the block: adjacent records share one read, of which the cache may keep one."""
    content = random_bytes(6 * TOGETHER_BYTES_MAX, 1)
    with open_store(tmp_path / "s", settings=chosen(SMALL), create=True) as store:
        store.put("k", content)
        source = store._containers
        source.evict()
        assert store.get("k").read() == content
        kept = [block for _, block in source.blocks.items()]
        assert len(kept) >= 20
        for block in kept:
            memory: Any = None
            below: Any = block
            while below is not None:
                memory, below = below, below.obj if isinstance(below, memoryview) else getattr(below, "base", None)
            assert memoryview(memory).nbytes <= block.nbytes + block.nbytes // 8, "which the cache counts"


def test_decode_slot_ends_with_its_error(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Release the decode slot when its holder ends by an error."""
    source = store._containers
    bounds = list[int]()

    def interrupted(
        _self: BlockDecoder, _names: Any, _spend: Any, bytes_max: int, _helpers: ThreadPool
    ) -> list[U8 | None]:
        bounds.append(bytes_max)
        raise KeyboardInterrupt

    monkeypatch.setattr(BlockDecoder, "_decode_up_to", interrupted)
    kept = list[BaseException]()
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt) as raised:
            chains_of(source).decode(sorted(blocks_of(source)))
        kept.append(raised.value)  # with all that its traceback holds
    assert bounds == [block_decoder.DECODED_BYTES_MAX] * 2, "the second is alone, too"


def test_dependents_of_damage_are_skipped(store: Store, tmp_path: Path) -> None:
    """Skip blocks that depend on a damaged one, and decode all others."""
    source = store._containers
    every = blocks_of(source)
    by_block = {name: dependents_of(source, name) for name in every}
    name, touched = max(((n, t) for n, t in by_block.items() if len(t) < len(every)), key=lambda pair: len(pair[1]))
    assert 1 < len(touched) < len(every)
    path = tmp_path / "s" / object_name(name[0])
    place = source.directory(name[0]).block_rows[name[1]].place
    data = bytearray(path.read_bytes())
    data[place.stop - 1] ^= 1
    path.chmod(0o600)
    path.write_bytes(data)
    source.evict()
    found = chains_of(source).decode(sorted(every))
    assert {name for name, content in zip(sorted(every), found, strict=True) if content is None} == touched
    with pytest.raises(Corrupt, match=f"{object_name(name[0])} block {name[1]}: checksum"):
        store.get("k", 5).read()


def test_unreadable_blocks_are_requested_once(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    source = store._containers
    every = sorted(blocks_of(source))
    by_container = [[name for name in every if name[0] == container] for container in {name[0] for name in every}]
    broken = max(by_container, key=len)[-1]
    start = source.directory(broken[0]).block_rows[broken[1]].place.start
    plain, requests = source._objects.get_ranges, list[int]()

    def get_ranges(name: str, starts: Any, ends: Any) -> Any:
        if name == object_name(broken[0]):
            requests.append(len(starts))
            if start in starts:
                raise Corrupt("a page that does not open")
        return plain(name, starts, ends)

    monkeypatch.setattr(source._objects, "get_ranges", get_ranges)
    found = dict(zip(every, chains_of(source).decode(every), strict=True))
    assert {name for name, content in found.items() if content is None} == dependents_of(source, broken)
    mine = len([name for name in every if name[0] == broken[0]])
    assert mine > 5
    assert [count for count in requests if count > 2] == [mine], "two are the directory, looked at again"
    assert sum(requests) < 3 * mine


def test_only_blocks_on_deltas_are_remembered(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Remember only blocks that depend on deltas."""
    source, chain = store._containers, chains_of(store._containers)
    every, plain = sorted(blocks_of(source)), source.directory
    removed = min(name for name, (_, depth) in blocks_of(source).items() if depth == 0)[0]

    def directory(container: Any) -> Any:
        if container == removed:
            raise Corrupt("for a moment")
        return plain(container)

    with monkeypatch.context() as patched:
        patched.setattr(source, "directory", directory)
        assert any(content is None for content in chain.decode(every))
    assert all(content is not None for content in chain.decode(every))


def test_blocks_on_deltas_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read blocks that depend on deltas once, and leave them to the slow path."""
    content, versions = text_like(400_000, 1), list[bytes]()
    for codec in ("xdelta3", "patch"):
        with open_store(
            tmp_path / "m", settings=chosen(SMALL, {"delta": {"codec": codec, "max_depth": 30}}), create=True
        ) as opened:
            for version in range(2 if codec == "xdelta3" else 10):
                versions.append(content)
                opened.put("k", content)
                content = mutate(content, version, edits=60, edit_bytes_max=60)
    with open_store(tmp_path / "m", create=True) as opened:
        source, read = opened._containers, list[tuple[str, int]]()
        plain = source._objects.get_ranges

        def get_ranges(name: str, starts: Any, ends: Any) -> Any:
            read.extend((name, start) for start in starts)
            return plain(name, starts, ends)

        for container, _ in source.ids():
            source.directory(container)
        monkeypatch.setattr(source._objects, "get_ranges", get_ranges)
        assert opened.get("k", 12).read() == versions[-1]
        assert len(read) == len(set(read)), "each block is read once"


def test_unresponsive_store_is_reported_at_once(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    source = store._containers
    names = sorted(blocks_of(source))
    requests = []

    def fail_read(name: str, starts: Any, ends: Any) -> Any:
        requests.append(name)
        raise StoreUnavailable("away")

    monkeypatch.setattr(source._objects, "get_ranges", fail_read)
    with pytest.raises(StoreUnavailable):
        chains_of(source).decode(names)
    assert len(requests) == 1

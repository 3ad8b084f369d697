"""Test eviction hints of a restore.

Used data is evicted first, and the bytes are the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from nearkin import open_store
from nearkin.lab.generated_data import mutate, text_like
from nearkin_shared.errors import Corrupt
from nearkin_shared.limits import MIB
from nearkin_shared.objectstore.local import LocalObjectStore
from nearkin_shared.reading import eviction_hints as module
from nearkin_shared.reading import read_plan as plans_module
from nearkin_shared.reading import restore
from nearkin_shared.reading.chunk_reader import ChunkReader
from nearkin_shared.reading.eviction_hints import EvictionHints
from nearkin_shared.reading.read_plan import Placed, ReadPlan, announce_upcoming
from nearkin_shared.reading.restore import VersionReader
from nearkin_shared.storage.containers import ContainerStore, object_name
from nearkin_shared.types import ContainerId, Locations
from tests.support.data.stores import SMALL, settings

BLOCKS: Mapping[str, Mapping[str, object]] = {"block": {"raw_bytes": "256KiB", "delta_bytes": "16KiB"}}
XDELTA: Mapping[str, Mapping[str, object]] = {"delta": {"codec": "xdelta3"}}
VERSIONS = 6


def stored(root: Path, *changes: Mapping[str, object]) -> list[bytes]:
    versions = [text_like(9_000_000, 1)]
    for number in range(1, VERSIONS):
        versions.append(mutate(versions[-1], number, edits=300, edit_bytes_max=400))
    with open_store(root, settings=settings(SMALL, BLOCKS, *changes), create=True) as store:
        for data in versions:
            store.put("k", data)
    return versions


@pytest.fixture(scope="module")
def history(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[bytes]]:
    root = tmp_path_factory.mktemp("foresight") / "s"
    return root, stored(root)


def open_blob(root: Path, cache_bytes: int, version: int, start: int = 0, stop: int | None = None) -> VersionReader:
    """Return a version of a store whose cache of blocks holds so much."""
    with open_store(root, settings=settings(SMALL, BLOCKS), read_only=True) as store:
        of = store.get("k", version)
        containers = ContainerStore(LocalObjectStore(root), store._fingerprinter.domain, cache_bytes)
        end = of.info.size_bytes if stop is None else stop
        return VersionReader(of.info, of._reader._manifest, containers.counting(), store._fingerprinter, start, end)


def decoded(blob: VersionReader) -> int:
    """Return how many blocks a restore decodes: each is read for that."""
    b"".join(blob.pieces())
    assert blob.costs.blocks_decoded == blob.costs.block_reads
    return blob.costs.blocks_decoded


def evicts_hinted_blocks(root: Path, newest: bytes) -> bool:
    """Return whether a restore of the newest version through a small cache gives blocks up."""
    blob = open_blob(root, 2_000_000, VERSIONS)
    assert b"".join(blob.pieces()) == newest
    return bool(blob._source.blocks._given_up)


def test_used_memory_is_reused_decoding_once(
    history: tuple[Path, list[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reuse the memory of blocks that are not needed again; decode nothing twice."""
    root, versions = history
    everything = open_blob(root, 256 * MIB, VERSIONS)
    each_once = decoded(everything)
    total_bytes = everything._source.blocks.used_bytes
    foreseen, plain = open_blob(root, total_bytes * 4 // 5, VERSIONS), open_blob(root, total_bytes * 4 // 5, VERSIONS)
    assert decoded(foreseen) == each_once
    assert foreseen._source.blocks.used_bytes < total_bytes * 0.6
    monkeypatch.setattr(restore, "HINTED_SHARE", 0)
    assert decoded(plain) == each_once
    assert plain._source.blocks.used_bytes > total_bytes * 0.75
    assert b"".join(open_blob(root, total_bytes // 3, VERSIONS).pieces()) == versions[-1]


def test_unneeded_blocks_make_room(history: tuple[Path, list[bytes]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Evict blocks that no batch needs any more to make room."""
    root, versions = history
    blob = open_blob(root, 8_500_000, 1)
    assert b"".join(blob.pieces()) == versions[0]
    assert blob._source.blocks.used_bytes < 6_000_000, "two batches of three"
    monkeypatch.setattr(restore, "HINTED_SHARE", 0)
    blob = open_blob(root, 8_500_000, 1)
    assert b"".join(blob.pieces()) == versions[0]
    assert blob._source.blocks.used_bytes > 8_000_000


@pytest.mark.parametrize("why", ["all fits", "others restore"])
def test_blocks_others_may_need_stay(history: tuple[Path, list[bytes]], why: str) -> None:
    root, versions = history
    blob = open_blob(root, 32 * MIB if why == "all fits" else 8_500_000, 1)
    with ExitStack() as others:
        if why == "others restore":
            others.enter_context(blob._source.restores.register())
        assert b"".join(blob.pieces()) == versions[0]
    assert blob._source.blocks.used_bytes > 8_000_000
    assert blob._source.restores.count == 0
    again = VersionReader(blob.info, blob._manifest, blob._source.counting(), blob._fingerprinter, 0, blob.size_bytes)
    assert b"".join(again.pieces()) == versions[0]
    assert again.costs.blocks_decoded < blob.costs.blocks_decoded / 4


@pytest.mark.parametrize("horizon", [1, 32])
@pytest.mark.parametrize(
    ("start", "stop"), [(0, 8_900_000), (1, 5_000_000), (4_100_000, 8_900_001), (MIB * 4, MIB * 8)]
)
def test_ranges_are_restored_unchanged(
    history: tuple[Path, list[bytes]], monkeypatch: pytest.MonkeyPatch, horizon: int, start: int, stop: int
) -> None:
    root, versions = history
    monkeypatch.setattr(module, "HORIZON_PLANS", horizon)
    for version in (1, VERSIONS):
        assert b"".join(open_blob(root, 2_000_000, version, start, stop).pieces()) == versions[version - 1][start:stop]


def test_delta_chains_are_not_hinted(tmp_path: Path) -> None:
    """Make no hints for chains of deltas, and evict nothing for them."""
    versions = stored(tmp_path / "s", XDELTA)
    assert not evicts_hinted_blocks(tmp_path / "s", versions[-1])


@pytest.mark.parametrize("bound", ["HELD_MAX", "BASES_MAX", "KEYS_MAX"])
def test_too_many_blocks_or_bases_are_not_hinted(
    history: tuple[Path, list[bytes]], monkeypatch: pytest.MonkeyPatch, bound: str
) -> None:
    root, versions = history
    assert evicts_hinted_blocks(root, versions[-1])
    monkeypatch.setattr(module, bound, 20)
    assert not evicts_hinted_blocks(root, versions[-1])


def test_containers_that_are_looked_into_again_give_the_same(
    history: tuple[Path, list[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    root, versions = history
    often = open_blob(root, 12_000_000, VERSIONS)
    taken = decoded(often)
    monkeypatch.setattr(module, "EDGES_MAX", 1)
    blob = open_blob(root, 12_000_000, VERSIONS)
    assert decoded(blob) == taken
    assert blob._source.blocks.used_bytes == often._source.blocks.used_bytes
    assert b"".join(open_blob(root, 2_000_000, VERSIONS).pieces()) == versions[-1]


def test_block_of_a_later_generation_is_no_hint(
    history: tuple[Path, list[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Give up the hints if a GC run rewrote the container.

    Block numbers of the plan are stale.
    """
    root, versions = history
    real = EvictionHints._dependencies_in

    def older(self: EvictionHints, container: ContainerId) -> module._BlockDependencies:
        leaning = real(self, container)
        return leaning._replace(raw_bytes=leaning.raw_bytes[:1])

    monkeypatch.setattr(EvictionHints, "_dependencies_in", older)
    assert not evicts_hinted_blocks(root, versions[-1])


def test_range_behind_last_segment_names_its_end(history: tuple[Path, list[bytes]]) -> None:
    root, versions = history
    size = len(versions[0])
    for start in (size - 1, size + 10):
        with pytest.raises(Corrupt, match=f"its segments end at byte {size} of"):
            b"".join(open_blob(root, 2_000_000, 1, start, size + 20).pieces())


def test_plans_of_very_many_rows_are_few(history: tuple[Path, list[bytes]], monkeypatch: pytest.MonkeyPatch) -> None:
    root, versions = history
    blob = open_blob(root, 2_000_000, VERSIONS)
    plans_read = list[ReadPlan]()
    plans = list(blob._range_plans())
    monkeypatch.setattr(plans_module, "ROWS_AHEAD_MAX", len(plans[0][1]) + len(plans[1][1]) - 1)

    def see(plan: ReadPlan) -> bool:
        plans_read.append(plan)
        return True

    assert next(announce_upcoming(plans, see, 32)) == plans[0]
    assert len(plans_read) == 2
    assert list(announce_upcoming(plans, see, 32)) == plans
    assert b"".join(blob.pieces()) == versions[-1]


def test_deleted_container_is_reported_as_before(tmp_path: Path) -> None:
    stored(tmp_path / "s")
    blob = open_blob(tmp_path / "s", 2_000_000, VERSIONS)
    (first, *_) = sorted(container for container, _ in blob._source.ids())
    (tmp_path / "s" / object_name(first)).unlink()
    with pytest.raises(Corrupt, match=f"{object_name(first)}: missing"):
        b"".join(blob.pieces())
    assert blob._source.restores.count == 0


def test_damage_ahead_is_raised_in_order(history: tuple[Path, list[bytes]]) -> None:
    """Raise damage found ahead after all bytes before it."""
    root, _ = history
    blob = open_blob(root, 2_000_000, 1)
    plans = list(blob._range_plans())
    assert len(plans) > 2

    def broken() -> Iterator[Placed]:
        yield from plans[:2]
        raise Corrupt("the third")

    ahead = announce_upcoming(broken(), lambda _: True, 32)
    assert [next(ahead), next(ahead)] == plans[:2]
    with pytest.raises(Corrupt, match="the third"):
        next(ahead)


def test_nothing_is_planned_without_hints(history: tuple[Path, list[bytes]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Plan nothing ahead without hints: plans get stale when a GC run rewrites containers."""
    root, _ = history
    blob = open_blob(root, 2_000_000, VERSIONS)
    plans, made_so_far = list(blob._range_plans()), list[int]()

    def record_plans() -> Iterator[Placed]:
        for number, placed in enumerate(plans):
            made_so_far.append(number)
            yield placed

    monkeypatch.setattr(module, "HELD_MAX", 0)
    ahead = EvictionHints(blob._source).track_plans(record_plans())
    for number in range(len(plans)):
        assert next(ahead) == plans[number]
        assert len(made_so_far) == number + 1


def test_plan_before_a_gc_run_is_made_again(tmp_path: Path) -> None:
    """Plan again after a GC run of this process: cached directories are newer than the plan.

    Rows that the run gave other bases had bases that were deleted.
    """
    now = [1.7e9]
    content = bytearray(np.random.default_rng(0).bytes(9_000_000))
    random = np.random.default_rng(1)
    with open_store(
        tmp_path / "s", settings=settings(SMALL, BLOCKS, XDELTA), clock=lambda: now[0], create=True
    ) as store:
        for _ in range(7):
            for place in random.integers(0, len(content) - 30, 550):
                content[place : place + 20] = random.bytes(25)
            store.put("k", bytes(content))
        for version in range(1, 6):
            store.delete("k", version)
        now[0] += 40 * 86400
        store.gc()
        now[0] += 40 * 86400
        pieces = store.get("k", 7).pieces()
        found = bytes(next(pieces))
        plans = list(store.get("k", 7)._reader._range_plans())
        report = store.gc()
        assert report.containers_rewritten
        fresh = list(store.get("k", 7)._reader._range_plans())
        assert any(old.rows.tobytes() != new.rows.tobytes() for (_, old), (_, new) in zip(plans, fresh, strict=True))
        assert found + b"".join(pieces) == bytes(content)


def test_plan_across_generations_is_made_again(
    history: tuple[Path, list[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plan again if another thread caches a later generation while the plan is made."""
    root, _ = history
    source = open_blob(root, 2_000_000, 1)._source
    container = min(container for container, _ in source.ids())
    count = len(source.directory(container).chunks)
    last = Locations(np.array([container], np.uint64), np.array([count - 1], np.uint32))
    tables, calls = ChunkReader.tables, list[int]()

    def older(self: ChunkReader, locations: Locations):  # type: ignore[no-untyped-def]
        which, containers, found = tables(self, locations)
        calls.append(len(calls))
        if len(calls) == 1:
            source._change_log.record(container)
            return which, containers, [None if rows is None else rows[:-1] for rows in found]
        return which, containers, found

    monkeypatch.setattr(ChunkReader, "tables", older)
    assert len(ChunkReader(source).plan(last)) == 1
    assert len(calls) == 2
    beyond = Locations(np.array([container], np.uint64), np.array([count], np.uint32))
    with pytest.raises(Corrupt, match=f"no chunk {count}, it has {count} chunks"):
        ChunkReader(source).plan(beyond)

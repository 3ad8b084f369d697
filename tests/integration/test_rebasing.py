"""Test batch rebase: chunks of several containers get other bases in stream order."""

from __future__ import annotations

import gc
from pathlib import Path

import numpy as np
import pytest

from nearkin import open_store
from nearkin.lab.generated_data import mutate, text_like
from nearkin.local import local_gc
from nearkin.store import Store
from nearkin_maintenance.gc.mark import LiveSet
from nearkin_maintenance.optimize.rebase import container_rebase, rebase_batch
from nearkin_maintenance.optimize.rebase.container_rebase import RebaseContext
from nearkin_maintenance.optimize.rebase.stream_positions import estimate_positions
from nearkin_shared.errors import Corrupt
from nearkin_shared.formats import container_layout
from nearkin_shared.formats.block_kinds import merged_blocks
from nearkin_shared.reading.block_cache import CACHE_BYTES
from nearkin_shared.reading.read_plan import BlockName
from nearkin_shared.storage.containers import ContainerStore
from nearkin_shared.types import ContainerId
from tests.support.checks.gc_checks import COLLECTED
from tests.support.data.stores import containers, flip, settings, stored_bytes
from tests.support.fakes.clock import DAY, Clock

SMALL_BLOCKS = settings(
    COLLECTED, {"block": {"raw_bytes": "64KiB", "delta_bytes": "16KiB"}, "delta": {"codec": "patch", "max_depth": 4}}
)
KEPT = range(8, 15)


def history(versions: int) -> dict[int, bytes]:
    content, found = text_like(1_500_000, 3), {}
    for number in range(1, versions + 1):
        content = found[number] = mutate(content, number, edits=150, edit_bytes_max=40)
    return found


HISTORY = history(14)


def open_aged(root: Path, clock: Clock, chosen: object = SMALL_BLOCKS) -> Store:
    """Return a store one GC run before the dependents of its deleted versions are rewritten."""
    store = open_store(root, settings=chosen, clock=clock, create=True)  # type: ignore[arg-type]
    for number, content in HISTORY.items():
        store.put("k", content)
        if number not in KEPT:
            store.delete("k", number)
    clock.now += 8 * DAY
    store.gc()
    clock.now += DAY
    return store


def check(store: Store) -> None:
    assert store.verify().damage == ()
    for number in KEPT:
        assert store.get("k", number).read() == HISTORY[number]


def decoded_bytes_of_gc_run(store: Store, monkeypatch: pytest.MonkeyPatch) -> int:
    """Do a GC run with a cache of 2 MiB of blocks; return the bytes that it decodes."""
    found, real = [0], ContainerStore.cache_blocks

    def keep(self: ContainerStore, names: list[BlockName], decoded: list[np.ndarray]) -> None:
        found[0] += sum(map(len, decoded))
        real(self, names, decoded)

    with monkeypatch.context() as patched:
        patched.setattr(ContainerStore, "cache_blocks", keep)
        patched.setattr(local_gc, "BLOCKS_BYTES", 2 << 20)
        assert store.gc().containers_rewritten >= len(KEPT)
    return found[0]


@pytest.mark.soak
def test_shared_bases_are_decoded_once(tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode what all containers depend on once, not once for each."""
    monkeypatch.setattr(container_rebase, "POSITION_CHUNKS", 16)
    with open_aged(tmp_path / "side", clock) as side:
        together = decoded_bytes_of_gc_run(side, monkeypatch)
        check(side)
    monkeypatch.setattr(RebaseContext, "positions_at", lambda _self, _container, rows: np.zeros(len(rows), np.int64))
    with open_aged(tmp_path / "one", clock) as one:
        assert together < 0.6 * decoded_bytes_of_gc_run(one, monkeypatch)
        check(one)


@pytest.mark.parametrize("bound", [("SIDE_BYTES_MAX", 1), pytest.param(("SIDE_CHUNKS_MAX", 1), marks=pytest.mark.soak)])
def test_oversized_batch_is_split(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch, bound: tuple[str, int]
) -> None:
    """Rebase containers in turn that are too large together."""
    with open_aged(tmp_path / "all", clock) as store:
        rewritten = store.gc().containers_rewritten
        all_bytes = stored_bytes(store.root)
    monkeypatch.setattr(rebase_batch, *bound)
    with open_aged(tmp_path / "turn", clock) as store:
        assert store.gc().containers_rewritten == rewritten > 1
        assert stored_bytes(store.root) < 1.05 * all_bytes
        check(store)


def test_containers_before_damage_are_rewritten(tmp_path: Path, clock: Clock) -> None:
    """Rewrite containers before a damaged one; leave the others unchanged."""
    store = open_aged(tmp_path / "s", clock)
    root = store.root
    store.close()
    broken = containers(root)[KEPT[3] - 1]
    flip(broken, 200)
    before = {path.name.split(".")[0]: path.name for path in containers(root)}
    with (
        open_store(root, settings=SMALL_BLOCKS, clock=clock, create=True) as store,
        pytest.raises(Corrupt, match=broken.name.split(".")[0]),
    ):
        store.gc()
    after = {path.name.split(".")[0]: path.name for path in containers(root)}
    renewed = [name in after and after[name] != old for name, old in sorted(before.items())]
    at = sorted(before).index(broken.name.split(".")[0])
    assert any(renewed[:at])
    assert not any(renewed[at:])
    with open_store(root, settings=SMALL_BLOCKS, clock=clock, create=True) as store:
        for number in KEPT[:3]:
            assert store.get("k", number).read() == HISTORY[number]


def test_reencoded_patch_block_holds_neighbours(tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Group chunks near each other in a re-encoded patch block."""
    monkeypatch.setattr(container_rebase, "POSITION_CHUNKS", 16)
    large = settings(SMALL_BLOCKS, {"block": {"raw_bytes": "512KiB", "delta_bytes": "512KiB"}})
    with open_aged(tmp_path / "s", clock, large) as store:
        before = {c: len(store._containers.directory(c).blocks) for c, _ in store._containers.ids()}
        store.gc()
        patches = 0
        for container, _ in store._containers.ids():
            directory = store._containers.directory(container)
            for number in np.flatnonzero(
                (directory.blocks.raw > 0) & (directory.blocks.kinds == container_layout.PATCH)
            ):
                rows = np.flatnonzero(directory.chunks.there & (directory.chunks.blocks == number))
                patches += int(number >= before[container])
                assert number < before[container] or rows[-1] - rows[0] < 32
        assert patches > len(KEPT)


def test_gc_run_frees_its_cache_at_the_end(tmp_path: Path, clock: Clock) -> None:
    """Release the caches of a GC run without the garbage collector."""

    def cached_bytes() -> float:
        return sum(CACHE_BYTES.values().values())

    with open_aged(tmp_path / "s", clock) as store:
        gc.collect()
        gc.disable()
        try:
            store.get("k", KEPT[-1]).read()
            before_bytes = cached_bytes()
            assert store.gc().containers_rewritten
            assert cached_bytes() <= before_bytes
            assert not store._containers.buffers.unused_bytes
        finally:
            gc.enable()


def reach_of(store: Store) -> LiveSet:
    names = [name for name, _ in store._manifests.names_and_marks()[0]]
    return LiveSet(store._containers.of(None), store._manifests, names)


GATHERED = settings(
    COLLECTED,
    {
        "block": {"raw_bytes": "256KiB", "delta_bytes": "64KiB"},
        "delta": {"codec": "patch", "max_depth": 2},
        "gc": {"merge_block_bytes": "1MiB", "merge_versions_min": 2},
    },
)


def test_chunks_are_ordered_by_base_position(tmp_path: Path, clock: Clock) -> None:
    with open_store(tmp_path / "s", settings=GATHERED, clock=clock, create=True) as store:
        for number in HISTORY:
            store.put("k", HISTORY[number])
        for _ in range(2):
            reach = reach_of(store)
            places = estimate_positions(reach, reach.transitive_closure(reach.chunks))
            for container, _ in store._containers.ids():
                chunks = reach.directory(container).chunks
                own = np.flatnonzero(chunks.depths >= 0)[: len(chunks) - len(chunks) % 16]
                found = places.positions_of(container, own)
                named = _share_of_stream(store, container)
                known = ~np.isnan(named[own])
                assert np.abs(found[known] / found[known].max() - named[own][known]).mean() < 0.1
            store.gc()
        assert any(merged_blocks(reach_of(store).directory(c)).any() for c, _ in store._containers.ids())


def _share_of_stream(store: Store, container: ContainerId) -> np.ndarray:
    """Return the chunks' relative positions in their first version.

    Nan if no version has them.
    """
    directory = store._containers.of(None).directory(container)
    found = np.full(len(directory.chunks), np.nan)
    own = directory.segments.chunks
    mine = own.containers == np.uint64(container)
    found[own.ordinals[mine]] = np.flatnonzero(mine) / len(own)
    return found


def test_raw_blocks_are_copied_unchanged(tmp_path: Path, clock: Clock) -> None:
    """Copy raw blocks unchanged; their depth never increases."""
    with open_aged(tmp_path / "s", clock) as store:
        own = store._containers.of(None)
        before = {c: own.directory(c).blocks for c, _ in own.ids()}
        records = {
            (c, n): bytes(own.record(c, n)) for c, table in before.items() for n in np.flatnonzero(table.raw).tolist()
        }
        store.gc()
        shallower = 0
        for container, _ in own.ids():
            now, old = own.directory(container).blocks, before[container]
            for number in np.flatnonzero(now.raw[: len(old)]).tolist():
                assert bytes(own.record(container, number)) == records[container, number]
                assert now.depths[number] <= old.depths[number]
                shallower += int(now.depths[number] < old.depths[number])
        assert shallower > len(KEPT)
        check(store)
        assert store.rebuild_index().skipped == ()
        check(store)


def test_container_of_recipes_alone_is_handled(tmp_path: Path, clock: Clock) -> None:
    """Collect a container with recipes only: no chunk of zeros is stored.

    Every later GC run failed once one had marked something for deletion.
    """
    base = text_like(400_000, 1)
    with open_store(
        tmp_path / "s", settings=settings({"deletion": {"undelete_seconds": 0}}), clock=clock, create=True
    ) as store:
        for content in (base, mutate(base, 1, edits=400, edit_bytes_max=60)):
            store.put("a", content)
        store.put("x", text_like(3_000, 5))
        store.put("y", text_like(3_000, 6))
        store.put("z", bytes(100_000))
        store.delete("a", 1)
        clock.now += DAY
        assert store.gc().pending_delete_containers == 1
        clock.now += DAY
        report = store.gc()
        assert (report.containers_rewritten, report.containers_deleted) == (1, 1)
        assert store.get("z").read() == bytes(100_000)
        assert store.verify().damage == ()

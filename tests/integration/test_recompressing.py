"""Test recompression: GC runs compress again, once, what puts compressed fast."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nearkin import open_store
from nearkin.block_recoder import BlockRecoder
from nearkin.lab.generated_data import mutate, random_bytes, text_like
from nearkin.store import Store
from nearkin_delta import block_encoder
from nearkin_maintenance.gc.mark import LiveSet
from nearkin_maintenance.optimize import recompress
from nearkin_maintenance.optimize.recompress import Recompressor
from nearkin_shared.errors import Corrupt
from nearkin_shared.formats import container_layout
from nearkin_shared.formats.directory import Directory
from nearkin_shared.types import U8
from tests.support.checks.gc_checks import COLLECTED, collect_repeatedly, kill_during_gc
from tests.support.data.stores import ENCRYPTED, containers, flip, settings, stored_bytes
from tests.support.fakes.clock import DAY, Clock

LARGER: Mapping[str, Mapping[str, object]] = {
    "block": {"raw_bytes": "1MiB"},
    "container": {"target_bytes": "4MiB"},
    "gc": {"merge_block_bytes": 0},
}
CHOSEN = settings(COLLECTED, LARGER)
FIRST = text_like(4_000_000, 1)
SECOND = mutate(FIRST, 2, edits=100)


def put(store: Store) -> None:
    store.put("k", FIRST)
    store.put("k", SECOND)


def check(store: Store) -> None:
    assert store.verify().damage == ()
    assert store.get("k", 1).read() == FIRST
    assert store.get("k", 2).read() == SECOND
    assert store.get("k", 2, start=1_500_000, stop=1_600_000).read() == SECOND[1_500_000:1_600_000]


def directories(store: Store) -> dict[int, Directory]:
    """Return the directory of every container as stored."""
    found = store._containers.of(None)
    found.evict()
    return {container: found.directory(container) for container, _ in found.ids()}


def generations(store: Store) -> list[int]:
    return [max(numbers) for numbers in store._containers.generations().values()]


@pytest.fixture
def store(tmp_path: Path, clock: Clock) -> Iterator[Store]:
    with open_store(tmp_path / "r", settings=CHOSEN, clock=clock, create=True) as opened:
        yield opened


def test_gc_run_shrinks_raw_blocks_only(store: Store, clock: Clock) -> None:
    put(store)
    before_bytes, before = stored_bytes(store.root), directories(store)
    predicted, report = store.gc(dry_run=True), store.gc()
    assert predicted.freed_bytes == report.freed_bytes == before_bytes - stored_bytes(store.root) > before_bytes // 20
    assert predicted.containers_rewritten == report.containers_rewritten > 0
    for container, now in directories(store).items():
        old = before[container]
        for field in ("names", "lengths", "blocks", "positions", "encoded", "depths", "ranks"):
            assert np.array_equal(getattr(now.chunks, field), getattr(old.chunks, field)), field
        assert np.array_equal(now.chunks.bases.ordinals, old.chunks.bases.ordinals)
        assert np.array_equal(now.segments.bounds, old.segments.bounds)
        raw = old.blocks.kinds == container_layout.RAW
        assert np.array_equal(now.blocks.raw, old.blocks.raw)
        assert np.array_equal(now.blocks.stored[~raw], old.blocks.stored[~raw])
        assert np.all(now.blocks.stored[raw] <= old.blocks.stored[raw])
    check(store)
    assert store.stats().ledger.stored_bytes == stored_bytes(store.root)
    clock.now += DAY
    assert store.gc().containers_rewritten == 0  # once


def test_index_rebuild_and_puts_continue(store: Store) -> None:
    put(store)
    store.gc()
    assert store.rebuild_index().skipped == ()
    check(store)
    assert store.put("again", SECOND).ledger.unique_bytes == 0
    third = mutate(SECOND, 3, edits=50)
    assert store.put("k", third).ledger.stored_bytes < len(third) // 20  # it finds its bases
    assert store.get("k", 3).read() == third


@pytest.mark.parametrize(
    "chosen",
    [{"gc": {"recompress_level": 0}}, {"gc": {"recompress_level": 3}}, {"block": {"level": 9}}],
    ids=["never", "no more than a put", "as a put"],
)
def test_incompressible_block_is_left(tmp_path: Path, clock: Clock, chosen: Mapping[str, Mapping[str, object]]) -> None:
    with open_store(tmp_path / "off", settings=settings(CHOSEN, chosen), clock=clock, create=True) as store:
        put(store)
        assert store.gc().containers_rewritten == 0


def test_random_or_mostly_delta_data_is_left(store: Store, clock: Clock) -> None:
    """Leave random bytes and containers of mostly deltas unchanged."""
    put(store)
    store.gc()
    store.put("random", random_bytes(2_000_000, 7))
    store.put("k", mutate(SECOND, 4, edits=400))
    assert store.gc().containers_rewritten == 0
    assert sorted(generations(store), reverse=True)[-2:] == [0, 0]


def test_rewrite_also_recompresses(tmp_path: Path, clock: Clock) -> None:
    """Recompress while a container is rewritten for another reason.

    Its generation is later then, and no GC run considers it again.
    """
    parts = {f"k{number}": text_like(900_000, number) for number in range(4)}
    left = {}
    for level in (0, 9):
        chosen = settings(CHOSEN, {"gc": {"recompress_level": level}, "container": {"target_bytes": "16MiB"}})
        with open_store(tmp_path / f"level {level}", settings=chosen, clock=clock, create=True) as store:
            list(store.put_many(parts.items()))
            assert len(containers(store.root)) == 1
            for number in range(2):
                store.delete(f"k{number}")
            clock.now += 8 * DAY
            # As if recent containers could not be: so that the run that frees is the first to rewrite it.
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(Recompressor, "chosen", lambda *_: [])
                collect_repeatedly(store, clock)
            assert generations(store) == [1]
            for number in range(2, 4):
                assert store.get(f"k{number}").read() == parts[f"k{number}"]
            left[level] = stored_bytes(store.root)
    assert left[9] < 0.95 * left[0]


def test_bytes_per_run_are_bounded_oldest_first(store: Store, monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    monkeypatch.setattr(recompress, "RUN_BYTES_MAX", 1)
    for number in range(3):
        store.put(f"k{number}", text_like(900_000, number))
    for done in range(1, 4):
        assert store.gc().containers_rewritten == 1
        ids = sorted(container for container, _ in store._containers.ids())
        assert [store._containers.generation(c) for c in ids] == [1] * done + [0] * (3 - done)
        clock.now += DAY


def test_recent_containers_are_left_alone(store: Store) -> None:
    store.put("a", text_like(900_000, 1))
    store.put("b", text_like(900_000, 2))
    found = store._containers.of(None)
    names = [name for name, _ in store._manifests.names()]
    sizes: dict[int, int] = {container: size for container, size in found.ids()}  # noqa: C416 - the keys are widened
    reach = LiveSet(found, store._manifests, names)
    recompressor = Recompressor(found, BlockRecoder(CHOSEN))
    first, second = recompressor.chosen(sizes, [], reach)
    assert first < second
    assert recompressor.chosen(sizes, [first], reach) == [second]


def test_pending_deletes_are_not_recompressed(store: Store, clock: Clock) -> None:
    """Leave containers pending delete alone, but not their bases.

    The second version depends on the first, which is deleted; nothing depends on another key.
    """
    put(store)
    store.put("alone", text_like(900_000, 9))
    store.delete("k", 1)
    store.delete("alone")
    clock.now += 8 * DAY
    report = store.gc()
    assert report.pending_delete_containers > 0
    by_age = [store._containers.generation(c) for c, _ in sorted(store._containers.ids())]
    assert by_age[-1] == 0
    assert by_age[0] == 1
    assert store.get("k", 2).read() == SECOND
    collect_repeatedly(store, clock)
    assert store.get("k", 2).read() == SECOND


@pytest.mark.parametrize("of", [1, 2])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_damaged_container_is_left_others_not(
    store: Store, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, place: int, of: int
) -> None:
    monkeypatch.setattr("nearkin_shared.utils.thread_pool.cores", lambda: of)
    for number in range(3):
        store.put(f"{number}", text_like(900_000, number))
    broken = containers(store.root)[place]
    flip(broken, 5000)
    store._containers.evict()
    with caplog.at_level(logging.WARNING):
        report = store.gc()
    assert report.containers_rewritten == 2
    assert caplog.text.count("is not recompressed") == 1
    assert broken.exists()
    for number in {0, 1, 2} - {place}:
        assert store.get(f"{number}").read() == text_like(900_000, number)


@pytest.mark.parametrize("of", [1, 2])
def test_undecodable_block_leaves_its_container(
    store: Store, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, of: int
) -> None:
    monkeypatch.setattr("nearkin_shared.utils.thread_pool.cores", lambda: of)
    for number in range(3):
        store.put(f"{number}", text_like(900_000, number))
    first, second, third = containers(store.root)
    real, mine = block_encoder.encode_again, text_like(900_000, 1)[:1000]

    def encode(chunks: U8, level: int, encoder: Any) -> Any:
        if chunks[:1000].tobytes() == mine:
            raise Corrupt("a block just compressed does not decompress to what it was: check this machine's memory")
        return real(chunks, level, encoder)

    monkeypatch.setattr(block_encoder, "encode_again", encode)
    with caplog.at_level(logging.WARNING):
        assert store.gc().containers_rewritten == 2
    assert "check this machine's memory: the container is not recompressed" in caplog.text
    assert second.exists()
    assert not first.exists()
    assert not third.exists()
    assert store.verify().damage == ()
    assert not [one for one in threading.enumerate() if one.name.startswith("nearkin-recode")]


@pytest.mark.parametrize(
    ("point", "times"), [("compact.made", 1), ("compact.put", 1), ("compact.renewed", 1), ("recompress.container", 1)]
)
def test_killed_gc_run_loses_nothing(tmp_path: Path, clock: Clock, point: str, times: int) -> None:
    """Lose nothing in a GC run killed during recompression; the next one continues."""
    chosen: Mapping[str, Mapping[str, object]] = {**LARGER, "container": {"target_bytes": "256KiB"}}
    root = tmp_path / "d"
    with open_store(root, settings=settings(COLLECTED, chosen), clock=clock, create=True) as store:
        put(store)
        assert len(containers(root)) > 2
    kill_during_gc(root, chosen, point, times)
    with open_store(root, settings=settings(COLLECTED, chosen), clock=clock, create=True) as store:
        check(store)
        assert store.gc().containers_rewritten > 0
        check(store)
        assert store.gc().containers_rewritten == 0


@pytest.mark.parametrize("how", [ENCRYPTED, {"storage": {"parity": "rs-4-2"}}], ids=["encrypted", "parity"])
def test_store_with_parity_and_keys_recompresses(
    tmp_path: Path, clock: Clock, how: Mapping[str, Mapping[str, object]]
) -> None:
    """Recompress in a store that keeps more than the objects."""
    with open_store(tmp_path / "e", settings=settings(CHOSEN, how), clock=clock, create=True) as store:
        put(store)
        before_bytes = stored_bytes(store.root)
        report = store.gc()
        assert report.containers_rewritten > 0
        assert stored_bytes(store.root) < before_bytes - before_bytes // 20
        check(store)


def test_damage_is_named_at_its_location(store: Store) -> None:
    put(store)
    store.gc()
    (broken,) = (path for path in containers(store.root) if path.name.endswith(".0001.nkc"))
    flip(broken, 5000)
    store._containers.evict()
    report = store.verify()
    name = str(broken.relative_to(store.root))
    assert [damage.object_name for damage in report.damage] == [name]
    assert report.damage[0].problem.startswith(name)
    assert report.damage[0].versions == (("k", 1), ("k", 2))

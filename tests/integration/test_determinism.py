"""Test determinism: stored bytes depend on the puts, never on timing, queues or store ids."""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from nearkin import open_store
from nearkin.embedded import runner
from nearkin.lab.generated_data import mutate, random_bytes, records_like, text_like
from nearkin_delta.block_encoder import BlockEncoder
from nearkin_shared.objectstore.local import LocalObjectStore
from tests.support.data.stores import SMALL, containers, settings

FIRST = text_like(3_000_000, 1) + bytes(1_000_000) + records_like(2_000_000, 2) + random_bytes(500_000, 3)
Changes = Mapping[str, Mapping[str, object]]
HISTORY = [FIRST, mutate(FIRST, 1, edits=300), mutate(FIRST, 2, edits=500)]


def store_and_describe(root: Path, changes: Changes, history: Sequence[bytes] = HISTORY) -> tuple[Any, ...]:
    with open_store(root, settings=settings(SMALL, changes), create=True) as store:
        for content in history:
            store.put("k", content)
        list(store.put_many((f"part {number}", FIRST[number * 7000 :][:20_000]) for number in range(40)))
        stats = store.stats()
        explained = [
            (chunk.offset, chunk.kind, chunk.fingerprint, chunk.depth, chunk.base_fingerprint, chunk.found_by)
            for version in (1, 2, 3)
            for segment in store.explain("k", version).segments
            for chunk in segment.chunks
        ]
        counts = {
            name: getattr(stats.ledger, name)
            for name in (field.name for field in fields(stats.ledger))
            if name != "stored_bytes"
        }
        return counts, stats.depths, stats.containers, stats.segments, explained


@pytest.mark.parametrize("algorithm", ["finesse", pytest.param("odess", marks=pytest.mark.soak)])
def test_stored_bytes_ignore_queue_state(algorithm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Store the same puts the same way, whatever the queues contain."""

    def store_with(name: str, queue_batches: int) -> tuple[Any, ...]:
        monkeypatch.setattr(runner, "QUEUE_BATCHES", queue_batches)
        return store_and_describe(tmp_path / name, {"features": {"algorithm": algorithm}})

    first = store_with("a", 0)
    assert first[0]["delta_chunks"] > 100  # there is something that could differ
    for name, queue_batches in (("b", 1), ("c", 4), ("d", 4), ("e", 16)):
        assert store_with(name, queue_batches) == first


def test_slow_disk_changes_no_stored_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "QUEUE_BATCHES", 4)
    quick = store_and_describe(tmp_path / "quick", {})
    real = LocalObjectStore.put_new

    def slow(self: Any, name: str, *parts: Any) -> Any:
        time.sleep(0.01 if "containers" in name else 0)
        real(self, name, *parts)

    monkeypatch.setattr(LocalObjectStore, "put_new", slow)
    assert store_and_describe(tmp_path / "slow", {}) == quick


def test_slow_encoding_changes_nothing_that_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "QUEUE_BATCHES", 4)
    changes: Changes = {"runner": {"batch_bytes": "2MiB"}, "container": {"target_bytes": "1MiB"}}
    quick = store_and_describe(tmp_path / "quick", changes)
    assert quick[2] >= 3, "containers are filled before the last batch"
    real = BlockEncoder.close

    def slow(self: Any, block: Any) -> Any:
        time.sleep(0.03 * (block.number % 3))  # blocks that are encoded side by side end in another order
        return real(self, block)

    monkeypatch.setattr(BlockEncoder, "close", slow)
    assert store_and_describe(tmp_path / "slow", changes) == quick


@pytest.mark.parametrize("crowded", [False, True])
@pytest.mark.parametrize("far", [False, pytest.param(True, marks=pytest.mark.soak)])
def test_stored_bytes_ignore_the_core_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, crowded: bool, far: bool
) -> None:
    """Store with one and three cores what two store."""
    if crowded:  # blocks are handed over in the midst of a batch, and more are closed than may wait
        monkeypatch.setattr("nearkin_delta.container_builder.HANDED_BYTES", 64 << 10)
        monkeypatch.setattr("nearkin_delta.container_builder.CLOSING_BYTES_MAX", 1 << 20)
    if far:  # the size of one block decides how the next one is written
        monkeypatch.setattr("nearkin_delta.compression_params.FAR_BYTES_MIN", 1 << 14)
    changes: Changes = {
        "runner": {"batch_bytes": "2MiB"},
        "container": {"target_bytes": "1MiB"},
        "delta": {"max_depth": 2},
        "block": {"thorough": far},
    }
    base = text_like(1_500_000, 5)
    # The bases of each batch are in the container that the previous batch filled; their depth depends on its end.
    in_itself = b"".join(mutate(base, number, edits=200 * number) for number in range(8))

    def store_on(count: int) -> tuple[Any, ...]:
        monkeypatch.setattr("nearkin.embedded.runner.cores", lambda: count)
        return store_and_describe(tmp_path / str(count), changes, [*HISTORY, in_itself])

    two = store_on(2)
    assert two[2] >= 3, "containers are filled before the last batch"
    assert store_on(1) == two
    assert store_on(3) == two


@pytest.mark.parametrize("merge_block_bytes", ["1MiB", "0"], ids=["gathered", "compressed further"])
def test_gc_run_ignores_the_core_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, merge_block_bytes: str) -> None:
    """Write in a GC run on one and three cores what two write."""
    changes = {
        "block": {"raw_bytes": "256KiB", "delta_bytes": "64KiB"},
        "container": {"target_bytes": "512KiB"},
        "delta": {"max_depth": 2},
        "gc": {"merge_block_bytes": merge_block_bytes, "merge_versions_min": 2},
    }
    content = text_like(1_500_000, 5)
    with open_store(tmp_path / "put", settings=settings(SMALL, changes), create=True) as store:
        for number in range(8):
            content = mutate(content, number, edits=300, edit_bytes_max=40)
            store.put("k", content)
        store.put("another", text_like(900_000, 6))

    def collect_on(count: int) -> tuple[int, dict[str, bytes]]:
        monkeypatch.setattr("nearkin_shared.utils.thread_pool.cores", lambda: count)
        root = tmp_path / str(count)
        shutil.copytree(tmp_path / "put", root)
        with open_store(root, settings=settings(SMALL, changes), create=True) as store:
            report = store.gc()
            assert store.get("k").read() == content
        return report.containers_rewritten, {path.name: path.read_bytes() for path in containers(root)}

    two = collect_on(2)
    assert two[0] >= 2
    assert collect_on(1) == two
    assert collect_on(3) == two


def test_small_changes_fill_one_container(tmp_path: Path) -> None:
    """Fill one container over many batches of patches.

    Patches were counted at half their bytes: each batch ended a container, with a sync.
    """
    changes = {"runner": {"batch_bytes": "2MiB"}, "container": {"target_bytes": "256KiB"}}
    with open_store(tmp_path / "s", settings=settings(changes), create=True) as store:
        store.put("k", FIRST)
        before = store.stats().containers
        info = store.put("k", mutate(FIRST, 1, edits=100)).info
        assert store.stats().containers == before + 1
        assert store.get("k", version=info.version).read() == mutate(FIRST, 1, edits=100)

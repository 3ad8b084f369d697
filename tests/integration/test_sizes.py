"""Test sizes one byte below and above each bound: chunk, segment, block, batch, container."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import fields
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, cast

import pytest

from nearkin import open_store
from nearkin.lab.generated_data import mutate, random_bytes, text_like
from nearkin.store import Store
from nearkin_shared.config.reduction import CHUNKERS
from nearkin_shared.results import PutResult
from tests.support.data.stores import SMALL, settings

if TYPE_CHECKING:
    from typing_extensions import Buffer


KIB = 1024
BOUNDS = {
    "chunk": 8 * KIB,
    "largest chunk": 64 * KIB,
    "container": 256 * KIB,
    "segment": 900 * KIB,
    "batch": 2048 * KIB,
    "batch and what it may carry over": 3072 * KIB,
    "two batches": 4096 * KIB,
}
RANDOM = random_bytes(4096 * KIB + 1, 11)


@pytest.mark.parametrize("chunker", CHUNKERS)
def test_sizes_around_every_bound_are_restored(chunker: str, tmp_path: Path) -> None:
    with open_store(
        tmp_path / "s", settings=settings(SMALL, {"chunker": {"algorithm": chunker}}), create=True
    ) as store:
        for size in [0, 1, 2, *(bound + off for bound in BOUNDS.values() for off in (-1, 0, 1))]:
            for content in (RANDOM[:size], bytes(size)):
                result = store.put("k", content)
                assert (result.info.size_bytes, result.ledger.logical_bytes) == (size, size)
                assert store.get("k").read() == content
                assert store.get("k", start=max(0, size - 3)).read() == content[max(0, size - 3) :]
        assert store.verify().damage == ()
    with open_store(tmp_path / "s", settings=settings(SMALL), create=True) as store:
        assert store.get("k").read() == bytes(BOUNDS["two batches"] + 1)
        assert store.rebuild_index().skipped == ()
        assert store.verify().damage == ()


@pytest.mark.parametrize("size", [8 * KIB - 1, 8 * KIB, 8 * KIB + 1])
def test_fixed_chunks_end_where_they_should(size: int, tmp_path: Path) -> None:
    with open_store(
        tmp_path / "s", settings=settings(SMALL, {"chunker": {"algorithm": "fixed"}}), create=True
    ) as store:
        ledger = store.put("k", RANDOM[:size]).ledger
        assert ledger.chunks == 1 + (size > 8 * KIB)
        assert next(c.length_bytes for s in store.explain("k").segments for c in s.chunks) == min(size, 8 * KIB)


@pytest.mark.parametrize("pieces", [1, 7, 4096, 100_003])
def test_pieces_of_a_source_do_not_matter(pieces: int, tmp_path: Path) -> None:
    """Store the same for any pieces: a pipe returns what it has."""

    class Trickling(BytesIO):
        def readinto(self, window: Buffer) -> int:
            return super().readinto(memoryview(window)[:pieces])

    class OnlyReads:
        def __init__(self, data: bytes) -> None:
            self._file = BytesIO(data)

        def read(self, count: int) -> bytes:
            return self._file.read(min(count, pieces))

    size = 20_000 if pieces == 1 else 150_000 if pieces == 7 else 1_400_000
    text = text_like(size, 5)  # its copies are similar to this batch or the last one: its end matters
    content = text + mutate(text, 1, edits=size // 5000) + mutate(text, 2, edits=size // 5000)
    ledgers = []
    for number, source in enumerate((content, Trickling(content), OnlyReads(content))):
        with open_store(tmp_path / str(number), settings=settings(SMALL), create=True) as store:
            store.put("k", cast("BinaryIO", source))
            assert store.get("k").read() == content
            ledgers.append(counts(store))
    assert ledgers[0] == ledgers[1] == ledgers[2]


def test_blobs_of_one_call_restore_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore many blobs of one call in order over several groups."""
    from nearkin.embedded import runner as embedded_runner

    monkeypatch.setattr(embedded_runner, "GROUP_BLOBS_MAX", 64)  # not 4096: each blob is a file to sync
    sizes = [number % 50 for number in range(420)]  # sizes from nothing to several batches among them
    sizes[100], sizes[200], sizes[419] = len(RANDOM), 900 * KIB, 2048 * KIB
    items = [(f"k{number % 400}", RANDOM[number : number + size]) for number, size in enumerate(sizes)]
    with open_store(tmp_path / "s", settings=settings(SMALL), create=True) as store:
        results = list(store.put_many(items))
        assert [(r.info.key, r.info.size_bytes) for r in results] == [(key, len(content)) for key, content in items]
        assert sum(r.ledger.stored_bytes for r in results) + store.stats().parts["descriptor"] == (
            store.stats().ledger.stored_bytes
        )
        for (key, content), result in list(zip(items, results, strict=True))[::97]:
            assert store.get(key, result.info.version).read() == content
        assert len(store.versions()) == 400
        assert store.versions("k39") == [info for info in store.versions() if info.key.startswith("k39")]
        assert store.verify().versions == 420


def test_consumer_stopping_early_loses_the_rest(tmp_path: Path) -> None:
    """Lose only the blobs that a consumer did not wait for."""
    with open_store(tmp_path / "s", settings=settings(SMALL), create=True) as store:
        results = cast("Generator[PutResult]", store.put_many((f"k{number}", b"%d" % number) for number in range(10)))
        first = next(results)
        results.close()
        assert store.get(first.info.key).read() == b"0"
        assert list(store.put_many([])) == []
        assert store.put("later", b"x").info.version == 1


def counts(store: Store) -> dict[str, int]:
    ledger = store.stats().ledger
    return {field.name: getattr(ledger, field.name) for field in fields(ledger) if field.name != "stored_bytes"}


def test_closed_store_frees_memory_blobs_read_on(tmp_path: Path) -> None:
    """Free what a closed store has read; a blob of it can still be read."""
    content = text_like(3_000_000, 1)
    with open_store(tmp_path / "store", create=True) as store:
        store.put("k", content)
        blob = store.get("k")
        assert blob.read() == content
        assert store._containers.blocks.used_bytes >= len(content)
    # A reference cycle keeps the store until the garbage collector runs, which takes long in some processes.
    assert store._containers.blocks.used_bytes == 0
    blob.seek(0)
    assert blob.read() == content

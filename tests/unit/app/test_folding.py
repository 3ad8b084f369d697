"""Check that a batch of known segments has the same result on every path."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import nearkin
from nearkin.embedded.runner import _shares
from nearkin.lab.generated_data import random_bytes, text_like
from nearkin_delta import ChunkCounts, DeltaStage
from nearkin_delta.container_builder import ContainerBuilder
from nearkin_shared.results import Ledger


def edited(data: bytes, seed: int) -> bytes:
    """Return `data` with some bytes changed at random offsets."""
    out, rng = bytearray(data), np.random.default_rng(seed)
    for at in rng.integers(0, len(out) - 40, 12).tolist():
        out[at : at + 20] = random_bytes(20, at)
    return bytes(out)


def stored(root: Path, versions: list[bytes]) -> list[Ledger]:
    with nearkin.open_store(root, create=True) as store:
        ledgers = [store.put("k", data).ledger for data in versions]
        for number, data in enumerate(versions, 1):
            assert store.get("k", number).read() == data
    return ledgers


@pytest.mark.parametrize("make", [text_like, random_bytes])
def test_known_segments_have_results_of_the_general_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[int, int], bytes]
) -> None:
    first = make(10_000_000, 3)
    half = first[:9_000_000] + edited(first[9_000_000:], 5)  # a batch of known segments, then fresh chunks
    versions = [first, first, half, half + bytes(2_000_000), first[2_000_000:] + first]
    short = stored(tmp_path / "short", versions)
    folded = []
    plain = DeltaStage.fold
    monkeypatch.setattr(
        DeltaStage, "fold", lambda stage, fresh, sketch: folded.append(1) or plain(stage, fresh, sketch)
    )
    assert stored(tmp_path / "again", versions) == short
    assert folded
    monkeypatch.setattr(DeltaStage, "fold", None)
    monkeypatch.setattr("nearkin.embedded.runner.is_all_duplicate", lambda fresh: False)
    long = stored(tmp_path / "long", versions)
    assert long == short


def test_shares_of_one_blob_equal_the_general_path() -> None:
    rng = np.random.default_rng(1)
    count = 500

    def counts(blobs: np.ndarray) -> ChunkCounts:
        flags = rng.integers(0, 2, (3, count)).astype(np.bool_)
        lengths = rng.integers(1, 1 << 31, count).astype(np.uint32)
        return ChunkCounts(blobs.astype(np.uint32), lengths, flags[0], flags[1], flags[2] & ~flags[0], lengths // 3)

    one = counts(np.full(count, 7))
    two = ChunkCounts(np.append(one.blobs[:-1], 8), *(getattr(one, name) for name in ChunkCounts.__slots__[1:]))  # type: ignore[attr-defined]
    ((number, share),) = _shares(one)
    split = _shares(two)
    assert number == 7
    assert [blob for blob, _ in split] == [7, 8]
    assert share == [sum(columns) for columns in zip(*(part for _, part in split), strict=True)]
    assert _shares(counts(np.zeros(count)))[0][0] == 0


def test_put_releases_its_memory_at_its_end(tmp_path: Path) -> None:
    data = text_like(3_000_000, 1)
    with nearkin.open_store(tmp_path / "s", create=True) as store:
        store.put("k", data)
        gc.collect()
        kinds = (ContainerBuilder, DeltaStage)
        others = [kept for kept in gc.get_objects() if isinstance(kept, kinds)]  # of tests before this one
        gc.disable()
        try:
            store.put("k", edited(data, 1))
            with pytest.raises(nearkin.BadInput):
                store.put("k", edited(data, 2), sha256=bytes(32))
            found = [kept for kept in gc.get_objects() if isinstance(kept, kinds)]
            left = [type(kept).__name__ for kept in found if not any(kept is other for other in others)]
        finally:
            gc.enable()
    assert left == []

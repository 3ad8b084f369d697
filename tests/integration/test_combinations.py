"""Test every choice by name with every other: all contents are restored."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from pathlib import Path

import pytest

from nearkin import open_store
from nearkin.embedded import runner
from nearkin.lab.generated_data import mutate, random_bytes, records_like, text_like
from nearkin_chunker import stage
from nearkin_delta import codecs
from nearkin_resemblance import feature_algorithms
from nearkin_shared.config.reduction import CHUNKERS, DELTA_CODECS, FEATURES
from tests.support.data.stores import SMALL, settings

FIRST = text_like(150_000, 1) + bytes(100_000) + random_bytes(60_000, 2) + records_like(90_000, 3)
VERSIONS = [FIRST]
for seed in range(1, 4):
    VERSIONS.append(mutate(VERSIONS[-1], seed, edits=12))
FRESH = VERSIONS[3][:200_000] + text_like(50_000, 9)


@pytest.mark.parametrize("chunker", CHUNKERS)
@pytest.mark.parametrize(("codec", "depth"), [*product(DELTA_CODECS, (1, 3))])
def test_chunker_codec_depth_features_restore(chunker: str, codec: str, depth: int, tmp_path: Path) -> None:
    """Restore under any chunker, codec and depth with every features algorithm."""
    small = settings(SMALL, {"chunker": {"algorithm": chunker}, "delta": {"codec": codec, "max_depth": depth}})
    for algorithm in FEATURES:
        root = tmp_path / algorithm
        with open_store(root, settings=settings(small, {"features": {"algorithm": algorithm}}), create=True) as store:
            for content in VERSIONS:
                store.put("k", content)
        with open_store(root, settings=small, create=True) as store:
            for version, content in enumerate(VERSIONS, 1):
                assert store.get("k", version).read() == content
            stats = store.stats()
            assert max(stats.depths) <= depth
            similar = codec != "none" and algorithm != "none" and chunker in ("fastcdc", "leastcdc", "rabin", "inck")
            if similar:
                assert stats.ledger.delta_chunks > 0
            if codec == "none":
                assert stats.ledger.delta_chunks == 0
            if algorithm == "none":  # no sketches: bases are found by locality only
                assert set(stats.found_by) <= {"locality"}
            assert store.verify().damage == ()
            explained = store.explain("k", 4)
            assert sum(segment.length_bytes for segment in explained.segments) == len(VERSIONS[3])


@pytest.mark.parametrize(
    "changes",
    [
        {"block": {"level": 1}},
        {"block": {"level": 19}},
        {"delta": {"max_depth": 16}},
        {"features": {"count": 4, "super_features": 4}},
        {"features": {"algorithm": "odess"}},
        {"chunker": {"min_bytes": 64, "target_bytes": 64, "max_bytes": 64}},
        {
            "chunker": {
                "min_bytes": 900 * 1024,
                "max_bytes": 900 * 1024,
                "target_bytes": 900 * 1024,
                "algorithm": "whole",
            }
        },
        {"chunker": {"min_bytes": 256, "target_bytes": 512, "max_bytes": 2048}},
        {"runner": {"batch_bytes": 64 << 20}},
        {"base": {"cache_bytes": 1 << 20}, "restore": {"cache_bytes": 8 << 20}},
        {"container": {"target_bytes": 64 << 20}, "block": {"raw_bytes": 30 << 20, "delta_bytes": 16 << 20}},
    ],
    ids=lambda changes: ",".join(f"{s}.{k}={v}" for s, section in changes.items() for k, v in section.items()),
)
def test_settings_at_their_bounds_restore(changes: Mapping[str, Mapping[str, object]], tmp_path: Path) -> None:
    if "chunker" in changes and changes["chunker"]["target_bytes"] == 900 * 1024:
        changes = {"chunker": {"algorithm": "whole"}}  # 900 KiB is no power of two: whole cuts there by itself
    with open_store(tmp_path / "s", settings=settings(SMALL, changes), create=True, force=True) as store:
        for content in [*VERSIONS, FRESH]:
            store.put("k", content)
        for version, content in enumerate([*VERSIONS, FRESH], 1):
            assert store.get("k", version).read() == content
        assert store.verify().damage == ()
    with open_store(tmp_path / "s", settings=settings(), create=True) as store:  # settings of the reader do not matter
        assert store.get("k", 4).read() == VERSIONS[3]


@pytest.mark.parametrize(
    ("changes", "window_bytes", "sampling_bits"),
    [
        ({"features": {"count": 4, "super_features": 4}}, 64, 7),
        ({"features": {"algorithm": "odess"}}, 48, 0),
    ],
    ids=["largest window", "each position sampled"],
)
def test_sketches_at_their_bounds_restore(
    changes: Mapping[str, Mapping[str, object]],
    window_bytes: int,
    sampling_bits: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(feature_algorithms, "WINDOW_BYTES", window_bytes)
    monkeypatch.setattr(feature_algorithms, "ODESS_SAMPLING_BITS", sampling_bits)
    test_settings_at_their_bounds_restore(changes, tmp_path)


def test_xdelta3_at_its_highest_level_restores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codecs, "XDELTA3_LEVEL", 9)
    test_settings_at_their_bounds_restore({"delta": {"codec": "xdelta3", "max_depth": 16}}, tmp_path)


@pytest.mark.parametrize(("target_chunks", "bytes_max", "queue_batches"), [(1, 900 * 1024, 0), (1024, 64 * 1024, 16)])
def test_segments_and_queues_at_their_bounds_restore(
    target_chunks: int, bytes_max: int, queue_batches: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage, "SEGMENT_CHUNKS_TARGET", target_chunks)
    monkeypatch.setattr(stage, "SEGMENT_BYTES_MAX", bytes_max)
    monkeypatch.setattr(runner, "QUEUE_BATCHES", queue_batches)
    test_settings_at_their_bounds_restore({}, tmp_path)


def test_store_continues_under_other_settings(tmp_path: Path) -> None:
    everything = []
    for number, (chunker, algorithm) in enumerate(product(CHUNKERS, FEATURES)):
        content = mutate(VERSIONS[number % 4], 100 + number)
        everything.append(content)
        changes = {
            "chunker": {"algorithm": chunker},
            "features": {"algorithm": algorithm},
            "delta": {"max_depth": 1 + number % 4},
            "block": {"level": 1 + number % 9},
        }
        with open_store(tmp_path / "s", settings=settings(SMALL, changes), create=True, force=True) as store:
            assert store.put("k", content).info.version == number + 1
    with open_store(tmp_path / "s", settings=settings(SMALL), create=True) as store:
        for version, content in enumerate(everything, 1):
            assert store.get("k", version).read() == content
        assert store.verify().damage == ()
        # lowering the cap later makes no stored chunk deeper, and none is ever above the highest there was
        assert max(store.stats().depths) <= 4


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_chains_of_deltas_reach_the_cap_and_never_pass_it(depth: int, tmp_path: Path) -> None:
    content, history = text_like(40_000, 7), []
    changes = {"delta": {"max_depth": depth}, "features": {"count": 6, "super_features": 6}}
    with open_store(
        tmp_path / "s", settings=settings(SMALL, {"chunker": {"algorithm": "whole"}}, changes), create=True
    ) as store:
        for seed in range(24):  # far from the first version in the end, near to the one before
            content = mutate(content, seed, edits=40, edit_bytes_max=100)
            history.append(content)
            store.put("k", content)
        assert max(store.stats().depths) == depth
        for version, was in enumerate(history, 1):
            assert store.get("k", version).read() == was


def test_changed_settings_apply_to_the_next_put(tmp_path: Path) -> None:
    """As the gateway does with hot ones: the same store stays open."""
    data = text_like(300_000, 1)
    with open_store(
        tmp_path / "s", settings=settings(SMALL, {"features": {"algorithm": "finesse"}}), create=True
    ) as store:
        store.put("k", data)
        store.settings = settings(SMALL, {"features": {"algorithm": "odess"}, "delta": {"codec": "none"}})
        store.put("k", mutate(data, 2, edits=30))
        assert {name.partition("/")[0] for name in store.stats().sketches} == {"finesse", "odess"}
        assert store.stats().ledger.delta_chunks == 0
        assert store.get("k", 1).read() == data

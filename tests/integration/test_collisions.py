"""Test SHA-1 collisions: two contents of one fingerprint stay two, published or generated."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from nearkin import open_store
from nearkin.lab.generated_data import mutate, random_bytes, text_like
from nearkin_shared.config.settings import Settings
from tests.support.data.stores import SMALL, settings

PAIR = Path(__file__).parents[1] / "data" / "sha1-collision"
SUFFIXES = [b"", b"!", b"one and the same ending " * 300, bytes(7000)]


@pytest.fixture(scope="module")
def pair() -> tuple[bytes, bytes]:
    files = [PAIR / f"sha-mbles-{number}.bin" for number in (1, 2)]
    one, other = (path.read_bytes() for path in files)
    return one, other


def whole(**changes: Mapping[str, object]) -> Settings:
    return settings(SMALL, {"chunker": {"algorithm": "whole"}}, changes)


@pytest.mark.parametrize("suffix", SUFFIXES, ids=len)
@pytest.mark.parametrize("swapped", [False, True])
def test_collision_pair_stays_two_contents(
    pair: tuple[bytes, bytes], suffix: bytes, swapped: bool, tmp_path: Path
) -> None:
    """Keep the published pair as two contents under two keys."""
    one, other = (content + suffix for content in (reversed(pair) if swapped else pair))
    assert one != other
    assert hashlib.sha1(one).digest() == hashlib.sha1(other).digest()
    with open_store(tmp_path / "s", settings=whole(), create=True) as store:
        first, second = store.put("one", one), store.put("other", other)
        assert second.ledger.duplicate_chunks == 0
        assert [r for r in store.put_many([("both", one), ("both", other)]) if r.ledger.duplicate_chunks != 1] == []
    assert first.info.digest != second.info.digest
    with open_store(tmp_path / "s", settings=whole(), create=True) as store:
        for key, version, content in [("one", 1, one), ("other", 1, other), ("both", 1, one), ("both", 2, other)]:
            assert store.get(key, version).read() == content
        (chunk_one,), (chunk_other,) = (store.explain(key).segments[0].chunks for key in ("one", "other"))
        assert chunk_one.fingerprint == chunk_other.fingerprint == hashlib.sha1(one).hexdigest()
        assert store.verify().damage == ()
        store.rebuild_index()
        assert store.put("again", other).ledger.duplicate_chunks == 1
        assert store.get("again").read() == other


def test_collision_pair_in_one_blob_stays_two(pair: tuple[bytes, bytes], tmp_path: Path) -> None:
    # 8192-byte pieces, each one chunk: both contents, several times, in one batch and in one segment
    one, other = (content + b"\7" * (8192 - len(content)) for content in pair)
    assert hashlib.sha1(one).digest() == hashlib.sha1(other).digest()
    blob = one + other + other + random_bytes(8192) + one + other
    with open_store(
        tmp_path / "s", settings=settings(SMALL, {"chunker": {"algorithm": "fixed"}}), create=True
    ) as store:
        put = store.put("k", blob)
        assert (put.ledger.chunks, put.ledger.duplicate_chunks) == (6, 3)
        store.put("turned", other + one)
        assert store.get("k").read() == blob
        assert store.get("turned").read() == other + one
        for start in range(0, len(blob), 8192):
            assert store.get("k", start=start, stop=start + 700).read() == blob[start : start + 700]
        assert store.verify().damage == ()


def test_segments_of_a_collision_are_distinct(pair: tuple[bytes, bytes], tmp_path: Path) -> None:
    """Distinguish segments that contain one or the other."""
    around = random_bytes(8192 * 5, 3)
    blobs = [around[:8192] + (content + b"\7" * (8192 - len(content))) + around[8192:] for content in pair]
    with open_store(
        tmp_path / "s", settings=settings(SMALL, {"chunker": {"algorithm": "fixed"}}), create=True
    ) as store:
        for key, blob in zip("ab", blobs, strict=True):
            store.put(key, blob)
        for key, blob in zip("ab", blobs, strict=True):
            assert store.get(key).read() == blob


@pytest.mark.parametrize("bits", [8, 16])
def test_versions_restore_despite_collisions(bits: int, tmp_path: Path) -> None:
    chosen = settings(
        SMALL,
        {"chunker": {"min_bytes": 64, "target_bytes": 128, "max_bytes": 1024}, "features": {"algorithm": "odess"}},
    )
    first = text_like(1_000_000, 5) + random_bytes(700_000, 6) + bytes(50_000)
    contents = [first]
    for seed in range(2):
        contents.append(mutate(contents[-1], seed, edits=200))
    with open_store(tmp_path / "s", settings=chosen, fingerprint_bits=bits, create=True) as store:
        for content in contents:
            store.put("k", content)
    with open_store(tmp_path / "s", settings=chosen, fingerprint_bits=bits) as store:
        by_fingerprint: dict[str, set[bytes]] = defaultdict(set)
        chunks = 0
        for version, content in enumerate(contents, 1):
            assert store.get("k", version).read() == content
            for segment in store.explain("k", version).segments:
                for chunk in segment.chunks:
                    if chunk.kind != "zero":
                        piece = content[chunk.offset : chunk.offset + chunk.length_bytes]
                        assert chunk.fingerprint[: bits // 4] == hashlib.sha1(piece).hexdigest()[: bits // 4]
                        assert not int(chunk.fingerprint[bits // 4 :], 16)
                        by_fingerprint[chunk.fingerprint].add(piece)
                        chunks += 1
        assert chunks > 10_000
        shared = [pieces for pieces in by_fingerprint.values() if len(pieces) > 1]
        assert sum(map(len, shared)) > 1000  # the collisions really happened
        unique = len(set().union(*by_fingerprint.values()))
        stats = store.stats()
        # as many chunks were stored as there are contents, so none was taken for another and none was kept twice
        assert stats.ledger.raw_chunks + stats.ledger.delta_chunks == unique
        assert stats.ledger.logical_bytes == sum(map(len, contents))
        assert store.verify().damage == ()
        live = {name: dict(rows) for name, rows in store._index.readable().entries().items()}
        store.rebuild_index()
        assert store._index.readable().entries() == live
        assert np.all([store.get("k", v).read() == c for v, c in enumerate(contents, 1)])

"""Measure the reduction of ten releases of a real package with default settings.

Every byte below the root counts.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from backports.zstd import CompressionParameter, ZstdCompressor

from nearkin import open_store
from nearkin.lab import corpus_cache
from nearkin.local import process_lock
from nearkin_shared.config.loader import load
from nearkin_shared.errors import NearkinError

SOLID: dict[int, int] = {
    CompressionParameter.compression_level: 9,
    CompressionParameter.window_log: 31,
    CompressionParameter.enable_long_distance_matching: 1,
}


def solid_bytes(files: list[Path]) -> int:
    """Return what `zstd -9 --long=31` makes of the files, one after another."""
    compressor = ZstdCompressor(options=SOLID)
    compressor.set_pledged_input_size(sum(path.stat().st_size for path in files))
    return sum(len(compressor.compress(path.read_bytes())) for path in files) + len(compressor.flush())


@pytest.mark.soak
def test_release_archive_is_below_solid_zstd(tmp_path: Path) -> None:
    """Store an archive of releases in less than solid compression, with random access."""
    try:
        releases = corpus_cache.botocore(3)
    except NearkinError as err:  # no network: the text says so
        pytest.skip(f"botocore: {err}")
    with open_store(tmp_path / "s", settings=load(None, {"profile": "archive"})[0], create=True) as store:
        for release in releases:
            store.put("botocore", release)
        assert store.stats().ledger.stored_bytes <= solid_bytes(releases)
        with releases[1].open("rb") as file:
            file.seek(70_000_000)
            assert store.get("botocore", 2, start=70_000_000, stop=70_100_000).read() == file.read(100_000)


def test_botocore_releases_reduce_fifty_times(tmp_path: Path) -> None:
    """Reduce ten releases of botocore at least fifty times; the parts add up."""
    try:
        releases = corpus_cache.botocore(10)
    except NearkinError as err:  # no network: the text says so
        pytest.skip(f"botocore: {err}")
    root = tmp_path / "store"
    with open_store(root, create=True) as store:
        for release in releases:
            store.put("botocore", release)
        stats = store.stats()
    counted = sum(path.stat().st_size for path in root.rglob("*") if path.is_file() and "index" not in path.parts)
    outside = (*process_lock.NAMES, "reserve")  # files of the machine, not of the stored content
    outside_bytes = sum((root / name).stat().st_size for name in outside if (root / name).exists())
    assert stats.ledger.stored_bytes == sum(stats.parts.values()) == counted - outside_bytes
    assert stats.ledger.reduction_ratio >= 65, stats.parts

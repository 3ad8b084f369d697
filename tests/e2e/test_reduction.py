"""The figure the store is for: ten releases of a real package, default settings, every byte under the root counted."""

from __future__ import annotations

from pathlib import Path

import pytest

from nearkin import open_store
from nearkin.errors import NearkinError
from nearkin.testing import corpora


def test_ten_releases_of_botocore_reduce_at_least_fifty_times_and_the_parts_add_up(tmp_path: Path) -> None:
    try:
        releases = corpora.botocore(10)
    except NearkinError as err:  # no network: the text says so
        pytest.skip(f"botocore: {err}")
    root = tmp_path / "store"
    with open_store(root) as store:
        for release in releases:
            store.put("botocore", release)
        stats = store.stats()
    counted = sum(path.stat().st_size for path in root.rglob("*") if path.is_file() and "index" not in path.parts)
    lock_bytes = sum((root / name).stat().st_size for name in ("lock", "lock.holder") if (root / name).exists())
    assert stats.ledger.stored_bytes == sum(stats.parts.values()) == counted - lock_bytes
    assert stats.ledger.reduction_ratio >= 65, stats.parts

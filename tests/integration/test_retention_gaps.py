"""Test lost retention records and unknown record names.

The version stays, damage is named.
"""

from __future__ import annotations

import logging
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from nearkin import open_store
from nearkin.store import Store
from nearkin_shared.config.loader import with_changes
from nearkin_shared.config.settings import Settings
from nearkin_shared.crypto.key_wrapping import generate
from nearkin_shared.errors import Corrupt, RetentionActive
from nearkin_shared.formats.tombstone import Mark, MarkKind
from tests.support.fakes.clock import DAY, Clock

START = datetime(2026, 11, 2, 6, tzinfo=UTC)
LATER = START + timedelta(days=30)
LATEST = LATER + timedelta(days=1)


@pytest.fixture
def clock() -> Clock:
    return Clock(START.timestamp())


def open_retaining(root: Path, clock: Clock, *, encrypted: bool = False) -> Store:
    storage: dict[str, object] = {}
    if encrypted:
        if not (root.parent / "kek").exists():
            generate(root.parent / "kek")
        storage = {"encryption": "aes-256-gcm", "key_file": str(root.parent / "kek")}
    changes = {"storage": storage, "gc": {"grace_seconds": 0}, "deletion": {"undelete_seconds": 0}}
    return open_store(root, settings=with_changes(Settings(), changes), clock=clock, create=True)


def lose_first_record(store: Store, key: str = "k") -> str:
    """Extend a retention twice, remove the first record; return its name."""
    store.put(key, b"one")
    store.retain(key, LATER)
    store.retain(key, LATEST)
    name = store._manifests.retentions.name("default", key, 1, 1)
    (store.root / name).unlink()
    return name


def test_lost_record_leaves_the_last_in_force(tmp_path: Path, clock: Clock) -> None:
    """Apply the later record without record 1: listings, rm and verify, which names the gap."""
    with open_retaining(tmp_path / "s", clock) as store:
        name = lose_first_record(store)
        store.put("k", b"two")
        assert store.info("k", 1).retain_until == LATEST
        assert [info.retain_until for info in store.versions(all_versions=True)] == [LATEST, None]
        with pytest.raises(RetentionActive, match="2026-12-03T06:00:00Z"):
            store.delete("k", 1)
        damage = store.verify().damage
        assert [(found.object_name, found.versions) for found in damage] == [(name, (("k", 1),))]
        assert "record 2 of" in damage[0].problem


@pytest.mark.parametrize("restart", [False, True])
def test_gc_keeps_a_version_with_a_lost_record(tmp_path: Path, clock: Clock, restart: bool) -> None:
    """GC and purge free no version whose mark ignored a retention of which record 1 is lost."""
    with open_retaining(tmp_path / "s", clock) as store:
        lose_first_record(store)
        now_us = int(clock.now * 1e6)
        store._manifests.put_mark(Mark("default", "k", 1, 1, MarkKind.DELETED, now_us, now_us))
        if restart:
            store.rebuild_index()
        clock.now += DAY
        assert store.gc().versions == 0
        assert store.purge().versions == 0
        assert store._manifests.is_committed("default", "k", 1)
        clock.now = LATEST.timestamp() + 1
        assert store.gc().versions == 1
        assert list((store.root / "manifests").rglob("*.nkr")) == []


def test_erasure_counts_a_version_with_a_lost_record(tmp_path: Path, clock: Clock) -> None:
    """An erasure of a tenant refuses for a retention of which only record 2 is left."""
    with open_retaining(tmp_path / "s", clock, encrypted=True) as store:
        lose_first_record(store)
        with pytest.raises(RetentionActive, match="retained versions: 1, the last one until 2026-12-03"):
            store.erase_tenant("default")


@pytest.mark.parametrize("last", ["0000000000000001.nkr", "0000000000000001.zzzz.nkr", "0000000000000001.1.nkr"])
@pytest.mark.parametrize("all_versions", [False, True])
def test_unknown_record_name_damages_its_version(
    tmp_path: Path, clock: Clock, last: str, all_versions: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Report an unknown record name as damage of one version; listings show the others."""
    with open_retaining(tmp_path / "s", clock) as store:
        for key in ("a", "k", "z"):
            store.put(key, b"one")
        folder = store._manifests.retentions.name("default", "k", 1, 1).rpartition("/")[0]
        (store.root / folder / last).write_bytes(b"")
        with caplog.at_level(logging.WARNING):
            assert [info.key for info in store.versions(all_versions=all_versions)] == ["a", "z"]
        assert last in caplog.text
        assert store.get("k", 1).read() == b"one"
        assert f"{folder}/{last}" in [found.object_name for found in store.verify().damage]


@pytest.mark.parametrize("name", ["stray.nkm", "ab/stray.nkm", "K/foo.txt", "K/.nkm", "K/sub/0000000000000001.nkm"])
def test_unknown_manifest_name_is_damage(tmp_path: Path, clock: Clock, name: str) -> None:
    """Report a file among the manifests with an unknown name.

    Verify and rebuild_index continue.
    """
    with open_retaining(tmp_path / "s", clock) as store:
        for key in ("a", "k", "z"):
            store.put(key, b"one")
        folder = store._manifests.retentions.name("default", "k", 1, 1).rpartition("/")[0]
        path = store.root / f"manifests/{name}".replace("manifests/K", folder)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"")
        stray = path.relative_to(store.root).as_posix()
        assert stray in [found.object_name for found in store.verify().damage]
        assert [info.key for info in store.versions()] == ["a", "k", "z"]
        with pytest.raises(Corrupt, match=stray):
            store.gc()
        store.rebuild_index()
        path.unlink()
        store.gc()
        assert store.verify().damage == ()

"""Keys of an encrypted store: missing, lost and found, rotated, and a tenant's erased for good."""

from __future__ import annotations

import shutil
import time
from datetime import timedelta
from pathlib import Path

import pytest

from nearkin import open_store
from nearkin.lab.generated_data import random_bytes
from nearkin_shared.errors import BadInput, ConfigError, Corrupt, RetryableError, TenantErased
from nearkin_shared.formats.key_record import name_of
from nearkin_shared.utils import failpoints
from tests.support.checks.inspection import check_index_equals_a_rebuilt_one
from tests.support.data.histories import history, make_store
from tests.support.data.stores import (
    ENCRYPTED,
    SMALL,
    attempt,
    containers,
    find_broken,
    manifests,
    objects,
    settings,
    stored_bytes,
)

CHOSEN = settings(SMALL, ENCRYPTED, {"delta": {"max_depth": 3}, "gc": {"grace_seconds": 0}})
COVERED = settings(CHOSEN, {"storage": {"parity": "rs-8-2"}})
CLEAR = settings(CHOSEN, {"storage": {"encryption": "none", "key": None}})
OTHER = settings(CHOSEN, {"tenant": "other"})
CONTENTS = history()


def test_store_with_missing_or_wrong_key_names_the_setting(root: Path, tmp_path: Path) -> None:
    """A store whose key is missing or wrong names the setting to change."""
    with pytest.raises(ConfigError, match=r'is encrypted: set storage\.encryption = "aes-256-gcm"'):
        open_store(root, settings=CLEAR, create=True)
    wrong = settings(CHOSEN, {"storage": {"key": "b3RoZXIgdGVzdHMsIHRoZSBrZXkgb2YgMzIgYnl0ZXM="}})
    with pytest.raises(ConfigError, match=r"storage\.key: .*wrapped by key-encryption key [0-9a-f]{16}"):
        open_store(root, settings=wrong, create=True)
    clear = make_store(tmp_path / "clear", CLEAR)
    with pytest.raises(ConfigError, match="is not encrypted"):
        open_store(clear, settings=CHOSEN, create=True)
    with open_store(clear, settings=CLEAR, create=True) as store:
        assert find_broken(store, CONTENTS) == set()
        with pytest.raises(BadInput, match="not encrypted"):
            store.erase_tenant("default", 0)


def test_store_with_lost_key_records_works_once_restored(root: Path, tmp_path: Path) -> None:
    """A store whose key records are lost reports it, and works again once they are back."""
    shutil.move(root / "keys", tmp_path / "keys")
    with pytest.raises(Corrupt, match="restore the folder from a copy"):
        open_store(root, settings=CHOSEN, create=True)
    shutil.move(tmp_path / "keys", root / "keys")
    with open_store(root, settings=CHOSEN, create=True) as store:
        assert find_broken(store, CONTENTS) == set()


def remove_keys(root: Path, to: Path) -> Path:
    """Move the data keys of the tenant away; return their new folder."""
    (folder,) = [path for path in (root / "keys").iterdir() if set(path.name) != {"0"}]
    shutil.move(folder, to)
    return folder


def test_put_of_tenant_with_lost_keys_makes_no_new_key(root: Path, tmp_path: Path) -> None:
    """A tenant whose keys are lost gets no new key, whose data no process could read."""
    folder = remove_keys(root, tmp_path / "keys")
    with open_store(root, settings=CHOSEN, create=True) as store:
        before = objects(root)
        for content in (CONTENTS["alone", 1], random_bytes(50_000, 9)):
            with pytest.raises(Corrupt, match=r"data keys of tenant .default. are missing.*from a copy"):
                store.put("anew", content)
        assert objects(root) == before
    with open_store(root, settings=OTHER, create=True) as store:
        assert store.put("theirs", b"theirs").info.version == 1
    shutil.copytree(tmp_path / "keys", folder)
    with open_store(root, settings=CHOSEN, create=True) as store:
        assert find_broken(store, CONTENTS) == set()
        assert store.put("anew", CONTENTS["alone", 1]).ledger.unique_bytes == 0


def test_keys_found_again_read_with_a_newer_key(root: Path, tmp_path: Path) -> None:
    """Keys that are found again read their data; a key made meanwhile reads its own."""
    contents = {**CONTENTS, ("anew", 1): random_bytes(50_000, 9)}
    folder = remove_keys(root, tmp_path / "keys")
    with open_store(root, settings=CHOSEN, create=True) as store:
        store.keyring.rotate("default")
        store.put("anew", contents["anew", 1])
    shutil.copytree(tmp_path / "keys", folder, dirs_exist_ok=True)
    with open_store(root, settings=CHOSEN, create=True) as store:
        assert find_broken(store, contents) == set()
        assert store.verify().damage == ()


def test_store_killed_before_its_descriptor_is_completed(tmp_path: Path) -> None:
    """A store whose creation died between keys and descriptor is completed by the next put."""
    root = make_store(tmp_path / "store", COVERED)
    for entry in root.iterdir():
        if entry.name not in ("keys", "lock", "lock.holder"):
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    with open_store(root, settings=COVERED, create=True) as store:
        store.put("a", b"content")
        assert store.get("a").read() == b"content"


def test_rotation_keeps_old_versions_until_compaction(tmp_path: Path) -> None:
    """After a rotation old versions read, and compaction encrypts them under the new key."""

    def numbers() -> list[int]:
        return [int.from_bytes(path.read_bytes()[16:20], "little") for path in containers(root)]

    root, now = tmp_path / "store", time.time()
    contents = {(f"key{number}", 1): random_bytes(60_000, 20 + number) for number in range(4)}
    with open_store(root, settings=CHOSEN, clock=lambda: now, create=True) as store:
        list(store.put_many((key, content) for (key, _), content in contents.items()))
        (first,) = set(numbers())
        second = store.keyring.rotate("default")
        store.put("new", random_bytes(50_000, 9))
        assert set(numbers()) == {first, second}
        assert find_broken(store, contents) == set()
        store.delete("key1")
        store.delete("key3")
        left = {name: content for name, content in contents.items() if name[0] not in ("key1", "key3")}
        now += 5e6
        assert sum(store.gc().containers_rewritten for _ in range(4)) > 0
        assert set(numbers()) == {second}
        assert find_broken(store, left) == set()
        assert store.verify().damage == ()


def test_erased_tenant_is_named_and_others_are_untouched(root: Path) -> None:
    """An erased tenant is named as erased, and other tenants are untouched."""
    with open_store(root, settings=OTHER, create=True) as store:
        store.put("theirs", CONTENTS["alone", 1])
        before = objects(root)
        assert store.erase_tenant("default", 0) == 1
        assert not [name for name in objects(root) if (record := name_of(name)) and record.owner.hex() not in "".join(
            key.owner for key in store.keyring.list_keys()
        )]  # fmt: skip
    with open_store(root, settings=CHOSEN, create=True) as store:
        for ask in (
            lambda: store.get("history"),
            lambda: store.get("history", 2),
            lambda: store.versions(),
            lambda: store.put("history", b"anew"),
            lambda: store.delete("history"),
        ):
            with pytest.raises(TenantErased, match="tenant 'default': its keys were erased"):
                ask()
        report = store.verify()
        assert report.damage == ()
        assert report.erased_objects == len([n for n in before if n.startswith(("containers", "manifests"))]) - 2
    with open_store(root, settings=OTHER, create=True) as store:
        assert store.get("theirs").read() == CONTENTS["alone", 1]
        assert store.verify().damage == ()
        outcome = store.gc(dry_run=True)
        report_of_gc = store.gc()
        assert outcome.freed_bytes == report_of_gc.freed_bytes > 0
        assert store.verify().erased_objects == 0
        assert len(containers(root)) == len(manifests(root)) == 1
        assert store.get("theirs").read() == CONTENTS["alone", 1]
        store.put("theirs", CONTENTS["history", 1])
        store.rebuild_index()
        assert store.verify().damage == ()
    with open_store(root, settings=CHOSEN, create=True) as store, pytest.raises(TenantErased):
        store.put("history", b"anew")


def test_erasure_during_a_gc_run_ends_it_without_drift(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The erasure of a tenant during a GC run ends the run, and leaves no sum that drifts."""
    monkeypatch.setattr("nearkin_shared.crypto.keyring.FRESH_SECONDS", 0.0)  # changes are seen at once
    at_once = settings(CHOSEN, {"deletion": {"undelete_seconds": 0}, "gc": {"grace_seconds": 0}})
    with open_store(root, settings=at_once, create=True) as store:
        store.put("gone", b"its last mark stays")
        store.delete("gone")
        store.gc()
    erased: list[int] = []

    def erase(name: str) -> None:
        if name == "ledger.written" and not erased:  # manifests are listed, and not read yet
            with open_store(root, settings=OTHER, create=True) as other:
                erased.append(other.erase_tenant("default", 0))

    with open_store(root, settings=settings(OTHER, {"gc": {"mode": "hybrid"}}), create=True) as store:
        store.put("theirs", CONTENTS["alone", 1])
        store.close()
        failpoints.arm((), erase)
        try:
            with pytest.raises(RetryableError, match="was erased during this GC run"):
                store.gc()
        finally:
            failpoints.disarm()
        assert erased == [1]
        assert store.gc().freed_bytes > 0
        assert store.stats().ledger.stored_bytes == stored_bytes(root)
        assert store.verify().damage == ()
        check_index_equals_a_rebuilt_one(store)
        assert store.get("theirs").read() == CONTENTS["alone", 1]


def test_bytes_of_erased_tenant_open_with_no_remaining_key(root: Path) -> None:
    """No remaining key decrypts the bytes of an erased tenant."""
    stored = objects(root)
    with open_store(root, settings=CHOSEN, create=True) as store:
        store.erase_tenant("default", 0)
    shutil.rmtree(root / "keys" / "erased")  # as if no erasure had been recorded
    with open_store(root, settings=CHOSEN, create=True) as store:
        for key, version in CONTENTS:
            given, err = attempt(store, key, version)
            assert given == b""
            assert isinstance(err, Corrupt)
            assert "is not in keys/" in str(err)
    assert {name: stored[name] for name in objects(root) if name.startswith("containers")} == {
        name: data for name, data in stored.items() if name.startswith("containers")
    }


def test_erasure_is_swept_once_no_writer_can_hold_the_key(root: Path) -> None:
    """An erasure counts as swept only when no writer can still hold the key."""
    with open_store(root, settings=OTHER, create=True) as store:
        store.put("theirs", b"something")
        store.erase_tenant("default", 0)
        store.gc()
        assert store.keyring.unswept()
        store.keyring._wall_clock = lambda: time.time() + timedelta(hours=1).total_seconds()
        store.gc()
        assert not store.keyring.unswept()
        assert (root / "keys" / "erased").is_dir()

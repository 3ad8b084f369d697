"""Roll-back: a removed newest manifest and a removed record of a rotated key are noticed, with and without an index."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

import pytest

from nearkin import open_store
from nearkin.cli.gc import warn_if_rolled_back
from nearkin.store import Store
from nearkin_shared.config.loader import with_changes
from nearkin_shared.config.settings import Settings
from nearkin_shared.crypto.key_wrapping import generate
from nearkin_shared.errors import Corrupt, KeysLost, NoRoom, RetentionActive
from nearkin_shared.fingerprints import domain_of
from nearkin_shared.formats.head_record import Heads, Sequences, decode_heads, encode_heads
from nearkin_shared.objectstore.obstore_adapter import memory_objects
from nearkin_shared.storage.heads import RolledBack, VersionHeads, head_name
from nearkin_shared.storage.manifests import ManifestStore, mark_name, object_name
from tests.support.data.test_keys import MemoryKeys
from tests.support.servers.gateways import running

GC = {"gc": {"grace_seconds": 0}, "deletion": {"undelete_seconds": 0}}


@pytest.fixture(params=["none", "aes-256-gcm"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Return a store, in clear or encrypted, with two versions of a key after a GC run."""
    generate(tmp_path / "kek")
    with open_root(tmp_path / "s", request.param) as store:
        store.put("db", b"version one" * 1000)
        store.put("db", b"version two" * 1000)
        store.gc()
    (tmp_path / "encryption").write_text(request.param)
    return tmp_path / "s"


def settings_of(root: Path, encryption: str | None = None) -> Settings:
    encryption = encryption or (root.parent / "encryption").read_text()
    storage = {} if encryption == "none" else {"encryption": encryption, "key_file": str(root.parent / "kek")}
    return with_changes(Settings(), {"store": str(root), "storage": storage, **GC})


def open_root(root: Path, encryption: str | None = None) -> Store:
    return open_store(root, settings=settings_of(root, encryption), create=True)


def remove_newest(root: Path) -> str:
    name = object_name("default", "db", 2)
    (root / name).unlink()
    return name


def test_removed_newest_manifest_is_noticed_without_index(root: Path) -> None:
    """F.25: With the index lost too, get, verify and gc report the key, until the version is given up."""
    name = remove_newest(root)
    shutil.rmtree(root / "index")
    with open_root(root) as store:
        with pytest.raises(Corrupt, match=f"{name}: removed"):
            store.get("db")
        assert store.get("db", 1).read() == b"version one" * 1000
        assert [found.object_name for found in store.verify().damage] == [name]
        for _ in range(2):
            with pytest.raises(Corrupt, match=f"{name}: removed.*nothing is freed"):
                store.gc()
        store.rebuild_index()
        assert store.get("db").read() == b"version one" * 1000
        assert store.verify().damage == ()


def test_gc_frees_nothing_while_versions_are_rolled_back(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """F.22: With index and manifests lost GC ends with code 5 and frees nothing; put back, every version restores."""
    contents = {f"k{n}": os.urandom(100_000) for n in range(3)}
    with open_root(root) as store:
        for key, content in contents.items():
            store.put(key, content)
        store.gc()
    shutil.rmtree(root / "index")
    shutil.move(root / "manifests", root.parent / "away")
    with open_root(root) as store:
        store.put("new", b"another content" * 1000)
        before = {p for p in (root / "containers").rglob("*") if p.is_file()}
        for _ in range(3):
            with pytest.raises(Corrupt, match=r"4 such keys.*rebuild-index"):
                store.gc()
            with pytest.raises(Corrupt, match="4 such keys"):
                store.gc(dry_run=True)
            with pytest.raises(Corrupt, match="4 such keys"):
                store.purge()
        assert before == {p for p in (root / "containers").rglob("*") if p.is_file()}
        assert store.rolled_back_keys() == 4
        warn_if_rolled_back(store)
        assert "4 keys lost their newest version" in capsys.readouterr().err
    shutil.copytree(root.parent / "away", root / "manifests", dirs_exist_ok=True)
    with open_root(root) as store:
        assert store.rolled_back_keys() == 0
        store.gc()
        for key, content in contents.items():
            assert store.get(key).read() == content


def test_gc_frees_lost_versions_once_they_are_given_up(root: Path) -> None:
    """F.22: The operator's rebuild-index gives rolled-back versions up: the next GC runs free their data."""
    with open_root(root) as store:
        store.put("lost", os.urandom(100_000))
        store.gc()
    shutil.rmtree(root / "index")
    shutil.rmtree(root / "manifests")
    with open_root(root) as store:
        store.put("new", b"another content" * 1000)
        with pytest.raises(Corrupt):
            store.gc()
        store.rebuild_index()
        store.gc()
        assert store.gc().containers_deleted > 0


def test_gc_of_closed_tenant_reports_no_roll_back(tmp_path: Path) -> None:
    """F.22: The hidden manifests of a tenant in the grace of its erasure do not count as removed."""
    root = tmp_path / "s"
    generate(tmp_path / "kek")
    with open_store(
        root, settings=with_changes(settings_of(root, "aes-256-gcm"), {"tenant": "acme"}), create=True
    ) as store:
        store.put("k", b"content of acme")
        store.gc()
        store.erase_tenant("acme", 3600)
    with open_root(root, "aes-256-gcm") as store:
        report = store.gc()
        assert (report.pending_erasures, report.rolled_back_keys) == (1, 0)


@pytest.mark.parametrize("index", ["kept", "lost"])
def test_gateway_does_not_answer_older_version(root: Path, index: str) -> None:
    """F.25: A gateway answers 500 for a key whose newest manifest was removed, never 200 with an older version."""
    name = remove_newest(root)
    if index == "lost":
        shutil.rmtree(root / "index")
    settings = with_changes(settings_of(root), {"gateway": {"ingest": "embedded", "port": 0}})
    with running(settings) as gateway, gateway.client() as client:
        answer = client.get("/v1/blobs/db")
        assert answer.status_code == 500
        assert name in answer.text
        assert client.get("/v1/blobs/db", params={"version": 1}).status_code == 200


@pytest.mark.parametrize("index", ["kept", "lost"])
def test_lost_undelete_mark_ends_no_version(root: Path, index: str) -> None:
    """F.22: A version whose undelete mark was removed is kept by gc, reported, and readable once it is put back."""
    with open_root(root) as store:
        store.put("e", os.urandom(100_000))
        content = store.get("e").read()
        store._deletions.delete("default", "e", undelete_seconds=3600)
        store.undelete("e")
        store.gc()
    name = mark_name("default", "e", 1, 2)
    mark = (root / name).read_bytes()
    (root / name).unlink()
    if index == "lost":
        shutil.rmtree(root / "index")
    later = time.time() + 7200
    with open_store(root, settings=settings_of(root), clock=lambda: later) as store:
        for read in (lambda: store.get("e"), lambda: store.get("e", 1)):
            with pytest.raises(Corrupt, match=f"{name}: removed"):
                read()
        for _ in range(3):
            report = store.gc()
            assert (report.rolled_back_keys, report.versions) == (1, 0)
        assert name in [found.object_name for found in store.verify().damage]
    (root / name).write_bytes(mark)
    with open_store(root, settings=settings_of(root), clock=lambda: later) as store:
        assert store.gc().rolled_back_keys == 0
        assert store.get("e").read() == content
        assert store.verify().damage == ()


@pytest.mark.parametrize("index", ["kept", "lost"])
def test_lost_tombstone_is_noticed(root: Path, index: str) -> None:
    """F.22: A deleted version whose tombstone was removed is not returned, and is named until it is given up."""
    with open_root(root) as store:
        store._deletions.delete("default", "db", 2, undelete_seconds=3600)
        store.gc()
    name = mark_name("default", "db", 2, 1)
    (root / name).unlink()
    if index == "lost":
        shutil.rmtree(root / "index")
    with open_root(root) as store:
        with pytest.raises(Corrupt, match=f"{name}: removed"):
            store.get("db")
        with pytest.raises(Corrupt, match=f"{name}: removed"):
            store.get("db", 2)
        assert store.get("db", 1).read() == b"version one" * 1000
        assert store.gc().rolled_back_keys == 1
        assert name in [found.object_name for found in store.verify().damage]
        store.rebuild_index()
        assert store.gc().rolled_back_keys == 0
        assert store.get("db").read() == b"version two" * 1000


@pytest.mark.parametrize("index", ["kept", "lost"])
def test_lost_retention_record_refuses_deletion(root: Path, index: str) -> None:
    """F.22: A version whose retention record was removed is not deleted, by rm or by a policy; verify names it."""
    until_us = int((time.time() + 3600) * 1e6)
    with open_root(root) as store:
        store._deletions.extend_retention("default", "db", 2, until_us)
        store.gc()
    name = mark_name("default", "db", 2, 1).replace(".nkt", ".nkr")
    (root / name).unlink()
    if index == "lost":
        shutil.rmtree(root / "index")
    with open_root(root) as store:
        with pytest.raises(RetentionActive, match=f"{name} was removed"):
            store.delete("db")
        assert store.gc().rolled_back_keys == 1
        assert name in [found.object_name for found in store.verify().damage]
        store._deletions.extend_retention("default", "db", 2, until_us)
        assert store.gc().rolled_back_keys == 0
        assert store.verify().damage == ()


def test_ended_versions_lose_no_marks(root: Path) -> None:
    """F.22: Marks and retention records that gc removes with their versions are not reported as removed."""
    with open_root(root) as store:
        for n in range(3):
            store.put("many", os.urandom(1000))
            store._deletions.extend_retention("default", "many", n + 1, int((time.time() + 30) * 1e6))
        store._deletions.delete("default", "db", 1, undelete_seconds=3600)
        store.undelete("db", 1)
        store.gc()
    later = time.time() + 3600
    with open_store(root, settings=settings_of(root), clock=lambda: later) as store:
        store.delete("many")
        store.delete("db", 1)
        for _ in range(3):
            assert store.gc().rolled_back_keys == 0
        assert store.verify().damage == ()


def test_number_of_a_rolled_back_version_is_not_reused(root: Path) -> None:
    """F.22: With index and newest manifest lost a put takes the number after the lost one, which may be restored."""
    name = object_name("default", "db", 2)
    lost = (root / name).read_bytes()
    (root / name).unlink()
    shutil.rmtree(root / "index")
    with open_root(root) as store:
        assert store.put("db", b"version three").info.version == 3
    (root / name).write_bytes(lost)
    with open_root(root) as store:
        assert store.get("db", 2).read() == b"version two" * 1000
        assert store.get("db").read() == b"version three"


@pytest.mark.parametrize("is_restored", [True, False], ids=["restored", "given up"])
def test_put_after_a_lost_version_does_not_hide_the_loss(
    root: Path, is_restored: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """F.25: A put on a rolled-back key warns; verify names the loss and gc frees nothing until it is settled."""
    lost = (root / object_name("default", "db", 2)).read_bytes()
    name = remove_newest(root)
    shutil.rmtree(root / "index")
    with open_root(root) as store:
        for version in (3, 4):
            caplog.clear()
            assert store.put("db", b"after the loss" * version).info.version == version
            assert "'db': version 2, which a GC run has listed as the newest, was removed" in caplog.text
        assert store.put("other", b"content").info.version == 1
        assert store.get("db").read() == b"after the loss" * 4
    shutil.rmtree(root / "index")
    with open_root(root) as store:
        for _ in range(2):
            with pytest.raises(Corrupt, match=f"{name}: removed.*nothing is freed"):
                store.gc()
        assert [found.object_name for found in store.verify().damage] == [name]
        assert store.rolled_back_keys() == 1
        if is_restored:
            (root / name).write_bytes(lost)
        store.rebuild_index()
        caplog.clear()
        assert store.put("db", b"as usual").info.version == 5
        assert caplog.text == ""
        store.gc()
        assert store.verify().damage == ()
        assert [info.version for info in store.versions(all_versions=True) if info.key == "db"] == [
            1, *([2] if is_restored else []), 3, 4, 5,
        ]  # fmt: skip


@pytest.mark.parametrize("is_recorded", [True, False], ids=["recorded", "no room"])
def test_head_keeps_its_last_tombstone_until_a_higher_one(
    root: Path, is_recorded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F.25: A replaced head is no loss, whether the run that expires it could record the higher one or not."""
    last = root / mark_name("default", "db", 2, 2)
    with open_root(root) as store:
        store.delete("db", 2)
        store.put("db", b"version three")
        with monkeypatch.context() as full:
            if not is_recorded:
                full.setattr(VersionHeads, "_replace", _refuse)
            with suppress(NoRoom):
                store.gc()
            assert last.exists() is not is_recorded
        assert store.rolled_back_keys() == 0
        assert store.verify().damage == ()
        assert store.gc().rolled_back_keys == 0
        assert not last.exists()
        assert store.verify().damage == ()
        assert store.put("db", b"version four").info.version == 4


def _refuse(*_: object) -> None:
    raise NoRoom("heads/versions: no space left")


def test_ls_warns_of_lost_tombstones_once(
    root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """F.25: `ls` names the loss of a tombstone on stderr, as verify does, and reads no manifest for it."""
    with open_root(root) as store:
        store._deletions.delete("default", "db", 2, undelete_seconds=3600)
        store.put("other", b"content")
        store.gc()
        warn_if_rolled_back(store)
        assert capsys.readouterr().err == ""
    (root / mark_name("default", "db", 2, 1)).unlink()
    with open_root(root) as store:
        monkeypatch.setattr(ManifestStore, "get", None)
        monkeypatch.setattr(ManifestStore, "read", None)
        warn_if_rolled_back(store)
    assert capsys.readouterr().err.count("1 key lost a tombstone or retention record") == 1


def test_heads_without_room_release_the_reserve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """F.22: On a full disk gc releases its reserve to record the heads; without one it ends with NoRoom."""
    update = VersionHeads.update
    with open_store(tmp_path / "s", create=True) as store:

        def update_on_full_disk(
            self: VersionHeads, manifests: ManifestStore, keys: Collection[bytes] | None
        ) -> RolledBack:
            if store.reserve.size_bytes() or no_room:
                raise NoRoom("heads/versions: no space left")
            return update(self, manifests, keys)

        no_room = False
        store.put("db", b"content")
        store.reserve.restore(lambda: 0)
        assert store.reserve.size_bytes()
        monkeypatch.setattr(VersionHeads, "update", update_on_full_disk)
        store.gc()
        assert store._heads.read().versions
        no_room = True
        with pytest.raises(NoRoom):
            store.gc()


def test_deleted_and_expired_versions_are_no_roll_back(root: Path) -> None:
    """F.25: Deletion and the removal of old versions by GC leave a mark, or a later version: neither is reported."""
    with open_root(root) as store:
        store.put("gone", os.urandom(1000))
        store.delete("db", 1)
        store.gc()
        store.delete("gone")
        store.delete("db")
        for _ in range(3):
            assert store.gc().rolled_back_keys == 0
        assert store.verify().damage == ()
        store.put("db", b"version three")
        assert store.get("db").read() == b"version three"


def test_forged_heads_are_reported_and_hide_nothing(tmp_path: Path) -> None:
    """F.25: A record of heads that is not authenticated counts as none and is named by verify."""
    with open_store(tmp_path / "s", create=True) as store:
        store.put("db", b"content")
    path = tmp_path / "s" / "heads" / "versions" / f"{9:016x}.nkh"
    path.parent.mkdir(parents=True)
    path.write_bytes(encode_heads(9, Heads({bytes(16): 5}), bytes(32)))
    with open_store(tmp_path / "s") as store:
        assert store.get("db").read() == b"content"
        assert [found.object_name for found in store.verify().damage] == [f"heads/versions/{9:016x}.nkh"]
        store.gc()
        assert store.verify().damage == ()


@pytest.mark.parametrize("key", [None, bytes(range(32))])
@pytest.mark.parametrize("with_marks", [False, True])
def test_heads_round_trip_and_detect_damage(key: bytes | None, with_marks: bool) -> None:
    """F.25: Heads are read as written, and any changed byte is detected."""
    versions = {bytes([n]) * 16: n + 1 for n in (7, 3, 200)}
    marks = {bytes([7]) * 16: {1: Sequences(2, 0), 8: Sequences(1, 3)}, bytes([200]) * 16: {201: Sequences(0, 1)}}
    heads = Heads(versions, marks if with_marks else {})
    data = encode_heads(4, heads, key)
    assert decode_heads(data, "h", key) == (4, heads)
    for at in range(len(data)):
        wrong = bytearray(data)
        wrong[at] ^= 1
        with pytest.raises(Corrupt):
            decode_heads(bytes(wrong), "h", key)
    for end in range(len(data)):
        with pytest.raises(Corrupt):
            decode_heads(data[:end], "h", key)


def test_heads_are_never_lowered_by_a_run() -> None:
    """F.25: A later run keeps the higher head of a key that it does not list any more."""
    objects = memory_objects()
    heads = VersionHeads(objects)
    objects.put_new(heads.name(1), encode_heads(1, Heads({bytes(16): 5})))
    assert heads.update(ManifestStore(objects)).versions == {bytes(16): 5}
    assert heads.read() == Heads({bytes(16): 5})
    objects.put_new(head_name(bytes(16), 3), b"an older version")
    found = heads.update(ManifestStore(objects))
    assert found.versions == {bytes(16): 5}
    assert heads.read().versions == {bytes(16): 5}


def test_removed_record_of_rotated_key_stops_encryption() -> None:
    """F.25: With the newest key's record deleted no process encrypts under the old key; rotation makes a new one."""
    keys, domain = MemoryKeys(), domain_of("db")
    first = keys.keyring.newest(domain)
    number = keys.keyring.rotate("db")
    record = f"keys/{first.owner.hex()}/{number:08x}.0000.nkk"
    keys.below.delete(record)
    fresh = keys.another()
    with pytest.raises(Corrupt, match=f"key {number} of .* was created, but its record is missing"):
        fresh.newest(domain)
    assert fresh.key(first.owner, first.number, "an object").secret == first.secret
    assert fresh.rotate("db") > number
    assert keys.another().newest(domain).number > number


def test_removed_records_of_all_keys_make_no_new_one() -> None:
    """F.25: With all keys of a tenant deleted no first key is made again, whatever the state of the index."""
    keys, domain = MemoryKeys(), domain_of("db")
    owner = keys.keyring.newest(domain).owner
    for name, _ in list(keys.below.names(f"keys/{owner.hex()}")):
        keys.below.delete(name)
    with pytest.raises(KeysLost):
        keys.another().newest(domain)


def test_forged_key_heads_are_reported() -> None:
    """F.25: Highest key numbers that the store's key does not authenticate stop new encryption and are named."""
    keys, domain = MemoryKeys(), domain_of("db")
    keys.keyring.newest(domain)
    forged = f"heads/keys/{99:016x}.nkh"
    keys.below.put_new(forged, b"{}")
    with pytest.raises(Corrupt, match=forged):
        keys.another().newest(domain)
    assert list(keys.another().problems()) == [forged]

"""Records that GC acts on, forged by an attacker without keys who can create objects: no data are freed, all is
reported.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from nearkin import open_store
from nearkin.store import Store
from nearkin_shared.config.loader import with_changes
from nearkin_shared.config.settings import Settings
from nearkin_shared.errors import Corrupt, FormatTooNew
from nearkin_shared.formats.columns import check_bytes
from nearkin_shared.formats.pending_delete_record import MAGIC, QUARANTINED, PendingDelete, decode_record, encode_record
from nearkin_shared.formats.record_authentication import record_key
from nearkin_shared.formats.tombstone import Mark, MarkKind, decode_mark, encode_mark
from nearkin_shared.objectstore.obstore_adapter import memory_objects
from nearkin_shared.objectstore.parity import ParityObjectStore
from nearkin_shared.storage import descriptor
from nearkin_shared.storage.gc_pause import GcPauseFlag
from nearkin_shared.storage.manifests import mark_name, object_name
from nearkin_shared.storage.pending_deletes import PendingDeleteStore
from nearkin_shared.storage.quarantine import Quarantine
from nearkin_shared.storage.scrub_progress import ScrubState, ScrubStates
from tests.support.data import samples

CONTENT = bytes(range(256)) * 2000
NONE = np.zeros(0, np.uint32)
WRONG_KEY = bytes(32)


def open_root(root: Path, **more: object) -> Store:
    chosen = with_changes(Settings(), {"gc": {"grace_seconds": 0}, "deletion": {"undelete_seconds": 0}, **more})
    return open_store(root, settings=chosen, create=True)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    with open_root(tmp_path / "s") as store:
        store.put("k", CONTENT)
    return tmp_path / "s"


def covered() -> ParityObjectStore:
    """Return a store in memory whose records are authenticated."""
    objects = ParityObjectStore(memory_objects(), None)
    descriptor.create(objects)
    return objects


MARK = Mark("default", "k", 1, 1, MarkKind.DELETED, 1, 2)


@pytest.mark.parametrize("data", [b"", encode_mark(MARK), encode_mark(MARK, WRONG_KEY)], ids=["empty", "v1", "mac"])
def test_gc_with_forged_mark_keeps_the_version(root: Path, data: bytes) -> None:
    """F.22: A mark that the store's key does not authenticate frees nothing; verify names it, gc counts it."""
    name = mark_name("default", "k", 1, 1)
    (root / name).write_bytes(data)
    with open_root(root) as store:
        for _ in range(3):
            report = store.gc()
        assert (report.refused_records, report.versions, report.containers_deleted) == (1, 0, 0)
        assert name in [found.object_name for found in store.verify().damage]
    (root / name).unlink()
    with open_root(root) as store:
        assert store.get("k").read() == CONTENT


def test_gc_with_forged_pending_deletes_frees_nothing(root: Path) -> None:
    """F.22: A forged record of pending deletes counts as none: the data that it names wait for a grace of their own."""
    with open_root(root, gc={"grace_seconds": 3600}) as store:
        store.delete("k")
        container = next(iter(store._containers.ids()))[0]
        record = {int(container): PendingDelete(1, NONE, NONE, True)}
        store._condemned.objects.put_new(f"gc/{7:016x}.nkg", encode_record(7, record))
        found = store.verify()
        assert [one.object_name for one in found.damage] == [f"gc/{7:016x}.nkg"]
        report = store.gc()
        assert (report.containers_deleted, report.pending_delete_containers) == (0, 1)
        assert store.verify().damage == ()


def test_gc_with_forged_highest_record_names_it(root: Path) -> None:
    """F.22: A forged record of the highest number stops gc by an error that names the file and the remedy."""
    (root / "gc").mkdir(exist_ok=True)
    (root / "gc" / f"{(1 << 64) - 1:016x}.nkg").write_bytes(b"")
    with open_root(root) as store:
        store.delete("k")
        with pytest.raises(Corrupt, match=r"gc/f{16}.nkg: invalid sequence, no record can follow it.*remove the file"):
            store.gc()


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("pause/0000000000000001.json", b'{"version": 1, "at_us": 1, "who": "x"}'),
        ("scrub/0000000000000001.json", b"{}"),
        ("quarantine/0000000000000001.nkq", encode_record(1, {}, QUARANTINED, WRONG_KEY)),
        ("gc/0000000000000001.nkg", encode_record(1, {}, MAGIC, WRONG_KEY)),
    ],
)
def test_verify_names_record_that_is_not_authenticated(root: Path, name: str, data: bytes) -> None:
    """F.22: Verify names every record of maintenance that is not authentic."""
    (root / name).parent.mkdir(exist_ok=True)
    (root / name).write_bytes(data)
    with open_root(root) as store:
        assert [found.object_name for found in store.verify().damage] == [name]


def test_records_in_clear_have_a_mac_encrypted_ones_none() -> None:
    """F.22: Every record that a store in clear writes has a MAC under the key derived from its secret."""
    objects = covered()
    key = record_key(bytes.fromhex(descriptor.read(objects).secret))
    PendingDeleteStore(objects).replace({9: PendingDelete(1, NONE, NONE, True)})
    Quarantine(objects, lambda: 1.0).note({9: None}, {}, everything=False)
    GcPauseFlag(objects).pause("kim")
    ScrubStates(objects).write(ScrubState(begun_us=5))
    for name, size in list(objects.names("")):
        data = objects.get(name)
        assert size == len(data)
        if name.endswith((".nkg", ".nkq")):
            magic = MAGIC if name.endswith(".nkg") else QUARANTINED
            assert decode_record(data, name, magic, key)
            with pytest.raises(Corrupt, match="not authenticated"):
                decode_record(data, name, magic, WRONG_KEY)
        elif name != descriptor.NAME:
            assert len(json.loads(data)["mac"]) == 32
    assert GcPauseFlag(objects).read().who == "kim"  # type: ignore[union-attr]
    assert ScrubStates(objects).read().begun_us == 5


def test_mark_with_mac_round_trips_and_detects_changes() -> None:
    """F.22: Any changed byte of a mark with a MAC is refused even with a matching check."""
    key, mark = bytes(range(32)), samples.small_mark()
    data = encode_mark(mark, key)
    assert decode_mark(data, "m", key) == mark
    assert decode_mark(data, "m", key).authenticated
    assert not decode_mark(data, "m").authenticated
    assert not decode_mark(encode_mark(mark), "m", key).authenticated
    for at in range(4, len(data) - 8):
        body = bytearray(data[:-8])
        body[at] ^= 1
        wrong = bytes(body) + check_bytes(bytes(body))
        with pytest.raises((Corrupt, FormatTooNew)):
            decode_mark(wrong, "m", key)


def test_gc_signs_marks_of_older_release_by_setting(root: Path) -> None:
    """F.22: Only gc.sign_old_records signs marks without a MAC; from then on gc frees their versions."""
    with open_root(root) as store:
        store.put("other", b"x" * 1000)
        store.delete("k")
        name = mark_name("default", "k", 1, 1)
        mark = store._manifests.read_mark(name)
    (root / name).unlink()
    (root / name).write_bytes(encode_mark(mark))
    with open_root(root) as store:
        assert store.gc().refused_records == 1
        assert (root / object_name("default", "k", 1)).exists()
    with open_root(root, gc={"grace_seconds": 0, "sign_old_records": True}) as store:
        report = store.gc()
        assert (report.refused_records, report.versions) == (0, 1)
        assert not (root / object_name("default", "k", 1)).exists()
        assert store.verify().damage == ()


def test_descriptor_with_few_fingerprint_bits_is_refused(root: Path) -> None:
    """F.22: A descriptor whose fingerprints may collide, as tests make it, opens no store unless the test allows it."""
    objects = covered()
    found = descriptor.read(objects)
    short = descriptor.Descriptor(found.store_id, found.secret, 16)
    data = json.dumps(asdict(short) | {"check": descriptor._check(short)}).encode()
    path = root / descriptor.NAME
    path.chmod(0o600)
    path.write_bytes(data)
    with pytest.raises(Corrupt, match=r"nearkin.json: fingerprint_bits 16: want 160"):
        open_store(root)
    with open_store(root, fingerprint_bits=16, read_only=True):
        pass

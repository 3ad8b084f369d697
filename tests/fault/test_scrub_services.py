"""The maintenance service's scrub, over S3: parity repairs damage, and other damage is quarantined and reported."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from nearkin import open_store
from nearkin.lab.generated_data import random_bytes
from nearkin_maintenance.verify import scrub_worker as scrubbing_module
from nearkin_maintenance.verify.scrub_worker import BackgroundScrub
from nearkin_shared.config.loader import with_changes
from nearkin_shared.config.settings import Settings
from nearkin_shared.errors import Corrupt, StoreUnavailable
from nearkin_shared.fingerprints import Fingerprinter
from nearkin_shared.objectstore.base import Payload
from nearkin_shared.objectstore.factory import with_parity
from nearkin_shared.objectstore.local import LocalObjectStore
from nearkin_shared.objectstore.obstore_adapter import ObstoreObjectStore
from nearkin_shared.objectstore.parity import ParityObjectStore
from nearkin_shared.objectstore.s3 import S3ObjectStore
from nearkin_shared.storage import descriptor
from nearkin_shared.storage.quarantine import Quarantine
from nearkin_shared.storage.scrub_progress import ScrubStates
from tests.support.checks.waiting import until
from tests.support.data.stores import SMALL, objects, settings
from tests.support.servers.servers import S3

COVERED = settings(SMALL, {"storage": {"parity": "rs-8-2"}, "scrub": {"rate_bytes": "1GiB"}})


@pytest.fixture
def store(versitygw: S3, tmp_path: Path) -> ParityObjectStore:
    """Put a store of three versions into a bucket."""
    with open_store(tmp_path / "store", settings=COVERED, create=True) as made:
        for number in range(3):
            made.put(f"k{number}", random_bytes(200_000, number))
    bucket = S3ObjectStore(versitygw.settings(versitygw.make_bucket(f"b{secrets.token_hex(6)}")))
    for name, data in objects(tmp_path / "store").items():
        bucket.put_new(name, data)
    return with_parity(bucket, COVERED)


def start_scrub(store: ParityObjectStore, chosen: Settings = COVERED, index: object = None) -> BackgroundScrub:
    found = descriptor.read(store)
    fingerprinter = partial(Fingerprinter, bytes.fromhex(found.secret), fingerprint_bits=found.fingerprint_bits)
    return BackgroundScrub(store, lambda: chosen, fingerprinter, index)


def damage(store: ParityObjectStore, name: str, at: int) -> bytes:
    whole = store.get(name)
    broken = bytearray(whole)
    broken[at] ^= 1
    store.replace(name, bytes(broken))
    return whole


def wait_for_a_pass(scrub: BackgroundScrub, store: ParityObjectStore) -> None:
    scrub.start()
    states = ScrubStates(store)
    until(lambda: not states.read().running and states.read().ended_us)
    scrub.stop()


def test_scrub_repairs_objects_in_the_bucket(store: ParityObjectStore) -> None:
    """The scrub repairs containers, manifests and parity in the bucket."""
    names = sorted(name for name, _ in store.names("containers"))
    manifests = sorted(name for name, _ in store.names("manifests"))
    wholes = {
        names[0]: damage(store, names[0], 100),
        manifests[1]: damage(store, manifests[1], 70),
        f"parity/{names[1]}.nkp": damage(store, f"parity/{names[1]}.nkp", 500),
        "nearkin.json": damage(store, "nearkin.json", 90),
    }
    scrub = start_scrub(store)
    wait_for_a_pass(scrub, store)
    assert scrub._scrubber.state.ended_damaged == 4
    assert {name: store.get(name) for name in wholes} == wholes
    assert Quarantine(store, time.time).read() == {}
    again = start_scrub(store, with_changes(COVERED, {"scrub": {"every_days": 1}}))
    assert again._scrubber.state.ended_damaged == 4  # the state is stored in the bucket
    assert (again._scrubber.waits_seconds() or 0.0) > 80_000


class RecordingIndex:
    """An index that records what is withdrawn from it."""

    def __init__(self) -> None:
        self.withdrawn: list[dict[int, object]] = []

    def withdraw(
        self, chunks: Mapping[int, object], segments: object, containers: object, looked_up: object = None
    ) -> None:
        self.withdrawn.append(dict(chunks))

    def renew(self, summary: object) -> None: ...

    def collect_many(self, versions: object) -> None: ...


def test_scrub_quarantines_and_reports_what_it_cannot_repair(
    store: ParityObjectStore, caplog: pytest.LogCaptureFixture
) -> None:
    """Damage that it cannot repair is quarantined, withdrawn and reported with its versions."""
    name = sorted(name for name, _ in store.names("containers"))[0]
    damage(store, name, 100)
    store.inner.delete(f"parity/{name}.nkp")
    index = RecordingIndex()
    plain = with_parity(store.inner, with_changes(COVERED, {"storage": {"parity": "none"}}))
    with caplog.at_level(logging.ERROR):
        wait_for_a_pass(start_scrub(plain, index=index), plain)
    container = int(name.rpartition("/")[2][:16], 16)
    assert list(Quarantine(store, time.time).read()) == [container]
    assert [list(chunks) for chunks in index.withdrawn] == [[container]]
    assert f"{name} is damaged; affected: 'k0' version 1" in caplog.text


class UnreachableIndex(RecordingIndex):
    """An index that is unreachable for its first update."""

    def withdraw(
        self, chunks: Mapping[int, object], segments: object, containers: object, looked_up: object = None
    ) -> None:
        super().withdraw(chunks, segments, containers, looked_up)
        if len(self.withdrawn) == 1:
            raise StoreUnavailable("redis does not answer")


def test_index_away_is_updated_when_it_is_back(store: ParityObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """An index that is unreachable is updated about the damage when it is back."""
    monkeypatch.setattr(scrubbing_module, "RETRY_SECONDS", 0.1)
    name = sorted(name for name, _ in store.names("containers"))[0]
    damage(store, name, 100)
    store.inner.delete(f"parity/{name}.nkp")
    index = UnreachableIndex()
    plain = with_parity(store.inner, with_changes(COVERED, {"storage": {"parity": "none"}}))
    wait_for_a_pass(start_scrub(plain, index=index), plain)
    assert len(index.withdrawn) == 2
    assert ScrubStates(store).read().ended_damaged == 1


class BadSector(ObstoreObjectStore):
    """A device that cannot read one object, until that is written again."""

    def __init__(self, inner: LocalObjectStore, bad: str) -> None:
        self._inner, self._bad = inner, {bad}

    def get(self, name: str) -> bytes:
        if name in self._bad:
            raise Corrupt(f"{name}: the device cannot read it (Input/output error)")
        return self._inner.get(name)

    def replace(self, name: str, data: Payload) -> None:
        self._bad.discard(name)
        self._inner.replace(name, data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    names = property(lambda self: self._inner.names)
    get_ranges = property(lambda self: self._inner.get_ranges)
    size_bytes = property(lambda self: self._inner.size_bytes)
    put_new = property(lambda self: self._inner.put_new)
    delete = property(lambda self: self._inner.delete)


def test_unreadable_object_is_restored_from_parity(
    tmp_path: Path,
) -> None:
    """An object that the device cannot read is restored from parity, and other damage is not forgotten.

    All of it is lost: its parity has as many parts as it has itself.
    """
    chosen = with_changes(COVERED, {"storage": {"parity": "rs-2-2"}})
    with open_store(tmp_path / "s", settings=chosen, create=True) as made:
        made.put("k", random_bytes(100_000, 5))
    local = LocalObjectStore(tmp_path / "s")
    (name,) = (name for name, _ in local.names("containers"))
    whole = local.get(name)
    device = BadSector(local, name)
    scrub = start_scrub(with_parity(device, chosen), chosen)
    scrub.step()
    assert device.get(name) == whole
    assert Quarantine(local, time.time).read() == {}

"""Test the same GC runs over any object store that a local store wrote."""

from __future__ import annotations

from pathlib import Path

import pytest

from nearkin import open_store
from nearkin.block_recoder import BlockRecoder
from nearkin.lab.generated_data import random_bytes
from nearkin.local.index_recovery import super_features_of
from nearkin_maintenance import DomainOwners, GcRun, Rewriter, rebuild_index
from nearkin_shared.config.storage import GcSettings
from nearkin_shared.fingerprints import Fingerprinter, domain_of
from nearkin_shared.index.lmdb.lmdb_index import LmdbIndex
from nearkin_shared.objectstore.base import ObjectStore
from nearkin_shared.objectstore.obstore_adapter import memory_objects
from nearkin_shared.reading.restore import VersionReader
from nearkin_shared.storage import descriptor
from nearkin_shared.storage.containers import ContainerStore
from nearkin_shared.storage.manifests import ManifestStore
from tests.support.data.stores import SMALL, objects, settings

CHOSEN = settings(SMALL, {"deletion": {"undelete_seconds": 0}})


@pytest.fixture(params=["memory", "s3"])
def elsewhere(request: pytest.FixtureRequest) -> ObjectStore:
    if request.param == "memory":
        return memory_objects()
    found: ObjectStore = request.getfixturevalue("s3_objects")
    return found


def stored(elsewhere: ObjectStore) -> int:
    return sum(size for folder in ("containers", "manifests", "gc") for _, size in elsewhere.names(folder))


def test_gc_runs_free_predicted_bytes(elsewhere: ObjectStore, tmp_path: Path) -> None:
    contents = {f"k{number}": random_bytes(30_000, number) for number in range(16)}
    with open_store(tmp_path / "s", settings=CHOSEN, create=True) as store:
        list(store.put_many(contents.items()))
        for number in range(16):
            if number % 4:
                store.delete(f"k{number}")
    for name, data in objects(tmp_path / "s").items():
        elsewhere.put_new(name, data)
    found = descriptor.read(elsewhere)

    def fingerprinter(tenant: str) -> Fingerprinter:
        return Fingerprinter(bytes.fromhex(found.secret), tenant, found.fingerprint_bits)

    containers = ContainerStore(elsewhere, domain_of("default"), 8 << 20)
    manifests = ManifestStore(elsewhere)
    tenants = DomainOwners(fingerprinter, ["default"], manifests)
    index = LmdbIndex(tmp_path / "index", domain_of("default"), 1 << 28)
    rebuild_index(containers, manifests, index, tenants, super_features_of)
    rewriter = Rewriter(containers, tenants, fingerprinter("default"), BlockRecoder(CHOSEN))
    collector = GcRun(elsewhere, containers, GcSettings(grace_seconds=0), rewriter)
    first, rewritten = stored(elsewhere), 0
    for _ in range(4):
        predicted, before = collector.preview(), stored(elsewhere)
        done = collector.run(index)
        assert before - stored(elsewhere) == done.freed_bytes == predicted.freed_bytes
        rewritten += done.containers_rewritten
    assert rewritten > 0
    assert stored(elsewhere) < first * 0.4
    reader = ContainerStore(elsewhere, domain_of("default"), 8 << 20)
    for number in range(0, 16, 4):
        manifest = manifests.read_visible("default", f"k{number}", 1)
        blob = VersionReader(manifest.info, manifest, reader, fingerprinter("default"), 0, manifest.size_bytes)
        assert b"".join(blob.pieces()) == contents[f"k{number}"]
    index.close()

"""Test two tenants with one hash.

The second sees nothing of the first and is refused by name.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from nearkin import open_store
from nearkin.lab.generated_data import mutate, text_like
from nearkin.store import Store
from nearkin_shared import fingerprints
from nearkin_shared.config.services import RedisSettings
from nearkin_shared.crypto import keyring
from nearkin_shared.errors import NotFound, TenantCollision
from nearkin_shared.formats.manifest import Manifest
from nearkin_shared.index import pending
from nearkin_shared.index.container_entries import feature_keys
from nearkin_shared.index.lmdb import lmdb_index
from nearkin_shared.index.lmdb.version_entries import EncryptedNames, PlainNames
from nearkin_shared.index.protocols import CollectedVersion
from nearkin_shared.index.redis import RedisIndex, catalog_encoding
from nearkin_shared.objectstore import encrypting
from nearkin_shared.types import U8, U64
from tests.support.data.stores import ENCRYPTED, SMALL, objects, settings
from tests.support.servers.servers import Redis

NO_CHANGES: Mapping[str, Mapping[str, object]] = {}
REMEDY = r"tenant 'second': .*choose another name"


def open_tenant(folder: Path, tenant: str, changes: Mapping[str, Mapping[str, object]] = NO_CHANGES) -> Store:
    return open_store(folder, settings=settings(SMALL, changes, {"tenant": tenant}), create=True)


@pytest.fixture
def shared_tenant_head(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let all tenants have one hash in a local index."""
    for names in (PlainNames, EncryptedNames):
        monkeypatch.setattr(names, "tenant_head", lambda _self, _tenant: b"\1" * 8)


@pytest.mark.usefixtures("shared_tenant_head")
@pytest.mark.parametrize("changes", [NO_CHANGES, ENCRYPTED], ids=["plain", "encrypted"])
def test_second_tenant_of_a_hash_reads_nothing_and_is_refused(
    tmp_path: Path, changes: Mapping[str, Mapping[str, object]]
) -> None:
    """List nothing of the first tenant to the second; refuse its put before it stores."""
    with open_tenant(tmp_path, "first", changes) as store:
        store.put("key", b"the first tenant's")
    before = objects(tmp_path)
    with open_tenant(tmp_path, "second", changes) as store:
        assert list(store.versions()) == []
        assert list(store.catalog_after("second", "", "", None, 10)) == []
        for ask in (store.get, store.info):
            with pytest.raises(NotFound):
                ask("key")
        with pytest.raises(TenantCollision, match=REMEDY) as refused:
            store.put("other", b"the second tenant's")
    assert "first" not in str(refused.value)
    assert objects(tmp_path) == before
    with open_tenant(tmp_path, "first", changes) as store:
        assert [info.key for info in store.versions()] == ["key"]
        assert store.put("key", b"the first tenant's again").info.version == 2


def test_index_with_two_tenants_of_a_hash_keeps_them_apart(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Keep tenants apart in a rebuilt index.

    Listing, GC run and erasure of one spare the other.
    """
    for tenant in ("first", "second"):
        with open_tenant(tmp_path, tenant) as store:
            store.put(f"of {tenant}", b"x")
    request.getfixturevalue("shared_tenant_head")
    with open_tenant(tmp_path, "second") as store:
        store.rebuild_index()
        assert [info.key for info in store.versions()] == ["of second"]
        index = store._index.writable()
        for after in ("", "of a"):
            assert [entry.key for entry in index.catalog_after("first", "of", after, None)] == ["of first"]
        assert index.versions_of("second", "of first") == []
        index.collect_many([CollectedVersion("second", "of first", 1)])
        assert [entry.key for entry in index.catalog("first")] == ["of first"]
        index.withdraw_tenants(["second"])
        assert list(index.catalog("second")) == []
        assert [entry.key for entry in index.catalog("first")] == ["of first"]


def manifest_of(store: Store, key: str) -> Manifest:
    return store._manifests.get(store.settings.tenant, key, 1)


@pytest.fixture
def redis_index(redis: Redis, key_prefix: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[RedisIndex]:
    """An index in Redis in which all tenants have one hash."""
    monkeypatch.setattr(catalog_encoding, "tenant_tag", lambda _tenant: "1" * 24)
    with closing(RedisIndex(RedisSettings(url=redis.url, prefix=key_prefix.rstrip(":")), b"\2" * 16)) as made:
        yield made


def test_redis_refuses_the_second_tenant_of_a_hash(
    tmp_path: Path, redis_index: RedisIndex, caplog: pytest.LogCaptureFixture
) -> None:
    """List nothing of the first tenant to the second in Redis; its commits change nothing."""
    with open_tenant(tmp_path, "first") as store:
        store.put("key", b"the first tenant's")
        first = manifest_of(store, "key")
    second = replace(first, tenant="second")
    redis_index.commit(first, 100)
    before = list(redis_index.catalog("first"))
    assert [entry.key for entry in before] == ["key"]
    for listing in (redis_index.catalog("second"), redis_index.catalog_after("second", "", "", None, 10)):
        with pytest.raises(TenantCollision, match=REMEDY):
            list(listing)
    with caplog.at_level(logging.ERROR):
        redis_index.commit_many([(second, 100), (replace(second, key="other"), 100)])
    assert "tenant 'second'" in caplog.text
    redis_index.collect_many([CollectedVersion("second", "key", 1)])
    assert list(redis_index.catalog("first")) == before
    assert redis_index.tenants() == ["first"]


def test_keys_of_another_tenant_of_a_hash_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refuse a data key to a second tenant of the domain: no read, write or erasure."""
    for module in (fingerprints, keyring, encrypting):
        monkeypatch.setattr(module, "domain_of", lambda _tenant: b"\3" * 16)
    with open_tenant(tmp_path, "first", ENCRYPTED) as store:
        store.put("key", b"the first tenant's")
    before = objects(tmp_path)
    with open_tenant(tmp_path, "second", ENCRYPTED) as store:
        with pytest.raises(TenantCollision, match=REMEDY):
            store.get("key")
        with pytest.raises(TenantCollision, match=REMEDY):
            store.put("other", b"the second tenant's")
        with pytest.raises(TenantCollision, match=REMEDY):
            store.erase_tenant("second", 0)
    assert objects(tmp_path) == before
    with open_tenant(tmp_path, "first", ENCRYPTED) as store:
        assert b"".join(store.get("key")) == b"the first tenant's"


def test_features_of_another_tenant_of_a_hash_are_no_bases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Find no base of another tenant in a shared super-feature namespace; store the put."""

    def shared_feature_keys(sketch: str, _domain: bytes, super_features: U64) -> U8:
        return feature_keys(sketch, b"\4" * 16, super_features)

    for module in (lmdb_index, pending):
        monkeypatch.setattr(module, "feature_keys", shared_feature_keys)
    text = text_like(300_000, 1)
    with open_tenant(tmp_path, "first") as store:
        store.put("key", text)
    changed = mutate(text, 2, edits=40)
    with open_tenant(tmp_path, "second") as store:
        assert store.put("key", changed).ledger.delta_chunks == 0
        assert b"".join(store.get("key")) == changed
    with open_tenant(tmp_path, "first") as store:  # where the base is its own, the same content is stored as deltas
        assert store.put("key", changed).ledger.delta_chunks > 0

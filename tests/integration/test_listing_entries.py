"""Test the index entries of a listing: cursors, fields, and manifests that are not read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from nearkin import open_store
from nearkin.embedded.gateway_backend import StoreListing
from nearkin.store import Item, Store
from nearkin_gateway.catalog.version_catalog import ListedVersions, VersionCatalog
from nearkin_shared.config.services import RedisSettings
from nearkin_shared.errors import Corrupt
from nearkin_shared.formats.manifest import Manifest
from nearkin_shared.index.catalog import CatalogEntry
from nearkin_shared.index.lmdb.lmdb_index import LmdbIndex
from nearkin_shared.index.redis import RedisIndex
from nearkin_shared.results import Damage, VersionInfo
from nearkin_shared.storage import descriptor
from nearkin_shared.storage.manifests import ManifestStore, object_name
from tests.support.data.stores import ENCRYPTED, SMALL, settings

KEYS = ["a", "ab", "b", "b/1", "b/2", "é", "x" * 400, "x" * 400 + "1", "x" * 401, "x" * 399 + "é"]
"""An index sorts by the first 400 bytes."""


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with open_store(tmp_path / "s", settings=settings(SMALL), create=True) as store:
        yield store


def manifests_of(store: Store) -> list[Manifest]:
    return [store._manifests.read(name) for name, _ in store._manifests.names()]


@pytest.fixture(params=["lmdb", "redis"])
def index(request: pytest.FixtureRequest, store: Store, tmp_path: Path) -> Iterator[LmdbIndex | RedisIndex]:
    """Two versions of each key of KEYS."""
    for version in (b"one", b"two"):
        list(store.put_many([Item(key, version + key.encode(), {"k": "v"}) for key in KEYS]))
    made: LmdbIndex | RedisIndex
    if request.param == "lmdb":
        made = LmdbIndex(tmp_path / "other", store._fingerprinter.domain, 1 << 26)
    else:
        url, prefix = request.getfixturevalue("redis").url, request.getfixturevalue("key_prefix").rstrip(":")
        made = RedisIndex(RedisSettings(url=url, prefix=prefix), store._fingerprinter.domain)
    made.commit_many([(manifest, 100) for manifest in manifests_of(store)])
    with closing(made):
        yield made


@pytest.mark.parametrize("prefix", ["", "a", "b/", "x" * 400, "nothing"])
def test_catalog_after_resumes_at_each_entry(index: LmdbIndex | RedisIndex, prefix: str) -> None:
    """Continue after any entry at any page size; miss and repeat nothing."""
    expected = [(entry.key, entry.version) for entry in index.catalog("default", prefix)]
    assert expected == sorted(expected, key=lambda one: (one[0].encode(), one[1]))

    def after(key: str, version: int | None, count: int) -> list[tuple[str, int]]:
        found = index.catalog_after("default", prefix, key, version, count)
        return [(entry.key, entry.version) for entry in found]

    for count in (1, 1000):
        assert after("", None, count) == expected
        for at, (key, version) in enumerate(expected):
            assert after(key, version, count) == expected[at + 1 :]
            assert after(key, None, count) == [one for one in expected if one[0].encode() > key.encode()]


def test_entries_equal_manifests(index: LmdbIndex | RedisIndex, store: Store) -> None:
    """All fields of a listing agree with the manifest, in both indexes."""
    infos = {(m.key, m.version): m.info for m in manifests_of(store)}
    assert {(entry.key, entry.version): entry.info for entry in index.catalog("default")} == infos


def test_long_metadata_is_read_from_the_manifest(store: Store) -> None:
    """An index keeps no more than 4 KiB of metadata a version."""
    store.put("k", b"x", metadata={"long": "m" * 5000})
    assert next(iter(store.catalog("default"))).info is None
    assert listed(store)[0].metadata == {"long": "m" * 5000}


def listed(store: Store, count: Callable[[str], None] = lambda _: None) -> list[VersionInfo]:
    catalogue = VersionCatalog.__new__(VersionCatalog)
    catalogue.__init__(store._covered, descriptor.read(store._objects), store.settings, StoreListing(store))  # type: ignore[misc]
    with closing(catalogue):
        found, _ = catalogue.list_versions("default", "", "", 1000, all_versions=False)
    return list(found.found)


def test_listing_reads_no_manifest(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """List versions without tombstones from the index alone; ask the store about others."""
    list(store.put_many([Item(f"k{number}", b"%d" % number) for number in range(50)]))
    read: list[str] = []
    get = ManifestStore.get

    def record_get(manifests: ManifestStore, tenant: str, key: str, version: int) -> Manifest:
        read.append(key)
        return get(manifests, tenant, key, version)

    monkeypatch.setattr(ManifestStore, "get", record_get)
    assert len(listed(store)) == 50
    assert read == []
    store.delete("k7")
    store.undelete("k7")
    store.delete("k8")
    read.clear()
    assert len(listed(store)) == 49
    assert set(read) == {"k7"}


def test_page_of_one_key_reads_few_entries(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A listing of one key does not read the whole catalog, at its start or its end."""
    list(store.put_many([Item(f"k{number:04}", b"x") for number in range(500)]))
    decoded: list[CatalogEntry] = []
    from nearkin_shared.index.lmdb import entry_encoding, lmdb_catalog

    decode_version = entry_encoding.decode_version

    def record_decode(*arguments: object) -> CatalogEntry:
        decoded.append(decode_version(*arguments))  # type: ignore[arg-type]
        return decoded[-1]

    monkeypatch.setattr(lmdb_catalog, "decode_version", record_decode)
    for after in ("", "k0250", "k0499", "zzz"):
        decoded.clear()
        page = store.catalog_after("default", "", after, None, 1)
        assert len(page) == (after < "k0499")
        assert len(decoded) <= 16
    decoded.clear()
    assert [entry.key for entry in islice(store.catalog_after("default", "k0007", "", None, 9), 9)] == ["k0007"]
    assert len(decoded) <= 16


def test_verify_compares_listed_fields(store: Store) -> None:
    """An index that shows another size than the manifest is reported."""
    store.put("k", b"content")
    assert not store.verify().damage
    index = store._index.writable()
    manifest = store._manifests.get("default", "k", 1)
    with index._writing() as txn:
        txn.delete(index._names.version_key("default", "k", 1), db=index._versions)
    index.commit(replace(manifest, size_bytes=8), store._manifests.size_bytes(manifest))
    report = store.verify()
    assert any("listed differently" in damage.problem for damage in report.damage)


def test_metadata_in_any_order_leave_no_damage(store: Store) -> None:
    """Verify metadata in any order: the manifest sorts names, the index does not."""
    store.put("k", b"content", metadata={"z": "1", "a": "2", "é": "3"})
    assert store.verify().damage == ()
    assert list(store.info("k").metadata) == ["a", "z", "é"]


@pytest.mark.parametrize("more", [{}, ENCRYPTED, {"storage": {"parity": "rs-4-2"}}], ids=["clear", "sealed", "parity"])
def test_local_listing_reads_no_manifest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: dict[str, Any]) -> None:
    """Open no manifest of a key without tombstones, whatever kind of put stored it."""
    read: list[str] = []
    get = ManifestStore.get

    def record_get(manifests: ManifestStore, tenant: str, key: str, version: int) -> Manifest:
        read.append(key)
        return get(manifests, tenant, key, version)

    monkeypatch.setattr(ManifestStore, "get", record_get)
    with open_store(tmp_path / "s", settings=settings(SMALL, more), create=True) as store:
        list(store.put_many([Item(f"k{number}", b"%d" % number) for number in range(50)]))
        store.put("k7", b"second")
        read.clear()
        shown = [(info.key, info.version) for info in store.versions()]
        every = [(info.key, info.version) for info in store.versions(all_versions=True)]
        assert read == []
        assert shown == sorted((f"k{number}", 1 + (number == 7)) for number in range(50))
        assert every == sorted([*shown, ("k7", 1)])
        assert store.versions(all_versions=True) == store.versions(all_versions=True, read_manifests=True)
        store.delete("k8")
        store.retain("k9", datetime.now(UTC) + timedelta(days=1))
        read.clear()
        assert len(store.versions()) == 49
        assert set(read) == {"k9"}


def test_local_listing_reports_missing_and_truncated(store: Store, tmp_path: Path) -> None:
    """Report a missing or truncated manifest although manifests are not read."""
    list(store.put_many([Item(f"k{number}", b"%d" % number) for number in range(3)]))
    root = tmp_path / "s"
    (root / object_name("default", "k0", 1)).unlink()
    with (root / object_name("default", "k1", 1)).open("r+b") as file:
        file.truncate(40)
    broken: list[Damage] = []
    assert [info.key for info in store.versions(broken=broken.append)] == ["k2"]
    assert [damage.versions for damage in broken] == [(("k0", 1),), (("k1", 1),)]


def test_gateway_reports_lost_newest_manifest(store: Store, tmp_path: Path) -> None:
    """Report the newest version as damaged if its manifest is missing and the index lists it."""
    store.put("k", b"one")
    store.put("k", b"two")
    store.put("only", b"one")
    for key, version in (("k", 2), ("only", 1)):
        (tmp_path / "s" / object_name("default", key, version)).unlink()
    objects = store._covered
    catalog = VersionCatalog(objects, descriptor.read(objects), store.settings, StoreListing(store))
    with closing(catalog):
        of_key, _ = catalog.versions("default", "k", 0, 10)
        assert [info.version for info in of_key.found] == [1]
        assert [damage.versions for damage in of_key.damaged] == [(("k", 2),)]
        assert catalog.versions("default", "k", 2, 10) == (ListedVersions(), None)
        of_lost, _ = catalog.versions("default", "only", 0, 10)
        assert [damage.versions for damage in of_lost.damaged] == [(("only", 1),)]
        newest, _ = catalog.list_versions("default", "", "", 10, all_versions=False)
        assert newest.found == []
        assert [damage.versions for damage in newest.damaged] == [(("k", 2),), (("only", 1),)]
        with pytest.raises(Corrupt, match="'k' version 2"):
            catalog.manifest("default", "k")

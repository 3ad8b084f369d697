"""Versions that GC freed, whose last tombstone stays to record that their numbers are used."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from nearkin import open_store
from nearkin.embedded.gateway_backend import StoreListing
from nearkin.store import Store
from nearkin_gateway.catalog.version_catalog import VersionCatalog
from nearkin_shared.formats.tombstone import Mark, MarkKind, encode_mark
from nearkin_shared.results import Damage
from nearkin_shared.storage import descriptor
from nearkin_shared.storage.manifests import mark_name, object_name
from tests.support.data.stores import SMALL, settings

AT_ONCE = {"gc": {"grace_seconds": 0}, "deletion": {"undelete_seconds": 0}}
KEEP_TWO = {"retention": {"superseded_seconds": 0, "policies": [{"keep_last": 2}]}}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "s"


def collect_highest(store: Store, key: str) -> None:
    """Put versions 1 to 3, of which GC frees 2 while it is the highest."""
    store.put(key, b"one")
    store.put(key, b"two")
    store.delete(key, 2)
    store.gc()
    store.put(key, b"three")


@pytest.fixture
def store(root: Path) -> Iterator[Store]:
    with open_store(root, settings=settings(SMALL, AT_ONCE), create=True) as store:
        collect_highest(store, "k")
        assert (root / mark_name("default", "k", 2, 2)).exists()
        assert not (root / object_name("default", "k", 2)).exists()
        yield store


@pytest.mark.parametrize("read_manifests", [False, True])
def test_listing_passes_over_a_collected_number(store: Store, read_manifests: bool) -> None:
    """List the version below a collected one once all newer ones are deleted, without damage."""
    store.delete("k", 3)
    broken: list[Damage] = []
    found = store.versions(broken=broken.append, read_manifests=read_manifests)
    assert ([info.version for info in found], broken) == ([1], [])
    assert store.get("k").read() == b"one"


def test_listing_reports_a_lost_undeleted_version(store: Store, root: Path) -> None:
    """Report an undeleted version whose manifest and first tombstone are missing."""
    store.delete("k", 3)
    undeleted = Mark("default", "k", 3, 2, MarkKind.UNDELETED, 1, 0)
    (root / mark_name("default", "k", 3, 2)).write_bytes(encode_mark(undeleted))
    (root / object_name("default", "k", 3)).unlink()
    (root / mark_name("default", "k", 3, 1)).unlink()
    broken: list[Damage] = []
    assert store.versions(broken=broken.append) == []
    assert [damage.versions for damage in broken] == [(("k", 3),)]


def test_gateway_passes_over_a_collected_number(store: Store) -> None:
    """List over HTTP the version below a collected one once all newer ones are deleted."""
    store.delete("k", 3)
    objects = store._covered
    with closing(VersionCatalog(objects, descriptor.read(objects), store.settings, StoreListing(store))) as catalog:
        newest, _ = catalog.list_versions("default", "", "", 10, all_versions=False)
        assert ([info.version for info in newest.found], newest.damaged) == ([1], [])
        of_key, _ = catalog.versions("default", "k", 0, 10)
        assert ([info.version for info in of_key.found], of_key.damaged) == ([1], [])


def test_policies_pass_over_a_collected_number(store: Store, root: Path) -> None:
    """Apply a policy to a key with a collected number, which is no unreadable version."""
    store.put("k", b"four")
    store.close()
    with open_store(root, settings=settings(SMALL, AT_ONCE, KEEP_TWO), create=True) as again:
        assert again.gc(dry_run=True).forgotten == again.gc().forgotten == 1
        assert [info.version for info in again.versions(all_versions=True)] == [3, 4]

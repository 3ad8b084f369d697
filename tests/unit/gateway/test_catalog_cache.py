"""Test that restores of all tenants of a gateway share one bounded cache of decoded blocks (I9, I10)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from nearkin.embedded.gateway_backend import StoreListing
from nearkin.lab.generated_data import text_like
from nearkin.store import open_store
from nearkin_gateway.catalog.version_catalog import VersionCatalog
from nearkin_shared.config.loader import with_changes
from nearkin_shared.config.settings import Settings
from nearkin_shared.errors import Corrupt
from nearkin_shared.limits import MIB
from nearkin_shared.objectstore.local import LocalObjectStore
from nearkin_shared.storage import descriptor

TENANTS = ("one", "two", "three")
CACHE_BYTES = 8 * MIB


def content_of(tenant: str) -> bytes:
    """Return 4 MiB of text, other in each tenant, which are stored compressed."""
    return text_like(4 * MIB, seed=TENANTS.index(tenant))


@pytest.fixture
def catalog(tmp_path: Path) -> Iterator[VersionCatalog]:
    """Return the catalog of a gateway over a store of three tenants."""
    root = tmp_path / "s"
    for tenant in TENANTS:
        changed = with_changes(Settings(), {"tenant": tenant, "restore": {"cache_bytes": CACHE_BYTES}})
        with open_store(root, settings=changed, create=True) as store:
            store.put("k", content_of(tenant))
    objects = LocalObjectStore(root)
    with open_store(root, settings=changed) as store:
        found = VersionCatalog(objects, descriptor.read(objects), store.settings, StoreListing(store))
        with closing(found):
            yield found


def test_catalog_restores_tenants_through_one_cache(catalog: VersionCatalog) -> None:
    """All of `restore.cache_bytes` serves whichever tenant reads, and it is the bound for all together."""
    for tenant in TENANTS:
        manifest = catalog.manifest(tenant, "k")
        assert catalog.blob(tenant, manifest, 0, 4 * MIB).read() == content_of(tenant)
    blocks = {
        id(catalog._tenant(tenant).containers.blocks): catalog._tenant(tenant).containers.blocks for tenant in TENANTS
    }
    assert [cache.bytes_max for cache in blocks.values()] == [CACHE_BYTES]


def test_catalog_keeps_cached_blocks_from_tenants(catalog: VersionCatalog) -> None:
    """Chunks that another tenant's restore has cached stay unreadable: their containers are of another domain."""
    manifest = catalog.manifest("one", "k")
    assert catalog.blob("one", manifest, 0, 4 * MIB).read() == content_of("one")
    with pytest.raises(Corrupt, match="another tenant"):
        catalog.blob("two", manifest, 0, 4 * MIB).read()

"""Manifests that are stored under the object name of another tenant, key or version."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from nearkin import Corrupt, open_store
from nearkin_shared.storage.manifests import object_name
from tests.support.data.stores import SMALL, settings


def test_get_manifest_of_other_tenant_is_refused(tmp_path: Path) -> None:
    """F.32: A manifest of another tenant under this tenant's object name is Corrupt, not returned (I9)."""
    root = tmp_path / "s"
    for tenant in ("one", "other"):
        with open_store(root, settings=settings(SMALL, {"tenant": tenant}), create=True) as store:
            store.put("k", tenant.encode() * 100)
    shutil.copyfile(root / object_name("other", "k", 1), root / object_name("one", "k", 1))
    with open_store(root, settings=settings(SMALL, {"tenant": "one"})) as store:
        with pytest.raises(Corrupt, match="is the manifest of"):
            store.get("k").read()
        assert object_name("one", "k", 1) in str(store.verify().damage)


def test_get_manifest_of_other_version_is_refused(tmp_path: Path) -> None:
    """F.32: The manifest of an older version under the newest version's object name is Corrupt."""
    root = tmp_path / "s"
    with open_store(root, settings=settings(SMALL), create=True) as store:
        store.put("k", b"old content")
        store.put("k", b"new content")
    tenant = settings(SMALL).tenant
    shutil.copyfile(root / object_name(tenant, "k", 1), root / object_name(tenant, "k", 2))
    with open_store(root, settings=settings(SMALL)) as store, pytest.raises(Corrupt, match="is the manifest of"):
        store.get("k").read()

"""Erasures of tenants with retained versions, and the copies that an erasure does not reach."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from nearkin import open_store
from nearkin.store import Store
from nearkin_maintenance.gc.tenant_erasure import find_retained, remaining_copies
from nearkin_shared.config.loader import with_changes
from nearkin_shared.config.settings import Settings
from nearkin_shared.crypto.key_wrapping import generate
from nearkin_shared.errors import RetentionActive, TenantErased
from nearkin_shared.limits import ERASE_GRACE_SECONDS
from tests.support.checks.commands import InProcess, assert_refused

LATER = (datetime.now(UTC) + timedelta(days=30)).replace(microsecond=0)


def settings_of(root: Path, tenant: str = "other", **more: object) -> Settings:
    storage = {"encryption": "aes-256-gcm", "key_file": str(root.parent / "kek")}
    return with_changes(Settings(), {"tenant": tenant, "storage": storage, **more})


def open_root(root: Path, tenant: str = "other", **more: object) -> Store:
    return open_store(root, settings=settings_of(root, tenant, **more), create=True)


@pytest.fixture
def call(capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch) -> InProcess:
    return InProcess(capfdbinary, monkeypatch)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Return an encrypted store with the tenants acme and other."""
    generate(tmp_path / "kek")
    for tenant in ("acme", "other"):
        with open_root(tmp_path / "s", tenant) as store:
            store.put("k", tenant.encode())
            store.put("k", tenant.encode() * 2)
    return tmp_path / "s"


def test_erasure_of_a_retained_tenant_is_refused(root: Path) -> None:
    """F.29: `keys erase` deleted retained data silently; it names how many versions, until when, and the flag."""
    with open_root(root, "acme") as store:
        store.retain("k", LATER, 1)
        store.retain("k", LATER - timedelta(days=1), 2)
    with open_root(root) as store:
        match = rf"'acme': retained versions: 2, the last one until {LATER:%Y-%m-%dT%H:%M:%SZ}"
        for grace_seconds in (0, ERASE_GRACE_SECONDS):
            with pytest.raises(
                RetentionActive, match=match + r" \('k' version 1, 'k' version 2\).*--despite-retention"
            ):
                store.erase_tenant("acme", grace_seconds)
        assert store.erase_tenant("other", 0) == 1
    with open_root(root, "acme") as store:
        assert store.get("k").read() == b"acmeacme"
        assert store.erase_tenant("acme", despite_retention=True) == 1
        assert store.erase_tenant("acme", 0) == 1  # the grace is cut short: it was decided before
        with pytest.raises(TenantErased):
            store.get("k")


def test_erasure_counts_the_age_of_the_settings(root: Path) -> None:
    """F.29: `retention.min_age_seconds` of the process that erases retains, too."""
    with (
        open_root(root, retention={"min_age_seconds": 86_400}) as store,
        pytest.raises(RetentionActive, match="retained versions: 2"),
    ):
        store.erase_tenant("acme", 0)


def test_erasure_refuses_retention_that_cannot_be_read(root: Path) -> None:
    """F.29: A damaged manifest may retain its version: the erasure names it and refuses."""
    with open_root(root, "acme") as store:
        name = store._manifests.retentions.name("acme", "k", 2, 1)
        store.retain("k", LATER, 2)
    path = root / name
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with open_root(root) as store:
        with pytest.raises(RetentionActive, match=r"unreadable retention: 1 \(first: manifests/"):
            store.erase_tenant("acme", 0)
        assert store.erase_tenant("acme", 0, despite_retention=True) == 1


def test_keys_erase_of_retained_tenant_needs_a_flag(call: InProcess, root: Path) -> None:
    """F.29, F.26: The command refuses without the flag, and lists the copies that the erasure does not reach, as JSON
    too.
    """
    environment = {
        "NEARKIN_STORE": str(root),
        "NEARKIN_STORAGE__ENCRYPTION": "aes-256-gcm",
        "NEARKIN_STORAGE__KEY_FILE": str(root.parent / "kek"),
    }
    with open_root(root, "acme") as store:
        store.retain("k", LATER, 1)
    assert_refused(call("keys", "erase", "acme", "--yes", env=environment), 1, "--despite-retention")
    output = call("keys", "erase", "acme", "--yes", "--despite-retention").stdout.decode()
    assert "out of the reach of the erasure:" in output
    for kind in ("key-copies", "backups", "index", "staged-uploads", "logs"):
        assert f"\n  {kind} " in output
    done = call("keys", "erase", "other", "--yes", "--json")
    copies = {one["place"]: one for one in json.loads(done.stdout)["remaining"]}
    assert set(copies["backups"]) == {"place", "holds", "until", "remedy"}
    assert datetime.fromisoformat(copies["staged-uploads"]["until"]) > datetime.now(UTC) + timedelta(days=1)


def test_remaining_copies_of_services_have_times(tmp_path: Path) -> None:
    """F.26: Kafka's topics with the end of their retention, Redis dumps and bucket versions are among the copies."""
    changes = {
        "object_store": {"url": "s3://bucket/prefix"},
        "kafka": {"retention_hours": 48, "topic_prefix": "blue."},
        "ingest": {"topics": ["orders=acme"]},
    }
    closed = datetime(2026, 11, 27, tzinfo=UTC)
    found = {one.place: one for one in remaining_copies(with_changes(Settings(), changes), closed, closed)}
    assert found["kafka"].until == closed + timedelta(hours=48)
    assert "blue.*" in found["kafka"].holds
    assert "orders" in found["ingest-topics"].holds
    assert {"redis", "bucket-versions", "key-copies", "backups", "logs", "memory"} <= found.keys()
    assert "index" not in found


def test_erasure_in_services_looks_at_manifests(root: Path, call: InProcess) -> None:
    """F.29: With `object_store.url` set the command reads the manifests of the object store, and refuses alike."""
    with open_root(root, "acme") as store:
        store.retain("k", LATER, 1)
        assert find_retained(store._covered, "acme", store.settings, LATER.timestamp() + 1).count == 0  # type: ignore[arg-type]
    environment = {
        "NEARKIN_OBJECT_STORE__URL": str(root),
        "NEARKIN_STORAGE__ENCRYPTION": "aes-256-gcm",
        "NEARKIN_STORAGE__KEY_FILE": str(root.parent / "kek"),
    }
    assert_refused(call("keys", "erase", "acme", "--yes", env=environment), 1, "retained versions: 1")
    assert call.answer("keys", "erase", "acme", "--yes", "--despite-retention")["keys"] == 1

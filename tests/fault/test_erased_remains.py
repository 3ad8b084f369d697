"""Data that an erasure removes in addition to objects: staged uploads, and the local index file with its free pages."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from nearkin import open_store
from nearkin.store import Store
from nearkin_gateway.uploads.resumable_store import Meta, Resumable, UploadOutcome
from nearkin_shared.config.loader import with_changes
from nearkin_shared.config.settings import Settings
from nearkin_shared.crypto.key_wrapping import generate
from nearkin_shared.errors import Corrupt, NotFound, StoreUnavailable, TenantErased
from nearkin_shared.fingerprints import domain_of
from nearkin_shared.formats import encrypted_object
from nearkin_shared.formats.encrypted_object import STORE_OWNER
from nearkin_shared.utils import failpoints
from nearkin_shared.utils.failpoints import ERASURE_POINTS
from tests.support.data.test_keys import MemoryKeys
from tests.support.servers.maintenance_workers import Fleet
from tests.support.servers.servers import Redis

CONTENT = b"a part of a file that is uploaded and staged" * 100


@pytest.fixture(autouse=True)
def _disarmed() -> Iterator[None]:
    yield
    failpoints.disarm()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Return an encrypted store with the tenants acme and other."""
    generate(tmp_path / "kek")
    for tenant in ("acme", "other"):
        with open_root(tmp_path / "s", tenant) as store:
            for number in range(20):
                store.put(f"{tenant}-{number}", tenant.encode() * 100 + bytes([number]))
    return tmp_path / "s"


def open_root(root: Path, tenant: str = "other") -> Store:
    storage = {"encryption": "aes-256-gcm", "key_file": str(root.parent / "kek")}
    settings = with_changes(Settings(), {"tenant": tenant, "storage": storage, "gc": {"grace_seconds": 0}})
    return open_store(root, settings=settings, create=True)


def meta(tenant: str, **more: object) -> Meta:
    now_us = time.time_ns() // 1000
    made = Meta(tenant, f"secret/{tenant}", 2 * len(CONTENT), now_us, now_us + 3_600_000_000)
    return replace(made, **more)  # type: ignore[arg-type]


def owners(store: Store) -> set[bytes]:
    """Return the tenants whose keys encrypted the objects of uploads."""
    inner = store._covered.inner
    return {encrypted_object.head_of(inner.get(name), name).owner for name, _ in inner.names("uploads")}


def test_staged_uploads_are_encrypted_by_tenant(root: Path) -> None:
    """F.26: Meta, parts, claim and end of an upload are encrypted under the tenant's keys, not under the store's."""
    with open_root(root) as store:
        uploads = Resumable(store._covered, 10)
        partial = uploads.create(meta("acme", partial=True, length_bytes=len(CONTENT)))
        uploads.stage(partial, 0, CONTENT, tenant="acme")
        uploads.create_final("f" * 32, meta("acme", sources=(partial,), length_bytes=len(CONTENT)))
        other = uploads.create(meta("acme"))
        uploads.stage(other, 0, CONTENT, tenant="acme")
        assert owners(store) == {store.keyring.owner_of(domain_of("acme"))}
        staged = uploads.load("acme", other)
        assert b"".join(uploads.read(staged)) == CONTENT
        uploads.finish(staged, UploadOutcome("0" * 64))
        assert owners(store) == {store.keyring.owner_of(domain_of("acme"))}


def test_erasure_makes_staged_uploads_unreadable(root: Path) -> None:
    """F.26: After `keys erase` no staged byte of the tenant is read, and GC frees them; another tenant's stay."""
    with open_root(root) as store:
        uploads = Resumable(store._covered, 10)
        numbers = {tenant: uploads.create(meta(tenant)) for tenant in ("acme", "other")}
        for tenant, number in numbers.items():
            uploads.stage(number, 0, CONTENT, tenant=tenant)
        staged = uploads.load("acme", numbers["acme"])
        store.erase_tenant("acme", 0)
        with pytest.raises(TenantErased):
            b"".join(uploads.read(staged))
        with pytest.raises(TenantErased):
            uploads.load("acme", numbers["acme"])
        with pytest.raises(TenantErased):
            uploads.create(meta("acme"))
        handed_over: list[object] = []
        uploads.sweep(handed_over.append)
        assert handed_over == []
        store.gc()
        assert not list((root / "uploads" / numbers["acme"]).rglob("*.*"))
        left = {name.split("/")[1] for name, _ in store._covered.inner.names("uploads")}
        assert left == {numbers["other"]}
        assert b"".join(uploads.read(uploads.load("other", numbers["other"]))) == CONTENT


def test_uploads_of_an_older_release_are_read(root: Path) -> None:
    """F.26: An upload staged under the store's key continues, is read, and expires as before."""
    with open_root(root) as store:
        uploads = Resumable(store._covered, 10)
        number = uploads.create(meta("acme"))
        for name, _ in list(store._covered.names("uploads")):
            data = store._covered.get(name)
            store._covered.delete(name)
            store._covered.put_new(name, data)  # as an older release did
        assert owners(store) == {STORE_OWNER}
        uploads.stage(number, 0, CONTENT, tenant="acme")
        uploads.stage(number, len(CONTENT), CONTENT, tenant="acme")
        assert len(owners(store)) == 2
        assert b"".join(uploads.read(uploads.load("acme", number))) == 2 * CONTENT
        uploads.remove(number)
        with pytest.raises(NotFound):
            uploads.load("acme", number)


def index_file(root: Path) -> tuple[int, bytes]:
    path = root / "index" / "data.mdb"
    return path.stat().st_ino, path.read_bytes()


def digests(root: Path) -> list[bytes]:
    """Return fingerprints, as the index stores them, of chunks that only the tenant has."""
    with open_root(root, "acme") as store:
        found = []
        for container, _ in store._containers.of(None).ids():
            directory = store._containers.of(None).directory(container)
            if directory.domain == domain_of("acme"):
                found += [bytes(name)[:8] for name in directory.chunks.names]
    return found


def test_gc_rebuilds_the_index_after_an_erasure(root: Path) -> None:
    """F.26: Free pages of the index kept an erased tenant's digests: GC replaces the file, once, after the grace."""
    expected = digests(root)
    inode, before = index_file(root)
    assert any(digest in before for digest in expected)
    with open_root(root) as store:
        store.erase_tenant("acme", 3600)
        store.gc()
        assert index_file(root)[0] == inode  # in its grace: it can be cancelled
        store.erase_tenant("acme", 0)
        report = store.gc()
        assert report.finished_erasures == 1
        assert {"key-copies", "backups"} <= {one.place for one in report.remaining}
    after_inode, after = index_file(root)
    assert after_inode != inode
    assert not any(digest in after for digest in expected)
    with open_root(root) as store:
        assert store.gc().finished_erasures == 1, "reported until it is recorded as swept, minutes after its removal"
        assert index_file(root)[0] == after_inode
        store.keyring._wall_clock = lambda: time.time() + 3600
        store.gc()  # records it
        assert store.gc().finished_erasures == 0
        assert index_file(root)[0] == after_inode
        assert len(store.versions()) == 20
        assert store.get("other-3").read() == b"other" * 100 + b"\3"
        assert store.verify().damage == ()


@pytest.mark.parametrize("point", ["object.removed:3", "gc.marked:1", *(f"{point}:1" for point in ERASURE_POINTS)])
def test_erasure_is_reported_by_the_run_after_a_killed_one(root: Path, point: str) -> None:
    """F.22: A run that ends before its report leaves that to the next one: erasure and remaining copies."""
    with open_root(root) as store:
        store.erase_tenant("acme", 0)
        failpoints.arm(f"{point}:error")
        with pytest.raises(StoreUnavailable, match="failpoint"):
            store.gc()
        failpoints.disarm()
    for _ in range(2):
        with open_root(root) as store:
            report = store.gc()
            assert report.finished_erasures == 1
            assert {"key-copies", "backups"} <= {one.place for one in report.remaining}


def test_fleet_reports_an_erasure_after_runs_that_were_cut_short(root: Path, redis: Redis, key_prefix: str) -> None:
    """F.22: An erasure is recorded as swept after the run that reports it, not by one that ends before its report."""
    with open_root(root) as store:
        store.erase_tenant("acme", 0)
        fleet = Fleet(store._covered, redis.url, key_prefix.rstrip(":"), time.time() + 3600, store.settings)
        with closing(fleet.index):
            fleet.fill_index()
            worker = fleet.make_gc_worker()
            for ahead_seconds in (0, 3600):  # the second run would record it: no writer can add to it any more
                store.keyring._wall_clock = partial(lambda ahead: time.time() + ahead, ahead_seconds)
                failpoints.arm("gc.marked:1:error")
                with pytest.raises(StoreUnavailable, match="failpoint"):
                    worker.run_once()
                failpoints.disarm()
            for finished in (1, 0):
                fleet.now += 100
                report = worker.run_once()
                assert report is not None
                assert report.finished_erasures == finished


@pytest.mark.parametrize("point", [*ERASURE_POINTS, "rebuild.complete", "rebuild.removed", "rebuild.renamed"])
def test_erasure_cut_short_is_completed_by_the_next_gc(root: Path, point: str) -> None:
    """F.26: At whichever step the run that completes an erasure dies, the next run leaves nothing in the index."""
    expected = digests(root)
    with open_root(root) as store:
        store.erase_tenant("acme", 0)
        failpoints.arm(f"{point}:1:error")
        with pytest.raises(StoreUnavailable, match="failpoint"):
            store.gc()
        assert failpoints.disarm()[point] == 1
    with open_root(root) as store:
        store.gc()
        assert len(store.versions()) == 20
    _, after = index_file(root)
    assert not any(digest in after for digest in expected)


def test_part_of_another_tenant_is_refused(root: Path) -> None:
    """F.26: A part under deleted keys is damage that names the object, never another content."""
    with open_root(root) as store:
        uploads = Resumable(store._covered, 10)
        number = uploads.create(meta("other"))
        uploads.stage(number, 0, CONTENT, tenant="acme")
        staged = uploads.load("other", number)
        for path in (root / "keys" / store.keyring.owner_of(domain_of("acme")).hex()).iterdir():
            path.unlink()
    with open_root(root) as store, pytest.raises(Corrupt, match="encrypted by key"):
        b"".join(Resumable(store._covered, 10).read(staged))


def test_erasures_are_found_by_tenant() -> None:
    """F.26: A keyring reports whether a tenant is being erased, before and after."""
    keys = MemoryKeys()
    keys.keyring.newest(domain_of("db"))
    assert keys.keyring.find_erasure("db") is None
    keys.keyring.erase("db", 60)
    found = keys.keyring.find_erasure("db")
    assert found is not None
    assert found.problem is None
    assert keys.keyring.list_due() == []

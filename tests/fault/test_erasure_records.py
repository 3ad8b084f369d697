"""Erasures of tenants: forged or damaged records remove nothing, and an erasure waits for its grace."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from nearkin import open_store
from nearkin.cli.verify import verify_lines
from nearkin.store import Store
from nearkin_maintenance.verify.scrub_worker import BackgroundScrub
from nearkin_shared.config.loader import with_changes
from nearkin_shared.config.settings import Settings
from nearkin_shared.crypto.key_wrapping import generate
from nearkin_shared.errors import BadInput, Corrupt, NotFound, StoreUnavailable, TenantErased
from nearkin_shared.fingerprints import domain_of
from nearkin_shared.formats import key_record as fmt
from nearkin_shared.storage.containers import id_of, object_name
from nearkin_shared.types import ContainerId
from nearkin_shared.utils.failpoints import arm, disarm

CONTENT = bytes(range(256)) * 400


class Clock:
    """Wall clock that a test moves."""

    def __init__(self) -> None:
        self.now = 1_764_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Return an encrypted store with the tenants acme and other."""
    generate(tmp_path / "kek")
    for tenant in ("acme", "other"):
        with open_root(tmp_path / "s", tenant) as store:
            store.put("k", CONTENT + tenant.encode())
    return tmp_path / "s"


def open_root(root: Path, tenant: str = "other", **more: object) -> Store:
    settings = with_changes(
        Settings(),
        {
            "tenant": tenant,
            "storage": {"encryption": "aes-256-gcm", "key_file": str(root.parent / "kek")},
            "gc": {"grace_seconds": 0},
            **more,
        },
    )
    return open_store(root, settings=settings, create=True)


def objects(root: Path) -> set[str]:
    found = (p.relative_to(root) for p in root.rglob("*") if p.is_file())
    return {str(p) for p in found if p.parts[0] in ("containers", "manifests", "keys")}


def owner_of(root: Path, tenant: str) -> bytes:
    from nearkin_shared.fingerprints import domain_of

    with open_root(root) as store:
        return store.keyring.owner_of(domain_of(tenant))


FORGERIES = {
    "empty": lambda owner: b"",
    "format-1": lambda owner: fmt._encode(
        {"format": fmt.ERASED_FORMAT, "format_version": 1, "owner": owner.hex(), "erased_us": 1}
    ),
    "wrong-mac": lambda owner: fmt.encode_erased(owner, 1, 1, bytes(32)),
}


@pytest.mark.parametrize("forgery", FORGERIES)
def test_gc_with_forged_erasure_frees_nothing(root: Path, forgery: str) -> None:
    """F.22: An erasure record that the store's key does not authenticate removes nothing; it is reported."""
    owner, before = owner_of(root, "acme"), objects(root)
    path = root / fmt.erased_name(owner)
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(FORGERIES[forgery](owner))
    with open_root(root, "acme") as store, pytest.raises(Corrupt, match=f"{fmt.erased_name(owner)}.*remove the file"):
        store.get("k").read()
    with open_root(root) as store:
        for _ in range(3):
            report = store.gc()
        assert report.refused_records == 1
        assert [found.object_name for found in store.verify().damage] == [fmt.erased_name(owner)]
        store.rebuild_index()
        assert store.get("k").read() == CONTENT + b"other"
    assert before <= objects(root)
    path.unlink()
    shutil.rmtree(root / "index")
    with open_root(root, "acme") as store:
        assert store.get("k").read() == CONTENT + b"acme"


@pytest.mark.parametrize("forgery", FORGERIES)
def test_verify_with_forged_erasure_checks_containers(root: Path, forgery: str) -> None:
    """F.22: Verify rejects a forged erasure record: it reads the tenant's containers and names the remedy."""
    owner = owner_of(root, "acme")
    with open_root(root) as store:
        sound = store.verify()
    path = root / fmt.erased_name(owner)
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(FORGERIES[forgery](owner))
    with open_root(root) as store:
        report = store.verify()
        (damage,) = report.damage
        assert (report.containers, report.versions, report.erased_objects) == (sound.containers, sound.versions, 0)
        assert "keys erase TENANT --cancel" in damage.problem
        assert "Expecting value" not in damage.problem
        lines = "\n".join(verify_lines(report))
        assert "of erased tenants" not in lines
        assert "repair --from" not in lines
        stored = [name for name in objects(root) if name.startswith("containers/")]
        harmed = max(stored, key=lambda name: (root / name).stat().st_size)
    data = bytearray((root / harmed).read_bytes())
    data[len(data) // 2] ^= 1
    (root / harmed).write_bytes(data)
    with open_root(root) as store:
        assert harmed in {found.object_name for found in store.verify().damage}


@pytest.mark.parametrize("is_fleet", [False, True], ids=["local", "fleet"])
def test_scrub_with_forged_erasure_checks_containers(
    root: Path, is_fleet: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """F.22: A scrub believes no forged erasure record: it reads the tenant's containers and reports their damage."""
    owner = owner_of(root, "acme")
    with open_root(root) as store:
        owners = {name: store._containers.of(None).directory(c).domain for c, name in named_containers(store)}
    (harmed,) = (name for name, domain in owners.items() if domain == domain_of("acme"))
    data = bytearray((root / harmed).read_bytes())
    data[len(data) // 2] ^= 1
    (root / harmed).write_bytes(data)
    path = root / fmt.erased_name(owner)
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(FORGERIES["wrong-mac"](owner))
    with open_root(root, scrub={"rate_bytes": "1GiB"}) as store:
        if is_fleet:
            scrub = BackgroundScrub(store._covered, lambda: store.settings, store._fingerprinters, None)
            for _ in range(4):
                scrub.step()
            assert f"{harmed} is damaged; affected: 'k' version 1 of 'acme'" in caplog.text
        else:
            scrubber, damaged = store.scrubber(), dict[str, object]()
            for _ in range(4):
                damaged |= scrubber.step().damaged
            assert {harmed, fmt.erased_name(owner)} <= damaged.keys()
        assert list(store._quarantine.read()) == ([container_of(harmed)] if is_fleet else [])


def named_containers(store: Store) -> list[tuple[ContainerId, str]]:
    return [(c, object_name(c, store._containers.generation(c))) for c, _ in store._containers.ids()]


def container_of(name: str) -> int:
    found = id_of(name)
    assert found is not None
    return int(found)


def test_gc_with_forged_swept_record_still_sweeps(root: Path) -> None:
    """F.22: A forged record that an erased tenant is swept does not keep its objects."""
    owner = owner_of(root, "acme")
    with open_root(root, "acme") as store:
        store.erase_tenant("acme", 0)
    (root / fmt.swept_name(owner)).write_bytes(fmt.encode_erased(owner, 1, 1, bytes(32), swept=True))
    with open_root(root) as store:
        store.gc()
        assert store.verify().erased_objects == 0


def test_erasure_waits_for_its_grace_and_is_counted(root: Path) -> None:
    """F.22: Within the grace the tenant is closed, nothing is removed, and a cancelled erasure leaves all readable."""
    before = objects(root)
    with open_root(root, "acme") as store:
        assert store.erase_tenant("acme") == 1
        with pytest.raises(TenantErased):
            store.get("k")
    with open_root(root) as store:
        for _ in range(2):
            report = store.gc()
        assert (report.pending_erasures, report.refused_records) == (1, 0)
        assert store.verify().damage == ()
        assert before < objects(root)
        store.keyring.cancel_erasure("acme")
        with pytest.raises(NotFound):
            store.keyring.cancel_erasure("acme")
    with open_root(root, "acme") as store:
        assert store.get("k").read() == CONTENT + b"acme"
    assert before == objects(root)


def test_erasure_after_its_grace_removes_keys_and_objects(root: Path) -> None:
    """F.22: Once the grace is over a GC run removes the keys, then the objects; it cannot be cancelled any more."""
    owner, clock = owner_of(root, "acme"), Clock()
    with open_root(root) as store:
        store.keyring._wall_clock = clock
        store.keyring.erase("acme", 3600)
        store.gc()
        assert f"keys/{owner.hex()}" in {p.rpartition("/")[0] for p in objects(root)}
        clock.now += 3601
        with pytest.raises(BadInput, match="is over"):
            store.keyring.cancel_erasure("acme")
        report = store.gc()
        assert report.pending_erasures == 0
        assert report.freed_bytes > 0
        assert f"keys/{owner.hex()}" not in {p.rpartition("/")[0] for p in objects(root)}
        assert store.verify().erased_objects == 0
        assert store.get("k").read() == CONTENT + b"other"


def test_erase_again_without_grace_removes_keys_at_once(root: Path) -> None:
    """F.22: A waiting erasure is shortened by a second one, which also replaces a forged record."""
    owner = owner_of(root, "acme")
    path = root / fmt.erased_name(owner)
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"")
    with open_root(root) as store:
        store.keyring.erase("acme", 3600)
        assert len(store.keyring.erasures()) == 1
        assert store.keyring.erasures()[0].problem is None
        assert store.keyring.erase("acme", 7200) == 1
        assert store.keyring.erase("acme", 0) == 1
        assert store.keyring.erase("acme", 0) == 0


def test_old_erasure_record_without_keys_is_still_swept(root: Path) -> None:
    """F.22: A record of format 1 whose owner has no key left, as an older release writes it, is still accepted."""
    owner = owner_of(root, "acme")
    path = root / fmt.erased_name(owner)
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(FORGERIES["format-1"](owner))
    shutil.rmtree(root / "keys" / owner.hex())
    with open_root(root, "acme") as store, pytest.raises(TenantErased):
        store.get("k")
    with open_root(root) as store:
        assert store.gc().refused_records == 0
        assert store.verify().erased_objects == 0
        assert store.verify().damage == ()


@pytest.mark.parametrize("heads", ["kept", "lost"])
def test_cancelled_erasure_put_back_removes_nothing(root: Path, heads: str) -> None:
    """F.22: A copy of a cancelled erasure record is reported and frees nothing; it blocks only where heads are lost."""
    owner, clock = owner_of(root, "acme"), Clock()
    path = root / fmt.erased_name(owner)
    with open_root(root, "acme") as store:
        store.keyring._wall_clock = clock
        store.keyring.erase("acme", 8)
        copy = path.read_bytes()
        store.keyring.cancel_erasure("acme")
        store.put("after", CONTENT + b"after the cancel")
    before, clock.now = objects(root), clock.now + 9
    path.write_bytes(copy)
    if heads == "lost":
        shutil.rmtree(root / "heads" / "keys")
    for _ in range(2):
        with open_root(root) as store:
            store.keyring._wall_clock = clock
            report = store.gc()
            assert (report.refused_records, report.finished_erasures) == (1, 0)
            assert [found.object_name for found in store.verify().damage] == [fmt.erased_name(owner)]
    assert before <= objects(root)
    if heads == "kept":
        with open_root(root, "acme") as store:
            assert store.get("after").read() == CONTENT + b"after the cancel"
    with open_root(root) as store:
        store.keyring._wall_clock = clock
        store.keyring.cancel_erasure("acme")
    path.write_bytes(copy)
    with open_root(root) as store:
        store.keyring._wall_clock = clock
        assert store.gc().refused_records == 1
        store.keyring.cancel_erasure("acme")
        store.rebuild_index()
    with open_root(root, "acme") as store:
        assert store.get("after").read() == CONTENT + b"after the cancel"


def test_erasure_after_a_cancel_removes_keys(root: Path) -> None:
    """F.22: A tenant whose erasure was cancelled can be erased again, also after its key heads were lost."""
    owner = owner_of(root, "acme")
    with open_root(root) as store:
        store.keyring.erase("acme", 3600)
        store.keyring.cancel_erasure("acme")
        store.keyring.erase("acme", 3600)
        assert store.keyring.erasures()[0].problem is None
        shutil.rmtree(root / "heads" / "keys")
        assert store.keyring.find_erasure("acme").problem is not None  # type: ignore[union-attr]
        assert store.keyring.erase("acme", 0) == 1
        assert store.gc().refused_records == 0
        assert not store.keyring.has_keys(owner)


def test_cancel_that_dies_before_removal_has_cancelled(root: Path) -> None:
    """F.22: A cancel killed after the epoch was advanced leaves the tenant open, and its record is reported."""
    clock = Clock()
    with open_root(root, "acme") as store:
        store.keyring._wall_clock = clock
        store.keyring.erase("acme", 8)
        arm("key.erasure-cancelled:1:error")
        with pytest.raises(StoreUnavailable, match="failpoint"):
            store.keyring.cancel_erasure("acme")
        disarm()
    clock.now += 9
    with open_root(root, "acme") as store:
        assert store.get("k").read() == CONTENT + b"acme"
    with open_root(root) as store:
        store.keyring._wall_clock = clock
        assert store.gc().refused_records == 1
        store.keyring.cancel_erasure("acme")
        store.rebuild_index()
    with open_root(root, "acme") as store:
        assert store.get("k").read() == CONTENT + b"acme"

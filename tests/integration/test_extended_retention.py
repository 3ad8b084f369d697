"""Test retention extended after the commit: honoured by deletions, GC and rebuild.

Never shortened.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from nearkin import open_store
from nearkin.store import Store
from nearkin_shared.config.loader import with_changes
from nearkin_shared.config.settings import Settings
from nearkin_shared.config.storage import RetentionPolicy
from nearkin_shared.crypto.key_wrapping import generate
from nearkin_shared.errors import BadInput, Corrupt, NotFound, RetentionActive, StoreUnavailable
from nearkin_shared.formats.retention_record import RetentionRecord, encode_retention
from nearkin_shared.formats.tombstone import Mark, MarkKind
from nearkin_shared.utils import failpoints
from nearkin_shared.utils.failpoints import RETENTION_POINTS
from tests.support.engines.power_cut import read_tree, write_tree
from tests.support.fakes.clock import DAY, Clock
from tests.support.fakes.power_loss_disk import Disk, recording

START = datetime(2026, 11, 2, 6, tzinfo=UTC)
LATER = START + timedelta(days=30)
KINDS = ("plain", "encrypted")


@pytest.fixture
def clock() -> Clock:
    return Clock(START.timestamp())


@pytest.fixture(autouse=True)
def _disarmed() -> Iterator[None]:
    yield
    failpoints.disarm()


def open_collected(root: Path, clock: Clock, kind: str = "plain", **more: object) -> Store:
    """Open a store in which GC frees at once what may be freed."""
    storage: dict[str, object] = {}
    if kind == "encrypted":
        if not (root.parent / "kek").exists():
            generate(root.parent / "kek")
        storage = {"encryption": "aes-256-gcm", "key_file": str(root.parent / "kek")}
    changes = {"storage": storage, "gc": {"grace_seconds": 0}, "deletion": {"undelete_seconds": 0}, **more}
    return open_store(root, settings=with_changes(Settings(), changes), clock=clock, create=True)


def records(root: Path) -> list[Path]:
    return sorted((root / "manifests").rglob("*.nkr"))


@pytest.mark.parametrize("kind", KINDS)
def test_extended_retention_refuses_every_deletion(tmp_path: Path, clock: Clock, kind: str) -> None:
    """Refuse rm, forget, policies, purge and GC until the extended retention ends."""
    policy = {"retention": {"policies": [{"prefix": "", "keep_last": 1}], "superseded_seconds": 0}}
    with open_collected(tmp_path / "s", clock, kind, **policy) as store:
        store.put("k", b"one")
        assert store.retain("k", LATER).retain_until == LATER
        store.put("k", b"two")
        for version in (None, 1):
            with pytest.raises(RetentionActive, match="2026-12-02T06:00:00Z"):
                store.delete("k", version)
        found = store.forget("", RetentionPolicy(keep_last=1))
        assert [one.reasons for one in found if one.info.version == 1] == [("retained",)]
        assert store.gc().forgotten == 0
        with pytest.raises(NotFound, match="no such version is deleted"):
            store.purge("k", 1)
        store.purge()
        store.rebuild_index()
        assert store.info("k", 1).retain_until == LATER
        assert [info.retain_until for info in store.versions(all_versions=True)] == [LATER, None]
        assert store.get("k", 1).read() == b"one"
        clock.now = LATER.timestamp() + 1
        assert store.delete("k", 1) == 1
        clock.now += 1
        store.gc()
        assert records(store.root) == []


def test_retention_is_never_shortened(tmp_path: Path, clock: Clock) -> None:
    """Refuse an earlier, a past and a too distant time with both values and the remedy."""
    with open_collected(tmp_path / "s", clock) as store:
        store.put("k", b"one")
        store.retain("k", LATER)
        with pytest.raises(BadInput, match=r"2026-12-01T06:00:00Z: it is retained until 2026-12-02T06:00:00Z.*later"):
            store.retain("k", LATER - timedelta(days=1))
        assert store.retain("k", LATER).retain_until == LATER  # a repeat changes nothing
        assert len(records(store.root)) == 1
        assert store.retain("k", LATER + timedelta(days=1), reason="audit").retain_until == LATER + timedelta(days=1)
        store.put("k", b"two")
        for wrong, match in (
            (START - timedelta(days=1), r"in the past by this machine's clock \(2026-11-02"),
            (START + timedelta(days=40_000), "100 years"),
        ):
            with pytest.raises(BadInput, match=match):
                store.retain("k", wrong)
        store.delete("k", 2)
        for missing in ("k", "other"):
            with pytest.raises(NotFound):
                store.retain(missing, LATER, 2)


def test_retention_of_the_manifest_is_extended(tmp_path: Path, clock: Clock) -> None:
    """Require a later time than the manifest's for an extension of a retained version."""
    with open_collected(tmp_path / "s", clock, retention={"min_age_seconds": 30 * DAY}) as store:
        store.put("k", b"one")
        with pytest.raises(BadInput, match="never shortened"):
            store.retain("k", LATER - timedelta(seconds=1))
        store.retain("k", LATER + timedelta(days=1))
    with open_collected(tmp_path / "s", clock) as store:
        clock.now = LATER.timestamp() + 60
        with pytest.raises(RetentionActive, match="2026-12-03T06:00:00Z"):
            store.delete("k")


@pytest.mark.parametrize("kind", KINDS)
def test_gc_keeps_a_deleted_version_that_is_retained(tmp_path: Path, clock: Clock, kind: str) -> None:
    """Free nothing before the retention ends although a tombstone exists, purge included."""
    with open_collected(tmp_path / "s", clock, kind) as store:
        store.put("k", b"one")
        store.retain("k", LATER)
        now_us = int(clock.now * 1e6)
        store._manifests.put_mark(Mark("default", "k", 1, 1, MarkKind.DELETED, now_us, now_us))
        store.rebuild_index()
        clock.now += DAY
        assert store.gc().versions == 0
        assert store.purge().versions == 0
        assert store._manifests.is_committed("default", "k", 1)
        clock.now = LATER.timestamp() + 1
        assert store.gc().versions == 1
        assert not store._manifests.is_committed("default", "k", 1)
        assert records(store.root) == []


FORGED = {
    "empty": b"",
    "no-mac": encode_retention(RetentionRecord("default", "k", 1, 1, 1, 2)),
    "wrong-mac": encode_retention(RetentionRecord("default", "k", 1, 1, 1, 2), bytes(32)),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("forgery", FORGED)
def test_forged_retention_record_removes_nothing(tmp_path: Path, clock: Clock, kind: str, forgery: str) -> None:
    """A record that the store's key does not authenticate keeps its version; verify names it."""
    with open_collected(tmp_path / "s", clock, kind) as store:
        store.put("k", b"one")
        name = store._manifests.retentions.name("default", "k", 1, 1)
        (store.root / name).write_bytes(FORGED[forgery])
        with pytest.raises(Corrupt, match=name):
            store.delete("k")
        assert [found.object_name for found in store.verify().damage] == [name]
        assert store.get("k").read() == b"one"
        (store.root / name).unlink()
        assert store.delete("k") == 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("forgery", FORGED)
def test_gc_keeps_a_deleted_version_whose_retention_is_not_known(
    tmp_path: Path, clock: Clock, kind: str, forgery: str
) -> None:
    """GC frees no deleted version whose retention record does not verify."""
    with open_collected(tmp_path / "s", clock, kind) as store:
        store.put("k", b"one")
        now_us = int(clock.now * 1e6)
        store._manifests.put_mark(Mark("default", "k", 1, 1, MarkKind.DELETED, now_us, now_us))
        name = store._manifests.retentions.name("default", "k", 1, 1)
        (store.root / name).write_bytes(FORGED[forgery])
        store.rebuild_index()
        clock.now += DAY
        assert store.gc().versions == 0
        assert store._manifests.is_committed("default", "k", 1)
        (store.root / name).unlink()
        assert store.gc().versions == 1


def test_record_never_shortens_the_retention_of_its_manifest(tmp_path: Path, clock: Clock) -> None:
    """Apply the later time of manifest and record; a record since the listing counts."""
    earlier_us, later_us = (int(time.timestamp() * 1e6) for time in (START + timedelta(days=1), LATER))
    with open_collected(tmp_path / "s", clock) as store:
        store.put("k", b"one")
        manifest, retentions = store._manifests.get("default", "k", 1), store._manifests.retentions
        retentions.write(RetentionRecord("default", "k", 1, 1, 1, earlier_us))
        assert retentions.retain_until_us(replace(manifest, retain_until_us=later_us)) == later_us
        assert retentions.retain_until_us(manifest) == earlier_us
        assert retentions.current_retain_until_us(manifest, 0) == earlier_us
        retentions.write(RetentionRecord("default", "k", 1, 2, 1, later_us))
        assert retentions.current_retain_until_us(manifest, 1) == later_us


def test_points_of_extensions_are_all_tried() -> None:
    """Every failpoint of extended retentions is tried in this file."""
    assert set(RETENTION_POINTS) == {"retention.noted", "retention.recorded", "gc.retention"}


@pytest.mark.parametrize("point", ["retention.noted", "retention.recorded"])
def test_extension_cut_short_is_repeated(tmp_path: Path, clock: Clock, point: str) -> None:
    """Repeat an interrupted extension.

    It holds or does not, listings agree, the repeat succeeds.
    """
    with open_collected(tmp_path / "s", clock) as store:
        store.put("k", b"one")
        failpoints.arm(f"{point}:1:error")
        with pytest.raises(StoreUnavailable, match="failpoint"):
            store.retain("k", LATER)
        assert failpoints.disarm()[point] == 1
    with open_collected(tmp_path / "s", clock) as store:
        expected = LATER if point == "retention.recorded" else None
        assert [info.retain_until for info in store.versions()] == [expected]
        assert store.retain("k", LATER).retain_until == LATER
        assert store.stats().versions == 1
        assert store.verify().damage == ()


def test_gc_cut_short_removes_the_record_later(tmp_path: Path, clock: Clock) -> None:
    """GC that died between a version's retention record and its marks goes on in the next run."""
    with open_collected(tmp_path / "s", clock) as store:
        store.put("k", b"one")
        store.retain("k", LATER)
        store.retain("k", LATER + timedelta(days=1))
        clock.now = LATER.timestamp() + 2 * DAY
        store.delete("k")
        clock.now += 1
        failpoints.arm("gc.retention:1:error")
        with pytest.raises(StoreUnavailable, match="failpoint"):
            store.gc()
        failpoints.disarm()
        assert len(records(store.root)) == 1
    with open_collected(tmp_path / "s", clock) as store:
        store.gc()
        assert records(store.root) == []
        assert store.verify().damage == ()


def test_acknowledged_extension_survives_a_power_cut(tmp_path: Path, clock: Clock) -> None:
    """Keep an acknowledged extension in every state of the disk after a power cut."""
    root = tmp_path / "s"
    with open_collected(root, clock) as store:
        store.put("k", b"one")
    before = read_tree(root)
    with recording(root) as layer, open_collected(root, clock) as store:
        store.retain("k", LATER)
        layer.note("acknowledged")
    steps = list(layer.steps)
    disk = Disk(before)
    for step in steps:
        if step.what == "note":
            break
        disk.apply(step)
    assert step.what == "note"
    for world, tree in enumerate(disk.worlds()):
        place = tmp_path / f"world{world}"
        write_tree(place, tree)
        with open_collected(place, clock) as store, pytest.raises(RetentionActive):
            store.delete("k")
    assert world >= 0

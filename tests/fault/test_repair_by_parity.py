"""Parity: reads continue over damage, repair restores the bytes, and parity is written and deleted with its object."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

from nearkin import open_store
from nearkin.lab.generated_data import random_bytes
from nearkin_shared.formats.parity_object import Scheme, encode_parity
from tests.support.checks.inspection import check_parity_has_objects
from tests.support.data.histories import history
from tests.support.data.stores import SMALL, containers, find_broken, flip, manifests, objects, settings, stored_bytes

CHOSEN = settings(SMALL, {"delta": {"max_depth": 3}})
COVERED = settings(CHOSEN, {"storage": {"parity": "rs-8-2"}})
CONTENTS = history()


def damaged_names(root: Path, path: Path) -> str:
    return str(path.relative_to(root))


def test_get_reads_through_parity_and_repair_restores_bytes(covered_root: Path) -> None:
    """With parity every get continues over damage, and repair restores the bytes."""
    before, draw = objects(covered_root), random.Random(5)
    names = sorted(before)
    for name in [*draw.sample(names, 12), "nearkin.json"]:
        flip(covered_root / name, draw.randrange(len(before[name])), draw.randrange(8))
        with open_store(covered_root, settings=COVERED, create=True) as store:
            assert find_broken(store, CONTENTS) == set()
            damage = store.verify().damage
            if name != "nearkin.json":
                assert [one.object_name for one in damage] == [name]
                assert damage[0].repairable or name.startswith("parity/")
            report = store.repair()
            assert [one.object_name for one in report.repaired] == [name]
            assert report.damage == ()
        after = objects(covered_root)
        assert after == before, [n for n in after.keys() | before.keys() if after.get(n) != before.get(n)]


def test_lost_stretch_is_restored_by_parity(covered_root: Path) -> None:
    """A lost stretch of an object is restored by parity."""
    before = objects(covered_root)
    path = max(containers(covered_root), key=lambda path: path.stat().st_size)
    data = bytearray(path.read_bytes())
    stretch = len(data) // 9
    data[stretch : 2 * stretch] = bytes(stretch)
    path.write_bytes(data)
    with open_store(covered_root, settings=COVERED, create=True) as store:
        assert find_broken(store, CONTENTS) == set()
        assert store.repair().damage == ()
    assert objects(covered_root) == before


def test_damage_beyond_parity_is_reported(covered_root: Path) -> None:
    """Damage beyond the reach of parity is reported as without it, and no wrong byte is read."""
    path = max(containers(covered_root), key=lambda path: path.stat().st_size)
    data = bytearray(path.read_bytes())
    data[: len(data) // 2] = bytes(len(data) // 2)
    path.write_bytes(data)
    with open_store(covered_root, settings=COVERED, create=True) as store:
        harmed = find_broken(store, CONTENTS)
        assert harmed
        report = store.repair()
        assert {version for damage in report.damage for version in damage.versions} == harmed
        assert not any(damage.repairable for damage in report.damage)


def test_repair_adds_missing_parity_and_keeps_existing(root: Path) -> None:
    """Repair adds parity to a store without it, and keeps existing parity."""
    with open_store(root, settings=COVERED, create=True) as store:
        report = store.verify()
        assert report.damage == ()
        covered = [name for name in objects(root) if not name.startswith(("parity/", "gc/"))]
        assert sorted(report.parity_missing) == covered
        assert store.repair().parity_added == len(covered)
        assert store.verify().parity_missing == ()
        stats = store.stats()
        assert stats.parts["parity"] == sum(len(d) for name, d in objects(root).items() if name.startswith("parity/"))
        assert stats.ledger.stored_bytes == sum(stats.parts.values()) == sum(map(len, objects(root).values()))
    flip(containers(root)[0], 50)
    with open_store(root, settings=CHOSEN, create=True) as store:  # parity is off now, and existing parity is used
        assert find_broken(store, CONTENTS) == set()
        assert store.repair().damage == ()


def test_damaged_object_gets_parity_once_repaired(root: Path) -> None:
    """A damaged object gets no parity before it is repaired.

    Parity was made of the damaged bytes: a later repair restored these.
    """
    before = objects(root)
    for path in (containers(root)[0], manifests(root)[0]):
        flip(path, 50)
    with open_store(root, settings=COVERED, create=True) as store:
        damaged = {damage.object_name for damage in store.repair().damage}
        assert damaged == {damaged_names(root, containers(root)[0]), damaged_names(root, manifests(root)[0])}
    for name in damaged:
        assert not (root / "parity" / f"{name}.nkp").exists()
        (root / name).write_bytes(before[name])
    with open_store(root, settings=COVERED, create=True) as store:
        report = store.repair()
        assert (report.damage, report.parity_added) == ((), len(damaged))
    for name in damaged:
        flip(root / name, 70)
    with open_store(root, settings=COVERED, create=True) as store:
        assert store.repair().damage == ()
    assert {name: (root / name).read_bytes() for name in damaged} == {name: before[name] for name in damaged}


def test_object_repaired_twice_is_not_reported_damaged(covered_root: Path, tmp_path: Path) -> None:
    """An object that is repaired a second time is not reported as remaining damage.

    The parity is of bytes that were damaged already: a repair restores these first, and then those of the copy.
    """
    path = max(containers(covered_root), key=lambda path: path.stat().st_size)
    copy = Path(shutil.copy(path, tmp_path / path.name))
    flip(path, 50)
    made = encode_parity(damaged_names(covered_root, path), path.read_bytes(), Scheme(8, 2))
    (covered_root / "parity" / f"{damaged_names(covered_root, path)}.nkp").write_bytes(made)
    flip(path, 70)
    with open_store(covered_root, settings=COVERED, create=True) as store:
        report = store.repair([copy])
        assert [one.by for one in report.repaired] == ["parity", "a copy"]
        assert (report.damage, report.quarantined_chunks) == ((), 0)
        assert store.verify().damage == ()
    assert path.read_bytes() == copy.read_bytes()


def test_put_reports_its_parity(tmp_path: Path) -> None:
    """A put reports the bytes of its parity."""
    with open_store(tmp_path / "s", settings=COVERED, create=True) as store:
        before = stored_bytes(tmp_path / "s")
        result = store.put("k", random_bytes(300_000, 5))
        assert result.ledger.stored_bytes == stored_bytes(tmp_path / "s") - before > 300_000 * 1.2
        assert store.stats().ledger.stored_bytes == stored_bytes(tmp_path / "s")


def test_parity_is_deleted_with_its_object(covered_root: Path) -> None:
    """Parity is deleted with its object."""
    chosen = settings(COVERED, {"gc": {"grace_seconds": 0}, "deletion": {"undelete_seconds": 0}})
    with open_store(covered_root, settings=chosen, create=True) as store:
        for key in ("history", "alone", "mixed", "empty"):
            store.delete(key)
        for _ in range(3):
            store.gc()
        assert store.verify().damage == ()
    left = objects(covered_root)
    assert len([name for name in left if name.startswith("containers/")]) == 1  # of data that can be undeleted
    of = [name.removeprefix("parity/").removesuffix(".nkp") for name in left if name.startswith("parity/")]
    assert set(of) == {name for name in left if not name.startswith(("parity/", "gc/"))}


def test_broken_parity_without_a_scheme_is_deleted(covered_root: Path) -> None:
    """Broken parity of a sound object is deleted if no scheme is set.

    It was reported as repaired, and as damage by every later verify.
    """
    path = covered_root / "parity" / f"{damaged_names(covered_root, containers(covered_root)[0])}.nkp"
    path.write_bytes(bytes(path.stat().st_size))
    with open_store(covered_root, settings=CHOSEN, create=True) as store:  # parity is off now
        report = store.repair()
        assert [one.object_name for one in report.repaired] == [damaged_names(covered_root, path)]
        assert report.damage == store.verify().damage == ()
    assert not path.exists()
    with open_store(covered_root, settings=COVERED, create=True) as store:
        assert store.repair().parity_added == 1


def test_parity_begun_by_another_process_is_used(root: Path) -> None:
    """Parity that another process began repairs its object and is deleted with it.

    A Store that had once found no parity assumed that there was none until it was closed.
    """
    collecting = {"gc": {"grace_seconds": 0}, "deletion": {"undelete_seconds": 0}}
    with open_store(root, settings=settings(CHOSEN, collecting), create=True) as store:
        assert store.verify().damage == ()
        store.close()
        with open_store(root, settings=COVERED, create=True) as other:
            assert other.repair().parity_added
        for key in ("history", "mixed"):
            store.delete(key)
        for _ in range(3):
            store.gc()
        check_parity_has_objects(store)
        flip(containers(root)[0], 50)
        assert [damage.repairable for damage in store.verify().damage] == [True]

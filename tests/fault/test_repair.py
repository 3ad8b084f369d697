"""Repair: what is broken is put right from parity, from copies, and from the same content put again."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from nearkin import open_store
from nearkin.api import Store
from nearkin.errors import Corrupt
from nearkin.formats.container import BLOCK, decode_container
from nearkin.testing.generated import mutated, random_bytes, text_like
from nearkin.testing.stores import SMALL, attempt, broken, containers, flip, manifests, objects, settings

CHOSEN = settings(SMALL, {"delta": {"max_depth": 3}})
COVERED = settings(CHOSEN, {"storage": {"parity": "rs-8-2"}})


def contents_of_a_history() -> dict[tuple[str, int], bytes]:
    contents: dict[tuple[str, int], bytes] = {}
    content = text_like(400_000, 1)
    for version in range(1, 4):
        contents["history", version] = content
        content = mutated(content, version, edits=60, edit_bytes_max=90)
    contents["alone", 1] = random_bytes(300_000, 7)
    contents["mixed", 1] = contents["alone", 1][:100_000] + contents["history", 2][200_000:]
    contents["empty", 1] = b""
    return contents


CONTENTS = contents_of_a_history()


def filled(root: Path, chosen) -> Path:
    with open_store(root, settings=chosen) as store:
        for (key, _), content in CONTENTS.items():
            store.put(key, content)
        store.put("deleted", b"soon")
        store.delete("deleted")
        assert store.verify().damage == ()
    return root


@pytest.fixture(scope="module")
def sound(tmp_path_factory) -> Path:
    return filled(tmp_path_factory.mktemp("sound") / "store", CHOSEN)


@pytest.fixture(scope="module")
def covered(tmp_path_factory) -> Path:
    return filled(tmp_path_factory.mktemp("covered") / "store", COVERED)


@pytest.fixture
def root(sound, tmp_path) -> Path:
    return Path(shutil.copytree(sound, tmp_path / "store"))


@pytest.fixture
def covered_root(covered, tmp_path) -> Path:
    return Path(shutil.copytree(covered, tmp_path / "covered"))


def named(root: Path, path: Path) -> str:
    return str(path.relative_to(root))


def touched(store: Store) -> set[tuple[str, int]]:
    """Return the versions that damage touches; of the deleted one a round of collection takes care."""
    return {version for damage in store.verify().damage for version in damage.versions} - {("deleted", 1)}


def blocks_of(path: Path) -> list[int]:
    """Return where the payload of each block begins that is there."""
    blocks = decode_container(path.read_bytes(), path.name).blocks
    return [int(offset) for offset, raw in zip(blocks.offsets, blocks.raw, strict=True) if raw]


# ------------------------------------------------------------------ the same content, put again


def test_versions_that_named_a_broken_block_restore_again_once_their_content_was_put_again(root):
    healed = 0
    for number, path in enumerate(containers(root)):
        copy = Path(shutil.copytree(root, root.parent / f"copy-{number}"))
        victim = copy / path.relative_to(root)
        for start in blocks_of(victim)[::2]:
            flip(victim, start + 3)
        with open_store(copy, settings=CHOSEN) as store:
            harmed = touched(store)
            assert broken(store, CONTENTS) == harmed
            for key, version in sorted(harmed):
                store.put(f"again {key} {version}", CONTENTS[key, version])
            assert broken(store, CONTENTS) == set()
            assert touched(store) == set()
            healed += len(harmed)
        shutil.rmtree(copy)
    assert healed >= 4


def test_what_was_put_again_in_part_heals_in_part_and_the_rest_later(root):
    victim = max(containers(root), key=lambda path: len(blocks_of(path)))
    for start in blocks_of(victim):
        flip(victim, start + 3)
    with open_store(root, settings=CHOSEN) as store:
        harmed = touched(store)
        assert len(harmed) > 1
        for key, version in sorted(harmed)[:1]:
            store.put("again", CONTENTS[key, version])
            assert attempt(store, key, version)[1] is None
        left = broken(store, CONTENTS)
        assert left < harmed
        for key, version in sorted(left):
            error = attempt(store, key, version)[1]
            assert isinstance(error, Corrupt)
            assert "nearkin" in str(error)
        for key, version in sorted(left):
            store.put("again", CONTENTS[key, version])
        assert broken(store, CONTENTS) == set()
        assert list((root / "quarantine").iterdir()) == [] or store.verify().damage
        store.rebuild_index()
        assert broken(store, CONTENTS) == set()


def test_the_broken_bytes_stay_until_all_chunks_of_their_block_were_found(root):
    raw = CONTENTS["alone", 1][:1000]  # random, so that it is stored as it is
    victim = next(path for path in containers(root) if raw in path.read_bytes())
    start = blocks_of(victim)[0]
    flip(victim, start + 3)
    harmed_bytes = victim.read_bytes()[start - BLOCK.size : start + 200]
    with open_store(root, settings=CHOSEN) as store:
        assert touched(store)
        store.put("part", CONTENTS["alone", 1][:20_000])
        (generation,) = [path for path in containers(root) if path.stem.startswith(victim.stem)]
        assert generation != victim
        assert harmed_bytes in generation.read_bytes()
        assert broken(store, CONTENTS)
        store.put("whole", CONTENTS["alone", 1])
        (generation,) = [path for path in containers(root) if path.stem.startswith(victim.stem)]
        assert harmed_bytes not in generation.read_bytes()
        assert broken(store, CONTENTS) == set()


def test_quarantine_outlives_the_index_and_what_is_in_it_is_stored_anew(root):
    victim = containers(root)[0]
    flip(victim, blocks_of(victim)[0] + 3)
    with open_store(root, settings=CHOSEN) as store:
        harmed = touched(store)
        assert harmed
        record = store._quarantine.read()
        assert int(victim.stem, 16) in record
    shutil.rmtree(root / "index")
    with open_store(root, settings=CHOSEN) as store:
        store.rebuild_index()
        located = store._index.readable().rows("chunks")
        entry = record[int(victim.stem, 16)]
        for _, locations in located:
            mine = locations.ordinals[locations.containers == int(victim.stem, 16)]
            assert not set(mine.tolist()) & set(entry.chunks.tolist())
        for key, version in sorted(harmed):
            store.put(f"again {key}", CONTENTS[key, version])
        assert broken(store, CONTENTS) == set()


def test_a_broken_record_of_what_is_quarantined_is_named_and_made_anew(root):
    victim = containers(root)[0]
    flip(victim, blocks_of(victim)[0] + 3)
    with open_store(root, settings=CHOSEN) as store:
        store.verify()
        (record,) = (root / "quarantine").iterdir()
        flip(record, 30)
        names = {damage.object_name for damage in store.verify().damage}
        assert named(root, record) in names
        assert named(root, record) not in {damage.object_name for damage in store.verify().damage}
        assert store._quarantine.read()


# ------------------------------------------------------------------ copies that somebody gives


@pytest.mark.parametrize("harm", ["flip", "header", "truncate", "delete", "manifest", "mark"])
def test_a_copy_of_the_object_puts_it_right_whatever_is_broken(root, tmp_path, harm):
    path = containers(root)[1]
    if harm == "manifest":
        path = manifests(root)[0]
    elif harm == "mark":
        (path,) = (root / "manifests").rglob("*.nkt")
    copy = tmp_path / "from the backup"
    copy.write_bytes(path.read_bytes())
    before = objects(root)
    match harm:
        case "flip" | "manifest" | "mark":
            flip(path, path.stat().st_size // 2)
        case "header":
            flip(path, 9)
        case "truncate":
            path.write_bytes(path.read_bytes()[:100])
        case "delete":
            path.unlink()
    with open_store(root, settings=CHOSEN) as store:
        assert store.verify().damage
        report = store.repair([copy])
        assert [(one.object_name, one.by) for one in report.repaired] == [(named(root, path), "a copy")]
        assert report.damage == ()
        assert broken(store, CONTENTS) == set()
    assert objects(root) == before


def test_a_file_of_the_content_heals_and_one_of_another_content_changes_nothing(root, tmp_path):
    victim = containers(root)[0]
    flip(victim, blocks_of(victim)[0] + 3)
    other, content = tmp_path / "other", tmp_path / "content"
    other.write_bytes(random_bytes(200_000, 99))
    with open_store(root, settings=CHOSEN) as store:
        harmed = sorted(touched(store))
        before = objects(root)
        report = store.repair([other])
        assert report.repaired == ()
        assert len(report.damage) == 1
        assert report.quarantined_chunks > 0
        assert objects(root) == before
        for key, version in harmed:
            content.write_bytes(CONTENTS[key, version])
            report = store.repair([other, content])
        assert report.damage == ()
        assert broken(store, CONTENTS) == set()


def test_a_broken_copy_of_an_object_is_not_used(root, tmp_path):
    path = containers(root)[1]
    copy = tmp_path / "copy"
    copy.write_bytes(path.read_bytes())
    flip(copy, blocks_of(path)[0] + 9)
    path.write_bytes(path.read_bytes()[:1000])
    before = objects(root)
    with open_store(root, settings=CHOSEN) as store:
        report = store.repair([copy])
        assert report.repaired == ()
        assert report.damage
    assert {name: data for name, data in objects(root).items() if not name.startswith("quarantine/")} == before


def test_repair_of_a_sound_store_changes_no_byte(root, covered_root):
    for folder, chosen in ((root, CHOSEN), (covered_root, COVERED)):
        before = objects(folder)
        with open_store(folder, settings=chosen) as store:
            report = store.repair()
            assert (report.repaired, report.damage, report.parity_added) == ((), (), 0)
        assert objects(folder) == before


# ------------------------------------------------------------------ parity


def test_with_parity_every_get_goes_on_over_damage_and_repair_puts_the_bytes_back(covered_root):
    before, draw = objects(covered_root), random.Random(5)
    names = sorted(before)
    for name in [*draw.sample(names, 12), "nearkin.json"]:
        flip(covered_root / name, draw.randrange(len(before[name])), draw.randrange(8))
        with open_store(covered_root, settings=COVERED) as store:
            assert broken(store, CONTENTS) == set()
            damage = store.verify().damage
            if name != "nearkin.json":
                assert [one.object_name for one in damage] == [name]
                assert damage[0].repairable or name.startswith("parity/")
            report = store.repair()
            assert [one.object_name for one in report.repaired] == [name]
            assert report.damage == ()
        after = objects(covered_root)
        assert after == before, [n for n in after.keys() | before.keys() if after.get(n) != before.get(n)]


def test_a_stretch_that_is_lost_comes_back_by_parity(covered_root):
    before = objects(covered_root)
    path = max(containers(covered_root), key=lambda path: path.stat().st_size)
    data = bytearray(path.read_bytes())
    stretch = len(data) // 9
    data[stretch : 2 * stretch] = bytes(stretch)
    path.write_bytes(data)
    with open_store(covered_root, settings=COVERED) as store:
        assert broken(store, CONTENTS) == set()
        assert store.repair().damage == ()
    assert objects(covered_root) == before


def test_more_damage_than_parity_bears_is_told_as_ever_and_no_wrong_byte_leaves(covered_root):
    path = max(containers(covered_root), key=lambda path: path.stat().st_size)
    data = bytearray(path.read_bytes())
    data[: len(data) // 2] = bytes(len(data) // 2)
    path.write_bytes(data)
    with open_store(covered_root, settings=COVERED) as store:
        harmed = broken(store, CONTENTS)
        assert harmed
        report = store.repair()
        assert {version for damage in report.damage for version in damage.versions} == harmed
        assert not any(damage.repairable for damage in report.damage)


def test_a_store_that_had_no_parity_gets_it_by_repair_and_one_that_has_keeps_it(root):
    with open_store(root, settings=COVERED) as store:
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
    with open_store(root, settings=CHOSEN) as store:  # parity is off now, and what there is of it is used
        assert broken(store, CONTENTS) == set()
        assert store.repair().damage == ()


def test_parity_goes_with_its_object(covered_root):
    chosen = settings(COVERED, {"gc": {"grace_seconds": 0}, "deletion": {"undelete_seconds": 0}})
    with open_store(covered_root, settings=chosen) as store:
        for key in ("history", "alone", "mixed", "empty"):
            store.delete(key)
        for _ in range(3):
            store.gc()
        assert store.verify().damage == ()
    left = objects(covered_root)
    assert len([name for name in left if name.startswith("containers/")]) == 1  # of what can be brought back
    of = [name.removeprefix("parity/").removesuffix(".nkp") for name in left if name.startswith("parity/")]
    assert set(of) == {name for name in left if not name.startswith(("parity/", "gc/"))}


def test_who_dies_between_the_healed_generation_and_the_end_of_the_broken_one_leaves_a_store_that_reads(root):
    raw = CONTENTS["alone", 1][:1000]
    victim = next(path for path in containers(root) if raw in path.read_bytes())
    flip(victim, blocks_of(victim)[0] + 3)
    with open_store(root, settings=CHOSEN) as store:
        harmed = touched(store)
        quarantined = {path.name: path.read_bytes() for path in (root / "quarantine").iterdir()}
        broken_bytes = victim.read_bytes()
        for key, version in sorted(harmed):
            store.put("again", CONTENTS[key, version])
        assert not victim.exists()
    victim.write_bytes(broken_bytes)
    for name, data in quarantined.items():
        (root / "quarantine" / name).write_bytes(data)
    with open_store(root, settings=CHOSEN, read_only=True) as store:
        assert broken(store, CONTENTS) == set()
    with open_store(root, settings=CHOSEN) as store:
        store.put("more", b"anything")
        assert store._quarantine.read() == {}
        assert store.verify().damage == ()
        store.gc()
    assert not victim.exists()
    with open_store(root, settings=CHOSEN) as store:
        assert broken(store, CONTENTS) == set()

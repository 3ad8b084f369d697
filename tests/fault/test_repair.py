"""Repair: damage is repaired from parity, from copies, and from the same content put again."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

import pytest

from nearkin import open_store
from nearkin.cli.verify import repair_lines, verify_lines
from nearkin.lab.generated_data import mutate, random_bytes
from nearkin.store import Store
from nearkin_maintenance.repair.container_repair import ContainerRepairer
from nearkin_shared.errors import Corrupt
from nearkin_shared.formats.container import decode_container
from nearkin_shared.formats.container_layout import BLOCK
from nearkin_shared.results import RepairReport
from tests.support.checks.inspection import check_index_equals_a_rebuilt_one
from tests.support.data.histories import history
from tests.support.data.stores import (
    SMALL,
    attempt,
    blocks_of,
    containers,
    find_broken,
    flip,
    manifests,
    objects,
    process,
    settings,
)

CHOSEN = settings(SMALL, {"delta": {"max_depth": 3}})
COVERED = settings(CHOSEN, {"storage": {"parity": "rs-8-2"}})
CONTENTS = history()


def damaged_names(root: Path, path: Path) -> str:
    return str(path.relative_to(root))


def affected_versions(store: Store) -> set[tuple[str, int]]:
    """Return the versions that damage affects, without the deleted one, which a GC run removes."""
    return {version for damage in store.verify().damage for version in damage.versions} - {("deleted", 1)}


# ------------------------------------------------------------------ the same content, put again


def test_put_of_same_content_restores_broken_versions(root: Path) -> None:
    """Versions with a broken block restore again once their content was put again."""
    repaired_count = 0
    for number, path in enumerate(containers(root)):
        copy = Path(shutil.copytree(root, root.parent / f"copy-{number}"))
        victim = copy / path.relative_to(root)
        for start in blocks_of(victim)[::2]:
            flip(victim, start + 3)
        with open_store(copy, settings=CHOSEN, create=True) as store:
            harmed = affected_versions(store)
            assert find_broken(store, CONTENTS) == harmed
            for key, version in sorted(harmed):
                store.put(f"again {key} {version}", CONTENTS[key, version])
            assert find_broken(store, CONTENTS) == set()
            assert affected_versions(store) == set()
            repaired_count += len(harmed)
        shutil.rmtree(copy)
    assert repaired_count >= 4


def test_put_reads_quarantined_blocks_only_to_repair(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A put reads no quarantined block unless some of its content was put again."""
    path = containers(root)[-2]
    flip(path, 60)
    with open_store(root, settings=CHOSEN, create=True) as store:
        harmed = affected_versions(store)
        looked_at = []
        plain = ContainerRepairer.repair
        monkeypatch.setattr(
            ContainerRepairer, "repair", lambda healer, *of: (looked_at.append(of[0]), plain(healer, *of))[1]
        )
        store.put("other", random_bytes(50_000, 99))
        assert looked_at == []
        for key, version in sorted(harmed):
            store.put(f"again {key}", CONTENTS[key, version])
        assert set(looked_at) == {int(path.stem, 16)}
        assert store._quarantine.read() == {}
        assert affected_versions(store) == set()


def test_partial_put_repairs_in_part_and_the_rest_later(root: Path) -> None:
    """Content put again in part repairs a part, and the rest later."""
    victim = max(containers(root), key=lambda path: len(blocks_of(path)))
    for start in blocks_of(victim):
        flip(victim, start + 3)
    with open_store(root, settings=CHOSEN, create=True) as store:
        harmed = affected_versions(store)
        assert len(harmed) > 1
        for key, version in sorted(harmed)[:1]:
            store.put("again", CONTENTS[key, version])
            assert attempt(store, key, version)[1] is None
        left = find_broken(store, CONTENTS)
        assert left < harmed
        for key, version in sorted(left):
            error = attempt(store, key, version)[1]
            assert isinstance(error, Corrupt)
            assert "nearkin" in str(error)
        for key, version in sorted(left):
            store.put("again", CONTENTS[key, version])
        assert find_broken(store, CONTENTS) == set()
        assert list((root / "quarantine").iterdir()) == [] or store.verify().damage
        store.rebuild_index()
        assert find_broken(store, CONTENTS) == set()


def test_broken_bytes_stay_until_all_chunks_are_found(root: Path) -> None:
    """The broken bytes stay until all chunks of their block were found."""
    raw = CONTENTS["alone", 1][:1000]  # random, so that it is stored as it is
    victim = next(path for path in containers(root) if raw in path.read_bytes())
    start = blocks_of(victim)[0]
    flip(victim, start + 3)
    harmed_bytes = victim.read_bytes()[start - BLOCK.size : start + 200]
    with open_store(root, settings=CHOSEN, create=True) as store:
        assert affected_versions(store)
        store.put("part", CONTENTS["alone", 1][:20_000])
        (generation,) = [path for path in containers(root) if path.stem.startswith(victim.stem)]
        assert generation != victim
        assert harmed_bytes in generation.read_bytes()
        assert find_broken(store, CONTENTS)
        store.put("whole", CONTENTS["alone", 1])
        (generation,) = [path for path in containers(root) if path.stem.startswith(victim.stem)]
        assert harmed_bytes not in generation.read_bytes()
        assert find_broken(store, CONTENTS) == set()


def test_quarantine_survives_the_index(root: Path) -> None:
    """The quarantine survives the loss of the index, and its chunks are stored again by a put."""
    victim = containers(root)[0]
    flip(victim, blocks_of(victim)[0] + 3)
    with open_store(root, settings=CHOSEN, create=True) as store:
        harmed = affected_versions(store)
        assert harmed
        record = store._quarantine.read()
        assert int(victim.stem, 16) in record
    shutil.rmtree(root / "index")
    with open_store(root, settings=CHOSEN, create=True) as store:
        store.rebuild_index()
        located = store._index.readable().rows("chunks")
        entry = record[int(victim.stem, 16)]
        for _, locations in located:
            mine = locations.ordinals[locations.containers == int(victim.stem, 16)]
            assert not set(mine.tolist()) & set(entry.chunks.tolist())
        for key, version in sorted(harmed):
            store.put(f"again {key}", CONTENTS[key, version])
        assert find_broken(store, CONTENTS) == set()


def test_broken_quarantine_record_is_named_and_rewritten(root: Path) -> None:
    """A broken quarantine record is named and rewritten."""
    victim = containers(root)[0]
    flip(victim, blocks_of(victim)[0] + 3)
    with open_store(root, settings=CHOSEN, create=True) as store:
        store.verify()
        (record,) = (root / "quarantine").iterdir()
        flip(record, 30)
        names = {damage.object_name for damage in store.verify().damage}
        assert damaged_names(root, record) in names
        assert damaged_names(root, record) not in {damage.object_name for damage in store.verify().damage}
        assert store._quarantine.read()


# ------------------------------------------------------------------ copies of objects


@pytest.mark.parametrize("harm", ["flip", "header", "truncate", "delete", "manifest", "mark"])
def test_copy_of_the_object_repairs_any_damage(root: Path, tmp_path: Path, harm: str) -> None:
    """A copy of the object repairs it, whatever is broken."""
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
    with open_store(root, settings=CHOSEN, create=True) as store:
        assert store.verify().damage
        report = store.repair([copy])
        assert [(one.object_name, one.by) for one in report.repaired] == [(damaged_names(root, path), "a copy")]
        assert report.damage == ()
        assert find_broken(store, CONTENTS) == set()
    assert objects(root) == before


@pytest.mark.parametrize("harm", ["flip", "delete"])
@pytest.mark.parametrize("way", ["a copy that repair receives", "a copy put back by hand"])
def test_repaired_chunks_are_duplicates_of_a_put(tmp_path: Path, way: str, harm: str) -> None:
    """Repaired chunks are duplicates for the next put."""
    content, changed = random_bytes(300_000, 1), mutate(random_bytes(300_000, 1), 1, edits=5)
    with open_store(tmp_path / "s", settings=CHOSEN, create=True) as store:
        store.put("k", content)
        store.put("k", changed)
    for number, path in enumerate(containers(tmp_path / "s")):
        copy = Path(shutil.copy(path, tmp_path / path.name))
        if harm == "flip":
            flip(path, blocks_of(path)[0] + 3)
        else:
            path.unlink()
        with open_store(tmp_path / "s", settings=CHOSEN, create=True) as store:
            assert store.verify().damage
            if way == "a copy that repair receives":
                assert store.repair([copy]).repaired
            else:
                shutil.copy(copy, path)
                assert not store.repair().repaired
        with open_store(tmp_path / "s", settings=CHOSEN, create=True) as store:
            for again in (content, changed):
                ledger = store.put(f"again {number}", again).ledger
                assert ledger.duplicate_chunks == ledger.chunks
            assert not store.verify().damage
            check_index_equals_a_rebuilt_one(store)


def test_file_of_the_content_repairs_another_changes_nothing(root: Path, tmp_path: Path) -> None:
    """A file with the content repairs, and one with another content changes nothing."""
    victim = containers(root)[0]
    flip(victim, blocks_of(victim)[0] + 3)
    other, content = tmp_path / "other", tmp_path / "content"
    other.write_bytes(random_bytes(200_000, 99))
    with open_store(root, settings=CHOSEN, create=True) as store:
        harmed = sorted(affected_versions(store))
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
        assert find_broken(store, CONTENTS) == set()


def test_content_with_other_cut_points_repairs_nothing(
    root: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Content that is chunked otherwise repairs nothing, and the log names the reason."""
    content = tmp_path / "content"
    content.write_bytes(random_bytes(400_000, 77))
    with open_store(tmp_path / "s", settings=CHOSEN, create=True) as store:
        store.put("k", content)
    (victim,) = containers(tmp_path / "s")
    for start in blocks_of(victim):
        flip(victim, start + 30)
    other = settings(CHOSEN, {"chunker": {"algorithm": "fixed", "target_bytes": 5000}})
    with open_store(tmp_path / "s", settings=other, create=True) as store:
        left = store.repair([content])
        assert left.damage
        assert f"{content}: no chunk that is broken is in it, cut by fixed" in caplog.text
        (broken_blocks, *_) = remedies(left)
        assert "chunker.*" in broken_blocks
    caplog.clear()
    with open_store(tmp_path / "s", settings=CHOSEN, create=True) as store:
        assert store.repair([content]).damage == ()
        assert "no chunk that is broken" not in caplog.text
        (number,) = manifests(tmp_path / "s")
        flip(number, 30)
        outcome = store.repair()
        assert remedies(outcome) == [
            "what is broken besides blocks needs parity or a copy: `nearkin repair --from COPY`"
        ]
        assert remedies(outcome) == [line for line in verify_lines(store.verify()) if "--from" in line]


def remedies(report: RepairReport) -> list[str]:
    return [line for line in repair_lines(report) if "--from" in line]


def test_collected_chunks_leave_the_quarantine(tmp_path: Path) -> None:
    """Chunks that compaction removed are not kept in quarantine with broken ones.

    Found by the crash engine: a record, once written, kept for ever the chunks that compaction had removed.
    """
    root = tmp_path / "store"
    chosen = settings(CHOSEN, {"gc": {"grace_seconds": 0, "compact_below": 0.95}, "deletion": {"undelete_seconds": 0}})
    with open_store(root, settings=chosen, create=True) as store:
        list(store.put_many([("going", random_bytes(100_000, 1)), ("staying", random_bytes(100_000, 2))]))
        store.delete("going")
        for _ in range(4):
            store.gc()
        (path,) = containers(root)
        assert not decode_container(path.read_bytes(), path.name).chunks.there.all()
        whole = path.read_bytes()
        (copy := tmp_path / "copy").write_bytes(whole)
        flip(path, blocks_of(path)[0])
        store.verify()
        (entry,) = store._quarantine.read().values()
        assert 0 < len(entry.chunks) < len(decode_container(whole, path.name).chunks)
        report = store.repair([copy])
        assert report.damage == ()
        assert report.quarantined_chunks == 0
        assert path.read_bytes() == whole
        assert not list((root / "quarantine").iterdir())


def test_broken_copy_of_an_object_is_not_used(root: Path, tmp_path: Path) -> None:
    """A broken copy of an object is not used."""
    path = containers(root)[1]
    copy = tmp_path / "copy"
    copy.write_bytes(path.read_bytes())
    flip(copy, blocks_of(path)[0] + 9)
    path.write_bytes(path.read_bytes()[:1000])
    before = objects(root)
    with open_store(root, settings=CHOSEN, create=True) as store:
        report = store.repair([copy])
        assert report.repaired == ()
        assert report.damage
    assert {name: data for name, data in objects(root).items() if not name.startswith("quarantine/")} == before


def test_repair_of_sound_store_changes_no_byte(root: Path, covered_root: Path) -> None:
    """Repair of a sound store changes no byte."""
    for folder, chosen in ((root, CHOSEN), (covered_root, COVERED)):
        before = objects(folder)
        with open_store(folder, settings=chosen, create=True) as store:
            report = store.repair()
            assert (report.repaired, report.damage, report.parity_added) == ((), (), 0)
        assert objects(folder) == before


# ------------------------------------------------------------------ deaths during a repair, and concurrent readers


def test_repair_killed_between_generations_leaves_readable(
    root: Path,
) -> None:
    """A repair killed between the repaired and the end of the broken generation leaves a readable store."""
    raw = CONTENTS["alone", 1][:1000]
    victim = next(path for path in containers(root) if raw in path.read_bytes())
    flip(victim, blocks_of(victim)[0] + 3)
    with open_store(root, settings=CHOSEN, create=True) as store:
        harmed = affected_versions(store)
        quarantined = {path.name: path.read_bytes() for path in (root / "quarantine").iterdir()}
        broken_bytes = victim.read_bytes()
        for key, version in sorted(harmed):
            store.put("again", CONTENTS[key, version])
        assert not victim.exists()
    victim.write_bytes(broken_bytes)
    for name, data in quarantined.items():
        (root / "quarantine" / name).write_bytes(data)
    with open_store(root, settings=CHOSEN, read_only=True) as store:
        assert find_broken(store, CONTENTS) == set()
    with open_store(root, settings=CHOSEN, create=True) as store:
        store.put("more", b"anything")
        assert store._quarantine.read() == {}
        assert store.verify().damage == ()
        store.gc()
    assert not victim.exists()
    with open_store(root, settings=CHOSEN, create=True) as store:
        assert find_broken(store, CONTENTS) == set()


@pytest.mark.parametrize("point", ["repair.put", "repair.renewed", "repair.removed"])
def test_repair_killed_at_any_step_leaves_a_right_index(root: Path, point: str) -> None:
    """A repair killed at any step leaves an index equal to a rebuilt one.

    Found by the crash engine: the index was updated last, and not at all after a death.
    """
    raw = CONTENTS["alone", 1][:1000]
    victim = next(path for path in containers(root) if raw in path.read_bytes())
    flip(victim, blocks_of(victim)[0] + 3)
    script = """
import sys
from pathlib import Path
from nearkin_shared.utils import failpoints
from nearkin import open_store
from tests.support.data.stores import SMALL, blocks_of, settings
failpoints.arm(f"{sys.argv[3]}:1:kill")
with open_store(sys.argv[1], settings=settings(SMALL, {"delta": {"max_depth": 3}}), create=True) as store:
    store.repair([Path(sys.argv[2])])
"""
    content = root.parent / "content"
    content.write_bytes(CONTENTS["alone", 1])
    died = process(script, root, content, point)
    died.communicate(timeout=60)
    assert died.returncode == -signal.SIGKILL
    with open_store(root, settings=CHOSEN, create=True) as store:
        assert store.repair([content]).damage == ()
        store.gc()
        assert find_broken(store, CONTENTS) == set()
        check_index_equals_a_rebuilt_one(store)


def test_delta_on_repaired_chunk_reads_with_both_generations(root: Path) -> None:
    """A delta on a repaired chunk reads while the broken generation still exists.

    Found by the crash engine: the repaired chunk had depth 0; readers of the older generation found a greater depth.
    """
    victim, at = next(
        (path, int(table.offsets[block]))
        for path in containers(root)
        for table in [decode_container(path.read_bytes(), path.name).blocks]
        for block in range(len(table))
        if table.raw[block] and table.depths[block] == 2
    )
    flip(victim, at + 3)
    script = """
import sys
from pathlib import Path
from nearkin_shared.utils import failpoints
from nearkin import open_store
from tests.support.data.stores import SMALL, blocks_of, settings
failpoints.arm("repair.put:1:kill")
with open_store(sys.argv[1], settings=settings(SMALL, {"delta": {"max_depth": 3}}), create=True) as store:
    store.repair(map(Path, sys.argv[2:]))
"""
    files = []
    for (key, version), content in CONTENTS.items():
        files.append(root.parent / f"{key}-{version}")
        files[-1].write_bytes(content)
    died = process(script, root, *files)
    died.communicate(timeout=60)
    assert died.returncode == -signal.SIGKILL
    assert len([path for path in containers(root) if path.name.startswith(victim.name[:16])]) == 2
    later = {("history", 4): mutate(CONTENTS["history", 3], 9, edits=40, edit_bytes_max=60)}
    with open_store(root, settings=CHOSEN, create=True) as store:
        store.rebuild_index()
        store.put("history", later["history", 4])
    for name in {**CONTENTS, **later}:  # each with nothing read before it
        with open_store(root, settings=CHOSEN, read_only=True) as store:
            assert find_broken(store, {name: {**CONTENTS, **later}[name]}) == set(), name

"""Damage: each broken object is named with the versions it affects; no wrong byte is read; the rest restores."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from nearkin import open_store
from nearkin.lab.generated_data import mutate, random_bytes, text_like
from nearkin.store import Store
from nearkin_shared.errors import Corrupt, IndexDamaged, NearkinError, NotFound, PermanentError
from nearkin_shared.formats.manifest import Manifest, decode_manifest, encode_manifest
from nearkin_shared.results import Damage
from nearkin_shared.types import Locations
from tests.support.data.stores import SMALL, attempt, containers, find_broken, flip, manifests, settings

CHOSEN = settings(SMALL, {"delta": {"max_depth": 3}, "features": {"count": 6, "super_features": 6}})


def contents_of_a_history() -> dict[tuple[str, int], bytes]:
    """Return versions that share chunks, that are deltas over three levels, and some that share nothing."""
    contents: dict[tuple[str, int], bytes] = {}
    first = text_like(700_000, 1)
    for version in range(1, 6):
        contents["history", version] = first
        first = mutate(first, version, edits=60, edit_bytes_max=90)
    contents["alone", 1] = random_bytes(500_000, 7)
    contents["alone", 2] = text_like(300_000, 8)
    contents["mixed", 1] = contents["alone", 2][:150_000] + contents["history", 2][300_000:]
    contents["zeros", 1] = bytes(200_000)
    contents["empty", 1] = b""
    return contents


CONTENTS = contents_of_a_history()


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("sound") / "store"
    with open_store(root, settings=CHOSEN, create=True) as store:
        for (key, _), content in CONTENTS.items():
            store.put(key, content)
        assert max(store.stats().depths) >= 2
    assert len(containers(root)) >= 6
    return root


def damaged_names(root: Path, path: Path) -> str:
    return str(path.relative_to(root))


def assert_verify_names(store: Store, root: Path, path: Path) -> set[tuple[str, int]]:
    """Check that `verify` names the versions whose get fails; return the affected versions."""
    failing = find_broken(store, CONTENTS)
    damage = store.verify().damage
    assert {d.object_name for d in damage} == {damaged_names(root, path)}
    assert {version for d in damage for version in d.versions} == failing
    assert all(d.object_name in d.problem or d.problem for d in damage)
    return failing


def flip_positions(path: Path, seed: int) -> list[int]:
    """Header, first block, directory, footer, and some anywhere."""
    size = path.stat().st_size
    draw = random.Random(seed)
    return [0, 4, 9, 33, 60, size - 1, size - 10, size - 40, *(draw.randrange(size) for _ in range(2))]


@pytest.mark.soak
def test_flipped_bit_of_container_names_affected_versions(root: Path) -> None:
    """Verify names a container with any flipped bit and exactly the versions that it affects."""
    touched: set[tuple[str, int]] = set()
    for number, path in enumerate(containers(root)):
        whole = path.read_bytes()
        for at in flip_positions(path, number):
            flip(path, at, bit=number % 8)
            with open_store(root, settings=CHOSEN, create=True) as store:
                failing = assert_verify_names(store, root, path)
                assert failing < CONTENTS.keys(), (path.name, at)
                for key, version in failing:
                    assert isinstance(attempt(store, key, version)[1], Corrupt), (path.name, at)
            touched |= failing
            path.write_bytes(whole)
    assert touched == CONTENTS.keys() - {("empty", 1)}  # each damage touched few, all together every one
    with open_store(root, settings=CHOSEN, create=True) as store:
        assert find_broken(store, CONTENTS) == set()
        assert store.verify().damage == ()


@pytest.mark.parametrize("share", [0.0, 0.001, 0.5, 0.99, 0.9999])
def test_truncated_container_names_affected_versions(root: Path, share: float) -> None:
    """Verify names a truncated container and the versions that it affects."""
    for path in containers(root):
        whole = path.read_bytes()
        path.write_bytes(whole[: int(len(whole) * share)])
        with open_store(root, settings=CHOSEN, create=True) as store:
            for key, version in assert_verify_names(store, root, path):
                assert isinstance(attempt(store, key, version)[1], Corrupt)
        path.write_bytes(whole)


def test_deleted_container_names_affected_versions(root: Path) -> None:
    """Verify names a deleted container and the versions that it affects, also through bases."""
    through_bases = 0
    for path in containers(root):
        whole = path.read_bytes()
        path.unlink()
        with open_store(root, settings=CHOSEN, create=True) as store:
            failing = assert_verify_names(store, root, path)
            assert failing
            for key, version in failing:
                assert isinstance(attempt(store, key, version)[1], Corrupt)
            through_bases += len(failing) > 1
        path.write_bytes(whole)
    assert through_bases


def test_two_damaged_containers_are_both_named(root: Path) -> None:
    """Verify names both of two damaged containers and no unaffected version."""
    first, *_, last = containers(root)
    first.unlink()
    flip(last, last.stat().st_size // 2)
    with open_store(root, settings=CHOSEN, create=True) as store:
        failing = find_broken(store, CONTENTS)
        damage = store.verify().damage
        assert {d.object_name for d in damage} == {damaged_names(root, first), damaged_names(root, last)}
        assert {version for d in damage for version in d.versions} == failing


def test_container_under_another_name_is_named(root: Path) -> None:
    """Verify names a container that was replaced by another."""
    first, second, *_ = containers(root)
    first.write_bytes(second.read_bytes())
    with open_store(root, settings=CHOSEN, create=True) as store:
        assert_verify_names(store, root, first)


def manifest_of(root: Path, version: tuple[str, int]) -> Path:
    from nearkin_shared.formats.manifest import decode_manifest

    for path in manifests(root):
        manifest = decode_manifest(path.read_bytes(), path.name)
        if (manifest.key, manifest.version) == version:
            return path
    raise AssertionError(version)


@pytest.mark.parametrize("version", [("history", 3), ("alone", 1), ("empty", 1)])
def test_flipped_bit_of_manifest_affects_its_version_alone(root: Path, version: tuple[str, int]) -> None:
    """Verify names a manifest with any flipped bit; only its version is affected."""
    path = manifest_of(root, version)
    whole = path.read_bytes()
    draw = random.Random(str(version))
    for at in [0, 4, 6, 8, 20, len(whole) - 1, *(draw.randrange(len(whole)) for _ in range(10))]:
        flip(path, at, at % 8)
        with open_store(root, settings=CHOSEN, create=True) as store:
            assert find_broken(store, CONTENTS) == {version}
            (damage,) = store.verify().damage
            assert (damage.object_name, damage.versions) == (damaged_names(root, path), (version,)), at
        path.write_bytes(whole)
    path.write_bytes(whole[: len(whole) // 2])
    with open_store(root, settings=CHOSEN, create=True) as store:
        assert_verify_names(store, root, path)


def test_deleted_manifest_is_named_by_the_index(root: Path) -> None:
    """Verify names a deleted manifest from its entry in the index."""
    path = manifest_of(root, ("history", 3))
    path.unlink()
    with open_store(root, settings=CHOSEN, create=True) as store:
        assert isinstance(attempt(store, "history", 3)[1], NotFound)
        assert_verify_names(store, root, path)
        assert store.get("history", 5).read() == CONTENTS["history", 5]


def test_lost_index_and_broken_manifest_leave_other_versions(root: Path) -> None:
    """With the index lost and a manifest broken every other version restores."""
    path = manifest_of(root, ("history", 3))
    flip(path, 50)
    shutil.rmtree(root / "index")
    with open_store(root, settings=CHOSEN, create=True) as store:
        assert damaged_names(root, path) in store.rebuild_index().skipped
        assert find_broken(store, CONTENTS) == {("history", 3)}
        assert {d.object_name for d in store.verify().damage} == {damaged_names(root, path)}
        assert store.put("history", b"next").info.version == 6


# ------------------------------------------------------------------ writing after damage


@pytest.mark.parametrize("harm", ["flip", "header", "delete", "truncate"])
def test_put_after_damage_uses_no_broken_base(root: Path, harm: str) -> None:
    """A put after damage uses no broken base."""
    victims = containers(root)[:-1]
    for path in victims:
        apply_damage(path, harm)
    fresh = mutate(CONTENTS["history", 5], 77, edits=600, edit_bytes_max=20)  # no chunk as it was, each similar
    with open_store(root, settings=CHOSEN, create=True) as store:
        result = store.put("after", fresh)
        assert result.info.version == 1
        assert store.get("after").read() == fresh
    with open_store(root, settings=CHOSEN, create=True) as store:
        assert store.get("after").read() == fresh
        assert ("after", 1) not in {version for d in store.verify().damage for version in d.versions}


def apply_damage(path: Path, harm: str) -> None:
    match harm:
        case "flip":
            flip(path, 40)
        case "header":
            flip(path, 4, 3)
        case "delete":
            path.unlink()
        case "truncate":
            path.write_bytes(path.read_bytes()[:100])


@pytest.mark.parametrize("harm", ["flip", "header", "delete", "truncate"])
def test_put_of_same_content_after_rebuild_is_whole(root: Path, harm: str) -> None:
    """After an index rebuild a put of the same content is whole again."""
    for path in containers(root):
        apply_damage(path, harm)
    with open_store(root, settings=CHOSEN, create=True) as store:
        assert len(store.rebuild_index().skipped) == (0 if harm == "delete" else len(containers(root)))
        versions = {}
        for key in ("history", "alone", "mixed"):
            content = CONTENTS[key, 1]
            versions[key, store.put(key, content).info.version] = content
        assert find_broken(store, versions) == set()
        assert not set(versions) & {version for d in store.verify().damage for version in d.versions}


def put_again(store: Store) -> dict[tuple[str, int], bytes]:
    """Put every content once more under keys of its own; return the new versions."""
    return {
        (f"again {key} {version}", store.put(f"again {key} {version}", content).info.version): content
        for (key, version), content in CONTENTS.items()
    }


@pytest.mark.parametrize("harm", ["flip", "header", "delete", "truncate"])
def test_put_of_same_content_after_verify_is_whole(root: Path, harm: str) -> None:
    """After verify a put of the same content is whole without an index rebuild."""
    victims = containers(root)[1:4]
    for path in victims:
        apply_damage(path, harm)
    with open_store(root, settings=CHOSEN, create=True) as store:
        report = store.verify()
        assert {d.object_name for d in report.damage} == {damaged_names(root, path) for path in victims}
        assert report.forgotten is True
    with open_store(root, settings=CHOSEN, create=True) as store:
        assert find_broken(store, put_again(store)) == set()
        # broken blocks are repaired from chunks put again; a container without its directory has unknown chunks
        left = set() if harm == "flip" else {damaged_names(root, path) for path in victims}
        assert {d.object_name for d in store.verify().damage} == left


def test_put_with_missing_containers_does_not_depend_on_them(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A put notices missing containers and depends on none of their chunks."""
    before = open_store(root, settings=CHOSEN, create=True)
    counted = before.stats().containers
    before.close()
    for path in containers(root)[2:4]:
        path.unlink()
    with open_store(root, settings=CHOSEN, create=True) as store:
        assert find_broken(store, put_again(store)) == set()
        assert "2 of the containers that the index names are missing" in caplog.text
        assert store.stats().containers >= counted - 2
        assert sum(store.stats().parts.values()) == store.stats().ledger.stored_bytes
        caplog.clear()
        store.put("once more", b"content")
        assert caplog.text == ""


def test_put_after_containers_vanish_while_open_depends_on_none(tmp_path: Path) -> None:
    """Directories in the cache do not make missing containers sound: in a server they outlive the files."""
    content = random_bytes(10_000_000, 1)
    with open_store(tmp_path / "store", create=True) as store:
        store.put("a", content)
        for path in containers(tmp_path / "store"):
            path.unlink()
        assert store.put("b", content).ledger.unique_bytes == len(content)
    with open_store(tmp_path / "store") as store:
        assert store.get("b").read() == content


def test_verify_with_damage_keeps_sound_index_entries(root: Path) -> None:
    """Index entries of sound chunks stay after verify has found damage."""
    path = containers(root)[3]
    flip(path, 40)
    with open_store(root, settings=CHOSEN, create=True) as store:
        touched = {version for d in store.verify().damage for version in d.versions}
        for (key, version), content in CONTENTS.items():
            if (key, version) not in touched:
                assert store.put(f"again {key}", content).ledger.unique_bytes == 0, (key, version)
    assert touched


def test_verify_of_sound_store_keeps_the_index(root: Path) -> None:
    """Verify of a sound store leaves the index unchanged."""
    with open_store(root, settings=CHOSEN, create=True) as store:
        before = store._index.readable().entries()
        assert store.verify().forgotten is None
        assert store._index.readable().entries() == before


def test_verify_during_a_put_reports_kept_index_entries(root: Path) -> None:
    """Verify during a put reports that the index still names broken chunks."""
    flip(containers(root)[1], 40)
    with (
        open_store(root, settings=CHOSEN, create=True) as writer,
        open_store(root, settings=CHOSEN, create=True) as reader,
    ):
        writer.put("k", b"x")
        assert reader.verify().forgotten is False
        assert writer.verify().forgotten is True
        assert find_broken(writer, put_again(writer)) == set()
        writer.close()
        assert reader.verify().forgotten is None  # repaired from chunks put again


def test_broken_or_lost_manifest_hides_no_other_version(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A version whose manifest is broken or lost hides no other version."""
    flipped, lost = manifest_of(root, ("history", 3)), manifest_of(root, ("alone", 2))
    flip(flipped, 50)
    lost.unlink()
    with open_store(root, settings=CHOSEN, create=True) as store:
        reported: list[Damage] = []
        found = store.versions(all_versions=True, broken=reported.append, read_manifests=True)
        assert {(info.key, info.version) for info in found} == CONTENTS.keys() - {("history", 3), ("alone", 2)}
        assert {d.object_name: d.versions for d in reported} == {
            damaged_names(root, flipped): (("history", 3),),
            damaged_names(root, lost): (("alone", 2),),
        }
        assert caplog.text == ""
        without_reading: list[Damage] = []
        assert len(store.versions(all_versions=True, broken=without_reading.append)) == len(CONTENTS) - 1
        assert [d.object_name for d in without_reading] == [damaged_names(root, lost)]
        assert [info.key for info in store.versions()] == ["empty", "history", "mixed", "zeros"]
        assert "'alone' version 2 cannot be read" in caplog.text
        assert "'history' version 3" not in caplog.text  # only the newest is named


# ------------------------------------------------------------------ descriptor and index


@pytest.mark.parametrize("garbage", [b"", b"{", b"[]", b"\0" * 300, b"\xff\xfe", b'{"format": "nearkin-store"}'])
def test_broken_descriptor_is_refused_and_nothing_written(root: Path, garbage: bytes) -> None:
    """A broken descriptor is refused by name, and nothing is written."""
    (root / "nearkin.json").write_bytes(garbage)
    before = {path: path.stat().st_mtime_ns for path in root.rglob("*")}
    with pytest.raises(Corrupt, match=r"nearkin\.json"):
        open_store(root, settings=CHOSEN, create=True)
    assert {path: path.stat().st_mtime_ns for path in root.rglob("*")} == before


def test_flipped_bit_of_descriptor_yields_no_wrong_byte(root: Path) -> None:
    """No flipped bit of the descriptor yields a wrong byte."""
    path = root / "nearkin.json"
    whole = path.read_bytes()
    for at in range(len(whole)):
        flip(path, at, at % 7)
        try:
            with open_store(root, settings=CHOSEN, create=True) as store:
                find_broken(store, {("alone", 2): CONTENTS["alone", 2]})
        except PermanentError:
            pass  # no other error is allowed
        path.write_bytes(whole)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (lambda manifest: replace(manifest, size_bytes=manifest.size_bytes - 1), "continue beyond byte"),
        (lambda manifest: replace(manifest, size_bytes=0), "continue beyond byte 0"),
        (lambda manifest: replace(manifest, size_bytes=manifest.size_bytes + 1), "end at byte"),
        (
            lambda manifest: replace(
                manifest, segments=Locations(manifest.segments.containers, manifest.segments.ordinals + np.uint32(9999))
            ),
            "recipes",
        ),
    ],
    ids=["shorter", "none", "longer", "recipes"],
)
def test_rewritten_manifest_yields_no_wrong_content(
    root: Path, changed: Callable[[Manifest], Manifest], words: str
) -> None:
    """A manifest rewritten with wrong content and valid checks yields no wrong blob."""
    path = next(path for path in manifests(root) if "alone" in decode_manifest(path.read_bytes(), "m").key)
    manifest = decode_manifest(path.read_bytes(), "m")
    path.chmod(0o644)
    path.write_bytes(encode_manifest(changed(replace(manifest, lengths=None))))
    with open_store(root, settings=CHOSEN, create=True) as store:
        with pytest.raises(Corrupt, match=words):
            store.get("alone", manifest.version).read()
        if words == "recipes":
            with pytest.raises(Corrupt, match=words):
                store.explain("alone", manifest.version)
        assert ("alone", manifest.version) in {
            version for damage in store.verify().damage for version in damage.versions
        }


@pytest.mark.parametrize("harm", ["empty", "gone", "flipped"])
def test_verify_of_open_store_reads_its_descriptor(root: Path, harm: str) -> None:
    """Verify of an open store reads its descriptor."""
    path = root / "nearkin.json"
    with open_store(root, settings=CHOSEN, create=True) as store:
        assert store.verify().damage == ()
        if harm == "gone":
            path.unlink()
        elif harm == "empty":
            path.write_bytes(b"")
        else:
            flip(path, len(path.read_bytes()) // 2, 1)
        assert [(damage.object_name, damage.versions) for damage in store.verify().damage] == [("nearkin.json", ())]


@pytest.mark.parametrize("of", ["container", "manifest", "index"])
def test_pipe_instead_of_file_is_damage_without_a_wait(root: Path, of: str) -> None:
    """A pipe instead of an object's file is damage, and no reader waits for its other end."""
    path = {"container": containers(root)[0], "manifest": manifests(root)[0], "index": root / "index" / "data.mdb"}[of]
    path.unlink()
    os.mkfifo(path)
    with open_store(root, settings=CHOSEN, create=True) as store:
        if of == "index":
            with pytest.raises(IndexDamaged, match="rebuild-index"):
                store.stats()
            store.rebuild_index()
            assert store.verify().damage == ()
        else:
            failing = find_broken(store, CONTENTS)
            assert failing
            assert {version for damage in store.verify().damage for version in damage.versions} >= failing


def test_stray_files_in_the_store_are_named(root: Path) -> None:
    """Verify names files that do not belong to the store."""
    (root / "containers" / "notes.txt").write_text("mine")
    with (
        open_store(root, settings=CHOSEN, create=True) as store,
        pytest.raises(Corrupt, match=r"containers/notes\.txt"),
    ):
        store.put("k", b"x")


def test_errors_of_damage_are_one_line_with_the_remedy(root: Path) -> None:
    """Errors about damage are one line and name the remedy."""
    containers(root)[0].unlink()
    with open_store(root, settings=CHOSEN, create=True) as store:
        for key, version in find_broken(store, CONTENTS):
            err = attempt(store, key, version)[1]
            assert isinstance(err, NearkinError)
            assert "\n" not in str(err)
    assert json.loads((root / "nearkin.json").read_bytes())["format_version"] == 1


def test_put_after_rebuild_depends_on_no_broken_block(root: Path) -> None:
    """After an index rebuild no put depends on a broken block, whichever block it is."""
    from nearkin_shared.formats.container import decode_container
    from nearkin_shared.formats.container_layout import BLOCK

    for number, path in enumerate(containers(root)):
        whole = path.read_bytes()
        blocks = decode_container(whole, path.name).blocks
        if not len(blocks):
            continue  # recipes of known chunks only
        for block in {0, len(blocks) // 2, int(blocks.depths.argmax())}:
            copy = Path(shutil.copytree(root, root.parent / f"copy-{number}-{block}"))
            flip(copy / path.relative_to(root), int(blocks.offsets[block]) - BLOCK.size + 20)
            with open_store(copy, settings=CHOSEN, create=True) as store:
                store.rebuild_index()
                versions = {
                    (f"again {key}", store.put(f"again {key}", content).info.version): content
                    for (key, _), content in CONTENTS.items()
                }
                assert find_broken(store, versions) == set(), (number, block)
            shutil.rmtree(copy)

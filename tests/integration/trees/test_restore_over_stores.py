"""Test restores into folders with stores: no store is changed, and the descriptor of a restored one is last."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from nearkin.store import open_store
from nearkin.trees import free_names, tree_restore
from nearkin.trees.restore_counts import RestoreOptions
from nearkin.trees.restore_plan import PlannedRestore, plan_restore
from nearkin_shared.errors import BadInput
from tests.support.data.stores import ENCRYPTED, settings

DELETE = RestoreOptions(delete=True)
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root mounts, and changes owners")


def names(folder: Path) -> list[str]:
    """Return the names in a folder."""
    return sorted(os.listdir(folder))


def test_delete_keeps_the_store_in_the_target(folder: Path) -> None:
    with open_store(folder / "store", create=True) as store:
        store.backup("home", [folder])
        (folder / "besides").touch()
        before = names(folder / "store")
        counts = store.restore("home", folder, options=RestoreOptions(delete=True, delete_excluded=True))
        assert names(folder / "store") == before
        assert store.verify().damage == ()
    assert counts.deletion.deleted_paths == [b"besides"]
    assert [entry.path for entry in counts.deletion.kept_entries] == [b"store"]


def test_delete_keeps_a_store_that_the_tree_does_not_have(folder: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    (target / "extra" / "deep").mkdir(parents=True)
    (target / "extra" / "file").touch()
    with open_store(tmp_path / "first", create=True) as store:
        with open_store(target / "extra" / "deep" / "other store", create=True):
            pass
        store.backup("home", [folder])
        counts = store.restore("home", target, options=DELETE)
    assert names(target / "extra") == ["deep"]
    assert "nearkin.json" in names(target / "extra" / "deep" / "other store")
    assert [entry.path for entry in counts.deletion.kept_entries] == [b"extra/deep/other store"]


def test_restore_writes_nothing_into_its_store(folder: Path, tmp_path: Path) -> None:
    (folder / "store").mkdir()
    (folder / "store" / "nearkin.json").write_bytes(b"not a descriptor")
    target = tmp_path / "target"
    with open_store(target / "store", create=True) as store:
        descriptor = (target / "store" / "nearkin.json").read_bytes()
        status = (target / "store").stat()
        store.backup("home", [folder])
        counts = store.restore("home", target)
        only = store.restore(
            "home", target, options=RestoreOptions(accepts=lambda entry: entry.name == b"nearkin.json")
        )
        assert (target / "store" / "nearkin.json").read_bytes() == descriptor
        with pytest.raises(BadInput, match="is in the store"):
            store.restore("home", target / "store" / "sub")
    assert (target / "store").stat().st_mode == status.st_mode
    assert (counts.deletion.kept, only.files, only.failed) == (1, 0, 1)


@pytest.mark.parametrize("inside", ["containers", "containers/deep/new"])
def test_target_in_any_store_is_refused(inside: str, folder: Path, tmp_path: Path) -> None:
    """A store is known by its descriptor, whichever store the restore reads."""
    with open_store(tmp_path / "other", create=True) as other:
        other.put("k", b"blob")
    before = sorted((tmp_path / "other").rglob("*"))
    with open_store(tmp_path / "store", create=True) as store:
        store.backup("home", [folder])
        for options in (RestoreOptions(), DELETE):
            with pytest.raises(BadInput, match="is in the store"):
                store.restore("home", tmp_path / "other" / inside, options=options)
        with pytest.raises(BadInput, match="is in the store"):
            plan_restore(store.tree("home"), b"", tmp_path / "other", DELETE, PlannedRestore())
    assert sorted((tmp_path / "other").rglob("*")) == before


def test_restore_writes_into_no_existing_store(folder: Path, tmp_path: Path) -> None:
    """A store of the tree is restored as files, but not over a store that exists; that one is named."""
    with open_store(folder / "copy", create=True) as other:
        other.put("k", b"first")
    with open_store(tmp_path / "store", create=True) as store:
        store.backup("home", [folder])
        assert store.restore("home", tmp_path / "new").is_complete
        with open_store(tmp_path / "new" / "copy") as restored:
            assert restored.get("k").read() == b"first"
            restored.put("k", b"second")
        plan = plan_restore(store.tree("home"), b"", tmp_path / "new", RestoreOptions(), PlannedRestore())
        counts = store.restore("home", tmp_path / "new", options=RestoreOptions(delete=True, delete_excluded=True))
        only = store.restore("home", tmp_path / "new", options=RestoreOptions(accepts=lambda entry: b"/" in entry.path))
    with open_store(tmp_path / "new" / "copy") as kept:
        assert kept.get("k").read() == b"second"
    assert plan.problems == counts.problems
    assert [problem.path for problem in counts.problems] == [b"copy"]
    assert (plan.failed, plan.files, plan.deletion.kept) == (1, 2, 0)
    assert counts.files == 2
    assert {problem.reason for problem in only.problems} == {"is a folder of a store"}


def write_nearkin_json(place: Path, kind: str) -> None:
    """Make an entry with the name of a descriptor that is none."""
    name = place / "nearkin.json"
    if kind == "folder":
        name.mkdir()
    elif kind == "symlink":
        name.symlink_to("a")
    else:
        name.write_bytes({"empty": b"", "other": b'{"format": "another"}', "large": b" " * 100_000}[kind])


@pytest.mark.parametrize("kind", ["folder", "symlink", "empty", "other", "large"])
def test_name_of_a_descriptor_alone_makes_no_store(kind: str, folder: Path, tmp_path: Path) -> None:
    """A user who may write in a folder could else refuse every restore below it."""
    target = tmp_path / "above" / "target"
    (target / "sub").mkdir(parents=True)
    (target / "other").mkdir()
    for place in (tmp_path / "above", target / "sub", target / "other"):
        write_nearkin_json(place, kind)
    with open_store(tmp_path / "store", create=True) as store:
        store.backup("home", [folder])
        plan = plan_restore(store.tree("home"), b"", target, DELETE, PlannedRestore())
        counts = store.restore("home", target, options=DELETE)
    assert (counts.problems, counts.deletion.kept_entries, plan.problems) == ([], [], [])
    assert plan.deletion.deleted_paths == counts.deletion.deleted_paths == [b"other", b"sub/nearkin.json"]
    assert sorted(names(target)) == ["a", "sub"]


@pytest.mark.parametrize("damage", ["none", "later format", "damaged", "encrypted"])
def test_descriptor_makes_a_store(damage: str, folder: Path, tmp_path: Path) -> None:
    """One that this release cannot read, and a damaged one next to its objects, too."""
    (folder / "sub" / "b").unlink()
    chosen = settings(ENCRYPTED) if damage == "encrypted" else None
    with open_store(folder / "sub", create=True, settings=chosen) as other:
        other.put("k", b"first")
    descriptor = folder / "sub" / "nearkin.json"
    if damage == "later format":
        descriptor.write_text(json.dumps({**json.loads(descriptor.read_bytes()), "format_version": 99}))
    elif damage == "damaged":
        descriptor.write_bytes(descriptor.read_bytes()[:-20])
    with open_store(tmp_path / "store", create=True) as store:
        store.backup("home", [folder])
        with pytest.raises(BadInput, match="is in the store"):
            store.restore("home", folder / "sub" / "new")
        counts = store.restore("home", folder)
    assert [(one.path, one.reason[:24]) for one in counts.problems] == [(b"sub", "is a folder of a store, ")]


@needs_root
def test_descriptor_of_another_user_in_tmp_makes_no_store(folder: Path, tmp_path: Path) -> None:
    """A folder with the sticky bit is written by all: the owner of a file in it decides nothing about the folder."""
    shared = tmp_path / "shared"
    with open_store(shared, create=True):
        pass
    shared.chmod(0o1777)
    with open_store(tmp_path / "store", create=True) as store:
        store.backup("home", [folder])
        with pytest.raises(BadInput, match="is in the store"):
            store.restore("home", shared / "target")
        os.chown(shared / "nearkin.json", 12345, 12345)
        assert store.restore("home", shared / "target").is_complete


def test_killed_restore_of_a_store_is_continued(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The descriptor comes last: before, nothing keeps a second restore out of the folder."""
    with open_store(folder / "copy", create=True) as other:
        other.put("k", os.urandom(100_000))
    names_given = list[bytes]()
    give = free_names.give_free_name

    def give_noted(temporary: bytes, name: bytes, within: int) -> None:
        names_given.append(name)
        if len(names_given) == 4:
            raise KeyboardInterrupt
        give(temporary, name, within)

    with open_store(tmp_path / "store", create=True) as store:
        store.backup("home", [folder])
        monkeypatch.setattr(tree_restore, "give_free_name", give_noted)
        with pytest.raises(KeyboardInterrupt):
            store.restore("home", tmp_path / "new")
        assert b"nearkin.json" not in names_given
        assert store.restore("home", tmp_path / "new").is_complete
    assert names_given[-1] == b"nearkin.json"
    with open_store(tmp_path / "new" / "copy") as restored:
        assert len(restored.get("k").read()) == 100_000

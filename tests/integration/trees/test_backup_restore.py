"""Backups of folders with every kind of entry, compared with rsync."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import threading
from pathlib import Path

import pytest

import nearkin.trees.checkpoint_schedule
from nearkin.store import Item, Store, open_store
from nearkin.trees.backup_walk import BackupOptions, ComparisonOptions
from nearkin.trees.exclusions import ExclusionOptions
from nearkin.trees.restore_counts import Overwrite, RestoreOptions
from nearkin_shared.errors import BadInput, Corrupt, NotFound, RetentionActive
from nearkin_shared.formats.manifest import Manifest
from nearkin_shared.reading.restore import VersionReader
from nearkin_shared.reading.tree_reader import PlacedEntry, TreeReader
from nearkin_shared.validation import checkpoint_key_of
from tests.support.data.stores import SMALL, settings, stored_bytes

IS_ROOT = os.geteuid() == 0


def rsync_differences(source: Path, target: Path) -> str:
    """Return what rsync would change to make the target equal to the source, owners and attributes included."""
    command = ["rsync", "-naHAXS", "--itemize-changes", "--delete", f"{source}/", f"{target}/"]
    return subprocess.run(command, check=True, capture_output=True, text=True, errors="replace").stdout


def container_files(store: Path) -> list[Path]:
    """Return the files of all containers, the oldest first."""
    return sorted(path for path in (store / "containers").rglob("*") if path.is_file())


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Return a folder with every kind of entry."""
    root = tmp_path / "source"
    root.mkdir()
    (root / "empty").mkdir()
    (root / "small.txt").write_bytes(b"small")
    (root / "empty.txt").touch()
    (root / "large.bin").write_bytes(os.urandom(3_000_000))
    (root / "deep" / "er").mkdir(parents=True)
    (root / "deep" / "er" / "copy.bin").write_bytes((root / "large.bin").read_bytes())
    os.link(root / "small.txt", root / "deep" / "hard link")
    (root / "symlink").symlink_to("nowhere/at all")
    os.mkfifo(root / "fifo", 0o640)
    os.mkdir(os.path.join(os.fsencode(root), b"bytes \xff\xfe"))
    Path(os.fsdecode(os.path.join(os.fsencode(root), b"bytes \xff\xfe", b"new\nline"))).write_bytes(b"1")
    with (root / "sparse").open("wb") as file:
        file.seek(1 << 20)
        file.write(b"data" * 2048)
        file.truncate(10 << 20)
    with (root / "hole only").open("wb") as file:
        file.truncate(1 << 20)
    os.setxattr(root / "small.txt", "user.note", b"value \x00")
    os.setxattr(root / "deep", "user.folder", b"1")
    for number, name in enumerate(("before 1970", "after 2038")):
        path = root / name
        path.write_bytes(b"time")
        os.utime(path, ns=((-1_000_000_001, 4_294_967_296_123_456_789)[number],) * 2)
    for mode in (0o000, 0o400, 0o755, 0o4755, 0o2755, 0o1777):
        path = root / f"mode {mode:o}"
        path.write_bytes(b"mode")
        path.chmod(mode)
    (root / "closed").mkdir(0o700)
    (root / "closed" / "file").write_bytes(b"inside")
    (root / "closed").chmod(0o500)
    if IS_ROOT:
        os.mknod(root / "null", 0o666 | stat.S_IFCHR, os.makedev(1, 3))
        os.chown(root / "large.bin", 12345, 54321)
        os.chown(root / "symlink", 1, 1, follow_symlinks=False)
        subprocess.run(["setfacl", "-m", "u:33:rw", root / "large.bin"], check=True)
        subprocess.run(["setfacl", "-d", "-m", "g:33:rx", root / "deep"], check=True)
        capability = bytes.fromhex("0100000200200000000000000000000000000000")
        os.setxattr(root / "mode 755", "security.capability", capability)
    os.utime(root, ns=(1, 1_234_567_890_123_456_789))
    return root


def test_restored_tree_equals_source_for_rsync(source: Path, tmp_path: Path) -> None:
    with open_store(tmp_path / "store", create=True) as store:
        result = store.backup("home", [source])
        counts = store.restore("home", tmp_path / "target")
    assert result.is_complete
    assert result.put is not None
    assert counts.is_complete, (counts.problems, counts.unset)
    assert rsync_differences(source, tmp_path / "target") == ""
    assert (tmp_path / "target" / "sparse").stat().st_blocks * 512 < 1 << 20
    assert (tmp_path / "target").stat().st_mtime_ns == 1_234_567_890_123_456_789


def test_second_backup_reads_no_unchanged_file(source: Path, tmp_path: Path) -> None:
    with open_store(tmp_path / "store", create=True) as store:
        _age(source)
        first = store.backup("home", [source])
        (source / "small.txt").write_bytes(b"other content")
        second = store.backup("home", [source])
        third = store.backup("home", [source], options=BackupOptions(skip_if_unchanged=True))
        counts = store.restore("home", tmp_path / "target")
    assert first.put is not None
    assert second.put is not None
    assert second.counts.read_bytes == len(b"other content")
    assert second.put.ledger.stored_bytes < 20_000
    assert counts.is_complete
    assert rsync_differences(source, tmp_path / "target") == ""
    assert third.put is not None, "small.txt changed within a second of its backup: it is read again"


def test_backup_skip_if_unchanged_stores_no_version(source: Path, tmp_path: Path) -> None:
    _age(source)
    with open_store(tmp_path / "store", create=True) as store:
        store.backup("home", [source])
        again = store.backup("home", [source], options=BackupOptions(skip_if_unchanged=True))
        assert again.put is None
        assert len(store.versions(all_versions=True)) == 1
        os.utime(source / "deep", ns=(5, 5))
        changed = store.backup("home", [source], options=BackupOptions(skip_if_unchanged=True))
        assert changed.put is not None
        assert changed.counts.read_bytes == 0


def _age(source: Path) -> None:
    """Wait until no ctime below `source` is recent."""
    threading.Event().wait(1.1)


def test_sockets_are_skipped_and_counted(tmp_path: Path) -> None:
    folder = tmp_path / "source"
    folder.mkdir()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / "socket"))
        with open_store(tmp_path / "store", create=True) as store:
            result = store.backup("home", [folder])
    assert result.is_complete
    assert [(problem.path, problem.reason) for problem in result.counts.skips] == [
        (os.fsencode(folder / "socket"), "is a socket")
    ]


def test_excluded_entries_are_not_stored(tmp_path: Path) -> None:
    folder = tmp_path / "source"
    for name in ("a.o", "keep.o", "build/x", "cache/CACHEDIR.TAG", "cache/data", "no/.nobackup", "no/data", "big"):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"Signature: 8a477f597d28d172789f06886806bc55" if path.name == "CACHEDIR.TAG" else b"x")
    (folder / "big").write_bytes(bytes(2000))
    options = BackupOptions(
        exclusions=ExclusionOptions(
            patterns=["*.o", "!keep.o", "/build/"], if_present=[".nobackup"], larger_than_bytes=1999, caches=True
        )
    )
    with open_store(tmp_path / "store", create=True) as store:
        store.backup("home", [folder], options=options)
        found = [placed.entry.path for placed in store.tree("home").entries()]
    assert found == [b"", b"cache", b"keep.o", b"no", b"cache/CACHEDIR.TAG", b"no/.nobackup"]


def test_store_in_the_tree_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    with open_store(tmp_path / "store", create=True) as store:
        result = store.backup("home", [tmp_path])
        found = [placed.entry.path for placed in store.tree("home").entries()]
    assert found == [b"", b"file", b"store"]
    assert [problem.reason for problem in result.counts.skips] == ["is the store itself; its content is left out"]


def test_several_paths_share_their_common_root(tmp_path: Path) -> None:
    for name in ("a/b/one", "a/c/two", "a/d/three"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_bytes(name.encode())
    with open_store(tmp_path / "store", create=True) as store:
        store.backup("home", [tmp_path / "a" / "b", tmp_path / "a" / "c" / "two"])
        tree = store.tree("home")
        assert tree.summary.root == os.fsencode(tmp_path / "a")
        assert [placed.entry.path for placed in tree.entries()] == [b"", b"b", b"c", b"b/one", b"c/two"]


def test_restore_of_one_file_reads_its_content_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files behind it are not read ahead."""
    (tmp_path / "source").mkdir()
    for name in ("a", "b", "c"):
        (tmp_path / "source" / name).write_bytes(name.encode() * 5_000)
    opened: list[tuple[int, int]] = []
    open_range = Store._range

    def record(self: Store, manifest: Manifest, start: int, stop: int) -> VersionReader:
        opened.append((start, stop))
        return open_range(self, manifest, start, stop)

    with open_store(tmp_path / "store", create=True) as store:
        store.backup("home", [tmp_path / "source"])
        monkeypatch.setattr(Store, "_range", record)
        assert store.restore("home", tmp_path / "target", path=b"b").files == 1
    assert (tmp_path / "target" / "b").read_bytes() == b"b" * 5_000
    assert opened[-1] == (5_000, 10_000)


def test_restore_of_a_part_has_its_hard_links(source: Path, tmp_path: Path) -> None:
    with open_store(tmp_path / "store", create=True) as store:
        store.backup("home", [source])
        store.restore("home", tmp_path / "part", path=b"deep")
        store.restore("home", tmp_path / "one", path=b"small.txt")
        with pytest.raises(NotFound, match="no entry 'nothing'"):
            store.restore("home", tmp_path / "none", path=b"nothing")
    assert sorted(os.listdir(tmp_path / "part")) == ["er", "hard link"]
    assert (tmp_path / "part" / "hard link").read_bytes() == b"small"
    assert os.listdir(tmp_path / "one") == ["small.txt"]


@pytest.mark.parametrize("overwrite", Overwrite)
def test_restore_into_existing_folder_follows_policy(overwrite: Overwrite, tmp_path: Path) -> None:
    folder, target = tmp_path / "source", tmp_path / "target"
    folder.mkdir()
    target.mkdir()
    for name in ("same", "other", "missing"):
        (folder / name).write_bytes(b"stored")
        os.utime(folder / name, ns=(9, 9))
    (target / "same").write_bytes(b"STORED")
    os.utime(target / "same", ns=(9, 9))
    (target / "other").write_bytes(b"local")
    (target / "besides").write_bytes(b"local")
    with open_store(tmp_path / "store", create=True) as store:
        store.backup("home", [folder])
        counts = store.restore("home", target, options=RestoreOptions(overwrite=overwrite))
    content = {path.name: path.read_bytes() for path in target.iterdir()}
    expected = {
        Overwrite.ALWAYS: {"same": b"stored", "other": b"stored"},
        Overwrite.IF_CHANGED: {"same": b"STORED", "other": b"stored"},
        Overwrite.NEVER: {"same": b"STORED", "other": b"local"},
    }[overwrite]
    assert content == {**expected, "missing": b"stored", "besides": b"local"}
    assert counts.is_complete


def test_restore_delete_makes_the_target_equal(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    (target / "deep" / "besides").mkdir(parents=True)
    (target / "empty" / "file").parent.mkdir()
    (target / "empty" / "file").touch()
    (target / "large.bin").mkdir()
    with open_store(tmp_path / "store", create=True) as store:
        store.backup("home", [source])
        counts = store.restore("home", target, options=RestoreOptions(delete=True))
    assert counts.deleted == 2
    assert rsync_differences(source, target) == ""


def test_restore_writes_nothing_through_a_symlink(tmp_path: Path) -> None:
    folder, target, outside = tmp_path / "source", tmp_path / "target", tmp_path / "outside"
    (folder / "sub").mkdir(parents=True)
    (folder / "sub" / "file").write_bytes(b"stored")
    (folder / "plain").write_bytes(b"stored")
    for path in (target, outside):
        path.mkdir()
    (outside / "plain").write_bytes(b"local")
    (target / "sub").symlink_to(outside)
    (target / "plain").symlink_to(outside / "plain")
    with open_store(tmp_path / "store", create=True) as store:
        store.backup("home", [folder])
        counts = store.restore("home", target)
    assert counts.is_complete, counts.problems
    assert {path.name: path.read_bytes() for path in outside.iterdir()} == {"plain": b"local"}
    assert (target / "sub" / "file").read_bytes() == b"stored"


def test_restore_refuses_a_symlink_in_its_path(tmp_path: Path) -> None:
    """A folder that is not restored itself, and is a symlink in the target, is not entered."""
    folder, target, outside = tmp_path / "source", tmp_path / "target", tmp_path / "outside"
    (folder / "sub").mkdir(parents=True)
    (folder / "sub" / "file").write_bytes(b"stored")
    target.mkdir()
    outside.mkdir()
    (target / "sub").symlink_to(outside)
    options = RestoreOptions(accepts=lambda entry: entry.name == b"file")
    with open_store(tmp_path / "store", create=True) as store:
        store.backup("home", [folder])
        counts = store.restore("home", target, options=options)
    assert counts.failed == 1
    assert list(outside.iterdir()) == []


def test_folders_that_lead_to_a_match_get_their_attributes(tmp_path: Path) -> None:
    """Modes, owners and times are those of the tree, also where the mode forbids its owner to enter."""
    folder, target = tmp_path / "source", tmp_path / "target"
    (folder / "a" / "b" / "c").mkdir(parents=True)
    (folder / "a" / "other").mkdir()
    for name in ("a/b/c/match", "a/match", "a/b/c/other"):
        (folder / name).write_bytes(b"x")
    os.setxattr(folder / "a", "user.note", b"1")
    for number, name in enumerate(("a/b/c", "a/b", "a")):
        (folder / name).chmod((0o711, 0o500, 0o2755)[number])
        if IS_ROOT:
            os.chown(folder / name, 10 + number, 20 + number)
        os.utime(folder / name, ns=(number + 1, 10**18 + number))
    options = RestoreOptions(accepts=lambda entry: entry.name in (b"match", b"b"))
    with open_store(tmp_path / "store", create=True) as store:
        store.backup("home", [folder])
        counts = store.restore("home", target, options=options)
        part = store.restore("home", tmp_path / "part", path=b"a", options=options)
    assert (counts.is_complete, counts.files, counts.folders) == (True, 2, 1)
    assert (part.is_complete, part.files) == (True, 2)
    (folder / "a" / "b" / "c" / "other").unlink()
    (folder / "a" / "other").rmdir()
    for number, name in enumerate(("a/b/c", "a/b", "a")):
        os.utime(folder / name, ns=(number + 1, 10**18 + number))
    assert rsync_differences(folder, target) == ""
    assert rsync_differences(folder / "a" / "b", tmp_path / "part" / "b") == ""


def test_blob_is_not_read_as_a_tree(tmp_path: Path) -> None:
    with open_store(tmp_path / "store", create=True) as store:
        store.put("blob", b"x" * 1000)
        with pytest.raises(Corrupt, match="is not a tree"):
            store.tree("blob")
        store.backup("tree", [tmp_path])
        assert {info.key: info.is_tree for info in store.versions()} == {"blob": False, "tree": True}
        with pytest.raises(BadInput, match=r'path "/no/such/path"'):
            store.backup("home", ["/no/such/path"])
        with pytest.raises(BadInput, match="reserved"):
            store.backup(".nearkin/x", [tmp_path])


def test_checkpoint_restores_all_that_was_stored_before_it(tmp_path: Path) -> None:
    """A checkpoint has the spliced segments and the fresh ones, in order (I2)."""
    folder = tmp_path / "source"
    for number in range(40):
        path = folder / f"{number // 10}" / f"{number:02}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(os.urandom(300_000))
    _age(folder)
    with open_store(tmp_path / "store", create=True) as store, pytest.MonkeyPatch.context() as patch:
        store.backup("home", [folder])
        for number in range(0, 40, 3):
            (folder / f"{number // 10}" / f"{number:02}").write_bytes(os.urandom(200_000))
        patch.setattr(nearkin.trees.checkpoint_schedule, "CHECKPOINT_BYTES_FIRST", 1)
        patch.setattr(nearkin.trees.checkpoint_schedule, "CHECKPOINT_BYTES_MIN", 1)
        patch.setattr(Store, "delete", lambda *_, **__: 0)
        result = store.backup("home", [folder])
        (checkpoint,) = store.versions(".nearkin/")
        counts = store.restore(checkpoint.key, tmp_path / "target")
    assert result.counts.reused_bytes == 26 * 300_000
    assert counts.is_complete
    assert counts.files == 40
    subprocess.run(["diff", "-r", folder, tmp_path / "target"], check=True)


def test_stored_bytes_count_what_checkpoints_wrote(tmp_path: Path) -> None:
    folder = tmp_path / "source"
    for number in range(8):
        (folder / f"{number}").mkdir(parents=True)
        (folder / f"{number}" / "file").write_bytes(os.urandom(300_000))
    with open_store(tmp_path / "store", create=True) as store, pytest.MonkeyPatch.context() as patch:
        patch.setattr(nearkin.trees.checkpoint_schedule, "CHECKPOINT_BYTES_FIRST", 1)
        patch.setattr(nearkin.trees.checkpoint_schedule, "CHECKPOINT_BYTES_MIN", 1)
        put = store.backup("home", [folder]).put
    assert put is not None
    assert 2_400_000 < put.ledger.block_bytes < put.ledger.stored_bytes < 2_600_000


@pytest.mark.parametrize("damage", ["lost", "lost while open", "quarantined"])
def test_backup_reads_files_again_whose_chunks_are_damaged(damage: str, tmp_path: Path) -> None:
    """An unchanged file is not taken over from a container that is missing or quarantined (I2)."""
    folder = tmp_path / "source"
    folder.mkdir()
    for number in range(20):  # the entries are in another container than the first contents
        (folder / f"{number}").write_bytes(os.urandom(500_000))
    _age(folder)
    with open_store(tmp_path / "store", settings=settings(SMALL), create=True) as store:
        store.backup("home", [folder])
        container = container_files(tmp_path / "store")[0]
        assert len(container_files(tmp_path / "store")) > 2
        if damage == "lost while open":  # directories are cached
            container.unlink()
            assert store.backup("home", [folder]).counts.reused_bytes == 0
    if damage == "lost":
        container.unlink()
    elif damage == "quarantined":
        content = bytearray(container.read_bytes())
        content[len(content) // 3] ^= 1
        container.chmod(0o600)
        container.write_bytes(content)
    with open_store(tmp_path / "store", settings=settings(SMALL)) as store:
        if damage == "quarantined":
            assert store.verify().damage
        second = store.backup("home", [folder])
        third = store.backup("home", [folder])
        assert second.put is not None
        assert third.put is not None
        assert second.counts.reused_bytes == (10_000_000 if damage == "lost while open" else 0)
        assert third.counts.reused_bytes == 10_000_000
        for version in (second.put.info.version, third.put.info.version):
            target = tmp_path / f"target {version}"
            assert store.restore("home", target, version=version).is_complete
            subprocess.run(["diff", "-r", folder, target], check=True)


def test_backup_succeeds_if_the_entries_of_its_parent_are_damaged(tmp_path: Path) -> None:
    """A parent that cannot be read to its end costs time: files behind the damage are read."""
    folder = tmp_path / "source"
    folder.mkdir()
    for number in range(5000):
        (folder / f"{number:04}").write_bytes(b"%d" % number)
    _age(folder)
    with open_store(tmp_path / "store", create=True) as store:
        store.backup("home", [folder])
        with pytest.MonkeyPatch.context() as patch:
            decode = TreeReader._decode_keyed

            def decode_damaged(
                reader: TreeReader, number: int, block: bytes
            ) -> tuple[list[tuple[bytes, bytes]], list[PlacedEntry]]:
                return decode(reader, number, block if number < 3 else block[:-1])

            patch.setattr(TreeReader, "_decode_keyed", decode_damaged)
            result = store.backup("home", [folder])
        assert result.is_complete
        assert 0 < result.counts.unchanged_files < 5000
        assert store.restore("home", tmp_path / "target").is_complete
    subprocess.run(["diff", "-r", folder, tmp_path / "target"], check=True)


def test_restore_goes_on_after_a_damaged_file(tmp_path: Path) -> None:
    """A damaged file is named and not left behind; every other file is restored."""
    folder = tmp_path / "source"
    folder.mkdir()
    for number in range(200):
        (folder / f"{number:03}").write_bytes(os.urandom(50_000))
    with open_store(tmp_path / "store", create=True) as store:
        store.backup("home", [folder])
    container = container_files(tmp_path / "store")[0]
    content = bytearray(container.read_bytes())
    content[len(content) // 3] ^= 1
    container.chmod(0o600)
    container.write_bytes(content)
    with open_store(tmp_path / "store") as store:
        counts = store.restore("home", tmp_path / "target")
    restored = sorted(os.listdir(tmp_path / "target"))
    assert 0 < counts.failed < 200
    assert counts.damaged == counts.failed
    assert len(restored) == 200 - counts.failed
    for name in restored:
        assert (tmp_path / "target" / name).read_bytes() == (folder / name).read_bytes()


def test_backup_with_ignore_ctime_reads_changed_attributes(tmp_path: Path) -> None:
    """A file whose ctime is not compared keeps its content; its attributes are read."""
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "file").write_bytes(b"content")
    _age(folder)
    options = BackupOptions(comparison=ComparisonOptions(ignore_ctime=True))
    with open_store(tmp_path / "store", create=True) as store:
        store.backup("home", [folder])
        os.setxattr(folder / "file", "user.note", b"later")
        (folder / "file").chmod(0o600)
        result = store.backup("home", [folder], options=options)
        assert result.counts.unchanged_files == 1
        store.restore("home", tmp_path / "target")
    assert rsync_differences(folder, tmp_path / "target") == ""


def test_minimum_age_retains_no_checkpoint(tmp_path: Path) -> None:
    """Else a backup would end with an error although its version is stored."""
    folder, retained = tmp_path / "source", settings({"retention": {"min_age_seconds": 86_400}})
    folder.mkdir()
    (folder / "file").write_bytes(os.urandom(100_000))
    with (
        open_store(tmp_path / "store", create=True, settings=retained) as store,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(nearkin.trees.checkpoint_schedule, "CHECKPOINT_BYTES_FIRST", 1)
        patch.setattr(nearkin.trees.checkpoint_schedule, "CHECKPOINT_BYTES_MIN", 1)
        assert store.backup("home", [folder]).is_complete
        assert len(store.list_deleted(".nearkin/")) > 0
        with pytest.raises(RetentionActive):
            store.delete("home")


def test_keys_of_checkpoints_are_reserved_and_not_listed(tmp_path: Path) -> None:
    """No caller puts a reserved key, and no listing shows one, deleted or not."""
    folder = tmp_path / "source"
    folder.mkdir()
    with open_store(tmp_path / "store", create=True) as store, pytest.MonkeyPatch.context() as patch:
        patch.setattr(nearkin.trees.checkpoint_schedule, "CHECKPOINT_BYTES_FIRST", 1)
        patch.setattr(nearkin.trees.checkpoint_schedule, "CHECKPOINT_BYTES_MIN", 1)
        (folder / "file").write_bytes(os.urandom(100_000))
        store.backup("home", [folder])
        assert store.versions(".nearkin/", all_versions=True) == []
        assert [deletion.key for deletion in store.list_deleted(".nearkin/")] != [], "a checkpoint was made"
        assert store.list_deleted() == []
        assert [info.key for info in store.versions(all_versions=True)] == ["home"]
        with pytest.raises(BadInput, match="reserved"):
            store.put(".nearkin/checkpoints/x", b"")
        assert store.gc().versions == 0, "checkpoints are no versions"
        assert store.list_deleted(".nearkin/") == [], "finished checkpoints have no undelete window"
        assert store.verify().versions == 1


def test_checkpoints_count_as_stored_bytes_only(tmp_path: Path) -> None:
    """Checkpoints are no versions in `stats`, `verify` and `gc`, also once they are deleted."""
    root = tmp_path / "store"
    with open_store(root, settings=settings({"gc": {"grace_seconds": 0}}), create=True) as store:
        store.put("key", b"x" * 1000)
        list(store.put_many([Item(checkpoint_key_of("home"), os.urandom(50_000), is_checkpoint=True)]))
        found = store.stats()
        assert (found.versions, found.keys, found.ledger.logical_bytes) == (1, 1, 1000)
        assert (found.checkpoints, found.checkpoint_bytes) == (1, 50_000)
        assert sum(found.parts.values()) == found.ledger.stored_bytes == stored_bytes(root)
        assert store.verify().versions == 1
        store.delete(checkpoint_key_of("home"))
        found = store.stats()
        assert (found.checkpoints, found.deleted_versions, found.deleted_bytes) == (0, 0, 0)
        assert store.gc(dry_run=True).versions == 0
        report = store.gc()
        assert (report.versions, report.undeletable_versions) == (0, 0)

"""Imports of tar archives: of `nearkin export`, of GNU tar in two formats, and hostile ones."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import stat
import subprocess
import tarfile
import threading
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO, cast

import pytest
from backports.zstd import compress

from nearkin.store import Store, open_store
from nearkin.trees import tar_index, tar_members, tar_spool
from nearkin.trees.attributes import data_extents
from nearkin.trees.tar_import import ImportCounts, ImportOptions
from nearkin.trees.tar_members import HEADER_BYTES_MAX
from nearkin.trees.tar_writer import TarWriter
from nearkin_shared.errors import BadInput, NoRoom, SourceFailed
from nearkin_shared.formats.tree_entry_group import EntryKind, TreeEntry
from tests.support.data.archives import archive_of, member

IS_ROOT = os.geteuid() == 0
XATTR_OPTIONS = ("--xattrs", "--xattrs-include=*", "--acls", "--format=pax")


def rsync_differences(source: Path, target: Path) -> str:
    """Return what rsync would change to make the target equal to the source, owners and attributes included."""
    command = ["rsync", "-naHAXS", "--itemize-changes", "--delete", f"{source}/", f"{target}/"]
    return subprocess.run(command, check=True, capture_output=True, text=True, errors="replace").stdout


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with open_store(tmp_path / "store", create=True) as opened:
        yield opened


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Return a folder with every kind of entry that GNU tar keeps in its own format: times are whole seconds."""
    root = tmp_path / "source"
    (root / "deep" / "er").mkdir(parents=True)
    (root / "empty").mkdir()
    (root / "small.txt").write_bytes(b"small")
    (root / "none").touch()
    (root / "large.bin").write_bytes(os.urandom(3_000_000))
    os.link(root / "small.txt", root / "deep" / "a hard link")
    (root / "symlink").symlink_to("nowhere/at all")
    os.link(root / "symlink", root / "zz link of symlink", follow_symlinks=False)
    os.mkfifo(root / "fifo", 0o640)
    long = os.path.join(os.fsencode(root), b"n" * 200, b"m" * 200)
    os.makedirs(long)
    Path(os.fsdecode(long), os.fsdecode(b"bytes \xff\nend")).write_bytes(b"1")
    (root / "long link").symlink_to("t" * 300)
    with (root / "sparse").open("wb") as file:
        file.seek(1 << 20)
        file.write(os.urandom(8192))
        file.truncate(10 << 20)
    with (root / "many holes").open("wb") as file:
        for number in range(60):
            file.seek(number * (1 << 17))
            file.write(os.urandom(4096))
    with (root / "hole only").open("wb") as file:
        file.truncate(1 << 20)
    for mode in (0o000, 0o4755, 0o2755, 0o1777):
        (root / f"mode {mode:o}").write_bytes(b"mode")
        (root / f"mode {mode:o}").chmod(mode)
    if IS_ROOT:
        os.mknod(root / "null", 0o666 | stat.S_IFCHR, os.makedev(1, 3))
        os.chown(root / "large.bin", 12345, 3_000_000_000)
    for path in sorted(root.rglob("*"), reverse=True):
        os.utime(path, (1, 1_234_567_890), follow_symlinks=False)
    os.utime(root, (1, 1_234_567_890))
    return root


def add_attributes(root: Path) -> None:
    """Add what only PAX archives keep: attributes, ACLs, and times with nanoseconds or before 1970."""
    os.setxattr(root / "small.txt", "user.note", b"value \x00\xff\n=%")
    os.setxattr(root / "small.txt", "user.a=b%c", b"1")
    os.setxattr(root / "deep", "user.folder", b"")
    subprocess.run(["setfacl", "-m", "u:33:rw,g:4000000:r", root / "large.bin"], check=True)
    subprocess.run(["setfacl", "-d", "-m", "g:33:rx", root / "deep"], check=True)
    if IS_ROOT:
        os.setxattr(
            root / "mode 4755", "security.capability", bytes.fromhex("0100000200200000000000000000000000000000")
        )
    os.utime(root / "none", ns=(1, -1_000_000_001))
    os.utime(root / "deep", ns=(1, 4_294_967_296_123_456_789))


def extents_of(path: Path) -> tuple[tuple[int, int], ...] | None:
    """Return (offset, bytes) of the data of a file; its blocks include metadata that a file system allocates late."""
    with path.open("rb") as file:
        return data_extents(file.fileno(), path.stat())


def export(store: Store, key: str, path: Path) -> None:
    tree = store.tree(key)
    with path.open("wb") as file, store.get(key, stop=tree.content_bytes) as contents:
        TarWriter(tree, contents).write(b"", file)


def plain_entries(store: Store, key: str) -> list[TreeEntry]:
    """Return the entries without what an archive does not have: ctime, inode and flags."""
    return [placed.entry._replace(ctime_ns=0, inode=0, flags=0) for placed in store.tree(key).entries()]


def test_import_of_an_export_equals_the_tree(source: Path, store: Store, tmp_path: Path) -> None:
    add_attributes(source)
    store.backup("home", [source])
    export(store, "home", tmp_path / "t.tar")
    result = store.import_tar("again", tmp_path / "t.tar", options=ImportOptions(tags=["tape"]))
    assert result.is_complete, result.counts.problems
    assert result.put.info.metadata["tags"] == "tape"
    assert plain_entries(store, "again") == plain_entries(store, "home")
    assert store.tree("again").summary.users == store.tree("home").summary.users
    assert result.put.ledger.stored_bytes < 60_000, "contents have the chunks of the backup"
    counts = store.restore("again", tmp_path / "target")
    assert counts.is_complete, (counts.problems, counts.unset)
    assert rsync_differences(source, tmp_path / "target") == ""
    assert (tmp_path / "target" / "sparse").stat().st_blocks * 512 < 1 << 20
    assert store.verify().damage == ()


@pytest.mark.parametrize(
    "options",
    [
        ("--format=gnu",),
        ("--format=gnu", "--sparse"),
        XATTR_OPTIONS,
        (*XATTR_OPTIONS, "--sparse"),
        (*XATTR_OPTIONS, "--sparse", "--sparse-version=0.0"),
        (*XATTR_OPTIONS, "--sparse", "--sparse-version=0.1"),
        ("--acls", "--format=pax", "--numeric-owner"),
    ],
)
def test_archive_of_gnu_tar_restores_as_its_source(
    options: tuple[str, ...], source: Path, store: Store, tmp_path: Path
) -> None:
    if "--xattrs" in options:
        add_attributes(source)
    elif "--acls" in options:
        subprocess.run(["setfacl", "-m", "u:33:rw,g:4000000:r", source / "large.bin"], check=True)
    archive = tmp_path / "t.tar"
    subprocess.run(["tar", "-c", *options, "-f", archive, "-C", source, "."], check=True)
    result = store.import_tar("home", archive)
    assert result.is_complete, result.counts.problems
    counts = store.restore("home", tmp_path / "target")
    assert counts.is_complete, (counts.problems, counts.unset)
    if "--sparse" not in options:
        for name in ("sparse", "many holes", "hole only"):  # stored without holes
            subprocess.run(["fallocate", "--dig-holes", tmp_path / "target" / name], check=True)
            os.utime(tmp_path / "target" / name, (1, 1_234_567_890))
    else:
        assert (tmp_path / "target" / "sparse").stat().st_blocks * 512 < 1 << 20
        assert extents_of(tmp_path / "target" / "many holes") == extents_of(source / "many holes")
    assert rsync_differences(source, tmp_path / "target") == ""


@pytest.mark.parametrize(
    "pack",
    [
        gzip.compress,
        lambda data: gzip.compress(data[:5000]) + gzip.compress(data[5000:]),
        bz2.compress,
        lzma.compress,
        lambda data: lzma.compress(data[:5000]) + lzma.compress(data[5000:]),
        compress,
        lambda data: compress(data[:5000]) + compress(data[5000:]),
    ],
    ids=["gz", "gz, two members", "bz2", "xz", "xz, two streams", "zst", "zst, two frames"],
)
def test_compressed_archive_is_imported_unless_it_is_damaged(
    pack: Callable[[bytes], bytes], store: Store, tmp_path: Path
) -> None:
    packed = pack(archive_of([("a", b"x" * 100_000), ("b", os.urandom(50_000))]))
    (tmp_path / "packed").write_bytes(packed)
    assert store.import_tar("good", tmp_path / "packed").counts.files == 2
    for wrong in (packed[:-1], packed[: len(packed) // 2], packed[:-20] + bytes(20)):
        with pytest.raises(BadInput, match="nothing was stored"):
            store.import_tar("bad", io.BytesIO(wrong))
    assert [info.key for info in store.versions(all_versions=True)] == ["good"]


def test_stream_without_positions_is_imported(store: Store, tmp_path: Path) -> None:
    """A pipe gives no size, and fewer bytes than requested."""
    data = archive_of([("a", os.urandom(300_000))])
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        thread = threading.Thread(target=lambda: (process.stdin.write(data), process.stdin.close()))  # type: ignore[union-attr]
        thread.start()
        assert store.import_tar("piped", cast("BinaryIO", process.stdout)).counts.read_bytes == 300_000
        thread.join()


def imported(store: Store, data: bytes) -> tuple[dict[bytes, TreeEntry], ImportCounts]:
    counts = ImportCounts()
    store.import_tar("key", io.BytesIO(data), counts=counts)
    return {placed.entry.path: placed.entry for placed in store.tree("key").entries()}, counts


def test_names_follow_the_rule(store: Store) -> None:
    names = ["/etc/passwd", "./a//b/./c", "../up", "x/../../up", "n" * 256, "d/" * 2100 + "deep", "ok"]
    found, counts = imported(store, archive_of([(name, b"1") for name in names]))
    assert sorted(found) == [b"", b"a", b"a/b", b"a/b/c", b"etc", b"etc/passwd", b"ok"]
    assert counts.left_out == 4
    assert [problem.reason for problem in counts.problems] == [
        "left out: its name has ..",
        "left out: its name has ..",
        "left out: its name has a part above 255 bytes, or a NUL",
        "left out: its name has more than 4,096 bytes",
    ]


def test_last_member_of_a_name_counts(store: Store) -> None:
    symlink = tarfile.SYMTYPE
    found, counts = imported(
        store,
        archive_of(
            [
                ("a", b"first"),
                (member("link", type=tarfile.LNKTYPE, linkname="a"), b""),
                ("a", b"second!"),
                (member("folder", type=tarfile.DIRTYPE, mode=0o700), b""),
                ("folder/file", b"1"),
                (member("folder", type=tarfile.DIRTYPE, mode=0o711), b""),
                (member("folder", type=symlink, linkname="/etc"), b""),
                (member("s", type=symlink, linkname="/etc"), b""),
                ("s/passwd", b"x"),
                (member("lost", type=tarfile.LNKTYPE, linkname="later"), b""),
                ("later", b"x"),
                (member("to folder", type=tarfile.LNKTYPE, linkname="folder"), b""),
                (member("odd", type=b"?"), b"content"),
            ]
        ),
    )
    assert (found[b"a"].size, found[b"link"].size, found[b"link"].kind) == (7, 5, EntryKind.FILE)
    assert (found[b"folder"].kind, found[b"folder"].mode) == (EntryKind.FOLDER, 0o711)
    assert found[b"s"].target == b"/etc"
    assert set(found) == {b"", b"a", b"link", b"folder", b"folder/file", b"s", b"later"}
    assert [problem.path for problem in counts.problems] == [b"folder", b"s/passwd", b"lost", b"to folder", b"odd"]


def test_attributes_out_of_range_are_reported(store: Store) -> None:
    records = {
        "mtime": "99999999999999999999",
        "uid": "5000000000",
        "SCHILY.acl.access": "user:no_such_user:rwx,mask::rwx",
        "SCHILY.xattr.user.large": "x" * 70_000,
        "LIBARCHIVE.xattr.user.n%20n": "AAEC",
    }
    found, counts = imported(store, archive_of([(member("a", pax_headers=records), b"1")]))
    entry = found[b"a"]
    assert (entry.mtime_ns, entry.uid, entry.xattrs) == (0, 65_534, ((b"user.n n", b"\0\1\2"),))
    assert counts.altered == 4
    assert counts.left_out == 0


@pytest.mark.parametrize("mtime", ["15032385535.5", "-2147483648", "18446744073.709551615"])
def test_times_of_file_systems_are_imported(mtime: str, store: Store) -> None:
    """The last time of ext4, in 2446, is beyond what 64 signed bits of nanoseconds hold."""
    found, counts = imported(store, archive_of([(member("a", pax_headers={"mtime": mtime}), b"1")]))
    whole, _, fraction = mtime.partition(".")
    assert found[b"a"].mtime_ns == int(whole) * 1_000_000_000 + int(fraction.ljust(9, "0"))
    assert counts.altered == 0


@pytest.mark.parametrize("cut", [1, 700, 1024, 2560, 10_240])
def test_cut_short_archive_is_refused(cut: int, store: Store) -> None:
    """Every end but the padding behind the end mark is noticed."""
    data = archive_of([("a", b"x" * 3000), ("b", b"y" * 600)])
    whole = data.rstrip(b"\0")
    end = -(-len(whole) // 512) * 512
    with pytest.raises(BadInput, match="nothing was stored"):
        store.import_tar("key", io.BytesIO(data[: max(10, end - cut)]))
    with pytest.raises(BadInput, match="no end mark"):
        store.import_tar("key", io.BytesIO(data[:end]))
    assert store.versions() == []
    assert store.import_tar("key", io.BytesIO(data[: end + 512])).counts.files == 2


def wrong_archives() -> dict[str, bytes]:
    good = archive_of([("a", b"x" * 3000), ("b", b"y")])
    flipped = bytearray(good)
    flipped[3584 + 10] ^= 1  # in the header of b
    negative = tarfile.TarInfo("n").tobuf()
    negative = negative[:124] + b"\xff" * 12 + negative[136:]
    negative = _with_checksum(negative)
    large = member("x", pax_headers={"comment": "c" * (HEADER_BYTES_MAX + 1)})
    sparse = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.name": "s", "GNU.sparse.realsize": "100"}
    overlapping = member("s", pax_headers=sparse)
    return {
        "no archive": b"this is text" * 1000,
        "empty": b"",
        "no members": bytes(10_240),
        "a flipped header": bytes(flipped),
        "a negative size": negative + bytes(10_240),
        "large headers": archive_of([(large, b"")]),
        "overlapping extents": archive_of([(overlapping, b"2\n0\n50\n10\n20\n".ljust(512, b"\0") + bytes(70))]),
        "an endless sparse map": archive_of([(member("s", pax_headers=sparse), b"9999999999\n".ljust(512, b"\0"))]),
        "two archives": good + good,
        "nested headers": _pax_header() * 2000 + bytes(1024),
    }


def _with_checksum(header: bytes) -> bytes:
    total = sum(header[:148]) + 256 + sum(header[156:512])
    return header[:148] + b"%06o\0 " % total + header[156:]


def _pax_header() -> bytes:
    return _with_checksum(member("p", type=tarfile.XHDTYPE, size=0).tobuf())


@pytest.mark.parametrize("name", list(wrong_archives()))
def test_hostile_archive_is_refused(name: str, store: Store) -> None:
    with pytest.raises(BadInput):
        store.import_tar("key", io.BytesIO(wrong_archives()[name]))
    assert store.versions() == []


def test_sparse_file_with_a_size_record_is_followed(store: Store) -> None:
    """A sparse file with more than 8 GiB of data has one: the library takes the size with holes there."""
    content = b"1\n1048576\n3\n".ljust(512, b"\0") + b"abc"
    records = {
        "GNU.sparse.major": "1",
        "GNU.sparse.minor": "0",
        "GNU.sparse.name": "s",
        "GNU.sparse.realsize": "2097152",
        "size": str(len(content)),
    }
    found, _ = imported(store, archive_of([(member("x", pax_headers=records), content), ("after", b"1")]))
    assert (found[b"s"].size, found[b"s"].extents) == (2_097_152, ((1_048_576, 3),))
    assert found[b"after"].size == 1


def test_changed_archive_stores_nothing(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "t.tar"
    path.write_bytes(archive_of([("a", b"x" * 3000)]))
    finish = tar_index.TarIndex.finish

    def change(index: tar_index.TarIndex) -> None:
        finish(index)
        with path.open("r+b") as file:
            file.truncate(2000)

    monkeypatch.setattr(tar_index.TarIndex, "finish", change)
    with pytest.raises(SourceFailed, match="is cut short; nothing was stored"):
        store.import_tar("key", path)
    assert store.versions() == []


def test_bounds_are_kept(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = archive_of([(f"{number}", b"") for number in range(12)])
    monkeypatch.setattr(tar_index, "ENTRIES_MAX", 10)
    with pytest.raises(BadInput, match="more than 10 members"):
        store.import_tar("key", io.BytesIO(data))
    monkeypatch.setattr(tar_spool, "FREE_SHARE", 0)
    monkeypatch.setattr(tar_spool, "FREE_CHECK_BYTES", 1)
    with pytest.raises(NoRoom, match="--temporary"):
        store.import_tar("key", io.BytesIO(data))
    with pytest.raises(BadInput, match="temporary folder"):
        store.import_tar("key", io.BytesIO(data), options=ImportOptions(temporary=tmp_path / "missing"))
    assert store.versions() == []


def test_large_attributes_end_groups(store: Store) -> None:
    """Entries with 60 kB of attributes each make groups of bounded size."""
    records = {"SCHILY.xattr.user.a": "x" * 60_000}
    found, _ = imported(store, archive_of([(member(f"{number}", pax_headers=records), b"") for number in range(300)]))
    bounds = store.tree("key").group_bounds()
    assert len(found) == 301
    assert max(after - before for before, after in pairwise(bounds)) < 10 << 20


def test_members_are_read_with_their_types() -> None:
    """The module has a kind for every type that the library reads as an entry."""
    assert set(tarfile.SUPPORTED_TYPES) - {tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK} <= set(
        tar_members._KINDS
    )

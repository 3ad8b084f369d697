"""Imports of tar archives that want more than they have: huge holes, names of owners, headers, attributes."""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import pytest

from nearkin.store import Store, open_store
from nearkin.trees import tar_import, tar_index, tar_members, tar_spool
from nearkin.trees.stored_content import read_file
from nearkin.trees.tar_import import ImportCounts
from nearkin.trees.tar_members import GLOBAL_BYTES_MAX, GLOBAL_RECORDS_MAX, SPARSE_BYTES_MAX
from nearkin.trees.tree_sinks import StreamSink
from nearkin.trees.tree_writer import SIZE_BYTES_MAX, OwnerNames, TreeWriter
from nearkin_shared.errors import BadInput, NoRoom
from nearkin_shared.formats.tree_entry_group import EntryKind, TreeEntry
from nearkin_shared.formats.tree_layout import SUMMARY_BYTES_MAX, TreeSummary, encode_end
from tests.support.data.archives import archive_of, member, sparse_member


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with open_store(tmp_path / "store", create=True) as opened:
        yield opened


def imported(store: Store, data: bytes) -> tuple[dict[bytes, TreeEntry], ImportCounts]:
    counts = ImportCounts()
    store.import_tar("key", io.BytesIO(data), counts=counts)
    return {placed.entry.path: placed.entry for placed in store.tree("key").entries()}, counts


def test_file_with_huge_holes_is_left_out(store: Store) -> None:
    """An archive of 2 KB cannot make a file that takes years to read."""
    extents, content = ((0, 1),), b"x"
    members: list[tuple[object, bytes]] = [
        sparse_member("largest", SPARSE_BYTES_MAX, extents, content),
        sparse_member("huge", SPARSE_BYTES_MAX + 1, extents, content),
        sparse_member("endless", (1 << 63) - 1, extents, content),
        ("after", b"1"),
    ]
    found, counts = imported(store, archive_of(members))
    assert set(found) == {b"", b"largest", b"after"}
    assert (found[b"largest"].size, found[b"largest"].content_bytes) == (SPARSE_BYTES_MAX, 1)
    assert [problem.path for problem in counts.problems] == [b"huge", b"endless"]
    reason = counts.problems[1].reason
    assert "left out: has 9,223,372,036,854,775,807 bytes with its holes, 17,592,186,044,416 at most" in reason
    assert "nearkin copy" in reason


def test_sizes_of_a_tree_may_exceed_its_summary() -> None:
    """Files of a backup may have 8 EiB of holes each; their sum has no integer in the summary."""
    tree = TreeWriter(StreamSink(io.BytesIO()), b"/", "", OwnerNames(lambda _: "", lambda _: ""))
    for name in (b"a", b"b", b"c"):
        tree.add(TreeEntry(b"", name, EntryKind.FILE, 0o600, 0, 0, 0, size=(1 << 63) - 1, extents=()))
    tree.finish(0)
    assert tree._summary_of(0).size_bytes == SIZE_BYTES_MAX


def test_names_of_owners_are_bounded(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A version was committed that no command could read again."""
    monkeypatch.setattr(tar_import, "OWNER_NAMES_BYTES_MAX", 10_000)
    owners = [(member(f"{n}", uid=n, gid=n, uname=f"{n:0200}", gname=f"{n:0200}"), b"") for n in range(30)]
    with pytest.raises(BadInput, match=r"names of owners of more than 10,000 bytes.*--numeric-owner"):
        store.import_tar("key", io.BytesIO(archive_of(owners)))
    assert store.versions() == []
    assert len(imported(store, archive_of(owners[:20]))[0]) == 21


def test_tree_that_no_reader_accepts_is_not_written() -> None:
    summary = TreeSummary(root=b"", users=dict.fromkeys(range(SUMMARY_BYTES_MAX // 1000), "n" * 1000))
    with pytest.raises(BadInput, match=r"a list of owners of .* 16,777,216 at most; nothing was stored"):
        encode_end(summary, [])


def test_global_headers_are_bounded(store: Store) -> None:
    """The library keeps all records of global headers, and copies them for each member."""

    def archive(records: int) -> bytes:
        output = io.BytesIO()
        for number in range(records):
            head = tarfile.TarInfo.create_pax_global_header({f"comment.{number}": "x" * 1000})
            output.write(head + member(f"{number}").tobuf())
        return output.getvalue() + bytes(1024)

    assert len(imported(store, archive(30))[0]) == 31
    with pytest.raises(BadInput, match=f"global PAX headers have more than {GLOBAL_BYTES_MAX:,} bytes"):
        store.import_tar("key", io.BytesIO(archive(70)))


def test_global_records_are_few(store: Store) -> None:
    """They are counted and copied for each member: their number is bounded, however short they are."""

    def archive(records: int) -> io.BytesIO:
        head = tarfile.TarInfo.create_pax_global_header({f"{number:x}": "y" for number in range(records)})
        return io.BytesIO(head + member("a").tobuf() + bytes(1024))

    assert store.import_tar("key", archive(GLOBAL_RECORDS_MAX)).counts.files == 1
    with pytest.raises(BadInput, match=f"global PAX headers have more than {GLOBAL_RECORDS_MAX} records"):
        store.import_tar("key", archive(GLOBAL_RECORDS_MAX + 1))


@pytest.mark.parametrize("record", ["9" * 5000, "root", "1_0", "", "0x0", "-1"])
def test_owner_that_is_no_number_is_not_root(record: str, store: Store) -> None:
    """The library takes such a record as 0."""
    found, counts = imported(store, archive_of([(member("a", pax_headers={"uid": record, "gid": record}), b"1")]))
    assert (found[b"a"].uid, found[b"a"].gid) == (65_534, 65_534)
    assert counts.altered == 2
    assert "out of range, 65534 is stored" in counts.problems[0].reason


def test_attribute_in_wrong_base64_is_reported(store: Store) -> None:
    records = {"LIBARCHIVE.xattr.user.bad": "!!!", "LIBARCHIVE.xattr.user.good": "AAEC", "SCHILY.acl.access": "a"}
    found, counts = imported(store, archive_of([(member("a", pax_headers=records), b"1")]))
    assert found[b"a"].xattrs == ((b"user.good", b"\0\1\2"),)
    reasons = sorted(problem.reason for problem in counts.problems)
    assert reasons[0].startswith("LIBARCHIVE.xattr.user.bad is not stored")
    assert reasons[1:] == ["SCHILY.acl.access is not stored: entry 'a'"]


def test_list_of_members_leaves_room_on_its_device(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A path with 2,000 folders takes 4 MB of the list, and 2 KB of the archive."""
    monkeypatch.setattr(tar_index, "ROOM_CHECK_ENTRIES", 100)
    data = archive_of([("d/" * 200 + "deep", b"")])
    archive = Path(store.root).with_name("t.tar")
    archive.write_bytes(data)
    status = os.statvfs(store.root)
    full = SimpleNamespace(f_bavail=status.f_blocks // tar_spool.FREE_SHARE - 1, f_blocks=status.f_blocks)
    monkeypatch.setattr(os, "statvfs", lambda _: full)
    with pytest.raises(NoRoom, match=r"list of members does not fit: its device is nearly full; .*--temporary"):
        store.import_tar("key", archive)
    assert store.versions() == []


def test_many_extents_are_read_without_copies(store: Store) -> None:
    """A copy of the rest for each extent of one byte made 150 GB of one MiB."""
    count = 300_000
    extents = [(2 * number, 1) for number in range(count)]
    store.import_tar("key", io.BytesIO(archive_of([sparse_member("many", 2 * count, extents, b"y" * count)])))
    tree = store.tree("key")
    with store.get("key", stop=tree.content_bytes) as contents:
        pieces = [piece for piece in read_file(contents, tree.find(b"many")) if piece != b"\0"]
    assert len(pieces) == count
    assert len({id(memoryview(piece).obj) for piece in pieces}) == 1


@pytest.mark.skipif(not tar_members.SEARCHES_SLOWLY, reason="this release of Python has no such search")
def test_long_digits_in_a_header_are_refused(store: Store) -> None:
    """The library's search takes the square of them: 8 MB of digits would take a day."""
    data = archive_of([(member("a", pax_headers={"comment": "1" * 9_000, "x": "2" * 100}), b"1")])
    assert len(imported(store, data)[0]) == 2
    data = archive_of([(member("a", pax_headers={"comment": "1" * 20_000}), b"1")])
    with pytest.raises(BadInput, match="headers with 20,000 digits in a row"):
        store.import_tar("key", io.BytesIO(data))


_HEADERS = [
    member("plain"),
    member("d/" * 60 + "long name in the prefix"),
    member("folder", type=tarfile.DIRTYPE),
    member("old folder/", type=tarfile.AREGTYPE),
    member("link", type=tarfile.LNKTYPE, linkname="plain"),
    member("device", type=tarfile.CHRTYPE, devmajor=8, devminor=1),
    member("named", uname="kïm", gname="\udcff", uid=0o7777777, size=0o77777777777, mtime=0o77777777777),
    member("large numbers", uid=1 << 40, size=1 << 50),
    member("negative time", mtime=-5),
]


@pytest.mark.parametrize("format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT])
@pytest.mark.parametrize("head", _HEADERS, ids=lambda head: head.name[:20])
def test_header_is_read_as_the_library_reads_it(head: tarfile.TarInfo, format: Literal[0, 1]) -> None:
    """Headers of every kind, whole and with each byte changed."""
    try:
        block = head.tobuf(format, "utf-8", "surrogateescape")[-512:]
    except ValueError:
        pytest.skip("the format has no such header")
    for place in (None, *range(512)):
        changed = bytearray(block)
        if place is not None:
            changed[place] ^= 0x10
            checksum = sum(changed[:148]) + 256 + sum(changed[156:])
            if not 148 <= place < 156:
                changed[148:156] = b"%06o\0 " % checksum
        assert parsed(tar_members._Header, changed) == parsed(tarfile.TarInfo, changed), place


def parsed(kind: type[tarfile.TarInfo], block: bytes | bytearray) -> object:
    """Return the fields of a header, or the kind of the error."""
    try:
        info = kind.frombuf(block, "utf-8", "surrogateescape")
    except tarfile.TarError as err:
        return type(err)
    return {name: getattr(info, name, None) for name in tarfile.TarInfo.__slots__ if not name.startswith("_")}

"""Encoded trees decode to what was encoded, and damaged ones are refused."""

from __future__ import annotations

from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nearkin.trees.entry_marks import EntryMarks
from nearkin_shared.errors import Corrupt, FormatTooNew, NotFound
from nearkin_shared.formats.tree_entry_group import (
    DIGEST_BYTES,
    EntryKind,
    TreeEntry,
    decode_group,
    encode_group,
    sort_key,
)
from nearkin_shared.formats.tree_layout import (
    GroupInfo,
    TreeSummary,
    encode_end,
    group_digest,
    tree_digest,
)
from nearkin_shared.reading import tree_reader
from nearkin_shared.reading.tree_reader import TreeReader

NAMES = st.binary(min_size=1, max_size=12).filter(lambda n: not {0, 47} & set(n) and n not in (b".", b".."))
PATHS = st.lists(NAMES, min_size=1, max_size=4).map(tuple)
TIMES = st.integers(-(1 << 62), 1 << 62)


@st.composite
def entries_of_trees(draw: st.DrawFn) -> list[TreeEntry]:
    """Draw the entries of a tree, in order."""
    paths = {path[:length] for path in draw(st.lists(PATHS, max_size=20)) for length in range(1, len(path) + 1)}
    entries = [_entry(draw, b"", b"", EntryKind.FOLDER)]
    for path in paths:
        has_children = any(len(other) > len(path) and other[: len(path)] == path for other in paths)
        kind = EntryKind.FOLDER if has_children else draw(st.sampled_from(EntryKind))
        entries.append(_entry(draw, b"/".join(path[:-1]), path[-1], kind))
    return sorted(entries, key=lambda entry: (sort_key(entry.folder), entry.name))


def _entry(draw: st.DrawFn, folder: bytes, name: bytes, kind: EntryKind) -> TreeEntry:
    size = draw(st.integers(0, 1 << 40)) if kind == EntryKind.FILE else 0
    has_holes = size > 100 and draw(st.booleans())
    return TreeEntry(
        folder,
        name,
        kind,
        draw(st.integers(0, 0o7777)),
        draw(st.integers(0, (1 << 32) - 1)),
        draw(st.integers(0, (1 << 32) - 1)),
        draw(st.integers(-(10**19), 10**20)),
        draw(TIMES),
        draw(st.integers(0, (1 << 64) - 1)),
        size,
        draw(st.sampled_from([0, 2, 4, 8, 14])),
        draw(st.binary(min_size=DIGEST_BYTES, max_size=DIGEST_BYTES)) if size else b"",
        draw(NAMES) if kind in (EntryKind.SYMLINK, EntryKind.HARD_LINK) else b"",
        draw(st.lists(st.tuples(NAMES, st.binary(max_size=20)), max_size=2).map(tuple)),
        ((10, 20), (50, 1)) if has_holes else None,
    )


def tree_of(entries: list[TreeEntry], rows: int) -> tuple[bytes, int, bytes]:
    """Return (groups, index and footer; bytes of contents before them; digest) of a tree, `rows` entries a group."""
    groups, blocks = [], []
    for start in range(0, len(entries), rows):
        part = entries[start : start + rows]
        block = encode_group(part)
        content = sum(entry.content_bytes for entry in part)
        groups.append(GroupInfo(part[0].folder, part[0].name, len(part), len(block), content, group_digest(block)))
        blocks.append(block)
    end = encode_end(TreeSummary(root=b"/root", entries=len(entries)), groups)
    return b"".join(blocks) + end, sum(entry.content_bytes for entry in entries), tree_digest(end)


def open_tree(data: bytes, content_bytes: int, digest: bytes | None) -> TreeReader:
    """Open a tree whose contents are never read."""

    def read_range(start: int, stop: int) -> bytes:
        return (
            bytes(max(0, min(stop, content_bytes) - start)) + data[max(0, start - content_bytes) : stop - content_bytes]
        )

    size_bytes = content_bytes + len(data)
    return TreeReader.open(lambda start, stop: read_range(max(start, content_bytes), stop), size_bytes, "tree", digest)


@given(entries_of_trees())
def test_group_decodes_to_its_entries(entries: list[TreeEntry]) -> None:
    assert decode_group(encode_group(entries), "group") == entries


@given(entries_of_trees(), st.integers(1, 7))
def test_reader_finds_every_entry_and_folder(entries: list[TreeEntry], rows: int) -> None:
    reader = open_tree(*tree_of(entries, rows))
    assert [placed.entry for placed in reader.entries()] == entries
    position = 0
    for placed in reader.entries():
        assert placed.start == position
        position = placed.stop
    for entry in entries:
        assert reader.find(entry.path).entry == entry
        children = [other for other in entries if other.name and other.folder == entry.path]
        assert [placed.entry for placed in reader.children(entry.path)] == children
        below = [other for other in entries if not entry.path or other.path.startswith(entry.path + b"/")]
        assert [placed.entry for placed in reader.below(entry.path)] == below
    with pytest.raises(NotFound):
        reader.find(b"no such/entry")


@given(entries_of_trees(), st.integers(1, 7), st.sets(st.integers(0, 60)), st.sampled_from([1, 500, 1 << 21]))
def test_reader_reads_wanted_groups_backward(
    entries: list[TreeEntry], rows: int, wanted: set[int], read_bytes: int
) -> None:
    """A group without a wanted entry is not read, and each other one is read once."""
    reader = open_tree(*tree_of(entries, rows))
    marks = EntryMarks()
    for ordinal in wanted:
        marks.add(ordinal)
    with patch.object(tree_reader, "READ_BYTES", read_bytes):
        found = list(reader.entries_backward(marks.has_any))
    groups = {ordinal // rows for ordinal in wanted if ordinal < len(entries)}
    expected = [number for number in range(len(entries)) if number // rows in groups]
    assert [placed.ordinal for placed in found] == expected[::-1]
    forward = list(reader.entries())
    assert [placed.ordinal for placed in forward] == list(range(len(entries)))
    assert found == [forward[number] for number in expected[::-1]]


@given(st.sets(st.integers(0, 300)), st.integers(0, 320), st.integers(0, 320))
def test_marks_are_a_set_of_ordinals(ordinals: set[int], first: int, stop: int) -> None:
    marks = EntryMarks()
    for ordinal in ordinals:
        marks.add(ordinal)
    assert {ordinal for ordinal in range(400) if ordinal in marks} == ordinals
    assert marks.has_any(first, stop) == any(first <= ordinal < stop for ordinal in ordinals)


@given(entries_of_trees(), st.data())
def test_reader_refuses_any_changed_byte(entries: list[TreeEntry], data: st.DataObject) -> None:
    encoded, content_bytes, digest = tree_of(entries, 3)
    position = data.draw(st.integers(0, len(encoded) - 1))
    changed = bytearray(encoded)
    changed[position] ^= data.draw(st.integers(1, 255))
    with pytest.raises((Corrupt, FormatTooNew)):
        list(open_tree(bytes(changed), content_bytes, digest).entries())


@given(entries_of_trees(), st.data())
def test_decoders_raise_corrupt_for_any_damage(entries: list[TreeEntry], data: st.DataObject) -> None:
    """Without digests, as for a tree that was stored through a gateway, damage is refused or decodes."""
    encoded = bytearray(encode_group(entries))
    for _ in range(data.draw(st.integers(1, 3))):
        encoded[data.draw(st.integers(0, len(encoded) - 1))] = data.draw(st.integers(0, 255))
    try:
        found = decode_group(bytes(encoded[: data.draw(st.integers(0, len(encoded)))]), "group")
    except Corrupt:
        return
    assert all(b"\0" not in entry.path and b".." not in entry.path.split(b"/") for entry in found)


@pytest.mark.parametrize("name", [b"..", b".", b"a/b", b"a\0b", b"x" * 256, b""])
def test_group_with_a_path_outside_the_target_is_refused(name: bytes) -> None:
    first = TreeEntry(b"", b"a", EntryKind.FOLDER, 0o755, 0, 0, 0)
    for hostile in (
        first._replace(name=name),
        first._replace(name=b"b", folder=b"x//y" if name in (b"", b"a/b") else name),
    ):
        with pytest.raises(Corrupt):
            decode_group(encode_group([first, hostile]), "group")
    link = first._replace(kind=EntryKind.HARD_LINK, target=b"../" + name)
    with pytest.raises(Corrupt, match="hard link"):
        decode_group(encode_group([link]), "group")


def test_group_with_too_few_digests_is_refused() -> None:
    """A user who may store blobs can store a tree with matching digests; its readers must name it as damaged."""
    entries = [TreeEntry(b"", name, EntryKind.FILE, 0o644, 0, 0, 0, size=3) for name in (b"a", b"b")]
    with pytest.raises(Corrupt, match="more files with content than digests"):
        decode_group(encode_group(entries), "group")

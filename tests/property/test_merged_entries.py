"""The entries of a base and of checkpoints are merged in order."""

from __future__ import annotations

from io import BytesIO

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nearkin.trees import tree_writer
from nearkin.trees.parent_tree import ParentTree, merged_entries
from nearkin.trees.tree_sinks import StreamSink
from nearkin.trees.tree_writer import TreeWriter
from nearkin_shared.formats.tree_entry_group import EntryKind, TreeEntry, sort_key
from nearkin_shared.reading.tree_reader import TreeReader

PATHS = st.sets(
    st.tuples(st.sampled_from([b"", b"a", b"a/b", b"a-b", b"c"]), st.binary(min_size=1, max_size=2)), max_size=12
)


def tree(paths: set[tuple[bytes, bytes]], mtime_ns: int) -> ParentTree:
    """Return a tree of empty files, with groups of up to three entries."""
    file = BytesIO()
    sink = StreamSink(file)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tree_writer, "GROUP_ROWS_MIN", 1)
        patch.setattr(tree_writer, "GROUP_ROWS_MAX", 3)
        writer = TreeWriter(sink, b"/", "")
        for folder, name in sorted(paths, key=lambda path: (sort_key(path[0]), path[1])):
            writer.add(TreeEntry(folder, name, EntryKind.FILE, 0, 0, 0, mtime_ns))
        writer.finish(0)
    sink.flush()
    data = file.getvalue()

    def read_range(start: int, stop: int) -> bytes:
        return data[start:stop]

    return ParentTree(TreeReader.open(read_range, len(data), "tree"), None, read_range)


@given(st.lists(PATHS, max_size=5))
def test_each_key_is_of_the_first_tree(contents: list[set[tuple[bytes, bytes]]]) -> None:
    """Whatever the ranges of keys are in which the trees overlap."""
    names = [
        {(folder, name.replace(b"/", b"_").replace(b"\0", b"_")) for folder, name in paths if name not in (b".", b"..")}
        for paths in contents
    ]
    wanted: dict[tuple[bytes, bytes], int] = {}
    for rank, paths in reversed(list(enumerate(names))):
        wanted |= {(sort_key(folder), name): rank for folder, name in paths}
    groups = merged_entries([tree(paths, rank) for rank, paths in enumerate(names)])
    merged = [row for group in groups for row in zip(group.keys, group.entries, strict=True)]
    assert [key for key, _ in merged] == sorted(wanted)
    assert {key: found.placed.entry.mtime_ns for key, found in merged} == wanted

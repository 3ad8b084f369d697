"""Contract for the removal of index entries.

Entries are removed by container, and versions; a repetition changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from nearkin_shared.errors import Corrupt
from nearkin_shared.formats.directory import Directory
from nearkin_shared.index.catalog import summarise
from nearkin_shared.index.protocols import (
    CollectedVersion,
    ContainerDirectories,
    Index,
    MarkedVersion,
    SupportsCollection,
)
from nearkin_shared.types import U64, ContainerId
from tests.support.conformance.index_contract import (
    FIRST,
    SECOND,
    SKETCH,
    chunk_names,
    first_claims,
    ids,
    manifest,
    of_rank,
    rows,
    second_claims,
)


def lost_first(container: ContainerId) -> Directory:
    """Return the directory of the second container. Raises Corrupt for the first."""
    if container == FIRST:
        raise Corrupt("lost")
    return second_claims().directory


DIRECTORIES = ContainerDirectories({FIRST: first_claims().directory, SECOND: second_claims().directory}.get)


class CollectionIndex(Index, SupportsCollection, Protocol):
    """An index that supports collection and inspection."""

    def container_ids(self) -> U64:
        """Return the ids of all containers."""

    def entries(self) -> Mapping[str, Mapping[bytes, bytes]]:
        """Return all entries of all tables."""


class CollectionContract:
    """Contract of a filled index.

    Subclasses provide the fixture `index` (see `fill`) and the marks that remain.
    """

    @staticmethod
    def fill(index: Index) -> None:
        """Publish two containers."""
        index.publish(first_claims())
        index.publish(second_claims())

    def spare_marks_bytes(self, index: Any) -> int:
        """Return the bytes of marks whose versions are not listed."""
        raise NotImplementedError

    def test_index_supports_collection(self, index: CollectionIndex) -> None:
        """A maintenance worker requires it of an index."""
        assert isinstance(index, SupportsCollection)

    def test_withdrawn_entries_are_misses_and_others_found(self, index: CollectionIndex) -> None:
        """A repetition changes nothing."""
        for _ in range(2):
            index.withdraw({FIRST: np.array([1], np.uint32)}, {FIRST: np.array([0], np.uint32)}, ())
            assert rows(index.locate_chunks(chunk_names("a", "bb", "ccc"))) == [(FIRST, 0), None, (FIRST, 2)]
            assert rows(index.locate_segments(ids("s1", "s2"))) == [None, (FIRST, 1)]
            assert rows(of_rank(index, SKETCH, 0, np.array([70, 80], np.uint64))) == [(FIRST, 0), None]
            assert len(index.container_ids()) == 2

    def test_deleted_container_is_not_counted(self, index: CollectionIndex) -> None:
        """All its entries, segments included."""
        index.withdraw({FIRST: None}, {}, [FIRST])
        assert rows(index.locate_chunks(chunk_names("a", "dddd"))) == [None, (SECOND, 1)]
        assert index.container_ids().tolist() == [SECOND]

    def test_removal_by_name_leaves_the_other_entries(self, index: CollectionIndex) -> None:
        """The containers share a chunk, a segment and a super-feature, of which the first has the entries."""
        index.withdraw({SECOND: None}, {}, [SECOND], DIRECTORIES)
        assert rows(index.locate_chunks(chunk_names("a", "bb", "dddd", "eeeee"))) == [
            (FIRST, 0),
            (FIRST, 1),
            None,
            None,
        ]
        assert rows(index.locate_segments(ids("s2", "s3"))) == [(FIRST, 1), None]
        assert rows(of_rank(index, SKETCH, 0, np.array([80, 81], np.uint64))) == [(FIRST, 1), None]
        assert index.container_ids().tolist() == [FIRST]

    def test_removal_by_name_of_some_chunks(self, index: CollectionIndex) -> None:
        """Ordinals that the container does not have are ignored."""
        for _ in range(2):
            index.withdraw({FIRST: np.array([1, 2, 900], np.uint32)}, {}, (), DIRECTORIES)
            assert rows(index.locate_chunks(chunk_names("a", "bb", "ccc", "dddd"))) == [
                (FIRST, 0),
                None,
                None,
                (SECOND, 1),
            ]
            assert rows(of_rank(index, SKETCH, 0, np.array([70, 80], np.uint64))) == [(FIRST, 0), None]

    def test_removal_without_a_directory_is_complete(self, index: CollectionIndex) -> None:
        """One directory is lost, the other can be read."""
        index.withdraw({FIRST: None, SECOND: None}, {}, [FIRST, SECOND], ContainerDirectories(lost_first))
        assert not any(index.entries().values())

    def test_republished_container_omits_pending_delete(self, index: CollectionIndex) -> None:
        """A rebuild leaves out entries that are pending delete."""
        index.withdraw({FIRST: None}, {}, [FIRST])
        index.publish(replace(first_claims(), only=np.array([2], np.uint32), super_features={}))
        assert rows(index.locate_chunks(chunk_names("a", "ccc"))) == [None, (FIRST, 2)]

    def test_rewritten_container_has_its_new_summary(self, index: CollectionIndex) -> None:
        """The container keeps its id."""
        index.renew(replace(summarise(first_claims()), container_bytes=77))
        assert next(summary.container_bytes for summary in index.containers()) == 77

    def test_collected_version_is_not_listed_and_its_mark_stays(self, index: CollectionIndex) -> None:
        """The mark keeps the number in use."""
        one, two = manifest("k", 1, [(FIRST, 0), (FIRST, 1)]), manifest("k", 2, [(FIRST, 1)])
        index.commit_many([(one, 100), (two, 100)])
        index.mark_many([MarkedVersion("default", "k", 2, 1, 90)])
        assert self.spare_marks_bytes(index) == 0
        for _ in range(2):
            index.collect_many([CollectedVersion("default", "k", 2, 2, 60), CollectedVersion("default", "x", 1)])
            assert index.versions_of("default", "k") == [1]
            assert self.spare_marks_bytes(index) == 60
        index.collect_many([CollectedVersion("default", "k", 2), CollectedVersion("default", "k", 1)])
        assert index.versions_of("default", "k") == []
        assert self.spare_marks_bytes(index) == 0

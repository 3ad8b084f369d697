"""Contract of every index.

Invariant: each test states one sentence of the Index protocol.

Entries are made up: two containers of three chunks and two segments each, the second in part a copy of the first.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np

from nearkin_shared.formats import container_layout
from nearkin_shared.formats.block import encode_block
from nearkin_shared.formats.container import decode_container, encode_container
from nearkin_shared.formats.directory import ChunkTable, SegmentTable
from nearkin_shared.formats.manifest import Manifest
from nearkin_shared.index.catalog import summarise
from nearkin_shared.index.container_entries import ContainerEntries
from nearkin_shared.index.pending import PendingIndex
from nearkin_shared.index.protocols import FeatureIndex, Index, MarkedVersion
from nearkin_shared.results import Ledger
from nearkin_shared.types import SEGMENT_ID_BYTES, U8, U32, U64, Bools, ContainerId, Locations
from tests.support.data import samples

FIRST, SECOND, THIRD = ContainerId(1 << 40), ContainerId((1 << 40) + 5), ContainerId(2 << 40)
SKETCH, OTHER_SKETCH = "finesse/12/3/48", "odess/12/3/48/7"
PUBLISHERS = 8


def ids(*labels: str) -> U8:
    """Return uint8[n, 20] segment ids, one a label."""
    return np.stack([samples.noise(SEGMENT_ID_BYTES, label) for label in labels])


def chunk_names(*labels: str) -> U8:
    """Return uint8[n, 32] names, one a label."""
    return np.concatenate([samples.names_of([len(label)], label) for label in labels])


def claims(
    container: ContainerId, chunks: list[str], segments: list[str], super_features: list[list[int]]
) -> ContainerEntries:
    """Return the entries of a container of three raw chunks and two segments, with these names and super-features."""
    names = chunk_names(*chunks)
    lengths: U32 = names[:, 28:].copy().view("<u4").ravel().astype(np.uint32)
    count = len(lengths)
    zeros = np.zeros(count, np.uint8)
    starts = np.cumsum(lengths, dtype=np.uint32) - lengths
    block = encode_block(np.zeros(int(lengths.sum()), np.uint8), container_layout.RAW, 0, samples.compressor())
    table = ChunkTable(names, lengths, zeros.astype(np.uint32), starts, lengths, zeros, Locations.empty(count), zeros)
    recipes = SegmentTable(
        np.array([0, 1, count], np.uint32),
        np.zeros(2, np.uint8),
        Locations(np.full(count, container, np.uint64), np.arange(count, dtype=np.uint32)),
    )
    data = encode_container(container, samples.DOMAIN, 1, [SKETCH], [block], table, recipes).data
    found: U64 = np.array(super_features, np.uint64)
    ordinals = np.arange(count, dtype=np.uint32)
    return ContainerEntries(decode_container(data, "claims"), ids(*segments), {SKETCH: (ordinals, found)})


def first_claims() -> ContainerEntries:
    """Chunks 0 and 1 share the super-feature 71 of rank 1; chunk 2 has none of rank 0."""
    return claims(FIRST, ["a", "bb", "ccc"], ["s1", "s2"], [[70, 71], [80, 71], [0, 90]])


def second_claims() -> ContainerEntries:
    """Chunk 0, segment 0 and super-feature 80 are copies of the first container's."""
    return claims(SECOND, ["bb", "dddd", "eeeee"], ["s2", "s3"], [[80, 91], [81, 92], [82, 71]])


def manifest(key: str, version: int, segments: list[tuple[int, int]], tenant: str = "default") -> Manifest:
    """Return a manifest of these segments."""
    locations = Locations(np.array([c for c, _ in segments], np.uint64), np.array([o for _, o in segments], np.uint32))
    known = np.zeros(len(segments), np.bool_)
    return Manifest(tenant, key, version, 5, 10, bytes(32), None, 1.0, Ledger(logical_bytes=10), locations, known)


def rows(answer: tuple[Locations, Bools]) -> list[tuple[int, int] | None]:
    """Return an answer row by row: (container, ordinal), or None where nothing was found."""
    locations, found = answer
    assert locations.containers.dtype == np.uint64
    assert locations.ordinals.dtype == np.uint32
    assert not locations.containers[~found].any()
    assert not locations.ordinals[~found].any()
    places = zip(locations.containers.tolist(), locations.ordinals.tolist(), strict=True)
    return [(c, o) if there else None for (c, o), there in zip(places, found.tolist(), strict=True)]


def of_rank(index: FeatureIndex, sketch: str, rank: int, super_features: U64) -> tuple[Locations, Bools]:
    """Return (locations, found) for uint64[n] super-features of one rank."""
    keys = np.zeros((len(super_features), rank + 1), np.uint64)
    keys[:, rank] = super_features
    locations, found = index.locate_ranks(sketch, keys)
    mine = slice(rank * len(keys), None)
    return locations.take(mine), found[mine]


class IndexContract:
    """Contract of an index.

    Subclasses provide `index`, a fixture that returns an empty Index of domain `samples.DOMAIN`.
    """

    # --- chunks ------------------------------------------------------------------------------------------------------

    def test_empty_index_finds_nothing(self, index: Index) -> None:
        """ "Not found" is an answer, not an error."""
        assert rows(index.locate_chunks(chunk_names("a", "bb"))) == [None, None]
        assert rows(index.locate_segments(ids("s1"))) == [None]
        assert rows(of_rank(index, SKETCH, 0, np.array([70], np.uint64))) == [None]
        assert list(index.versions_of("default", "k")) == []
        assert list(index.manifest_names("default", "")) == []

    def test_empty_lookup_answers_nothing(self, index: Index) -> None:
        """Batches may be empty."""
        index.publish(first_claims())
        assert rows(index.locate_chunks(np.zeros((0, 32), np.uint8))) == []
        assert rows(index.locate_segments(np.zeros((0, 20), np.uint8))) == []
        assert rows(of_rank(index, SKETCH, 0, np.zeros(0, np.uint64))) == []

    def test_published_chunks_are_found_at_their_locations(self, index: Index) -> None:
        """In the order asked for, repeats included."""
        index.publish(first_claims())
        found = rows(index.locate_chunks(chunk_names("ccc", "zz", "a", "ccc")))
        assert found == [(FIRST, 2), None, (FIRST, 0), (FIRST, 2)]

    def test_chunk_name_is_compared_in_full(self, index: Index) -> None:
        """Fingerprint, tag and length must all agree (DESIGN section 1)."""
        index.publish(first_claims())
        for position in (0, 19, 20, 27, 28, 31):
            other = chunk_names("a").copy()
            other[0, position] ^= 1
            assert rows(index.locate_chunks(other)) == [None]

    def test_first_copy_of_a_chunk_wins(self, index: Index) -> None:
        """A later container's copy is dead space, not a new truth (I5)."""
        index.publish(first_claims())
        index.publish(second_claims())
        assert rows(index.locate_chunks(chunk_names("bb", "dddd"))) == [(FIRST, 1), (SECOND, 1)]

    # --- super-features ----------------------------------------------------------------------------------------------

    def test_super_feature_finds_its_first_chunk(self, index: Index) -> None:
        """In stream order: within a container by ordinal, between containers by publishing."""
        index.publish(first_claims())
        index.publish(second_claims())
        assert rows(of_rank(index, SKETCH, 0, np.array([80, 70, 82, 1], np.uint64))) == [
            (FIRST, 1),
            (FIRST, 0),
            (SECOND, 2),
            None,
        ]
        assert rows(of_rank(index, SKETCH, 1, np.array([71, 92], np.uint64))) == [(FIRST, 0), (SECOND, 1)]

    def test_ranks_and_sketches_are_separate(self, index: Index) -> None:
        """A super-feature of another rank, algorithm or parameter is another thing."""
        index.publish(first_claims())
        assert rows(of_rank(index, SKETCH, 1, np.array([70], np.uint64))) == [None]
        assert rows(of_rank(index, OTHER_SKETCH, 0, np.array([70], np.uint64))) == [None]

    def test_lowest_known_rank_finds_the_base(self, index: Index) -> None:
        """Lookups rank by rank and of all ranks at once agree; pending entries are found after published ones."""
        index.publish(first_claims())
        index.publish(second_claims())
        pending = PendingIndex(index, samples.DOMAIN)
        keys = np.array([[80, 71, 0], [1, 92, 0], [0, 0, 0], [82, 1, 5], [6, 7, 8]], np.uint64)
        locations, ranks, found = pending.locate_bases(SKETCH, keys)
        assert rows((locations, found)) == [(FIRST, 1), (SECOND, 1), None, (SECOND, 2), None]
        assert ranks[found].tolist() == [0, 1, 0]
        nothing = np.zeros((0, 3), np.uint64)
        assert not len(pending.locate_bases(SKETCH, nothing)[2])

    def test_super_feature_of_zero_is_never_found(self, index: Index) -> None:
        """0 means that a chunk has no super-feature."""
        index.publish(first_claims())
        assert rows(of_rank(index, SKETCH, 0, np.zeros(1, np.uint64))) == [None]
        assert rows(index.locate_ranks(SKETCH, np.zeros((1, 2), np.uint64))) == [None, None]

    def test_lookup_of_all_ranks_at_once_finds_bases(self, index: Index) -> None:
        """All of a rank one behind the other."""
        index.publish(first_claims())
        index.publish(second_claims())
        keys = np.array([[80, 71], [0, 92], [1, 0]], np.uint64)
        assert rows(index.locate_ranks(SKETCH, keys)) == [(FIRST, 1), None, None, (FIRST, 0), (SECOND, 1), None]
        assert rows(index.locate_ranks(OTHER_SKETCH, keys)) == [None] * 6
        assert rows(index.locate_ranks(SKETCH, np.zeros((0, 3), np.uint64))) == []

    # --- segments ----------------------------------------------------------------------------------------------------

    def test_segments_are_found_and_first_wins(self, index: Index) -> None:
        """A location is (container, segment ordinal)."""
        index.publish(first_claims())
        index.publish(second_claims())
        assert rows(index.locate_segments(ids("s3", "s2", "s1", "s9"))) == [(SECOND, 1), (FIRST, 1), (FIRST, 0), None]

    def test_publishing_twice_changes_nothing(self, index: Index) -> None:
        """A redelivered container changes nothing, not even after later ones."""
        for again in (first_claims(), second_claims(), first_claims(), second_claims()):
            index.publish(again)
        assert rows(index.locate_chunks(chunk_names("a", "bb", "eeeee"))) == [(FIRST, 0), (FIRST, 1), (SECOND, 2)]
        assert rows(index.locate_segments(ids("s2"))) == [(FIRST, 1)]
        assert rows(of_rank(index, SKETCH, 0, np.array([80], np.uint64))) == [(FIRST, 1)]

    def test_containers_published_together_equal_sequential(self, index: Index) -> None:
        """The first in their order wins, and earlier entries before them."""
        index.publish_many([first_claims(), second_claims(), first_claims()])
        index.publish_many([second_claims(), first_claims()])
        index.publish_many([])
        found = rows(index.locate_chunks(chunk_names("a", "bb", "dddd", "eeeee", "zz")))
        assert found == [(FIRST, 0), (FIRST, 1), (SECOND, 1), (SECOND, 2), None]
        assert rows(index.locate_segments(ids("s3", "s2", "s1"))) == [(SECOND, 1), (FIRST, 1), (FIRST, 0)]
        assert rows(of_rank(index, SKETCH, 0, np.array([80, 70, 82], np.uint64))) == [
            (FIRST, 1),
            (FIRST, 0),
            (SECOND, 2),
        ]
        assert list(index.containers()) == [summarise(first_claims()), summarise(second_claims())]

    def test_empty_container_can_be_published(self, index: Index) -> None:
        """All its chunks were folded away, or it holds recipes only."""
        made = replace(second_claims(), super_features={})
        index.publish(made)
        assert rows(of_rank(index, SKETCH, 0, np.array([80], np.uint64))) == [None]
        assert rows(index.locate_chunks(chunk_names("dddd"))) == [(SECOND, 1)]

    def test_containers_are_listed_for_stats(self, index: Index) -> None:
        """In stream order, each once, whatever the order and number of publishings."""
        for again in (second_claims(), first_claims(), second_claims()):
            index.publish(again)
        assert list(index.containers()) == [summarise(first_claims()), summarise(second_claims())]

    def test_many_publishers_of_same_chunks_have_one_first(self, index: Index) -> None:
        """The first entry stays, no location mixes two entries, and chunks of a single publisher are found there."""
        made = [
            claims(
                ContainerId((3 << 40) + n),
                ["all", f"own{n}", "both"],
                ["same", f"seg{n}"],
                [[5, 6], [n + 100, 7], [0, n + 200]],
            )
            for n in range(PUBLISHERS)
        ]
        ready = threading.Barrier(PUBLISHERS)

        def publish(number: int) -> None:
            ready.wait(30)
            for first_thread in range(PUBLISHERS):
                index.publish(made[(number + first_thread) % PUBLISHERS])

        with ThreadPoolExecutor(PUBLISHERS) as pool:
            list(pool.map(publish, range(PUBLISHERS)))

        def answers() -> list[list[tuple[int, int] | None]]:
            shared = np.array([5], np.uint64), np.array([6, 7], np.uint64)
            return [
                rows(index.locate_chunks(chunk_names("all", "both"))),
                rows(index.locate_segments(ids("same"))),
                rows(of_rank(index, SKETCH, 0, shared[0])),
                rows(of_rank(index, SKETCH, 1, shared[1])),
            ]

        first = answers()
        holders = {int(claimed.directory.container) for claimed in made}
        ordinals = [[0, 2], [0], [0], [0, 1]]
        for places, expected in zip(first, ordinals, strict=True):
            assert [place[1] for place in places if place] == expected
            assert {place[0] for place in places if place} <= holders
        for n, claimed in enumerate(made):
            own = claimed.directory.container
            assert rows(index.locate_chunks(chunk_names(f"own{n}"))) == [(own, 1)]
            assert rows(index.locate_segments(ids(f"seg{n}"))) == [(own, 1)]
            assert rows(of_rank(index, SKETCH, 0, np.array([n + 100], np.uint64))) == [(own, 1)]
            assert rows(of_rank(index, SKETCH, 1, np.array([n + 200], np.uint64))) == [(own, 2)]
            index.publish(claimed)
        assert answers() == first

    def test_many_entries_are_all_found(self, index: Index) -> None:
        """Enough for tables to grow, in answers of several thousand."""
        made = [
            claims(
                ContainerId((4 << 40) + n),
                [f"{n}.{i}" for i in range(300)],
                [f"g{n}", f"h{n}"],
                [[n * 300 + i + 1] for i in range(300)],
            )
            for n in range(12)
        ]
        for claimed in made:
            index.publish(claimed)
        expected = [(int(claimed.directory.container), i) for claimed in made for i in range(300)]
        names = np.concatenate([claimed.directory.chunks.names for claimed in made])
        assert rows(index.locate_chunks(names)) == expected
        assert rows(of_rank(index, SKETCH, 0, np.arange(1, 3601, dtype=np.uint64))) == expected
        assert rows(index.locate_chunks(names[::-1]))[0] == expected[-1]
        assert not of_rank(index, SKETCH, 0, np.arange(4000, 9000, dtype=np.uint64))[1].any()

    # --- versions ----------------------------------------------------------------------------------------------------

    def test_catalog_lists_a_version_as_committed(self, index: Index) -> None:
        """Its ledger and times, and the size of its manifest."""
        ledger = Ledger(*range(1, 13))
        made = replace(manifest("k", 3, [(FIRST, 0)]), ledger=ledger, seconds=2.25)
        index.commit_many([(made, 1 << 40), (manifest("k", 1, []), 7)])
        assert [entry.version for entry in index.catalog("default")] == [1, 3]
        entry = list(index.catalog("default", "k"))[1]
        assert (entry.key, entry.manifest_bytes, entry.seconds, entry.ledger) == ("k", 1 << 40, 2.25, ledger)

    def test_versions_of_several_pages_are_all_listed(self, index: Index) -> None:
        """Pages end between two versions of one key as well as between keys."""
        index.commit_many([(manifest(f"k{n % 7}", n // 7 + 1, []), n) for n in range(2500)])
        listed = list(index.manifest_names("default", "k"))
        assert len(listed) == 2500
        assert listed == sorted(set(listed))
        assert index.versions_of("default", "k3") == list(range(1, 358))

    def test_version_committed_concurrently_is_listed_once(self, index: Index) -> None:
        """Two workers may process the same end of a blob."""
        made = manifest("k", 1, [(FIRST, n) for n in range(50)])
        with ThreadPoolExecutor(PUBLISHERS) as pool:
            list(pool.map(lambda _: index.commit(made, 100), range(PUBLISHERS)))
        assert index.versions_of("default", "k") == [1]

    def test_versions_are_listed_in_order(self, index: Index) -> None:
        """Whatever the order in which they were committed."""
        for version in (3, 1, 300, 2):
            index.commit(manifest("k", version, []), 100)
        index.commit(manifest("k2", 7, []), 100)
        assert index.versions_of("default", "k") == [1, 2, 3, 300]
        assert index.versions_of("default", "k2") == [7]

    def test_keys_are_listed_by_prefix_in_order(self, index: Index) -> None:
        """A prefix may end anywhere, also next to the bytes of a multi-byte character; the order is that of UTF-8."""
        long = "k" * 1000
        for key in ("b", "a/2", "a/1", "ä", "a", long + "2", long + "1"):
            index.commit(manifest(key, 2, []), 100)
            index.commit(manifest(key, 1, []), 100)
        assert list(index.manifest_names("default", "a")) == [
            (key, version) for key in ("a", "a/1", "a/2") for version in (1, 2)
        ]
        assert [key for key, version in index.manifest_names("default", "") if version == 1] == [
            *("a", "a/1", "a/2", "b"),
            long + "1",
            long + "2",
            "ä",
        ]
        assert [key for key, _ in index.manifest_names("default", long + "1")] == [long + "1"] * 2
        assert list(index.manifest_names("default", "c")) == []

    def test_tenants_do_not_see_each_other(self, index: Index) -> None:
        """The same key of another tenant is another key (I9)."""
        index.commit(manifest("k", 1, [], "one"), 100)
        index.commit(manifest("k", 2, [], "two"), 100)
        assert index.versions_of("one", "k") == [1]
        assert list(index.manifest_names("two", "")) == [("k", 2)]

    def test_marks_are_listed_with_their_versions(self, index: Index) -> None:
        """The highest mark is kept, whatever is recorded later or twice, before its version or after it."""
        index.mark_many([MarkedVersion("default", "k", 2, 1, 90)])
        index.commit_many([(manifest("k", version, []), 100) for version in (1, 2, 3)])
        index.commit(manifest("k", 3, [], "other"), 100)
        index.mark_many([MarkedVersion("default", "k", 3, 2, 180), MarkedVersion("default", "k", 2, 3, 270)])
        for _ in range(2):
            index.mark_many([MarkedVersion("default", "k", 3, 1, 90), MarkedVersion("default", "k", 2, 3, 270)])
        index.mark_many([])
        found = [(e.version, e.sequence, e.marks_bytes, e.deleted) for e in index.catalog("default", "k")]
        assert found == [(1, 0, 0, False), (2, 3, 270, True), (3, 2, 180, False)]
        assert [(e.version, e.sequence) for e in index.catalog("other")] == [(3, 0)]
        assert index.versions_of("default", "k") == [1, 2, 3]

    def test_marks_are_listed_on_every_page(self, index: Index) -> None:
        """Segments are part of several versions."""
        index.commit_many([(manifest("k", version, []), 1) for version in range(1, 2501)])
        index.mark_many([MarkedVersion("default", "k", version, 1, 90) for version in range(100, 2501, 100)])
        assert [e.version for e in index.catalog("default") if e.deleted] == list(range(100, 2501, 100))

    def test_committing_twice_changes_nothing(self, index: Index) -> None:
        """A repeated message changes nothing, also where it differs (DESIGN section 2, idea 3)."""
        for _ in range(3):
            index.commit(manifest("k", 1, [(FIRST, 0)]), 100)
        index.commit(manifest("k", 1, []), 7)
        assert [entry.manifest_bytes for entry in index.catalog("default", "k")] == [100]
        assert index.versions_of("default", "k") == [1]

    def test_version_without_segments_is_listed(self, index: Index) -> None:
        """The empty blob."""
        index.commit(manifest("k", 1, []), 100)
        assert index.versions_of("default", "k") == [1]

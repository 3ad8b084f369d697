"""Test stages on scripted lookups, and the order of durable effects."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nearkin.embedded.runner import EmbeddedWriter
from nearkin.lab.generated_data import mutate, random_bytes, text_like
from nearkin_chunker import BlobRun, ChunkerStage, FrameRuns
from nearkin_chunker import stage as chunker_stage
from nearkin_dedup import DedupStage
from nearkin_delta import DeltaOutcome, DeltaStage
from nearkin_resemblance import ResemblanceStage
from nearkin_shared.errors import StoreUnavailable
from nearkin_shared.fingerprints import Fingerprinter
from nearkin_shared.index.container_entries import ContainerEntries
from nearkin_shared.index.lmdb.lmdb_index import LmdbIndex
from nearkin_shared.index.pending import PendingIndex
from nearkin_shared.objectstore.base import Payload
from nearkin_shared.objectstore.obstore_adapter import ObstoreObjectStore, memory_objects
from nearkin_shared.pipeline.lookups import EmbeddedLookups
from nearkin_shared.pipeline.stage import (
    Contents,
    FoundBases,
    FoundLocations,
    LookupRequest,
    LookupResults,
    Neighbours,
    run_stage,
)
from nearkin_shared.storage.containers import ContainerStore
from nearkin_shared.storage.manifests import ManifestStore
from nearkin_shared.types import ClaimedRows, FreshBatch, Locations, Pieces, SegmentBatch
from nearkin_shared.utils.thread_pool import ThreadPool
from tests.support.data.stores import SMALL, settings

CHOSEN = settings(SMALL, {"chunker": {"algorithm": "fixed"}})
FINGERPRINTER = Fingerprinter(bytes(32), "tenant")
CHUNK = 8192


@pytest.fixture(autouse=True)
def _short_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunker_stage, "SEGMENT_CHUNKS_TARGET", 4)


def segments(data: bytes) -> SegmentBatch:
    payload = np.frombuffer(data, np.uint8)
    runs = FrameRuns(payload, (BlobRun(0, 0, len(data), True),))
    return ChunkerStage(CHOSEN, FINGERPRINTER).decide(runs, LookupResults()).segments


class Scripted:
    """Lookups that a test defines: names, segments and bases not listed are unknown.

    Records the queries.
    """

    def __init__(
        self,
        chunks: dict[bytes, tuple[int, int]] | None = None,
        known_segments: dict[bytes, tuple[int, int]] | None = None,
        base: tuple[bytes, int] | None = None,
    ) -> None:
        self.chunks, self.segments, self.base = chunks or {}, known_segments or {}, base
        self.asked: list[LookupRequest] = []

    def answer(self, reads: LookupRequest, facts: LookupResults) -> LookupResults:
        self.asked.append(reads)
        if reads.segment_ids is not None:
            facts = replace(facts, segments=self._found(self.segments, reads.segment_ids))
        if reads.names is not None:
            facts = replace(facts, chunks=self._found(self.chunks, reads.names))
        if reads.super_features is not None:
            count = len(reads.super_features)
            found = np.full(count, self.base is not None)
            where = Locations(np.where(found, np.uint64(77), np.uint64(0)), np.zeros(count, np.uint32))
            facts = replace(facts, bases=FoundBases(reads.super_features, where, np.zeros(count, np.uint8), found))
        if reads.gaps is not None:
            count = len(reads.gaps)
            none = Neighbours(
                reads.gaps.fresh, np.zeros(count + 1, np.uint32), Locations.empty(), Locations.empty(count)
            )
            facts = replace(facts, neighbours=none)
        if reads.contents is not None:
            facts = replace(facts, contents=self._contents(reads.contents))
        if reads.similar is not None:
            facts = replace(facts, similar=self._contents(reads.similar))
        return facts

    @staticmethod
    def _found(known: dict[bytes, tuple[int, int]], keys: np.ndarray) -> FoundLocations:
        rows = [known.get(key.tobytes(), (0, 0)) for key in keys]
        return FoundLocations(
            Locations(np.array([c for c, _ in rows], np.uint64), np.array([o for _, o in rows], np.uint32)),
            np.array([container != 0 for container, _ in rows], np.bool_),
        )

    def _contents(self, locations: Locations) -> Contents:
        content, depth = self.base if self.base is not None else (b"", 0)
        count = len(locations)
        return Contents(
            locations,
            Pieces.of(
                np.frombuffer(content * count, np.uint8),
                np.arange(count, dtype=np.uint64) * np.uint64(len(content)),
                np.full(count, len(content), np.uint32),
            ),
            np.full(count, depth, np.uint8),
            np.full(count, bool(content), np.bool_),
        )


def pieces(*seeds: int) -> bytes:
    return b"".join(random_bytes(CHUNK, seed) if seed else bytes(CHUNK) for seed in seeds)


# ------------------------------------------------------------------ dedup


def test_dedup_keeps_the_first_copies_in_stream_order() -> None:
    batch = segments(pieces(1, 2, 1, 3, 0, 2, 2, 4, 0, 1))
    facts = Scripted()
    fresh = run_stage(DedupStage(), batch, facts)
    assert fresh.fresh.tolist() == [0, 1, 3, 7]
    assert fresh.first[[2, 5, 6, 9]].tolist() == [0, 1, 1, 0]
    assert fresh.chunk_known.tolist() == [False] * 4 + [True] + [False] * 3 + [True, False]


def test_dedup_drops_known_chunks_and_returns_locations() -> None:
    batch = segments(pieces(1, 2, 3))
    fresh = run_stage(DedupStage(), batch, Scripted({batch.names[1].tobytes(): (500, 9)}))
    assert fresh.fresh.tolist() == [0, 2]
    assert (int(fresh.chunk_locations.containers[1]), int(fresh.chunk_locations.ordinals[1])) == (500, 9)


def test_dedup_queries_no_known_segment_and_no_zeros() -> None:
    batch = segments(pieces(*range(1, 200), 0, 0))
    assert batch.segments > 10
    known = {batch.segment_ids[3].tobytes(): (9, 1)}
    facts = Scripted(known_segments=known)
    fresh = run_stage(DedupStage(), batch, facts)
    inside = np.arange(batch.chunk_bounds[3], batch.chunk_bounds[4])
    assert not set(inside) & set(fresh.fresh)
    (requested,) = (reads.names for reads in facts.asked if reads.names is not None)
    assert len(requested) == len(batch.names) - len(inside) - 2
    assert fresh.segment_known.tolist() == [number == 3 for number in range(batch.segments)]


def test_dedup_takes_the_locations_of_claimed_chunks() -> None:
    """Nothing is asked of them: an index of samples does not know every chunk."""
    batch = segments(pieces(1, 2, 3, 2))
    claimed = ClaimedRows(np.array([1, 3]), Locations(np.array([40, 41], np.uint64), np.array([5, 6], np.uint32)))
    facts = Scripted()
    fresh = run_stage(DedupStage(), replace(batch, claimed=claimed), facts)
    (requested,) = (reads.names for reads in facts.asked if reads.names is not None)
    assert requested.tobytes() == batch.names[[0, 2]].tobytes()
    assert fresh.fresh.tolist() == [0, 2]
    assert fresh.chunk_known.tolist() == [False, True, False, True]
    assert fresh.chunk_locations.containers.tolist() == [0, 40, 0, 41]
    assert fresh.chunk_locations.ordinals.tolist() == [0, 5, 0, 6]


@pytest.mark.parametrize("algorithm", ["finesse", "ntransform", "odess", "none"])
def test_sketch_by_a_pool_equals_that_of_one_thread(algorithm: str) -> None:
    chosen = settings(CHOSEN, {"features": {"algorithm": algorithm}})
    batch = run_stage(DedupStage(), segments(random_bytes(5 * 1024 * 1024 + 77, 3)), Scripted())
    alone = run_stage(ResemblanceStage(chosen, looks_up=False), batch, Scripted())
    with ThreadPoolExecutor(2) as threads:
        helped = run_stage(ResemblanceStage(chosen, looks_up=False, helpers=ThreadPool(threads, 2)), batch, Scripted())
    assert len(alone.super_features) == len(batch.fresh) > 100
    assert np.array_equal(helped.super_features, alone.super_features)


# ------------------------------------------------------------------ delta


FIRST_FIT = {"base": {"policy": "first-fit"}, "delta": {"codec": "xdelta3", "max_depth": 2}}


def through_delta(
    data: bytes, facts: Scripted, recheck: Scripted, changes: dict[str, Any] | None = None
) -> tuple[DeltaStage, FreshBatch, DeltaOutcome]:
    """Run the last three stages; `recheck` serves the lookups of the delta stage."""
    fresh = run_stage(DedupStage(), segments(data), facts)
    paired = run_stage(ResemblanceStage(CHOSEN), fresh, facts)
    stage = DeltaStage(settings(CHOSEN, changes or {}), FINGERPRINTER.domain, 0)
    return stage, fresh, run_stage(stage, paired, recheck)


def test_chunk_stored_meanwhile_is_not_stored_again() -> None:
    """Another writer stored it after dedup."""
    data = pieces(1, 2, 3)
    names = segments(data).names
    stage, fresh, outcome = through_delta(data, Scripted(), Scripted({names[1].tobytes(): (500, 9)}))
    assert fresh.fresh.tolist() == [0, 1, 2]  # dedup did not know it
    assert len(outcome.placed.names) == 2
    assert outcome.counts.duplicate.tolist() == [False, True, False]
    (sealed,) = [finished.seal() for finished in stage.flush()]
    recipes = sealed.claims.directory.segments.chunks
    assert (500, 9) in list(zip(recipes.containers.tolist(), recipes.ordinals.tolist(), strict=True))
    assert len(sealed.claims.directory.chunks) == 2


def test_recipes_point_to_the_stored_copy_of_a_chunk() -> None:
    data = pieces(1, 2, 1, 1, 0, 2)
    stage, _, outcome = through_delta(data, Scripted(), Scripted())
    (sealed,) = [finished.seal() for finished in stage.flush()]
    directory = sealed.claims.directory
    own, zero = int(sealed.container), 1
    assert set(outcome.segments.containers.tolist()) == {own}
    chunks: list[tuple[int, int]] = []  # a segment that occurs twice has one recipe
    for ordinal in outcome.segments.ordinals.tolist():
        rows = slice(int(directory.segments.bounds[ordinal]), int(directory.segments.bounds[ordinal + 1]))
        recipe = directory.segments.chunks.take(rows)
        chunks += zip(recipe.containers.tolist(), recipe.ordinals.tolist(), strict=True)
    assert chunks == [(own, 0), (own, 1), (own, 0), (own, 0), (zero, CHUNK), (own, 1)]
    assert len(directory.chunks) == 2


@pytest.mark.parametrize(("depth", "kept"), [(0, True), (1, True), (2, False), (9, False)])
def test_base_at_max_depth_is_not_used(depth: int, kept: bool) -> None:
    base = text_like(CHUNK, 5)
    facts = Scripted(base=(base, depth))
    stage, _, _ = through_delta(mutate(base, 1, edits=3)[:CHUNK].ljust(CHUNK, b"x"), facts, facts, FIRST_FIT)
    (sealed,) = [finished.seal() for finished in stage.flush()]
    assert sealed.claims.directory.chunks.depths.tolist() == [depth + 1 if kept else 0]


@pytest.mark.parametrize("changes", [FIRST_FIT, {}, {"delta": {"codec": "xdelta3"}}, {"base": {"policy": "first-fit"}}])
def test_lost_or_unlike_base_is_not_used(changes: dict[str, Any]) -> None:
    for content in (b"", random_bytes(CHUNK, 9)):
        facts = Scripted(base=(content, 0))
        stage, _, outcome = through_delta(text_like(CHUNK, 5), facts, facts, changes)
        assert outcome.counts.delta.tolist() == [False]
        assert stage.flush()[0].seal().claims.directory.chunks.depths.tolist() == [0]


class Near(Scripted):
    """The base is also the old neighbour of each gap."""

    def answer(self, reads: LookupRequest, facts: LookupResults) -> LookupResults:
        facts = super().answer(reads, facts)
        if reads.gaps is None:
            return facts
        count = len(reads.gaps)
        old_chunks = Locations(np.full(count, 77, np.uint64), np.zeros(count, np.uint32))
        bounds = np.arange(count + 1, dtype=np.uint32)
        return replace(facts, neighbours=Neighbours(reads.gaps.fresh, bounds, old_chunks, Locations.empty(count)))


def test_late_lookup_covers_unknown_chunks_without_base() -> None:
    base = text_like(CHUNK, 5)
    data = mutate(base, 1, edits=3)[:CHUNK].ljust(CHUNK, b"x") + pieces(1, 2)
    batch = segments(data)
    facts = Near({batch.names[1].tobytes(): (500, 9)}, base=(base, 0))
    paired = run_stage(ResemblanceStage(CHOSEN, looks_up=False), run_stage(DedupStage(), batch, Scripted()), Scripted())
    assert not paired.base_found.any()
    stage = DeltaStage(CHOSEN, FINGERPRINTER.domain, 0, asks_bases="late")
    outcome = run_stage(stage, paired, facts)
    (requested,) = (reads.super_features for reads in facts.asked if reads.super_features is not None)
    assert requested.tolist() == paired.super_features[[2]].tolist()
    assert outcome.counts.delta.tolist() == [True, False, False]
    assert outcome.counts.duplicate.tolist() == [False, True, False]


def test_late_lookup_skips_ranks_without_useful_bases() -> None:
    facts = Scripted(base=(random_bytes(CHUNK, 999), 0))  # rank 0 always names this base, which is unlike any chunk
    stage = DeltaStage(CHOSEN, FINGERPRINTER.domain, 0, asks_bases="late")
    for number in range(3):
        batch = segments(pieces(*range(1 + 80 * number, 81 + 80 * number)))
        fresh = run_stage(DedupStage(), batch, Scripted())
        run_stage(stage, run_stage(ResemblanceStage(CHOSEN, looks_up=False), fresh, Scripted()), facts)
    requested = [reads.super_features for reads in facts.asked if reads.super_features is not None]
    assert [of.all(axis=0).tolist() for of in requested] == [[True] * 3, [False, True, True], [False, True, True]]
    assert not requested[1][:, 0].any()


@pytest.mark.parametrize("changes", [FIRST_FIT, {}, {"base": {"policy": "first-fit"}}])
def test_late_base_lookup_equals_the_early_one(changes: dict[str, Any]) -> None:
    base = text_like(CHUNK, 5)
    data = mutate(base, 1, edits=3)[:CHUNK].ljust(CHUNK, b"x")
    facts = Scripted(base=(base, 0))
    early, fresh, sent = through_delta(data, facts, facts, changes)
    late = DeltaStage(settings(CHOSEN, changes), FINGERPRINTER.domain, 0, asks_bases="late")
    outcome = run_stage(late, run_stage(ResemblanceStage(CHOSEN, looks_up=False), fresh, facts), facts)
    assert sent.counts.delta.tolist() == outcome.counts.delta.tolist() == [True]
    one, other = (stage.flush()[0].seal().claims.directory for stage in (early, late))
    assert one.rows[["depths", "encoded", "base_containers", "base_ordinals", "ranks"]].tolist() == (
        other.rows[["depths", "encoded", "base_containers", "base_ordinals", "ranks"]].tolist()
    )


def written(writer: EmbeddedWriter, key: str, content: bytes) -> Any:
    blob = writer.begin(key, {}, None)
    rest = memoryview(content)
    while rest:
        window = writer.window()
        count = min(len(window), len(rest))
        window[:count] = rest[:count]
        writer.advance(blob, count)
        rest = rest[count:]
    writer.end(blob)
    return blob


def test_lookups_of_a_batch_are_not_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dedup's own query finds a chunk that the previous batch stored.

    Every chunk is stored once (I5).
    """
    index = LmdbIndex(tmp_path / "index", FINGERPRINTER.domain, 1 << 26)
    requested: list[int] = []
    locate = index.locate_chunks
    monkeypatch.setattr(index, "locate_chunks", lambda names: requested.append(len(names)) or locate(names))
    objects = memory_objects()
    containers = ContainerStore(objects, FINGERPRINTER.domain, 1 << 20)
    chosen = settings(CHOSEN, {"runner": {"batch_bytes": 2 << 20}})
    content = pieces(*range(1, 200))
    with EmbeddedWriter(chosen, FINGERPRINTER, containers, ManifestStore(objects), index, 0) as writer:
        for key in ("a", "b"):
            written(writer, key, content + key.encode() * CHUNK)
        writer.flush()
    assert sum(len(containers.directory(container).chunks) for container, _ in containers.ids()) == 201
    assert sum(requested) < 300  # each chunk of the first blob once, and those of the second one's last segment


def test_redelivered_batch_stores_nothing_twice(tmp_path: Path) -> None:
    index = LmdbIndex(tmp_path / "index", FINGERPRINTER.domain, 1 << 26)
    pending = PendingIndex(index, FINGERPRINTER.domain)
    store = ContainerStore(memory_objects(), FINGERPRINTER.domain, 1 << 20)
    facts = EmbeddedLookups(pending, store)
    batch = segments(pieces(1, 2, 3, 0, 1))
    stage = DeltaStage(CHOSEN, FINGERPRINTER.domain, 0)
    outcomes = []
    for _ in range(3):
        fresh = run_stage(DedupStage(), batch, facts)
        outcome = run_stage(stage, run_stage(ResemblanceStage(CHOSEN), fresh, facts), facts)
        placed = outcome.placed
        pending.add(
            placed.names, placed.chunks, placed.sketch, placed.base_chunks, placed.super_features,
            placed.segment_ids, placed.segments,
        )  # fmt: skip
        outcomes.append(outcome)
    (sealed,) = [finished.seal() for finished in stage.flush()]
    assert [len(outcome.placed.names) for outcome in outcomes] == [3, 0, 0]
    assert (len(sealed.claims.directory.chunks), len(sealed.claims.directory.segments)) == (3, batch.segments)
    for outcome in outcomes[1:]:
        assert outcome.segments.ordinals.tolist() == outcomes[0].segments.ordinals.tolist()
        assert outcome.segment_known.all()
    for _ in range(2):  # its entries may be published twice, too
        index.publish(sealed.claims)
    assert len(index.entries()["chunks"]) == 3
    index.close()


def test_pending_container_answers_the_next_batch(tmp_path: Path) -> None:
    assert issubclass(PendingIndex, object)
    index = LmdbIndex(tmp_path / "index", FINGERPRINTER.domain, 1 << 26)
    pending = PendingIndex(index, FINGERPRINTER.domain)
    batch = segments(pieces(1, 2))
    where = Locations(np.full(2, 500, np.uint64), np.arange(2, dtype=np.uint32))
    none = np.zeros((0, 3), np.uint64)
    pending.add(batch.names, where, "none", Locations.empty(), none, batch.segment_ids, Locations.empty(batch.segments))
    locations, found = pending.locate_chunks(batch.names)
    assert found.all()
    assert locations.ordinals.tolist() == [0, 1]
    assert not index.locate_chunks(batch.names)[1].any()  # the index itself names durable bytes only (I1)
    index.close()


# ------------------------------------------------------------------ order of effects


class Recording(ObstoreObjectStore):
    """Objects in memory that record puts in order, and fail scripted ones."""

    def __init__(self, log: list[str], script: dict[str, str] | None = None) -> None:
        self._inner = memory_objects()
        super().__init__(self._inner._client)
        self._log, self._script, self._count = log, script or {}, {"containers": 0, "manifests": 0}

    def put_new(self, name: str, *parts: Payload) -> None:
        kind = name.partition("/")[0]
        self._count[kind] += 1
        fate = self._script.get(f"{kind} {self._count[kind]}")
        if fate == "fails":
            self._log.append(f"{kind} failed")
            raise StoreUnavailable(f"{name}: failed by script")
        super().put_new(name, *parts)
        self._log.append(kind)
        if fate == "reply lost":
            raise StoreUnavailable(f"{name}: written, but not acknowledged")


@pytest.fixture
def log() -> list[str]:
    return []


@pytest.fixture
def index(tmp_path: Path, log: list[str]) -> Iterator[LmdbIndex]:
    class Logged(LmdbIndex):
        def publish_many(self, many: Sequence[ContainerEntries], *, summaries: bool = True) -> None:
            super().publish_many(many, summaries=summaries)
            log.extend(["publish"] * len(many))

        def commit_many(self, versions: Any) -> None:
            super().commit_many(versions)
            log.append("commit")

    made = Logged(tmp_path / "index", FINGERPRINTER.domain, 1 << 26)
    yield made
    made.close()


def put(objects: Recording, index: LmdbIndex, content: bytes, key: str = "k") -> None:
    containers = ContainerStore(objects, FINGERPRINTER.domain, 1 << 20)
    last = max((int(container) for container, _ in containers.ids()), default=0)
    with EmbeddedWriter(CHOSEN, FINGERPRINTER, containers, ManifestStore(objects), index, last) as writer:
        blob = written(writer, key, content)
    assert blob.done.done()


LARGE = random_bytes(5_000_000, 1)


def test_container_is_durable_before_publish_and_manifest(
    log: list[str], index: LmdbIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nearkin.embedded.runner.PUBLISHED_ENTRIES", 1)
    put(Recording(log), index, LARGE)
    containers = log.count("containers")
    assert containers >= 3
    assert log == ["containers", "publish"] * containers + ["manifests", "commit"]


def test_small_containers_are_published_together(log: list[str], index: LmdbIndex) -> None:
    """All of them are published before the manifest is written."""
    put(Recording(log), index, LARGE)
    containers = log.count("containers")
    assert log == ["containers"] * containers + ["publish"] * containers + ["manifests", "commit"]


@pytest.mark.parametrize("number", [1, 2, 3])
@pytest.mark.parametrize("fate", ["fails", "reply lost"])
def test_unacknowledged_container_is_not_published(log: list[str], index: LmdbIndex, number: int, fate: str) -> None:
    """The put fails and commits nothing."""
    objects = Recording(log, {f"containers {number}": fate})
    with pytest.raises(StoreUnavailable):
        put(objects, index, LARGE)
    assert "publish" not in log  # F.3: containers of a failed put are removed, not published
    assert "manifests" not in log
    assert "commit" not in log
    assert len(index.entries()["containers"]) == 0
    assert index.versions_of("default", "k") == []
    log.clear()
    put(objects, index, LARGE)
    assert log[-2:] == ["manifests", "commit"]
    assert index.versions_of("default", "k") == [1]


@pytest.mark.parametrize("fate", ["fails", "reply lost"])
def test_unacknowledged_manifest_is_not_in_the_catalog(log: list[str], index: LmdbIndex, fate: str) -> None:
    objects = Recording(log, {"manifests 1": fate})
    with pytest.raises(StoreUnavailable):
        put(objects, index, LARGE)
    assert "commit" not in log
    assert index.versions_of("default", "k") == []
    log.clear()
    put(objects, index, LARGE)
    assert log == ["manifests", "commit"]  # no chunk is stored twice
    # if only the reply was lost the first is a version of its own: committed, though its put failed
    assert index.versions_of("default", "k") == [1 if fate == "fails" else 2]


def test_aborted_put_commits_nothing(log: list[str], index: LmdbIndex) -> None:
    objects = Recording(log)
    containers = ContainerStore(objects, FINGERPRINTER.domain, 1 << 20)

    def abort() -> None:
        with EmbeddedWriter(CHOSEN, FINGERPRINTER, containers, ManifestStore(objects), index, 0) as writer:
            blob = writer.begin("k", {}, None)
            writer.window()[:1000] = bytes(1000)
            writer.advance(blob, 1000)
            writer.end(blob)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        abort()
    assert "manifests" not in log
    assert "commit" not in log

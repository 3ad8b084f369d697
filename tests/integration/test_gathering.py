"""Test merged blocks: GC runs join chunks of newer versions with their bases' blocks."""

from __future__ import annotations

import hashlib
import re
import tarfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nearkin import open_store
from nearkin.block_recoder import BlockRecoder
from nearkin.lab.generated_data import mutate, random_bytes, text_like
from nearkin.store import Store
from nearkin_maintenance.domain_owners import DomainOwners
from nearkin_maintenance.gc.mark import LiveSet
from nearkin_maintenance.optimize.block_writer import BlockWriter
from nearkin_maintenance.optimize.container_rewriter import NewGeneration, VerifiedReader
from nearkin_maintenance.optimize.merge import merge_planner
from nearkin_maintenance.optimize.merge.merge_planner import MergeBounds, MergePlan, plan_merge
from nearkin_maintenance.optimize.rebase.base_trees import build_base_trees
from nearkin_shared.errors import Corrupt
from nearkin_shared.formats import container_layout
from nearkin_shared.formats.block_kinds import block_roles, merged_blocks, reference_blocks
from nearkin_shared.formats.container import decode_container
from tests.support.checks.gc_checks import COLLECTED, collect_repeatedly, kill_during_gc
from tests.support.data.stores import ENCRYPTED, containers, flip, settings, stored_bytes
from tests.support.fakes.clock import DAY, Clock

CHOSEN: Mapping[str, Mapping[str, object]] = {
    "block": {"raw_bytes": "256KiB", "delta_bytes": "64KiB"},
    "delta": {"codec": "patch", "max_depth": 3},
    "gc": {"merge_block_bytes": "1MiB", "merge_versions_min": 2},
}
GATHERED = settings(COLLECTED, CHOSEN)
EVERY = range(1, 13)


def history(versions: int = 12) -> dict[int, bytes]:
    """Versions that each change a little of nearly every chunk: a chain of the longest kind."""
    content, all_of_them = text_like(600_000, 5), {}
    for number in range(1, versions + 1):
        content = all_of_them[number] = mutate(content, number, edits=150, edit_bytes_max=40)
    return all_of_them


HISTORY = history()


def put(store: Store, numbers: range) -> None:
    for number in numbers:
        assert store.put("k", HISTORY[number]).info.version == number


def check(store: Store, numbers: range) -> None:
    assert store.verify().damage == ()
    for number in numbers:
        assert store.get("k", number).read() == HISTORY[number]
    assert store.get("k", numbers[-1], start=200_000, stop=300_000).read() == HISTORY[numbers[-1]][200_000:300_000]


def blocks(store: Store) -> tuple[int, int]:
    """Return how many blocks are gathered, and how many refer to such."""
    found = [store._containers.of(None).directory(c) for c, _ in store._containers.ids()]
    return sum(int(merged_blocks(d).sum()) for d in found), sum(int(reference_blocks(d).sum()) for d in found)


def depths(store: Store) -> dict[int, np.ndarray]:
    return {c: store._containers.of(None).directory(c).chunks.depths.copy() for c, _ in store._containers.ids()}


@pytest.fixture
def store(tmp_path: Path, clock: Clock) -> Iterator[Store]:
    with open_store(tmp_path / "g", settings=GATHERED, clock=clock, create=True) as opened:
        yield opened


def changed(content: bytes, number: int, *parts: range) -> bytes:
    """Return a version that changes some bytes of each chunk of some parts."""
    lot, found = np.random.default_rng(number), np.frombuffer(content, np.uint8).copy()
    for part in parts:
        for at in part[:-2100:2500]:
            start, count = at + int(lot.integers(2000)), int(lot.integers(5, 40))
            found[start : start + count] = lot.integers(0, 256, count)
    return found.tobytes()


PARTS = (range(100_000), range(300_000, 400_000)), (range(600_000, 700_000), range(1_400_000, 1_500_000))
"""Of a first block of 1 MiB two parts change, then another and one of the block behind it."""


@pytest.fixture
def apart(tmp_path: Path, clock: Clock) -> Iterator[Store]:
    chosen = {
        "block": {"raw_bytes": "1MiB", "delta_bytes": "64KiB"},
        "delta": {"codec": "patch", "max_depth": 2},
        "gc": {"merge_block_bytes": "1MiB", "merge_versions_min": 2},
    }
    with open_store(tmp_path / "a", settings=settings(COLLECTED, chosen), clock=clock, create=True) as opened:
        opened.put("k", random_bytes(2_000_000, 5))
        yield opened


def put_changed(store: Store, clock: Clock, parts: tuple[range, ...], versions: int = 16) -> None:
    for _ in range(versions):
        clock.now += 3600
        (newest,) = store.versions("k")
        store.put("k", changed(store.get("k").read(), newest.version + 1, *parts))


def digests(store: Store) -> list[bytes]:
    every = store.versions("k", all_versions=True)
    return [hashlib.sha256(store.get("k", each.version).read()).digest() for each in every]


def numbers_ascend(store: Store) -> bool:
    """Return whether later rows lie in later blocks, in each container."""
    tables = [store._containers.of(None).directory(container).chunks for container, _ in store._containers.ids()]
    return all(bool((np.diff(table.blocks[table.there].astype(np.int64)) >= 0).all()) for table in tables)


@pytest.mark.soak
def test_rest_of_a_block_is_merged_with_the_next(apart: Store, clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    """Merge the rest of a block with a block behind it.

    The rest has a number behind that block's; merged rows must ascend nevertheless.
    """
    for parts in PARTS:
        put_changed(apart, clock, parts)
        before = digests(apart)
        clock.now += 8 * DAY
        assert apart.gc().containers_rewritten > 1
        assert not numbers_ascend(apart)
        assert "would not lie" not in caplog.text
        assert apart.verify().damage == ()
        assert digests(apart) == before


def test_container_with_bad_rows_is_unchanged(
    apart: Store, clock: Clock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Leave a container unchanged if its rows would not locate its chunks."""
    real = BlockWriter.write_raw

    def turned(self: Any, new: Any, directory: Any, rows: Any) -> None:
        real(self, new, directory, np.roll(rows, len(rows) // 2))

    put_changed(apart, clock, PARTS[0])
    before = digests(apart)
    clock.now += 8 * DAY
    monkeypatch.setattr(BlockWriter, "write_raw", turned)
    apart.gc()
    aborted = re.findall(r"(\S+)\.nkc: rewrite aborted, verification of chunk offsets failed", caplog.text)
    assert aborted
    for name in aborted:
        assert not merged_blocks(decode_container((apart.root / f"{name}.nkc").read_bytes(), name)).any()
        assert not list(apart.root.glob(f"{name}.0*.nkc"))
    assert apart.verify().damage == ()
    assert digests(apart) == before


@pytest.mark.parametrize("given", [False, True], ids=["put again", "given"])
def test_merged_chunks_are_reassembled(store: Store, tmp_path: Path, given: bool) -> None:
    """Reassemble merged blocks from the chunks that they consist of."""
    put(store, EVERY)
    store.gc()
    root, *_ = (
        path for path in containers(store.root) if merged_blocks(decode_container(path.read_bytes(), "a")).any()
    )
    directory = decode_container(root.read_bytes(), "a container")
    number = int(np.flatnonzero(merged_blocks(directory))[0])
    flip(root, (directory.block_rows[number].start + directory.block_rows[number].stop) // 2)
    store.close()
    with open_store(store.root, settings=GATHERED, create=True) as broken:
        assert len(broken.verify().damage) == 1
        files = []
        for each, content in HISTORY.items():
            if given:
                files.append(tmp_path / str(each))
                files[-1].write_bytes(content)
            else:
                broken.put("again", content)
        (done,) = broken.repair(files).repaired
        assert done.chunks_lost == 0
        assert broken.verify().damage == ()
        check(broken, EVERY)


def test_open_reader_follows_appended_chunks(store: Store, clock: Clock) -> None:
    """Read and deduplicate in a store opened before: it has read earlier generations."""
    with open_store(store.root, settings=GATHERED, read_only=True) as reader:
        for number in EVERY:
            put(store, range(number, number + 1))
            assert [reader.get("k", each).read() == HISTORY[each] for each in range(1, number + 1)] == [True] * number
            if number % 2 == 0:
                store.gc()
        assert blocks(store)[0]
        check(reader, EVERY)
        for number in EVERY:
            assert reader.explain("k", number).info.version == number


def test_long_history_shrinks_without_depth(store: Store, clock: Clock) -> None:
    """Store a long history in clearly fewer bytes; no chunk gets deeper."""
    put(store, EVERY)
    before, depths_before = stored_bytes(store.root), depths(store)
    predicted = store.gc(dry_run=True)
    report = store.gc()
    assert report.containers_rewritten == predicted.containers_rewritten > 1
    assert report.freed_bytes == predicted.freed_bytes == before - stored_bytes(store.root) > before // 20
    whole, refer = blocks(store)
    assert whole
    assert refer > whole
    for container, now in depths(store).items():
        old = depths_before[container]
        assert np.all(now[: len(old)] <= old)
        assert int(now.max(initial=0)) <= 3
    check(store, EVERY)
    assert store.stats().ledger.stored_bytes == stored_bytes(store.root)
    clock.now += DAY
    assert store.gc().containers_rewritten == 0  # merged blocks stay


def test_gc_runs_between_puts_continue_merges(store: Store, clock: Clock) -> None:
    """Continue the merges of earlier GC runs."""
    for first in range(1, 13, 3):
        put(store, range(first, first + 3))
        store.gc()
        clock.now += DAY
        check(store, range(1, first + 3))
    with open_store(
        store.root.parent / "apart", settings=settings(GATHERED, {"gc": {"merge_block_bytes": 0}}), create=True
    ) as apart:
        put(apart, EVERY)
        apart.gc()
        assert blocks(apart)[0] == 0
        assert stored_bytes(store.root) < 0.9 * stored_bytes(apart.root)


def test_index_is_rebuilt_from_merged_containers(store: Store, clock: Clock) -> None:
    put(store, EVERY)
    store.gc()
    counted = store.stats().ledger
    assert store.rebuild_index().skipped == ()
    assert store.stats().ledger.stored_bytes == counted.stored_bytes
    for number in range(1, 6):
        store.delete("k", number)
    collect_repeatedly(store, clock, runs=3)
    rebuilt, verified = store.rebuild_index(), store.verify()
    assert rebuilt.chunks == verified.chunks
    assert rebuilt.segments == store.stats().segments
    check(store, range(6, 13))
    assert store.put("again", HISTORY[12]).ledger.unique_bytes == 0


def test_version_counts_are_unchanged_by_merges(store: Store) -> None:
    """Count merged chunks once.

    Counted as chunk and as reference, dedup saved less than nothing.
    """
    put(store, EVERY)
    before = store.stats()
    store.gc()
    assert blocks(store)[0]
    for after in (store.stats(), (store.rebuild_index(), store.stats())[1]):
        for name in ("logical_bytes", "unique_bytes", "chunks", "duplicate_chunks", "raw_chunks", "delta_chunks"):
            assert getattr(after.ledger, name) == getattr(before.ledger, name), name
        assert after.ledger.dedup_saved_bytes >= 0
        assert after.ledger.compression_saved_bytes >= 0
        assert after.ledger.dcr > before.ledger.dcr / 2
        assert sum(after.found_by.values()) == after.ledger.delta_chunks


def test_explained_shares_add_up_after_a_merge(store: Store) -> None:
    put(store, EVERY)
    store.gc()
    explanations = [store.explain("k", number) for number in EVERY]
    explained = [chunk for one in explanations for segment in one.segments for chunk in segment.chunks]
    assert "reference" in {chunk.found_by for chunk in explained}
    stats = store.stats()
    shares = sum(chunk.stored_estimate_bytes for chunk in explained)
    assert 0.97 * stats.ledger.block_bytes < shares <= stats.ledger.block_bytes
    assert sum(sum(one.found_by.values()) for one in explanations) == sum(stats.found_by.values())


@pytest.mark.soak
def test_merged_blocks_are_deleted_with_versions(store: Store, clock: Clock) -> None:
    for number in EVERY:
        put(store, range(number, number + 1))
        if number > 4:
            store.delete("k", number - 4)
        clock.now += 2 * DAY
        collect_repeatedly(store, clock, runs=1)
    check(store, range(9, 13))
    clock.now += 8 * DAY
    collect_repeatedly(store, clock, runs=6)
    check(store, range(9, 13))
    with open_store(store.root.parent / "fresh", settings=GATHERED, create=True) as fresh:
        for number in range(9, 13):
            fresh.put("k", HISTORY[number])
    assert stored_bytes(store.root) < 1.5 * stored_bytes(store.root.parent / "fresh")
    for number in range(9, 13):
        store.delete("k", number)
    clock.now += 8 * DAY
    collect_repeatedly(store, clock, runs=6)
    assert list(store._containers.ids()) == []


def test_damaged_container_names_its_dependents(store: Store) -> None:
    """Name the versions that depend on a damaged container."""
    put(store, EVERY)
    store.put("alone", random_bytes(100_000, 9))
    store.gc()
    first = containers(store.root)[0]
    flip(first, 200)
    report = store.verify()
    touched = {version[-2:] for damage in report.damage for version in damage.versions}
    assert ("alone", 1) not in touched
    unreadable = set()
    for number in EVERY:
        try:
            assert store.get("k", number).read() == HISTORY[number]
        except Exception:
            unreadable.add(("k", number))
    assert touched == unreadable != set()


def test_encrypted_store_merges_too(tmp_path: Path) -> None:
    with open_store(tmp_path / "e", settings=settings(GATHERED, ENCRYPTED), create=True) as store:
        put(store, EVERY)
        store.gc()
        assert blocks(store)[0]
        check(store, EVERY)
        assert store.rebuild_index().skipped == ()
        check(store, EVERY)


def reach_of(store: Store) -> LiveSet:
    """Return what all versions reach."""
    names = [name for name, _ in store._manifests.names_and_marks()[0]]
    return LiveSet(store._containers.of(None), store._manifests, names)


def plan_of(store: Store, recent_count: int = 0) -> MergePlan | None:
    """Return the merge plan if so many of the oldest containers are recent."""
    ids = sorted(container for container, _ in store._containers.ids())
    return plan_merge(reach_of(store), ids, ids[:recent_count], MergeBounds(3, 1 << 20, 1 << 17, 1 << 16, 2))


def sources(found: MergePlan) -> dict[int, set[int]]:
    """Return the containers from which each stretch takes something in."""
    stretches = [stretch for container in found.containers for stretch in found.merge_targets(container)]
    return {stretch: set(found.chunks_merged_into(stretch).containers.tolist()) for stretch in stretches}


def test_recent_containers_do_not_take_part(store: Store) -> None:
    """Neither merge into recent containers nor from them."""
    put(store, EVERY)
    found = plan_of(store)
    assert found is not None
    assert found.merge_targets(found.containers[0])
    assert plan_of(store, recent_count=len(found.containers)) is None
    others = plan_of(store, recent_count=3)
    assert others is not None
    assert not any(others.merge_targets(container) for container in others.containers[:3])
    assert not set().union(*sources(others).values()) & set(others.containers[:3])


def test_plan_bounds_its_reference_blocks(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plan no more reference blocks than a GC run may hold."""
    put(store, EVERY)
    whole = plan_of(store)
    monkeypatch.setattr(merge_planner, "REFERENCES_MAX", 20)
    some = plan_of(store)
    assert whole is not None
    assert some is not None
    assert 0 < sum(map(len, sources(some).values())) <= 20 < sum(map(len, sources(whole).values()))


def test_delta_codec_merges_nothing(tmp_path: Path) -> None:
    chosen = settings(GATHERED, {"delta": {"codec": "xdelta3"}})
    with open_store(tmp_path / "x", settings=chosen, create=True) as store:
        put(store, EVERY)
        store.gc()
        assert blocks(store)[0] == 0
        check(store, EVERY)


@pytest.mark.parametrize(
    ("point", "times"), [("compact.made", 2), ("compact.put", 1), ("compact.renewed", 2), ("merge.container", 3)]
)
def test_gc_run_killed_amid_a_merge_is_safe(tmp_path: Path, clock: Clock, point: str, times: int) -> None:
    root = tmp_path / "d"
    with open_store(root, settings=GATHERED, create=True) as store:
        put(store, EVERY)
    kill_during_gc(root, CHOSEN, point, times)
    with open_store(root, settings=GATHERED, create=True) as store:
        check(store, EVERY)
        store.gc()
        check(store, EVERY)
        assert blocks(store)[0]


@pytest.mark.parametrize("of", [1, 2])
def test_undecodable_block_stops_its_merge(
    store: Store, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, of: int
) -> None:
    """Merge nothing in a container if a block does not decode again."""
    monkeypatch.setattr("nearkin_shared.utils.thread_pool.cores", lambda: of)
    put(store, EVERY)

    def fails(*_: object) -> None:
        raise Corrupt("a block just compressed does not decompress to what it was: check this machine's memory")

    monkeypatch.setattr("nearkin_delta.block_encoder.encode_merged", fails)
    with caplog.at_level("WARNING"):
        store.gc()
    assert "check this machine's memory: the container is not merged" in caplog.text
    assert blocks(store) == (0, 0)
    check(store, EVERY)


@pytest.mark.parametrize("versions", [10, 12])
def test_too_few_changed_versions_merge_nothing(tmp_path: Path, clock: Clock, versions: int) -> None:
    """Leave twelve versions alone: eleven depend on the first one."""
    chosen = settings(GATHERED, {"gc": {"merge_versions_min": 11, "recompress_level": 0}})
    with open_store(tmp_path / "few", settings=chosen, clock=clock, create=True) as store:
        put(store, range(1, versions + 1))
        predicted = store.gc()
        assert (blocks(store)[0] > 0) == (predicted.containers_rewritten > 0) == (versions > 11)
        check(store, range(1, versions + 1))


@pytest.mark.parametrize(("block_bytes", "takes"), [(1 << 20, 0), (1 << 18, 1)])
def test_large_raw_block_merges_nothing(tmp_path: Path, clock: Clock, block_bytes: int, takes: int) -> None:
    """Leave a large raw block alone: its slices cost more than they save."""
    whole = settings(GATHERED, {"block": {"raw_bytes": "8MiB"}})
    with open_store(tmp_path / "large", settings=whole, clock=clock, create=True) as store:
        put(store, range(1, 8))
        ids = sorted(container for container, _ in store._containers.ids())
        (raw_bytes,) = store._containers.of(None).directory(ids[0]).blocks.raw.tolist()
        assert 1 << 18 < raw_bytes < 1 << 20
        found = plan_merge(reach_of(store), ids, [], MergeBounds(3, block_bytes, 1 << 16, 1 << 16, 2))
        assert found is not None
        assert min(number for number, one in enumerate(ids) if found.merge_targets(one)) == takes


def test_versions_after_a_merge_may_be_fewer(tmp_path: Path, clock: Clock) -> None:
    """Merge again for fewer versions once something was merged."""
    chosen = settings(GATHERED, {"gc": {"merge_versions_min": 8}})
    with open_store(tmp_path / "few", settings=chosen, clock=clock, create=True) as store:
        put(store, range(1, 10))
        store.gc()
        _, refer = blocks(store)
        assert refer
        put(store, range(10, 13))
        store.gc()
        assert blocks(store)[1] > refer
        check(store, EVERY)


def test_deleted_versions_do_not_count(tmp_path: Path, clock: Clock) -> None:
    """Ignore deleted versions, whatever still depends on them."""
    chosen = settings(GATHERED, {"gc": {"merge_versions_min": 8}, "deletion": {"undelete_seconds": 0}})
    with open_store(tmp_path / "gone", settings=chosen, clock=clock, create=True) as store:
        put(store, EVERY)
        for number in range(1, 8):
            store.delete("k", number)
        clock.now += 1  # none can be brought back any more
        store.gc()
        assert blocks(store) == (0, 0)
        check(store, range(8, 13))


def test_merged_blocks_are_not_joined_again(store: Store) -> None:
    put(store, EVERY)
    store.gc()
    containers_ = store._containers.of(None)
    laying = BlockWriter(containers_, VerifiedReader(containers_, None, None), BlockRecoder(GATHERED))  # type: ignore[arg-type]
    small = 0
    for container, _ in containers_.ids():
        directory = containers_.directory(container)
        whole = merged_blocks(directory) & (directory.blocks.kinds == container_layout.RAW)
        kept = directory.chunks.there & (np.arange(len(directory.chunks)) % 8 == 0)
        joined = laying.blocks_to_merge(directory, kept)
        left = np.bincount(directory.chunks.blocks, directory.chunks.lengths * kept, len(whole))
        small += int((whole & (left > 0) & (left < 128 * 1024)).sum())
        assert not np.any(joined & whole)
    assert small > 1


def test_merged_block_without_added_chunks_stays_merged(store: Store) -> None:
    """A rewrite records the role of each block, also of merged ones that lose what GC runs added to them."""
    put(store, EVERY)
    store.gc()
    found, encoder = store._containers.of(None), BlockRecoder(GATHERED)
    tenants = DomainOwners(store._fingerprinters, [store.settings.tenant], store._manifests)
    block_writer = BlockWriter(found, VerifiedReader(found, tenants, store._fingerprinter), encoder)
    kinds = set()
    for container, _ in found.ids():
        directory = found.directory(container)
        assert directory.own_rows is not None
        rows = np.arange(len(directory.chunks))
        kept = directory.chunks.there & (rows < directory.own_rows)
        new = NewGeneration(found, directory, kept, encoder)
        block_writer.copy_remaining(new, directory, kept, np.zeros(len(directory.blocks), np.bool_))
        rewritten = decode_container(new.encode(np.zeros(0, np.uint32)), "rewritten")
        roles = block_roles(directory)[directory.chunks.blocks[kept]]
        assert block_roles(rewritten)[rewritten.chunks.blocks[kept]].tolist() == roles.tolist()
        has_lost = np.isin(directory.chunks.blocks, directory.chunks.blocks[rows >= directory.own_rows]) & kept
        kinds |= set(rewritten.blocks.kinds[rewritten.chunks.blocks[has_lost]].tolist())
    assert kinds == {container_layout.RAW, container_layout.PATCH}


def test_chunks_on_a_merged_base_start_trees(tmp_path: Path) -> None:
    """Start a tree of its own with each chunk whose base is one merged chunk."""
    with open_store(tmp_path / "g", settings=GATHERED, create=True) as opened:
        put(opened, EVERY)
        opened.gc()
    shallow = settings(GATHERED, {"delta": {"max_depth": 1}})  # the base of a new chunk is then its base's base
    with open_store(tmp_path / "g", settings=shallow, create=True) as opened:
        opened.put("k", mutate(HISTORY[12], 99, edits=150, edit_bytes_max=40))
        firsts_of_families(opened)


def firsts_of_families(store: Store) -> None:
    reach = reach_of(store)
    needed = reach.transitive_closure(reach.chunks)
    families = build_base_trees(reach, needed)
    newest = max(c for c, _ in store._containers.ids())
    chunks = reach.directory(newest).chunks
    lengths = np.zeros(len(chunks), np.int64)
    for row, (base, ordinal) in enumerate(zip(chunks.bases.containers, chunks.bases.ordinals, strict=True)):
        lengths[row] = 0 if not base else reach.directory(int(base)).chunks.lengths[ordinal]
    on_many = np.flatnonzero(lengths > 3 * chunks.lengths.astype(np.int64))
    distinct = chunks.bases.take(on_many).distinct()
    assert len(on_many) > 2 * len(distinct) > 0
    assert len(set(families.by_container[newest][on_many].tolist())) == len(on_many)


def test_merged_blocks_of_container_format_4_are_read_and_rewritten(tmp_path: Path) -> None:
    """A store whose merged blocks the code before format 5 wrote is opened, verified, restored and collected."""
    root, offset_seconds = tmp_path / "s", 10.0 * DAY  # after the last clock record of the store
    with tarfile.open(Path(__file__).parent.parent / "golden" / "store_v4.tar") as archive:
        archive.extractall(root, filter="data")
    versions, content = [], text_like(200_000, 5)
    for number in range(1, 8):
        content = mutate(content, number, edits=50, edit_bytes_max=40)
        versions.append(content)

    def formats() -> set[int]:
        return {path.read_bytes()[4] for path in containers(root)}

    with open_store(root, settings=GATHERED, clock=lambda: time.time() + offset_seconds) as store:
        assert (formats(), blocks(store)) == ({4}, (2, 17))
        assert store.verify().damage == ()
        assert [store.get("k", n).read() for n in range(1, 7)] == versions[:6]
        store.put("k", versions[6])
        store.delete("k", 2)
        for _ in range(3):
            offset_seconds += 40 * DAY
            store.gc()
        assert 5 in formats()
        assert all(blocks(store))
        assert store.verify().damage == ()
        assert [store.get("k", n).read() for n in (1, 3, 4, 5, 6, 7)] == [versions[0], *versions[2:]]
        assert store.rebuild_index().skipped == ()
        assert store.verify().damage == ()

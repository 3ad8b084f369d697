"""Test GC runs that rewrite containers: dead bases, small remainders, concurrent readers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nearkin import open_store
from nearkin.lab.generated_data import mutate, random_bytes, text_like
from nearkin.store import Store
from nearkin_shared.errors import BadInput, Corrupt
from nearkin_shared.reading.chunk_reader import REWRITTEN_MAX, ChunkReader
from nearkin_shared.storage.containers import ContainerRewritten
from tests.support.checks.gc_checks import COLLECTED, collect_repeatedly
from tests.support.checks.inspection import check_no_orphans
from tests.support.data.stores import containers, flip, objects, settings, stored_bytes
from tests.support.fakes.clock import DAY, Clock


def chain(store: Store, clock: Clock, versions: int, keep: int) -> dict[int, bytes]:
    """Put versions, each based on the previous one; delete all but the last ones.

    Return these.
    """
    content, kept = text_like(400_000, 1), {}
    for number in range(1, versions + 1):
        content = mutate(content, number, edits=60)
        assert store.put("k", content).info.version == number
        kept[number] = content
        if number > keep:
            store.delete("k", number - keep)
            del kept[number - keep]
    clock.now += 8 * DAY
    return kept


def test_dead_bases_are_freed_after_rebase(reopen: Callable[[], Store], clock: Clock, tmp_path: Path) -> None:
    """Delete dead bases once their dependents have live ones."""
    store = reopen()
    kept = chain(store, clock, versions=14, keep=3)
    before = stored_bytes(store.root)
    collect_repeatedly(store, clock, runs=6)
    with open_store(tmp_path / "fresh", settings=COLLECTED, create=True) as fresh:
        for content in kept.values():
            fresh.put("k", content)
    assert stored_bytes(store.root) < 1.2 * stored_bytes(tmp_path / "fresh") < before
    for number, content in kept.items():
        assert store.get("k", number).read() == content
    assert max(store._containers.directory(c).chunks.depths.max() for c, _ in store._containers.ids()) <= 4
    assert store.rebuild_index().skipped == ()
    assert store.put("again", kept[14]).ledger.unique_bytes == 0


def test_rebase_reclaim_is_predicted_over_runs(reopen: Callable[[], Store], clock: Clock) -> None:
    store = reopen()
    chain(store, clock, versions=14, keep=3)
    predicted, before = store.gc(dry_run=True), stored_bytes(store.root)
    first = store.gc()
    assert before - stored_bytes(store.root) == first.freed_bytes == predicted.freed_bytes
    middle = stored_bytes(store.root)
    for _ in range(6):
        clock.now += DAY
        store.gc()
    assert middle - stored_bytes(store.root) == predicted.pending_delete_bytes > 0


def test_gc_run_reports_progress_and_bytes(reopen: Callable[[], Store], clock: Clock) -> None:
    """Report the progress of a GC run with the bytes read, written and removed."""
    store = reopen()
    kept = chain(store, clock, versions=14, keep=3)
    store.gc()
    clock.now += DAY
    progress: list[tuple[int, int, str]] = []
    report = store.gc(steps=lambda done, total, text: progress.append((done, total, text)))
    by_text: dict[str, list[tuple[int, int]]] = {}
    for done, total, text in progress:
        by_text.setdefault(text, []).append((done, total))
    assert len(by_text["manifests read"]) >= len(kept)
    assert len(by_text["containers rebased"]) + len(by_text["containers swept"]) >= (
        report.containers_deleted + report.containers_rewritten
    )
    assert report.containers_rewritten > 1
    assert all(
        [done for done, _ in steps] == list(range(len(steps))) and steps[0][1] >= len(steps)
        for steps in by_text.values()
    )


def test_reader_continues_during_rebase(reopen: Callable[[], Store], clock: Clock) -> None:
    store = reopen()
    kept = chain(store, clock, versions=14, keep=3)
    store.gc()
    small_cache = settings(COLLECTED, {"restore": {"cache_bytes": 8 << 20}, "base": {"cache_bytes": 1 << 20}})
    with open_store(store.root, settings=small_cache, read_only=True, clock=clock) as reader:
        blobs = {number: reader.get("k", number) for number in kept}
        for number, content in kept.items():
            assert reader.get("k", number, start=0, stop=10).read() == content[:10]
        reader._containers.blocks.clear()
        clock.now += DAY
        assert store.gc().containers_rewritten > 1
        for number, blob in blobs.items():
            assert blob.read() == kept[number]


@pytest.mark.parametrize("codec", ["patch", "xdelta3"])
def test_reader_with_stale_cache_continues(tmp_path: Path, clock: Clock, codec: str) -> None:
    """Read on with a partly stale cache: each reader lacks one container and has no old bases."""
    chosen = settings(COLLECTED, {"delta": {"codec": codec}})
    with open_store(tmp_path / "s", settings=chosen, clock=clock, create=True) as store:
        kept = chain(store, clock, versions=14, keep=3)
        store.gc()
        ids = [container for container, _ in store._containers.ids()]
        readers = [open_store(store.root, settings=chosen, read_only=True, clock=clock) for _ in ids]
        for reader in readers:
            assert [reader.get("k", number).read() == content for number, content in kept.items()] == [True] * 3
        clock.now += DAY
        assert store.gc().containers_rewritten > 1
        for reader, container in zip(readers, ids, strict=True):
            for number, content in kept.items():
                reader._containers.evict(container)
                assert reader.get("k", number).read() == content
                reader._containers.evict(container)
                assert reader.explain("k", number).info.size_bytes == len(content)
            reader.close()


@pytest.mark.parametrize("moved", [True, False])
def test_overtaken_reader_retries_or_raises(
    reopen: Callable[[], Store], monkeypatch: pytest.MonkeyPatch, moved: bool
) -> None:
    """Retry a read that a GC run overtakes; without such a run raise Corrupt in the end."""
    store, content, plain = reopen(), random_bytes(300_000, 1), ChunkReader._run
    overtaken: list[ContainerRewritten] = []
    store.put("k", content)

    def run(reader: Any, task: Any, plan: Any) -> Any:
        if len(overtaken) == 21:
            return plain(reader, task, plan)
        overtaken.append(err := ContainerRewritten("gone: read again"))
        err.moved = moved
        raise err

    monkeypatch.setattr(ChunkReader, "_run", run)
    if moved:
        assert store.get("k").read() == content
    else:
        with pytest.raises(Corrupt, match="read again"):
            store.get("k").read()
        assert len(overtaken) == REWRITTEN_MAX + 1


def put_and_delete_most(store: Store) -> tuple[dict[str, bytes], int]:
    """Put blobs that share containers, delete most; return the rest and the bytes stored."""
    contents = {f"k{number}": random_bytes(30_000, number) for number in range(20)}
    list(store.put_many(contents.items()))
    before = stored_bytes(store.root)
    for number in range(20):
        if number % 4:
            store.delete(f"k{number}")
            del contents[f"k{number}"]
    return contents, before


def test_container_with_little_left_is_rewritten(reopen: Callable[[], Store], clock: Clock) -> None:
    store = reopen()
    contents, before = put_and_delete_most(store)
    clock.now += 8 * DAY
    collect_repeatedly(store, clock)
    assert stored_bytes(store.root) < before * 0.4
    assert all(len(path.name.split(".")) == 3 for path in containers(store.root))
    for key, content in contents.items():
        assert store.get(key).read() == content
        assert sum(segment.length_bytes for segment in store.explain(key).segments) == len(content)
    # A second time: rewritten containers are rewritten again.
    for key in list(contents)[1:]:
        store.delete(key)
        del contents[key]
    clock.now += 8 * DAY
    collect_repeatedly(store, clock)
    assert stored_bytes(store.root) < before * 0.1
    for key, content in contents.items():
        assert store.get(key).read() == content
    assert store.rebuild_index().skipped == ()
    assert store.put("again", contents["k0"]).ledger.unique_bytes == 0


def test_reader_continues_during_compaction(reopen: Callable[[], Store], clock: Clock, tmp_path: Path) -> None:
    store = reopen()
    contents, _ = put_and_delete_most(store)
    clock.now += 8 * DAY
    store.gc()
    small_cache = settings(COLLECTED, {"restore": {"cache_bytes": 8 << 20}, "base": {"cache_bytes": 1 << 20}})
    with open_store(store.root, settings=small_cache, read_only=True, clock=clock) as reader:
        blobs = {key: reader.get(key) for key in contents}
        for key in contents:
            assert reader.get(key, start=0, stop=10).read() == contents[key][:10]  # directories are known from now on
        reader._containers.blocks.clear()
        clock.now += DAY
        assert store.gc().containers_rewritten > 0
        for key, blob in blobs.items():
            assert blob.read() == contents[key]


def test_patch_block_keeps_bases_in_use_only(reopen: Callable[[], Store], clock: Clock) -> None:
    """Keep the bases of the remaining chunks of a patch block only."""
    store = reopen()
    firsts = {f"k{number}": text_like(60_000, number) for number in range(12)}
    list(store.put_many(firsts.items()))
    seconds = {key: mutate(content, 3, edits=25) for key, content in firsts.items()}
    results = list(store.put_many(seconds.items()))
    assert sum(result.ledger.delta_chunks for result in results) > 12
    for key in firsts:
        store.delete(key, 1)
        if key != "k5":
            store.delete(key, 2)
    clock.now += 8 * DAY
    collect_repeatedly(store, clock, runs=8)
    assert store.get("k5").read() == seconds["k5"]
    assert stored_bytes(store.root) < 80_000


def test_next_gc_run_frees_the_predicted_bytes(reopen: Callable[[], Store], clock: Clock) -> None:
    store = reopen()
    put_and_delete_most(store)
    clock.now += 8 * DAY
    predicted = store.gc(dry_run=True)
    store.gc()
    clock.now += DAY
    before = stored_bytes(store.root)
    done = store.gc()
    assert before - stored_bytes(store.root) == done.freed_bytes == predicted.pending_delete_bytes > 0
    assert done.containers_rewritten > 0


def test_deletion_predicts_its_final_reclaim(reopen: Callable[[], Store], clock: Clock) -> None:
    store = reopen()
    put_and_delete_most(store)
    assert store.gc(dry_run=True).freed_bytes == 0
    predicted = store.gc(dry_run=True, deleted_too=True)
    assert predicted.versions == 15
    with pytest.raises(BadInput):
        store.gc(deleted_too=True)
    clock.now += 8 * DAY
    before = stored_bytes(store.root)
    first = store.gc()
    assert before - stored_bytes(store.root) == predicted.freed_bytes == first.freed_bytes
    clock.now += DAY
    store.gc()
    assert before - stored_bytes(store.root) == predicted.freed_bytes + predicted.pending_delete_bytes


def test_damaged_container_is_not_rewritten(reopen: Callable[[], Store], clock: Clock) -> None:
    store = reopen()
    contents, _ = put_and_delete_most(store)
    clock.now += 8 * DAY
    store.gc()
    flip(containers(store.root)[0], 5_000)
    store = reopen()
    before = objects(store.root)
    clock.now += DAY
    with pytest.raises(Corrupt, match="checksum"):
        store.gc()
    assert {name for name in before if name.startswith("containers")} <= set(objects(store.root))
    assert contents.keys() - {"k0"} <= {key for key in contents if _reads(store, key, contents[key])} | {"k4", "k8"}


def _reads(store: Store, key: str, content: bytes) -> bool:
    try:
        return store.get(key).read() == content
    except Corrupt:
        return False


@pytest.mark.parametrize("bound", [("ENTRIES_MAX", 1), pytest.param(("RUNS_MAX", 30), marks=pytest.mark.soak)])
def test_full_record_leaves_rest_to_later_runs(
    reopen: Callable[[], Store], clock: Clock, monkeypatch: pytest.MonkeyPatch, bound: tuple[str, int]
) -> None:
    """Mark in later runs what the record has no room for."""
    store = reopen()
    kept = [random_bytes(20_000, number) for number in range(40)]
    for number in range(4):
        mine = kept[10 * number : 10 * number + 10]
        store.put(f"all{number}", b"".join(part + random_bytes(20_000, 99 + at) for at, part in enumerate(mine)))
        store.put(f"kept{number}", b"".join(mine))
        store.delete(f"all{number}")
    clock.now += 8 * DAY
    monkeypatch.setattr(f"nearkin_shared.formats.pending_delete_record.{bound[0]}", bound[1])
    assert 0 < store.gc().pending_delete_containers < len(containers(store.root))
    collect_repeatedly(store, clock, runs=12)
    monkeypatch.undo()
    assert store.gc().pending_delete_containers == 0
    for number in range(4):
        assert store.get(f"kept{number}").read() == b"".join(kept[10 * number : 10 * number + 10])
    check_no_orphans(store)
    assert store.stats().ledger.stored_bytes < 1_100_000

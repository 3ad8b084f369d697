"""Purges: purged data are in no file of the store any more, and all other data restore."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nearkin import open_store
from nearkin.lab.generated_data import mutate, random_bytes, text_like
from nearkin.store import Store
from nearkin_shared.errors import BadInput, GcPaused, NotFound, RetentionActive, StoreLocked, StoreUnavailable
from nearkin_shared.index.lmdb.lmdb_index import LmdbIndex
from nearkin_shared.types import Locations
from nearkin_shared.utils import failpoints
from tests.support.checks import inspection
from tests.support.checks.gc_checks import COLLECTED
from tests.support.data.stores import ENCRYPTED, SMALL, find_broken, settings
from tests.support.fakes.clock import DAY, Clock

SECRET = random_bytes(4000, 99)
"""Incompressible, so that parts of it are found wherever it is stored."""
PLAIN = settings(SMALL, {"gc": {"bytes_per_second": 1 << 30}})
GATHERING = settings(
    COLLECTED,
    {
        "block": {"raw_bytes": "256KiB", "delta_bytes": "64KiB"},
        "delta": {"codec": "patch", "max_depth": 2},
        "gc": {"merge_block_bytes": "1MiB", "merge_versions_min": 2, "bytes_per_second": 1 << 30},
    },
)
VARIANTS = {
    "default": PLAIN,
    "gathering": GATHERING,
    "hybrid": settings(PLAIN, {"gc": {"mode": "hybrid"}}),
    "parity": settings(PLAIN, {"storage": {"parity": "rs-4-2"}}),
}
LEAKED = 4
"""The version that holds the secret."""


def traces(root: Path) -> list[str]:
    """Return the files of a store in which 24 bytes of the secret are found."""
    parts = [SECRET[at : at + 24] for at in range(0, len(SECRET) - 24, 200)]
    files = [path for path in root.rglob("*") if path.is_file()]
    return [str(path) for path in files if any(part in path.read_bytes() for part in parts)]


def put_history(store: Store, clock: Clock, gc_runs: int) -> dict[tuple[str, int], bytes]:
    """Put versions of which one holds the secret, and do GC runs, which merge and rebase."""
    content, contents = random_bytes(200_000, 1) + text_like(100_000, 2), {}
    for number in range(1, 9):
        content = mutate(content, number, edits=25)
        clock.now += 3600
        leaked = content[:150_000] + SECRET + content[150_000:]
        contents["k", number] = leaked if number == LEAKED else content
        store.put("k", contents["k", number])
    for _ in range(gc_runs):
        clock.now += DAY
        store.gc()
    return contents


def check_deleted(store: Store, contents: Mapping[tuple[str, int], bytes]) -> None:
    assert traces(store.root) == []
    assert find_broken(store, contents) == set()
    assert store.verify().damage == ()
    inspection.check_no_orphans(store)
    inspection.check_index_equals_a_rebuilt_one(store)


@pytest.mark.parametrize("gc_runs", [0, 2])
@pytest.mark.parametrize("variant", VARIANTS)
def test_purged_version_is_in_no_file(tmp_path: Path, variant: str, gc_runs: int) -> None:
    """F.4: After `rm --now` of one version no file holds its bytes, merged and rebased containers included."""
    clock = Clock()
    with open_store(tmp_path / "s", settings=VARIANTS[variant], clock=clock, create=True) as store:
        contents = put_history(store, clock, gc_runs)
        assert traces(store.root)
        del contents["k", LEAKED]
        store.delete("k", LEAKED)
        clock.now += 1
        report = store.purge("k", LEAKED)
        assert (report.versions, report.pending_delete_containers) == (1, 0)
        check_deleted(store, contents)
        assert store.put("k", contents["k", 8]).info.version == 9
        clock.now += 30 * DAY
        store.gc()
        assert find_broken(store, contents) == set()


def test_purged_base_of_live_deltas_is_in_no_file(tmp_path: Path) -> None:
    """F.4: Versions that were stored as deltas of the purged one are encoded again without it."""
    clock = Clock()
    with open_store(tmp_path / "s", settings=PLAIN, clock=clock, create=True) as store:
        content, contents = SECRET + random_bytes(200_000, 3), {}
        store.put("k", content)
        for number in range(2, 6):
            content = bytes(4000) + mutate(content[4000:], number, edits=30)
            store.put("k", content)
            contents["k", number] = content
        assert any(store._containers.of(None).directory(c).chunks.depths.any() for c, _ in store._containers.ids())
        store.delete("k", 1)
        store.purge("k", 1)
        check_deleted(store, contents)


def test_purge_removes_containers_of_unneeded_bases(tmp_path: Path) -> None:
    """F.32: A container of which only the bases of live deltas are left is removed once these deltas need none."""
    with open_store(tmp_path / "s", settings=PLAIN, create=True) as store:
        content = SECRET + random_bytes(200_000, 3)
        store.put("k", content)
        bases = {container for container, _ in store._containers.ids()}
        changed = bytes(4000) + content[4000:]
        for at in range(4000, len(changed), 500):
            changed = changed[:at] + bytes([changed[at] ^ 1]) + changed[at + 1 :]
        store.put("k", changed)
        directories = [store._containers.of(None).directory(c) for c, _ in store._containers.ids()]
        assert {base for directory in directories for base in directory.base_containers()} == bases
        store.delete("k", 1)
        assert store.purge("k", 1).containers_deleted == 1
        assert not bases & {container for container, _ in store._containers.ids()}
        check_deleted(store, {("k", 2): changed})


def test_purge_beside_chunks_of_zeros_is_in_no_file(tmp_path: Path) -> None:
    """A live version with zeros, of which no chunk is stored, needs no container for them."""
    with open_store(tmp_path / "store", settings=PLAIN, create=True) as store:
        live = bytes(300_000) + random_bytes(30_000, 1)
        store.put("live", live)
        store.put("secret", SECRET)
        store.delete("secret")
        store.purge()
        check_deleted(store, {("live", 1): live})


def test_purge_leaves_versions_of_the_same_container(tmp_path: Path) -> None:
    """F.32: A container keeps the recipes and chunks of other versions; the index names no removed data."""
    shared, other = random_bytes(60_000, 5), random_bytes(60_000, 6)
    with open_store(tmp_path / "s", settings=PLAIN, create=True) as store:
        list(store.put_many([("k", SECRET + shared), ("other", other), ("both", shared + other)]))
        assert len(list(store._containers.ids())) == 1
        store.put("alone", random_bytes(60_000, 7))
        for key in ("k", "alone"):
            store.delete(key)
        report = store.purge()
        assert (report.versions, report.containers_deleted, report.containers_rewritten) == (2, 1, 1)
        check_deleted(store, {("other", 1): other, ("both", 1): shared + other})
        assert store.put("alone", random_bytes(60_000, 7)).ledger.duplicate_chunks == 0
        assert store.get("alone").read() == random_bytes(60_000, 7)


def test_purge_of_a_key_leaves_other_deletions_undeletable(tmp_path: Path) -> None:
    """F.4: Only the named key is purged: another key's deleted version can be undeleted."""
    with open_store(tmp_path / "s", settings=PLAIN, create=True) as store:
        store.put("a", SECRET)
        store.put("b", b"other" * 1000)
        store.delete("a")
        store.delete("b")
        store.purge("a")
        assert traces(store.root) == []
        assert store.undelete("b") == 1
        assert store.get("b").read() == b"other" * 1000
        with pytest.raises(NotFound):
            store.undelete("a")
        with pytest.raises(NotFound):
            store.purge("a")


def test_gc_now_ends_deletions_whatever_rm_recorded(tmp_path: Path) -> None:
    """F.4: The undelete window recorded by `rm` and the grace do not delay the removal by `gc --now`."""
    year = settings(PLAIN, {"deletion": {"undelete_seconds": 365 * DAY}, "gc": {"grace_seconds": 30 * DAY}})
    with open_store(tmp_path / "s", settings=year, create=True) as store:
        store.put("a", random_bytes(1 << 20, 7))
        store.put("b", b"stays" * 1000)
        store.delete("a")
        assert store.gc().freed_bytes <= 0
        report = store.purge()
        assert report.freed_bytes > 1 << 20
        assert store.list_deleted() == []
        check_deleted(store, {("b", 1): b"stays" * 1000})


def test_purge_of_an_encrypted_store_frees_and_restores(tmp_path: Path) -> None:
    """F.4: Encrypted containers are rewritten, too."""
    clock = Clock()
    with open_store(tmp_path / "s", settings=settings(PLAIN, ENCRYPTED), clock=clock, create=True) as store:
        contents = put_history(store, clock, 1)
        del contents["k", LEAKED]
        store.delete("k", LEAKED)
        clock.now += 1
        assert store.purge("k", LEAKED).versions == 1
        assert find_broken(store, contents) == set()
        assert store.verify().damage == ()


@pytest.mark.parametrize(
    "point", ["gc.uncatalogued", "purge.withdrawn", "purge.container", "purge.put", "purge.renewed"]
)
def test_purge_cut_short_is_completed_by_the_next(tmp_path: Path, point: str) -> None:
    """F.4: Wherever a purge fails, all other versions restore, and the next one completes it."""
    clock = Clock()
    with open_store(tmp_path / "s", settings=PLAIN, clock=clock, create=True) as store:
        contents = put_history(store, clock, 0)
        store.put("whole", SECRET[::-1] * 20)
        store.delete("whole")
        del contents["k", LEAKED]
        store.delete("k", LEAKED)
        clock.now += 1
        failpoints.arm(f"{point}:1:error")
        try:
            with pytest.raises(StoreUnavailable):
                store.purge()
        finally:
            failpoints.disarm()
        store._containers.evict()
        assert find_broken(store, contents) == set()
        store.purge()
        check_deleted(store, contents)


def test_index_names_no_container_that_a_purge_removes(tmp_path: Path) -> None:
    """F.32: A purge that fails after its first deletion leaves no entry of a removed container (I1)."""
    with open_store(tmp_path / "s", settings=PLAIN, create=True) as store:
        store.put("stays", random_bytes(60_000, 8))
        store.put("k", SECRET * 10)
        store.delete("k")
        failpoints.arm("purge.container:1:error")
        try:
            with pytest.raises(StoreUnavailable):
                store.purge()
        finally:
            failpoints.disarm()
        store._containers.evict()
        existing = {int(container) for container, _ in store._containers.ids()}
        for table in ("chunks", "segments"):
            rows = store._index.read(partial(list_locations, table))
            assert {int(container) for places in rows for container in places.containers} == existing


def list_locations(table: str, index: LmdbIndex) -> list[Locations]:
    return [locations for _, locations in index.rows(table)]


def test_purge_during_a_put_is_refused(tmp_path: Path) -> None:
    """F.4: An active put may refer to data that are still unneeded: nothing is removed during it (I6)."""
    with open_store(tmp_path / "s", settings=PLAIN, create=True) as store:
        store.put("a", b"first")
        store.delete("a")
        waiting, go_on = threading.Event(), threading.Event()

        def items() -> Iterator[tuple[str, bytes]]:
            waiting.set()
            go_on.wait(30)
            yield "b", b"second"

        thread = threading.Thread(target=lambda: list(store.put_many(items())))
        thread.start()
        waiting.wait(30)
        with pytest.raises(StoreLocked):
            store.purge("a")
        go_on.set()
        thread.join()
        assert store.purge("a").versions == 1
        assert store.get("b").read() == b"second"


def test_purge_during_another_writer_is_refused(tmp_path: Path) -> None:
    """F.4: While another process, or another Store, holds the writer lock nothing is removed."""
    with (
        open_store(tmp_path / "s", settings=PLAIN, create=True) as writer,
        open_store(tmp_path / "s", settings=PLAIN, create=True) as other,
    ):
        writer.put("a", b"first")
        writer.delete("a")
        with pytest.raises(StoreLocked):
            other.purge("a")
        assert writer.undelete("a") == 1


def test_purge_while_gc_is_paused_is_refused(tmp_path: Path) -> None:
    """F.4: A pause applies to `gc --now` as to every GC run."""
    with open_store(tmp_path / "s", settings=PLAIN, create=True) as store:
        store.put("a", b"first")
        store.delete("a")
        store.pauses.pause("somebody")
        with pytest.raises(GcPaused):
            store.purge()


def test_purge_respects_retention(tmp_path: Path) -> None:
    """F.4: Retained data cannot be purged: `rm --now` deletes first."""
    kept = settings(PLAIN, {"retention": {"min_age_seconds": 3600}})
    with open_store(tmp_path / "s", settings=kept, create=True) as store:
        store.put("a", b"first")
        with pytest.raises(RetentionActive):
            store.delete("a")
        with pytest.raises(NotFound):
            store.purge("a")


def run(root: Path, *words: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "nearkin.cli", "--store", str(root), *words]
    return subprocess.run(command, capture_output=True, text=True, input=stdin, timeout=60, check=False)


def test_rm_now_asks_or_requires_yes(tmp_path: Path) -> None:
    """F.4: Without a terminal `rm --now` and `gc --now` require `--yes`; with it the bytes are deleted at exit."""
    root = tmp_path / "s"
    with open_store(root, settings=PLAIN, create=True) as store:
        store.put("a", SECRET)
        store.put("b", b"stays")
    for words in (["rm", "a", "--now"], ["gc", "--now"], ["rm", "a", "--yes"]):
        refused = run(root, *words)
        assert refused.returncode != 0
        assert "--yes" in refused.stderr
    assert traces(root)
    done = run(root, "rm", "a", "--now", "--yes")
    assert done.returncode == 0, done.stderr
    assert "freed" in done.stdout
    assert traces(root) == []
    assert run(root, "get", "b").stdout == "stays"


def test_rm_now_of_an_earlier_deletion_purges_it(tmp_path: Path) -> None:
    """F.4: A version that `rm` deleted before is purged by `rm --now`."""
    root = tmp_path / "s"
    with open_store(root, settings=PLAIN, create=True) as store:
        store.put("a", SECRET)
        store.delete("a")
    assert run(root, "rm", "a", "--now", "--yes").returncode == 0
    assert traces(root) == []
    assert run(root, "rm", "none", "--now", "--yes").returncode != 0


def test_rm_now_through_a_gateway_names_the_remedy(tmp_path: Path) -> None:
    """F.4: A gateway holds the writer lock of its store: the refusal names the remedy."""
    command = [sys.executable, "-m", "nearkin.cli", "--server", "http://127.0.0.1:9", "rm", "a", "--now", "--yes"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode != 0
    assert "on its host" in done.stderr


def test_purge_of_a_joined_chunk_keeps_its_referrers(tmp_path: Path) -> None:
    """F.4: Chunks that a GC run joined with purged ones are stored on their own."""
    clock = Clock()
    with open_store(tmp_path / "s", settings=GATHERING, clock=clock, create=True) as store:
        contents = put_history(store, clock, 2)
        everyones = store._containers.of(None)
        assert any(np.any(everyones.directory(c).chunks.ranks >= 253) for c, _ in everyones.ids())
        for number in range(1, 8):
            store.delete("k", number)
            del contents["k", number]
        clock.now += 1
        store.purge()
        check_deleted(store, contents)


def test_purge_through_services_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """F.4: A store of services refuses a purge: their puts hold no lock of this store."""
    from nearkin_maintenance.gc.mark import LiveSet

    with open_store(tmp_path / "s", settings=PLAIN, create=True) as store:
        store.put("a", SECRET)
        store.put("b", b"stays")
        store.delete("a")
        real = LiveSet.__init__

        def by_services(self: LiveSet, *given: Any, **named: Any) -> None:
            real(self, *given, **named)
            self.by_services = "manifests/xx"

        monkeypatch.setattr(LiveSet, "__init__", by_services)
        with pytest.raises(BadInput, match="services"):
            store.purge("a")
        monkeypatch.undo()
        assert traces(store.root)

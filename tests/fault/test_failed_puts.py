"""A put that fails leaves nothing of its own: neither containers nor entries of the index."""

from __future__ import annotations

import io
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from typing_extensions import Buffer

from nearkin import open_store
from nearkin.embedded import runner as embedded_runner
from nearkin.lab.generated_data import mutate, random_bytes, text_like
from nearkin.store import Item, Store
from nearkin_shared.errors import BadInput, StoreUnavailable
from nearkin_shared.utils import failpoints
from tests.support.checks import inspection
from tests.support.data.stores import SMALL, containers, settings

CHOSEN = settings(SMALL, {"container": {"target_bytes": 1 << 20}, "runner": {"batch_bytes": 2 << 20}})
EARLIER = text_like(400_000, 1)
CONTENT = random_bytes(6 << 20, 2)
LATER = mutate(EARLIER, 3, edits=20)


WAIT_SECONDS = 30.0


class SlowEnd(io.BytesIO):
    """Source that yields the whole content, and waits for a new container before it ends, or fails."""

    def __init__(self, root: Path, failure: BaseException | None = None) -> None:
        super().__init__(CONTENT)
        self._failure, self._root, self._before = failure, root, len(containers(root))

    def _check(self) -> None:
        if self.tell() < len(CONTENT):
            return
        deadline = time.monotonic() + WAIT_SECONDS
        while len(containers(self._root)) == self._before and time.monotonic() < deadline:
            time.sleep(0.002)
        if self._failure is not None:
            raise self._failure

    def read(self, size: int | None = -1, /) -> bytes:
        self._check()
        return super().read(size)

    def readinto(self, buffer: Buffer, /) -> int:
        self._check()
        return super().readinto(buffer)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with open_store(tmp_path / "s", settings=CHOSEN, create=True) as opened:
        opened.put("earlier", EARLIER)
        yield opened


def check_only_earlier(store: Store, before: list[Path]) -> None:
    """Check files, index and versions; then that the same content, and later versions of earlier keys, can be put."""
    assert containers(store.root) == before
    assert [info.key for info in store.versions(all_versions=True)] == ["earlier"]
    index = store._index.writable()
    assert set(index.container_ids().tolist()) == {int(path.name[:16], 16) for path in before}
    assert store.verify().damage == ()
    store.put("content", CONTENT)
    store.put("earlier", LATER)
    assert store.get("content").read() == CONTENT
    assert store.get("earlier").read() == LATER
    assert store.verify().damage == ()
    inspection.check_no_orphans(store)


def test_put_with_failed_source_leaves_no_container(store: Store) -> None:
    """F.3: A put that fails with any error removes the containers it wrote."""
    before = containers(store.root)
    with pytest.raises(Exception, match="source"):
        store.put("content", SlowEnd(store.root, OSError("the source broke")))
    check_only_earlier(store, before)


def test_put_with_wrong_digest_leaves_no_container(store: Store) -> None:
    """F.3: A put whose content has another digest than the caller states leaves nothing."""
    before = containers(store.root)
    with pytest.raises(BadInput):
        store.put("content", SlowEnd(store.root), sha256=bytes(32))
    check_only_earlier(store, before)


@pytest.mark.parametrize("point", ["put.container", "put.published", "commit.begun", "index.writing"])
def test_put_failed_at_step_leaves_no_container(store: Store, point: str) -> None:
    """F.3: Whichever step fails, durable and published containers are withdrawn from the index, then removed."""
    before = containers(store.root)
    failpoints.arm(f"{point}:1:error")
    try:
        with pytest.raises(StoreUnavailable):
            store.put("content", CONTENT)
    finally:
        failpoints.disarm()
    check_only_earlier(store, before)


def test_put_failed_after_a_manifest_keeps_its_containers(store: Store) -> None:
    """F.3: A version that was committed before the put failed keeps all that it refers to."""
    failpoints.arm("commit.manifest:1:error")
    try:
        with pytest.raises(StoreUnavailable):
            store.put("content", CONTENT)
    finally:
        failpoints.disarm()
    assert store.get("content").read() == CONTENT
    assert store.verify().damage == ()


def test_put_many_failed_late_keeps_committed_groups(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """F.3: Of many blobs the reported ones stay; only later data are removed."""
    monkeypatch.setattr(embedded_runner, "GROUP_BLOBS_MAX", 100)
    many = [Item(f"k{number:03}", random_bytes(3_000, number)) for number in range(250)]
    reported = set[str]()
    results = store.put_many([*many, Item("last", CONTENT, sha256=bytes(32))])
    with pytest.raises(BadInput):
        reported.update(result.info.key for result in results)
    assert reported
    for item in many:
        if item.key in reported:
            assert store.get(item.key).read() == item.source
    assert store.verify().damage == ()
    inspection.check_no_orphans(store)


def test_interrupted_put_keeps_containers_for_resumption(store: Store) -> None:
    """F.3: The containers of an interrupted put serve its repetition."""
    before = containers(store.root)
    with pytest.raises(KeyboardInterrupt):
        store.put("content", SlowEnd(store.root, KeyboardInterrupt()))
    assert len(containers(store.root)) > len(before)
    assert store.put("content", CONTENT).ledger.stored_bytes < len(CONTENT)
    assert store.get("content").read() == CONTENT


def test_failed_put_during_a_gc_run_leaves_removal_to_gc(store: Store) -> None:
    """F.3: A GC run depends on the containers that it listed: none is removed during it."""
    from nearkin.local.process_lock import GC_LOCK_NAME, WriterLock

    before = containers(store.root)
    runs = WriterLock(store.root, "lock.round")
    runs.acquire(what=GC_LOCK_NAME)
    try:
        with pytest.raises(BadInput):
            store.put("content", SlowEnd(store.root), sha256=bytes(32))
    finally:
        runs.release()
    assert len(containers(store.root)) > len(before)
    assert store.verify().damage == ()

"""Test restores from a distant store: concurrent bounded reads, and the same bytes."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from nearkin import open_store
from nearkin.lab.generated_data import mutate, text_like
from nearkin_shared.errors import Corrupt, StoreUnavailable
from nearkin_shared.objectstore.base import Payload
from nearkin_shared.objectstore.local import LocalObjectStore
from nearkin_shared.reading import read_ahead as module
from nearkin_shared.reading import restore
from nearkin_shared.reading.read_plan import BlockName
from nearkin_shared.reading.restore import VersionReader
from nearkin_shared.storage.containers import ContainerStore
from tests.support.data.stores import settings

SMALL = {"block": {"raw_bytes": "256KiB", "delta_bytes": "64KiB"}, "container": {"target_bytes": "512KiB"}}


class Far(LocalObjectStore):
    """A local store whose reads take as long as those of one that is far."""

    far = True

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.now = self.most = self.reads = 0
        self.fails = 0
        self._lock = threading.Lock()

    def get_ranges(self, name: str, starts: Sequence[int], ends: Sequence[int]) -> Sequence[Payload]:
        with self._lock:
            self.reads += 1
            self.now += 1
            self.most = max(self.most, self.now)
            failing = self.fails > 0 and threading.current_thread().name.startswith("nearkin-ahead")
            self.fails -= failing
        try:
            time.sleep(0.003)
            if failing:
                raise StoreUnavailable(f"{name}: away")
            return super().get_ranges(name, starts, ends)
        finally:
            with self._lock:
                self.now -= 1


@pytest.fixture(scope="module")
def far_history(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[bytes]]:
    root = tmp_path_factory.mktemp("far") / "s"
    versions = [text_like(9_000_000, 1)]
    for number in range(1, 4):
        versions.append(mutate(versions[-1], number, edits=300, edit_bytes_max=4000))
    with open_store(root, settings=settings(SMALL), create=True) as store:
        for data in versions:
            store.put("k", data)
    return root, versions


def restored(
    root: Path, objects: LocalObjectStore, version: int, start: int = 0, stop: int | None = None
) -> VersionReader:
    with open_store(root, settings=settings(SMALL), read_only=True) as store:
        of = store.get("k", version)
        containers = ContainerStore(objects, store._fingerprinter.domain, 32 << 20)
        end = of.info.size_bytes if stop is None else stop
        return VersionReader(of.info, of._reader._manifest, containers.counting(), store._fingerprinter, start, end)


@pytest.mark.parametrize("version", [1, 4])
def test_blocks_are_read_side_by_side_and_each_once(far_history: tuple[Path, list[bytes]], version: int) -> None:
    root, versions = far_history
    objects = Far(root)
    blob = restored(root, objects, version)
    assert b"".join(blob.pieces()) == versions[version - 1]
    assert 2 < objects.most <= module.THREADS
    assert blob.costs.block_reads == blob.costs.blocks_decoded
    near = restored(root, LocalObjectStore(root), version)
    assert b"".join(near.pieces()) == versions[version - 1]
    assert blob.costs.block_reads == near.costs.block_reads
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("nearkin-ahead")]


def test_range_requests_little_more_than_needed(far_history: tuple[Path, list[bytes]]) -> None:
    root, versions = far_history
    far = restored(root, Far(root), 4, 2_000_000, 7_500_000)
    assert b"".join(far.pieces()) == versions[3][2_000_000:7_500_000]
    near = restored(root, LocalObjectStore(root), 4, 2_000_000, 7_500_000)
    b"".join(near.pieces())
    whole = restored(root, LocalObjectStore(root), 4)
    b"".join(whole.pieces())
    assert near.costs.block_reads <= far.costs.block_reads <= whole.costs.block_reads


def test_waiting_reads_are_bounded(far_history: tuple[Path, list[bytes]], monkeypatch: pytest.MonkeyPatch) -> None:
    root, versions = far_history
    monkeypatch.setattr(module, "AHEAD_BYTES_MAX", 300_000)
    most = 0
    plain = module.ReadAhead._request_block

    def record_request(ahead: module.ReadAhead, key: BlockName) -> None:
        nonlocal most
        plain(ahead, key)
        most = max(most, ahead._requested_bytes)

    monkeypatch.setattr(module.ReadAhead, "_request_block", record_request)
    assert b"".join(restored(root, Far(root), 4).pieces()) == versions[3]
    assert 0 < most < 300_000 + 300_000  # one more may pass the bound


def test_blocks_of_other_readers_use_no_budget(
    far_history: tuple[Path, list[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Do not charge the read-ahead for blocks that another reader fetched."""
    root, versions = far_history
    monkeypatch.setattr(module, "AHEAD_BYTES_MAX", 200_000)  # two blocks
    data = versions[0]
    with open_store(root, settings=settings(SMALL), read_only=True) as store:
        of, objects = store.get("k", 1), Far(root)
        containers = ContainerStore(objects, store._fingerprinter.domain, 64 << 20)

        def blob(stop: int) -> VersionReader:
            return VersionReader(of.info, of._reader._manifest, containers.counting(), store._fingerprinter, 0, stop)

        monkeypatch.setattr(restore, "BATCH_BYTES", 500_000)
        pieces = blob(len(data)).pieces()
        got = [next(pieces)]
        assert b"".join(blob(4_000_000).pieces()) == data[:4_000_000]
        objects.most = 0
        got += pieces
    assert b"".join(got) == data
    assert objects.most > 1  # the rest was read side by side again


def test_failed_read_ahead_is_repeated(far_history: tuple[Path, list[bytes]]) -> None:
    root, versions = far_history
    objects = Far(root)
    objects.fails = 12
    assert b"".join(restored(root, objects, 4).pieces()) == versions[3]
    assert objects.fails == 0


def test_damage_ahead_is_raised_after_its_prefix(far_history: tuple[Path, list[bytes]], tmp_path: Path) -> None:
    root, versions = far_history
    broken = tmp_path / "broken"
    for path in sorted(root.rglob("*")):
        if path.is_file() and "index" not in path.parts:
            (broken / path.relative_to(root)).parent.mkdir(parents=True, exist_ok=True)
            (broken / path.relative_to(root)).write_bytes(path.read_bytes())
    last = max((broken / "containers").rglob("*.nkc"), key=lambda path: path.name)
    data = bytearray(last.read_bytes())
    data[200] ^= 1
    last.write_bytes(data)
    blob, got = restored(broken, Far(broken), 4), bytearray()
    with pytest.raises(Corrupt):
        got.extend(byte for piece in blob.pieces() for byte in piece)
    assert bytes(got) == versions[3][: len(got)]


def test_leaving_reader_ends_the_threads(far_history: tuple[Path, list[bytes]]) -> None:
    root, _ = far_history
    pieces = restored(root, Far(root), 4).pieces()
    next(pieces)
    pieces.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("nearkin-ahead")]

"""A sync that fails once and then "succeeds": the kernel then considers the lost data written."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nearkin_shared.errors import StoreUnavailable
from nearkin_shared.objectstore.base import AlreadyExists
from nearkin_shared.objectstore.local import LocalObjectStore
from tests.support.fakes.power_loss_disk import Disk, RecordingOs, Step, recording

NAME, DATA = "containers/00/x.nkc", b"d" * 5000
OTHER = "containers/00/y.nkc"


def syncs_of(root: Path, action: Callable[[LocalObjectStore], None]) -> list[int]:
    """Return the numbers of the mutating calls of an action that are syncs."""
    root.mkdir()
    numbers = []
    with recording(root) as layer:
        fsync = layer.fsync

        def record(descriptor: int) -> None:
            fsync(descriptor)
            numbers.append(layer.calls)

        layer.fsync = record  # type: ignore[method-assign]
        action(LocalObjectStore(root))
    return numbers


def retry(layer: RecordingOs, action: Callable[[], None]) -> int:
    """Repeat an action until it succeeds; return the number of failures."""
    for failures in range(3):
        try:
            action()
        except StoreUnavailable:
            assert layer.has_failed
        else:
            return failures
    raise AssertionError("an action failed three times, and one call to the disk did")


def worlds(steps: list[Step]) -> Iterator[dict[str, bytes | None]]:
    """Yield the folders that a power cut at the end may leave."""
    disk = Disk({})
    for step in steps:
        disk.apply(step)
    yield from disk.worlds()


def put(objects: LocalObjectStore) -> None:
    """Put an object; an existing one with the same bytes counts as success, as for a retry."""
    try:
        objects.put_new(NAME, DATA)
    except AlreadyExists:
        assert objects.get(NAME) == DATA


def test_put_after_failed_sync_is_durable(tmp_path: Path) -> None:
    """F.32: Whichever sync of a put fails once, the put fails, and data acknowledged by its repetition are durable."""
    numbers = syncs_of(tmp_path / "all", put)
    assert len(numbers) >= 4  # folders, the file, its folder
    for number in numbers:
        root = tmp_path / str(number)
        root.mkdir()
        with recording(root, number, errno.EIO) as layer:
            objects = LocalObjectStore(root)
            assert retry(layer, lambda: put(objects)) == 1  # noqa: B023
            assert objects.get(NAME) == DATA
        found = list(worlds(layer.steps))
        assert all(world.get(NAME) == DATA for world in found), f"sync at call {number}"


def test_put_after_failed_folder_sync_shows_no_object(tmp_path: Path) -> None:
    """F.32: A put whose name could not be made durable leaves no name, which others would consider durable."""
    numbers = syncs_of(tmp_path / "all", put)
    root = tmp_path / "s"
    root.mkdir()
    with recording(root, numbers[-1], errno.EIO):
        objects = LocalObjectStore(root)
        with pytest.raises(StoreUnavailable):
            objects.put_new(NAME, DATA)
        assert list(objects.names("containers")) == []


def test_object_that_exists_is_durable_before_it_is_reported(tmp_path: Path) -> None:
    """F.32: Before a caller learns that an object exists, its name is durable, whichever process made it."""
    tmp_path.joinpath("s").mkdir()
    with recording(tmp_path / "s") as layer:
        objects = LocalObjectStore(tmp_path / "s")
        objects.put_new(OTHER, DATA)
        (tmp_path / "s" / "tmp").mkdir(exist_ok=True)
        descriptor = layer.open(tmp_path / "s" / NAME, 0o101)  # another writer's, before it syncs the folder
        layer.writev(descriptor, [DATA])
        layer.fsync(descriptor)
        layer.close(descriptor)
        with pytest.raises(AlreadyExists):
            objects.put_new(NAME, DATA)
    assert all(world.get(NAME) == DATA for world in worlds(layer.steps))


def test_delete_after_failed_sync_syncs_again(tmp_path: Path) -> None:
    """F.32: A removal that could not be made durable fails, and its repetition syncs the folder."""

    def put_and_delete(objects: LocalObjectStore) -> None:
        put(objects)
        objects.delete(NAME)

    number = syncs_of(tmp_path / "all", put_and_delete)[-1]
    root = tmp_path / "s"
    root.mkdir()
    with recording(root, number, errno.EIO) as layer:
        objects = LocalObjectStore(root)
        put(objects)
        assert retry(layer, lambda: objects.delete(NAME)) == 1
    assert layer.steps[-1] == Step("sync-folder", "containers/00")

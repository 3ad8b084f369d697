"""Write several new objects at a time.

Invariant: each object is created as `put_new` creates it: whole, durable, and only if its name is free.

In a folder the steps of `put_new` are taken for all objects one after another:

    1 make folders  2 write all  3 sync all files  4 link all names  5 sync all folders

The file system writes its journal once for all syncs of a step, in place of three times an object.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from typing import TypeVar

from nearkin_shared.errors import StoreUnavailable
from nearkin_shared.objectstore.base import AlreadyExists, ObjectStore, Payload, unavailable
from nearkin_shared.objectstore.local import LocalObjectStore, sync_folder, write_all
from nearkin_shared.objectstore.parity import ParityObjectStore
from nearkin_shared.utils.failpoints import failpoint
from nearkin_shared.utils.private_files import FILE_MODE

PARTS = 32
"""Syncs, or requests, that wait at a time: as many as the executors of the callers have threads. They cost no CPU while
they wait, and the journal takes all that wait in one write."""
GROUP_OBJECTS_MAX = 256
"""Files that are open at a time: a process may usually have 1,024."""

Item = TypeVar("Item")
Items = Sequence[tuple[str, Payload]]


def put_new_many(objects: ObjectStore, items: Items, threads: Executor) -> list[bool]:
    """Write (name, bytes) each, of different names; return which were created, in order.

    Waits for all. Raises StoreUnavailable if one of them could not be written.
    """
    folder = _folder_of(objects)
    if folder is None or len(items) < 2:
        return put_each(objects, items, threads)
    created = list[bool | None]()
    for start in range(0, len(items), GROUP_OBJECTS_MAX):
        created += put_in_folder(folder, items[start : start + GROUP_OBJECTS_MAX], threads)
    left = [number for number, made in enumerate(created) if made is None]
    written = dict(zip(left, put_each(objects, [items[number] for number in left], threads), strict=True))
    return [written[number] if made is None else made for number, made in enumerate(created)]


def _folder_of(objects: ObjectStore) -> LocalObjectStore | None:
    """Return the folder of the objects; None if a wrapper adds parity or encrypts them."""
    if type(objects) is ParityObjectStore and not objects.adds:
        objects = objects.inner
    return objects if type(objects) is LocalObjectStore else None


def put_each(objects: ObjectStore, items: Items, threads: Executor) -> list[bool]:
    """Write each object by `put_new`, several at a time. Results and errors as `put_new_many`."""
    created = [False] * len(items)

    def put(number: int) -> None:
        with suppress(AlreadyExists):
            objects.put_new(*items[number])
            created[number] = True

    _each(put, range(len(items)), threads)
    return created


def put_in_folder(folder: LocalObjectStore, items: Items, threads: Executor) -> list[bool | None]:
    """Write objects to a folder; None for those that `put_new` has to write, or to report.

    Raises StoreUnavailable if a name could not be made durable.
    """
    failpoint("group.begun")
    temporaries: dict[int, str] = {}
    finals: dict[int, str] = {}
    opened: dict[int, int] = {}
    """Descriptors of written files: one that is opened again would not report an earlier error of writing back."""
    above, ready = dict[str, None](), set[str]()
    try:
        scratch = folder.scratch_paths(len(items))
    except OSError:
        return [None] * len(items)
    try:
        for number, (name, data) in enumerate(items):
            with suppress(OSError, StoreUnavailable):
                final, unsynced = folder.prepare_group(name, ready)  # 1
                temporaries[number] = scratch[number]
                opened[number] = _create(temporaries[number])
                write_all(opened[number], [data])  # 2
                finals[number] = final
                above.update(dict.fromkeys(unsynced))
        try:
            _each(os.fsync, [opened[number] for number in finals], threads)  # 3
        except OSError:
            return [None] * len(items)
        failpoint("group.synced")
        created = _link_all(folder, temporaries, finals, len(items))  # 4
        _sync_folders(list(above), [finals[number] for number in finals if created[number]], threads)  # 5
        failpoint("group.durable")
    except OSError as err:
        raise unavailable(items[0][0], err) from err
    finally:
        for descriptor in opened.values():
            os.close(descriptor)
        for temporary in temporaries.values():
            with suppress(OSError):
                os.unlink(temporary)
    return created


def _link_all(
    folder: LocalObjectStore, temporaries: dict[int, str], finals: dict[int, str], count: int
) -> list[bool | None]:
    created: list[bool | None] = [None] * count
    for number, final in finals.items():
        try:
            folder.link(temporaries[number], final)
            created[number] = True
        except FileExistsError:
            created[number] = False
        except OSError:  # `put_new` tries again: another process may have swept the scratch folder
            continue
    return created


def _create(path: str) -> int:
    """Create a file for writing; return its descriptor."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, FILE_MODE)


def _sync_folders(folders: Sequence[str], created: Sequence[str], threads: Executor) -> None:
    """Sync folders; remove the created names if that fails, as `put_new` does. Raises OSError."""
    try:
        _each(sync_folder, folders, threads)
    except OSError:
        # A later sync may succeed without writing what this one could not: a new name is written by it.
        for final in created:
            with suppress(OSError):
                os.unlink(final)
        raise


def _each(work: Callable[[Item], None], items: Iterable[Item], threads: Executor) -> None:
    """Do work for each item, in PARTS threads; wait for all, and raise the first failure."""
    given = list(items)

    def do(part: int) -> BaseException | None:
        failure: BaseException | None = None
        for item in given[part::PARTS]:
            try:
                work(item)
            except Exception as err:
                failure = failure or err
        return failure

    failures = [found for found in threads.map(do, range(min(PARTS, len(given)))) if found is not None]
    if failures:
        raise failures[0]

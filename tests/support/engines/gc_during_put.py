"""Do GC runs during puts.

Invariant: acknowledged data restore, whatever a concurrent GC run was about to free.

    k 1   A X B      deleted, X pending delete and due, A and B live: the container is to be rewritten without X
    k 2   A Y B
    k 3   A x B      put meanwhile: A is a duplicate, and X, the stream neighbour of A, is the best base for x

a put of the same Store, of another one      at each step of a GC run
a second GC run                              refused (StoreLocked)
a rebuild of the index                       names and counts the data that exist when the run has ended
"""

from __future__ import annotations

from pathlib import Path

from nearkin.lab.generated_data import mutate, random_bytes, text_like
from nearkin.store import Store
from nearkin_shared.errors import StoreLocked
from tests.support.engines.model import DAY, Violation
from tests.support.engines.races import Scene, at_each_step, scene

NEIGHBOUR_BYTES, DEAD_BYTES = 40_000, 60_000


def _contents() -> tuple[bytes, bytes, bytes]:
    left, right = random_bytes(NEIGHBOUR_BYTES, 11), random_bytes(NEIGHBOUR_BYTES, 12)
    dead = text_like(DEAD_BYTES, 13)
    return (
        left + dead + right,
        left + random_bytes(DEAD_BYTES, 14) + right,
        left + mutate(dead, 15, edits=20) + right,
    )


def neighbours(folder: Path) -> Scene:
    """Make the store in which dead chunks are next to live ones."""
    made = Scene(folder / "s")
    one, second, _ = _contents()
    with made.open() as store:
        store.put("k", one)
        store.put("k", second)
        store.delete("k", 1)
        made.now += 2 * DAY
        store.gc()
        if not store.gc_state().pending_delete_containers:
            raise Violation("nothing is pending delete: the scene tests nothing")
        made.now += 2 * DAY
    made.expected = {("k", 2): second}
    return made


def _read(_: Scene, store: Store) -> None:
    if store.get("k", 2).read() != _contents()[1]:  # directories and blocks are in this Store's caches from here on
        raise Violation("other bytes before the GC run")


def _collect(_: Scene, store: Store) -> None:
    store.gc()


def _put_dependent(made: Scene, store: Store) -> None:
    third = _contents()[2]
    made.expected["k", store.put("k", third).info.version] = third


def put_during_gc(folder: Path, every: int = 1) -> int:
    """Put data that depend on dead chunks, with the store's lock, by the same Store, at each step of a GC run."""

    def first(made: Scene, store: Store) -> None:
        made.expected["a", store.put("a", b"takes the lock").info.version] = b"takes the lock"
        _read(made, store)

    return at_each_step(folder, _collect, _put_dependent, every=every, make=neighbours, first=first)


def put_from_elsewhere(folder: Path, every: int = 1) -> int:
    """Do the same by another Store, with a lock, an index and caches of its own, as another process has."""

    def other(made: Scene, _: Store) -> None:
        with made.open() as elsewhere:
            _put_dependent(made, elsewhere)

    return at_each_step(folder, _collect, other, every=every, make=neighbours, first=_read)


def second_gc_run(folder: Path, every: int = 1) -> int:
    """Start a second GC run, by another Store, at each step of a run: it is refused."""

    def other(made: Scene, _: Store) -> None:
        with made.open() as elsewhere:
            try:
                elsewhere.gc()
            except StoreLocked:
                return
        raise Violation("two GC runs were active")

    return at_each_step(folder, _collect, other, every=every, make=neighbours, first=_read)


def rebuild_during_gc(folder: Path, every: int = 1) -> int:
    """Rebuild the index by another Store, at each step of a GC run that removes versions."""

    def other(made: Scene, _: Store) -> None:
        with made.open() as elsewhere:
            elsewhere.rebuild_index()

    return at_each_step(folder, _collect, other, every=every, make=scene)

"""Test records that are replaced while another process reads or writes them.

None appears absent.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from nearkin_shared.errors import StoreUnavailable
from nearkin_shared.formats.pending_delete_record import PendingDelete
from nearkin_shared.objectstore.base import AlreadyExists, Payload
from nearkin_shared.objectstore.obstore_adapter import ObstoreObjectStore, memory_objects
from nearkin_shared.storage.pending_delete_watch import PendingDeleteWatcher
from nearkin_shared.storage.pending_deletes import PendingDeleteStore
from nearkin_shared.storage.quarantine import Quarantine
from nearkin_shared.storage.scrub_progress import ScrubState, ScrubStates
from nearkin_shared.storage.versioned_record import READ_TRIES_MAX

NONE = np.zeros(0, np.uint32)
A, B, C, D = ((1 << 40) + number for number in range(4))
"""Containers."""


class Meanwhile(ObstoreObjectStore):
    """An object store that changes between a listing and the read after it."""

    def __init__(self, inner: ObstoreObjectStore, happens: Callable[[], None], times: int = 1) -> None:
        super().__init__(inner._client)
        self._happens, self.times = happens, times

    def get(self, name: str) -> bytes:
        if self.times:
            self.times -= 1
            self._happens()
        return super().get(name)


def entry(at_us: int, *chunks: int) -> PendingDelete:
    return PendingDelete(at_us, np.array(chunks, np.uint32), NONE, False)


def test_writer_reading_a_replaced_record_sees_the_new_one() -> None:
    """A GC run replaces the record meanwhile."""
    objects = memory_objects()
    maintenance = PendingDeleteStore(objects)
    maintenance.replace({A: entry(5, 0)})
    changing = Meanwhile(objects, lambda: maintenance.replace({A: entry(5, 0), B: entry(6, 3)}))
    watch = PendingDeleteWatcher(PendingDeleteStore(changing), 3600.0)
    assert sorted(watch.record()) == [A, B]
    assert not changing.times


def test_record_removed_without_replacement_is_none() -> None:
    objects = memory_objects()
    maintenance = PendingDeleteStore(objects)
    maintenance.replace({A: entry(5, 0)})
    assert PendingDeleteStore(Meanwhile(objects, lambda: maintenance.replace({}))).read() == {}


def test_records_replaced_repeatedly_are_a_transient_error() -> None:
    """The record never appears absent."""
    objects = memory_objects()
    maintenance = PendingDeleteStore(objects)
    maintenance.replace({A: entry(5, 0)})
    changing = Meanwhile(objects, lambda: maintenance.replace({A: entry(5, 0)}), READ_TRIES_MAX)
    with pytest.raises(StoreUnavailable, match="try again"):
        PendingDeleteStore(changing).read()


def test_quarantine_read_during_replacement_is_complete() -> None:
    objects = memory_objects()
    other = Quarantine(objects, lambda: 1.0)
    other.note({A: np.array([4], np.uint32)}, {}, everything=False)
    mine = Quarantine(
        Meanwhile(objects, lambda: other.note({B: np.array([7], np.uint32)}, {}, everything=False)), lambda: 2.0
    )
    mine.note({C: None}, {}, everything=False)
    assert sorted(Quarantine(objects, lambda: 3.0).read()) == [A, B, C]


def test_of_two_quarantine_writers_one_fails_and_none_loses() -> None:
    objects = memory_objects()
    other = Quarantine(objects, lambda: 1.0)
    other.note({A: np.array([4], np.uint32)}, {}, everything=False)

    class Late(ObstoreObjectStore):
        def put_new(self, name: str, *parts: Payload) -> None:
            other.note({B: np.array([7], np.uint32)}, {}, everything=False)
            other.note({D: np.array([7], np.uint32)}, {}, everything=False)
            super().put_new(name, *parts)

    mine = Quarantine(Late(objects._client), lambda: 2.0)
    with pytest.raises(AlreadyExists, match="another writer"):
        mine.note({C: None}, {}, everything=False)
    mine = Quarantine(objects, lambda: 2.0)
    mine.note({C: None}, {}, everything=False)
    assert sorted(mine.read()) == [A, B, C, D]
    assert len(mine.list_records()) == 1


def test_scrub_progress_is_read_during_replacement() -> None:
    objects = memory_objects()
    states = ScrubStates(objects)
    states.write(ScrubState(begun_us=1))
    changing = ScrubStates(Meanwhile(objects, lambda: states.write(ScrubState(begun_us=2))))
    assert changing.read().begun_us == 2

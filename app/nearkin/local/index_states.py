"""States of the index of an open local store, and the events that change them.

Three regions change side by side; docs/internals/local-index.md has the pictures.

    lock      whether this Store holds the writer lock, for what, and what it has announced
    backlog   whether the index may lack data that a put of this Store has stored
    notes     whether the index may have notes of deletions that failed

Invariant: an event that a region's table does not list for its state raises IllegalTransition and changes no region.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from enum import Enum, auto
from typing import TypeVar

State = TypeVar("State")


class IllegalTransition(RuntimeError):
    """Internal error: an event in a state in which it cannot happen."""


class LockState(Enum):
    """State of the writer lock and of what the index and the store record about this Store."""

    UNLOCKED = auto()
    """The index, if one is open, is for reading."""
    WITHDRAWING = auto()
    """Held until broken entries are withdrawn."""
    STEP = auto()
    """Held for one exclusive section of a GC run, whose index is being completed."""
    STEP_CLAIMED = auto()
    """The section may change the store: all other indexes are invalid."""
    STEP_NOTED = auto()
    """The index records pending updates because of a note in the section."""
    LOCKED = auto()
    """Held until `close`; the index may be missing or incomplete."""
    ANNOUNCED = auto()
    """The index is complete and records pending updates; the store must not be changed yet."""
    CLAIMED = auto()
    """The store may be changed: all other indexes are invalid."""
    REOPENED = auto()
    """Claimed, but another index was opened since, which does not record pending updates yet."""


class IndexBacklog(Enum):
    """Data that this Store has put and the index may lack."""

    COMPLETE = auto()
    """None."""
    PUTTING = auto()
    """Those of the put in progress, which publishes them itself."""
    PUBLISHED = auto()
    """None; the put is still in progress."""
    BEHIND = auto()
    """Those of a writer that failed or died: the next writer catches up."""


class NotesState(Enum):
    """Notes of deletions in the index."""

    CURRENT = auto()
    UNCORRECTED = auto()
    """Notes of failed deletions could not be corrected: the index must keep its record of pending updates."""


class IndexEvent(Enum):
    """Event that may change the states."""

    WRITE_LOCKED = auto()
    """The lock was taken for writing, or is held already and is kept until `close` from now on."""
    WITHDRAWAL_LOCKED = auto()
    """The lock was taken for a withdrawal, or is held already."""
    STEP_LOCKED = auto()
    """The lock was taken for an exclusive section of a GC run."""
    OPENED = auto()
    """An index was opened for writing in place of the one before."""
    ANNOUNCED = auto()
    """The index records pending updates."""
    CLAIMED = auto()
    """Store and index have a new token, which no other index has."""
    NOTED = auto()
    """An exclusive section recorded pending updates, for a note."""
    REBUILT = auto()
    """The index was replaced by a rebuilt one."""
    UNLOCKED = auto()
    """The lock was released at the end of a section, or as its preparation failed."""
    RECOVERED = auto()
    """A reader completed the index during a withdrawal, for which the lock is held on."""
    CLOSED = auto()
    """Index and lock were released."""
    PUT_STARTED = auto()
    PUT_PUBLISHED = auto()
    """All data of the put in progress are in the index."""
    PUT_ENDED = auto()
    """No put is in progress: the last one ended, failed or did not start."""
    FOUND_PENDING = auto()
    """The opened index records pending updates of an earlier writer."""
    FOUND_COMPLETE = auto()
    """The opened index records none."""
    CAUGHT_UP = auto()
    """The index has all that is stored."""
    CORRECTION_FAILED = auto()
    """Notes of a failed deletion stayed in the index."""


_L, _B, _N, _E = LockState, IndexBacklog, NotesState, IndexEvent

LOCK_TRANSITIONS: Mapping[LockState, Mapping[IndexEvent, LockState]] = {
    _L.UNLOCKED: {
        _E.WRITE_LOCKED: _L.LOCKED,
        _E.WITHDRAWAL_LOCKED: _L.WITHDRAWING,
        _E.STEP_LOCKED: _L.STEP,
        _E.CLOSED: _L.UNLOCKED,
    },
    _L.WITHDRAWING: {
        _E.WRITE_LOCKED: _L.LOCKED,
        _E.WITHDRAWAL_LOCKED: _L.WITHDRAWING,
        _E.UNLOCKED: _L.UNLOCKED,
        _E.CLOSED: _L.UNLOCKED,
    },
    _L.STEP: {
        _E.OPENED: _L.STEP,
        _E.REBUILT: _L.STEP,
        _E.CLAIMED: _L.STEP_CLAIMED,
        _E.UNLOCKED: _L.UNLOCKED,
        _E.CLOSED: _L.UNLOCKED,
    },
    _L.STEP_CLAIMED: {
        _E.WRITE_LOCKED: _L.REOPENED,
        _E.NOTED: _L.STEP_NOTED,
        _E.UNLOCKED: _L.UNLOCKED,
        _E.CLOSED: _L.UNLOCKED,
    },
    _L.STEP_NOTED: {
        _E.WRITE_LOCKED: _L.REOPENED,
        _E.NOTED: _L.STEP_NOTED,
        _E.UNLOCKED: _L.UNLOCKED,
        _E.CLOSED: _L.UNLOCKED,
    },
    _L.LOCKED: {
        _E.WRITE_LOCKED: _L.LOCKED,
        _E.WITHDRAWAL_LOCKED: _L.LOCKED,
        _E.OPENED: _L.LOCKED,
        _E.REBUILT: _L.LOCKED,
        _E.ANNOUNCED: _L.ANNOUNCED,
        _E.UNLOCKED: _L.UNLOCKED,
        _E.CLOSED: _L.UNLOCKED,
    },
    _L.ANNOUNCED: {
        _E.WRITE_LOCKED: _L.ANNOUNCED,
        _E.WITHDRAWAL_LOCKED: _L.ANNOUNCED,
        _E.OPENED: _L.LOCKED,
        _E.REBUILT: _L.LOCKED,
        _E.CLAIMED: _L.CLAIMED,
        _E.RECOVERED: _L.WITHDRAWING,
        _E.CLOSED: _L.UNLOCKED,
    },
    _L.CLAIMED: {
        _E.WRITE_LOCKED: _L.CLAIMED,
        _E.WITHDRAWAL_LOCKED: _L.CLAIMED,
        _E.OPENED: _L.REOPENED,
        _E.REBUILT: _L.LOCKED,
        _E.CLOSED: _L.UNLOCKED,
    },
    _L.REOPENED: {
        _E.WRITE_LOCKED: _L.REOPENED,
        _E.WITHDRAWAL_LOCKED: _L.REOPENED,
        _E.OPENED: _L.REOPENED,
        _E.REBUILT: _L.LOCKED,
        _E.ANNOUNCED: _L.CLAIMED,
        _E.CLOSED: _L.UNLOCKED,
    },
}
BACKLOG_TRANSITIONS: Mapping[IndexBacklog, Mapping[IndexEvent, IndexBacklog]] = {
    _B.COMPLETE: {
        _E.PUT_STARTED: _B.PUTTING,
        _E.PUT_ENDED: _B.COMPLETE,
        _E.FOUND_PENDING: _B.BEHIND,
        _E.FOUND_COMPLETE: _B.COMPLETE,
        _E.CLOSED: _B.COMPLETE,
    },
    _B.PUTTING: {
        _E.PUT_PUBLISHED: _B.PUBLISHED,
        _E.PUT_ENDED: _B.BEHIND,
        _E.FOUND_PENDING: _B.PUTTING,
        _E.FOUND_COMPLETE: _B.PUTTING,
        _E.CLOSED: _B.PUTTING,
    },
    _B.PUBLISHED: {
        _E.PUT_ENDED: _B.COMPLETE,
        _E.FOUND_PENDING: _B.PUTTING,
        _E.FOUND_COMPLETE: _B.PUBLISHED,
        _E.CLOSED: _B.PUBLISHED,
    },
    _B.BEHIND: {
        _E.PUT_ENDED: _B.BEHIND,
        _E.FOUND_PENDING: _B.BEHIND,
        _E.FOUND_COMPLETE: _B.COMPLETE,
        _E.CAUGHT_UP: _B.COMPLETE,
        _E.CLOSED: _B.COMPLETE,
    },
}
"""A closed index keeps its own record of pending updates, so a closed Store knows of no backlog."""
NOTES_TRANSITIONS: Mapping[NotesState, Mapping[IndexEvent, NotesState]] = {
    _N.CURRENT: {_E.CORRECTION_FAILED: _N.UNCORRECTED, _E.CLOSED: _N.CURRENT},
    _N.UNCORRECTED: {_E.CORRECTION_FAILED: _N.UNCORRECTED, _E.CLOSED: _N.CURRENT},
}
_STEPS = frozenset({_L.STEP, _L.STEP_CLAIMED, _L.STEP_NOTED})
_WRITING = frozenset({_L.LOCKED, _L.ANNOUNCED, _L.CLAIMED, _L.REOPENED})


def _events_of(table: Mapping[State, Mapping[IndexEvent, State]]) -> frozenset[IndexEvent]:
    return frozenset(event for row in table.values() for event in row)


_LOCK_EVENTS = _events_of(LOCK_TRANSITIONS)
_BACKLOG_EVENTS = _events_of(BACKLOG_TRANSITIONS)
_NOTES_EVENTS = _events_of(NOTES_TRANSITIONS)


class IndexStates:
    """Current state of each region. Safe between threads; a state can be read without a lock."""

    def __init__(self) -> None:
        self.lock: LockState = LockState.UNLOCKED
        self.backlog: IndexBacklog = IndexBacklog.COMPLETE
        self.notes: NotesState = NotesState.CURRENT
        self._changing = threading.RLock()
        """Reentrant: the end of an abandoned put may run within another change, as its generator is collected."""

    def apply(self, event: IndexEvent) -> None:
        """Change the regions that know `event`.

        Raises: IllegalTransition, if one of them does not list it for its state; then none is changed.
        """
        with self._changing:
            try:
                lock = LOCK_TRANSITIONS[self.lock][event] if event in _LOCK_EVENTS else None
                backlog = BACKLOG_TRANSITIONS[self.backlog][event] if event in _BACKLOG_EVENTS else None
                notes = NOTES_TRANSITIONS[self.notes][event] if event in _NOTES_EVENTS else None
            except KeyError:
                raise IllegalTransition(
                    f"index: event {event.name} in lock state {self.lock.name}, backlog {self.backlog.name}, notes "
                    f"{self.notes.name}: an error in Nearkin; report it with this line"
                ) from None
            self.lock, self.backlog, self.notes = lock or self.lock, backlog or self.backlog, notes or self.notes

    @property
    def is_locked(self) -> bool:
        """Return whether this Store holds the writer lock."""
        return self.lock is not LockState.UNLOCKED

    @property
    def is_writing(self) -> bool:
        """Return whether this Store holds the writer lock until it is closed."""
        return self.lock in _WRITING

    @property
    def is_step(self) -> bool:
        """Return whether the writer lock is held for an exclusive section of a GC run."""
        return self.lock in _STEPS

    @property
    def is_announced(self) -> bool:
        """Return whether the index records, because of this Store, that the store may hold more."""
        return self.lock in (LockState.ANNOUNCED, LockState.CLAIMED)

    @property
    def is_claimed(self) -> bool:
        """Return whether store and index have a new token since the lock was taken."""
        return self.lock in (LockState.CLAIMED, LockState.REOPENED, LockState.STEP_CLAIMED, LockState.STEP_NOTED)

    @property
    def is_putting(self) -> bool:
        """Return whether a put is in progress, which adds to the index itself."""
        return self.backlog in (IndexBacklog.PUTTING, IndexBacklog.PUBLISHED)

    @property
    def may_lack_data(self) -> bool:
        """Return whether the store may hold more than the index."""
        return self.backlog in (IndexBacklog.PUTTING, IndexBacklog.BEHIND)

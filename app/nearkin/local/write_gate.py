"""Exclude GC steps and other threads of one process.

Invariant: a GC step is alone, others are shared.

If both wait they alternate: after a GC step the writers are first, after a put the GC step.
Between processes the store's lock does about the same (process_lock.py).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from nearkin.local.process_lock import STEP_SECONDS_MAX
from nearkin_shared.errors import StoreLocked

GC_STEP = "a step of garbage collection"


class WriteLatch:
    """Safe between threads."""

    def __init__(self, named: str) -> None:
        """`named`: the store, for errors."""
        self._named = named
        self._changed = threading.Condition()
        self._inside: set[object] = set()
        """Entered and not left. A set, because a count would drift if Ctrl-C falls between two statements."""
        self._waiting = 0
        """Threads that wait to write."""
        self._steps_waiting = 0
        self._step_was_last = False
        self._alone: int | None = None
        """The thread whose GC step, or whatever else is alone, is at work."""
        self._what = GC_STEP

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Exclude GC steps; wait for a running one. Within a GC step, join it. Raises StoreLocked."""
        entry = object()
        try:
            self.enter(entry)
            yield
        finally:
            self.leave(entry)

    def enter(self, entry: object) -> None:
        """Begin what `leave` ends, in whichever thread. Raises StoreLocked."""
        with self._changed:
            self._waiting += 1
            try:
                if not self._changed.wait_for(self._may_enter, STEP_SECONDS_MAX):
                    raise StoreLocked(
                        f"store {self._named}: {self._what} in this process has kept it for "
                        f"{STEP_SECONDS_MAX:.0f} s; try again when it is done"
                    )
            finally:
                self._waiting -= 1
                self._changed.notify_all()
            self._inside.add(entry)

    @property
    def is_exclusive_here(self) -> bool:
        """Return whether a GC step is at work in this thread."""
        return self._alone == threading.get_ident()

    def leave(self, entry: object) -> None:
        """End what `enter` began, if it did."""
        with self._changed:
            if entry in self._inside:
                self._inside.remove(entry)
                self._step_was_last = False
                self._changed.notify_all()

    @contextmanager
    def exclusive(self, wait_seconds: float, what: str = GC_STEP) -> Iterator[None]:
        """Do a GC step, or `what`; wait so long for the writer. Raises StoreLocked."""
        with self._changed:
            self._steps_waiting += 1
            try:
                if not self._changed.wait_for(self._may_be_exclusive, wait_seconds):
                    raise StoreLocked(f"store {self._named}: this process is writing it; try again when that is done")
            finally:
                self._steps_waiting -= 1
                self._changed.notify_all()
            self._alone, self._what = threading.get_ident(), what
        try:
            yield
        finally:
            with self._changed:
                self._alone, self._step_was_last = None, True
                self._changed.notify_all()

    def _may_enter(self) -> bool:
        if self._alone is not None:
            return self.is_exclusive_here
        # A thread inside (a put that updates the index) never waits for a GC step that waits for it.
        return bool(self._inside) or not self._steps_waiting or self._step_was_last

    def _may_be_exclusive(self) -> bool:
        return self._alone is None and not self._inside and not (self._waiting and self._step_was_last)

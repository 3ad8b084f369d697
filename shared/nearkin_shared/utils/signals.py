# size: one reason to change, the handling of signals in the main thread
"""Handle Ctrl-C during deferred imports and waits.

Invariant: Ctrl-C ends the process by KeyboardInterrupt, also during an import that was deferred.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

LOOK_SECONDS = 0.5
"""So often a main thread that waits lets the handlers of signals run."""


@contextmanager
def interrupts_wait() -> Iterator[None]:
    """Defer Ctrl-C, and handled SIGTERM and SIGHUP, until the block ends.

    A KeyboardInterrupt during the import of a compiled module is lost; one while a dataclass is created becomes a
    RuntimeError. For imports that a put waits for: they take milliseconds. A mask of signals would not work: it applies
    to
    one thread, and a library's threads (numpy's) would receive the signals of the process.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # no signal is handled in this thread
        return
    handled = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    handled = {number: handler for number, handler in handled.items() if callable(handler)}  # not ignored, nor C's own
    sent: list[int] = []
    try:
        for number in handled:
            signal.signal(number, lambda received, _: sent.append(received))
        yield
    finally:
        for number, handler in handled.items():
            signal.signal(number, handler)
        for received in sent:
            signal.raise_signal(received)


def wait_for(event: threading.Event) -> None:
    """Wait in the main thread until an event is set, if need be by the handler of a signal.

    Python runs handlers in the main thread, between two of its steps. The system may give a signal to any thread of the
    process, and a main thread that waits for a lock is not woken by one that another was given: a worker had not ended
    30 s after SIGTERM. So it takes a step now and then.
    """
    while not event.wait(LOOK_SECONDS):
        pass

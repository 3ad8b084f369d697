"""Lease of a fleet: its holder alone runs GC or rebuilds the index.

Invariant: the holder stops its work before another process can take the lease.

    free -> taken, with a growing number -> renewed every third of its life -> released, or expired

The holder measures the lease from before its request: the server keeps it longer than the holder assumes.
"""

from __future__ import annotations

import secrets
import threading
import time
from contextlib import suppress
from types import TracebackType

from nearkin_shared.errors import NearkinError, RetryableError
from nearkin_shared.fleet.shared_state import SharedState
from nearkin_shared.utils.failpoints import failpoint

LEASE_SECONDS = 30.0
RENEWALS_A_LEASE = 3


_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
"""Clock that continues during suspend, like the server's clock."""


def _now() -> float:
    return time.clock_gettime(_CLOCK)


class LeaseLost(RetryableError):
    """The lease is no longer held: another process may be working."""


class Lease:
    """GC lease of a fleet: its holder may run an index rebuild or a GC run."""

    def __init__(self, state: SharedState, lease_seconds: float = LEASE_SECONDS) -> None:
        self._state = state
        self._seconds = lease_seconds
        self._holder: bytes | None = None
        self._expires_at = 0.0
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def take(self) -> bool:
        """Take the lease if it is free; it is renewed until `release`."""
        requested_at = _now()
        holder = self._state.take_lease(secrets.token_hex(8), self._seconds)
        if holder is None:
            return False
        self._holder, self._expires_at = holder, requested_at + self._seconds
        self._stopping.clear()
        self._thread = threading.Thread(target=self._renew, args=(holder,), name="nearkin-lease", daemon=True)
        self._thread.start()
        failpoint("lease.taken")
        return True

    @property
    def fence(self) -> int:
        """Return the number of the lease that was taken: one more than that of the lease before."""
        assert self._holder is not None
        return int(self._holder.split(b":")[0])

    def check(self) -> None:
        """Raise LeaseLost unless the lease is held."""
        if _now() >= self._expires_at:
            raise LeaseLost("GC lease lost: another worker has it, or its server does not answer; this GC run ends")

    def skew_seconds(self) -> float:
        """Return the offset of this machine's clock from the lease server's; positive: ahead."""
        requested_at = time.time()
        served_at = self._state.clock()
        return (requested_at + time.time()) / 2 - served_at

    def give_up(self) -> None:
        """Stop holding the lease, whether or not the server has it."""
        self._expires_at = 0.0

    def release(self) -> None:
        """Release the lease."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()
        self._expires_at = 0.0
        if self._holder is not None:
            with suppress(NearkinError):  # the lease expires by itself
                self._state.release_lease(self._holder)
            self._holder = None
            failpoint("lease.released")

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, err: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def _renew(self, holder: bytes) -> None:
        while not self._stopping.wait(self._seconds / RENEWALS_A_LEASE):
            requested_at = _now()
            with suppress(NearkinError):  # without a renewal it expires
                if not self._state.renew_lease(holder, self._seconds):
                    self._expires_at = 0.0
                    return
                if self._expires_at:
                    self._expires_at = requested_at + self._seconds
                failpoint("lease.renewed")

"""Bound connections without a request: half-sent heads, and idle ones.

Invariant: they never exclude a new connection. One peer address has at most `per_address_max` of them: for one more
its oldest is closed. When all connections are in use, the oldest of any address is closed for a new one.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Protocol

from nearkin_gateway.http.request_limits import peer_group


class Closable(Protocol):
    """A connection that can be closed at any time in which it has no request."""

    def close_idle(self) -> None:
        """Close it; called once."""


class IdleConnections:
    """Connections by the time since they have no request."""

    def __init__(self, per_address_max: int) -> None:
        self._max = per_address_max
        self._all: OrderedDict[Closable, str] = OrderedDict()
        self._groups: dict[str, OrderedDict[Closable, None]] = {}

    def __len__(self) -> int:
        return len(self._all)

    def add(self, connection: Closable, address: str) -> None:
        """Add a connection without a request; close the oldest of its address beyond the bound."""
        if connection in self._all:
            return
        group = peer_group(address)
        self._all[connection] = group
        of_group = self._groups.setdefault(group, OrderedDict())
        of_group[connection] = None
        if len(of_group) > self._max:
            self._close(next(iter(of_group)))

    def discard(self, connection: Closable) -> None:
        """Note that a connection has a request, or is closed."""
        group = self._all.pop(connection, None)
        if group is not None:
            of_group = self._groups[group]
            del of_group[connection]
            if not of_group:
                del self._groups[group]

    def close_oldest(self, other_than: Closable) -> bool:
        """Close the oldest connection for another one; return whether there was one."""
        oldest = next(iter(self._all), other_than)
        if oldest is other_than:
            return False
        self._close(oldest)
        return True

    def _close(self, connection: Closable) -> None:
        self.discard(connection)
        connection.close_idle()

"""Partition states: the GC runs that a partition has seen, and its server's identity.

    g   GC generation   lookups name that of the object store: entries of a partition of an older one are misses
    r   run_id          differs after a restart, a failover or a restored dump: the epoch then continues (`adopt`)
    f   began empty     entries of published containers may be missing: all containers are published again

Invariant: a partition reaches a GC generation only after the removal of all entries that the run withdrew.
"""

from __future__ import annotations

from collections.abc import Iterator

from nearkin_shared.index.redis.connection import Command, RedisServer
from nearkin_shared.index.redis.key_encoding import CHUNKS, FEATURES, SEGMENTS, TABLES
from nearkin_shared.utils.frozen import frozen

VERSIONS_LETTER = "v"
LETTERS = (*(table.letter for table in TABLES), VERSIONS_LETTER)
LOOKUP_LETTERS = frozenset(table.letter for table in (CHUNKS, SEGMENTS, FEATURES))
META = ("containers", "table", "next")
TAG_BYTES = 24
"""Length of a field of a versions partition that is a tenant's tag; its value is the tenant's name."""


def partition_key(prefix: str, epoch: str, letter: str, number: int) -> str:
    """Return the key of a partition; its braces choose its slot in a Cluster."""
    return f"{prefix}:{{{letter}{number:x}}}:{epoch}"


def meta_key(prefix: str, epoch: str, what: str) -> str:
    """Return the key of a table about containers."""
    return f"{prefix}:{{m}}:{epoch}:{what}"


@frozen
class PartitionState:
    """State of one partition, as its server reports it."""

    letter: str
    generation: int
    same_server: bool
    is_incomplete: bool


@frozen
class Partitions:
    """All partitions of one epoch."""

    server: RedisServer
    prefix: str
    epoch: str
    count: int

    def _keys(self) -> Iterator[tuple[str, int, str]]:
        for letter in LETTERS:
            for number in range(self.count):
                yield letter, number, partition_key(self.prefix, self.epoch, letter, number)

    def create(self, generation: int) -> list[str]:
        """Create empty partitions of a GC generation; return their keys."""
        keys = [key for _, _, key in self._keys()]
        self.server.run([RedisServer.call("adopt", [key], generation) for key in keys])
        return keys

    def adopt(self, before: str, generation: int) -> None:
        """Continue epoch `before` under this one's name. Idempotent, also concurrently.

        A lost partition is created empty, with this GC generation.
        """
        calls: list[Command] = [
            RedisServer.call("move", [meta_key(self.prefix, name, what) for name in (self.epoch, before)])
            for what in META
        ]
        keys = list(self._keys())
        for letter, number, key in keys:
            old = partition_key(self.prefix, before, letter, number)
            calls.append(RedisServer.call("adopt", [key, old], generation))
        highest = max(self.server.run(calls)[len(META) :])
        versions = [(key, number) for letter, number, key in keys if letter == VERSIONS_LETTER]
        tags = self.server.run([("HGETALL", key) for key, _ in versions])
        moves: list[Command] = []
        for (key, number), fields in zip(versions, tags, strict=True):
            old = partition_key(self.prefix, before, VERSIONS_LETTER, number)
            for tag in tenants_of(fields):
                for end in ("", ":marks"):
                    moves.append(RedisServer.call("move", [f"{key}:{tag}{end}", f"{old}:{tag}{end}"]))
        # A node of a Cluster may hold numbers that the node of {m}, restored from an older dump, would assign again.
        moves.append(RedisServer.call("raise", [meta_key(self.prefix, self.epoch, "next")], highest))
        self.server.run(moves)

    def inspect(self) -> list[PartitionState] | None:
        """Return all states, or None if a partition was lost."""
        keys = list(self._keys())
        replies = self.server.run([RedisServer.call("inspect", [key]) for _, _, key in keys])
        if None in replies:
            return None
        return [
            PartitionState(letter, int(generation), bool(same), bool(empty))
            for (letter, _, _), (generation, same, empty) in zip(keys, replies, strict=True)
        ]

    def advance(self, required: int, generation: int) -> bool:
        """Set the GC generation of the partitions that have `required`.

        Returns whether no partition was lost.

        A stale partition, or one whose server restarted meanwhile, keeps its own: it must be checked first.
        """
        calls = [RedisServer.call("advance", [key], required, generation) for _, _, key in self._keys()]
        return None not in self.server.run(calls)

    def mark_checked(self, generation: int) -> bool:
        """Declare all partitions checked; return False if one was lost or its server restarted."""
        return None not in self.server.run(
            [RedisServer.call("settle", [key], generation) for _, _, key in self._keys()]
        )

    def tenants(self) -> list[str]:
        """Return the names of all tenants that have versions in the catalog."""
        keys = [key for letter, _, key in self._keys() if letter == VERSIONS_LETTER]
        found = self.server.run([("HGETALL", key) for key in keys])
        return sorted(name for fields in found for name in tenants_of(fields).values())


def tenants_of(fields: object) -> dict[str, str]:
    """Return name by tag, from the reply to HGETALL of a partition of versions."""
    pairs = fields.items() if isinstance(fields, dict) else zip(fields[::2], fields[1::2], strict=True)  # type: ignore[index]
    return {bytes(tag).decode(): bytes(name).decode() for tag, name in pairs if len(tag) == TAG_BYTES}

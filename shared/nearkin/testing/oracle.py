"""What a store must answer. Invariant: what was acknowledged is required; of the one call in flight every outcome that
the contracts allow is, and nothing else.

    begin(call) -> the call acknowledged: done(call)
                -> the process died: settle(seen) decides which outcome it was, or raises Violation
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

Version = tuple[str, int]
DAY = 86_400


class Violation(AssertionError):
    """The store answers what no history allows."""


@dataclass(frozen=True, slots=True)
class Put:
    """Blobs of one `put_many`: (key, number of a content)."""

    items: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class Delete:
    """One version, or all of a key."""

    key: str
    version: int | None


@dataclass(frozen=True, slots=True)
class Undelete:
    """One version."""

    key: str
    version: int


@dataclass(frozen=True, slots=True)
class Forget:
    """All but the newest `keep` versions of every key."""

    keep: int


@dataclass(frozen=True, slots=True)
class Gc:
    """A round, `days` after whatever came before."""

    days: int


@dataclass(frozen=True, slots=True)
class Rebuild:
    """The index made anew; `lost`: it is removed, and the next put finds it missing."""

    lost: bool


Call = Put | Delete | Undelete | Forget | Gc | Rebuild


@dataclass(frozen=True, slots=True)
class Seen:
    """What a store answers: listings, and the manifests that lie in it."""

    live: frozenset[Version]
    deleted: frozenset[Version]
    manifests: frozenset[Version]
    containers: frozenset[int] = frozenset()


@dataclass(slots=True)
class Oracle:
    """The model of one store and one tenant. Time is the store's clock; it never goes back here."""

    now: float
    undelete_seconds: float = DAY
    contents: dict[Version, int] = field(default_factory=dict)
    """Which content each version has that was ever committed."""
    until: dict[Version, float] = field(default_factory=dict)
    """Of deleted versions: up to when they can be brought back."""
    gone: set[Version] = field(default_factory=set)
    """Collected: their numbers stay taken."""
    in_flight: Call | None = None
    may_go: frozenset[int] | None = None
    """Containers that the round in flight may remove: those that an earlier one condemned long enough ago."""
    containers: frozenset[int] = frozenset()
    """Those that were there before the call in flight."""

    # --- what is there -----------------------------------------------------------------------------------------------

    @property
    def live(self) -> set[Version]:
        """Return the versions that a reader must see."""
        return self.contents.keys() - self.until.keys() - self.gone

    def versions(self, key: str) -> list[Version]:
        """Return a key's live versions, oldest first."""
        return sorted(version for version in self.live if version[0] == key)

    def next_version(self, key: str) -> int:
        """Return the number that the next put of a key gets."""
        return max((number for name, number in self.contents if name == key), default=0) + 1

    @property
    def over(self) -> set[Version]:
        """Return the deleted versions that never come back, collected or not."""
        return {version for version, until in self.until.items() if until < self.now}

    def going(self, call: Delete | Forget) -> list[Version]:
        """Return what a deletion hides."""
        if isinstance(call, Delete):
            return [found for found in self.versions(call.key) if call.version in (None, found[1])]
        keys = {key for key, _ in self.live}
        return [found for key in sorted(keys) for found in self.versions(key)[: -call.keep]]

    # --- what happens ------------------------------------------------------------------------------------------------

    def begin(self, call: Call, containers: frozenset[int] = frozenset(), due: frozenset[int] = frozenset()) -> None:
        """Note a call that starts; `containers` that are there, and those of them that are condemned and `due`."""
        if isinstance(call, Gc):
            self.now += call.days * DAY
            self.may_go = due
        self.in_flight, self.containers = call, containers

    def done(self) -> None:
        """Note that it was acknowledged."""
        match self.in_flight:
            case Put(items):
                for key, content in items:
                    self.contents[key, self.next_version(key)] = content
            case Delete() | Forget() as call:
                self.until |= dict.fromkeys(self.going(call), self.now + self.undelete_seconds)
            case Undelete(key, number):
                del self.until[key, number]
            case Gc():
                ended = self.over
                self.gone |= ended
                for version in ended:
                    del self.until[version]
            case _:
                pass
        self.in_flight, self.may_go = None, None

    def settle(self, seen: Seen) -> None:
        """Compare, and take the outcome of the call in flight from what is seen. Raises Violation."""
        if self.in_flight is not None:
            self._settle(self.in_flight, seen)
            self.check_containers(seen.containers)
            self.in_flight, self.may_go = None, None
        _equal("versions listed", seen.live, self.live)
        bring_back = self.until.keys() - self.over
        _within("deleted versions listed", seen.deleted, bring_back, set(self.until))
        _within("manifests", seen.manifests, self.live | bring_back, self.live | set(self.until))

    def _settle(self, call: Call, seen: Seen) -> None:
        match call:
            case Put(items):
                for key, content in items:  # of one key in order: each only if the one before it is there
                    version = key, self.next_version(key)
                    if version in seen.live:
                        self.contents[version] = content
            case Delete() | Forget():
                going = self.going(call)
                hidden = [version for version in going if version not in seen.live]
                newest = self.versions(call.key)[-1] if isinstance(call, Delete) else None
                if newest in hidden and len(hidden) < len(going):
                    raise Violation(f"{newest}: its deletion came before that of {set(going) - set(hidden)}")
                self.until |= dict.fromkeys(hidden, self.now + self.undelete_seconds)
            case Undelete(key, number):
                if (key, number) in seen.live:
                    del self.until[key, number]
            case Gc():
                collected = {version for version in self.over if version not in seen.deleted | seen.manifests}
                self.gone |= collected
                for version in collected:
                    del self.until[version]
            case Rebuild():
                pass

    def check_containers(self, there: frozenset[int]) -> None:
        """Nothing goes but what an earlier round has condemned, long enough ago (I6). Raises Violation."""
        vanished = self.containers - there
        allowed = self.may_go if self.may_go is not None else frozenset()
        if vanished - allowed:
            names = ", ".join(f"{container:016x}" for container in sorted(vanished - allowed))
            raise Violation(f"containers {names} are gone; no earlier round had condemned them, or not long enough ago")


def check_bytes(found: Mapping[Version, bytes], wanted: Mapping[Version, bytes]) -> None:
    """Compare restored bytes. Raises Violation naming the version."""
    for version, data in wanted.items():
        if found.get(version) != data:
            raise Violation(
                f"{version}: restored {len(found.get(version, b''))} bytes that are not the {len(data)} put"
            )


def _equal(what: str, seen: frozenset[Version], wanted: set[Version]) -> None:
    if seen != wanted:
        raise Violation(f"{what}: lost {sorted(wanted - seen)}, from nowhere {sorted(seen - wanted)}")


def _within(what: str, seen: frozenset[Version], least: set[Version], most: set[Version]) -> None:
    if not least <= seen <= most:
        raise Violation(f"{what}: lost {sorted(least - seen)}, from nowhere {sorted(seen - most)}")

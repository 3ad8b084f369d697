"""Model the required answers of a store.

Invariant: acknowledged effects are required; of the call in flight each outcome that the contracts allow is accepted,
and no other.

    begin(call) -> the call acknowledged: done(call)
                -> the process died: settle(seen) decides which outcome it was, or raises Violation
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from nearkin_shared.utils.frozen import frozen

Version = tuple[str, int]
DAY = 86_400


class Violation(AssertionError):
    """The store's answer is impossible after the calls so far."""


@frozen
class Put:
    """Blobs of one `put_many`: (key, number of a content)."""

    items: tuple[tuple[str, int], ...]


@frozen
class Delete:
    """One version, or all of a key."""

    key: str
    version: int | None


@frozen
class Undelete:
    """One version, or all that the latest deletion of a key hid."""

    key: str
    version: int | None


@frozen
class Forget:
    """All but the newest `keep` versions of every key."""

    keep: int


@frozen
class Gc:
    """A GC run, `days` after the call before it."""

    days: int


@frozen
class Rebuild:
    """A rebuild of the index; `lost`: the index is removed, and the next put finds it missing."""

    lost: bool


@frozen
class Break:
    """A flipped bit of a container's block, or of a manifest; `draw` selects it."""

    draw: int
    manifest: bool
    verify: bool
    """Whether verify finds it at once, and quarantines it."""
    by_copy: bool
    """Whether it is repaired from a copy of the object, or from contents 0 to `contents`."""
    contents: int


@frozen
class Repair:
    """A repair of all planted damage."""

    broken: Break


Call = Put | Delete | Undelete | Forget | Gc | Rebuild | Break | Repair


@frozen
class Seen:
    """Answers of a store: its listings and its stored manifests."""

    live: frozenset[Version]
    deleted: frozenset[Version]
    manifests: frozenset[Version]
    containers: frozenset[int] = frozenset()


@dataclass(slots=True)
class Oracle:
    """Model of one store and one tenant.

    Its time is the store's clock, which never runs backwards here.
    """

    now: float
    undelete_seconds: float = DAY
    contents: dict[Version, int] = field(default_factory=dict)
    """Content number of each version ever committed."""
    until: dict[Version, float] = field(default_factory=dict)
    """Times up to which deleted versions can be undeleted."""
    collected: set[Version] = field(default_factory=set)
    """Collected versions: their numbers stay in use."""
    deleted_by: dict[Version, int] = field(default_factory=dict)
    """Number of the call that deleted each version, 0 for a Forget."""
    in_flight: Call | None = None
    may_be_deleted: frozenset[int] | None = None
    """Containers that the GC run in flight may delete: pending delete since an earlier run, with the grace over."""
    containers: frozenset[int] = frozenset()
    """Containers that existed before the call in flight."""
    broken: Break | None = None
    """Planted damage, which must be repaired before the answers are compared."""
    calls: int = 0

    # --- what is there -----------------------------------------------------------------------------------------------

    @property
    def live(self) -> set[Version]:
        """Return the versions that a reader must see."""
        return self.contents.keys() - self.until.keys() - self.collected

    def versions(self, key: str) -> list[Version]:
        """Return a key's live versions, oldest first."""
        return sorted(version for version in self.live if version[0] == key)

    def next_version(self, key: str) -> int:
        """Return the number that the next put of a key gets."""
        return max((number for name, number in self.contents if name == key), default=0) + 1

    @property
    def ended_versions(self) -> set[Version]:
        """Return the deleted versions that can no longer be undeleted, collected or not."""
        return {version for version, until in self.until.items() if until < self.now}

    def hidden_versions(self, call: Delete | Forget) -> list[Version]:
        """Return the versions that a deletion hides."""
        if isinstance(call, Delete):
            return [found for found in self.versions(call.key) if call.version in (None, found[1])]
        keys = {key for key, _ in self.live}
        return [found for key in sorted(keys) for found in self.versions(key)[: -call.keep]]

    def list_restorable(self, call: Undelete) -> list[Version]:
        """Return the versions that an undeletion restores, oldest first; none if the model cannot know."""
        if call.version is not None:
            found = (call.key, call.version)
            return [found] if self.until.get(found, 0.0) >= self.now else []
        hidden = [found for found in self.until if found[0] == call.key]
        latest = max((self.until[found] for found in hidden), default=0.0)
        same = sorted(found for found in hidden if self.until[found] == latest)
        return same if latest >= self.now and all(self.deleted_by.get(found) for found in same) else []

    # --- what happens ------------------------------------------------------------------------------------------------

    def begin(self, call: Call, containers: frozenset[int] = frozenset(), due: frozenset[int] = frozenset()) -> None:
        """Record the start of a call, the existing `containers`, and the `due` ones: pending delete, grace over."""
        self.calls += 1
        self.now += 1  # no two calls have the same time
        if isinstance(call, Gc):
            self.now += call.days * DAY
            self.may_be_deleted = due
        if isinstance(call, Break):
            self.broken = call
        self.in_flight, self.containers = call, containers

    def acknowledge(self) -> None:
        """Record that the call in flight was acknowledged."""
        match self.in_flight:
            case Put(items):
                for key, content in items:
                    self.contents[key, self.next_version(key)] = content
            case Delete() | Forget() as call:
                self._hide(call, self.hidden_versions(call))
            case Undelete() as call:
                for version in self.list_restorable(call):
                    del self.until[version]
            case Repair():
                self.broken = None
            case Gc():
                ended = self.ended_versions
                self.collected |= ended
                for version in ended:
                    del self.until[version]
            case _:
                pass
        self.in_flight, self.may_be_deleted = None, None

    def _hide(self, call: Delete | Forget, versions: list[Version]) -> None:
        self.until |= dict.fromkeys(versions, self.now + self.undelete_seconds)
        self.deleted_by |= dict.fromkeys(versions, self.calls if isinstance(call, Delete) else 0)

    def settle(self, seen: Seen) -> None:
        """Derive the outcome of the call in flight from the answers, and compare all others. Raises Violation."""
        if self.in_flight is not None:
            self._settle(self.in_flight, seen)
            self.check_containers(seen.containers)
            self.in_flight, self.may_be_deleted = None, None
        _equal("versions listed", seen.live, self.live)
        restorable = self.until.keys() - self.ended_versions
        _within("deleted versions listed", seen.deleted, restorable, set(self.until))
        _within("manifests", seen.manifests, self.live | restorable, self.live | set(self.until))

    def _settle(self, call: Call, seen: Seen) -> None:
        match call:
            case Put(items):
                for key, content in items:  # of one key in order: each only if the one before it was committed
                    version = key, self.next_version(key)
                    if version in seen.live:
                        self.contents[version] = content
            case Delete() | Forget():
                targets = self.hidden_versions(call)
                hidden = [version for version in targets if version not in seen.live]
                newest = self.versions(call.key)[-1] if isinstance(call, Delete) else None
                if newest in hidden and len(hidden) < len(targets):
                    raise Violation(f"{newest}: its deletion came before that of {set(targets) - set(hidden)}")
                self._hide(call, hidden)
            case Undelete():
                candidates = self.list_restorable(call)
                restored = [version for version in candidates if version in seen.live]
                if restored and candidates[-1] not in restored:
                    raise Violation(f"{restored}: restored before {candidates[-1]}, which is newer")
                for version in restored:
                    del self.until[version]
            case Gc():
                collected = {version for version in self.ended_versions if version not in seen.deleted | seen.manifests}
                self.collected |= collected
                for version in collected:
                    del self.until[version]
            case Rebuild() | Break() | Repair():
                pass

    def check_containers(self, existing: frozenset[int]) -> None:
        """Check that each deleted container was pending delete since an earlier GC run, for at least the grace (I6).

        Raises: Violation.
        """
        vanished = self.containers - existing
        allowed = self.may_be_deleted if self.may_be_deleted is not None else frozenset()
        if vanished - allowed:
            names = ", ".join(f"{container:016x}" for container in sorted(vanished - allowed))
            raise Violation(f"containers {names} were deleted; no earlier GC run marked them, or not long enough ago")


def check_bytes(found: Mapping[Version, bytes], expected: Mapping[Version, bytes]) -> None:
    """Compare restored bytes. Raises Violation naming the version."""
    for version, data in expected.items():
        if found.get(version) != data:
            raise Violation(
                f"{version}: restored {len(found.get(version, b''))} bytes that are not the {len(data)} put"
            )


def _equal(what: str, seen: frozenset[Version], expected: set[Version]) -> None:
    if seen != expected:
        raise Violation(f"{what}: lost {sorted(expected - seen)}, from nowhere {sorted(seen - expected)}")


def _within(what: str, seen: frozenset[Version], least: set[Version], most: set[Version]) -> None:
    if not least <= seen <= most:
        raise Violation(f"{what}: lost {sorted(least - seen)}, from nowhere {sorted(seen - most)}")

"""Keep the data keys of a store.

    store key -> its own objects, and the names of owners      a tenant's keys -> its containers, manifests, marks

    erase   1 write the erasure record (durable; from now on no process creates or uses a key of that owner)
            2 after the grace: remove its keys   3 later: gc removes the objects that they encrypted

A process reads an owner's keys again every FRESH_SECONDS; a rotation or erasure by another process takes that long to
apply. Two processes that create an owner's first key at once create two: each object names its key.

Invariant: a key is durable, wrapped, before it encrypts anything; an erased key is never restored.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime

from blake3 import blake3

from nearkin_shared.crypto.erasure_records import Erasure, ErasureRecords
from nearkin_shared.crypto.key_heads import KeyHeads
from nearkin_shared.crypto.key_wrapping import KeyWrapper
from nearkin_shared.errors import (
    BadInput,
    ConfigError,
    Corrupt,
    KeysLost,
    NotFound,
    PermanentError,
    RetryableError,
    TenantErased,
)
from nearkin_shared.fingerprints import domain_of
from nearkin_shared.formats import key_record as fmt
from nearkin_shared.formats.encrypted_object import KEY_BYTES, OWNER_BYTES, STORE_OWNER
from nearkin_shared.formats.key_record import DataKey, KeyName
from nearkin_shared.formats.manifest import moment_of
from nearkin_shared.objectstore.base import AlreadyExists
from nearkin_shared.objectstore.parity import FOLDER as PARITY
from nearkin_shared.objectstore.parity import ParityObjectStore, parity_name, read_decoded
from nearkin_shared.tenant_names import collision_of
from nearkin_shared.utils.failpoints import failpoint
from nearkin_shared.utils.frozen import frozen

FRESH_SECONDS = 60.0
OWNERS_MAX = 4096
"""Owners whose keys are cached; about 1 KiB each."""
TENANTS_MAX = 4096
"""Tenants whose names are cached, to be written into the record of a new key."""
NUMBERS_SKIPPED_MAX = 1 << 20
"""Bound of the random step from the last key number to a new one, so that the number of a lost record is not reused.
Otherwise a restored copy of that record would replace the new key, and the objects encrypted since would be lost.
"""
RACES_MAX = 16
_NAMES_CONTEXT = "nearkin 2026 names of key owners"
_RECORDS_CONTEXT = "nearkin 2026 authentication of key records"
_INDEX_CONTEXT = "nearkin 2026 secret of local indexes"


@frozen
class KeyInfo:
    """One data key, as it may be displayed."""

    owner: str
    """32 hex digits; zeros: the store's own."""
    tenant: str | None
    """None if unknown."""
    number: int
    created: datetime | None
    wrapped_by: str
    newest: bool
    """Whether new objects are encrypted with it."""
    problem: str | None = None
    """Why it cannot be used."""


@dataclass(slots=True)
class _Owner:
    """Keys of one tenant, and its erasure."""

    keys: dict[int, DataKey] = field(default_factory=dict)
    erasure: Erasure | None = None
    lost: bool = False
    """The owner had keys, and they are missing now."""
    read_at: float = -1e9


class Keyring:
    """The keys of one store. Safe between threads and processes."""

    def __init__(
        self,
        objects: ParityObjectStore,
        wrapper: KeyWrapper,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """Use `open_keyring`. `objects` are unencrypted; `wall` returns seconds since 1970."""
        self._objects = objects
        self._wrapper = wrapper
        self._clock = clock
        self._wall_clock = wall
        self._reads_blocked = False
        self._lock = threading.RLock()
        self._owners: OrderedDict[bytes, _Owner] = OrderedDict()
        self._tenants: OrderedDict[bytes, str] = OrderedDict()
        self._erasures: dict[bytes, Erasure] = {}
        self._erasures_read = -1e9
        self._highest_numbers: dict[bytes, int] = {}
        self._heads_read = -1e9
        self._heads = KeyHeads(objects, self._record_key)
        self._records = ErasureRecords(objects, self._record_key, self._heads, self.has_keys)
        self._naming: bytes | None = None
        self._authenticating: bytes | None = None

    def open_blocked(self) -> Keyring:
        """Return the keys for a verification: records that do not verify block no owner."""
        keyring = Keyring(self._objects, self._wrapper, self._clock, self._wall_clock)
        keyring._reads_blocked = True
        return keyring

    # --- keys of objects
    # -----------------------------------------------------------------------------------------------

    def newest(self, domain: bytes | None) -> DataKey:
        """Return the key for new objects of a domain (None: the store); create it if needed.

        Raises: TenantErased, KeysLost, ConfigError, Corrupt, StoreUnavailable.
        """
        owner = self.owner_of(domain)
        with self._lock:
            found = self._current_keys(owner)
            head = self._heads_of(owner)
            if found.keys and head > max(found.keys):
                found = self._current_keys(owner, now=True)
            if found.keys and head > max(found.keys):
                owner_text = self._describe_owner(owner)
                raise Corrupt(
                    f"{fmt.FOLDER}/{owner.hex()}: key {head} of {owner_text} was created, but its record is missing: "
                    "restore it from a copy; where there is none, `nearkin keys rotate` creates a new key"
                )
            if not found.keys:
                if domain is None:
                    raise Corrupt(
                        f"{fmt.FOLDER}/{owner.hex()}: the store's own keys are missing: restore them from a copy"
                    )
                if found.lost or head:
                    found = self._current_keys(owner, now=True)
                    if not found.keys:
                        raise self._keys_lost_error(owner)
                else:
                    self._make(owner, _number_after(found), domain)
                    found = self._current_keys(owner, now=True)
            newest = max(found.keys)
            if newest > max(head, 1):  # its creator died before it recorded the number; the store's first has no head
                self._heads.note(owner, newest)
                self._highest_numbers[owner] = newest
            return found.keys[newest]

    def key(self, owner: bytes, number: int, name: str) -> DataKey:
        """Return the key that an object names. Raises TenantErased, Corrupt (no such key)."""
        with self._lock:
            found = self._current_keys(owner)
            if number not in found.keys:
                found = self._current_keys(owner, now=True)
            if number not in found.keys:
                whose = f" ({self._describe_owner(owner)})" if owner in self._tenants else ""
                raise Corrupt(
                    f"{name}: encrypted by key {number} of {owner.hex()}{whose}, which is not in {fmt.FOLDER}/: "
                    "damaged, "
                    "or its key is missing: restore keys/ from a copy"
                )
            return found.keys[number]

    def owner_of(self, domain: bytes | None) -> bytes:
        """Return the owner id of a domain, for object names and heads.

        The domain cannot be computed from it without the store's key.
        """
        if domain is None:
            return STORE_OWNER
        return blake3(domain, key=self._naming_key()).digest(OWNER_BYTES)

    def check_tenant(self, tenant: str) -> None:
        """Raise TenantErased if a tenant's keys were erased, TenantCollision on a hash collision.

        The tenant's name is kept for the record of its next key.
        """
        domain = domain_of(tenant)
        owner = self.owner_of(domain)
        with self._lock:
            if owner not in self._tenants:
                self._tenants[owner] = tenant
                if len(self._tenants) > TENANTS_MAX:
                    self._tenants.popitem(last=False)
            named = {key.tenant for key in self._current_keys(owner).keys.values()} - {None}
            if tenant not in (named or {self._tenants.get(owner)}):
                raise collision_of(tenant, f"{fmt.FOLDER}/")

    def check_not_lost(self, tenant: str, holds_some: Callable[[], bool]) -> None:
        """Raise KeysLost if a tenant has no key but `holds_some` reports encrypted objects.

        A key created then would encrypt deltas whose bases cannot be decrypted. Raises TenantErased.
        """
        self.check_tenant(tenant)
        owner = self.owner_of(domain_of(tenant))
        with self._lock:
            has_keys = bool(self._current_keys(owner).keys)
        if has_keys or not holds_some():
            return
        with self._lock:  # another process may have created the first key since
            has_keys = bool(self._current_keys(owner, now=True).keys)
        if not has_keys:
            raise self._keys_lost_error(owner)

    def _keys_lost_error(self, owner: bytes) -> KeysLost:
        return KeysLost(
            f"{fmt.FOLDER}/{owner.hex()}: the data keys of {self._describe_owner(owner)} are missing, but it has "
            "encrypted objects: restore the folder from a copy; where there is none, `nearkin keys rotate` creates a "
            "new key, and `nearkin verify` removes unreadable chunks from the index"
        )

    def _current_keys(self, owner: bytes, *, now: bool = False) -> _Owner:
        """Return an owner's keys, at most FRESH_SECONDS old. Raises TenantErased."""
        found = self._owners.get(owner)
        if found is None:
            found = self._owners[owner] = _Owner()
            while len(self._owners) > OWNERS_MAX:
                self._owners.popitem(last=False)
        self._owners.move_to_end(owner)
        at = self._clock()
        if now or at - found.read_at > FRESH_SECONDS:
            self._read_keys(owner, found)
            found.read_at = at
        if found.erasure is not None and found.erasure.problem is not None:
            raise Corrupt(f"{self._describe_owner(owner)}: {found.erasure.problem}")
        if found.erasure is not None:
            when, outlook = moment_of(found.erasure.erased_us), self._describe_outlook(found.erasure)
            raise TenantErased(
                f"{self._describe_owner(owner)}: its keys were erased at {when:%Y-%m-%dT%H:%M:%SZ}: {outlook}"
            )
        return found

    def _describe_outlook(self, erasure: Erasure) -> str:
        """Describe whether the data of an erased owner can be read again."""
        if erasure.is_due(int(self._wall_clock() * 1e6)):
            return "its data can never be decrypted again"
        until = f"{moment_of(erasure.due_us):%Y-%m-%dT%H:%M:%SZ}"
        return f"its data cannot be read; until {until} `nearkin keys erase TENANT --cancel` cancels the erasure"

    def _read_keys(self, owner: bytes, found: _Owner) -> None:
        found.erasure = self._erasure_of(owner)
        if found.erasure is not None:
            found.keys = {}
            return
        for _ in range(RACES_MAX):
            try:
                listed = self._newest_wrappings(owner)
                keys = {number: found.keys.get(number) or self._unwrap(name) for number, name in listed.items()}
            except NotFound:  # wrapped again, or erased, since it was listed
                if (erasure := self._erasure_of(owner)) is not None:
                    found.erasure, found.keys = erasure, {}
                    return
                continue
            found.lost = not keys and (found.lost or bool(found.keys))
            found.keys = keys
            return
        raise RetryableError(f"{fmt.FOLDER}/{owner.hex()}: changed {RACES_MAX} times while it was read; try again")

    def _erasure_of(self, owner: bytes) -> Erasure | None:
        found = None if owner == STORE_OWNER else self._records.find(owner)
        if found is None or found.is_cancelled or (found.problem is not None and self._reads_blocked):
            return None
        return found

    def _newest_wrappings(self, owner: bytes) -> dict[int, KeyName]:
        found: dict[int, KeyName] = {}
        for name in self._names(owner):
            if name.number not in found or name.wrapping > found[name.number].wrapping:
                found[name.number] = name
        return found

    def _names(self, owner: bytes) -> Iterator[KeyName]:
        for name, _ in self._objects.names(f"{fmt.FOLDER}/{owner.hex()}"):
            parsed = fmt.name_of(name)
            if parsed is None:
                raise Corrupt(f"{name}: not a data key's name; move it out of the store")
            yield parsed

    def _unwrap(self, name: KeyName) -> DataKey:
        wrapped_by, wrapped = read_decoded(self._objects, str(name), fmt.decode_key)
        unwrapped = self._wrapper.unwrap(wrapped_by, wrapped, fmt.context_of(name.owner, name.number))
        return fmt.data_key(name.owner, name.number, unwrapped, str(name))

    def _heads_of(self, owner: bytes) -> int:
        """Return the highest key number given to an owner, at most FRESH_SECONDS old."""
        at = self._clock()
        if at - self._heads_read > FRESH_SECONDS:
            found = self._heads.read().numbers
            for other, number in self._highest_numbers.items():
                found[other] = max(number, found.get(other, 0))
            self._highest_numbers, self._heads_read = found, at
        return self._highest_numbers.get(owner, 0)

    def _is_erased(self, owner: bytes) -> bool:
        """Return whether an erasure record that verifies exists."""
        found = None if owner == STORE_OWNER else self._records.find(owner)
        return found is not None and found.problem is None

    def _is_due(self, owner: bytes) -> bool:
        """Return whether the owner is erased and the grace is over."""
        found = self._records.find(owner)
        return found is not None and found.is_due(int(self._wall_clock() * 1e6))

    def index_secret(self) -> bytes:
        """Return the 32-byte key of a local encrypted index. Raises Corrupt, StoreUnavailable."""
        return self._derived_key(_INDEX_CONTEXT)

    def _naming_key(self) -> bytes:
        if self._naming is None:
            self._naming = self._derived_key(_NAMES_CONTEXT)
        return self._naming

    def _record_key(self) -> bytes:
        """Return the key that authenticates records of keys."""
        if self._authenticating is None:
            self._authenticating = self._derived_key(_RECORDS_CONTEXT)
        return self._authenticating

    def _derived_key(self, context: str) -> bytes:
        with self._lock:
            keys = self._current_keys(STORE_OWNER).keys
            if not keys:
                raise Corrupt(
                    f"{fmt.FOLDER}/{STORE_OWNER.hex()}: the store's own keys are missing: restore them from a copy"
                )
            return blake3(keys[min(keys)].secret, derive_key_context=context).digest()

    def _describe_owner(self, owner: bytes) -> str:
        tenant = self._tenants.get(owner)
        return f"key owner {owner.hex()}" if tenant is None else f"tenant {tenant!r}"

    # --- creation and removal of keys
    # ------------------------------------------------------------------------------------

    def make_store_key(self) -> None:
        """Create the first key of a new store, unless another process creates it first."""
        with self._lock:
            self._make(STORE_OWNER, 1, b"")
            self._current_keys(STORE_OWNER, now=True)

    @property
    def has_store_key(self) -> bool:
        """Whether the store has keys. Raises ConfigError if another key wraps them."""
        with self._lock:
            return bool(self._current_keys(STORE_OWNER).keys)

    def rotate(self, tenant: str | None) -> int:
        """Create a new key for future objects of a tenant (None: the store); return its number.

        Older keys remain for older objects. Other processes use the new one after FRESH_SECONDS at most.
        """
        domain = None if tenant is None else domain_of(tenant)
        owner = self.owner_of(domain)
        if tenant is not None:
            self.check_tenant(tenant)
        with self._lock:
            number = _number_after(self._current_keys(owner, now=True), self._heads_of(owner))
            if number > fmt.NUMBER_MAX:
                raise BadInput(f"{self._describe_owner(owner)}: all key numbers are used")
            self._make(owner, number, domain or b"")
            self._current_keys(owner, now=True)
        return number

    def _make(self, owner: bytes, number: int, domain: bytes) -> None:
        secret = secrets.token_bytes(KEY_BYTES)
        key = DataKey(owner, number, secret, int(self._wall_clock() * 1e6), domain, self._tenants.get(owner))
        name = KeyName(owner, number, 0)
        wrapped_by, wrapped = self._wrapper.key_id, self._wrapper.wrap(key.unwrap(), key.context)
        try:
            self._objects.put_new(str(name), fmt.encode_key(name, wrapped_by, wrapped))
        except AlreadyExists:
            return  # another process created it: both use that one
        failpoint("key.made")
        if number > 1:  # the store's first key authenticates the records of heads
            self._heads.note(owner, number)
            failpoint("key.noted")
            self._highest_numbers[owner] = max(number, self._highest_numbers.get(owner, 0))
        if self._is_erased(owner):  # erased since the check
            self._remove(str(name))

    def rewrap(self) -> int:
        """Wrap all data keys with the newest key-encryption key; return how many changed.

        Data are not rewritten. An interruption repeats work: of one number the highest wrapping counts, and it is
        durable
        before a lower one is removed.
        """
        count = 0
        for owner in self.owners():
            listed = list(self._names(owner))
            for number, newest in sorted(self._newest_wrappings(owner).items()):
                wrapped_by, wrapped = read_decoded(self._objects, str(newest), fmt.decode_key)
                if wrapped_by != self._wrapper.key_id:
                    context = fmt.context_of(owner, number)
                    key = fmt.data_key(owner, number, self._wrapper.unwrap(wrapped_by, wrapped, context), str(newest))
                    if newest.wrapping >= fmt.WRAPPING_MAX:
                        raise BadInput(f"{newest}: was wrapped {newest.wrapping} times, as often as it may be")
                    after = KeyName(owner, number, newest.wrapping + 1)
                    by, again = self._wrapper.key_id, self._wrapper.wrap(key.unwrap(), context)
                    self._objects.put_new(str(after), fmt.encode_key(after, by, again))  # 1
                    if owner != STORE_OWNER and self._is_due(owner):  # its keys are being removed
                        self._remove(str(after))
                        continue
                    newest, count = after, count + 1  # noqa: PLW2901
                for older in sorted(
                    name.wrapping for name in listed if name.number == number and name.wrapping < newest.wrapping
                ):
                    self._remove(str(KeyName(owner, number, older)))  # 2
        return count

    def erase(self, tenant: str, grace_seconds: int = 0) -> int:
        """Erase a tenant's keys, durably; return how many it has.

        From now on no process reads or writes objects under them: other processes stop within FRESH_SECONDS. The keys
        are removed after `grace_seconds` by `finish_erasures`; until then `cancel_erasure` restores access. A repeated
        call completes an interrupted one. An earlier erasure keeps its grace unless the new one is due before.

        Raises: TenantCollision, StoreUnavailable.
        """
        with suppress(TenantErased, Corrupt):  # completes an interrupted erasure, and replaces a forged record
            self.check_tenant(tenant)
        owner = self.owner_of(domain_of(tenant))
        with self._lock:
            now_us = int(self._wall_clock() * 1e6)
            made = self._records.add(owner, now_us, now_us + grace_seconds * 1_000_000)  # 1
            failpoint("key.erasure-recorded")
            numbers = {name.number for name in self._names(owner)}
            if made.is_due(now_us):
                self._remove_keys(owner)  # 2
            self._owners.pop(owner, None)
            self._erasures_read = -1e9
        return len(numbers)

    def find_erasure(self, tenant: str) -> Erasure | None:
        """Return the erasure of a tenant, or None. Raises StoreUnavailable."""
        return self._records.find(self.owner_of(domain_of(tenant)))

    def cancel_erasure(self, tenant: str) -> None:
        """Cancel an erasure whose grace is not over. Raises NotFound, BadInput, StoreUnavailable."""
        owner = self.owner_of(domain_of(tenant))
        with self._lock:
            self._records.cancel(owner, int(self._wall_clock() * 1e6))
            self._owners.pop(owner, None)
            self._erasures_read = -1e9

    def finish_erasures(self) -> frozenset[bytes]:
        """Remove the keys of all due erasures; return their owners. Raises StoreUnavailable."""
        due = self.due_erasures()
        for owner in sorted(due):
            self._remove_keys(owner)
        return due

    def _remove_keys(self, owner: bytes) -> None:
        for name in list(self._names(owner)):
            self._remove(str(name))
            failpoint("key.removed")
        # Parity of a key that was removed without its parity: the key could be restored from it.
        for left, _ in list(self._objects.inner.names(f"{PARITY}/{fmt.FOLDER}/{owner.hex()}")):
            self._objects.inner.delete(left)

    def _remove(self, name: str) -> None:
        """Remove a key and its parity, whether or not the settings require parity."""
        self._objects.inner.delete(parity_name(name))
        self._objects.inner.delete(name)

    # --- all keys
    # --------------------------------------------------------------------------------------------------------

    def owners(self) -> list[bytes]:
        """Return all owners of keys, sorted: the store first."""
        found = set()
        for name, _ in self._objects.names(fmt.FOLDER):
            parsed = fmt.name_of(name)
            if parsed is not None:
                found.add(parsed.owner)
            elif fmt.erased_owner(name) is None:
                raise Corrupt(f"{name}: not a data key's name; move it out of the store")
        return sorted(found)

    def list_keys(self) -> list[KeyInfo]:
        """Return every key, by owner and number."""
        found = []
        for owner in self.owners():
            newest = self._newest_wrappings(owner)
            for number, name in sorted(newest.items()):
                created, tenant, wrapped_by, problem = None, self._tenants.get(owner), "", None
                try:
                    wrapped_by, _ = read_decoded(self._objects, str(name), fmt.decode_key)
                    key = self._unwrap(name)
                    created, tenant = moment_of(key.created_us), key.tenant or tenant
                except (Corrupt, ConfigError, NotFound) as err:
                    problem = str(err)
                last = number == max(newest)
                found.append(KeyInfo(owner.hex(), tenant, number, created, wrapped_by, last, problem))
        return found

    def problems(self) -> dict[str, str]:
        """Return the problem of each damaged record; all are read as stored, and unwrapped."""
        found = {}
        for name, _ in self.names():
            try:
                self.check(name)
            except NotFound:
                continue
            except PermanentError as err:
                found[name] = str(err)
        try:
            self._heads.read()
        except PermanentError as err:
            found[str(err).partition(":")[0]] = str(err)
        return found

    def check(self, name: str) -> None:
        """Verify a record as stored. Raises NotFound, Corrupt, FormatTooNew, ConfigError."""
        parsed = fmt.name_of(name)
        if parsed is None:
            self._records.check(name)
            return
        wrapped_by, wrapped = fmt.decode_key(self._objects.inner.get(name), name)
        context = fmt.context_of(parsed.owner, parsed.number)
        fmt.data_key(parsed.owner, parsed.number, self._wrapper.unwrap(wrapped_by, wrapped, context), name)

    def names(self) -> list[tuple[str, int]]:
        """Return (object name, bytes) of every key record and erasure record."""
        return sorted(self._objects.names(fmt.FOLDER))

    # --- objects of erased owners
    # ----------------------------------------------------------------------------------------

    def erasures(self) -> list[Erasure]:
        """Return all erasures whose objects may exist, by owner, at most FRESH_SECONDS old."""
        with self._lock:
            at = self._clock()
            if at - self._erasures_read > FRESH_SECONDS:
                self._erasures = self._records.all()
                self._erasures_read = at
            return [one for one in self._erasures.values() if one.problem is None or not self._reads_blocked]

    def unswept(self) -> frozenset[bytes]:
        """Return the owners whose objects are hidden: erased, or with an invalid record."""
        return frozenset(erasure.owner for erasure in self.erasures() if not erasure.is_cancelled)

    def is_closed(self, tenant: str) -> bool:
        """Return whether the objects of a tenant are hidden."""
        return self.owner_of(domain_of(tenant)) in self.unswept()

    def due_erasures(self) -> frozenset[bytes]:
        """Return the erased owners whose grace is over: their objects may be removed."""
        return frozenset(erasure.owner for erasure in self.list_due())

    def list_due(self) -> list[Erasure]:
        """Return the erasures whose grace is over and whose objects may still exist."""
        now_us = int(self._wall_clock() * 1e6)
        return [erasure for erasure in self.erasures() if erasure.is_due(now_us)]

    def has_keys(self, owner: bytes) -> bool:
        """Return whether an owner has a key record."""
        return any(True for _ in self._names(owner))

    def swept(self, owner: bytes) -> None:
        """Record that no object of an erased owner exists and no process can write one."""
        found = self._records.find(owner)
        if found is None or not found.is_due(int(self._wall_clock() * 1e6) - int(4 * FRESH_SECONDS * 1e6)):
            return
        self._records.add_swept(found)
        self._erasures_read = -1e9


def _number_after(owner: _Owner, head: int = 0) -> int:
    return max(head, *owner.keys, 0) + 1 + secrets.randbelow(NUMBERS_SKIPPED_MAX)

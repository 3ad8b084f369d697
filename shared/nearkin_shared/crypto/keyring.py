"""Data keys of a store. Invariant: a key is durable, wrapped, before it seals anything; an erased one never comes back.

    store key -> its own objects, and the names of owners      a tenant's keys -> its containers, manifests and marks

    erase   1 write the erasure record (durable: from here on nobody makes or uses a key of that owner)
            2 after the grace: remove its keys   3 later: gc removes what they sealed

A process looks at an owner's keys again every FRESH_SECONDS: as long may another one's rotation or erasure take to
reach it. Two that make an owner's first key at once make two: each object says which one sealed it.
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
from nearkin_shared.storage import descriptor
from nearkin_shared.tenant_names import collision_of
from nearkin_shared.utils.failpoints import failpoint
from nearkin_shared.utils.frozen import frozen

FRESH_SECONDS = 60.0
OWNERS_MAX = 4096
"""Whose keys are held at a time; some 1 KiB each."""
TENANTS_MAX = 4096
"""Whose names are remembered, to be written beside a key that is made."""
NUMBERS_SKIPPED_MAX = 1 << 20
"""A new key's number is above the last one's by so much at most, by lot: one whose record was lost is not given again.
Else what was sealed since is lost once that record is restored from a copy, in the place of the new one."""
RACES_MAX = 16
_NAMES_CONTEXT = "nearkin 2026 names of key owners"
_RECORDS_CONTEXT = "nearkin 2026 authentication of key records"
_INDEX_CONTEXT = "nearkin 2026 secret of local indexes"


@frozen
class KeyInfo:
    """One data key, as it may be shown."""

    owner: str
    """32 hex digits; zeros: the store's own."""
    tenant: str | None
    """Where it is known."""
    number: int
    created: datetime | None
    wrapped_by: str
    newest: bool
    """Whether it seals what is written now."""
    problem: str | None = None
    """Why it cannot be used."""


@dataclass(slots=True)
class _Owner:
    keys: dict[int, DataKey] = field(default_factory=dict)
    erasure: Erasure | None = None
    lost: bool = False
    """Keys were there, and are not any more."""
    looked: float = -1e9


class Keyring:
    """The keys of one store. Safe between threads and processes."""

    def __init__(
        self,
        objects: ParityObjectStore,
        wrapper: KeyWrapper,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """`objects` as they are stored. Use `open_keyring`. `wall` tells the seconds since 1970."""
        self._objects = objects
        self._wrapper = wrapper
        self._clock = clock
        self._wall = wall
        self._lock = threading.RLock()
        self._owners: OrderedDict[bytes, _Owner] = OrderedDict()
        self._tenants: OrderedDict[bytes, str] = OrderedDict()
        self._erasures: dict[bytes, Erasure] = {}
        self._erasures_read = -1e9
        self._highest: dict[bytes, int] = {}
        self._heads_read = -1e9
        self._heads = KeyHeads(objects, self._record_key)
        self._records = ErasureRecords(objects, self._record_key, self._heads, self.has_keys)
        self._naming: bytes | None = None
        self._authenticating: bytes | None = None

    # --- what objects are sealed by ----------------------------------------------------------------------------------

    def newest(self, domain: bytes | None) -> DataKey:
        """Return the key that seals what a tenant's domain (None: the store) writes; made if there is none.

        Raises TenantErased, KeysLost, ConfigError, Corrupt, StoreUnavailable.
        """
        owner = self.owner_of(domain)
        with self._lock:
            found = self._looked_at(owner)
            head = self._heads_of(owner)
            if found.keys and head > max(found.keys):
                found = self._looked_at(owner, now=True)
            if found.keys and head > max(found.keys):
                raise Corrupt(
                    f"{fmt.FOLDER}/{owner.hex()}: key {head} of {self._named(owner)} was made, and its record is gone: "
                    "restore it from a copy; where there is none, `nearkin keys rotate` makes a new key"
                )
            if not found.keys:
                if domain is None:
                    raise Corrupt(
                        f"{fmt.FOLDER}/{owner.hex()}: the store's own keys are gone: restore them from a copy"
                    )
                if found.lost or head:
                    found = self._looked_at(owner, now=True)
                    if not found.keys:
                        raise self._lost(owner)
                else:
                    self._make(owner, _number_after(found), domain)
                    found = self._looked_at(owner, now=True)
            return found.keys[max(found.keys)]

    def key(self, owner: bytes, number: int, name: str) -> DataKey:
        """Return the key that an object says it is sealed by. Raises TenantErased, Corrupt (there is no such key)."""
        with self._lock:
            found = self._looked_at(owner)
            if number not in found.keys:
                found = self._looked_at(owner, now=True)
            if number not in found.keys:
                whose = f" ({self._named(owner)})" if owner in self._tenants else ""
                raise Corrupt(
                    f"{name}: sealed by key {number} of {owner.hex()}{whose}, which is not in {fmt.FOLDER}/: damaged, "
                    "or the keys are to be restored from a copy"
                )
            return found.keys[number]

    def owner_of(self, domain: bytes | None) -> bytes:
        """Return what stands for a domain in names and heads: only who has the store's key can tell whose it is."""
        if domain is None:
            return STORE_OWNER
        return blake3(domain, key=self._naming_key()).digest(OWNER_BYTES)

    def check_tenant(self, tenant: str) -> None:
        """Raise TenantErased where a tenant's keys were erased, TenantCollision where they are another tenant's.

        Its name is kept beside a key that is made for it later.
        """
        domain = domain_of(tenant)
        owner = self.owner_of(domain)
        with self._lock:
            if owner not in self._tenants:
                self._tenants[owner] = tenant
                if len(self._tenants) > TENANTS_MAX:
                    self._tenants.popitem(last=False)
            named = {key.tenant for key in self._looked_at(owner).keys.values()} - {None}
            if tenant not in (named or {self._tenants.get(owner)}):
                raise collision_of(tenant, f"{fmt.FOLDER}/")

    def check_not_lost(self, tenant: str, holds_some: Callable[[], bool]) -> None:
        """Raise KeysLost where a tenant has no key and, as `holds_some` says, what one has sealed.

        A key that was made then would seal what leans on chunks that nobody can read. Raises TenantErased.
        """
        self.check_tenant(tenant)
        owner = self.owner_of(domain_of(tenant))
        with self._lock:
            there = bool(self._looked_at(owner).keys)
        if there or not holds_some():
            return
        with self._lock:  # another process may have made the first one since we looked
            there = bool(self._looked_at(owner, now=True).keys)
        if not there:
            raise self._lost(owner)

    def _lost(self, owner: bytes) -> KeysLost:
        return KeysLost(
            f"{fmt.FOLDER}/{owner.hex()}: the data keys of {self._named(owner)} are gone, and they have sealed what it "
            "holds: restore the folder from a copy; where there is none, `nearkin keys rotate` makes a new key, and "
            "`nearkin verify` lets go of what cannot be read"
        )

    def _looked_at(self, owner: bytes, *, now: bool = False) -> _Owner:
        """Return an owner's keys as they are, or were a moment ago. Raises TenantErased."""
        found = self._owners.get(owner)
        if found is None:
            found = self._owners[owner] = _Owner()
            while len(self._owners) > OWNERS_MAX:
                self._owners.popitem(last=False)
        self._owners.move_to_end(owner)
        at = self._clock()
        if now or at - found.looked > FRESH_SECONDS:
            self._look(owner, found)
            found.looked = at
        if found.erasure is not None and found.erasure.problem is not None:
            raise Corrupt(f"{self._named(owner)}: {found.erasure.problem}")
        if found.erasure is not None:
            when, outlook = moment_of(found.erasure.erased_us), self._outlook(found.erasure)
            raise TenantErased(f"{self._named(owner)}: its keys were erased at {when:%Y-%m-%dT%H:%M:%SZ}: {outlook}")
        return found

    def _outlook(self, erasure: Erasure) -> str:
        """Return whether what an erased owner stored can be read again."""
        if erasure.is_due(int(self._wall() * 1e6)):
            return "what they sealed can never be read again"
        until = f"{moment_of(erasure.due_us):%Y-%m-%dT%H:%M:%SZ}"
        return f"nothing that they sealed is read; until {until} `nearkin keys erase TENANT --cancel` undoes that"

    def _look(self, owner: bytes, found: _Owner) -> None:
        found.erasure = None if owner == STORE_OWNER else self._records.find(owner)
        if found.erasure is not None:
            found.keys = {}
            return
        for _ in range(RACES_MAX):
            try:
                listed = self._newest_wrappings(owner)
                keys = {number: found.keys.get(number) or self._unwrapped(name) for number, name in listed.items()}
            except NotFound:  # wrapped anew, or erased, since it was listed
                if owner != STORE_OWNER and (erasure := self._records.find(owner)) is not None:
                    found.erasure, found.keys = erasure, {}
                    return
                continue
            found.lost = not keys and (found.lost or bool(found.keys))
            found.keys = keys
            return
        raise RetryableError(f"{fmt.FOLDER}/{owner.hex()}: changed {RACES_MAX} times while it was read; try again")

    def _newest_wrappings(self, owner: bytes) -> dict[int, KeyName]:
        found: dict[int, KeyName] = {}
        for name in self._names(owner):
            if name.number not in found or name.wrapping > found[name.number].wrapping:
                found[name.number] = name
        return found

    def _names(self, owner: bytes) -> Iterator[KeyName]:
        for name, _ in self._objects.names(f"{fmt.FOLDER}/{owner.hex()}"):
            said = fmt.name_of(name)
            if said is None:
                raise Corrupt(f"{name}: not a data key's name; move it out of the store")
            yield said

    def _unwrapped(self, name: KeyName) -> DataKey:
        wrapped_by, wrapped = read_decoded(self._objects, str(name), fmt.decode_key)
        unwrapped = self._wrapper.unwrap(wrapped_by, wrapped, fmt.context_of(name.owner, name.number))
        return fmt.data_key(name.owner, name.number, unwrapped, str(name))

    def _heads_of(self, owner: bytes) -> int:
        """Return the highest key number that an owner was given, as known FRESH_SECONDS ago at most."""
        at = self._clock()
        if at - self._heads_read > FRESH_SECONDS:
            found = self._heads.read().numbers
            for one, number in self._highest.items():
                found[one] = max(number, found.get(one, 0))
            self._highest, self._heads_read = found, at
        return self._highest.get(owner, 0)

    def _is_erased(self, owner: bytes) -> bool:
        """Return whether an erasure record that verifies exists."""
        found = None if owner == STORE_OWNER else self._records.find(owner)
        return found is not None and found.problem is None

    def _is_due(self, owner: bytes) -> bool:
        """Return whether the owner is erased and the grace of that is over."""
        found = self._records.find(owner)
        return found is not None and found.is_due(int(self._wall() * 1e6))

    def index_secret(self) -> bytes:
        """Return 32 bytes under which a local index is sealed. Raises Corrupt, StoreUnavailable."""
        return self._derived_key(_INDEX_CONTEXT)

    def _naming_key(self) -> bytes:
        if self._naming is None:
            self._naming = self._derived_key(_NAMES_CONTEXT)
        return self._naming

    def _record_key(self) -> bytes:
        """Return the key that authenticates the records of the keys."""
        if self._authenticating is None:
            self._authenticating = self._derived_key(_RECORDS_CONTEXT)
        return self._authenticating

    def _derived_key(self, context: str) -> bytes:
        with self._lock:
            keys = self._looked_at(STORE_OWNER).keys
            if not keys:
                raise Corrupt(f"{fmt.FOLDER}/{STORE_OWNER.hex()}: the store's own keys are gone: restore a copy")
            return blake3(keys[min(keys)].secret, derive_key_context=context).digest()

    def _named(self, owner: bytes) -> str:
        tenant = self._tenants.get(owner)
        return f"key owner {owner.hex()}" if tenant is None else f"tenant {tenant!r}"

    # --- keys that come and go ---------------------------------------------------------------------------------------

    def make_store_key(self) -> None:
        """Make the first key of a new store; another process may come first."""
        with self._lock:
            self._make(STORE_OWNER, 1, b"")
            self._looked_at(STORE_OWNER, now=True)

    @property
    def has_store_key(self) -> bool:
        """Return whether the store has keys. Raises ConfigError where these are wrapped by another key."""
        with self._lock:
            return bool(self._looked_at(STORE_OWNER).keys)

    def rotate(self, tenant: str | None) -> int:
        """Make a new key for what a tenant (None: the store) writes from now on; return its number.

        Older ones stay for what they sealed. Other processes use the new one after FRESH_SECONDS at most.
        """
        domain = None if tenant is None else domain_of(tenant)
        owner = self.owner_of(domain)
        if tenant is not None:
            self.check_tenant(tenant)
        with self._lock:
            number = _number_after(self._looked_at(owner, now=True), self._heads_of(owner))
            if number > fmt.NUMBER_MAX:
                raise BadInput(f"{self._named(owner)}: its keys have all numbers that there are")
            self._make(owner, number, domain or b"")
            self._looked_at(owner, now=True)
        return number

    def _make(self, owner: bytes, number: int, domain: bytes) -> None:
        secret = secrets.token_bytes(KEY_BYTES)
        key = DataKey(owner, number, secret, int(self._wall() * 1e6), domain, self._tenants.get(owner))
        name = KeyName(owner, number, 0)
        wrapped_by, wrapped = self._wrapper.key_id, self._wrapper.wrap(key.unwrap(), key.context)
        try:
            self._objects.put_new(str(name), fmt.encode_key(name, wrapped_by, wrapped))
        except AlreadyExists:
            return  # another process's: it is read, and used by both
        failpoint("key.made")
        if number > 1:  # the store's first key is the one that authenticates
            self._heads.note(owner, number)
            failpoint("key.noted")
            self._highest[owner] = max(number, self._highest.get(owner, 0))
        if self._is_erased(owner):  # since we looked
            self._remove(str(name))

    def rewrap(self) -> int:
        """Wrap every data key with the newest key-encryption key; return how many were not. Data stay as they are.

        Dying in between repeats work: of one number the highest wrapping holds, and is whole before a lower one goes.
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
        """Erase a tenant's keys, durably; return how many there are. Again ends what was cut short.

        From now on no process reads or writes what they seal: other processes stop within FRESH_SECONDS. The keys are
        removed once `grace_seconds` are over, by `finish_erasures`; until then `cancel_erasure` brings all back. An
        earlier erasure keeps its grace, unless the new one is due before. Raises TenantCollision,
        StoreUnavailable.
        """
        with suppress(TenantErased, Corrupt):  # it ends what was cut short, and what a forged record has blocked
            self.check_tenant(tenant)
        owner = self.owner_of(domain_of(tenant))
        with self._lock:
            now_us = int(self._wall() * 1e6)
            made = self._records.add(owner, now_us, now_us + grace_seconds * 1_000_000)  # 1
            failpoint("key.erasure-recorded")
            numbers = {name.number for name in self._names(owner)}
            if made.is_due(now_us):
                self._remove_keys(owner)  # 2
            self._owners.pop(owner, None)
            self._erasures_read = -1e9
        return len(numbers)

    def find_erasure(self, tenant: str) -> Erasure | None:
        """Return the erasure of a tenant, None without one. Raises StoreUnavailable."""
        return self._records.find(self.owner_of(domain_of(tenant)))

    def cancel_erasure(self, tenant: str) -> None:
        """Cancel an erasure whose grace is not over. Raises NotFound, BadInput, StoreUnavailable."""
        owner = self.owner_of(domain_of(tenant))
        with self._lock:
            self._records.cancel(owner, int(self._wall() * 1e6))
            self._owners.pop(owner, None)
            self._erasures_read = -1e9

    def finish_erasures(self) -> frozenset[bytes]:
        """Remove the keys of all erasures that are due; return their owners. Raises StoreUnavailable."""
        due = self.due_erasures()
        for owner in sorted(due):
            self._remove_keys(owner)
        return due

    def _remove_keys(self, owner: bytes) -> None:
        for name in list(self._names(owner)):
            self._remove(str(name))
            failpoint("key.removed")
        # Parity of a key that was removed without it: the key would come back from it.
        for left, _ in list(self._objects.inner.names(f"{PARITY}/{fmt.FOLDER}/{owner.hex()}")):
            self._objects.inner.delete(left)

    def _remove(self, name: str) -> None:
        """Remove a key and what could bring it back, whether or not parity is made now."""
        self._objects.inner.delete(parity_name(name))
        self._objects.inner.delete(name)

    # --- all of them -------------------------------------------------------------------------------------------------

    def owners(self) -> list[bytes]:
        """Return all who have a key, sorted: the store first."""
        found = set()
        for name, _ in self._objects.names(fmt.FOLDER):
            said = fmt.name_of(name)
            if said is not None:
                found.add(said.owner)
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
                    key = self._unwrapped(name)
                    created, tenant = moment_of(key.created_us), key.tenant or tenant
                except (Corrupt, ConfigError, NotFound) as err:
                    problem = str(err)
                last = number == max(newest)
                found.append(KeyInfo(owner.hex(), tenant, number, created, wrapped_by, last, problem))
        return found

    def problems(self) -> dict[str, str]:
        """Return what is wrong with which record: every one is read as it is stored, and unwrapped."""
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
        """Read a record as it is stored. Raises NotFound, Corrupt, FormatTooNew, ConfigError."""
        said = fmt.name_of(name)
        if said is None:
            self._records.check(name)
            return
        wrapped_by, wrapped = fmt.decode_key(self._objects.inner.get(name), name)
        context = fmt.context_of(said.owner, said.number)
        fmt.data_key(said.owner, said.number, self._wrapper.unwrap(wrapped_by, wrapped, context), name)

    def names(self) -> list[tuple[str, int]]:
        """Return (object name, bytes) of every record and of what says that one was erased."""
        return sorted(self._objects.names(fmt.FOLDER))

    # --- objects of those who are erased -----------------------------------------------------------------------------

    def erasures(self) -> list[Erasure]:
        """Return all erasures of which objects may be left, by owner, at most FRESH_SECONDS old."""
        with self._lock:
            at = self._clock()
            if at - self._erasures_read > FRESH_SECONDS:
                self._erasures = self._records.all()
                self._erasures_read = at
            return list(self._erasures.values())

    def unswept(self) -> frozenset[bytes]:
        """Return the owners whose objects are hidden: erased, in the grace of that, or blocked by a bad record."""
        return frozenset(erasure.owner for erasure in self.erasures())

    def is_closed(self, tenant: str) -> bool:
        """Return whether the objects of a tenant are hidden."""
        return self.owner_of(domain_of(tenant)) in self.unswept()

    def due_erasures(self) -> frozenset[bytes]:
        """Return the erased owners whose grace is over: what is left of them may be removed."""
        return frozenset(erasure.owner for erasure in self.list_due())

    def list_due(self) -> list[Erasure]:
        """Return the erasures whose grace is over and of which objects may be left."""
        now_us = int(self._wall() * 1e6)
        return [erasure for erasure in self.erasures() if erasure.is_due(now_us)]

    def has_keys(self, owner: bytes) -> bool:
        """Return whether a key record of an owner exists."""
        return any(True for _ in self._names(owner))

    def swept(self, owner: bytes) -> None:
        """Record that no object of an erased owner is left, once no process can write one any more."""
        found = self._records.find(owner)
        if found is None or not found.is_due(int(self._wall() * 1e6) - int(4 * FRESH_SECONDS * 1e6)):
            return
        self._records.add_swept(found)
        self._erasures_read = -1e9


def _number_after(owner: _Owner, head: int = 0) -> int:
    return max(head, *owner.keys, 0) + 1 + secrets.randbelow(NUMBERS_SKIPPED_MAX)


def open_keyring(objects: ParityObjectStore, wrapper: KeyWrapper) -> Keyring:
    """Return the keys of a store, the first one made where there is no store yet. `objects` as they are stored.

    Raises ConfigError: the store is one without encryption, or its keys are wrapped by another key; Corrupt: it is
    encrypted, and its keys are gone.
    """
    keyring = Keyring(objects, wrapper)
    if keyring.has_store_key:
        return keyring
    try:
        sealed = read_decoded(objects, descriptor.NAME, fmt.decode_envelope)
    except NotFound:
        keyring.make_store_key()
        return keyring
    if sealed is None:
        raise ConfigError(
            'storage.encryption: this store was made without: set "none", or make a new store with encryption and put '
            "into it what this one holds"
        )
    raise Corrupt(f"{fmt.FOLDER}/: the keys of this store are gone: restore the folder from a copy")

"""An encrypted store's objects. Invariant: parity is of what is stored, sealed; what is read was authenticated.

    readers, writers -> sealed or opened here -> parity -> local folder or S3

So damage is mended, byte for byte, without a key, and what was erased stays so: its parity is of no more use than it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Self

from nearkin_shared.crypto.keyring import Keyring
from nearkin_shared.errors import Corrupt, NearkinError, PermanentError
from nearkin_shared.formats.encrypted_object import encrypted_bytes, plain_bytes
from nearkin_shared.formats.parity_object import Scheme
from nearkin_shared.objectstore.base import ObjectStore, Payload
from nearkin_shared.objectstore.delegating import rewrap_lowest
from nearkin_shared.objectstore.encrypting import EncryptingObjectStore, ObjectEncryption, is_encrypted
from nearkin_shared.objectstore.overlay import OverlayObjectStore
from nearkin_shared.objectstore.parity import FOLDER, ParityObjectStore, parity_name

_log = logging.getLogger("nearkin")


class EncryptedObjectStore(ParityObjectStore):
    """Objects with parity, as they are in clear; what lies in `inner`, and its parity, is sealed."""

    def __init__(self, inner: ObjectStore, scheme: Scheme | None, keyring: Keyring) -> None:
        super().__init__(inner, scheme)
        self.keyring = keyring
        sealing = ObjectEncryption(keyring)
        self._stored = ParityObjectStore(inner, scheme)
        self._sealed = EncryptingObjectStore(self._stored, sealing)
        self._bare = EncryptingObjectStore(inner, sealing)

    def authenticate_records(self, secret: bytes) -> None:
        """Do nothing: records are sealed, which authenticates them."""

    @property
    def without_parity(self) -> ObjectStore:
        """Return the objects in clear as they lie there, whatever parity would make of them."""
        return self._bare

    def rewrap(self, wrap: Callable[[ObjectStore], ObjectStore]) -> Self:
        """Return what does the same over what `wrap` makes of the store below all wrappers."""
        return type(self)(rewrap_lowest(self.inner, wrap), self._scheme, self.keyring)

    def takes_bytes(self, name: str, object_bytes: int) -> int:
        """Return what an object of so many bytes takes that is written now, sealed, its parity included."""
        return super().takes_bytes(name, encrypted_bytes(object_bytes) if is_encrypted(name) else object_bytes)

    def clear_bytes(self, name: str, stored_bytes: int) -> int:
        """Return how many bytes in clear an object has that is stored in so many; negative if it is cut short."""
        return plain_bytes(stored_bytes) if is_encrypted(name) else stored_bytes

    def check_tenant(self, tenant: str) -> None:
        """Raise TenantErased where a tenant was."""
        self.keyring.check_tenant(tenant)

    def put_new(self, name: str, *parts: Payload) -> None:
        """Seal and write an object, then its parity. Raises AlreadyExists, TenantErased, StoreUnavailable."""
        self._sealed.put_new(name, *parts)

    def put_new_of_tenant(self, tenant: str, name: str, *parts: Payload) -> None:
        """Write an object under a tenant's keys. Raises AlreadyExists, TenantErased, StoreUnavailable."""
        self._sealed.put_new_of_tenant(tenant, name, *parts)

    def get(self, name: str) -> bytes:
        """Return a whole object. Raises NotFound, TenantErased, Corrupt or StoreUnavailable."""
        return self._sealed.get(name)

    def get_ranges(self, name: str, starts: Sequence[int], ends: Sequence[int]) -> Sequence[Payload]:
        """Return the byte ranges [start, end) in order. Raises NotFound, TenantErased, Corrupt or StoreUnavailable."""
        return self._sealed.get_ranges(name, starts, ends)

    def size_bytes(self, name: str) -> int:
        """Return an object's size in clear."""
        return self._sealed.size_bytes(name)

    def names(self, prefix: str) -> Iterator[tuple[str, int]]:
        """Yield (name, size in clear) below `prefix`; nothing of an erased tenant."""
        return self._sealed.names(prefix)

    def delete(self, name: str) -> None:
        """Remove an object, then its parity."""
        self._sealed.delete(name)

    def add_parity(self, name: str, data: bytes) -> None:
        """Make the parity of an object that is what was written. Raises Corrupt, StoreUnavailable, ConfigError."""
        self._stored.add_parity(name, self._stored_of(name, data))

    def reconstruct(self, name: str) -> bytes | None:
        """Return an object as it was written, None where too much of it or of its parity is lost, or it was erased."""
        stored = self._stored.reconstruct(name)
        try:
            return None if stored is None else self._sealed.sealing.open(name, stored)
        except PermanentError as err:
            _log.warning("%s", err)
            return None

    def damage_of(self, name: str, data: bytes) -> str | None:
        """Return what is wrong with the parity of an object that is what was written. Raises NotFound, Corrupt."""
        return self._stored.damage_of(name, self._stored_of(name, data))

    def renew_parity(self, name: str, data: bytes) -> None:
        """Put the parity of a sound object in the place of a broken one."""
        self._stored.renew_parity(name, self._stored_of(name, data))

    def replace(self, name: str, data: Payload) -> None:
        """Put an object's own bytes in the place of what became of them: just as they were stored where parity knows.

        Else sealed anew, with new parity. Raises StoreUnavailable.
        """
        stored = self._stored.reconstruct(name)
        try:
            if stored is not None and self._sealed.sealing.open(name, stored) == data:
                self._stored.replace(name, stored)
                self._sealed.sealing.forget(name)
                return
        except PermanentError:
            pass
        self._sealed.replace(name, data)
        if self.adds:
            try:
                self._stored.add_parity(name, self._stored.get(name))
            except NearkinError as err:
                _log.warning("%s has no parity yet, the next scrub or `nearkin repair` adds it: %s", name, err)

    def _stored_of(self, name: str, data: bytes) -> bytes:
        """Return a sound object as it is stored. Raises Corrupt where it is not `data`."""
        stored = self._stored.get(name)
        if self._sealed.sealing.open(name, stored) != data:
            raise Corrupt(f"{name}: is not what it was a moment ago")
        return stored

    # --- as a whole --------------------------------------------------------------------------------------------------

    def decrypt(self, name: str, stored: bytes) -> bytes:
        """Return the object of that name from a copy as it was stored. Raises TenantErased, Corrupt, FormatTooNew."""
        return self._sealed.sealing.open(name, stored)

    def encryption_bytes(self) -> int:
        """Return what encryption adds to what is stored: heads, tags and keys. One listing of all."""
        added = sum(size_bytes for _, size_bytes in self.keyring.names())
        for folder in ("containers", "manifests", "gc", "pause", "quarantine", "scrub"):
            stored = dict(self.inner.names(folder))
            added += sum(stored.get(name, size_bytes) - size_bytes for name, size_bytes in self.names(folder))
        return added

    def erased_objects(self, *, due: bool = False) -> list[tuple[str, int]]:
        """Return (name, bytes with its parity) of the objects of erased tenants that exist: manifests and marks first.

        `due`: only of those whose grace is over.
        """
        found = self._sealed.erased_objects(self.keyring.due_erasures() if due else self.keyring.unswept())
        parity = dict(self.inner.names(FOLDER)) if found else {}
        return [(name, size_bytes + parity.get(parity_name(name), 0)) for name, size_bytes in found]

    def names_of_domain(self, folder: str, domain: bytes) -> list[str]:
        """Return the names of all objects below a folder that a domain's keys sealed. Raises StoreUnavailable."""
        return self._sealed.names_of_owner(folder, self.keyring.owner_of(domain))

    def salvage(self, name: str) -> bytes | None:
        """Return an object as far as it can be read, zeros where it cannot; None where its head is broken."""
        return self._sealed.salvage(name)

    def sweep_erased(self, check: Callable[[], None] = lambda: None) -> list[tuple[str, int]]:
        """Remove keys and objects of erased tenants; return (name, bytes) of each. Who dies in between begins anew.

        `check` is asked before each, and raises where nothing may be removed any more. `confirm_swept` comes after all
        else that the erasure removes.
        """
        self.keyring.finish_erasures()
        found = self.erased_objects(due=True)
        for name, _ in found:
            check()
            self._stored.delete(name)
        return found

    def confirm_swept(self) -> None:
        """Record that nothing is left of erasures that are due, once no process can write more."""
        for owner in sorted(self.keyring.due_erasures()):
            self.keyring.swept(owner)


def put_new_of_tenant(objects: ObjectStore, tenant: str, name: str, *parts: Payload) -> None:
    """Write an object that belongs to a tenant: in an encrypted store under its keys, whatever the object says.

    Raises AlreadyExists, TenantErased, StoreUnavailable.
    """
    if isinstance(objects, EncryptedObjectStore):
        objects.put_new_of_tenant(tenant, name, *parts)
    else:
        objects.put_new(name, *parts)


def key_names(objects: ObjectStore) -> list[str]:
    """Return the names of all wrapped keys, and of what says that some were erased; none of a store in clear."""
    return [name for name, _ in objects.keyring.names()] if isinstance(objects, EncryptedObjectStore) else []


def check_keys(objects: ObjectStore, tenant: str, catalog: Callable[[str], Iterator[object]]) -> None:
    """Raise TenantErased where a tenant was, KeysLost where its keys are gone and `catalog` knows versions of it."""
    if isinstance(objects, EncryptedObjectStore):
        objects.keyring.check_not_lost(tenant, lambda: next(catalog(tenant), None) is not None)


@contextmanager
def overlaid(objects: ObjectStore) -> Iterator[ObjectStore]:
    """Return a store as it would be: what is written stays apart, sealed and with parity as it would be there."""
    with ExitStack() as overlays:
        yield rewrap_lowest(objects, lambda lowest: overlays.enter_context(OverlayObjectStore(lowest)))

"""Store encrypted objects with parity.

    readers, writers -> encrypted or decrypted here -> parity -> local folder or S3

So damage is repaired, byte for byte, without a key, and erased data stay unreadable, their parity included.

Invariant: parity covers the encrypted bytes; every byte that is read was authenticated.
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
    """Plaintext objects with parity; the bytes in `inner`, and their parity, are encrypted."""

    def __init__(self, inner: ObjectStore, scheme: Scheme | None, keyring: Keyring) -> None:
        super().__init__(inner, scheme)
        self.keyring = keyring
        sealing = ObjectEncryption(keyring)
        self._stored = ParityObjectStore(inner, scheme)
        self._sealed = EncryptingObjectStore(self._stored, sealing)
        self._bare = EncryptingObjectStore(inner, sealing)

    def authenticate_records(self, secret: bytes) -> None:
        """Do nothing: encryption authenticates records."""

    def open_blocked(self) -> EncryptedObjectStore:
        """Return the objects for a verification, also those that a forged erasure hides."""
        if all(erasure.problem is None for erasure in self.keyring.erasures()):
            return self
        return EncryptedObjectStore(self.inner, self._scheme, self.keyring.open_blocked())

    @property
    def without_parity(self) -> ObjectStore:
        """Return the plaintext objects without the use of parity."""
        return self._bare

    def rewrap(self, wrap: Callable[[ObjectStore], ObjectStore]) -> Self:
        """Return a copy of this wrapper over `wrap` of the innermost store."""
        return type(self)(rewrap_lowest(self.inner, wrap), self._scheme, self.keyring)

    def takes_bytes(self, name: str, object_bytes: int) -> int:
        """Return the stored size of a new object, encrypted and with parity."""
        return super().takes_bytes(name, encrypted_bytes(object_bytes) if is_encrypted(name) else object_bytes)

    def clear_bytes(self, name: str, stored_bytes: int) -> int:
        """Return the plaintext size of a stored object; negative if it is truncated."""
        return plain_bytes(stored_bytes) if is_encrypted(name) else stored_bytes

    def check_tenant(self, tenant: str) -> None:
        """Raise TenantErased if the tenant was erased."""
        self.keyring.check_tenant(tenant)

    def put_new(self, name: str, *parts: Payload) -> None:
        """Encrypt and write an object, then its parity.

        Raises AlreadyExists, TenantErased, StoreUnavailable.
        """
        self._sealed.put_new(name, *parts)

    def put_new_of_tenant(self, tenant: str, name: str, *parts: Payload) -> None:
        """Write an object under a tenant's keys.

        Raises AlreadyExists, TenantErased, StoreUnavailable.
        """
        self._sealed.put_new_of_tenant(tenant, name, *parts)

    def get(self, name: str) -> bytes:
        """Return a whole object. Raises NotFound, TenantErased, Corrupt or StoreUnavailable."""
        return self._sealed.get(name)

    def get_ranges(self, name: str, starts: Sequence[int], ends: Sequence[int]) -> Sequence[Payload]:
        """Return the byte ranges [start, end) in order.

        Raises NotFound, TenantErased, Corrupt or StoreUnavailable.
        """
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
        """Write the parity of an undamaged object.

        Raises Corrupt, StoreUnavailable, ConfigError.
        """
        self._stored.add_parity(name, self._stored_of(name, data))

    def reconstruct(self, name: str) -> bytes | None:
        """Return an object as written; None if it was erased or too much of it is lost."""
        stored = self._stored.reconstruct(name)
        try:
            return None if stored is None else self._sealed.sealing.open(name, stored)
        except PermanentError as err:
            _log.warning("%s", err)
            return None

    def damage_of(self, name: str, data: bytes) -> str | None:
        """Return the problem of an undamaged object's parity, or None. Raises NotFound, Corrupt."""
        return self._stored.damage_of(name, self._stored_of(name, data))

    def renew_parity(self, name: str, data: bytes) -> None:
        """Replace the damaged parity of an undamaged object."""
        self._stored.renew_parity(name, self._stored_of(name, data))

    def replace(self, name: str, data: Payload) -> None:
        """Replace a damaged object by its original bytes.

        They are the stored bytes if parity can reconstruct them, otherwise the object is encrypted again, with new
        parity.
        Raises StoreUnavailable.
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
        """Decrypt a copy of a stored object. Raises TenantErased, Corrupt, FormatTooNew."""
        return self._sealed.sealing.open(name, stored)

    def encryption_bytes(self) -> int:
        """Return what encryption adds to what is stored: heads, tags and keys. One listing of all."""
        added = sum(size_bytes for _, size_bytes in self.keyring.names())
        for folder in ("containers", "manifests", "gc", "pause", "quarantine", "scrub"):
            stored = dict(self.inner.names(folder))
            added += sum(stored.get(name, size_bytes) - size_bytes for name, size_bytes in self.names(folder))
        return added

    def erased_objects(self, *, due: bool = False) -> list[tuple[str, int]]:
        """Return (name, bytes with parity) of existing objects of erased tenants.

        Manifests and marks first. `due`: only of tenants whose grace is over.
        """
        found = self._sealed.erased_objects(self.keyring.due_erasures() if due else self.keyring.unswept())
        parity = dict(self.inner.names(FOLDER)) if found else {}
        return [(name, size_bytes + parity.get(parity_name(name), 0)) for name, size_bytes in found]

    def names_of_domain(self, folder: str, domain: bytes) -> list[str]:
        """Return the names of all objects below a folder under a domain's keys.

        Raises StoreUnavailable.
        """
        return self._sealed.names_of_owner(folder, self.keyring.owner_of(domain))

    def salvage(self, name: str) -> bytes | None:
        """Return an object with zeros for unreadable parts; None if its head is damaged."""
        return self._sealed.salvage(name)

    def sweep_erased(self, check: Callable[[], None] = lambda: None) -> list[tuple[str, int]]:
        """Remove keys and objects of erased tenants; return (name, bytes) of each.

        An interrupted call is repeated as a whole. `check` is called before each removal, and raises if removals are no
        longer
        permitted. `confirm_swept` follows after everything else that the erasure removes.
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
    """Write an object of a tenant: in an encrypted store under the tenant's keys.

    Raises AlreadyExists, TenantErased, StoreUnavailable.
    """
    if isinstance(objects, EncryptedObjectStore):
        objects.put_new_of_tenant(tenant, name, *parts)
    else:
        objects.put_new(name, *parts)


def open_blocked(objects: ParityObjectStore) -> ParityObjectStore:
    """Return the objects that a verification or a scrub reads.

    In an encrypted store also those of tenants that a forged erasure record hides. Raises StoreUnavailable.
    """
    return objects.open_blocked() if isinstance(objects, EncryptedObjectStore) else objects


def key_names(objects: ObjectStore) -> list[str]:
    """Return the names of all key and erasure records; none if the store is not encrypted."""
    return [name for name, _ in objects.keyring.names()] if isinstance(objects, EncryptedObjectStore) else []


def check_keys(objects: ObjectStore, tenant: str, catalog: Callable[[str], Iterator[object]]) -> None:
    """Raise TenantErased if the tenant was erased, KeysLost if its keys are missing.

    Keys are missing if there are none and `catalog` has versions of the tenant.
    """
    if isinstance(objects, EncryptedObjectStore):
        objects.keyring.check_not_lost(tenant, lambda: next(catalog(tenant), None) is not None)


@contextmanager
def overlaid(objects: ObjectStore) -> Iterator[ObjectStore]:
    """Overlay a store: new objects are kept apart, encrypted and with parity as in the store."""
    with ExitStack() as overlays:
        yield rewrap_lowest(objects, lambda lowest: overlays.enter_context(OverlayObjectStore(lowest)))

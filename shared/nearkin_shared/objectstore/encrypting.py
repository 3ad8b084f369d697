"""Encrypt the objects of an object store.

    put_new -> encrypt -> inner      get, ranges -> inner -> decrypt (each page authenticated) -> the bytes

Sizes are those of plaintext objects. Key records and parity are stored unencrypted, next to the objects.

Invariant: the inner store reveals an object's size, its owner's key and its name, and no more.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate

from nearkin_shared.crypto.keyring import Keyring
from nearkin_shared.errors import Corrupt, FormatTooNew, NotFound, PermanentError, StoreUnavailable
from nearkin_shared.fingerprints import domain_of
from nearkin_shared.formats import encrypted_object as fmt
from nearkin_shared.formats import key_record as keys
from nearkin_shared.formats.container_layout import HEADER as CONTAINER_HEADER
from nearkin_shared.formats.manifest import tenant_of_manifest
from nearkin_shared.formats.retention_record import tenant_of_retention
from nearkin_shared.formats.tombstone import tenant_of_mark
from nearkin_shared.limits import MIB
from nearkin_shared.objectstore.base import ObjectStore, Payload, SupportsReplace, join_parts
from nearkin_shared.objectstore.parity import FOLDER as PARITY
from nearkin_shared.objectstore.parity import SupportsReconstruction
from nearkin_shared.storage import descriptor

HEADS_MAX = 4096
"""Heads and sizes in the cache: 600 bytes each, and two requests less for the next range."""
SCRATCH_BYTES_MAX = 8 * MIB
"""Buffer that each thread keeps, bytes; a larger range has memory of its own."""
HEAD_THREADS = 16
"""Concurrent reads of heads if the store is remote: only while a tenant is erased and not swept."""
OWNED = ("containers", "manifests", "uploads")
"""Folders of objects that belong to tenants."""


class _Scratch(threading.local):
    """Buffers of each thread for encrypted pages, used again.

    The first touch of memory costs as much as decrypting into it (3.9 MB: 8 ms in new memory, 3 ms in this).
    """

    def __init__(self) -> None:
        self._room = fmt.allocate(0)

    def take(self, size_bytes: int) -> memoryview:
        """Return so many bytes, undefined, until the thread asks again."""
        if size_bytes > SCRATCH_BYTES_MAX:
            return fmt.allocate(size_bytes)
        if size_bytes > len(self._room):
            self._room = fmt.allocate(size_bytes)
        return self._room[:size_bytes]


_scratch = _Scratch()


class ObjectEncryption:
    """Encrypts and decrypts objects of one store, with the heads of objects read before.

    Safe between threads.
    """

    def __init__(self, keyring: Keyring) -> None:
        self.keyring = keyring
        self._heads: OrderedDict[str, tuple[fmt.PageCipher, bytes]] = OrderedDict()
        """By name, with the data key that its cipher was made from."""
        self._sizes: OrderedDict[str, int] = OrderedDict()
        self._lock = threading.Lock()

    def seal(self, name: str, data: Payload, tenant: str | None = None) -> Payload:
        """Return the stored bytes of an object, under its tenant's keys.

        `tenant` is needed for an object that does not name its owner. Raises TenantErased, ConfigError, Corrupt,
        StoreUnavailable.
        """
        if not is_encrypted(name) and name != descriptor.NAME:
            return data
        key = self.keyring.newest(domain_of_object(name, data) if tenant is None else domain_of(tenant))
        made = fmt.encrypt(name, data, key.owner, key.number, key.secret)
        return keys.encode_envelope(made) if name == descriptor.NAME else made

    def open(self, name: str, stored: bytes) -> bytes:
        """Decrypt a whole stored object. Raises TenantErased, Corrupt, FormatTooNew."""
        if not is_encrypted(name) and name != descriptor.NAME:
            return stored
        if name == descriptor.NAME:
            sealed = keys.decode_envelope(stored, name)
            if sealed is None:
                raise Corrupt(f"{name}: is in clear, and this store is encrypted: restore it from a copy")
            stored = sealed
        return self.cipher(name, stored).decrypt_object(stored, _scratch.take)

    def cipher(self, name: str, stored: bytes) -> fmt.PageCipher:
        """Return the cipher of an object that begins with these bytes."""
        head = fmt.head_of(stored, name)
        key = self.keyring.key(head.owner, head.number, name)
        made = fmt.PageCipher(head, name, key.secret)
        with self._lock:
            self._heads[name] = made, key.secret
            self._heads.move_to_end(name)
            if len(self._heads) > HEADS_MAX:
                self._heads.popitem(last=False)
        return made

    def known(self, name: str) -> fmt.PageCipher | None:
        """Return the cached cipher of an object if its key exists. Raises TenantErased."""
        with self._lock:
            entry = self._heads.get(name)
        if entry is None:
            return None
        made, secret = entry
        if self.keyring.key(made.head.owner, made.head.number, name).secret != secret:
            return None
        return made

    def size_of(self, name: str) -> int | None:
        """Return the plaintext size that `note_size` recorded, or None if it is not cached."""
        with self._lock:
            return self._sizes.get(name)

    def note_size(self, name: str, object_bytes: int) -> None:
        """Cache an object's size."""
        with self._lock:
            self._sizes[name] = object_bytes
            self._sizes.move_to_end(name)
            if len(self._sizes) > HEADS_MAX:
                self._sizes.popitem(last=False)

    def forget(self, name: str) -> None:
        """Remove an object's head and size from the cache."""
        with self._lock:
            self._heads.pop(name, None)
            self._sizes.pop(name, None)


class EncryptingObjectStore:
    """An object store over another, in which all objects are sealed."""

    def __init__(self, below: ObjectStore, sealing: ObjectEncryption) -> None:
        self.below = below
        self.sealing = sealing

    @property
    def far(self) -> bool:
        """Return whether reads of the store below take long."""
        return self.below.far

    def check_tenant(self, tenant: str) -> None:
        """Raise TenantErased where a tenant was."""
        self.sealing.keyring.check_tenant(tenant)

    def put_new(self, name: str, *parts: Payload) -> None:
        """Seal and write an object. Raises AlreadyExists, TenantErased, StoreUnavailable."""
        self.below.put_new(name, self.sealing.seal(name, join_parts(parts)))

    def put_new_of_tenant(self, tenant: str, name: str, *parts: Payload) -> None:
        """Write an object under a tenant's keys.

        Raises AlreadyExists, TenantErased, StoreUnavailable.
        """
        self.check_tenant(tenant)
        self.below.put_new(name, self.sealing.seal(name, join_parts(parts), tenant))

    def get(self, name: str) -> bytes:
        """Return a whole object. Raises NotFound, TenantErased, Corrupt or StoreUnavailable."""
        return self.sealing.open(name, self.below.get(name))

    def get_ranges(self, name: str, starts: Sequence[int], ends: Sequence[int]) -> Sequence[Payload]:
        """Return the byte ranges [start, end) in order.

        Raises NotFound, TenantErased, Corrupt or StoreUnavailable.
        """
        if not is_encrypted(name):
            whole = self.get(name)
            return [whole[start:end] for start, end in zip(starts, ends, strict=True)]
        try:
            return self._ranges(name, self.sealing.known(name), starts, ends)
        except (Corrupt, NotFound) as err:  # or it was replaced and encrypted again, or put again
            self.sealing.forget(name)
            if isinstance(err, NotFound):
                raise
            return self._ranges(name, None, starts, ends)

    def _ranges(
        self, name: str, cipher: fmt.PageCipher | None, starts: Sequence[int], ends: Sequence[int]
    ) -> list[bytes]:
        """Read whole pages, and the head if it is not cached."""
        object_bytes = self._object_bytes(name) if cipher is None else cipher.head.object_bytes
        bounds = [(min(start, object_bytes), min(end, object_bytes)) for start, end in zip(starts, ends, strict=True)]
        runs = fmt.page_runs([start for start, _ in bounds], [end for _, end in bounds])
        where = [fmt.stored_range(first, end, object_bytes) for first, end in runs]
        if cipher is None:
            where.insert(0, (0, fmt.HEAD.size))
        stored = list(self.below.get_ranges(name, [start for start, _ in where], [end for _, end in where]))
        if cipher is None:
            cipher = self.sealing.cipher(name, bytes(stored.pop(0)))
            if cipher.head.object_bytes != object_bytes:
                raise Corrupt(f"{name}: its head states {cipher.head.object_bytes} bytes, its size {object_bytes}")
        places = list(accumulate(((end - first) * fmt.PAGE_BYTES for first, end in runs), initial=0))
        plain = _scratch.take(places[-1])
        for at, (first, end), data in zip(places, runs, stored, strict=False):
            cipher.open_into(data, first, end, plain[at:])
        firsts, found = [first for first, _ in runs], []
        for start, end in bounds:
            run = bisect_right(firsts, start // fmt.PAGE_BYTES) - 1
            shift = places[run] - firsts[run] * fmt.PAGE_BYTES if start < end else 0
            found.append(bytes(plain[start + shift : end + shift]) if start < end else b"")
        return found

    def _object_bytes(self, name: str) -> int:
        """Return an object's plaintext size, which never changes: requested once, then cached."""
        known = self.sealing.size_of(name)
        return self.size_bytes(name) if known is None else known

    def size_bytes(self, name: str) -> int:
        """Return an object's plaintext size. Raises NotFound, Corrupt (an impossible size)."""
        stored_bytes = self.below.size_bytes(name)
        if not is_encrypted(name):
            return stored_bytes
        found = fmt.plain_bytes(stored_bytes)
        if found < 0:
            raise Corrupt(f"{name}: no encrypted object has {stored_bytes} bytes: truncated or padded")
        self.sealing.note_size(name, found)
        return found

    def reconstruct(self, name: str) -> bytes | None:
        """Return a plaintext object as written, if the inner store can reconstruct it."""
        stored = self.below.reconstruct(name) if isinstance(self.below, SupportsReconstruction) else None
        try:
            return None if stored is None else self.sealing.open(name, stored)
        except PermanentError:
            return None

    def names(self, prefix: str) -> Iterator[tuple[str, int]]:
        """Yield (name, plaintext size) below `prefix`, without objects of erased tenants."""
        listed = self.below.names(prefix)
        if prefix.partition("/")[0] in OWNED and (hidden := self.sealing.keyring.unswept()):
            entries = list(listed)
            gone = set(self._of_owners([name for name, _ in entries], hidden))
            listed = iter([entry for entry in entries if entry[0] not in gone])
        for name, stored_bytes in listed:
            if is_encrypted(name):
                plain_bytes = fmt.plain_bytes(stored_bytes)
                yield name, stored_bytes if plain_bytes < 0 else plain_bytes
            else:
                yield name, stored_bytes

    def salvage(self, name: str) -> bytes | None:
        """Return an object with zeros for unreadable parts; None if its head is damaged.

        Raises NotFound, TenantErased, StoreUnavailable.
        """
        try:
            stored = self.below.get(name)
            return self.sealing.cipher(name, stored).salvage(stored) if is_encrypted(name) else stored
        except (Corrupt, FormatTooNew):
            return None

    def delete(self, name: str) -> None:
        """Delete an object, durably."""
        self.below.delete(name)
        self.sealing.forget(name)

    def replace(self, name: str, data: Payload) -> None:
        """Replace a damaged object by its original bytes, encrypted again.

        Raises StoreUnavailable.
        """
        if not isinstance(self.below, SupportsReplace):
            raise StoreUnavailable(f"{name}: this object store cannot replace an object")
        self.below.replace(name, self.sealing.seal(name, data))
        self.sealing.forget(name)

    # --- erased tenants ----------------------------------------------------------------------------------------------

    def erased_objects(self, owners: frozenset[bytes]) -> list[tuple[str, int]]:
        """Return (name, stored bytes) of all objects of these owners: manifests and marks first."""
        if not owners:
            return []
        found = []
        for folder in reversed(OWNED):
            sizes = dict(self.below.names(folder))
            found += [(name, sizes[name]) for name in self._of_owners(sorted(sizes), owners)]
        return found

    def names_of_owner(self, folder: str, owner: bytes) -> list[str]:
        """Return the names of objects below a folder under one owner's keys; reads each head."""
        return list(self._of_owners(sorted(name for name, _ in self.below.names(folder)), frozenset([owner])))

    def _of_owners(self, names: Iterable[str], owners: frozenset[bytes]) -> Iterator[str]:
        def is_erased(name: str) -> bool:
            try:
                (head,) = self.below.get_ranges(name, [0], [fmt.HEAD.size])
                return fmt.head_of(head, name).owner in owners
            except (NotFound, Corrupt):
                return False

        wanted = list(names)
        if not self.far:
            yield from (name for name in wanted if is_erased(name))
            return
        with ThreadPoolExecutor(HEAD_THREADS) as threads:
            yield from (name for name, gone in zip(wanted, threads.map(is_erased, wanted), strict=True) if gone)


def is_encrypted(name: str) -> bool:
    """Return whether an object of this name is encrypted."""
    return name != descriptor.NAME and not name.startswith((f"{PARITY}/", f"{keys.FOLDER}/"))


def domain_of_object(name: str, data: Payload) -> bytes | None:
    """Return the dedup domain that a plaintext object names; None for the store's own."""
    head = bytes(memoryview(data)[:4])
    if name.startswith("containers/") and head == b"NKC1":
        domain: bytes = CONTAINER_HEADER.unpack_from(data)[4]
        return domain
    if name.startswith("manifests/") and head == b"NKM1":
        return domain_of(tenant_of_manifest(data))
    if name.startswith("manifests/") and head == b"NKT1":
        return domain_of(tenant_of_mark(data))
    if name.startswith("manifests/") and head == b"NKR1":
        return domain_of(tenant_of_retention(data))
    return None

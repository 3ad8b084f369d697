"""Store objects with parity.

    containers/1a200/1a2...nkc      parity/containers/1a200/1a2...nkc.nkp

A reader that finds a damaged object calls `reconstruct` for its original bytes, which changes nothing. `replace` writes
them: the only way in which an object is overwritten.

Invariant: an object is durable before its parity is written, whether or not that succeeds.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol, TypeVar, runtime_checkable

from nearkin_shared.errors import Corrupt, FormatTooNew, NearkinError, NotFound, PermanentError, StoreUnavailable
from nearkin_shared.formats import parity_object as fmt
from nearkin_shared.formats import record_authentication
from nearkin_shared.formats.parity_object import Scheme
from nearkin_shared.limits import DESCRIPTOR
from nearkin_shared.objectstore.base import AlreadyExists, ObjectStore, Payload, SupportsReplace
from nearkin_shared.objectstore.delegating import DelegatingObjectStore
from nearkin_shared.observability import counters
from nearkin_shared.utils.failpoints import failpoint

FOLDER = "parity"
SUFFIX = ".nkp"
COVERED = ("containers/", "manifests/", "keys/", DESCRIPTOR, "chunking.json")
"""Folders with parity: the primary data. Pending deletes and quarantine are found again."""
Decoded = TypeVar("Decoded")
_log = logging.getLogger("nearkin")


@runtime_checkable
class SupportsReconstruction(Protocol):
    """An object store that may know what an object was that is damaged."""

    def reconstruct(self, name: str) -> bytes | None:
        """Return an object as written; None if that is unknown. Raises StoreUnavailable."""


def parity_name(name: str) -> str:
    """Return the object name of an object's parity."""
    return f"{FOLDER}/{name}{SUFFIX}"


def is_covered(name: str) -> bool:
    """Return whether an object of this name has parity, where there is any."""
    return name.startswith(COVERED)


class ParityObjectStore(DelegatingObjectStore):
    """An object store that adds parity if `scheme` is set, and uses existing parity.

    Parity is deleted with its object.
    """

    def __init__(self, inner: ObjectStore, scheme: Scheme | None) -> None:
        super().__init__(inner)
        self._scheme = scheme
        self._some: bool | None = True if scheme is not None else None
        self._record_key: bytes | None = None

    @property
    def record_key(self) -> bytes | None:
        """Return the key that authenticates records: known once the descriptor was read."""
        return self._record_key

    def authenticate_records(self, secret: bytes) -> None:
        """Authenticate records from now on under a key derived from the store's secret."""
        self._record_key = record_authentication.record_key(secret)

    @property
    def without_parity(self) -> ObjectStore:
        """Return the objects as they lie there, whatever parity would make of them."""
        return self.inner

    def takes_bytes(self, name: str, object_bytes: int) -> int:
        """Return what an object of so many bytes takes that is written now, its parity included."""
        if self._scheme is None or not is_covered(name):
            return object_bytes
        return object_bytes + fmt.bytes_of_parity(object_bytes, self._scheme)

    def put_new(self, name: str, *parts: Payload) -> None:
        """Write an object, then its parity.

        Raises AlreadyExists, StoreUnavailable: only for the object itself.
        """
        self.inner.put_new(name, *parts)
        if self._scheme is not None and is_covered(name):
            failpoint("parity.begun")
            try:
                self.add_parity(name, b"".join(parts))
            except NearkinError as err:  # the object is there: to say otherwise would make its writer write it again
                _log.warning("%s has no parity yet, the next scrub or `nearkin repair` adds it: %s", name, err)

    def add_parity(self, name: str, data: bytes) -> None:
        """Write the parity of an undamaged object. Raises StoreUnavailable, ConfigError."""
        if self._scheme is None:
            return
        made, of_it = fmt.encode_parity(name, data, self._scheme), parity_name(name)
        try:
            self.inner.put_new(of_it, made)
            failpoint("parity.put")
        except AlreadyExists:
            if self._parity(name) != made:
                self._replace(of_it, made)

    def delete(self, name: str) -> None:
        """Delete an object's parity, then the object; a repeated call is no error.

        In this order, because nothing would delete parity without an object, but a GC run deletes a remaining object
        again.
        """
        if is_covered(name) and self.has_some:
            self.inner.delete(parity_name(name))
            failpoint("parity.removed")
        self.inner.delete(name)

    @property
    def has_some(self) -> bool:
        """Return whether there is any parity, as far as known: a far store without is asked once.

        One in a folder is asked until there is: another process may have other settings, and looking takes 6 us.
        """
        if self._some is None or (not self._some and not self.far):
            self._some = next(iter(self.inner.names(FOLDER)), None) is not None
        return self._some

    @property
    def adds(self) -> bool:
        """Return whether objects get parity from now on."""
        return self._scheme is not None

    def is_stored(self, name: str, data: bytes) -> bool:
        """Return whether an object is `data`; False if it is damaged. Raises NotFound."""
        try:
            return self.get(name) == data
        except Corrupt:
            return False

    def reconstruct(self, name: str) -> bytes | None:
        """Return an object as it was written, None where too much of it or of its parity is lost."""
        found = self._reconstruct(name)
        counters.MENDED.add(1, "no" if found is None else "yes")
        return found

    def _reconstruct(self, name: str) -> bytes | None:
        try:
            parity = self._parity(name)
        except PermanentError:
            return None
        if parity is None:
            return None
        try:
            data = self.inner.get(name)
        except PermanentError:  # missing, or the device cannot read it: all of it is lost
            data = b""
        try:
            return fmt.reconstruct(name, data, parity)
        except PermanentError as err:
            _log.warning("%s", err)
            return None

    def damage_of(self, name: str, data: bytes) -> str | None:
        """Return the problem of an undamaged object's parity, or None.

        Every byte is compared with newly computed parity. Raises NotFound if the object has none.
        """
        stored = self.inner.get(parity_name(name))
        try:
            head = fmt.head_of(stored, name)
            if fmt.encode_parity(name, data, Scheme(head.data, head.parity)) == stored:
                return None
        except Corrupt as err:
            return str(err)
        return f"{parity_name(name)}: not the parity of its object"

    def renew_parity(self, name: str, data: bytes) -> None:
        """Replace damaged parity of an undamaged object, by its former scheme if known.

        Without a scheme the damaged parity is deleted: it repairs nothing, and would be reported as damage forever.
        """
        scheme = self._scheme
        try:
            head = fmt.head_of(self.inner.get(parity_name(name)), name)
            scheme = scheme or Scheme(head.data, head.parity)
        except Corrupt:
            if scheme is None:
                self.inner.delete(parity_name(name))
        except PermanentError:
            pass
        if scheme is not None:
            self._replace(parity_name(name), fmt.encode_parity(name, data, scheme))

    def replace(self, name: str, data: Payload) -> None:
        """Replace a damaged object by its original bytes. Raises StoreUnavailable."""
        self._replace(name, data)

    def _replace(self, name: str, data: Payload) -> None:
        if not isinstance(self.inner, SupportsReplace):
            raise StoreUnavailable(f"{name}: this object store cannot replace an object")
        self.inner.replace(name, data)

    def _parity(self, name: str) -> bytes | None:
        if not is_covered(name):
            return None
        try:
            return self.inner.get(parity_name(name))
        except NotFound:
            return None


def read_decoded(objects: ObjectStore, name: str, decode: Callable[[bytes, str], Decoded]) -> Decoded:
    """Return the result of `decode` for an object, reconstructed if it is damaged.

    Raises NotFound, Corrupt, FormatTooNew, StoreUnavailable.
    """
    data: bytes | None = None
    try:
        data = objects.get(name)
        return decode(data, name)
    except (Corrupt, FormatTooNew) as err:  # a flipped bit may make a format of the future
        whole = objects.reconstruct(name) if isinstance(objects, SupportsReconstruction) else None
        if whole is None or whole == data:
            raise
        _log.warning("%s; read by its parity: run `nearkin repair`", err)
        return decode(whole, name)

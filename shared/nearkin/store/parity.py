"""Objects with parity. Invariant: an object is durable before its parity is made, and whatever becomes of that.

    containers/1a200/1a2...nkc      parity/containers/1a200/1a2...nkc.nkp

What reads an object, and finds that it is not what was written, asks `mended` for what was; nothing is changed by
that. `replace` puts it back: the only way in which an object is ever overwritten.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, TypeVar, runtime_checkable

from nearkin.errors import Corrupt, FormatTooNew, NearkinError, NotFound, Permanent, StoreUnavailable
from nearkin.formats import parity as fmt
from nearkin.formats.parity import Scheme
from nearkin.store.objects import AlreadyExists, ObjectStore, Payload, SupportsReplace

FOLDER = "parity"
SUFFIX = ".nkp"
COVERED = ("containers/", "manifests/", "nearkin.json")
"""What has parity: the truth. What is condemned or quarantined is found again."""
Decoded = TypeVar("Decoded")
_log = logging.getLogger("nearkin")


@runtime_checkable
class SupportsMending(Protocol):
    """An object store that may know what an object was that is damaged."""

    def mended(self, name: str) -> bytes | None:
        """Return an object as it was written, None where that is not known. Raises StoreUnavailable."""


def parity_name(name: str) -> str:
    """Return the object name of an object's parity."""
    return f"{FOLDER}/{name}{SUFFIX}"


def is_covered(name: str) -> bool:
    """Return whether an object of this name has parity, where there is any."""
    return name.startswith(COVERED)


class ParityObjects:
    """An object store whose objects get parity where `scheme` says so; that of others is used, and goes with them."""

    def __init__(self, inner: ObjectStore, scheme: Scheme | None) -> None:
        self.inner = inner
        self._scheme = scheme
        self._some: bool | None = True if scheme is not None else None

    @property
    def far(self) -> bool:
        """Return whether reads of the store below take long."""
        return self.inner.far

    def put_new(self, name: str, data: Payload) -> None:
        """Write an object, then its parity. Raises AlreadyExists, StoreUnavailable: of the object alone."""
        self.inner.put_new(name, data)
        if self._scheme is not None and is_covered(name):
            try:
                self.add_parity(name, bytes(data))
            except NearkinError as err:  # the object is there: to say otherwise would make its writer write it again
                _log.warning("%s has no parity yet, the next scrub or `nearkin repair` adds it: %s", name, err)

    def add_parity(self, name: str, data: bytes) -> None:
        """Make the parity of an object that is what was written. Raises StoreUnavailable, ConfigError."""
        if self._scheme is None:
            return
        made, of_it = fmt.encode_parity(name, data, self._scheme), parity_name(name)
        try:
            self.inner.put_new(of_it, made)
        except AlreadyExists:
            if self._parity(name) != made:
                self._replace(of_it, made)

    def get(self, name: str) -> bytes:
        """Return a whole object, as it is stored. Raises NotFound, Corrupt or StoreUnavailable."""
        return self.inner.get(name)

    def get_ranges(self, name: str, starts: Sequence[int], ends: Sequence[int]) -> list[bytes]:
        """Return the byte ranges [start, end), as they are stored."""
        return self.inner.get_ranges(name, starts, ends)

    def size_bytes(self, name: str) -> int:
        """Return an object's size."""
        return self.inner.size_bytes(name)

    def names(self, prefix: str) -> Iterator[tuple[str, int]]:
        """Yield (name, size in bytes) below `prefix`; parity lies below a name of its own."""
        return self.inner.names(prefix)

    def delete(self, name: str) -> None:
        """Remove an object, then its parity. Again is fine."""
        self.inner.delete(name)
        if is_covered(name) and self.has_some:
            self.inner.delete(parity_name(name))

    @property
    def has_some(self) -> bool:
        """Return whether there is any parity, as far as known: a store without is asked once."""
        if self._some is None:
            self._some = next(iter(self.inner.names(FOLDER)), None) is not None
        return self._some

    @property
    def adds(self) -> bool:
        """Return whether objects get parity from now on."""
        return self._scheme is not None

    def mended(self, name: str) -> bytes | None:
        """Return an object as it was written, None where too much of it or of its parity is lost."""
        try:
            parity = self._parity(name)
        except Permanent:
            return None
        if parity is None:
            return None
        try:
            data = self.inner.get(name)
        except Permanent:  # missing, or the device cannot read it: all of it is lost
            data = b""
        try:
            return fmt.mended(name, data, parity)
        except Permanent as err:
            _log.warning("%s", err)
            return None

    def damage_of(self, name: str, data: bytes) -> str | None:
        """Return what is wrong with the parity of an object that is what was written, None where nothing is.

        Every byte is compared with what it would be made of now. Raises NotFound where it has none.
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
        """Put the parity of a sound object in the place of a broken one, by the scheme that it had if that is known."""
        scheme = self._scheme
        try:
            head = fmt.head_of(self.inner.get(parity_name(name)), name)
            scheme = scheme or Scheme(head.data, head.parity)
        except Permanent:
            pass
        if scheme is not None:
            self._replace(parity_name(name), fmt.encode_parity(name, data, scheme))

    def replace(self, name: str, data: Payload) -> None:
        """Put an object's own bytes in the place of what became of them. Raises StoreUnavailable."""
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
    """Return what `decode` makes of an object; of what it was, where that is known, should it be damaged.

    Raises NotFound, Corrupt, FormatTooNew, StoreUnavailable.
    """
    data: bytes | None = None
    try:
        data = objects.get(name)
        return decode(data, name)
    except (Corrupt, FormatTooNew) as err:  # a flipped bit may make a format of the future
        whole = objects.mended(name) if isinstance(objects, SupportsMending) else None
        if whole is None or whole == data:
            raise
        _log.warning("%s; read by its parity: run `nearkin repair`", err)
        return decode(whole, name)

"""Erasure records of an encrypted store. Invariant: a record that does not verify erases and frees nothing.

    keys/erased/<owner>.nke      `keys erase` was run: due at once, or after a grace in which it can be cancelled
    keys/erased/<owner>.swept    nothing is left of what the owner's keys sealed

Both are authenticated under a key that is derived from the store's first data key. A record without authentication,
of an older Nearkin, is believed only where no key of the owner is left: nothing can be lost by it then.

A record holds the erasure epoch of its owner, which `heads/keys/` holds too and a cancel advances before it removes
the record: a record of an earlier epoch, put back from a copy, erases nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from nearkin_shared.crypto.key_heads import FOLDER as HEADS_FOLDER
from nearkin_shared.crypto.key_heads import KeyHeads
from nearkin_shared.errors import BadInput, Corrupt, NotFound, PermanentError, StoreUnavailable
from nearkin_shared.formats import key_record as fmt
from nearkin_shared.objectstore.base import AlreadyExists
from nearkin_shared.objectstore.parity import ParityObjectStore, parity_name, read_decoded
from nearkin_shared.utils.failpoints import failpoint
from nearkin_shared.utils.frozen import frozen


@frozen
class Erasure:
    """The erasure of one owner of keys."""

    owner: bytes
    erased_us: int = 0
    """Microseconds since 1970, UTC: when it was asked for."""
    due_us: int = 0
    """When the keys are removed: `erased_us` plus the grace."""
    problem: str | None = None
    """Why the record is not believed: the owner is blocked, and nothing of it is removed."""
    epoch: int = 0
    """The erasure epoch of the owner when it was recorded."""

    def is_due(self, now_us: int) -> bool:
        """Return whether the owner's keys and objects may be removed."""
        return self.problem is None and self.due_us <= now_us


class ErasureRecords:
    """The erasure records of one store. Safe between processes: each record is created exclusively."""

    def __init__(
        self,
        objects: ParityObjectStore,
        mac_key: Callable[[], bytes],
        heads: KeyHeads,
        has_keys: Callable[[bytes], bool],
    ) -> None:
        """`objects` as they are stored; `has_keys` tells whether an owner has a key record."""
        self._objects = objects
        self._mac_key = mac_key
        self._heads = heads
        self._has_keys = has_keys

    def find(self, owner: bytes) -> Erasure | None:
        """Return the erasure of an owner, None where there is no record. Raises StoreUnavailable."""
        name = fmt.erased_name(owner)
        try:
            found = self._read(name)
        except NotFound:
            return None
        except PermanentError as err:
            return Erasure(owner, problem=f"{err}; {_REMEDY}")
        problem = self._problem(owner, found)
        if problem is not None:
            return Erasure(owner, problem=f"{name}: {problem}; {_REMEDY}", epoch=found.epoch)
        return Erasure(owner, found.erased_us, found.due_us, epoch=found.epoch)

    def _problem(self, owner: bytes, found: fmt.ErasedRecord) -> str | None:
        """Return why an erasure record is not believed, None where it is. Raises StoreUnavailable."""
        if not found.authenticated:
            return "not authenticated, and keys of this owner exist" if self._has_keys(owner) else None
        try:
            epoch = self._heads.read().epochs.get(owner, 0)
        except Corrupt as err:
            return str(err)
        if found.epoch < epoch:
            return f"erasure epoch {found.epoch}, and the owner is at {epoch}: this erasure was cancelled"
        if found.epoch > epoch and self._has_keys(owner):
            return f"erasure epoch {found.epoch}, and {HEADS_FOLDER}/ has {epoch}: restore that folder from a copy"
        return None

    def all(self) -> dict[bytes, Erasure]:
        """Return every erasure whose objects may still exist, by owner. Raises StoreUnavailable."""
        listed = [fmt.erased_owner(name) for name, _ in self._objects.names(fmt.ERASED_FOLDER)]
        owners = sorted({said[0] for said in listed if said is not None})
        swept = {said[0] for said in listed if said is not None and said[1]}
        found = {}
        for owner in owners:
            erasure = self.find(owner) or Erasure(owner, problem=f"{fmt.erased_name(owner)}: missing; {_REMEDY}")
            if owner not in swept or erasure.problem is not None or not self._is_swept(erasure):
                found[owner] = erasure
        return found

    def add(self, owner: bytes, erased_us: int, due_us: int) -> Erasure:
        """Record an erasure, durably; return the one that holds. Raises StoreUnavailable.

        An earlier erasure holds, unless its record does not verify or is due later.
        """
        epoch = self._heads.read().epochs.get(owner, erased_us)
        self._heads.note_epoch(owner, epoch)
        made = Erasure(owner, erased_us, due_us, epoch=epoch)
        data = fmt.encode_erased(owner, erased_us, due_us, self._mac_key(), epoch=epoch)
        try:
            self._objects.put_new(fmt.erased_name(owner), data)
        except AlreadyExists:
            before = self.find(owner)
            if before is not None and before.problem is None and before.due_us <= due_us:
                return before
            self._replace(fmt.erased_name(owner), data)
        return made

    def _replace(self, name: str, data: bytes) -> None:
        """Replace a record: were it removed first, a process that dies in between would open the tenant again."""
        self._objects.inner.delete(parity_name(name))
        self._objects.replace(name, data)
        with suppress(StoreUnavailable):  # the record holds; `nearkin repair` adds the parity
            self._objects.add_parity(name, data)

    def cancel(self, owner: bytes, now_us: int) -> None:
        """Remove an erasure that is not due yet, for good.

        Raises NotFound, BadInput (too late), Corrupt (key heads), StoreUnavailable.
        """
        found = self.find(owner)
        if found is None:
            raise NotFound(f"{fmt.erased_name(owner)}: no erasure of this tenant to cancel; see `nearkin keys list`")
        if found.problem is None and (found.is_due(now_us) or not self._has_keys(owner)):
            raise BadInput(f"{fmt.erased_name(owner)}: the grace of this erasure is over; its keys are removed")
        # The epoch first: a copy of the record, put back later, is then refused. Also for a record that is not
        # believed, as it may have replaced one that is.
        self._heads.note_epoch(owner, max(now_us, found.epoch + 1, self._heads.read().epochs.get(owner, 0) + 1))
        failpoint("key.erasure-cancelled")
        self._remove(fmt.erased_name(owner))

    def add_swept(self, erasure: Erasure) -> None:
        """Record that no object of an erased owner is left. Raises StoreUnavailable."""
        data = fmt.encode_erased(
            erasure.owner, erasure.erased_us, erasure.due_us, self._mac_key(), epoch=erasure.epoch, swept=True
        )
        name = fmt.swept_name(erasure.owner)
        try:
            self._objects.put_new(name, data)
        except AlreadyExists:
            if not self._is_swept(erasure):
                self._remove(name)
                with suppress(AlreadyExists):
                    self._objects.put_new(name, data)

    def check(self, name: str) -> None:
        """Read a record as it is stored, past parity. Raises NotFound, Corrupt, FormatTooNew."""
        said = fmt.erased_owner(name)
        data = self._objects.inner.get(name)
        fmt.decode_erased(data, name, self._mac_key())
        found = None if said is None or said[1] else self.find(said[0])
        if found is not None and found.problem is not None:
            raise Corrupt(found.problem)

    def _is_swept(self, erasure: Erasure) -> bool:
        try:
            found = self._read(fmt.swept_name(erasure.owner))
        except PermanentError:
            return False
        if found.authenticated:
            return True
        # Both records of an older Nearkin: then the keys are gone, as `find` has looked.
        try:
            return not self._read(fmt.erased_name(erasure.owner)).authenticated
        except PermanentError:
            return False

    def _read(self, name: str) -> fmt.ErasedRecord:
        return read_decoded(self._objects, name, lambda data, what: fmt.decode_erased(data, what, self._mac_key()))

    def _remove(self, name: str) -> None:
        """Remove a record and its parity, whether or not parity is made now."""
        self._objects.inner.delete(parity_name(name))
        self._objects.inner.delete(name)


_REMEDY = (
    "the tenant is blocked and nothing of it is removed: if nobody ran `nearkin keys erase`, or it was cancelled, run "
    "`nearkin keys erase TENANT --cancel`, or remove the file, and find out who can write to the store; else run "
    "`nearkin keys erase` again"
)

"""Read and write the erasure records of an encrypted store.

    keys/erased/<owner>.nke      `keys erase` was run: due at once, or after a grace in which it can be cancelled
    keys/erased/<owner>.swept    no object under the owner's keys exists any more

Both are authenticated with a key derived from the store's first data key. A record without a MAC, of an older Nearkin,
is accepted only if no key of the owner exists: it cannot destroy anything then.

Invariant: a record that does not verify erases and frees nothing, and blocks its owner. A record of an earlier epoch
than the owner's was cancelled: it is reported and has no other effect. So advancing the epoch cancels an erasure in one
step, and a copy of the record that is put back later cannot close the tenant again.
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
    """Microseconds since 1970, UTC: time of the request."""
    due_us: int = 0
    """Time of the removal of the keys: `erased_us` plus the grace."""
    problem: str | None = None
    """Why the record is invalid: the owner is blocked, and no object of it is removed."""
    epoch: int = 0
    """The erasure epoch of the owner when it was recorded."""
    is_cancelled: bool = False
    """The owner's epoch is later: the record has no effect, and `problem` describes it."""

    def is_due(self, now_us: int) -> bool:
        """Return whether the owner's keys and objects may be removed."""
        return self.problem is None and self.due_us <= now_us


class ErasureRecords:
    """The erasure records of one store, each created exclusively; safe between processes."""

    def __init__(
        self,
        objects: ParityObjectStore,
        mac_key: Callable[[], bytes],
        heads: KeyHeads,
        has_keys: Callable[[bytes], bool],
    ) -> None:
        """`objects` are unencrypted; `has_keys` returns whether an owner has a key record."""
        self._objects = objects
        self._mac_key = mac_key
        self._heads = heads
        self._has_keys = has_keys

    def find(self, owner: bytes) -> Erasure | None:
        """Return the erasure of an owner, or None. Raises StoreUnavailable."""
        name = fmt.erased_name(owner)
        try:
            found = self._read(name)
        except NotFound:
            return None
        except PermanentError as err:
            return Erasure(owner, problem=f"{err}; {_REMEDY}")
        try:
            epoch = self._heads.read().epochs.get(owner, 0) if found.authenticated else found.epoch
        except Corrupt as err:
            return Erasure(owner, problem=f"{name}: {err}; {_REMEDY}", epoch=found.epoch)
        if found.epoch < epoch:
            problem = f"{name}: erasure epoch {found.epoch}, and the owner is at {epoch}: {_CANCELLED_REMEDY}"
            return Erasure(owner, problem=problem, epoch=found.epoch, is_cancelled=True)
        invalid = self._problem(owner, found, epoch)
        if invalid is not None:
            return Erasure(owner, problem=f"{name}: {invalid}; {_REMEDY}", epoch=found.epoch)
        return Erasure(owner, found.erased_us, found.due_us, epoch=found.epoch)

    def _problem(self, owner: bytes, found: fmt.ErasedRecord, epoch: int) -> str | None:
        """Return why a record that is not cancelled does not verify, or None.

        Raises StoreUnavailable.
        """
        if not found.authenticated:
            return "not authenticated, and keys of this owner exist" if self._has_keys(owner) else None
        if found.epoch > epoch and self._has_keys(owner):
            return f"erasure epoch {found.epoch}, and {HEADS_FOLDER}/ has {epoch}: restore that folder from a copy"
        return None

    def all(self) -> dict[bytes, Erasure]:
        """Return every erasure whose objects may still exist, by owner. Raises StoreUnavailable."""
        listed = [fmt.erased_owner(name) for name, _ in self._objects.names(fmt.ERASED_FOLDER)]
        owners = sorted({parsed_name[0] for parsed_name in listed if parsed_name is not None})
        swept = {parsed_name[0] for parsed_name in listed if parsed_name is not None and parsed_name[1]}
        found = {}
        for owner in owners:
            erasure = self.find(owner) or Erasure(owner, problem=f"{fmt.erased_name(owner)}: missing; {_REMEDY}")
            if owner not in swept or erasure.problem is not None or not self._is_swept(erasure):
                found[owner] = erasure
        return found

    def add(self, owner: bytes, erased_us: int, due_us: int) -> Erasure:
        """Record an erasure, durably; return the one that applies. Raises StoreUnavailable.

        An earlier erasure applies, unless its record does not verify or is due later.
        """
        epoch = self._heads.read().epochs.get(owner, erased_us)
        self._heads.note_epoch(owner, epoch)
        made = Erasure(owner, erased_us, due_us, epoch=epoch)
        data = fmt.encode_erased(owner, erased_us, due_us, self._mac_key(), epoch=epoch)
        try:
            self._objects.put_new(fmt.erased_name(owner), data)
        except AlreadyExists:
            earlier = self.find(owner)
            if earlier is not None and earlier.problem is None and earlier.due_us <= due_us:
                return earlier
            self._replace(fmt.erased_name(owner), data)
        return made

    def _replace(self, name: str, data: bytes) -> None:
        """Replace a record in one step: between a removal and a put the tenant would be open."""
        self._objects.inner.delete(parity_name(name))
        self._objects.replace(name, data)
        with suppress(StoreUnavailable):  # the record applies; `nearkin repair` adds the parity
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
        # The epoch first: it cancels the erasure in one step, and a copy of the record that is put back later has no
        # effect. Also for a record that does not verify, as it may have replaced one that does.
        self._heads.note_epoch(owner, max(now_us, found.epoch + 1, self._heads.read().epochs.get(owner, 0) + 1))
        failpoint("key.erasure-cancelled")
        self._remove(fmt.erased_name(owner))

    def add_swept(self, erasure: Erasure) -> None:
        """Record that no object of an erased owner exists. Raises StoreUnavailable."""
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
        """Verify a record as stored, without parity. Raises NotFound, Corrupt, FormatTooNew."""
        parsed_name = fmt.erased_owner(name)
        data = self._objects.inner.get(name)
        try:
            fmt.decode_erased(data, name, self._mac_key())
        except Corrupt as err:
            raise Corrupt(f"{err}; {_REMEDY}") from err
        found = None if parsed_name is None or parsed_name[1] else self.find(parsed_name[0])
        if found is not None and found.problem is not None:
            raise Corrupt(found.problem)

    def _is_swept(self, erasure: Erasure) -> bool:
        try:
            found = self._read(fmt.swept_name(erasure.owner))
        except PermanentError:
            return False
        if found.authenticated:
            return True
        # Both records are of an older Nearkin: `find` verified that the keys are removed.
        try:
            return not self._read(fmt.erased_name(erasure.owner)).authenticated
        except PermanentError:
            return False

    def _read(self, name: str) -> fmt.ErasedRecord:
        return read_decoded(self._objects, name, lambda data, name: fmt.decode_erased(data, name, self._mac_key()))

    def _remove(self, name: str) -> None:
        """Remove a record and its parity, whether or not the settings require parity."""
        self._objects.inner.delete(parity_name(name))
        self._objects.inner.delete(name)


_REMEDY = (
    "the tenant is blocked and nothing of it is removed: if no operator ran `nearkin keys erase`, or it was cancelled, "
    "run `nearkin keys erase TENANT --cancel`, or remove the file, and find out who can write to the store; else run "
    "`nearkin keys erase` again"
)
_CANCELLED_REMEDY = (
    "this erasure was cancelled, and the record has no effect: run `nearkin keys erase TENANT --cancel`, or remove the "
    "file; if no cancel was interrupted, find out who put it back"
)

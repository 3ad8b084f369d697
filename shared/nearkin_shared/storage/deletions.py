"""Deletion and undeletion of versions by tombstones.

Invariant: a version is deleted or undeleted by the exclusive create of its next mark; no data are deleted here.

    1 note in the index   2 marks of all but the newest version   3 the newest version's mark

After a crash behind 1 the index has a note without a mark, and listings read the marks; behind 2 the key still returns
its newest version, never an older one, and repeating the call completes it. Of two calls that read the same state one
is refused the mark and reads the state again (docs/internals/formats/tombstone.md).
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import datetime

from nearkin_shared.errors import Corrupt, NotFound, PermanentError, RetentionActive, RetryableError
from nearkin_shared.formats.manifest import CREATED_US_MAX, moment_of
from nearkin_shared.formats.tombstone import Mark, MarkKind
from nearkin_shared.index.catalog import CatalogEntry
from nearkin_shared.index.protocols import MarkedVersion
from nearkin_shared.objectstore.base import AlreadyExists
from nearkin_shared.results import Damage, Deletion, VersionInfo
from nearkin_shared.storage.disk_reserve import SpaceReserve
from nearkin_shared.storage.heads import VersionHeads
from nearkin_shared.storage.manifests import History, ManifestStore, mark_name
from nearkin_shared.storage.retention_extension import RetentionExtender
from nearkin_shared.storage.retention_records import SUFFIX as RETENTION_SUFFIX
from nearkin_shared.utils.failpoints import failpoint
from nearkin_shared.utils.signals import interrupts_wait
from nearkin_shared.validation import check_key, check_reason, check_version, checkpoint_key_of, is_reserved_key

MARK_THREADS = 8
"""Threads that sync the marks of one call concurrently."""
RACES_MAX = 100
REQUEST_BYTES = 16
WHO_CHARACTERS_MAX = 64
"""At most 256 bytes of UTF-8."""

Note = Callable[[Sequence[MarkedVersion]], None]
"""Function that records marks in the index before they are written."""
Guard = Callable[[str, str], Callable[[VersionInfo], None] | None]
"""(tenant, key) -> function that raises RetentionActive for a retained version; None if none is retained."""
Condition = Callable[[VersionInfo], None]
"""Check of the newest version to be deleted; an exception ends the call, and nothing is deleted."""


class DeletionObserver:
    """Observer of index notes whose marks were not written.

    This one does nothing: an index with several writers keeps such notes until its rebuild.
    """

    def correct_collected_notes(self, tenant: str, key: str, versions: Collection[int]) -> None:
        """Correct the notes of versions that were collected, which no later call does."""

    def rollback_notes(self, tenant: str, key: str, versions: Collection[int]) -> None:
        """Correct the notes of versions after the failure of the call that made them."""

    def note_corrections(self) -> int:
        """Return the number of corrections so far.

        A note whose mark is not written yet may be among the corrected ones.
        """
        return 0

    def outside_gc_step(self) -> AbstractContextManager[None]:
        """Keep GC steps of this process from starting, and wait for one in progress.

        A GC step does not wait for itself.
        """
        return nullcontext()


class Deletions:
    """Deletion and undeletion of versions of any tenant. Safe between threads and processes."""

    def __init__(
        self,
        manifests: ManifestStore,
        note: Note,
        *,
        clock: Callable[[], float] = time.time,
        guard: Guard | None = None,
        notes: DeletionObserver | None = None,
        reserve: SpaceReserve | None = None,
        heads: VersionHeads | None = None,
    ) -> None:
        """Create the deletions.

        `reserve` is disk space for use once the disk is full. `heads` refuse the deletion of a version whose retention
        record was removed.
        """
        self._heads = heads
        self._reserve = reserve
        self._guard = guard
        self._notes = notes or DeletionObserver()
        self._manifests = manifests
        self._note = note
        self._clock = clock

    def delete(
        self,
        tenant: str,
        key: str,
        version: int | None = None,
        *,
        undelete_seconds: float,
        who: str = "",
        reason: str = "",
        request: bytes | None = None,
        condition: Condition | None = None,
    ) -> int:
        """Delete a version, or all current versions of a key; return their number.

        A call with the 16 bytes `request` of an earlier successful call returns that call's result.

        Without `version` the checkpoints of the key are deleted as well, which are no versions: 0 if it has these only.

        Raises: NotFound (no version to delete), RetentionActive (one is retained: none is deleted), BadInput, Corrupt,
        StoreUnavailable (some may be deleted: call again).
        """
        _check(key, version, reason)
        try:
            count = self._delete_versions(tenant, key, version, undelete_seconds, who, reason, request, condition)
        except NotFound:
            is_whole = version is None and condition is None  # a condition is on a version
            if not is_whole or not self._delete_checkpoints(tenant, key, who, reason):
                raise
            return 0
        if version is None:
            self._delete_checkpoints(tenant, key, who, reason)
        return count

    def _delete_checkpoints(self, tenant: str, key: str, who: str, reason: str) -> int:
        """Delete the checkpoints of interrupted backups of a key; return their number."""
        if is_reserved_key(key):
            return 0
        with suppress(NotFound, RetentionActive):
            return self._delete_versions(tenant, checkpoint_key_of(key), None, 0, who, reason, None, None)
        return 0

    def _delete_versions(
        self,
        tenant: str,
        key: str,
        version: int | None,
        undelete_seconds: float,
        who: str,
        reason: str,
        request: bytes | None,
        condition: Condition | None,
    ) -> int:
        """Delete versions; see `delete`."""
        made_by = request if request is not None else secrets.token_bytes(REQUEST_BYTES)

        def delete(known_as: bytes | None) -> int:
            return self._delete(tenant, key, version, undelete_seconds, who, reason, (known_as, made_by), condition)

        if self._reserve is None:
            return delete(request)

        def again() -> int:
            delete(made_by)
            return self._count(tenant, key, version, made_by, MarkKind.DELETED)

        return self._reserve.run(lambda: delete(request), again)

    def _delete(
        self,
        tenant: str,
        key: str,
        version: int | None,
        undelete_seconds: float,
        who: str,
        reason: str,
        requests: tuple[bytes | None, bytes],
        condition: Condition | None,
    ) -> int:
        """Delete versions; `requests` are the ids of an earlier try and of this one."""
        request, made_by = requests
        with self._exclusive(tenant, key):
            for _ in range(RACES_MAX):
                histories = self._histories(tenant, key, version)
                selected = [history for history in histories if self._manifests.shows(tenant, key, history)]
                earlier = self._marks(tenant, key, histories, request, MarkKind.DELETED)
                if earlier:
                    selected = self._remaining_to_delete(tenant, key, selected, earlier)
                if not selected:
                    if earlier:
                        return len(earlier)
                    raise NotFound(
                        f"{_version_name(key, version)}: does not exist; `nearkin ls --deleted` lists deleted versions"
                    )
                if condition is not None:
                    condition(self._manifests.get(tenant, key, selected[-1].version).info)
                newest_us = self._check_retained(tenant, key, selected)
                now_us = int(self._clock() * 1e6)
                # With a clock that is behind, the undelete window would end too early for others.
                from_us = max(self._manifests.known_time.latest_us(now_us), newest_us)
                window_us = int(undelete_seconds * 1e6)
                until_us = max(now_us + window_us, min(from_us + window_us, CREATED_US_MAX))
                marks = [
                    Mark(
                        tenant, key, history.version, history.sequence + 1, MarkKind.DELETED, now_us, until_us, made_by,
                        who, reason,
                    )
                    for history in selected
                ]  # fmt: skip
                written = self._write(selected, marks)
                if written:
                    return written
            raise RetryableError(f"{_version_name(key, version)}: {RACES_MAX} concurrent changes; try again")

    def undelete(
        self,
        tenant: str,
        key: str,
        version: int | None = None,
        *,
        who: str = "",
        reason: str = "",
        request: bytes | None = None,
    ) -> int:
        """Undelete a version, or all versions of the key's latest deletion; return their number.

        Raises: NotFound (no version is deleted, or the undelete window is over), BadInput, Corrupt, StoreUnavailable.
        """
        _check(key, version, reason)
        made_by = request if request is not None else secrets.token_bytes(REQUEST_BYTES)

        def undelete(known_as: bytes | None) -> int:
            return self._undelete(tenant, key, version, who, reason, (known_as, made_by))

        if self._reserve is None:
            return undelete(request)

        def again() -> int:
            undelete(made_by)
            return self._count(tenant, key, version, made_by, MarkKind.UNDELETED)

        return self._reserve.run(lambda: undelete(request), again)

    def _count(self, tenant: str, key: str, version: int | None, request: bytes, kind: MarkKind) -> int:
        """Return how many marks one call has made, in all its tries."""
        return len(self._marks(tenant, key, self._histories(tenant, key, version), request, kind))

    def _undelete(
        self, tenant: str, key: str, version: int | None, who: str, reason: str, requests: tuple[bytes | None, bytes]
    ) -> int:
        """Undelete versions; `requests` as in `_delete`."""
        request, made_by = requests
        with self._exclusive(tenant, key):
            for _ in range(RACES_MAX):
                histories = self._histories(tenant, key, version)
                hidden = self._deleted(tenant, key, histories)
                earlier = self._marks(tenant, key, histories, request, MarkKind.UNDELETED)
                if earlier:
                    hidden = self._remaining_to_undelete(tenant, key, hidden, earlier)
                if not hidden:
                    if earlier:
                        return len(earlier)
                    raise NotFound(
                        f"{_version_name(key, version)}: not deleted, or unknown; see `nearkin ls --deleted`"
                    )
                latest = max((mark for _, mark in hidden), key=lambda mark: mark.at_us)
                latest_deletion = [(history, mark) for history, mark in hidden if mark.request == latest.request]
                now_us = int(self._clock() * 1e6)
                if now_us > latest.until_us:
                    at, until = moment_of(latest.at_us), moment_of(latest.until_us)
                    raise NotFound(
                        f"{_version_name(key, version)}: deleted at {at:%Y-%m-%dT%H:%M:%SZ}; it was restorable until "
                        f"{until:%Y-%m-%dT%H:%M:%SZ} (deletion.undelete_seconds)"
                    )
                marks = [
                    Mark(
                        tenant,
                        key,
                        found.version,
                        found.sequence + 1,
                        MarkKind.UNDELETED,
                        now_us,
                        0,
                        made_by,
                        who,
                        reason,
                    )
                    for _, found in latest_deletion
                ]
                written = self._write([history for history, _ in latest_deletion], marks)
                if written:
                    return written
            raise RetryableError(f"{_version_name(key, version)}: {RACES_MAX} concurrent changes; try again")

    def list_deleted(
        self,
        tenant: str,
        keys: Iterable[str],
        broken: Callable[[Damage], None] | None = None,
        *,
        entries: Callable[[str], Iterable[CatalogEntry]] = lambda _key: (),
    ) -> Iterator[Deletion]:
        """Yield the deleted versions of these keys that are not collected.

        Ordered by key as given, then version. An unreadable mark is passed to `broken`, or raised as Corrupt.
        `entries` returns the index entries of a key; the manifest is read of a version that they leave out.
        """
        for key in keys:
            histories = self._histories(tenant, key, None)
            indexed = {entry.version: entry for entry in entries(key)}
            for history in histories:
                if not history.committed or not history.sequence % 2:
                    continue
                try:
                    mark = self._manifests.mark(tenant, key, history.version, history.sequence)
                except PermanentError as err:
                    if broken is None:
                        raise
                    name = mark_name(tenant, key, history.version, history.sequence)
                    broken(Damage(name, str(err), ((key, history.version),)))
                else:
                    at, until = moment_of(mark.at_us), moment_of(mark.until_us)
                    created = self._created(tenant, key, mark.version, indexed.get(mark.version))
                    yield Deletion(key, mark.version, at, until, mark.who, mark.reason, created)

    def _created(self, tenant: str, key: str, version: int, entry: CatalogEntry | None) -> datetime | None:
        """Return when a version was committed, from its index entry or manifest, else None."""
        with suppress(PermanentError):
            info = None if entry is None else entry.info
            return self._manifests.get(tenant, key, version).info.created if info is None else info.created
        return None

    def _check_retained(self, tenant: str, key: str, histories: Iterable[History]) -> int:
        """Refuse to delete a version that its manifest, a retention record or a policy retains.

        The retention in a damaged manifest is unknown; its version may be deleted if no policy and no retention record
        retains it. Returns when the newest version was created, microseconds since 1970, 0 if unreadable.

        Raises: RetentionActive, Corrupt.
        """
        histories = list(histories)
        self._check_retention_records(tenant, key, histories)
        newest_us = 0
        check = None if self._guard is None else self._guard(tenant, key)
        others = "; other versions of the key can be deleted by their numbers" if len(histories) > 1 else ""
        for history in histories:
            try:
                manifest = self._manifests.get(tenant, key, history.version)
            except Corrupt:
                if check is not None or history.retention:
                    raise
                continue
            newest_us = max(newest_us, manifest.created_us)
            info = self._manifests.info(manifest, history.retention)
            if check is not None:
                check(info)
            if info.retain_until is not None and self._clock() < info.retain_until.timestamp():
                raise RetentionActive(
                    f"key {key!r} version {history.version}: is retained until "
                    f"{info.retain_until:%Y-%m-%dT%H:%M:%SZ} (by its manifest or `nearkin retain`, regardless of the "
                    f"current settings); nothing was deleted{others}"
                )
        return newest_us

    def _check_retention_records(self, tenant: str, key: str, histories: Iterable[History]) -> None:
        """Raise RetentionActive if a retention record listed by a GC run was removed."""
        lost = {} if self._heads is None else self._heads.find_lost_records(self._manifests, tenant, key)
        for history in histories:
            name = lost.get(history.version, "")
            if name.endswith(RETENTION_SUFFIX):
                raise RetentionActive(
                    f"key {key!r} version {history.version}: its retention record {name} was removed, so that the "
                    "end of its retention is unknown; nothing was deleted; restore the record from a copy, extend the "
                    "retention (`nearkin retain`), or accept the loss with `nearkin rebuild-index`"
                )

    def extend_retention(
        self, tenant: str, key: str, version: int | None, retain_until_us: int, *, who: str = "", reason: str = ""
    ) -> VersionInfo:
        """Retain a version, the newest by default, until a time (microseconds since 1970).

        Returns the version once the change is durable. A time already in effect changes nothing.

        Raises: NotFound, BadInput (the time is earlier than the current one: a retention is never shortened), Corrupt,
        StoreUnavailable.
        """
        extender = RetentionExtender(self._manifests, self._note, self._notes.rollback_notes, self._clock)
        with self._exclusive(tenant, key):
            return extender.extend(tenant, key, version, retain_until_us, who, reason)

    @contextmanager
    def _exclusive(self, tenant: str, key: str) -> Iterator[None]:
        """Exclude conditional puts of the key.

        Each sees the key before this change, or after it. A GC step ends first: it may delete too, and would wait for
        the lock whose holder waits for it.

        Raises: RetryableError.
        """
        with self._notes.outside_gc_step(), self._manifests.locks.for_deletion(tenant, key):
            yield

    # --- pieces ------------------------------------------------------------------------------------------------------

    def _histories(self, tenant: str, key: str, version: int | None) -> list[History]:
        """Return the histories of a key's versions, or of one, by version."""
        found = self._manifests.histories(tenant, key)
        return [found[number] for number in sorted(found) if version in (None, number)]

    def _deleted(self, tenant: str, key: str, histories: Iterable[History]) -> list[tuple[History, Mark]]:
        """Return the versions that can be undeleted, each with its mark."""
        odd = [history for history in histories if history.committed and history.sequence % 2]
        return [(found, self._manifests.mark(tenant, key, found.version, found.sequence)) for found in odd]

    def _remaining_to_delete(
        self, tenant: str, key: str, selected: list[History], earlier: Mapping[int, Mark]
    ) -> list[History]:
        """Return the versions that the first try of a call has left to delete.

        Versions put or undeleted since are not among them: a client that repeats a call after a lost reply must not
        delete them.
        """
        began_us = min(mark.at_us for mark in earlier.values())
        before = []
        for history in selected:
            if history.version in earlier:
                continue
            with suppress(Corrupt, NotFound):  # a damaged version is deleted by a call of its own
                if self._manifests.get(tenant, key, history.version).created_us <= began_us:
                    before.append(history)
        return before

    def _remaining_to_undelete(
        self, tenant: str, key: str, hidden: list[tuple[History, Mark]], earlier: Mapping[int, Mark]
    ) -> list[tuple[History, Mark]]:
        """Return the deleted versions that the first try of a call has left to undelete.

        They belong to the same deletion, not to a later one.
        """
        requests = set()
        for mark in earlier.values():
            with suppress(Corrupt, NotFound):
                requests.add(self._manifests.mark(tenant, key, mark.version, mark.sequence - 1).request)
        return [(found, mark) for found, mark in hidden if mark.request in requests and found.version not in earlier]

    def _marks(
        self, tenant: str, key: str, histories: Iterable[History], request: bytes | None, kind: MarkKind
    ) -> dict[int, Mark]:
        """Return the marks that an earlier call with this `request` made, by version."""
        found: dict[int, Mark] = {}
        for history in histories if request is not None else ():
            if not history.committed:
                continue
            newest = history.sequence - (history.sequence - kind.value) % 2
            for sequence in range(newest, 0, -2):
                with suppress(Corrupt, NotFound):
                    mark = self._manifests.mark(tenant, key, history.version, sequence)
                    if mark.kind is kind and mark.request == request:
                        found[history.version] = mark
                        break
        return found

    def _write(self, before: Sequence[History], marks: Sequence[Mark]) -> int:
        """Write the marks of a key's versions, by version; return how many were written.

        Another call may have taken the others.
        """
        tenant, key, versions = marks[0].tenant, marks[0].key, [mark.version for mark in marks]
        marked = [
            MarkedVersion(
                tenant, key, mark.version, mark.sequence, history.marks_bytes + len(self._manifests.encode_mark(mark))
            )
            for history, mark in zip(before, marks, strict=True)
        ]
        note_corrections = self._notes.note_corrections()
        try:
            self._note(marked)  # 1
            written = self._write_marks(marks)
        except BaseException:
            self._notes.rollback_notes(tenant, key, versions)
            raise
        # By another call, which may have read before the marks existed.
        if self._notes.note_corrections() != note_corrections:
            self._note(marked)
        if written < len(marks):
            self._notes.correct_collected_notes(tenant, key, versions)
        failpoint("delete.marked")
        return written

    def _write_marks(self, marks: Sequence[Mark]) -> int:
        """Write the marks; return how many were not taken by another call."""
        failpoint("delete.noted")
        # The newest version is deleted last and undeleted first: an older one never takes its role.
        *older, newest = marks
        written: list[bool] = []
        if newest.kind is MarkKind.UNDELETED:
            written.append(self._try_write(newest))
            failpoint("undelete.newest")
        if older:
            with ThreadPoolExecutor(MARK_THREADS if len(older) > 1 else 1) as threads:
                with interrupts_wait():  # an interrupt in the middle would leave a thread without a waiter
                    others = threads.map(self._try_write, older)
                written += others  # 2
            failpoint("delete.older")
        if newest.kind is MarkKind.DELETED:
            written.append(self._try_write(newest))  # 3
        return sum(written)

    def _try_write(self, mark: Mark) -> bool:
        try:
            self._manifests.put_mark(mark)
        except AlreadyExists:
            return False
        if mark.kind is MarkKind.UNDELETED and not self._manifests.is_committed(mark.tenant, mark.key, mark.version):
            # Its number was free again: a GC run has collected the version with its marks since this call read it.
            self._manifests.delete_mark(mark_name(mark.tenant, mark.key, mark.version, mark.sequence))
            return False
        return True


def user_and_host() -> str:
    """Return user and host of this process, for `who`, without a user database lookup."""
    user = os.environ.get("LOGNAME") or os.environ.get("USER") or str(os.getuid())
    return f"{user}@{os.uname().nodename}"[:WHO_CHARACTERS_MAX]


def _check(key: str, version: int | None, reason: str) -> None:
    check_key(key)
    check_reason(reason)
    if version is not None:
        check_version(version)


def _version_name(key: str, version: int | None) -> str:
    return f"key {key!r}" if version is None else f"key {key!r} version {version}"

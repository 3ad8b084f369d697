"""Note containers that a reader found damaged, for the next writer to verify.

    reader; verify while another process writes -> damage.noted: an id a line -> next put: verify these, quarantine

Invariant: a note alone changes nothing that the store answers; a container leaves the notes once it was verified.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from nearkin_shared.errors import Corrupt, KeysLost, NearkinError, StoreUnavailable
from nearkin_shared.formats.directory import Directory
from nearkin_shared.formats.pending_delete_record import PendingDelete
from nearkin_shared.storage.containers import ContainerStore
from nearkin_shared.storage.pending_delete_watch import is_listed
from nearkin_shared.storage.quarantine import Quarantine
from nearkin_shared.types import ZERO, ContainerId, Locations, distinct
from nearkin_shared.utils.file_locks import lock_file

NAME = "damage.noted"
NOTED_MAX = 4096
"""Containers noted at most, 70 KB: `verify` finds further damage."""
SUSPECTS_MAX = 256
"""Containers noted after one read error: those of a batch of 4 MiB and of its bases are far fewer."""
_LINE = re.compile(rb"[0-9a-f]{16}")
_log = logging.getLogger("nearkin")


class DamageNotes:
    """The file of notes of one store.

    Any process may add; the one that verified a container removes it.
    """

    def __init__(self, root: Path, quarantine: Quarantine) -> None:
        self._path = root / NAME
        self._quarantine = quarantine

    def read(self) -> frozenset[int]:
        """Return the noted containers."""
        try:
            with self._path.open("rb") as file:
                return _parse(file.read(_BYTES_MAX))
        except FileNotFoundError:
            return frozenset()
        except OSError as err:
            _log.warning("%s: cannot be read: %s; run `nearkin verify`", self._path, err.strerror)
            return frozenset()

    def note(self, err: Corrupt, chunks: Locations, containers: ContainerStore) -> None:
        """Note the containers that may be the cause of a read error.

        None for lost keys: once these are restored, all that they encrypt is intact.
        """
        if isinstance(err, KeysLost):
            return
        try:
            suspects = suspect_containers(err, chunks, self._quarantine.read(), containers.of(None).directory)
        except NearkinError as other:
            _log.debug("%s: damage is not noted: %s", self._path, other)
            return
        if suspects:
            self.add(suspects)

    def add(self, containers: Collection[int]) -> None:
        """Note containers durably.

        An error is logged, since the caller reports the damage itself.
        """
        try:
            with self._locked() as descriptor:
                new = sorted(set(containers) - _parse(os.pread(descriptor, _BYTES_MAX, 0)))
                room = NOTED_MAX - os.fstat(descriptor).st_size // _LINE_BYTES
                os.lseek(descriptor, 0, os.SEEK_END)
                os.write(descriptor, b"".join(b"%016x\n" % container for container in new[: max(0, room)]))
                os.fsync(descriptor)
        except (OSError, StoreUnavailable) as err:  # a disk that is full or read-only, or of another user
            _log.debug("%s: damage is not noted: %s", self._path, err)

    def remove(self, containers: Collection[int]) -> None:
        """Remove containers that were verified."""
        try:
            with self._locked() as descriptor:
                left = _parse(os.pread(descriptor, _BYTES_MAX, 0)).difference(containers)
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, b"".join(b"%016x\n" % container for container in sorted(left)), 0)
        except (OSError, StoreUnavailable) as err:
            _log.warning("%s: cannot be written: %s; the next put verifies again", self._path, err)

    @contextmanager
    def _locked(self) -> Iterator[int]:
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            if not os.geteuid():  # as root in the store of a user, who is to write it later
                folder = self._path.parent.stat()
                os.fchown(descriptor, folder.st_uid, folder.st_gid)
            lock_file(descriptor, wait=True)
            yield descriptor
        finally:
            os.close(descriptor)


_LINE_BYTES = 17
_BYTES_MAX = NOTED_MAX * _LINE_BYTES


def _parse(content: bytes) -> frozenset[int]:
    lines = content[:_BYTES_MAX].split()
    return frozenset(int(line, 16) for line in lines if _LINE.fullmatch(line))


def suspect_containers(
    err: Corrupt,
    chunks: Locations,
    known: Mapping[int, PendingDelete],
    directory_of: Callable[[ContainerId], Directory],
) -> frozenset[int]:
    """Return the containers that may be the cause of a read error.

    The one that the error names; else those with the chunks that were read, and with their bases, except those that are
    `known`: quarantined as a whole. None if chunks that were read are quarantined.
    """
    if is_listed(known, chunks).any():
        return frozenset()
    if err.container is not None:
        return frozenset() if err.container in known and known[err.container].whole else frozenset({err.container})
    waiting = [container for container in distinct(chunks.containers).tolist() if container != int(ZERO)]
    found = set(waiting)
    while waiting and len(found) < SUSPECTS_MAX:
        try:
            bases = directory_of(ContainerId(waiting.pop())).base_containers()
        except Corrupt as damaged:
            if damaged.container is None:
                return frozenset()
            if damaged.container in known and known[damaged.container].whole:
                found.discard(damaged.container)
            continue  # the error may be of another one: all are verified
        more = set(bases) - found - {int(ZERO)}
        found |= more
        waiting.extend(more)
    return frozenset(found)

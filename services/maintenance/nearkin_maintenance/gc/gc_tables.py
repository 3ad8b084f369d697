"""Keep the tables of `gc.mode = hybrid` on the disk of a maintenance worker.

    opened -> those of the fleet's previous GC run? -> yes: this run follows the changes     no: emptied, it marks
    end of a run: recorded as its tables

Invariant (I6): tables are used only by the run that follows the one which recorded them: the fence of its lease is the
next one in the same index, and the store has the heads of keys and the clock record that it left; each run over S3
writes one. So no other process collected meanwhile, and the store is no older copy of itself. The heads cover every
counted version: no counted number is given to another version.
"""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from nearkin_maintenance.gc.reference_counts import ReferenceCounts, TablesUnavailable
from nearkin_shared.config.storage import HYBRID
from nearkin_shared.errors import StoreUnavailable
from nearkin_shared.objectstore.base import ObjectStore
from nearkin_shared.storage.clock_records import ClockRecords
from nearkin_shared.storage.heads import VersionHeads
from nearkin_shared.utils.frozen import frozen
from nearkin_shared.utils.private_files import make_private_folders, remove_tree

_log = logging.getLogger("nearkin.maintenance")


@frozen
class FleetRun:
    """A GC run of a fleet, as the tables record it."""

    scope: str
    """`FleetIndex.fence_scope`: the fences of another one may repeat."""
    fence: int
    """Number of its lease."""

    def row(self, objects: ObjectStore) -> bytes:
        """Return the row that records the run, with what it left in the store."""
        stamps = VersionHeads(objects).stamp() + ClockRecords(objects).stamp()
        return f"{self.scope} {self.fence} ".encode() + stamps

    @property
    def before(self) -> FleetRun:
        """Return the run before, if no other worker took the lease in between."""
        return FleetRun(self.scope, self.fence - 1)


class GcTables:
    """Folder of the tables. A cache: it can be deleted at any time."""

    def __init__(self, folder: Path, map_bytes: int) -> None:
        self._folder = folder
        self._map_bytes = map_bytes

    @contextmanager
    def opened(self, check: Callable[[], None]) -> Iterator[ReferenceCounts | None]:
        """Yield the tables; None if this machine cannot keep them.

        `check` raises once the lease is lost.
        """
        try:
            self._make_private()
            ledger = ReferenceCounts(self._folder, self._map_bytes, HYBRID, check)
        except (OSError, StoreUnavailable) as err:
            _log.warning("gc: this run marks, its tables cannot be kept: %s", err)
            yield None
            return
        try:
            yield ledger
        finally:
            ledger.close()

    def remove(self) -> None:
        """Delete the tables."""
        remove_tree(self._folder)

    def _make_private(self) -> None:
        """Make the folder, which another user may neither own nor write.

        Raises: OSError, StoreUnavailable.
        """
        for folder in (self._folder.parent, self._folder):
            make_private_folders(folder)
            found = folder.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
                raise StoreUnavailable(f"{folder}: belongs to another user, or others can write it: remove it")


def is_current(ledger: ReferenceCounts, run: FleetRun, objects: ObjectStore) -> bool:
    """Return whether the tables are those of the run before `run`; empty them if not.

    Call it before the heads of keys are changed. Raises: TablesUnavailable, StoreUnavailable.
    """
    highest, row = VersionHeads(objects).read().versions, run.before.row(objects)
    with ledger.transaction() as rows:
        if rows.get("meta", b"run") == row and all(
            max(versions) <= highest.get(key, 0) for key, versions in rows.known().items()
        ):
            return True
        rows.empty(ledger.name)
    return False


def record_run(ledger: ReferenceCounts, run: FleetRun, objects: ObjectStore) -> None:
    """Record the run whose tables these are.

    Call it after the heads of keys are recorded. Raises: StoreUnavailable.
    """
    try:
        row = run.row(objects)
        with ledger.transaction() as rows:
            rows.put("meta", b"run", row)
    except TablesUnavailable as err:
        _log.warning("gc: the next run marks: %s", err)

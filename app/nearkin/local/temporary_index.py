"""Keep a temporary index for a process that may not write the store's index.

For read-only media and stores of another user.

    folder in TMPDIR, mode 0700 -> opened -> its files are removed at once: none remains, however the process ends

Invariant: it is read only with LMDB's table of readers, and never used for writing.
"""

from __future__ import annotations

import logging
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from nearkin_shared.errors import NoRoom, StoreUnavailable
from nearkin_shared.utils.private_files import remove_tree

if TYPE_CHECKING:
    from nearkin_shared.index.lmdb.lmdb_index import LmdbIndex

_log = logging.getLogger("nearkin")
REUSED_SECONDS_MIN = 60.0
"""A process that stays open makes its index again after this time, so that it shows what others have put since."""
REUSED_FACTOR = 20
"""And after this many times the time that it took to make: 5 % of the process's time at most."""
SKIPPED_NAMED = 5


class TemporaryIndex:
    """Makes an index of one store when it is asked for, and keeps it until `close`."""

    def __init__(self, root: Path, make: Callable[[Path], LmdbIndex], fill: Callable[[LmdbIndex], list[str]]) -> None:
        """Create the holder of a temporary index.

        `make` opens an empty index in a folder; `fill` fills it and returns the names of unreadable objects.
        """
        self._root = root
        self._make = make
        self._fill = fill
        self._lock = threading.Lock()
        self._index: LmdbIndex | None = None
        self._made_at = self._made_seconds = 0.0
        self._is_announced = False

    def get(self, reason: Exception) -> LmdbIndex:
        """Return the index, made on first use and again when old.

        `reason`: why the store's own index cannot be used. Raises NoRoom, StoreUnavailable.
        """
        with self._lock:
            age_seconds = time.monotonic() - self._made_at
            if self._index is None or age_seconds > max(REUSED_SECONDS_MIN, REUSED_FACTOR * self._made_seconds):
                self._announce(reason)
                before, self._index = self._index, self._filled()
                if before is not None:
                    before.close()
            return self._index

    def close(self) -> None:
        """Remove the index."""
        with self._lock:
            index, self._index = self._index, None
        if index is not None:
            index.close()

    def after_fork(self) -> None:
        """Start without an index in a forked process: the open one belongs to its parent."""
        self._lock = threading.Lock()
        self._index = None

    def _announce(self, reason: Exception) -> None:
        if not self._is_announced:
            self._is_announced = True
            _log.warning(
                "%s. Reading store %s through a temporary index in %s", reason, self._root, tempfile.gettempdir()
            )

    def _filled(self) -> LmdbIndex:
        started = time.monotonic()
        try:
            folder = Path(tempfile.mkdtemp(prefix="nearkin-index-"))
        except OSError as err:
            raise StoreUnavailable(
                f"temporary index of store {self._root}: {err}; set TMPDIR to a folder that this user may write"
            ) from err
        index = None
        try:
            index = self._make(folder)
            remove_tree(folder)
            skipped = self._fill(index)
        except BaseException as err:
            remove_tree(folder)
            if index is not None:
                index.close()
            if isinstance(err, NoRoom):
                raise NoRoom(
                    f"temporary index of store {self._root}: no room in {folder.parent}; set TMPDIR to a folder on a "
                    "device with room",
                    folder.parent,
                ) from err
            raise
        for name in skipped[:SKIPPED_NAMED]:
            _log.warning("%s: cannot be read and is not counted: run `nearkin verify`", name)
        if len(skipped) > SKIPPED_NAMED:
            _log.warning("and %d more: `nearkin verify` names them all", len(skipped) - SKIPPED_NAMED)
        self._made_at = time.monotonic()
        self._made_seconds = self._made_at - started
        return index

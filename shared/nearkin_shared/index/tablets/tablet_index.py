"""Index that finds chunks through the directories of their containers.

    tag table in memory -> directory of a container: a name is there, or it is not stored

Versions, container summaries and the state of the index are in LMDB, as in the kind `exact`. docs/adr/0081.

Invariant: without the folder all entries can be made again from containers and manifests.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from nearkin_shared.index.lmdb.lmdb_index import LmdbIndex
from nearkin_shared.index.lmdb.version_entries import PLAIN_NAMES, EntryNames
from nearkin_shared.index.tablets.tablet_tables import Directories, TabletOptions, TabletTables

DEFAULT_OPTIONS = TabletOptions()


class TabletIndex(LmdbIndex):
    """Embedded index of the kinds `tablets` and `sampled`."""

    def __init__(
        self,
        folder: Path,
        domain: bytes,
        map_bytes: int,
        directories: Directories,
        options: TabletOptions = DEFAULT_OPTIONS,
        *,
        read_only: bool = False,
        durable: bool = True,
        names: EntryNames = PLAIN_NAMES,
    ) -> None:
        """Open the index.

        `directories` are those of all containers of the store, whatever their dedup domain.
        """
        tables = partial(TabletTables, folder=folder, directories=directories, options=options, read_only=read_only)
        super().__init__(folder, domain, map_bytes, read_only=read_only, durable=durable, names=names, tables=tables)

    @property
    def memory_bytes(self) -> int:
        """Return the bytes of tags and tablets in memory."""
        return self._tablet_tables.memory_bytes

    @property
    def tablet_bytes(self) -> int:
        """Return the bytes of tablets in memory."""
        return self._tablet_tables.tablets.used_bytes

    @property
    def tag_bytes(self) -> int:
        """Return the bytes of tags and container numbers alone."""
        return self._tablet_tables.tag_bytes

    @property
    def directory_reads(self) -> int:
        """Return the number of directories read."""
        return self._tablet_tables.tablets.reads

    @property
    def _tablet_tables(self) -> TabletTables:
        assert isinstance(self._tables, TabletTables)
        return self._tables

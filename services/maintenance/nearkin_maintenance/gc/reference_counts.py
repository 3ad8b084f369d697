"""Count references to segments, to decide whether a GC run has to mark.

Updated from the manifests at the beginning of each run, in one transaction and in key order:

    versions    key digest 16, version 8             -> time until which its segments are needed, 8 (expiry);
                hybrid too: bytes that its put added 8, digest of its references 16
    open        key digest 16, segment 12            -> version since which the key's current one holds it, 8 (hybrid)
    past        key digest 16, last 8, segment 12    -> first 8: interval of versions that held it (hybrid)
    held        key digest 16, version 8, segment 12 -> nothing (refcount)
    counts      segment 12 -> number of rows of `open` and `past`, or of `held`, 8; expiry: needed until, 8
    nominated   segment 12, or container 8           -> nothing: unreferenced since the last mark
    containers  container 8                          -> nothing: its segments were examined
    summaries   manifest's name -> its references (manifest_refs_cache.py)
    meta        mode, marked, whole, services, ended; trusted, added (reach_summaries.py)

Invariant: the counts nominate candidates, and nothing is deleted because of them alone; the folder can be deleted at
any time. Mode hybrid also keeps the tables of reach_summaries.py. A row's key contains its holder, so counting again,
for example after a crash, counts nothing twice. Segment: container 8 (big-endian), ordinal 4. Chunks are not counted:
marking finds which are needed, and their bases. Memory: 200 bytes for each version and container of the store, 100 for
each segment of the current key.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import lmdb
import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from nearkin_maintenance.gc.ledger_rows import KEY_BYTES, SEGMENT, TABLES, LedgerRows, to_bytes
from nearkin_maintenance.gc.manifest_refs_cache import ManifestRefsCache
from nearkin_maintenance.gc.mark import Masks, mark_ordinals, mask_of
from nearkin_maintenance.gc.reach_summaries import find_wrong_counts, read_trusted
from nearkin_maintenance.gc.retained_bytes import bytes_of_chunks
from nearkin_shared.config.storage import EXPIRY, HYBRID, REFCOUNT
from nearkin_shared.errors import IndexUnsafe, PermanentError, StoreUnavailable
from nearkin_shared.formats.directory import Directory
from nearkin_shared.formats.manifest import Manifest
from nearkin_shared.index.lmdb.environments import acquire, release
from nearkin_shared.storage.manifests import key_and_version
from nearkin_shared.types import ZERO, Bools, Locations, group_by_container
from nearkin_shared.utils.failpoints import failpoint
from nearkin_shared.utils.frozen import frozen
from nearkin_shared.utils.private_files import remove_tree

FORMAT = 2
MARK_AFTER_US = 7 * 86_400 * 1_000_000
"""Time after which a GC run marks whatever is nominated: marking is the truth."""
REBUILD_REFS_AFTER_US = 7 * 86_400 * 1_000_000
"""Time after which every manifest is decoded again, whatever is cached."""
_log = logging.getLogger("nearkin")
EXPIRY_US = 7 * 86_400 * 1_000_000
"""Time for which a version needs its segments, in mode expiry: no version states at its put when it will be deleted."""


@frozen
class GcCandidates:
    """Result of an update of the reference counts."""

    marking: bool
    """Whether marking has candidates to confirm, or was last done a week ago."""
    nominated: int
    """Segments and containers without references, by these counts."""
    touched: int
    """Rows written or deleted by the update."""


class TablesUnavailable(StoreUnavailable):
    """The tables cannot be read or written: a run can do without them."""


class ReferenceCounts:
    """Reference counts of segments, in a folder of their own.

    One process writes it, under the writer lock or the GC lease.
    """

    def __init__(self, folder: Path, map_bytes: int, mode: str, check: Callable[[], None] = lambda: None) -> None:
        """`check` is called within each transaction: it raises if another process may write.

        Raises: StoreUnavailable.
        """
        try:
            self._shared = acquire(folder, map_bytes, TABLES, writable=True)
        except IndexUnsafe:  # reading it could crash the process; it can be deleted at any time
            remove_tree(folder)
            self._shared = acquire(folder, map_bytes, TABLES, writable=True)
        self._env, self._tables = self._shared.env, self._shared.databases
        self._folder, self._mode, self._check = folder, mode, check
        self.candidates = GcCandidates(True, 0, 0)
        """Result of the last update."""
        self._refs_cache: ManifestRefsCache | None = None

    def close(self) -> None:
        """Release the folder."""
        release(self._shared)

    @contextmanager
    def transaction(self) -> Iterator[LedgerRows]:
        """Yield the rows within a transaction, which an error undoes.

        Raises: TablesUnavailable, the error of `check`.
        """
        try:
            with self._env.begin(write=True) as txn:
                self._check()
                yield LedgerRows(txn, self._tables)
                self._check()
        except lmdb.Error as err:
            raise TablesUnavailable(
                f"{self._folder}: {err}; raise index.map_bytes if it is full, else delete the folder: the next GC "
                "run rebuilds it"
            ) from err

    def update(
        self,
        names: Iterable[str],
        containers: Collection[int],
        read: Callable[[str], Manifest],
        directory: Callable[[int], Directory | None],
        now_us: int,
    ) -> GcCandidates:
        """Count new versions, remove deleted ones, and return the candidates.

        `names` are the manifests of all versions that can be read now or later. If one cannot be read nothing is
        counted, and marking reports it.
        """
        stored: dict[bytes, dict[int, str]] = {}
        for name in names:
            if (parsed := key_and_version(name)) is not None:  # marking reads, and refuses, objects with another name
                stored.setdefault(parsed[0], {})[parsed[1]] = name
        try:
            with self.transaction() as rows:
                if rows.txn.get(b"mode", db=rows.tables["meta"]) != self.name:
                    rows.empty(self.name)
                distrust(rows)  # until all of this run has ended
                count = {HYBRID: self._intervals, REFCOUNT: self._references, EXPIRY: self._expiries}[self._mode]
                known = rows.known()
                for key in sorted(stored.keys() | known.keys()):
                    count(rows, _KeyVersions(key, stored.get(key, {}), known.get(key, {}), read, now_us))
                if self._mode == EXPIRY:
                    rows.expire(now_us)
                nominate_unreferenced(rows, containers, directory)
                self.end_count(rows)
                failpoint("ledger.counted")
                nominated = rows.count("nominated")
                by_services = rows.txn.get(b"services", db=rows.tables["meta"]) is not None
                has_ended = rows.number(b"ended") > 0  # earlier runs may have resolved what it nominated
                is_marking_due = bool(nominated) or has_ended or by_services or is_mark_overdue(rows, now_us)
                self.candidates = GcCandidates(is_marking_due, nominated, rows.touched)
            failpoint("ledger.written")
        except PermanentError:
            self.candidates = GcCandidates(True, 0, 0)
            with self.transaction() as rows:
                distrust(rows)
        return self.candidates

    def update_keys(
        self,
        rows: LedgerRows,
        stored: Mapping[bytes, dict[int, str]],
        read: Callable[[str], Manifest],
        now_us: int,
    ) -> None:
        """Count the versions of some keys, all that exist, within a transaction of mode hybrid.

        Raises: the errors of `read`; then the caller undoes the transaction.
        """
        for key, versions in sorted(stored.items()):
            self._intervals(rows, _KeyVersions(key, versions, rows.known_of(key), read, now_us))
        self.end_count(rows)

    @staticmethod
    def end_count(rows: LedgerRows) -> None:
        """Write the summaries of containers, and the bytes that ended, of a transaction."""
        rows.write_summaries()
        if rows.ended_bytes:
            rows.set_number(b"ended", rows.number(b"ended") + rows.ended_bytes)
            rows.ended_bytes = 0

    def audit(self, segments: Masks) -> None:
        """Compare the counts with marked segments; delete all rows if one is not counted.

        The next run then counts again, and marks.
        """
        if self._mode != HYBRID:
            return
        with self.transaction() as rows:
            wrong = find_wrong_counts(rows, segments)
            if wrong is not None:
                _log.error("container %016x: wrong summary in index/gc; all are made again by the next GC run", wrong)
                rows.empty(self.name)

    def held_segments(self) -> set[tuple[int, int]]:
        """Return (container, ordinal) of all referenced segments: for tests."""
        with self.transaction() as rows:
            found = [segment for segment, _ in rows.items("counts")]
        return {(int.from_bytes(segment[:8]), int.from_bytes(segment[8:])) for segment in found}

    def refs_cache(self, now_us: int) -> ManifestRefsCache:
        """Return the cached references of manifests.

        Once a week the cache rebuilds all rows.
        """
        with self.transaction() as rows:
            whole_us = int(rows.txn.get(b"whole", b"0", db=rows.tables["meta"]))
        rebuild = not whole_us <= now_us < whole_us + REBUILD_REFS_AFTER_US
        self._refs_cache = ManifestRefsCache(_RefsTable(self.transaction), rebuild=rebuild)
        return self._refs_cache

    @property
    def is_trusted(self) -> bool:
        """Return whether a GC run of this mode left the tables of reach_summaries.py."""
        with self.transaction() as rows:
            return rows.get("meta", b"mode") == self.name and read_trusted(rows) is not None

    @property
    def name(self) -> bytes:
        """Return mode and format, as table `meta` records them."""
        return f"{self._mode} {FORMAT}".encode()

    def record_marking(self, now_us: int) -> None:
        """Record a completed mark, which resolves all nominations."""
        with self.transaction() as rows:
            rows.txn.drop(rows.tables["nominated"], delete=False)
            rows.set_number(b"marked", now_us)
            rows.set_number(b"ended", 0)
            if self._refs_cache is not None and self._refs_cache.rebuild:
                rows.txn.put(b"whole", str(now_us).encode(), db=rows.tables["meta"])
        failpoint("ledger.confirmed")

    # --- hybrid: the current version of each key counts its segments; earlier ones are counted by version intervals ---

    def _intervals(self, rows: LedgerRows, key_versions: _KeyVersions) -> None:
        key, stored, known = key_versions.key, key_versions.stored, key_versions.known
        first_new = min(stored.keys() - known.keys(), default=0)
        if first_new and known and (first_new < max(known) or rows.has_from("past", key, to_bytes(first_new))):
            for table in ("open", "past"):  # a version arrived late, or again: recount the key
                for row, _ in rows.rows_with_prefix(table, key):
                    rows.delete(table, row)
                    rows.release(row[-SEGMENT.itemsize :], key)
            rows.delete_versions(key, known)
            known = {}
        new, removed = sorted(stored.keys() - known.keys()), known.keys() - stored.keys()
        open_segments = (
            {row[KEY_BYTES:]: first for row, first in rows.rows_with_prefix("open", key)} if new and known else {}
        )
        last = max(known, default=0)
        for version in new:
            manifest = key_versions.read(stored[version])
            now_held = set(_segments(rows, manifest))
            for segment in sorted(open_segments.keys() - now_held):
                rows.delete("open", key + segment)
                rows.put("past", key + to_bytes(last) + segment, open_segments.pop(segment))
            for segment in sorted(now_held - open_segments.keys()):
                open_segments[segment] = to_bytes(version)
                rows.put("open", key + segment, open_segments[segment])
                rows.hold(segment, key)
            added = manifest.ledger
            added_bytes = max(0, added.unique_bytes - added.delta_chunk_bytes + added.delta_bytes)
            rows.put_version(key, version, added_bytes, digest_references(manifest))
            last = version
        if not removed:
            return
        rows.delete_versions(key, removed)
        live_versions = sorted(stored)
        for row, first in rows.rows_with_prefix("past", key):
            if not _any_within(live_versions, int.from_bytes(first), int.from_bytes(row[KEY_BYTES:][:8])):
                rows.delete("past", row)
                rows.release(row[-SEGMENT.itemsize :], key)
        if max(removed) > max(live_versions, default=0):
            for row, first in rows.rows_with_prefix("open", key):
                if int.from_bytes(first) > max(live_versions, default=0):
                    rows.delete("open", row)
                    rows.release(row[KEY_BYTES:], key)

    # --- refcount: every version counts its segments ------------------------------------------------------------------

    def _references(self, rows: LedgerRows, key_versions: _KeyVersions) -> None:
        key, stored, known = key_versions.key, key_versions.stored, key_versions.known
        for version in sorted(stored.keys() - known.keys()):
            for segment in _segments(rows, key_versions.read(stored[version])):
                rows.put("held", key + to_bytes(version) + segment, b"")
                rows.hold(segment)
            rows.put("versions", key + to_bytes(version), to_bytes(0))
        removed = known.keys() - stored.keys()
        for version in removed:
            for row, _ in rows.rows_with_prefix("held", key + to_bytes(version)):
                rows.delete("held", row)
                rows.release(row[-SEGMENT.itemsize :])
        rows.delete_versions(key, removed)

    # --- expiry: a stored version renews its segments before they expire; a deleted one does nothing ------------------

    def _expiries(self, rows: LedgerRows, key_versions: _KeyVersions) -> None:
        key, stored, known = key_versions.key, key_versions.stored, key_versions.known
        for version, name in sorted(stored.items()):
            if known.get(version, 0) >= key_versions.now_us + EXPIRY_US // 2:
                continue
            until = to_bytes(key_versions.now_us + EXPIRY_US)
            for segment in _segments(rows, key_versions.read(name)):
                rows.put("counts", segment, until)
            rows.put("versions", key + to_bytes(version), until)
        rows.delete_versions(key, known.keys() - stored.keys())


class _RefsTable:
    """Table of cached references; each call is a transaction of its own."""

    def __init__(self, transaction: Callable[[], AbstractContextManager[LedgerRows]]) -> None:
        self.transaction = transaction

    def get_many(self, names: Sequence[str]) -> dict[str, bytes]:
        with self.transaction() as rows:
            found = {name: rows.txn.get(name.encode(), db=rows.tables["summaries"]) for name in names}
        return {name: row for name, row in found.items() if row is not None}

    def put_many(self, new: Mapping[str, bytes]) -> None:
        if new:
            with self.transaction() as rows:
                for name, row in sorted(new.items()):
                    rows.put("summaries", name.encode(), row)

    def keep_only(self, names: Collection[str]) -> None:
        encoded_names = {name.encode() for name in names}
        with self.transaction() as rows:
            if rows.count("summaries") > len(encoded_names):
                removed = [
                    bytes(name) for name, _ in rows.txn.cursor(rows.tables["summaries"]) if name not in encoded_names
                ]
                for name in removed:
                    rows.delete("summaries", name)


@frozen
class _KeyVersions:
    """Versions of one key.

    `stored`: versions by manifest name; `known`: counted versions and their expiry.
    """

    key: bytes
    stored: dict[int, str]
    known: dict[int, int]
    read: Callable[[str], Manifest]
    now_us: int


def distrust(rows: LedgerRows) -> None:
    """Record that the next run has to mark: the tables of reach_summaries.py may be outdated."""
    rows.txn.delete(b"trusted", db=rows.tables["meta"])


def is_mark_overdue(rows: LedgerRows, now_us: int) -> bool:
    """Return whether the last marking is a week ago, or later than now."""
    marked_us = rows.number(b"marked")
    return not marked_us <= now_us < marked_us + MARK_AFTER_US


def digest_references(manifest: Manifest) -> bytes:
    """Return a digest of the segments that a manifest names."""
    segments = manifest.segments
    hasher = blake3(segments.containers.astype("<u8").tobytes())
    hasher.update(segments.ordinals.astype("<u4").tobytes())
    return hasher.digest(16)


def nominate_unreferenced(
    rows: LedgerRows, containers: Collection[int], directory: Callable[[int], Directory | None]
) -> None:
    """Nominate unreferenced segments and chunks of new containers, and these containers.

    A put that died leaves them, for example. Chunks that no counted segment names count as bytes of versions that
    ended. Memory: 5 bytes for each chunk of the new containers.
    """
    known = {int.from_bytes(name) for name, _ in rows.txn.cursor(rows.tables["containers"])}
    for container in known - set(containers):
        rows.delete("containers", to_bytes(container))
    referenced, counted = Masks(), Masks()
    chunk_bytes: dict[int, tuple[Bools, NDArray[np.float32]]] = {}
    for container in sorted(set(containers) - known):
        rows.put("containers", to_bytes(container), b"")
        found = directory(container)
        if found is None:
            rows.nominate(to_bytes(container))
            continue
        chunk_bytes[container] = found.chunks.there, bytes_of_chunks(found).astype(np.float32)
        recipes, is_counted = found.segments, np.zeros(len(found.segments), np.bool_)
        for ordinal in np.flatnonzero(np.diff(recipes.bounds)).tolist():
            segment = to_bytes(container) + ordinal.to_bytes(4)
            is_counted[ordinal] = rows.txn.get(segment, db=rows.tables["counts"]) is not None
            if not is_counted[ordinal]:
                rows.nominate(segment)
                rows.nominate(to_bytes(container))
        _mark_chunks(referenced, recipes.chunks)
        _mark_chunks(counted, recipes.chunks.take(np.repeat(is_counted, np.diff(recipes.bounds))))
    for container, (chunks, shares) in chunk_bytes.items():
        if _unnamed(chunks, referenced.get(container)).any():
            rows.nominate(to_bytes(container))
        rows.ended_bytes += int(shares[_unnamed(chunks, counted.get(container))].sum())


def _mark_chunks(masks: Masks, chunks: Locations) -> None:
    for container, at in group_by_container(chunks.containers):
        if container != ZERO:
            mark_ordinals(masks, container, chunks.ordinals[at])


def _unnamed(chunks: Bools, named: Bools | None) -> Bools:
    """Return the chunks that a mask lacks; all if it names more than exist."""
    if named is None or len(named) > len(chunks):
        return chunks
    return chunks & ~mask_of(named, len(chunks))


def _segments(rows: LedgerRows, manifest: Manifest) -> list[bytes]:
    """Return the segments of a version, each once, ascending."""
    if manifest.is_by_services:
        rows.txn.put(b"services", b"1", db=rows.tables["meta"])
    table = np.empty(len(manifest.segments), SEGMENT)
    table["container"], table["ordinal"] = manifest.segments.containers, manifest.segments.ordinals
    return sorted(set(table.view(f"V{SEGMENT.itemsize}").tolist()))


def _any_within(ascending: list[int], first: int, last: int) -> bool:
    return any(first <= version <= last for version in ascending)

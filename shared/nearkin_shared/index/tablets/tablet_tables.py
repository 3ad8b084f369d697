"""Tables of an index that finds chunks in the directories of their containers.

    name -> tag -> tag table (memory): no container, or those that may have it -> tablet of each -> ordinal

Where `index.memory` is too small for all tags, the table has some of each container, the hooks: those of a batch name
the containers that are asked for all names of the batch (docs/adr/0084).

    chunks      container 8 (big-endian) -> ordinals of hidden chunks, 4 each; 2^32 - 1: all
    segments    container 8 (big-endian) -> segment ids in stream order, 20 each; zeros for one that is not found
    features    as in the kind `exact`, up to `index.memory`: those of the oldest containers are evicted
    meta        "tablets" -> number of changes 8, state 16

A hidden chunk is in its container's directory and is not found: it was withdrawn, and will be removed. The state
changes when a hidden entry is restored, so that no snapshot of the tags from before is used.

Invariant: an entry is found only where the directory, or the row of `segments`, has its whole key.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from struct import Struct
from typing import Any, Protocol

import numpy as np

from nearkin_shared.errors import PermanentError
from nearkin_shared.formats.directory import Directory
from nearkin_shared.index.container_entries import ContainerEntries
from nearkin_shared.index.lmdb.bounded_runs import BoundedRuns
from nearkin_shared.index.lmdb.entry_tables import SHAPES, TABLETS_MARKER, EntryTables, Portion, Rows, add_features
from nearkin_shared.index.lmdb.environments import damage_error
from nearkin_shared.index.lmdb.lmdb_removal import Removals, find_keys, is_removed
from nearkin_shared.index.tablets import hook_levels
from nearkin_shared.index.tablets.container_tags import BYTES_A_TAG, ContainerTags, tags_of_segments
from nearkin_shared.index.tablets.hook_levels import HookLevels
from nearkin_shared.index.tablets.tablet_cache import CachePolicy, NotCached, Tablet, TabletCache, words_of
from nearkin_shared.index.tablets.tablet_search import RECENT_MAX, RecentContainers, TabletOf, TabletSearch, champions
from nearkin_shared.index.tablets.tag_snapshot import TagSnapshot, read_snapshot, write_snapshot
from nearkin_shared.kernels.tag_table import FILTER_BITS_MAX
from nearkin_shared.limits import MIB
from nearkin_shared.observability import counters
from nearkin_shared.results import IndexReport
from nearkin_shared.types import NAME_BYTES, SEGMENT_ID_BYTES, U8, U32, U64, Bools, ContainerId, Locations, distinct
from nearkin_shared.utils.frozen import frozen

_log = logging.getLogger("nearkin")
_META = b"tablets"
_STATE = Struct("<Q16s")
_NO_STATE = _STATE.pack(0, bytes(16))
_CHECK_TAG_AT = 20
SPARSE = 3
"""A snapshot that takes a third of the memory for tags is not used if it has hooks alone."""
_ALL = np.array([0xFFFFFFFF], np.uint32)
CACHE_BYTES_MIN = 8 * MIB
"""Memory for tablets if the tags take all of `index.memory`."""
CACHE_SHARE = 4
"""If hooks must be few, one in so many bytes of the memory is for tablets."""
FEATURE_BYTES_MIN = 16 * MIB
"""Room for super-features, at least; else they have as many bytes of the page cache as `index.memory`."""
TAG_BITS_MIN = 12
"""A table whose entries have fewer bits is not saved: read from the directories again, they have more."""
UNSAVED_MIN, UNSAVED_SHARE = 2, 128
"""A closed index saves its tags after so many new containers, or one in so many: to read the directory of one takes as
long as to write the tags of a hundred."""
UNSAVED_OPEN_MIN, UNSAVED_OPEN_SHARE = 4096, 16
"""An open one does so less often: it need not read them."""


class Directories(Protocol):
    """Directories of containers."""

    def directory(self, container: ContainerId) -> Directory:
        """Return a container's directory. Raises NotFound, Corrupt or StoreUnavailable."""


@frozen
class TabletOptions:
    """Bounds and policies; `policy`, `filter_bits` and `level` are for measurements."""

    memory_bytes: int = 256 * MIB
    policy: CachePolicy = CachePolicy.PREFETCH
    filter_bits: int = FILTER_BITS_MAX
    is_sampled: bool = False
    """Whether tags that exceed the memory are left out, so that some chunks are not found."""
    level: int | None = None
    """Level of the hooks of all containers; None: as many as fit."""


class TabletTables(EntryTables):
    """Chunks and segments by tag; super-features in sorted runs."""

    marker = TABLETS_MARKER

    def __init__(
        self,
        databases: Mapping[str, Any],
        folder: Path,
        directories: Directories,
        options: TabletOptions,
        *,
        read_only: bool,
    ) -> None:
        self._hidden_db, self._segments_db = databases["chunks"], databases["segments"]
        self._containers_db, self._meta = databases["containers"], databases["meta"]
        self._features = BoundedRuns(
            databases["features"], SHAPES["features"], max(FEATURE_BYTES_MIN, options.memory_bytes)
        )
        self._folder = folder
        self._directories = directories
        self._options = options
        self._is_read_only = read_only
        self.tablets: TabletCache = TabletCache(self._read_tablet, options.memory_bytes, options.policy)
        self._lock = threading.Lock()
        self._tags: ContainerTags | None = None
        self._recent = {"chunks": RecentContainers(), "segments": RecentContainers()}
        self._hidden: dict[int, U32] = {}
        """Ordinals of hidden chunks by container."""
        self._seen = _NO_STATE
        """Row of `meta` that memory agrees with."""
        self._written: bytes | None = None
        """That row as the last transaction of this process writes it."""
        self.unsaved: int = 0
        """Containers that the snapshot lacks."""
        self._tried = 0
        """Of them, those that the last try to save it had, and failed."""

    # --- memory ------------------------------------------------------------------------------------------------------

    @property
    def memory_bytes(self) -> int:
        """Return the bytes of tags, and of the tablets in memory."""
        return self.tag_bytes + self.tablets.used_bytes

    @property
    def tag_bytes(self) -> int:
        """Return the bytes of tags and container numbers."""
        return 0 if self._tags is None else self._tags.memory_bytes

    def report(self, txn: Any) -> IndexReport:
        """Return memory and expected loss of the index."""
        with self._lock:
            tags = self._synced(txn)
            kind = "sampled" if self._options.is_sampled else "tablets"
            return IndexReport(kind, tags.memory_bytes, tags.missed_share)

    def _synced(self, txn: Any) -> ContainerTags:
        """Return the tags as the transaction has the index; another process may have changed it."""
        row = bytes(txn.get(_META, _NO_STATE, db=self._meta))
        if self._tags is not None and _unpacked(row)[0] < _unpacked(self._seen)[0]:
            return self._tags  # of a reader that waited: memory has durable entries, later than its view
        if self._tags is None or _state_of(row) not in self._states:
            self._tags = None
            self._tags = self._loaded(txn, _state_of(row))
        elif row == self._seen:  # or another thread commits what memory has already: its containers are durable
            return self._tags
        elif row != self._written:
            tags, self._tags = self._tags, None  # read again after an outage: one container may lack its tags
            self._update(txn, tags)
            self._tags = tags
        self._seen, self._written = row, None
        return self._tags

    @property
    def _states(self) -> list[bytes]:
        return [_state_of(row) for row in (self._seen, self._written) if row is not None]

    def _loaded(self, txn: Any, state: bytes) -> ContainerTags:
        options = self._options
        snapshot = read_snapshot(self._folder, state, options.filter_bits) if any(state) else None
        if snapshot is not None and self._is_too_sparse(snapshot):
            snapshot = None
        bytes_max = self._tag_bytes_max if options.is_sampled else None
        tags = ContainerTags(options.filter_bits, snapshot, bytes_max=bytes_max, level=options.level)
        self.unsaved = self._tried = 0
        self._update(txn, tags)
        for recent in self._recent.values():  # as if this process had published them
            recent.note_published(tags.last(RECENT_MAX))
        return tags

    @property
    def _tag_bytes_max(self) -> int:
        memory_bytes = self._options.memory_bytes
        return memory_bytes - max(CACHE_BYTES_MIN, memory_bytes // CACHE_SHARE)

    def _is_too_sparse(self, snapshot: TagSnapshot) -> bool:
        """Return whether directories have hooks that the snapshot lacks and memory has room for."""
        if self._options.level is not None:
            return False
        start = hook_levels.LEVEL_FIRST if self._options.is_sampled else 0
        is_sampled = bool((HookLevels(saved=snapshot.marks).levels > start).any())
        has_room = len(snapshot.tags) * BYTES_A_TAG * SPARSE < self._tag_bytes_max
        return is_sampled and (has_room or not self._options.is_sampled)

    def _update(self, txn: Any, tags: ContainerTags) -> None:
        """Add the containers that the index has and `tags` lack; remove the others."""
        self._hidden = {
            int.from_bytes(name, "big"): _ordinals_of(bytes(name), bytes(ordinals))
            for name, ordinals in txn.cursor(self._hidden_db)
        }
        self.tablets.clear()
        keys = txn.cursor(self._containers_db).iternext(keys=True, values=False)
        listed = [int.from_bytes(key, "big") for key in keys]
        gone = set(tags.containers()).difference(listed)
        if gone:
            tags.purge(gone)
        for container in listed:
            if container not in tags:
                self._read_container(txn, tags, container)
        self._bound(tags)

    def _read_container(self, txn: Any, tags: ContainerTags, container: int) -> None:
        tags.add(container)
        self.unsaved += 1
        try:
            tablet = self.tablets.get(container)
        except PermanentError as err:
            _log.warning("%s: its chunks are not found until it is repaired", err)
        else:
            found = self._find(tags, tablet.names, tablet.tags, self._chunk_tablet)[1]
            tags.put(container, tablet.tags[~found])
        ids = self.segment_ids(txn, container)
        ids = ids[ids.any(axis=1)]
        segment_tags = tags_of_segments(ids)
        tags.put(container, segment_tags[~self._find(tags, ids, segment_tags, self._segment_reader(txn))[1]])

    def _bound(self, tags: ContainerTags) -> None:
        self.tablets.bound(max(CACHE_BYTES_MIN, self._options.memory_bytes - tags.memory_bytes))

    # --- lookups -----------------------------------------------------------------------------------------------------

    def locate(self, txn: Any, table: str, keys: U8) -> tuple[Locations, Bools]:
        """Return (locations, found) of keys."""
        if table == "features":
            return self._features.locate(txn, keys)
        with self._lock:
            tags = self._synced(txn)
            is_chunk = table == "chunks"
            key_tags = words_of(keys, _CHECK_TAG_AT) if is_chunk else tags_of_segments(keys)
            tablet_of = self._chunk_tablet if is_chunk else self._segment_reader(txn)
            return self._find(tags, keys, key_tags, tablet_of, self._recent[table])

    def locate_at_once(self, keys: U8, txn: Any = None) -> tuple[Locations, Bools] | None:
        """Return (locations, found) of chunks, with `txn` of segments, or None if it would wait.

        A lookup waits for another call, for changes that are not in memory, and for tablets that are not. No other
        process may write.
        """
        if not self._lock.acquire(blocking=False):
            return None
        try:
            if self._tags is None or self._written is not None:
                return None
            if txn is None:
                tags = words_of(keys, _CHECK_TAG_AT)
                return self._find(self._tags, keys, tags, self.tablets.get_cached, self._recent["chunks"])
            return self._find(
                self._tags, keys, tags_of_segments(keys), self._segment_reader(txn), self._recent["segments"]
            )
        except NotCached:
            return None
        finally:
            self._lock.release()

    def only_in(self, containers: U64, key_tags: U64) -> Bools | None:
        """Return which keys only these containers may have; None if busy or with hooks."""
        if not self._lock.acquire(blocking=False):
            return None
        try:
            if self._tags is None or self._written is not None or not self._tags.hooks.are_zero:
                return None
            rows, named = self._tags.candidates(key_tags)
            is_only: Bools = np.bincount(rows, minlength=len(key_tags)) == 1
            is_only[rows[named != containers[rows]]] = False
            return is_only
        finally:
            self._lock.release()

    def _find(
        self, tags: ContainerTags, keys: U8, key_tags: U64, tablet_of: TabletOf, recent: RecentContainers | None = None
    ) -> tuple[Locations, Bools]:
        """Return (locations, found) of keys in the tablets of the containers that may have them.

        With `recent` also of keys that are no hooks.
        """
        search = TabletSearch(keys, key_tags, tablet_of)
        rows, containers = tags.candidates(key_tags)
        if not len(rows) and (recent is None or tags.hooks.are_zero):
            return search.locations, search.found
        if recent is None or tags.hooks.are_zero:
            search.ask(tags.first_published(containers), rows, containers)
        else:
            named = champions(containers, len(keys))
            search.ask_for_all(tags.in_order(named.union(recent.containers)), named, rows, containers)
            search.follow(tags.neighbours)
        if recent is not None and self._options.is_sampled:
            tags.mark_stable(search.hits)
            recent.note_hits(search.hits)
        return search.locations, search.found

    def _chunk_tablet(self, container: int) -> Tablet | None:
        """Return the names of a container that may be found; None if it is missing or damaged."""
        try:
            return self.tablets.get(container, None if self._tags is None else self._tags.successor)
        except PermanentError:  # as if the index did not name it: the next put withdraws it
            return None

    def _read_tablet(self, container: int) -> Tablet:
        return self._tablet_of(self._directories.directory(ContainerId(container)))

    def _tablet_of(self, directory: Directory) -> Tablet:
        hidden = self._hidden.get(directory.container)
        is_found = directory.chunks.there.copy()
        if hidden is not None and hidden.tobytes() == _ALL.tobytes():
            is_found[:] = False
        elif hidden is not None:
            is_found[hidden[hidden < len(is_found)]] = False
        ordinals = np.flatnonzero(is_found).astype(np.uint32)
        names = directory.chunks.names[ordinals]
        return Tablet.make(names, words_of(names, _CHECK_TAG_AT), ordinals)

    def _segment_reader(self, txn: Any) -> Callable[[int], Tablet]:
        return partial(self._segment_tablet, txn)

    def _segment_tablet(self, txn: Any, container: int) -> Tablet:
        counters.INDEX_READS.add(1, "segments")
        ids = self.segment_ids(txn, container)
        return Tablet.make(ids, tags_of_segments(ids), np.arange(len(ids), dtype=np.uint32))

    def segment_ids(self, txn: Any, container: int) -> U8:
        """Return the segment ids of a container in stream order, zeros for one that is not found."""
        data = np.frombuffer(bytes(txn.get(_key(container), b"", db=self._segments_db)), np.uint8)
        if len(data) % SEGMENT_ID_BYTES:
            raise damage_error(f"segments of container {container:016x} have {len(data)} bytes")
        return data.reshape(-1, SEGMENT_ID_BYTES).copy()

    def next_rows(self, txn: Any, table: str, position: bytes) -> Portion | None:
        """Return the entries of the container after a position."""
        if table == "features":
            return self._features.next_run(txn, position)
        with self._lock:
            tags = self._synced(txn)
            cursor = txn.cursor(self._containers_db)
            if not (cursor.set_range(position + b"\0") if position else cursor.first()):
                return None
            key = bytes(cursor.key())
            container = int.from_bytes(key, "big")
            if table == "chunks":
                tablet = self._chunk_tablet(container) or _empty(NAME_BYTES)
                locations, found = self._find(tags, tablet.names, tablet.tags, self._chunk_tablet)
            else:
                tablet = self._segment_tablet(txn, container)
                locations, found = self._find(tags, tablet.names, tablet.tags, self._segment_reader(txn))
            is_here = (locations.containers == np.uint64(container)) & (locations.ordinals == tablet.ordinals)
            if not tags.hooks.are_zero:
                locations.containers[~found], locations.ordinals[~found] = container, tablet.ordinals[~found]
                is_here |= ~found
            found = is_here & tablet.names.any(axis=1)
            return key, tablet.names[found], locations.take(found)

    # --- changes -----------------------------------------------------------------------------------------------------

    def add(self, txn: Any, many: Sequence[ContainerEntries]) -> None:
        """Add the entries of containers."""
        with self._lock:
            tags = self._synced(txn)
            restored = [self._add_container(txn, tags, claims) for claims in many]
            self._note_change(txn, renew=any(restored))
            self._bound(tags)
        add_features(txn, self._features, many)

    def _add_container(self, txn: Any, tags: ContainerTags, claims: ContainerEntries) -> bool:
        """Add the entries of one container.

        Return whether it had been published without some of them.
        """
        container, ordinals = int(claims.directory.container), claims.findable
        is_known = container in tags
        names = claims.directory.chunks.names[ordinals]
        name_tags = words_of(names, _CHECK_TAG_AT)
        is_new = ~self._is_found(tags, container, names, name_tags, self._chunk_tablet)
        if is_new.any() or not is_known:
            self._hide(txn, container, self._hidden_after(claims, ordinals[is_new], is_known=is_known))
            self.tablets.drop([container])
        ids, segment_tags = claims.segment_ids, tags_of_segments(claims.segment_ids)
        is_found = self._is_found(tags, container, ids, segment_tags, self._segment_reader(txn))
        is_new_segment = ids.any(axis=1) & ~is_found
        if is_known:
            ids = self._restored_ids(txn, container, ids, is_new_segment)
        if is_new_segment.any() or not is_known:
            txn.put(_key(container), ids.tobytes(), db=self._segments_db)
        self.unsaved += not is_known
        tags.add(container)
        tags.put(container, np.concatenate([name_tags[is_new], segment_tags[is_new_segment]]))
        if not tags.hooks.are_zero:
            for recent in self._recent.values():
                recent.note_published([container])
        return bool(is_known and (is_new.any() or is_new_segment.any()))

    def _is_found(self, tags: ContainerTags, container: int, keys: U8, key_tags: U64, tablet_of: TabletOf) -> Bools:
        """Return which keys of a container are found, there or in an earlier one."""
        found = self._find(tags, keys, key_tags, tablet_of)[1]
        if container in tags and not tags.hooks.are_zero:
            tablet = tablet_of(container)
            found |= tablet.find(keys, key_tags)[1] if tablet is not None else False
        return found

    def _restored_ids(self, txn: Any, container: int, ids: U8, is_new: Bools) -> U8:
        """Return the segment ids of a published container with those that are found again."""
        before = self.segment_ids(txn, container)
        known = np.zeros((max(len(ids), len(before)), SEGMENT_ID_BYTES), np.uint8)
        known[: len(before)] = before
        rows = np.flatnonzero(is_new)
        known[rows] = ids[rows]
        return known

    def _hidden_after(self, claims: ContainerEntries, added: U32, *, is_known: bool) -> U32:
        """Return the hidden chunks of a container after chunks were added."""
        is_hidden = claims.directory.chunks.there.copy()
        hidden = self._hidden.get(claims.directory.container)
        if not is_known:
            is_hidden[claims.findable] = False
        elif hidden is None or hidden.tobytes() != _ALL.tobytes():
            is_hidden[:] = False
            if hidden is not None:
                is_hidden[hidden[hidden < len(is_hidden)]] = True
        is_hidden[added] = False
        return np.flatnonzero(is_hidden).astype(np.uint32)

    def _hide(self, txn: Any, container: int, ordinals: U32) -> None:
        if len(ordinals):
            self._hidden[container] = ordinals
            txn.put(_key(container), ordinals.astype("<u4").tobytes(), db=self._hidden_db)
        else:
            self._hidden.pop(container, None)
            txn.delete(_key(container), db=self._hidden_db)

    def find_removed(self, rows: Rows, removals: Mapping[str, Removals]) -> dict[str, U8]:
        """Return names of removed chunks, from directories, and keys of super-features."""
        names = [np.zeros((0, NAME_BYTES), np.uint8)]
        for container, ordinals in removals["chunks"].items():
            try:
                found = self._directories.directory(ContainerId(container)).chunks.names
            except PermanentError:
                continue
            found = found if ordinals is None else found[ordinals[ordinals < len(found)]]
            names.append(found[found.any(axis=1)])  # zeros have no tag of their own: it may be that of another chunk
        features = find_keys(rows("features"), removals["features"], SHAPES["features"].key_bytes)
        segments = np.zeros((0, SEGMENT_ID_BYTES), np.uint8)  # `drop` reads them
        return {"chunks": np.concatenate(names), "segments": segments, "features": features}

    def drop(
        self, txn: Any, removals: Mapping[str, Removals], deleted: Collection[int], keys: Mapping[str, U8] | None
    ) -> None:
        """Hide chunks, erase the ids of segments, and remove their tags."""
        with self._lock:
            tags = self._synced(txn)
            chunks = removals["chunks"]
            names = self.find_removed(lambda _: iter(()), removals)["chunks"] if keys is None else keys["chunks"]
            self._remove_tags(tags, words_of(names, _CHECK_TAG_AT), chunks)
            for container, ordinals in chunks.items():
                if container in tags and container not in deleted:
                    self._hide(txn, container, self._with_hidden(container, ordinals))
            for container, ordinals in removals["segments"].items():
                self._erase_segments(txn, tags, container, ordinals)
            for container in deleted:
                self._hide(txn, container, np.zeros(0, np.uint32))
                txn.delete(_key(container), db=self._segments_db)
            tags.retire(deleted)
            self.tablets.drop([*chunks, *deleted])
            self._note_change(txn)
        if removals["features"]:
            is_gone = partial(is_removed, removals=removals["features"])
            self._features.drop(txn, is_gone, None if keys is None else keys["features"])

    def _with_hidden(self, container: int, ordinals: U32 | None) -> U32:
        """Return the hidden chunks of a container and `ordinals`, None for all."""
        before = self._hidden.get(container, np.zeros(0, np.uint32))
        if ordinals is None or before.tobytes() == _ALL.tobytes():
            return _ALL
        return distinct(np.concatenate([before, ordinals]))

    @staticmethod
    def _remove_tags(tags: ContainerTags, name_tags: U64, chunks: Removals) -> None:
        """Remove the tags of removed chunks; one that is left names a hidden chunk."""
        rows, containers = tags.candidates(name_tags)
        for container in tags.first_published(containers):
            if container in chunks:
                tags.remove(container, name_tags[rows[containers == np.uint64(container)]])

    def _erase_segments(self, txn: Any, tags: ContainerTags, container: int, ordinals: U32 | None) -> None:
        ids = self.segment_ids(txn, container)
        rows = np.arange(len(ids)) if ordinals is None else ordinals[ordinals < len(ids)]
        if len(rows):
            tags.remove(container, tags_of_segments(ids[rows]))
            ids[rows] = 0
            txn.put(_key(container), ids.tobytes(), db=self._segments_db)

    def on_renewed(self, txn: Any, container: int) -> None:
        """Forget the hidden chunks that a rewritten container does not have."""
        with self._lock:
            self._synced(txn)
            self.tablets.drop([container])
            hidden = self._hidden.get(container)
            if hidden is None or hidden.tobytes() == _ALL.tobytes():
                return
            try:
                is_there = self._directories.directory(ContainerId(container)).chunks.there
            except PermanentError:
                return
            kept = hidden[hidden < len(is_there)]
            self._hide(txn, container, kept[is_there[kept]])

    def _note_change(self, txn: Any, *, renew: bool = False) -> None:
        """Count a change, which other processes notice; a new state outdates all snapshots."""
        changes, state = _STATE.unpack(self._seen)
        if renew or not any(state):
            state = secrets.token_bytes(16)
            self.unsaved, self._tried = 0 if self._tags is None else len(self._tags), 0
        self._written = _STATE.pack(changes + 1, state)
        txn.put(_META, self._written, db=self._meta)

    def on_written(self) -> None:
        """Save the tags after many new containers."""
        with self._lock:
            if self._tags is not None and self.unsaved - self._tried > len(self._tags) // UNSAVED_OPEN_SHARE:
                self._save(UNSAVED_OPEN_MIN)

    def on_aborted(self) -> None:
        """Read all again: memory has the entries of the failed transaction."""
        with self._lock:
            self._tags = self._written = None

    def _save(self, unsaved_min: int) -> None:
        tags = self._tags
        is_due = self.unsaved - self._tried >= unsaved_min
        if tags is None or self._is_read_only or not is_due or tags.table.tag_bits < TAG_BITS_MIN:
            return
        try:
            write_snapshot(self._folder, _state_of(self._written or self._seen), tags.snapshot)
        except OSError as err:
            _log.warning("%s: tags are not saved (%s): the next open reads directories", self._folder, err)
            self._tried = self.unsaved
        else:
            self.unsaved = self._tried = 0

    @property
    def is_snapshot_behind(self) -> bool:
        """Return whether the next open would read many directories for want of a snapshot."""
        tags = self._tags  # without the lock: a probe asks
        if tags is None or tags.table.tag_bits < TAG_BITS_MIN:
            return False
        return self.unsaved >= max(UNSAVED_MIN, len(tags) // UNSAVED_SHARE)

    def save(self) -> None:
        """Save the tags if many containers are new, also after a failed try."""
        with self._lock:
            if self.is_snapshot_behind:
                self._tried = 0
                self._save(UNSAVED_MIN)

    def close(self) -> None:
        """Save the tags if many containers are new, and drop all memory. Idempotent."""
        self.save()
        with self._lock:
            self._tags = None
        self.tablets.close()


def _state_of(row: bytes) -> bytes:
    return _unpacked(row)[1]


def _unpacked(row: bytes) -> tuple[int, bytes]:
    if len(row) != _STATE.size:
        raise damage_error(f"its state has {len(row)} bytes")
    changes, state = _STATE.unpack(row)
    return changes, state


def _ordinals_of(name: bytes, data: bytes) -> U32:
    if len(data) % 4:
        raise damage_error(f"hidden chunks of container {name.hex()} have {len(data)} bytes")
    return np.frombuffer(data, "<u4").astype(np.uint32)


def _key(container: int) -> bytes:
    return container.to_bytes(8, "big")


def _empty(width: int) -> Tablet:
    return Tablet(np.zeros((0, width), np.uint8), np.zeros(0, np.uint64), np.zeros(0, np.uint32))

"""The ledger of a collector. Invariant: it nominates, and nothing goes for its word; it can be deleted at any time.

Brought up to the manifests at the beginning of each round, in one transaction and in the order of its keys:

versions    key digest 16, version 8            -> up to when its segments were said to be needed, 8 (expiry)
open        key digest 16, segment 12           -> since which version the key's current one holds it, 8 (hybrid)
past        key digest 16, last 8, segment 12   -> first 8: versions that held it until a later one did not (hybrid)
held        key digest 16, version 8, segment 12 -> nothing (refcount)
counts      segment 12 -> how many rows of `open` and `past`, or of `held`, 8; expiry: needed up to when, 8
nominated   segment 12, or container 8          -> nothing: since marking last looked, nothing needed it any more
containers  container 8                         -> nothing: it was looked at
summaries   manifest's name -> what it names (manifest_refs_cache.py)
meta        mode, marked, whole, services

A row is keyed by who holds what, so counting again, after a crash or whatever, counts nothing twice. Segment: container
8 (big-endian), ordinal 4. Not counted are chunks: whether one is needed, and by which bases, marking finds.
Memory: 200 bytes a version and container of the store, 100 a segment of the key that is looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import lmdb
import numpy as np

from nearkin_maintenance.gc.manifest_refs_cache import ManifestRefsCache
from nearkin_maintenance.gc.mark import Masks, mark_ordinals, mask_of
from nearkin_shared.config.storage import EXPIRY, HYBRID, REFCOUNT
from nearkin_shared.errors import IndexUnsafe, PermanentError, StoreUnavailable
from nearkin_shared.formats.directory import Directory
from nearkin_shared.formats.manifest import NO_ORIGIN, Manifest
from nearkin_shared.index.lmdb.environments import acquire, release
from nearkin_shared.storage.manifests import key_and_version
from nearkin_shared.types import ZERO, Bools, group_by_container
from nearkin_shared.utils.failpoints import failpoint
from nearkin_shared.utils.frozen import frozen
from nearkin_shared.utils.private_files import remove_tree

FORMAT = 1
TABLES = ("versions", "open", "past", "held", "counts", "nominated", "containers", "summaries", "meta")
MARK_AT_LEAST_US = 7 * 86_400 * 1_000_000
"""Marking is the truth: it looks once a week, whatever is nominated."""
SUMMARISE_AT_LEAST_US = 7 * 86_400 * 1_000_000
"""So often every manifest is decoded, whatever is known of it."""
EXPIRY_US = 7 * 86_400 * 1_000_000
"""No version says at its put when it will be deleted: in mode expiry its segments are needed for a week at a time."""
_KEY_BYTES = 16
_SEGMENT = np.dtype([("container", ">u8"), ("ordinal", ">u4")])


@frozen
class GcCandidates:
    """What a round learns from the ledger."""

    marking: bool
    """Whether marking has something to confirm, or has not looked for a week."""
    nominated: int
    """Segments and containers that nothing needs any more, by the ledger."""
    touched: int
    """Rows written or removed to bring the ledger up to the manifests."""


class ReferenceCounts:
    """Segments and what holds them, in a folder of its own. One process writes it, under the store's lock."""

    def __init__(self, folder: Path, map_bytes: int, mode: str) -> None:
        """Raises StoreUnavailable."""
        try:
            self._shared = acquire(folder, map_bytes, TABLES, writable=True)
        except IndexUnsafe:  # it can be deleted at any time, and reading it may end the process
            remove_tree(folder)
            self._shared = acquire(folder, map_bytes, TABLES, writable=True)
        self._env, self._tables = self._shared.env, self._shared.databases
        self._folder, self._mode = folder, mode
        self.told = GcCandidates(True, 0, 0)
        """What was told last."""
        self._summaries: ManifestRefsCache | None = None

    def close(self) -> None:
        """Let go of the folder."""
        release(self._shared)

    @contextmanager
    def _writing(self) -> Iterator[_Rows]:
        try:
            with self._env.begin(write=True) as txn:
                yield _Rows(txn, self._tables)
        except lmdb.Error as err:
            raise StoreUnavailable(
                f"{self._folder}: {err}; raise index.map_bytes if it is full, else delete that folder: it is made again"
            ) from err

    def update(
        self,
        names: Iterable[str],
        containers: Collection[int],
        read: Callable[[str], Manifest],
        directory: Callable[[int], Directory | None],
        now_us: int,
    ) -> GcCandidates:
        """Count what was committed since, and no more what is gone for good; tell what that leaves unneeded.

        `names` are the manifests of all versions that can be read now or later. Where one cannot be read nothing is
        counted, and marking is to say so.
        """
        wanted: dict[bytes, dict[int, str]] = {}
        for name in names:
            if (named := key_and_version(name)) is not None:  # marking reads, and refuses, what has another name
                wanted.setdefault(named[0], {})[named[1]] = name
        try:
            with self._writing() as rows:
                if rows.txn.get(b"mode", db=rows.tables["meta"]) != self._name:
                    rows.empty(self._name)
                count = {HYBRID: self._intervals, REFCOUNT: self._references, EXPIRY: self._expiries}[self._mode]
                known = rows.known()
                for key in sorted(wanted.keys() | known.keys()):
                    count(rows, _Versions(key, wanted.get(key, {}), known.get(key, {}), read, now_us))
                if self._mode == EXPIRY:
                    rows.expire(now_us)
                _look_at(rows, containers, directory)
                failpoint("ledger.counted")
                nominated = rows.count("nominated")
                marked_us = int(rows.txn.get(b"marked", b"0", db=rows.tables["meta"]))
                by_services = rows.txn.get(b"services", db=rows.tables["meta"]) is not None
                late = not marked_us <= now_us < marked_us + MARK_AT_LEAST_US
                self.told = GcCandidates(bool(nominated) or late or by_services, nominated, rows.touched)
            failpoint("ledger.written")
        except PermanentError:
            self.told = GcCandidates(True, 0, 0)
        return self.told

    def held_segments(self) -> set[tuple[int, int]]:
        """Return (container, ordinal) of all segments that are held, by the ledger: for tests."""
        with self._writing() as rows:
            found = [bytes(segment) for segment, _ in rows.txn.cursor(rows.tables["counts"])]
        return {(int.from_bytes(segment[:8]), int.from_bytes(segment[8:])) for segment in found}

    def summaries(self, now_us: int) -> ManifestRefsCache:
        """Return what is known of manifests; once a week nothing is believed, and all is made again."""
        with self._writing() as rows:
            whole_us = int(rows.txn.get(b"whole", b"0", db=rows.tables["meta"]))
        anew = not whole_us <= now_us < whole_us + SUMMARISE_AT_LEAST_US
        self._summaries = ManifestRefsCache(_SummaryRows(self._writing), anew=anew)
        return self._summaries

    @property
    def _name(self) -> bytes:
        return f"{self._mode} {FORMAT}".encode()

    def record_marking(self, now_us: int) -> None:
        """Note that marking has looked, and has condemned what is to be."""
        with self._writing() as rows:
            rows.txn.drop(rows.tables["nominated"], delete=False)
            rows.txn.put(b"marked", str(now_us).encode(), db=rows.tables["meta"])
            if self._summaries is not None and self._summaries.anew:
                rows.txn.put(b"whole", str(now_us).encode(), db=rows.tables["meta"])
        failpoint("ledger.confirmed")

    # --- hybrid: the current version of each key counts, what was current before is held by the versions it was in ----

    def _intervals(self, rows: _Rows, of: _Versions) -> None:
        key, wanted, known = of.key, of.wanted, of.known
        first_new = min(wanted.keys() - known.keys(), default=0)
        if first_new and known and (first_new < max(known) or rows.has_from("past", key, _number(first_new))):
            for table in ("open", "past"):  # one came late, or again: the key is counted anew
                for row, _ in rows.rows_with_prefix(table, key):
                    rows.delete(table, row)
                    rows.release(row[-_SEGMENT.itemsize :])
            rows.forget_versions(key, known)
            known = {}
        new, gone = sorted(wanted.keys() - known.keys()), known.keys() - wanted.keys()
        held = {row[_KEY_BYTES:]: first for row, first in rows.rows_with_prefix("open", key)} if new and known else {}
        last = max(known, default=0)
        for version in new:
            now_held = set(_segments(rows, of.read(wanted[version])))
            for segment in sorted(held.keys() - now_held):
                rows.delete("open", key + segment)
                rows.put("past", key + _number(last) + segment, held.pop(segment))
            for segment in sorted(now_held - held.keys()):
                held[segment] = _number(version)
                rows.put("open", key + segment, held[segment])
                rows.hold(segment)
            rows.put("versions", key + _number(version), _number(0))
            last = version
        if not gone:
            return
        rows.forget_versions(key, gone)
        living = sorted(wanted)
        for row, first in rows.rows_with_prefix("past", key):
            if not _any_within(living, int.from_bytes(first), int.from_bytes(row[_KEY_BYTES:][:8])):
                rows.delete("past", row)
                rows.release(row[-_SEGMENT.itemsize :])
        if max(gone) > max(living, default=0):
            for row, first in rows.rows_with_prefix("open", key):
                if int.from_bytes(first) > max(living, default=0):
                    rows.delete("open", row)
                    rows.release(row[_KEY_BYTES:])

    # --- refcount: every version counts ------------------------------------------------------------------------------

    def _references(self, rows: _Rows, of: _Versions) -> None:
        key, wanted, known = of.key, of.wanted, of.known
        for version in sorted(wanted.keys() - known.keys()):
            for segment in _segments(rows, of.read(wanted[version])):
                rows.put("held", key + _number(version) + segment, b"")
                rows.hold(segment)
            rows.put("versions", key + _number(version), _number(0))
        gone = known.keys() - wanted.keys()
        for version in gone:
            for row, _ in rows.rows_with_prefix("held", key + _number(version)):
                rows.delete("held", row)
                rows.release(row[-_SEGMENT.itemsize :])
        rows.forget_versions(key, gone)

    # --- expiry: a version that is there says so again before its time is over, one that is gone does nothing ---------

    def _expiries(self, rows: _Rows, of: _Versions) -> None:
        key, wanted, known = of.key, of.wanted, of.known
        for version, name in sorted(wanted.items()):
            if known.get(version, 0) >= of.now_us + EXPIRY_US // 2:
                continue
            until = _number(of.now_us + EXPIRY_US)
            for segment in _segments(rows, of.read(name)):
                rows.put("counts", segment, until)
            rows.put("versions", key + _number(version), until)
        rows.forget_versions(key, known.keys() - wanted.keys())


class _SummaryRows:
    """The table of summaries, each call in a transaction of its own."""

    def __init__(self, writing: Callable[[], AbstractContextManager[_Rows]]) -> None:
        self._writing = writing

    def get_many(self, names: Sequence[str]) -> dict[str, bytes]:
        with self._writing() as rows:
            found = {name: rows.txn.get(name.encode(), db=rows.tables["summaries"]) for name in names}
        return {name: row for name, row in found.items() if row is not None}

    def put_many(self, new: Mapping[str, bytes]) -> None:
        if new:
            with self._writing() as rows:
                for name, row in sorted(new.items()):
                    rows.put("summaries", name.encode(), row)

    def keep_only(self, names: Collection[str]) -> None:
        wanted = {name.encode() for name in names}
        with self._writing() as rows:
            if rows.count("summaries") > len(wanted):
                gone = [bytes(name) for name, _ in rows.txn.cursor(rows.tables["summaries"]) if name not in wanted]
                for name in gone:
                    rows.delete("summaries", name)


@frozen
class _Versions:
    """A key's versions: `wanted` those there are, by their manifests' names; `known` those counted, and until when."""

    key: bytes
    wanted: dict[int, str]
    known: dict[int, int]
    read: Callable[[str], Manifest]
    now_us: int


class _Rows:
    """The tables within a transaction, and how many rows were changed."""

    def __init__(self, txn: Any, tables: dict[str, Any]) -> None:
        self.txn = txn
        self.tables = tables
        self.touched = 0

    def put(self, table: str, key: bytes, value: bytes) -> None:
        self.txn.put(key, value, db=self.tables[table])
        self.touched += 1

    def delete(self, table: str, key: bytes) -> None:
        self.txn.delete(key, db=self.tables[table])
        self.touched += 1

    def rows_with_prefix(self, table: str, head: bytes) -> list[tuple[bytes, bytes]]:
        """Return the rows whose key starts with `head`: of one key of the store, 36 bytes each segment or less."""
        found = []
        cursor = self.txn.cursor(self.tables[table])
        if cursor.set_range(head):
            for key, value in cursor:
                if not key.startswith(head):
                    break
                found.append((bytes(key), bytes(value)))
        return found

    def has_from(self, table: str, head: bytes, start: bytes) -> bool:
        """Return whether there is a row whose key starts with `head`, and goes on with `start` or what comes after."""
        cursor = self.txn.cursor(self.tables[table])
        return bool(cursor.set_range(head + start)) and bytes(cursor.key()).startswith(head)

    def count(self, table: str) -> int:
        return int(self.txn.stat(self.tables[table])["entries"])

    def known(self) -> dict[bytes, dict[int, int]]:
        found: dict[bytes, dict[int, int]] = {}
        for key, until in self.txn.cursor(self.tables["versions"]):
            found.setdefault(bytes(key[:_KEY_BYTES]), {})[int.from_bytes(key[_KEY_BYTES:])] = int.from_bytes(until)
        return found

    def forget_versions(self, key: bytes, versions: Iterable[int]) -> None:
        for version in versions:
            self.delete("versions", key + _number(version))

    def hold(self, segment: bytes) -> None:
        self.put("counts", segment, _number(int.from_bytes(self.txn.get(segment, b"", db=self.tables["counts"])) + 1))

    def release(self, segment: bytes) -> None:
        count = int.from_bytes(self.txn.get(segment, b"", db=self.tables["counts"]))
        if count > 1:
            self.put("counts", segment, _number(count - 1))
            return
        self.delete("counts", segment)
        self.nominate(segment)

    def nominate(self, name: bytes) -> None:
        self.put("nominated", name, b"")

    def expire(self, now_us: int) -> None:
        over = [bytes(segment) for segment, until in self.txn.cursor(self.tables["counts"]) if until < _number(now_us)]
        for segment in over:
            self.delete("counts", segment)
            self.nominate(segment)

    def empty(self, mode: bytes) -> None:
        for table in TABLES:
            self.txn.drop(self.tables[table], delete=False)
        self.txn.put(b"mode", mode, db=self.tables["meta"])


def _look_at(rows: _Rows, containers: Collection[int], directory: Callable[[int], Directory | None]) -> None:
    """Nominate what came with containers that are new here, and no version holds: a put that died left it, say."""
    known = {int.from_bytes(name) for name, _ in rows.txn.cursor(rows.tables["containers"])}
    for container in known - set(containers):
        rows.delete("containers", _number(container))
    named: Masks = {}
    there: dict[int, Bools] = {}
    for container in sorted(set(containers) - known):
        rows.put("containers", _number(container), b"")
        found = directory(container)
        if found is None:
            rows.nominate(_number(container))
            continue
        there[container] = found.chunks.there
        for ordinal in np.flatnonzero(np.diff(found.segments.bounds)).tolist():
            segment = _number(container) + ordinal.to_bytes(4)
            if rows.txn.get(segment, db=rows.tables["counts"]) is None:
                rows.nominate(segment)
        for holder, at in group_by_container(found.segments.chunks.containers):
            if holder != ZERO:
                mark_ordinals(named, holder, found.segments.chunks.ordinals[at])
    for container, chunks in there.items():
        mask = named.get(container, np.zeros(0, np.bool_))
        if len(mask) > len(chunks) or (chunks & ~mask_of(mask, len(chunks))).any():
            rows.nominate(_number(container))


def _segments(rows: _Rows, manifest: Manifest) -> list[bytes]:
    """Return the segments of a version, each once, ascending."""
    if manifest.origin != NO_ORIGIN:
        rows.txn.put(b"services", b"1", db=rows.tables["meta"])
    table = np.empty(len(manifest.segments), _SEGMENT)
    table["container"], table["ordinal"] = manifest.segments.containers, manifest.segments.ordinals
    return sorted(set(table.view(f"V{_SEGMENT.itemsize}").tolist()))


def _any_within(ascending: list[int], first: int, last: int) -> bool:
    return any(first <= version <= last for version in ascending)


def _number(number: int) -> bytes:
    return number.to_bytes(8)

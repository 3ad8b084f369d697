"""Verify a store: report every damaged object and the versions that it affects.

    containers   integrity of every chunk                        manifests   parse -> segments -> intact chunks
    index        each entry matches its container                parity      matches what its object yields now

Invariant (I8): every damaged object is reported with all versions that it affects, through bases too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from nearkin_maintenance.domain_owners import DomainOwners
from nearkin_maintenance.repair.store_repair import ParityCheck
from nearkin_maintenance.verify.index_check import IndexCheck, ReadableIndex
from nearkin_maintenance.verify.integrity import CorruptChunks, IntegrityChecker
from nearkin_maintenance.verify.scope import EVERYTHING, VerifyScope
from nearkin_shared.errors import FormatTooNew, IndexDamaged, NotFound, PermanentError
from nearkin_shared.fingerprints import Fingerprinter, domain_of
from nearkin_shared.formats.directory import Directory
from nearkin_shared.formats.manifest import Manifest
from nearkin_shared.formats.record_authentication import not_authentic
from nearkin_shared.index.listing_entry import pack_listed
from nearkin_shared.objectstore.encrypted_store import EncryptedObjectStore, key_names, open_blocked
from nearkin_shared.objectstore.parity import ParityObjectStore
from nearkin_shared.results import Damage, VerifyReport
from nearkin_shared.storage import chunking_record, descriptor
from nearkin_shared.storage.clock_records import ClockRecords
from nearkin_shared.storage.container_graph import reachable_containers, topological_order
from nearkin_shared.storage.containers import ContainerSource, ContainerStore, id_of, object_name
from nearkin_shared.storage.gc_pause import GcPauseFlag
from nearkin_shared.storage.heads import VersionHeads, find_lost, head_name, list_heads
from nearkin_shared.storage.manifests import ManifestStore, marked_version, retained_manifest
from nearkin_shared.storage.pending_deletes import PendingDeleteStore
from nearkin_shared.storage.quarantine import Quarantine
from nearkin_shared.storage.retention_records import record_sequence
from nearkin_shared.storage.scrub_progress import ScrubStates
from nearkin_shared.types import U64, ZERO, ContainerId, Locations, distinct, group_by_container
from nearkin_shared.utils.frozen import frozen
from nearkin_shared.utils.thread_pool import SERIAL, ThreadPool
from nearkin_shared.validation import is_reserved_key

VerifyProgress = Callable[[int, int], None]
MISSING_MAX = 1 << 16
"""Missing containers above which only the manifest that names them is reported."""
VersionName = tuple[str, str, int]
"""(tenant, key, version)."""


_Records = PendingDeleteStore | Quarantine | GcPauseFlag | ScrubStates | VersionHeads | ClockRecords


@dataclass(slots=True)
class _Findings:
    """Damaged objects and the versions that they affect."""

    problems: dict[str, str] = field(default_factory=dict)
    affected: dict[str, set[VersionName]] = field(default_factory=dict)
    too_new: set[str] = field(default_factory=set)
    """Objects whose only problem is the format of a later Nearkin."""

    def add(self, name: str, problem: str | PermanentError, *versions: VersionName, is_too_new: bool = False) -> None:
        """Add a problem. The first one counts, but damage counts more than a later format."""
        is_too_new |= isinstance(problem, FormatTooNew)
        if name not in self.problems or (name in self.too_new and not is_too_new):
            self.problems[name] = str(problem)
            self.too_new.discard(name)
            if is_too_new:
                self.too_new.add(name)
        self.affected.setdefault(name, set()).update(versions)

    def damage(self, tenant: str, deleted: Collection[VersionName] = ()) -> tuple[Damage, ...]:
        """Return the findings; versions of `tenant` are separate from those of others."""
        own_deleted = {(key, version) for owner, key, version in deleted if owner == tenant}
        found = (
            Damage(
                name,
                problem,
                tuple(sorted((key, version) for owner, key, version in self.affected[name] if owner == tenant)),
                tuple(sorted(affected for affected in self.affected[name] if affected[0] != tenant)),
                is_too_new=name in self.too_new,
            )
            for name, problem in sorted(self.problems.items())
        )
        return tuple(replace(one, deleted=tuple(sorted(own_deleted.intersection(one.versions)))) for one in found)


@frozen
class IndexedVersions:
    """Versions that an index lists."""

    by_manifest: Mapping[str, VersionName] = field(default_factory=dict)
    """By manifest name; identifies versions whose manifest is lost or cannot be read."""
    is_listed: Callable[[VersionName], bool | None] = lambda _: None
    """Returns whether the index lists a version now, or None without an index."""
    is_complete: Callable[[], bool] = lambda: False
    """Returns whether the index lists all committed versions: no other process writes."""


class Verifier:
    """One verification of a store, all tenants of it."""

    def __init__(
        self,
        containers: ContainerStore,
        manifests: ManifestStore,
        fingerprinter: Callable[[str], Fingerprinter],
        tenant: str,
        indexed: IndexedVersions,
        pending_deletes: PendingDeleteStore | None = None,
        quarantine: Quarantine | None = None,
        objects: ParityObjectStore | None = None,
    ) -> None:
        """Prepare a verification.

        Objects of tenants that a forged erasure record hides are verified too.
        """
        readable = objects if objects is None else open_blocked(objects)
        if readable is not None and readable is not objects:
            objects, manifests = readable, ManifestStore(readable)
            containers = containers.with_own_caches(readable)
        self._manifests = manifests
        self._containers, self._stored_manifests = containers, manifests
        if objects is not None and objects.has_some:  # check stored bytes, not those that parity corrects
            self._containers = containers.with_own_caches(objects.without_parity)
            self._stored_manifests = ManifestStore(objects.without_parity, record_key=objects.record_key)
        self._tenant = tenant
        self._indexed = indexed
        self._known_versions = indexed.by_manifest
        self._pending_deletes = pending_deletes
        self._quarantine = quarantine
        self._objects = objects
        known = {tenant, *(owner for owner, _, _ in indexed.by_manifest.values())}
        self._tenants = DomainOwners(fingerprinter, known, manifests)
        self._integrity = IntegrityChecker(self._containers, self._tenants, fingerprinter(tenant))
        self._findings = _Findings()
        self._versions_read: dict[str, VersionName] = {}
        """Versions whose manifests were read, by manifest name."""
        self._container_ids: U64 = np.zeros(0, np.uint64)
        """Ids of all containers, including all that the manifests name."""
        self._entries: Mapping[str, bytes] = {}
        self._last_marks: dict[str, int] = {}
        """Sequence of the last tombstone by manifest name: the index lists no collected version."""

    def compare_entries(self, listed: Mapping[str, bytes]) -> None:
        """Also compare the listing entries of the index, by manifest name.

        Their form: `nearkin_shared.index.listing_entry`.
        """
        self._entries = listed

    def run(
        self,
        scope: VerifyScope = EVERYTHING,
        progress: VerifyProgress | None = None,
        index: ReadableIndex | None = None,
        *,
        index_whole: bool = False,
        helpers: ThreadPool = SERIAL,
    ) -> VerifyReport:
        """Read the containers of `scope`, directories of the others, then every manifest.

        The entries of `index` are compared if the scope is full; if `index_whole`, the index must list all versions.
        `helpers` decode concurrently.

        Raises: StoreUnavailable only.
        """
        started = time.perf_counter()
        # Manifests first: their containers are durable by then, so that a concurrent put never looks like damage.
        names, marks, retentions = ([name for name, _ in some] for some in self._manifests.listing())
        generations = self._containers.generations()
        sizes = {
            container: sizes_by_generation[max(sizes_by_generation)]
            for container, sizes_by_generation in generations.items()
        }
        ids, listed = sorted(sizes), set(names)
        self._container_ids = np.array(ids, np.uint64)
        complete = scope.of(
            ids,
            frozenset(container for container, sizes_by_generation in generations.items() if max(sizes_by_generation)),
        )
        total = len(ids) + len(names) + len(marks) + len(retentions)
        for done, container in enumerate(topological_order(ids, self._integrity.base_containers)):
            self._integrity.check(ContainerId(container), deep=container in complete, helpers=helpers)
            if progress is not None:
                progress(done + 1, total)
        for name, (owner, key, version) in self._known_versions.items():
            if name not in listed and not self._has_ended(name):
                problem = f"{name}: missing, and the index lists {key!r} version {version}"
                self._findings.add(name, problem, (owner, key, version))
        for done, name in enumerate(names):
            self._check_manifest(name)
            if progress is not None:
                progress(len(ids) + done + 1, total)
        for done, name in enumerate((*marks, *retentions)):
            (self._check_tombstone if done < len(marks) else self._check_retention)(name)
            if progress is not None:
                progress(len(ids) + len(names) + done + 1, total)
        self._check_gaps(retentions)
        for name, problem in self._integrity.problems.items():
            self._findings.add(name, problem, is_too_new=name in self._integrity.too_new)
        self._check_records()
        parity_missing = self._check_parity([*names, *marks, *retentions], complete)
        entries = self._check_index(index, index_whole) if index is not None and scope.is_full else None
        return replace(
            self._report(started, len(complete), len(names), sizes.values()),
            seed=None if scope.sample is None else scope.seed,
            index_entries=entries,
            parity_missing=parity_missing,
            erased_objects=len(self._objects.erased_objects())
            if isinstance(self._objects, EncryptedObjectStore)
            else 0,
        )

    def run_versions(
        self, names: Sequence[str], progress: VerifyProgress | None = None, *, helpers: ThreadPool = SERIAL
    ) -> VerifyReport:
        """Verify the versions with these manifests, and the containers that they reach.

        Reports only damage that affects one of these versions. `names` may include manifests that are missing and whose
        version the index lists.

        Raises: StoreUnavailable only.
        """
        started = time.perf_counter()
        sizes = {
            container: sizes_by_generation[max(sizes_by_generation)]
            for container, sizes_by_generation in self._containers.generations().items()
        }
        self._container_ids = np.array(sorted(sizes), np.uint64)
        reachable = self._reachable(names)
        reached = sorted(container for container in sizes if container in reachable)
        total = len(reached) + len(names)
        for done, container in enumerate(topological_order(reached, self._integrity.base_containers)):
            self._integrity.check(ContainerId(container), deep=True, helpers=helpers)
            if progress is not None:
                progress(done + 1, total)
        for done, name in enumerate(names):
            self._check_manifest(name)
            if progress is not None:
                progress(len(reached) + done + 1, total)
        return self._report(started, len(reached), len(names), [sizes[container] for container in reached])

    def _report(self, started: float, containers: int, versions: int, sizes: Collection[int]) -> VerifyReport:
        """Return what was found: `containers` read in full, of those with these sizes.

        `versions`: manifests, of which those of checkpoints are not counted.
        """
        checkpoints = sum(is_reserved_key(key) for _, key, _ in self._versions_read.values())
        deleted = {version for name, version in self._versions_read.items() if self._last_marks.get(name, 0) % 2}
        return VerifyReport(
            containers=containers,
            chunks=self._integrity.chunks,
            versions=versions - checkpoints,
            bytes_read=self._integrity.bytes_read,
            deleted_versions=sum(not is_reserved_key(key) for _, key, _ in deleted),
            damage=tuple(map(self._assess, self._findings.damage(self._tenant, deleted))),
            seconds=time.perf_counter() - started,
            untagged_containers=self._integrity.untagged,
            containers_total=len(sizes),
            container_bytes=sum(sizes),
        )

    def _reachable(self, names: Iterable[str]) -> set[int]:
        """Return the containers that hold segments and chunks of these versions.

        Includes the containers of all bases.
        """
        reached: set[int] = set()
        for name in names:
            manifest = self._read_with_parity(name)
            if manifest is None:
                continue
            directory_of = partial(_readable_directory, self._containers.of(domain_of(manifest.tenant)))
            reached |= reachable_containers(manifest.segments, directory_of, self._integrity.base_containers)
        return reached

    @property
    def broken(self) -> bool:
        """Return whether any container is damaged or missing."""
        return bool(self._integrity.problems)

    def corrupt_chunks(self) -> CorruptChunks:
        """Return the chunks on which no later version may depend, as of now.

        Call after `run`, with the writer lock held.
        """
        return self._integrity.corrupt_chunks(container for container, _ in self._containers.ids())

    def _check_manifest(self, name: str) -> None:
        try:
            manifest = self._stored_manifests.read(name)
        except PermanentError as err:
            if isinstance(err, NotFound) and self._has_ended(name):
                return
            known = self._read_with_parity(name)
            versions = [self._known_versions[name]] if name in self._known_versions else []
            if known is not None:
                versions = [(known.tenant, known.key, known.version)]
            self._findings.add(name, err, *versions)
            if known is None:
                return
            manifest = known
        self._versions_read[name] = manifest.tenant, manifest.key, manifest.version
        if self._entries.get(name) and self._entries[name] != pack_listed(manifest):
            problem = f"{manifest.key!r} version {manifest.version}: listed differently from {name}"
            self._findings.add("index", f"{problem}: run `nearkin rebuild-index`")
        missing = len(np.setdiff1d(distinct(manifest.segments.containers), self._container_ids, assume_unique=True))
        if missing > MISSING_MAX:
            self._findings.add(name, f"{name}: names {missing} containers that do not exist", self._versions_read[name])
            return
        for culprit, problem in self._find_culprits(manifest).items():
            is_too_new = culprit in self._integrity.too_new and problem == self._integrity.problems.get(culprit)
            version = manifest.tenant, manifest.key, manifest.version
            self._findings.add(culprit, problem, version, is_too_new=is_too_new)

    def _read_with_parity(self, name: str) -> Manifest | None:
        try:
            return self._manifests.read(name)
        except PermanentError:
            return None

    def _check_tombstone(self, name: str) -> None:
        """Read a tombstone; its name identifies the version, even if its content does not."""
        manifest_name = ""
        try:
            manifest_name, sequence = marked_version(name)
            self._last_marks[manifest_name] = sequence  # they ascend
            mark = self._stored_manifests.read_mark(name)
            if self._stored_manifests.authenticates_marks and not mark.authenticated:
                raise not_authentic(name)
        except PermanentError as err:
            if isinstance(err, NotFound) and self._has_ended(manifest_name):
                return
            version_name = self._versions_read.get(manifest_name) or self._known_versions.get(manifest_name)
            self._findings.add(name, err, *([version_name] if version_name is not None else []))

    def _check_retention(self, name: str) -> None:
        """Read a retention record.

        A finding names its version, which cannot be deleted until the finding is resolved.
        """
        manifest_name = ""
        try:
            manifest_name = retained_manifest(name)
            self._stored_manifests.retentions.read(name)
        except PermanentError as err:
            if isinstance(err, NotFound) and self._has_ended(manifest_name):
                return
            version_name = self._versions_read.get(manifest_name) or self._known_versions.get(manifest_name)
            self._findings.add(name, err, *([version_name] if version_name is not None else []))

    def _check_gaps(self, names: Iterable[str]) -> None:
        """Report the first missing retention record below another one of the same version."""
        sequences: dict[str, set[int]] = {}
        for name in names:
            with suppress(PermanentError):  # reported by `_check_retention`
                manifest_name, sequence = record_sequence(name)
                sequences.setdefault(manifest_name, set()).add(sequence)
        for manifest_name, stored in sequences.items():
            version_name = self._versions_read.get(manifest_name) or self._known_versions.get(manifest_name)
            missing = next((sequence for sequence in range(1, max(stored)) if sequence not in stored), None)
            if version_name is None or missing is None:
                continue
            name = self._stored_manifests.retentions.name(*version_name, missing)
            # Written or expired since the listing: GC deletes a manifest before the records.
            if not self._stored_manifests.retentions.exists(name) and self._manifests.is_committed(*version_name):
                _, key, version = version_name
                problem = f"{name}: missing, and retention record {max(stored)} of {key!r} version {version} exists"
                self._findings.add(name, problem, version_name)

    def _has_ended(self, name: str) -> bool:
        """Return whether a missing manifest belongs to a version that GC expired meanwhile.

        GC removes it from the index first: a lost version is still listed.
        """
        version_name = self._versions_read.get(name) or self._known_versions.get(name)
        return (
            version_name is None or self._indexed.is_listed(version_name) is False or self._is_closed(version_name[0])
        )

    def _is_closed(self, tenant: str) -> bool:
        """Return whether a tenant's objects are hidden.

        It was erased, or its erasure record does not verify.
        """
        return isinstance(self._objects, EncryptedObjectStore) and self._objects.keyring.is_closed(tenant)

    def _check_records(self) -> None:
        """Read the records of the store, and its keys.

        A finding of a lost key names no versions: only the key could identify them.
        """
        if isinstance(self._objects, EncryptedObjectStore):
            for name, problem in self._objects.keyring.problems().items():
                self._findings.add(name, problem)
        stores: list[_Records | None] = [self._pending_deletes, self._quarantine]
        if self._objects is not None:
            heads = VersionHeads(self._objects)
            stores += [GcPauseFlag(self._objects), ScrubStates(self._objects), heads, ClockRecords(self._objects)]
            self._check_heads(heads)
        for store in stores:
            if store is None:
                continue
            for sequence in sorted(store.list_records()):
                try:
                    store.at(sequence)
                except NotFound:  # replaced meanwhile
                    continue
                except PermanentError as err:
                    self._findings.add(store.name(sequence), err)

    def _check_heads(self, heads: VersionHeads) -> None:
        """Report what an earlier GC run has recorded, and was removed.

        Newest versions with their tombstones, and the last tombstone or retention record of a version.
        """
        folders = {
            name.rpartition("/")[0]: known for name, known in {**self._known_versions, **self._versions_read}.items()
        }
        before = heads.read()
        now = list_heads(self._manifests, before.versions)
        for (digest, version), name in find_lost(before, now).items():
            manifest = head_name(digest, version)
            known_version = self._versions_read.get(manifest) or self._known_versions.get(manifest)
            self._findings.add(
                name,
                f"{name}: removed, a GC run has listed it: its version may have been deleted, undeleted or retained",
                *([] if known_version is None else [known_version]),
            )
        for digest, version in heads.find_rolled_back(self._manifests).items():
            name = head_name(digest, version)
            version_name = folders.get(name.rpartition("/")[0])
            if (
                version_name is None
                and isinstance(self._objects, EncryptedObjectStore)
                and self._objects.keyring.unswept()
            ):
                continue  # perhaps of an erased tenant, version_name objects are hidden
            versions = [] if version_name is None else [(version_name[0], version_name[1], version)]
            self._findings.add(
                name, f"{name}: removed with its tombstones; a GC run has listed it as the newest", *versions
            )

    def _check_parity(self, names: Iterable[str], complete: Collection[int]) -> tuple[str, ...]:
        """Read descriptor and chunking record, and compare parity with its objects.

        Returns the intact objects without parity.
        """
        if self._objects is None:
            return ()
        try:
            descriptor.read(self._objects.without_parity, fingerprint_bits=None)
        except PermanentError as err:
            self._findings.add(descriptor.NAME, err)
        others = [descriptor.NAME]
        if chunking_record.has_record(self._objects):
            others.append(chunking_record.NAME)
            try:
                chunking_record.check_record(self._objects, self._objects.without_parity)
            except PermanentError as err:
                self._findings.add(chunking_record.NAME, err)
        if not (self._objects.adds or self._objects.has_some):
            return ()
        check = ParityCheck(self._objects)
        for container in sorted(complete):
            check.check(object_name(ContainerId(container), self._containers.generation(ContainerId(container))))
        for name in (*names, *key_names(self._objects), *others):
            check.check(name)
        damaged = set(map(self._stored_name, self._findings.problems))
        for name, problem in check.problems.items():
            self._findings.add(name, problem)
        return tuple(name for name in check.missing if name not in damaged)

    def _assess(self, damage: Damage) -> Damage:
        stored_name = self._stored_name(damage.object_name)
        damage = replace(
            damage, object_name=stored_name, problem=damage.problem.replace(damage.object_name, stored_name)
        )
        if self._objects is None or not self._objects.has_some:
            return damage
        whole = self._objects.reconstruct(stored_name)
        if damage.is_too_new and whole is not None:  # unless parity proves that a damaged byte made it so
            with suppress(PermanentError):
                if self._objects.without_parity.get(stored_name) == whole:
                    return damage
        return replace(damage, repairable=whole is not None, is_too_new=damage.is_too_new and whole is None)

    def _stored_name(self, name: str) -> str:
        """Return the name of a stored object that a finding names.

        For a container, its current generation.
        """
        container = id_of(name)
        return name if container is None else object_name(container, self._containers.generation(container))

    def _check_index(self, index: ReadableIndex, whole: bool) -> int | None:
        """Compare the index with the objects read; return the number of entries.

        A wrong index affects no version.
        """
        known = set(self._known_versions)
        unlisted = {
            name: f"{key!r} version {version}"
            for name, (_, key, version) in self._versions_read.items()
            if whole and name not in known and name not in self._last_marks and self._is_unlisted(name)
        }
        try:
            findings = IndexCheck(self._containers, self._tenants).run(index, unlisted)
        except IndexDamaged as err:
            self._findings.add("index", str(err))
            return None
        if findings.problems:
            self._findings.add("index", f"{'; '.join(findings.problems)}: run `nearkin rebuild-index`")
        return findings.entries

    def _is_unlisted(self, name: str) -> bool:
        """Return whether the index lacks a version that was read and still exists."""
        whole, listed = self._indexed.is_complete(), self._indexed.is_listed(self._versions_read[name])
        return whole and listed is False and self._manifests.is_committed(*self._versions_read[name])

    def _find_culprits(self, manifest: Manifest) -> dict[str, str]:
        """Return the damage that affects this version: object name -> problem."""
        culprits: dict[str, str] = {}
        lengths, domain = np.zeros(len(manifest.segments), np.int64), domain_of(manifest.tenant)
        for container, rows in group_by_container(manifest.segments.containers):
            name = object_name(ContainerId(container))
            directory = self._integrity.directory(container, domain)
            if directory is None:
                culprits[name] = self._integrity.problems[name]
                continue
            ordinals, table = manifest.segments.ordinals[rows], directory.segments
            if int(ordinals.max()) >= len(table):
                culprits[name] = (
                    f"{name}: has {len(table)} segments, but a manifest names segment {int(ordinals.max())}"
                )
                continue
            chunk_counts = np.diff(table.bounds)
            is_used = np.repeat(np.bincount(ordinals, minlength=len(table)) > 0, chunk_counts)
            chunks = self._chunks_of(table.chunks.take(is_used), domain, culprits)
            segment = np.repeat(np.arange(len(table)), chunk_counts)[is_used]
            lengths[rows] = np.bincount(segment, chunks, len(table)).astype(np.int64)[ordinals]
        name = f"{manifest.key!r} version {manifest.version}"
        if not culprits and (total := int(lengths.sum())) != manifest.size_bytes:
            culprits[name] = f"{name}: its segments hold {total} bytes, the manifest records {manifest.size_bytes}"
        elif (
            not culprits
            and manifest.lengths is not None
            and len(mismatches := (lengths != manifest.lengths).nonzero()[0])
        ):
            held, listed = int(lengths[mismatches[0]]), int(manifest.lengths[mismatches[0]])
            culprits[name] = f"{name}: segment {mismatches[0]} holds {held} bytes, the manifest records {listed}"
        return culprits

    def _chunks_of(self, chunks: Locations, domain: bytes, culprits: dict[str, str]) -> NDArray[np.int64]:
        """Add the damage that affects the chunks to `culprits`.

        Returns the bytes of each intact chunk, 0 for the others.
        """
        blamed = self._integrity.culprit_containers(chunks, domain)
        for container in np.unique(blamed[blamed != 0]):
            culprit = object_name(ContainerId(int(container)))
            culprits.setdefault(culprit, self._integrity.problems.get(culprit, f"{culprit}: a chunk is missing"))
        sizes = np.zeros(len(chunks), np.int64)
        for container, named in group_by_container(chunks.containers):
            rows = named[blamed[named] == 0]
            if not len(rows):
                continue
            lengths = chunks.ordinals[rows]  # the length, for a hole
            if container != ZERO:
                directory = self._integrity.directory(container, domain)
                if directory is None:  # deleted since the check
                    name = object_name(ContainerId(container))
                    culprits.setdefault(name, self._integrity.problems[name])
                    continue
                lengths = directory.chunks.lengths[lengths]
            sizes[rows] = lengths
        return sizes


def _readable_directory(source: ContainerSource, container: ContainerId) -> Directory | None:
    """Return a directory; None if it cannot be read, which the check of the container reports."""
    try:
        return source.directory(container)
    except PermanentError:
        return None

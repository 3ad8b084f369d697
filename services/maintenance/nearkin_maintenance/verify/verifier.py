"""Verify. Invariant: every broken object is named, with the versions it touches, through bases too (I8).

containers: soundness of every chunk      manifests: parse -> segments -> chunks all sound?
index: each entry is what its container says      parity: what it would be made of now
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from nearkin_maintenance.domain_owners import DomainOwners
from nearkin_maintenance.repair.store_repair import ParityCheck
from nearkin_maintenance.verify.index_check import IndexCheck, ReadableIndex
from nearkin_maintenance.verify.integrity import CorruptChunks, IntegrityChecker
from nearkin_maintenance.verify.scope import EVERYTHING, VerifyScope
from nearkin_shared.errors import IndexDamaged, NotFound, PermanentError
from nearkin_shared.fingerprints import Fingerprinter, domain_of
from nearkin_shared.formats.manifest import Manifest
from nearkin_shared.formats.record_authentication import not_authentic
from nearkin_shared.index.listing_entry import pack_listed
from nearkin_shared.objectstore.encrypted_store import EncryptedObjectStore, key_names
from nearkin_shared.objectstore.parity import ParityObjectStore
from nearkin_shared.results import Damage, VerifyReport
from nearkin_shared.storage import chunking_record, descriptor
from nearkin_shared.storage.clock_records import ClockRecords
from nearkin_shared.storage.container_graph import topological_order
from nearkin_shared.storage.containers import ContainerStore, id_of, object_name
from nearkin_shared.storage.gc_pause import GcPauseFlag
from nearkin_shared.storage.heads import VersionHeads, head_name, listed_heads, lowered_heads
from nearkin_shared.storage.manifests import ManifestStore, marked_version, retained_manifest
from nearkin_shared.storage.pending_deletes import PendingDeleteStore
from nearkin_shared.storage.quarantine import Quarantine
from nearkin_shared.storage.retention_records import record_sequence
from nearkin_shared.storage.scrub_progress import ScrubStates
from nearkin_shared.types import U64, ZERO, ContainerId, Locations, distinct, group_by_container
from nearkin_shared.utils.thread_pool import SERIAL, ThreadPool

Progress = Callable[[int, int], None]
MISSING_MAX = 1 << 16
"""Of a manifest that names more containers that are not there, itself is called broken, and not each of them."""
VersionName = tuple[str, str, int]
"""(tenant, key, version)."""


_Records = PendingDeleteStore | Quarantine | GcPauseFlag | ScrubStates | VersionHeads | ClockRecords


@dataclass(slots=True)
class _Findings:
    problems: dict[str, str] = field(default_factory=dict)
    touched: dict[str, set[VersionName]] = field(default_factory=dict)

    def found(self, name: str, problem: str, *versions: VersionName) -> None:
        self.problems.setdefault(name, problem)
        self.touched.setdefault(name, set()).update(versions)

    def damage(self, tenant: str) -> tuple[Damage, ...]:
        """Return what was found, for the eyes of `tenant`: its own versions apart from others'."""
        return tuple(
            Damage(
                name,
                problem,
                tuple(sorted((key, version) for whose, key, version in self.touched[name] if whose == tenant)),
                tuple(sorted(touched for touched in self.touched[name] if touched[0] != tenant)),
            )
            for name, problem in sorted(self.problems.items())
        )


class Verifier:
    """One pass over a store, all tenants of it.

    `remembered` says which version an index knows under which manifest's name: what lists a version whose manifest is
    lost, or names one whose manifest cannot be read.
    """

    def __init__(
        self,
        containers: ContainerStore,
        manifests: ManifestStore,
        fingerprinter: Callable[[str], Fingerprinter],
        tenant: str,
        remembered: Mapping[str, VersionName],
        condemned: PendingDeleteStore | None = None,
        quarantine: Quarantine | None = None,
        objects: ParityObjectStore | None = None,
        lists: Callable[[VersionName], bool | None] = lambda _: None,
        is_whole: Callable[[], bool] = lambda: False,
    ) -> None:
        """`lists` asks the index of that moment whether it lists a version, None: there is none; `is_whole`, whether it
        lists all that is committed: nobody writes.
        """
        self._lists, self._is_whole = lists, is_whole
        self._manifests = manifests
        self._containers, self._stored = containers, manifests
        if objects is not None and objects.has_some:  # what lies there is looked at, not what parity makes of it
            self._containers = containers.with_own_caches(objects.without_parity)
            self._stored = ManifestStore(objects.without_parity, record_key=objects.record_key)
        self._tenant = tenant
        self._remembered = remembered
        self._condemned = condemned
        self._quarantine = quarantine
        self._objects = objects
        known = {tenant, *(whose for whose, _, _ in remembered.values())}
        self._tenants = DomainOwners(fingerprinter, known, manifests)
        self._soundness = IntegrityChecker(self._containers, self._tenants, fingerprinter(tenant))
        self._findings = _Findings()
        self._seen: dict[str, VersionName] = {}
        """Versions whose manifests were read, by the name of these."""
        self._listed: U64 = np.zeros(0, np.uint64)
        """Containers, all that manifests may name among them."""
        self._entries: Mapping[str, bytes] = {}
        self._marked: set[str] = set()
        """Names of manifests that have marks: of a collected version none is listed any more."""

    def compare_entries(self, listed: Mapping[str, bytes]) -> None:
        """Compare also what the index shows in listings, by manifest name (`nearkin_shared.index.listing_entry`)."""
        self._entries = listed

    def run(
        self,
        choice: VerifyScope = EVERYTHING,
        progress: Progress | None = None,
        index: ReadableIndex | None = None,
        *,
        index_whole: bool = False,
        helpers: ThreadPool = SERIAL,
    ) -> VerifyReport:
        """Read the chosen containers, directories of the others, then every manifest. Raises only StoreUnavailable.

        The entries of `index` are compared where everything is chosen; where it is whole, it must list all versions.
        `helpers` decode beside the caller.
        """
        started = time.perf_counter()
        # Manifests first: all that one of them names is durable by then, so a put meanwhile never looks like damage.
        names, marks, retentions = ([name for name, _ in some] for some in self._manifests.listing())
        generations = self._containers.generations()
        sizes = {container: of_each[max(of_each)] for container, of_each in generations.items()}
        ids, listed = sorted(sizes), set(names)
        self._listed = np.array(ids, np.uint64)
        chosen = choice.of(ids, frozenset(container for container, of_each in generations.items() if max(of_each)))
        total = len(ids) + len(names) + len(marks) + len(retentions)
        for done, container in enumerate(topological_order(ids, self._soundness.base_containers)):
            self._soundness.check(ContainerId(container), deep=container in chosen, helpers=helpers)
            if progress is not None:
                progress(done + 1, total)
        for name, (whose, key, version) in self._remembered.items():
            if name not in listed and not self._has_ended(name):
                problem = f"{name}: missing, and the index lists {key!r} version {version}"
                self._findings.found(name, problem, (whose, key, version))
        for done, name in enumerate(names):
            self._manifest(name)
            if progress is not None:
                progress(len(ids) + done + 1, total)
        for done, name in enumerate((*marks, *retentions)):
            (self._mark if done < len(marks) else self._check_retention)(name)
            if progress is not None:
                progress(len(ids) + len(names) + done + 1, total)
        self._check_gaps(retentions)
        for name, problem in self._soundness.problems.items():
            self._findings.found(name, problem)
        self._records()
        parity_missing = self._parity([*names, *marks, *retentions], chosen)
        entries = self._index(index, index_whole) if index is not None and choice.is_full else None
        return VerifyReport(
            containers=len(chosen),
            chunks=self._soundness.chunks,
            versions=len(names),
            bytes_read=self._soundness.bytes_read,
            damage=tuple(map(self._assess, self._findings.damage(self._tenant))),
            seconds=time.perf_counter() - started,
            untagged_containers=self._soundness.untagged,
            containers_total=len(ids),
            container_bytes=sum(sizes.values()),
            seed=None if choice.sample is None else choice.seed,
            index_entries=entries,
            parity_missing=parity_missing,
            erased_objects=len(self._objects.erased_objects())
            if isinstance(self._objects, EncryptedObjectStore)
            else 0,
        )

    def run_versions(
        self, names: Sequence[str], progress: Progress | None = None, *, helpers: ThreadPool = SERIAL
    ) -> VerifyReport:
        """Read these manifests and the containers that they reach, bases included.

        Reported is only what damages one of these versions. `names` are object names of manifests; versions that an
        index lists and whose manifest is missing are among them. Raises only StoreUnavailable.
        """
        started = time.perf_counter()
        sizes = {container: of_each[max(of_each)] for container, of_each in self._containers.generations().items()}
        self._listed = np.array(sorted(sizes), np.uint64)
        reachable = self._reachable(names)
        reached = sorted(container for container in sizes if container in reachable)
        total = len(reached) + len(names)
        for done, container in enumerate(topological_order(reached, self._soundness.base_containers)):
            self._soundness.check(ContainerId(container), deep=True, helpers=helpers)
            if progress is not None:
                progress(done + 1, total)
        for done, name in enumerate(names):
            self._manifest(name)
            if progress is not None:
                progress(len(reached) + done + 1, total)
        return VerifyReport(
            containers=len(reached),
            chunks=self._soundness.chunks,
            versions=len(names),
            bytes_read=self._soundness.bytes_read,
            damage=tuple(map(self._assess, self._findings.damage(self._tenant))),
            seconds=time.perf_counter() - started,
            untagged_containers=self._soundness.untagged,
            containers_total=len(reached),
            container_bytes=sum(sizes[container] for container in reached),
        )

    def _reachable(self, names: Iterable[str]) -> set[int]:
        """Return the containers that hold segments and chunks of these versions, and all bases of those containers."""
        reached: set[int] = set()
        for name in names:
            manifest = self._reconstruct(name)
            if manifest is None:
                continue
            source = self._containers.of(domain_of(manifest.tenant))
            for container, rows in group_by_container(manifest.segments.containers):
                reached.add(container)
                with suppress(PermanentError):  # the check of the container names what is wrong with it
                    table = source.directory(ContainerId(container)).segments
                    ordinals = manifest.segments.ordinals[rows]
                    wanted = np.bincount(ordinals[ordinals < len(table)], minlength=len(table)) > 0
                    chunks = table.chunks.take(np.repeat(wanted, np.diff(table.bounds)))
                    reached.update(distinct(chunks.containers).tolist())
        waiting = list(reached)
        while waiting:
            bases = set(self._soundness.base_containers(waiting.pop())) - reached
            reached |= bases
            waiting += bases
        return reached - {int(ZERO)}

    @property
    def broken(self) -> bool:
        """Return whether any container is broken or missing."""
        return bool(self._soundness.problems)

    def corrupt_chunks(self) -> CorruptChunks:
        """Return what no later version may lean on, as of now: after `run`, by who holds the store's lock."""
        return self._soundness.corrupt_chunks(container for container, _ in self._containers.ids())

    def _manifest(self, name: str) -> None:
        try:
            manifest = self._stored.read(name)
        except PermanentError as err:
            if isinstance(err, NotFound) and self._has_ended(name):
                return
            known = self._reconstruct(name)
            of = [self._remembered[name]] if name in self._remembered else []
            if known is not None:
                of = [(known.tenant, known.key, known.version)]
            self._findings.found(name, str(err), *of)
            if known is None:
                return
            manifest = known
        self._seen[name] = manifest.tenant, manifest.key, manifest.version
        if self._entries.get(name) and self._entries[name] != pack_listed(manifest):
            problem = f"{manifest.key!r} version {manifest.version}: listed otherwise than {name} says"
            self._findings.found("index", f"{problem}: run `nearkin rebuild-index`")
        missing = len(np.setdiff1d(distinct(manifest.segments.containers), self._listed, assume_unique=True))
        if missing > MISSING_MAX:
            self._findings.found(name, f"{name}: names {missing} containers that are not there", self._seen[name])
            return
        for culprit, problem in self._touching(manifest).items():
            self._findings.found(culprit, problem, (manifest.tenant, manifest.key, manifest.version))

    def _reconstruct(self, name: str) -> Manifest | None:
        try:
            return self._manifests.read(name)
        except PermanentError:
            return None

    def _mark(self, name: str) -> None:
        """Read a mark; which version it is of follows from its name, should it not say so itself."""
        of = ""
        try:
            of, _ = marked_version(name)
            self._marked.add(of)
            mark = self._stored.read_mark(name)
            if self._stored.authenticates_marks and not mark.authenticated:
                raise not_authentic(name)
        except PermanentError as err:
            if isinstance(err, NotFound) and self._has_ended(of):
                return
            whose = self._seen.get(of) or self._remembered.get(of)
            self._findings.found(name, str(err), *([whose] if whose is not None else []))

    def _check_retention(self, name: str) -> None:
        """Read a retention record; a finding names its version, which cannot be deleted until it is resolved."""
        of = ""
        try:
            of = retained_manifest(name)
            self._stored.retentions.read(name)
        except PermanentError as err:
            if isinstance(err, NotFound) and self._has_ended(of):
                return
            whose = self._seen.get(of) or self._remembered.get(of)
            self._findings.found(name, str(err), *([whose] if whose is not None else []))

    def _check_gaps(self, names: Iterable[str]) -> None:
        """Name the first retention record that is missing below another one of the same version."""
        sequences: dict[str, set[int]] = {}
        for name in names:
            with suppress(PermanentError):  # reported by `_check_retention`
                of, sequence = record_sequence(name)
                sequences.setdefault(of, set()).add(sequence)
        for of, there in sequences.items():
            whose = self._seen.get(of) or self._remembered.get(of)
            missing = next((sequence for sequence in range(1, max(there)) if sequence not in there), None)
            if whose is None or missing is None:
                continue
            name = self._stored.retentions.name(*whose, missing)
            # Written or ended since the listing: GC removes a manifest before the records.
            if not self._stored.retentions.exists(name) and self._manifests.is_committed(*whose):
                problem = (
                    f"{name}: missing, and retention record {max(there)} of {whose[1]!r} version {whose[2]} is there"
                )
                self._findings.found(name, problem, whose)

    def _has_ended(self, name: str) -> bool:
        """Return whether a manifest that is not there belongs to a version that a round has ended meanwhile.

        It leaves the index first: one that is lost is listed still.
        """
        whose = self._seen.get(name) or self._remembered.get(name)
        return whose is None or self._lists(whose) is False or self._is_closed(whose[0])

    def _is_closed(self, tenant: str) -> bool:
        """Return whether a tenant's objects are hidden: erased, or its erasure record does not verify."""
        return isinstance(self._objects, EncryptedObjectStore) and self._objects.keyring.is_closed(tenant)

    def _records(self) -> None:
        """Read what is condemned or quarantined, and keys: whose versions a lost key touches, it alone could say."""
        if isinstance(self._objects, EncryptedObjectStore):
            for name, problem in self._objects.keyring.problems().items():
                self._findings.found(name, problem)
        kept: list[_Records | None] = [self._condemned, self._quarantine]
        if self._objects is not None:
            heads = VersionHeads(self._objects)
            kept += [GcPauseFlag(self._objects), ScrubStates(self._objects), heads, ClockRecords(self._objects)]
            self._rolled_back(heads)
        for store in kept:
            if store is None:
                continue
            for sequence in sorted(store.list_records()):
                try:
                    store.at(sequence)
                except NotFound:  # replaced meanwhile
                    continue
                except PermanentError as err:
                    self._findings.found(store.name(sequence), str(err))

    def _rolled_back(self, heads: VersionHeads) -> None:
        """Name the keys whose newest version, known from an earlier GC run, was removed with its marks."""
        folders = {name.rpartition("/")[0]: of for name, of in {**self._remembered, **self._seen}.items()}
        for digest, version in lowered_heads(heads.read(), listed_heads(self._manifests)).items():
            name = head_name(digest, version)
            whose = folders.get(name.rpartition("/")[0])
            if whose is None and isinstance(self._objects, EncryptedObjectStore) and self._objects.keyring.unswept():
                continue  # perhaps of an erased tenant, whose objects are hidden
            of = [] if whose is None else [(whose[0], whose[1], version)]
            self._findings.found(name, f"{name}: removed with its marks; a GC run has listed it as the newest", *of)

    def _parity(self, names: Iterable[str], chosen: Collection[int]) -> tuple[str, ...]:
        """Read descriptor and chunking record, and compare parity with its objects.

        Return the sound objects that lack it.
        """
        if self._objects is None:
            return ()
        try:
            descriptor.read(self._objects.without_parity, fingerprint_bits=None)
        except PermanentError as err:
            self._findings.found(descriptor.NAME, str(err))
        others = [descriptor.NAME]
        if chunking_record.has_record(self._objects):
            others.append(chunking_record.NAME)
            try:
                chunking_record.check_record(self._objects, self._objects.without_parity)
            except PermanentError as err:
                self._findings.found(chunking_record.NAME, str(err))
        if not (self._objects.adds or self._objects.has_some):
            return ()
        check = ParityCheck(self._objects)
        for container in sorted(chosen):
            check.check(object_name(ContainerId(container), self._containers.generation(ContainerId(container))))
        for name in (*names, *key_names(self._objects), *others):
            check.check(name)
        damaged = set(map(self._stored_name, self._findings.problems))
        for name, problem in check.problems.items():
            self._findings.found(name, problem)
        return tuple(name for name in check.missing if name not in damaged)

    def _assess(self, damage: Damage) -> Damage:
        there = self._stored_name(damage.object_name)
        damage = replace(damage, object_name=there, problem=damage.problem.replace(damage.object_name, there))
        if self._objects is None or not self._objects.has_some:
            return damage
        return replace(damage, repairable=self._objects.reconstruct(there) is not None)

    def _stored_name(self, name: str) -> str:
        """Return the name under which an object lies there that findings name: a container's by its generation."""
        container = id_of(name)
        return name if container is None else object_name(container, self._containers.generation(container))

    def _index(self, index: ReadableIndex, whole: bool) -> int | None:
        """Compare the index with what was read; return how many entries. An index that is wrong touches no version."""
        known = set(self._remembered)
        unlisted = {
            name: f"{key!r} version {version}"
            for name, (_, key, version) in self._seen.items()
            if whole and name not in known and name not in self._marked and self._is_unlisted(name)
        }
        try:
            found = IndexCheck(self._containers, self._tenants).run(index, unlisted)
        except IndexDamaged as err:
            self._findings.found("index", str(err))
            return None
        if found.problems:
            self._findings.found("index", f"{'; '.join(found.problems)}: run `nearkin rebuild-index`")
        return found.entries

    def _is_unlisted(self, name: str) -> bool:
        """Return whether the index of now does not list a version that was read, and that is there still."""
        whole, listed = self._is_whole(), self._lists(self._seen[name])
        return whole and listed is False and self._manifests.is_committed(*self._seen[name])

    def _touching(self, manifest: Manifest) -> dict[str, str]:
        """Return what breaks this version: object name -> problem."""
        culprits: dict[str, str] = {}
        lengths, domain = np.zeros(len(manifest.segments), np.int64), domain_of(manifest.tenant)
        for container, rows in group_by_container(manifest.segments.containers):
            name = object_name(ContainerId(container))
            directory = self._soundness.directory(container, domain)
            if directory is None:
                culprits[name] = self._soundness.problems[name]
                continue
            ordinals, table = manifest.segments.ordinals[rows], directory.segments
            if int(ordinals.max()) >= len(table):
                culprits[name] = f"{name}: has {len(table)} recipes, number {int(ordinals.max())} is wanted"
                continue
            of_each = np.diff(table.bounds)
            used = np.repeat(np.bincount(ordinals, minlength=len(table)) > 0, of_each)
            chunks = self._chunks_of(table.chunks.take(used), domain, culprits)
            segment = np.repeat(np.arange(len(table)), of_each)[used]
            lengths[rows] = np.bincount(segment, chunks, len(table)).astype(np.int64)[ordinals]
        name = f"{manifest.key!r} version {manifest.version}"
        if not culprits and (total := int(lengths.sum())) != manifest.size_bytes:
            culprits[name] = f"{name}: its segments hold {total} bytes, the manifest says {manifest.size_bytes}"
        elif not culprits and manifest.lengths is not None and len(wrong := (lengths != manifest.lengths).nonzero()[0]):
            found, said = int(lengths[wrong[0]]), int(manifest.lengths[wrong[0]])
            culprits[name] = f"{name}: segment {wrong[0]} holds {found} bytes, the manifest says {said}"
        return culprits

    def _chunks_of(self, chunks: Locations, domain: bytes, culprits: dict[str, str]) -> NDArray[np.int64]:
        """Add what breaks the chunks to `culprits`; return the bytes of each of the others, 0 for these."""
        blamed = self._soundness.affected_versions(chunks, domain)
        for container in np.unique(blamed[blamed != 0]):
            culprit = object_name(ContainerId(int(container)))
            culprits.setdefault(culprit, self._soundness.problems.get(culprit, f"{culprit}: a chunk is gone"))
        found = np.zeros(len(chunks), np.int64)
        for container, named in group_by_container(chunks.containers):
            rows = named[blamed[named] == 0]
            if not len(rows):
                continue
            lengths = chunks.ordinals[rows]  # of holes, as they are
            if container != ZERO:
                directory = self._soundness.directory(container, domain)
                if directory is None:  # gone since it was checked
                    name = object_name(ContainerId(container))
                    culprits.setdefault(name, self._soundness.problems[name])
                    continue
                lengths = directory.chunks.lengths[lengths]
            found[rows] = lengths
        return found

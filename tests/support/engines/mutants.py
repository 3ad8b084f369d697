"""Plant mistakes.

Invariant: each changes only this process, until it ends, and is a mistake that a programmer may make.

Called in a child process that ends soon after; no other process is affected.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

import nearkin.local.local_gc
import nearkin_delta.codecs
import nearkin_maintenance.gc.concurrent_writes
import nearkin_maintenance.gc.gc_plan
import nearkin_maintenance.gc.gc_run
import nearkin_maintenance.gc.ledger_rows
import nearkin_maintenance.gc.mark
import nearkin_maintenance.gc.roots
import nearkin_maintenance.gc.sweep
import nearkin_maintenance.optimize.block_writer
import nearkin_maintenance.repair.store_repair
import nearkin_maintenance.verify.scrubber
from nearkin.embedded.runner import EmbeddedWriter
from nearkin.local.index_lifecycle import LocalIndex
from nearkin.local.index_recovery import IndexRecovery
from nearkin.local.index_states import IndexEvent
from nearkin.local.process_lock import WriterLock
from nearkin_delta import FinishedContainer
from nearkin_shared.formats import columns, container, directory_codec
from nearkin_shared.formats.pending_delete_record import PendingDelete
from nearkin_shared.index.lmdb.lmdb_index import LmdbIndex
from nearkin_shared.kernels import xdelta3
from nearkin_shared.objectstore import local
from nearkin_shared.objectstore.base import AlreadyExists, Payload
from nearkin_shared.objectstore.fenced import FencedObjectStore
from nearkin_shared.storage import deletions
from nearkin_shared.storage.containers import ContainerStore
from nearkin_shared.storage.manifests import ManifestStore
from nearkin_shared.utils.failpoints import failpoint
from tests.support.data.stores import settings


def bytes_not_synced() -> None:
    """Write an object without fsync."""

    def write(path: Path, parts: Sequence[Payload], *, drop: bool) -> None:
        layer = vars(local)["os"]
        descriptor = layer.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        layer.writev(descriptor, parts)
        layer.close(descriptor)

    vars(local)["write_durably"] = write


def name_not_synced() -> None:
    """Omit the sync of a manifest's folder."""
    real = local.sync_folder

    def sync(folder: str | Path) -> None:
        if not any(Path(folder).glob("*.nkm")):
            real(folder)

    vars(local)["sync_folder"] = sync


def folder_not_synced() -> None:
    """Omit the sync of a new folder's parent."""

    def make(self: local.LocalObjectStore, folder: str) -> None:
        for above in reversed([Path(folder), *Path(folder).parents]):
            if not above.exists():
                vars(local)["os"].mkdir(above)

    _patch(local.LocalObjectStore, "_make_folder", make)


def create_overwrites() -> None:
    """Check whether an object exists, then rename over it."""

    def put_new(self: local.LocalObjectStore, name: str, *parts: Payload) -> None:
        final = self._root / name
        if final.exists():
            raise AlreadyExists(name)
        self._make_folder(str(final.parent))
        self._scratch.mkdir(exist_ok=True)
        temporary = self._scratch / f"{os.urandom(8).hex()}.part"
        local.write_durably(temporary, parts, drop=False)
        failpoint("object.synced")
        os.replace(temporary, final)
        local.sync_folder(final.parent)

    _patch(local.LocalObjectStore, "put_new", put_new)


def published_before_durable() -> None:
    """Publish a container in the index before its object is put."""
    real = EmbeddedWriter._commit

    def commit(self: EmbeddedWriter, item: Any) -> None:
        if isinstance(item, FinishedContainer):
            self._index.publish(item.seal().claims)
        real(self, item)

    _patch(EmbeddedWriter, "_commit", commit)


def manifest_before_container() -> None:
    """Put a manifest before the containers that it names."""
    real_put, real_commit = ContainerStore.put, ManifestStore.put
    late: list[Callable[[], object]] = []

    def put(self: ContainerStore, container: Any, parts: Any, generation: int = 0) -> Any:
        late.append(lambda: real_put(self, container, parts, generation))

    def commit(self: ManifestStore, manifest: Any) -> int:
        manifest_bytes = real_commit(self, manifest)
        while late:
            late.pop(0)()
        return manifest_bytes

    _patch(ContainerStore, "put", put)
    _patch(ManifestStore, "put", commit)


def newest_deleted_first() -> None:
    """Write the tombstone of a key's newest version first."""
    real = deletions.Deletions._write

    def write(self: deletions.Deletions, before: Sequence[Any], marks: Sequence[Any]) -> int:
        if len(marks) < 2:
            return real(self, before, marks)
        return real(self, before[-1:], marks[-1:]) + real(self, before[:-1], marks[:-1])

    _patch(deletions.Deletions, "_write", write)


def undelete_unchecked() -> None:
    """Undelete without checking that the version still exists, and without excluding GC steps of the process.

    Services have only the first protection; in one process either suffices.
    """
    _patch(ManifestStore, "is_committed", lambda *_: True)
    _patch(LocalIndex, "outside_gc_step", lambda _: nullcontext())


def not_caught_up() -> None:
    """Use the index of a dead writer without recovery."""
    _patch(IndexRecovery, "catch_up", lambda *_: None)


def container_before_index() -> None:
    """Delete a container before the index forgets it."""
    real = nearkin_maintenance.gc.sweep.GcExecutor.sweep

    class DelayedIndex:
        def __init__(self, index: Any, withdrawn: list[Any]) -> None:
            self._index, self._calls = index, withdrawn

        def __getattr__(self, name: str) -> Any:
            return getattr(self._index, name)

        def withdraw(self, *withdrawn: Any) -> None:
            self._calls.append(withdrawn)

    def sweep(self: Any, plan: Any) -> Any:
        withdrawn: list[Any] = []
        with _other_index(self.concurrent_writes, lambda index: DelayedIndex(index, withdrawn)):
            removed = real(self, plan)
        for forgotten in withdrawn:
            with self.concurrent_writes.exclusive() as index:
                index.withdraw(*forgotten)
        return removed

    _patch(nearkin_maintenance.gc.sweep.GcExecutor, "sweep", sweep)


def bases_not_counted() -> None:
    """Leave the bases of deltas and blocks out of the live set."""

    def closed(self: Any, chunks: Mapping[int, Any], complete: Any = (), dropped_bases: Any = None) -> Any:
        return {container: mask.copy() for container, mask in chunks.items()}

    _patch(nearkin_maintenance.gc.mark.LiveSet, "transitive_closure", closed)


def recheck_skipped() -> None:
    """Delete due data without checking them again."""

    def sweep(live_set: Any, ids: Any, due: Mapping[int, PendingDelete]) -> Any:
        plan = nearkin_maintenance.gc.gc_plan
        removals = {
            container: plan.ContainerRemoval(
                plan.ContainerAction.DELETE if entry.whole else plan.ContainerAction.REWRITE,
                entry.chunks,
                entry.segments,
            )
            for container, entry in due.items()
            if container in ids
        }
        return plan.GcPlan(removals)

    vars(nearkin_maintenance.gc.gc_run)["plan_sweep"] = sweep


def pending_delete_still_found() -> None:
    """Leave data pending delete in the index."""
    real: Any = nearkin_maintenance.gc.sweep.GcExecutor.mark_for_deletion

    class KeepingIndex:
        def __init__(self, index: Any) -> None:
            self._index = index

        def __getattr__(self, name: str) -> Any:
            return (lambda *_: None) if name == "withdraw" else getattr(self._index, name)

    def mark_all(self: Any, plan: Any, record: Any, before: Any) -> Any:
        with _other_index(self.concurrent_writes, KeepingIndex):
            return real(self, plan, record, before)

    _patch(nearkin_maintenance.gc.sweep.GcExecutor, "mark_for_deletion", mark_all)


def deletes_in_same_run() -> None:
    """Free data in the GC run that marks them."""
    real = nearkin.local.local_gc.LocalGc.run

    def run(self: Any, *arguments: Any) -> Any:
        real(self, *arguments)
        return real(replace(self, settings=settings(self.settings, {"gc": {"grace_seconds": 0}})), *arguments)

    _patch(nearkin.local.local_gc.LocalGc, "run", run)


def grace_ignored() -> None:
    """Free data in the next GC run, whatever the grace."""
    _patch(nearkin_maintenance.gc.gc_run.GcPass, "_is_due", lambda *_: True)


def older_generation_first() -> None:
    """Remove a container in a compaction before its next generation exists."""

    def rewrite(self: Any, container: Any, left: Any, make: Any) -> bool:
        data = make()
        generation = self.store.containers.generation(container)
        with self.concurrent_writes.exclusive() as index:
            self.store.containers.delete(container, generation)
            self.store.containers.put(container, [data], generation + 1)
            self.store.swap.renew(index, container)
            self.concurrent_writes.on_container_rewritten(container, generation + 1)
        self.ids[container] = len(data)
        self.totals.rewritten += 1
        return True

    _patch(nearkin_maintenance.gc.sweep.GcExecutor, "_rewrite", rewrite)


def number_given_again() -> None:
    """Delete the last mark of a key's highest version."""
    real = nearkin_maintenance.gc.roots.find_roots

    def roots(manifests: Any, now_us: int, **more: Any) -> Any:
        return replace(real(manifests, now_us, **more), highest=frozenset())

    vars(nearkin_maintenance.gc.gc_run)["find_roots"] = roots


def lock_not_taken() -> None:
    """Skip the acquisition of the store's writer lock."""

    def acquire(self: WriterLock, wait_seconds: float = 0.0, what: str = "") -> None:
        self._descriptor = None

    _patch(WriterLock, "acquire", acquire)


def concurrent_writes_ignored() -> None:
    """Ignore data put while a GC run marks and plans."""
    _patch(nearkin_maintenance.gc.concurrent_writes.ConcurrentWrites, "refresh", lambda *_: None)


def retained_bases_not_kept() -> None:
    """Keep no bases of the dead blocks that a put retains, nor of newly written data."""
    real = nearkin_maintenance.gc.concurrent_writes.ConcurrentWrites.refresh

    def look(self: Any) -> None:
        real(self)
        self._needed.clear()

    _patch(nearkin_maintenance.gc.concurrent_writes.ConcurrentWrites, "refresh", look)


def read_is_kept() -> None:
    """Let puts of the process of a GC run keep cached blocks of a deleted container."""
    _patch(nearkin.local.local_gc.LocalWriterGate, "on_container_rewritten", lambda *_: None)
    _patch(ContainerStore, "_set_generation", lambda self, *noted: self._generations.update([noted]))


def exclusive_section_without_lock() -> None:
    """Run the step of a GC run without a lock, and without waiting for puts."""

    @contextmanager
    def exclusive_section(self: LocalIndex, wait_seconds: float) -> Iterator[LmdbIndex]:
        if self._states.is_locked:
            yield self._opened()
            return
        self._states.apply(IndexEvent.STEP_LOCKED)
        try:
            index = self._opened()
            self._states.apply(IndexEvent.CLAIMED)
            yield index
        finally:
            if self._states.is_step:
                self._states.apply(IndexEvent.UNLOCKED)

    _patch(LocalIndex, "exclusive", exclusive_section)


def delta_not_verified() -> None:
    """Let the encoder fail now and then, as with broken memory, and store its output unverified."""
    real = xdelta3.encode_many

    def encode(*arguments: Any, **more: Any) -> Any:
        payload, *rest = real(*arguments, **more)
        payload = np.array(payload)
        payload[-1:] ^= 1
        return (payload, *rest)

    vars(xdelta3)["encode_many"] = encode
    vars(nearkin_delta.codecs)["check_round_trip"] = lambda *_: None


def directory_unchecked() -> None:
    """Skip the comparison of a directory's checksum."""
    real = directory_codec.decode_directory

    def decode(data: Any, container: Any, domain: Any, container_bytes: int, check: bytes, what: str) -> Any:
        return real(data, container, domain, container_bytes, columns.check_bytes(memoryview(data)), what)

    for module in (directory_codec, container):  # all callers
        vars(module)["decode_directory"] = decode


def block_number_given_again() -> None:
    """Reuse in a compaction the number of a deleted block."""
    writer = nearkin_maintenance.optimize.block_writer.BlockWriter
    real = writer.write_raw

    def raw(self: Any, new: Any, directory: Any, rows: Any) -> None:
        used = [number for number, block in enumerate(new._blocks) if block is not None]
        new._next = max(used, default=-1) + 1
        real(self, new, directory, rows)

    _patch(writer, "write_raw", raw)


def scrub_skips_a_container() -> None:
    """Skip the container after the one that a scrub has read."""
    scrubber = nearkin_maintenance.verify.scrubber.Scrubber
    real = scrubber._containers_step

    def step(self: Any) -> Any:
        done = real(self)
        if done is not None and self._ids is not None:
            further = [container for container in self._ids if container >= self._state.containers_below]
            if further:
                self._state = replace(self._state, containers_below=further[0] + 1)
        return done

    _patch(scrubber, "_containers_step", step)


def repair_deletes_first() -> None:
    """Remove the broken generation before the repaired one is durable."""

    def new_generation(self: Any, container: Any, generation: int, data: bytes) -> None:
        directory = self._containers.directory(container)
        self._containers.delete(container, generation)
        failpoint("repair.put")
        self._containers.put(container, [data], generation + 1)
        self._renew(directory)

    _patch(nearkin_maintenance.repair.store_repair.Repairer, "_new_generation", new_generation)


def repair_not_published() -> None:
    """Leave a repaired container unpublished in the index."""

    def new_generation(self: Any, container: Any, generation: int, data: bytes) -> None:
        self._containers.put(container, [data], generation + 1)
        failpoint("repair.put")
        self._containers.delete(container, generation)

    _patch(nearkin_maintenance.repair.store_repair.Repairer, "_new_generation", new_generation)


def fence_not_checked() -> None:
    """Delete an object without checking that the lease is still held."""

    def delete(self: Any, name: str) -> None:
        self.inner.delete(name)

    _patch(FencedObjectStore, "delete", delete)


def counted_twice() -> None:
    """Count a segment twice for a new version, and once for a deleted one."""
    rows = nearkin_maintenance.gc.ledger_rows.LedgerRows
    real = rows.hold

    def hold(self: Any, segment: bytes, key: bytes = b"") -> None:
        real(self, segment, key)
        real(self, segment, key)

    _patch(rows, "hold", hold)


def summary_lies() -> None:
    """Leave out of a container's summary what a second key names of it."""
    rows = nearkin_maintenance.gc.ledger_rows.LedgerRows
    real = rows.hold

    def hold(self: Any, segment: bytes, key: bytes = b"") -> None:
        if self.get("counts", segment) is None:
            real(self, segment, key)

    _patch(rows, "hold", hold)


@contextmanager
def _other_index(since: Any, other: Callable[[Any], Any]) -> Iterator[None]:
    """Let exclusive sections yield another index than theirs."""
    real = since.exclusive

    @contextmanager
    def exclusive_section() -> Iterator[Any]:
        with real() as index:
            yield other(index)

    since.exclusive = exclusive_section
    try:
        yield
    finally:
        since.exclusive = real


def _patch(kind: type, name: str, value: Any) -> None:
    setattr(kind, name, value)

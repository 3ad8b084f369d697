"""The store. Invariant: a put either ends as a committed version or changes nothing that a reader can see.

root/nearkin.json   containers/   manifests/      the truth: what is counted as stored
root/index/         lock          tmp/            rebuildable, transient
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, suppress
from io import BytesIO
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, BinaryIO, Self, cast

from nearkin.config import Settings, load
from nearkin.errors import BadInput, FormatTooNew, NotFound, StoreLocked, StoreUnavailable
from nearkin.fingerprints import Fingerprinter
from nearkin.formats.manifest import Manifest, encode_metadata
from nearkin.limits import KEY_BYTES_MAX
from nearkin.records import (
    U8,
    U32,
    U64,
    Explanation,
    Ledger,
    PutResult,
    RebuildReport,
    Stats,
    VerifyReport,
    VersionInfo,
)
from nearkin.restore import Blob
from nearkin.store import descriptor
from nearkin.store.containers import ContainerStore
from nearkin.store.lock import WriterLock
from nearkin.store.manifests import ManifestStore
from nearkin.store.manifests import object_name as manifest_name
from nearkin.store.objects import AlreadyExists, LocalObjects, sync_folder

if TYPE_CHECKING:  # a get needs neither stages nor index: it starts 0.1 s sooner without them
    from concurrent.futures import Future

    from nearkin.index.catalog import CatalogEntry
    from nearkin.index.lmdb import LmdbIndex
    from nearkin.runners.embedded import EmbeddedWriter

READ_BYTES = 1024 * 1024
_log = logging.getLogger("nearkin")

Progress = Callable[[int], None]
"""Called with the bytes taken since the last call."""
Source = Path | BinaryIO | bytes


def open_store(
    path: str | Path,
    *,
    settings: Settings | None = None,
    create: bool = True,
    read_only: bool = False,
    fingerprint_bits: int = descriptor.FINGERPRINT_BITS,
) -> Store:
    """Open the store in a folder, or make one. `fingerprint_bits` below 160 is for tests of collisions.

    Raises NotFound (no store there, and `create` is off), FormatTooNew, Corrupt, StoreUnavailable.
    """
    root = Path(path).expanduser()
    chosen = settings if settings is not None else load()[0]
    if root.exists() and not root.is_dir():
        raise BadInput(f"store {root}: is a file; name a folder")
    exists = (root / descriptor.NAME).is_file()
    if not exists:
        if not create or read_only:
            raise NotFound(f"store {root}: there is none (no {descriptor.NAME}); put something to make one")
        others = [entry.name for entry in root.iterdir()] if root.is_dir() else []
        if descriptor.NAME not in others and set(others) - {"lock", "lock.holder", "tmp"}:
            raise BadInput(
                f"store {root}: the folder is not empty and holds no {descriptor.NAME}; name an empty or new folder"
            )
        try:
            root.mkdir(parents=True, exist_ok=True)
            sync_folder(root.parent)
        except OSError as err:
            raise StoreUnavailable(f"store {root}: {err.strerror}") from err
    objects = LocalObjects(root)
    if not exists:
        try:
            return Store(root, objects, descriptor.create(objects, fingerprint_bits), chosen)
        except AlreadyExists:
            pass  # another process made the store meanwhile: it is the one to open
    return Store(root, objects, descriptor.read(objects), chosen)


class Store:
    """An open store: one writer (the first write takes the lock, `close` gives it back), any number of readers."""

    def __init__(self, root: Path, objects: LocalObjects, found: descriptor.Descriptor, settings: Settings) -> None:
        self.root = root
        self.settings = settings
        self._objects = objects
        self._descriptor_bytes = objects.size_bytes(descriptor.NAME)
        self._fingerprinter = Fingerprinter(bytes.fromhex(found.secret), settings.tenant, found.fingerprint_bits)
        domain = self._fingerprinter.domain
        self._bases = ContainerStore(objects, domain, int(settings.base.cache_bytes))
        self._restored = ContainerStore(objects, domain, int(settings.restore.cache_bytes))
        self._manifests = ManifestStore(objects)
        self._lock = WriterLock(root)
        self._writing = False
        self._index: LmdbIndex | None = None
        self._behind = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, err: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Release the lock and the index."""
        if self._index is not None:
            if self._writing and not self._index.read_only and not self._behind:
                with suppress(StoreUnavailable):  # then the next writer looks for what is missing, and finds nothing
                    self._index.mark_behind(False)
            self._index.close()
            self._index = None
        if self._writing:
            self._lock.release()
            self._writing = False

    # --- put ---------------------------------------------------------------------------------------------------------

    def put(
        self,
        key: str,
        source: Source,
        *,
        metadata: Mapping[str, str] | None = None,
        sha256: bytes | None = None,
        progress: Progress | None = None,
    ) -> PutResult:
        """Store a new version of `key`. Returns once it is committed and durable.

        `sha256` is what the caller holds the content to be. Raises BadInput (nothing stored), StoreLocked,
        StoreUnavailable (nothing visible stored; the same put may be tried again).
        """
        (result,) = self._put_all([(key, source, metadata or {}, sha256)], progress)
        return result

    def put_many(self, items: Iterable[tuple[str, Source]], *, progress: Progress | None = None) -> Iterator[PutResult]:
        """Store many blobs, committed in groups: far fewer syncs than one put each. Yields results as groups commit."""
        return self._put_all(((key, source, {}, None) for key, source in items), progress)

    def _put_all(
        self,
        items: Iterable[tuple[str, Source, Mapping[str, str], bytes | None]],
        progress: Progress | None,
    ) -> Iterator[PutResult]:
        index = self._writable_index()
        self._behind = True  # until all is in the index, whatever ends this in between
        last = max((int(container) for container, _ in self._bases.ids()), default=0)
        from nearkin.runners.embedded import EmbeddedWriter

        with EmbeddedWriter(self.settings, self._fingerprinter, self._bases, self._manifests, index, last) as writer:
            waiting = []
            for key, source, metadata, sha256 in items:
                check_key(key)
                check_metadata(metadata)
                waiting.append(_feed(writer, key, source, metadata, sha256, progress))
                if waiting[0].done():
                    yield from (done.result() for done in waiting if done.done())
                    waiting = [pending for pending in waiting if not pending.done()]
            writer.flush()
            self._behind = False
            yield from (done.result() for done in waiting)

    # --- get ---------------------------------------------------------------------------------------------------------

    def get(self, key: str, version: int | None = None, *, start: int = 0, stop: int | None = None) -> Blob:
        """Return a version (the newest by default) or its bytes [start, stop). Raises NotFound, Corrupt, BadInput."""
        manifest = self._manifest(key, version)
        end = manifest.size_bytes if stop is None else min(stop, manifest.size_bytes)
        if not 0 <= start <= end:
            raise BadInput(f"range {start} to {stop}: {key!r} has {manifest.size_bytes} bytes")
        return Blob(manifest.info, manifest, self._restored, self._fingerprinter, start, end)

    def info(self, key: str, version: int | None = None) -> VersionInfo:
        """Return what is known of a version, the newest by default. Raises NotFound, Corrupt."""
        return self._manifest(key, version).info

    def explain(self, key: str, version: int | None = None) -> Explanation:
        """Return how each chunk of a version is kept. Raises NotFound, Corrupt."""
        from nearkin.explain import explain

        manifest = self._manifest(key, version)
        return explain(manifest.info, manifest, self._restored)

    def versions(self, prefix: str = "", *, all_versions: bool = False) -> list[VersionInfo]:
        """Return the newest version, or all, of every key that starts with `prefix`, by key."""
        entries = list(self._readable_index().catalog(self.settings.tenant, prefix))
        if not all_versions:
            newest = {entry.key: entry for entry in entries}
            entries = list(newest.values())
        return [self.info(entry.key, entry.version) for entry in entries]

    def _manifest(self, key: str, version: int | None) -> Manifest:
        check_key(key)
        tenant = self.settings.tenant
        if version is None:
            version = max(self._manifests.versions(tenant, key), default=0)
            if not version:
                raise NotFound(f"key {key!r}: the store has none; `nearkin ls` lists the keys")
        elif not 1 <= version < 1 << 64:
            raise BadInput(f"version {version}: versions count from 1")
        try:
            return self._manifests.get(tenant, key, version)
        except NotFound as err:
            raise NotFound(
                f"key {key!r} version {version}: the store has none; `nearkin ls --versions` lists them"
            ) from err

    # --- the store as a whole ----------------------------------------------------------------------------------------

    def stats(self) -> Stats:
        """Return sums over the store, from the index and the object store's listing."""
        index = self._readable_index()
        versions = list(index.catalog(self.settings.tenant))
        containers = list(index.containers())
        ledger, seconds, manifest_bytes = Ledger(), 0.0, 0
        for entry in versions:
            ledger += entry.ledger
            seconds += entry.seconds
            manifest_bytes += entry.manifest_bytes
        stored = sum(size_bytes for _, size_bytes in self._bases.ids()) + manifest_bytes + self._descriptor_bytes
        parts = {
            "raw_blocks": sum(c.raw_block_bytes for c in containers),
            "delta_blocks": sum(c.delta_block_bytes for c in containers),
            "chunk_names": sum(c.name_bytes for c in containers),
            "recipes": sum(c.recipe_bytes for c in containers),
            "directories": sum(c.directory_bytes - c.name_bytes - c.recipe_bytes for c in containers),
            "manifests": manifest_bytes,
            "descriptor": self._descriptor_bytes,
        }
        parts["framing"] = stored - sum(parts.values())
        depths: dict[int, int] = {}
        sketches: dict[str, int] = {}
        for container in containers:
            for depth, count in enumerate(container.depths):
                depths[depth] = depths.get(depth, 0) + count
            for sketch, count in container.sketches.items():
                sketches[sketch] = sketches.get(sketch, 0) + count
        unique = sum(c.unique_bytes for c in containers)
        raw_chunks = sum(c.raw_chunks for c in containers)
        delta_chunks = sum(sum(c.depths) for c in containers) - raw_chunks
        return Stats(
            ledger=Ledger(
                logical_bytes=ledger.logical_bytes,
                chunks=ledger.chunks,
                # Chunks of a put that failed may be stored and in no version: fewer are then needed than are there.
                duplicate_chunks=max(0, ledger.chunks - raw_chunks - delta_chunks),
                delta_chunks=delta_chunks,
                raw_chunks=raw_chunks,
                zero_chunks=ledger.zero_chunks,
                unique_bytes=unique,
                delta_chunk_bytes=sum(c.delta_chunk_bytes for c in containers),
                delta_bytes=sum(c.delta_bytes for c in containers),
                block_bytes=parts["raw_blocks"] + parts["delta_blocks"],
                raw_block_bytes=parts["raw_blocks"],
                stored_bytes=stored,
            ),
            versions=len(versions),
            keys=len({entry.key for entry in versions}),
            containers=len(containers),
            segments=sum(c.segments for c in containers),
            parts=parts,
            index_bytes=_folder_bytes(self.root / "index"),
            depths=depths,
            sketches=sketches,
            base_cache_hits=self._bases.blocks.hits,
            base_cache_misses=self._bases.blocks.misses,
            seconds=seconds,
        )

    def verify(self, sample: float | None = None, progress: Callable[[int, int], None] | None = None) -> VerifyReport:
        """Read containers (all, or a share between 0 and 1 of them) and every manifest; name what is broken."""
        from nearkin_janitor import verify_store

        if sample is not None and not 0 < sample <= 1:
            raise BadInput(f"sample {sample}: want a share above 0 and at most 1, such as 0.01")
        remembered = {
            manifest_name(self.settings.tenant, entry.key, entry.version): (entry.key, entry.version)
            for entry in self._remembered()
        }
        return verify_store(self._restored, self._manifests, self._fingerprinter, sample, progress, remembered)

    def _remembered(self) -> list[CatalogEntry]:
        """Return the index's catalog where there is a sound one: `verify` can do without, and makes none."""
        if self._index is None and not (self.root / "index" / "data.mdb").is_file():
            return []
        try:
            index = self._index or self._open_index(read_only=True)
            if not index.complete:
                index.close()
                return []
            self._index = index
            return list(index.catalog(self.settings.tenant))
        except (StoreUnavailable, FormatTooNew):
            return []

    def rebuild_index(self, progress: Callable[[int, int], None] | None = None) -> RebuildReport:
        """Replace the index by one made from containers and manifests alone."""
        from nearkin_janitor import rebuild_index

        self._take_lock()
        if self._index is not None:
            self._index.close()
            self._index = None
        fresh = self.root / "index.new"
        shutil.rmtree(fresh, ignore_errors=True)
        from nearkin.index.lmdb import LmdbIndex

        index = LmdbIndex(fresh, self._fingerprinter.domain, int(self.settings.index.map_bytes))
        try:
            report = rebuild_index(self._bases, self._manifests, index, self._fingerprinter, _sketches, progress)
            index.mark_complete()
        finally:
            index.close()
        shutil.rmtree(self.root / "index", ignore_errors=True)
        os.rename(fresh, self.root / "index")  # the index is whole, or it is missing and made again
        return report

    # --- index and lock ----------------------------------------------------------------------------------------------

    def _take_lock(self) -> None:
        if not self._writing:
            self._lock.acquire()
            self._writing = True
            self._objects.sweep_scratch()

    def _writable_index(self) -> LmdbIndex:
        self._take_lock()
        if self._index is not None and self._index.read_only:
            self._index.close()
            self._index = None
        if self._index is None:
            self._index = self._complete_index() or self._rebuilt_index()
            self._behind = self._index.behind
            if not self._behind:
                self._index.mark_behind(True)
        if self._behind:
            self._catch_up(self._index)
            self._behind = False
        return self._index

    def _catch_up(self, index: LmdbIndex) -> None:
        """Add what a writer had stored, and not yet put into the index, when it died or failed."""
        from nearkin_janitor import rebuild_index

        containers = {summary.container for summary in index.containers()}
        tenant = self.settings.tenant
        manifests = {manifest_name(tenant, entry.key, entry.version) for entry in index.catalog(tenant)}
        rebuild_index(
            self._bases,
            self._manifests,
            index,
            self._fingerprinter,
            _sketches,
            known_containers=containers,
            known_manifests=manifests,
        )

    def _readable_index(self) -> LmdbIndex:
        if self._index is None:
            if not (self.root / "index" / "data.mdb").is_file():
                self._mend_index()
            index = self._open_index(read_only=True)
            if not index.complete or index.behind:
                index.close()
                try:
                    self._mend_index()
                except (StoreLocked, StoreUnavailable):  # a writer is at work: what it has committed is there
                    index = self._open_index(read_only=True)
                    if not index.complete:
                        index.close()
                        raise
                else:
                    index = self._open_index(read_only=True)
            self._index = index
        return self._index

    def _mend_index(self) -> None:
        """Make the index whole, as a writer would, and let go of the lock: readers must never keep writers out."""
        self._writable_index()
        self.close()

    def _complete_index(self) -> LmdbIndex | None:
        index = self._open_index(read_only=False)
        if not index.complete:
            if next(self._bases.ids(), None) is not None or next(self._manifests.names(), None) is not None:
                index.close()
                return None
            index.mark_complete()
        return index

    def _rebuilt_index(self) -> LmdbIndex:
        started = time.perf_counter()
        _log.warning("index of %s is missing or unfinished: rebuilding it from containers and manifests", self.root)
        self.rebuild_index()
        _log.warning("index rebuilt in %.1f s", time.perf_counter() - started)
        return self._open_index(read_only=False)

    def _open_index(self, *, read_only: bool) -> LmdbIndex:
        map_bytes = int(self.settings.index.map_bytes)
        from nearkin.index.lmdb import LmdbIndex

        return LmdbIndex(self.root / "index", self._fingerprinter.domain, map_bytes, read_only=read_only)


def check_key(key: str) -> None:
    """Refuse a key that cannot be listed as it was given. Any other UTF-8 is taken as it is: a key is never a path."""
    try:
        size_bytes = len(key.encode())
    except UnicodeEncodeError as err:
        raise BadInput(f"key {key!r}: is not valid UTF-8 (position {err.start})") from err
    if not size_bytes:
        raise BadInput('key "": want at least one character')
    if size_bytes > KEY_BYTES_MAX:
        raise BadInput(f"key of {size_bytes} bytes ({key[:20]!r}...): want at most {KEY_BYTES_MAX} bytes of UTF-8")
    if "\0" in key:
        raise BadInput(f"key {key!r}: has a NUL character; use another separator, such as /")


def check_metadata(metadata: Mapping[str, str]) -> None:
    """Refuse metadata that is not text or too much of it."""
    encode_metadata(metadata)


def _feed(
    writer: EmbeddedWriter,
    key: str,
    source: Source,
    metadata: Mapping[str, str],
    sha256: bytes | None,
    progress: Progress | None,
) -> Future[PutResult]:
    """Stream one source into the writer; return the future of its result."""
    blob = writer.begin(key, metadata, sha256)
    check = hashlib.sha256() if sha256 is not None else None

    def take(count: int, window: memoryview) -> None:
        if check is not None:
            check.update(window[:count])
        writer.advance(blob, count)
        if progress is not None:
            progress(count)

    with ExitStack() as files:
        file: BinaryIO | BytesIO
        if isinstance(source, Path):
            file = files.enter_context(_opened(source))
        else:
            file = BytesIO(source) if isinstance(source, bytes) else source
        while True:
            window = writer.window()
            count = _read_into(file, window)
            if not count:
                break
            take(count, window)
    if check is not None and check.digest() != sha256:
        raise BadInput(f"key {key!r}: its SHA-256 is {check.hexdigest()}, not the one announced; nothing was stored")
    writer.end(blob)
    return blob.done


def _opened(path: Path) -> BinaryIO:
    try:
        if not path.is_file():
            raise BadInput(f"{path}: {'is not a regular file' if path.exists() else 'no such file'}")
        return cast("BinaryIO", path.open("rb", buffering=0))
    except OSError as err:
        raise BadInput(f"{path}: {err.strerror}") from err


def _read_into(file: BinaryIO | BytesIO, window: memoryview) -> int:
    """Fill the window's start from a file; 0 at its end. Files without `readinto` are read and copied."""
    reader = getattr(file, "readinto", None)
    if reader is not None:
        count = reader(window)
        if count is None:  # not the end: taken for it, half a blob would be committed as a whole one
            raise BadInput("source: has nothing to read yet; open it blocking, not non-blocking")
        return int(count)
    data = file.read(min(len(window), READ_BYTES))
    window[: len(data)] = data
    return len(data)


def _sketches(sketch: str, payload: U8, offsets: U64, lengths: U32) -> U64:
    from nearkin_resemblance import Sketch

    return Sketch.parse(sketch).super_features(payload, offsets, lengths)


def _folder_bytes(folder: Path) -> int:
    """Return what a folder takes on disk; LMDB's file is sparse."""
    return sum(entry.stat().st_blocks * 512 for entry in folder.rglob("*") if entry.is_file()) if folder.is_dir() else 0

"""Inspect the contents of a local store.

Invariant: files and index are read as they are; the inspection repairs nothing.

Raises: Violation if an index names missing data (I1, and the order of deletion), or an object has no owner.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

from nearkin.local.index_files import entry_names_of
from nearkin.store import Store
from nearkin_maintenance.gc.mark import LiveSet
from nearkin_shared.config.settings import Settings
from nearkin_shared.errors import NearkinError
from nearkin_shared.fingerprints import domain_of
from nearkin_shared.formats.container import decode_container
from nearkin_shared.index.lmdb.lmdb_index import LmdbIndex
from nearkin_shared.objectstore.encrypted_store import EncryptedObjectStore
from nearkin_shared.objectstore.factory import as_set
from nearkin_shared.objectstore.local import LocalObjectStore
from nearkin_shared.objectstore.parity import FOLDER, SUFFIX
from nearkin_shared.storage.pending_deletes import PendingDeleteStore
from tests.support.engines.model import Seen, Violation

_LOCATED = np.dtype([("container", "<u8"), ("ordinal", "<u4")])


def inspect(store: Store) -> Seen:
    """Return the listings of a store, and its stored manifests."""
    live = frozenset((info.key, info.version) for info in store.versions(all_versions=True))
    deleted = frozenset((entry.key, entry.version) for entry in store.list_deleted())
    names = [name for name, _ in store._manifests.names()]
    read = [store._manifests.read(name) for name in names]
    for key in {key for key, _ in live}:
        newest = max(version for name, version in live if name == key)
        answered = store.info(key).version
        if answered != newest:
            raise Violation(f"{key!r}: version {answered} is answered for the newest, {newest} is")
    return Seen(live, deleted, frozenset((m.key, m.version) for m in read), containers(store.root))


def containers(root: Path) -> frozenset[int]:
    """Return the ids of the containers of a store."""
    return frozenset(int(path.name[:16], 16) for path in (root / "containers").rglob("*.nkc"))


def copy_opener(root: Path, chosen: Settings) -> Callable[[Path], bytes]:
    """Return a function that reads an object's file and decrypts it; parity does not repair it."""
    objects = as_set(LocalObjectStore(root), chosen)
    if isinstance(objects, EncryptedObjectStore):
        return lambda path: objects.decrypt(str(path.relative_to(root)), path.read_bytes())
    return Path.read_bytes


def check_index_names_existing_data(root: Path, chosen: Settings) -> None:
    """Raise Violation if the index names a missing container, chunk or segment, according to the directories.

    An index that is missing or incomplete names nothing.
    """
    if not (root / "index" / "data.mdb").is_file():
        return
    names = entry_names_of(as_set(LocalObjectStore(root), chosen))()
    with tempfile.TemporaryDirectory(prefix="nearkin-index-") as copy:
        # a copy, of a store that no process has open: LMDB writes to a file when it opens it
        shutil.copyfile(root / "index" / "data.mdb", Path(copy) / "data.mdb")
        try:
            index = LmdbIndex(
                Path(copy), domain_of(chosen.tenant), int(chosen.index.map_bytes), read_only=True, names=names
            )
        except NearkinError:
            return
        try:
            entries = index.entries() if index.complete else {}
            ids = index.container_ids().tolist() if entries else []
        finally:
            index.close()
    pending = PendingDeleteStore(as_set(LocalObjectStore(root), chosen)).read() if (root / "gc").is_dir() else {}
    directories, read = {}, copy_opener(root, chosen)
    for container, path in sorted(newest(root).items()):
        try:
            directories[container] = decode_container(read(path), path.name)
        except NearkinError:
            continue
    for container in ids:
        if container not in directories:
            raise Violation(f"the index has published container {container:016x}, which is not there, or not whole")
    for table in ("chunks", "features", "segments"):
        for value in entries.get(table, {}).values():
            (row,) = np.frombuffer(value[:12], _LOCATED)
            directory = directories.get(int(row["container"]))
            if directory is None:
                raise Violation(f"the index's {table} name container {int(row['container']):016x}, which is not there")
            there = np.diff(directory.segments.bounds) > 0 if table == "segments" else directory.chunks.there
            entry = pending.get(int(row["container"]))
            if entry is not None and int(row["ordinal"]) in (entry.segments if table == "segments" else entry.chunks):
                raise Violation(
                    f"the index's {table} name number {int(row['ordinal'])} of container {int(row['container']):016x}, "
                    "which is pending delete: a put could use it"
                )
            if int(row["ordinal"]) >= len(there) or not there[int(row["ordinal"])]:
                raise Violation(
                    f"the index's {table} name number {int(row['ordinal'])} of container {int(row['container']):016x}, "
                    "which is not there any more"
                )


def check_no_orphans(store: Store) -> None:
    """Raise Violation if a container holds nothing that a version needs, or a partly written file is left.

    The bases of a dead block are needed as long as its container exists (docs/adr/0015).
    """
    manifests = [name for name, _ in store._manifests.names()]
    live_set = LiveSet(store._containers, store._manifests, manifests)
    there, staying = containers(store.root), set(live_set.segments) | set(live_set.chunks)
    while True:
        held = live_set.transitive_closure(live_set.chunks, staying)
        wider = staying | {container for container, mask in held.items() if mask.any()}
        if wider == staying:
            break
        staying = wider
    for container in sorted(there - staying):
        raise Violation(f"no version needs container {container:016x}, and no GC run frees it")
    scratch = store.root / "tmp"
    leftovers = list(scratch.iterdir()) if scratch.is_dir() else []
    if leftovers:
        raise Violation(f"half-written: {[path.name for path in leftovers]}")


def check_parity_has_objects(store: Store) -> None:
    """Raise Violation if parity of a deleted object is left."""
    names = [name for name, _ in LocalObjectStore(store.root).names(FOLDER)]
    orphans = [
        name for name in names if not (store.root / name.removeprefix(f"{FOLDER}/").removesuffix(SUFFIX)).is_file()
    ]
    if orphans:
        raise Violation(f"parity of deleted objects: {orphans[:3]}")


def check_index_equals_a_rebuilt_one(store: Store) -> None:
    """Raise Violation if the live index lacks a chunk or segment of a rebuilt one, or lists a version differently."""
    live = store._index.writable().entries()
    if store.rebuild_index().skipped:
        raise Violation("a rebuild had to leave something out")
    rebuilt = store._index.writable().entries()
    for table in ("containers", "versions", "marks"):
        if live[table] != rebuilt[table]:
            keys = live[table].keys() | rebuilt[table].keys()
            differing = {key for key in keys if live[table].get(key) != rebuilt[table].get(key)}
            raise Violation(f"index table {table}: {len(differing)} entries are not what a rebuild makes of them")
    for table in ("chunks", "segments"):  # a copy that was stored later is found once the first one is forgotten
        if not live[table].keys() <= rebuilt[table].keys():
            raise Violation(f"index table {table}: names what a rebuild does not find")


def newest(root: Path) -> dict[int, Path]:
    """Return the file of each container's valid generation.

    An older generation remains if a process died between writing the new one and deleting the old one.
    """
    found: dict[int, Path] = {}
    for path in sorted((root / "containers").rglob("*.nkc")):  # id, then id.0001, ...: by generation
        generation = path.name[17:21] if path.name[17:21] != "nkc" else ""
        container = int(path.name[:16], 16)
        before = found.get(container)
        if before is None or _generation(before) < int(generation or "0", 16):
            found[container] = path
    return found


def _generation(path: Path) -> int:
    middle = path.name[17:-4]
    return int(middle, 16) if middle else 0

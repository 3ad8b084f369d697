"""Restore a sample of a version and compare it with the stored digests.

    choose files -> restore -> read again -> digest equal?    -> the same as in a source folder?

Invariant: nothing is left behind, and a version passes only if every chosen file was restored with its digest.
"""

from __future__ import annotations

import logging
import os
import random
import secrets
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from blake3 import blake3

from nearkin.drill_report import FORMAT
from nearkin.trees.restore_counts import RestoreCounts, RestoreOptions
from nearkin_shared.errors import BadInput, Corrupt
from nearkin_shared.formats.tree_entry_group import DIGEST_BYTES, EntryKind, TreeEntry
from nearkin_shared.reading.tree_reader import TreeReader
from nearkin_shared.results import CONTENT_TYPE_TREE, VersionInfo
from nearkin_shared.validation import CONTENT_TYPE

if TYPE_CHECKING:
    from nearkin.store_copy import AnyStore

DEFAULT_SHARE = 0.05
CHOSEN_MAX = 1_000_000
"""Files of a sample, whose paths are held in memory; `--all` has no bound."""
MISMATCHES_MAX = 1000
PIECE_BYTES = 1 << 20
"""Unit of the sample of a version of `put`."""
READ_BYTES = 1 << 20
_log = logging.getLogger(__name__)
_READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class DrillOptions(NamedTuple):
    """Options of a drill."""

    share: float | None = None
    """Of the files of a tree, or of the bytes of a version of `put`; None: by `files`, or all."""
    files: int | None = None
    """Files of a tree, or pieces of a version of `put`."""
    seed: int = 0
    compare: Path | None = None
    """The source: a folder, or a file for a version of `put`."""
    temporary: Path | None = None


@dataclass(slots=True)
class DrillCounts:
    """Progress of a drill; another thread may read it."""

    files: int = 0
    restored_bytes: int = 0
    compared: int = 0
    """Files, or pieces of a version of `put`, that were compared with the source."""
    changed_since: int = 0
    """Files of the source with another size or mtime than the stored ones, or none."""
    missing: int = 0
    """Of these, files that the source does not have, or that cannot be read there."""
    mismatch_count: int = 0
    mismatches: list[dict[str, str]] = field(default_factory=list)

    def add_mismatch(self, path: bytes, reason: str) -> None:
        """Count a file that was not restored as it was stored."""
        self.mismatch_count += 1
        if len(self.mismatches) < MISMATCHES_MAX:
            shown = path.decode("utf-8", "backslashreplace")
            self.mismatches.append({"path": shown, "path_hex": path.hex(), "reason": reason})


def run_drill(store: AnyStore, key: str, version: int, options: DrillOptions, counts: DrillCounts) -> dict[str, Any]:
    """Restore a sample of a version; return the report. Damage is part of the report.

    Raises NotFound, BadInput (the temporary folder, the source), NoRoom.
    """
    started, moment = time.perf_counter(), datetime.now(UTC)
    info = store.info(key, version)
    is_tree = info.metadata.get(CONTENT_TYPE) == CONTENT_TYPE_TREE
    tree_digest = None
    with _temporary_folder(options.temporary) as folder:
        try:
            if is_tree:
                tree = store.tree(key, info.version)
                tree_digest = f"blake3:{tree.digest.hex()}"
                _drill_tree(store, info, tree, folder, options, counts)
            else:
                _drill_blob(store, info, folder, options, counts)
        except Corrupt as err:
            counts.add_mismatch(b"", str(err))
    if not counts.files and not counts.mismatch_count and info.size_bytes and not is_tree:
        counts.add_mismatch(b"", "nothing was restored")
    if not counts.compared and counts.changed_since:
        counts.add_mismatch(
            b"",
            f"nothing was compared with the source: {counts.missing:,} files are missing there, "
            f"{counts.changed_since - counts.missing:,} have changed; name the folder that was backed up",
        )
    return {
        "format": FORMAT,
        "key": key,
        "version": info.version,
        "created": info.created.astimezone(UTC).isoformat(),
        "kind": "tree" if is_tree else "blob",
        "digest": info.digest,
        "tree_digest": tree_digest,
        "size_bytes": info.size_bytes,
        "sample": {"share": options.share, "files": options.files, "seed": options.seed},
        "started": moment.isoformat(),
        "seconds": round(time.perf_counter() - started, 3),
        "files": counts.files,
        "bytes": counts.restored_bytes,
        "compared_with_source": options.compare is not None,
        "compared": counts.compared,
        "changed_since": counts.changed_since,
        "missing": counts.missing,
        "mismatch_count": counts.mismatch_count,
        "mismatches": counts.mismatches,
        "passed": not counts.mismatch_count,
    }


@contextmanager
def _temporary_folder(parent: Path | None) -> Iterator[Path]:
    """Yield a folder that is removed afterwards. Raises BadInput.

    An error of the caller is raised as it is: a folder that cannot be removed as well is a warning then.
    """
    try:
        name = tempfile.mkdtemp(prefix="nearkin-drill-", dir=parent)
    except OSError as err:
        raise BadInput(f'temporary folder "{parent or tempfile.gettempdir()}": {err.strerror}') from err
    try:
        yield Path(name)
    except BaseException:
        try:
            _remove_folder(os.fsencode(name))
        except OSError as err:
            _log.warning("temporary folder not removed; remove it path=%s reason=%s", name, err.strerror)
        raise
    try:
        _remove_folder(os.fsencode(name))
    except OSError as err:
        raise BadInput(f'temporary folder "{name}": cannot be removed: {err.strerror}; remove it') from err


def _remove_folder(folder: bytes) -> None:
    """Delete a folder, however deep its content is: folders in folders are moved up first.

    `shutil.rmtree` recurses, and fails at some 300 levels. Raises OSError.
    """
    prefix, moved = secrets.token_hex(8).encode(), 0
    while names := os.listdir(folder):
        for name in names:
            path = os.path.join(folder, name)
            if not stat.S_ISDIR(os.lstat(path).st_mode):
                os.unlink(path)
                continue
            os.chmod(path, 0o700)
            for below in os.listdir(path):
                inner = os.path.join(path, below)
                if stat.S_ISDIR(os.lstat(inner).st_mode):
                    os.chmod(inner, 0o700)  # a user may not move a folder that is not writable
                    os.rename(inner, os.path.join(folder, b"%s-%d" % (prefix, moved)))
                    moved += 1
                else:
                    os.unlink(inner)
            os.rmdir(path)
    os.rmdir(folder)


# --- trees -----------------------------------------------------------------------------------------------------------


def _drill_tree(
    store: AnyStore, info: VersionInfo, tree: TreeReader, target: Path, options: DrillOptions, counts: DrillCounts
) -> None:
    chosen = _choose(tree, options)
    accepts: Callable[[TreeEntry], bool] | None = None
    if chosen is not None:
        accepts = lambda entry: entry.path in chosen  # noqa: E731
    restored = RestoreCounts()
    store.restore(info.key, target, version=info.version, options=RestoreOptions(accepts=accepts), counts=restored)
    known = set[bytes]()
    for problem in restored.problems:
        if not problem.is_attribute:
            known.add(problem.path)
            counts.add_mismatch(problem.path, problem.reason)
    for placed in tree.entries():
        entry = placed.entry
        if not entry.name or entry.path in known or (chosen is not None and entry.path not in chosen):
            continue
        reason = _difference(entry, os.path.join(os.fsencode(target), entry.path))
        if reason is not None:
            if entry.kind not in (EntryKind.CHARACTER_DEVICE, EntryKind.BLOCK_DEVICE):  # need root
                counts.add_mismatch(entry.path, reason)
        elif entry.kind == EntryKind.FILE:
            counts.files += 1
            counts.restored_bytes += entry.content_bytes
        if options.compare is not None and entry.kind == EntryKind.FILE:
            _compare_source(entry, os.path.join(os.fsencode(options.compare), entry.path), counts)


def _choose(tree: TreeReader, options: DrillOptions) -> set[bytes] | None:
    """Return the paths of the files to restore, at least one; None: all entries."""
    if options.share is None and options.files is None:
        return None
    draw, chosen, seen = random.Random(options.seed), list[bytes](), 0  # noqa: S311 - a sample, no secret
    count = 1 if options.files is None else options.files
    rest = set[bytes]()
    for placed in tree.entries():
        if placed.entry.kind != EntryKind.FILE:
            continue
        seen += 1
        if options.share is not None and draw.random() < options.share:
            rest.add(placed.entry.path)
        elif len(chosen) < count:
            chosen.append(placed.entry.path)
        elif (place := draw.randrange(seen)) < count:
            chosen[place] = placed.entry.path
        if len(rest) > CHOSEN_MAX:
            raise BadInput(f"sample: has more than {CHOSEN_MAX:,} files; take a smaller one, or --all")
    return rest or set(chosen)


def _difference(entry: TreeEntry, path: bytes) -> str | None:
    """Return how a restored entry differs from the stored one."""
    try:
        status = os.lstat(path)
        if entry.kind == EntryKind.SYMLINK:
            return None if os.readlink(path) == entry.target else "is a symlink to another target"
        if entry.kind != EntryKind.FILE:
            return None
        if not stat.S_ISREG(status.st_mode) or status.st_size != entry.size:
            return f"has {status.st_size:,} bytes after the restore, {entry.size:,} are stored"
        return None if _file_digest(entry, path) == entry.digest else "has another digest after the restore"
    except OSError as err:
        return f"is missing after the restore: {(err.strerror or 'error').lower()}"


def _file_digest(entry: TreeEntry, path: bytes) -> bytes:
    """Return the digest of a file's content without the holes of the entry. Raises OSError."""
    if not entry.content_bytes:
        return b""
    hasher = blake3()
    extents = ((0, entry.size),) if entry.extents is None else entry.extents
    with os.fdopen(os.open(path, _READ_FLAGS), "rb") as file:
        for offset, length in extents:
            file.seek(offset)
            left = length
            while left and (piece := file.read(min(left, READ_BYTES))):
                hasher.update(piece)
                left -= len(piece)
    return hasher.digest(length=DIGEST_BYTES)


def _compare_source(entry: TreeEntry, path: bytes, counts: DrillCounts) -> None:
    """Compare a stored file with the source, unless that has changed since."""
    try:
        status = os.lstat(path)
        is_same = stat.S_ISREG(status.st_mode) and (status.st_size, status.st_mtime_ns) == (entry.size, entry.mtime_ns)
        if not is_same:
            counts.changed_since += 1
            return
        digest = _file_digest(entry, path)
    except OSError:
        counts.changed_since += 1
        counts.missing += 1
        return
    counts.compared += 1
    if digest != entry.digest:
        counts.add_mismatch(entry.path, "differs from the source, which has the same size and mtime")


# --- versions of put -------------------------------------------------------------------------------------------------


def _drill_blob(store: AnyStore, info: VersionInfo, target: Path, options: DrillOptions, counts: DrillCounts) -> None:
    path = target / "restored"
    with path.open("w+b") as file:
        for start, stop in _choose_pieces(info.size_bytes, options):
            try:
                with closing(store.get(info.key, info.version, start=start, stop=stop)) as content:
                    file.seek(0)
                    file.truncate()
                    content.write_to(file)
            except Corrupt as err:
                counts.add_mismatch(b"", f"bytes {start:,} to {stop:,}: {err}")
                continue
            file.flush()
            counts.files += 1
            counts.restored_bytes += stop - start
            if file.tell() != stop - start and path.stat().st_size != stop - start:
                counts.add_mismatch(b"", f"bytes {start:,} to {stop:,}: {path.stat().st_size:,} were restored")
            is_whole = (start, stop) == (0, info.size_bytes)
            if is_whole and info.digest != f"blake3:{blake3().update_mmap(path).hexdigest()}":
                counts.add_mismatch(b"", "has another digest after the restore")
            if options.compare is not None:
                counts.compared += 1
                if not _equals_source(options.compare, path, start, stop, info):
                    counts.add_mismatch(b"", f"bytes {start:,} to {stop:,} differ from the source")


def _choose_pieces(size_bytes: int, options: DrillOptions) -> Iterator[tuple[int, int]]:
    """Yield the ranges to restore; the whole version if all of it is chosen."""
    pieces = max(1, -(-size_bytes // PIECE_BYTES))
    count = options.files if options.files is not None else max(1, round(pieces * (options.share or 1.0)))
    if (options.share is None and options.files is None) or count >= pieces:
        yield 0, size_bytes
        return
    for number in sorted(random.Random(options.seed).sample(range(pieces), min(count, CHOSEN_MAX))):  # noqa: S311
        yield number * PIECE_BYTES, min((number + 1) * PIECE_BYTES, size_bytes)


def _equals_source(source: Path, restored: Path, start: int, stop: int, info: VersionInfo) -> bool:
    """Compare a restored range with that of the source file. Raises BadInput."""
    try:
        with source.open("rb") as first, restored.open("rb") as second:
            if os.fstat(first.fileno()).st_size != info.size_bytes:
                return False
            first.seek(start)
            left = stop - start
            while left:
                count = min(left, READ_BYTES)
                if first.read(count) != second.read(count):
                    return False
                left -= count
    except OSError as err:
        raise BadInput(f'--compare "{source}": {(err.strerror or "cannot be read").lower()}') from err
    return True

"""Continue a file of which a killed backup stored the start.

    checkpoint:  ... | first bytes of the file |   entry INCOMPLETE, with status and extents; state of the hasher
    next backup: ... | taken over              | read from there on

Invariant: an entry is continued only if its status proves the file unchanged, and the state of the hasher has the
digest of the bytes that are taken over. The digest of the whole file is then the BLAKE3 of what a restore returns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import msgspec
from blake3 import blake3

from nearkin_shared.errors import BadInput
from nearkin_shared.formats.tree_entry_group import DIGEST_BYTES, EntryFlag, TreeEntry
from nearkin_shared.kernels.content_hasher import ContentHasher

if TYPE_CHECKING:
    from nearkin.trees.parent_tree import FoundEntry

PARTIAL_BYTES_MIN = 4 << 20
"""No checkpoint ends inside a smaller file, which takes less time to read than a checkpoint."""

Extents = tuple[tuple[int, int], ...]


class SupportsDigest(Protocol):
    """A hasher of contents: `blake3`, or a slower one whose state can be stored."""

    def update(self, data: memoryview, /) -> object:
        """Add bytes."""

    def digest(self, length: int = 32) -> bytes:
        """Return the BLAKE3 of the bytes so far."""


class PartialFile(NamedTuple):
    """The start of a file that is being read, as a checkpoint stores it."""

    entry: TreeEntry
    hash_state: bytes


class FileProgress(NamedTuple):
    """Where the reading of a file begins, and the function that each piece is reported to."""

    hasher: SupportsDigest
    done_bytes: int
    """Content that the tree has already."""
    on_piece: Callable[[int], None]
    """Called with the bytes of each piece, once it is in the tree."""


def new_progress() -> FileProgress:
    """Return the progress of a file that is read from its start, reported to no function."""
    return FileProgress(blake3(), 0, lambda _: None)


def partial_file(entry: TreeEntry, stretches: Extents, hasher: ContentHasher) -> PartialFile:
    """Return the part of a file that the hasher has; `entry` is that of the whole file."""
    extents = truncated(stretches, hasher.size_bytes)
    flags = entry.flags | EntryFlag.INCOMPLETE
    return PartialFile(entry._replace(flags=flags, digest=hasher.digest(DIGEST_BYTES), extents=extents), hasher.state())


def stored_hasher(found: FoundEntry, stretches: Extents) -> ContentHasher | None:
    """Return a hasher of the bytes that a checkpoint has of a file.

    None if they cannot be continued.

    `found` has the status of the file. `stretches`: (offset, bytes) of its data.
    """
    entry, state = found.placed.entry, found.parent.reader.summary.hash_state
    if not found.parent.is_checkpoint or isinstance(state, msgspec.UnsetType):
        return None
    if entry.extents != truncated(stretches, entry.content_bytes):
        return None
    try:
        hasher = ContentHasher(state)
    except BadInput:
        return None
    if hasher.size_bytes != entry.content_bytes or hasher.digest(DIGEST_BYTES) != entry.digest:
        return None  # the state is of the last entry of its checkpoint, and this one was incomplete for another reason
    return hasher


def truncated(stretches: Sequence[tuple[int, int]], size_bytes: int) -> Extents:
    """Return the first `size_bytes` of stretches of data."""
    kept = []
    for offset, length in stretches:
        if size_bytes <= 0:
            break
        kept.append((offset, min(length, size_bytes)))
        size_bytes -= length
    return tuple(kept)


def remaining(stretches: Sequence[tuple[int, int]], done_bytes: int) -> Extents:
    """Return what is behind the first `done_bytes` of stretches of data."""
    kept = []
    for offset, length in stretches:
        skipped = min(done_bytes, length)
        done_bytes -= skipped
        if skipped < length:
            kept.append((offset + skipped, length - skipped))
    return tuple(kept)


def joined_extents(stretches: Sequence[tuple[int, int]]) -> Extents:
    """Return ascending stretches of data, adjacent ones as one."""
    joined: list[tuple[int, int]] = []
    for offset, length in stretches:
        if joined and sum(joined[-1]) == offset:
            joined[-1] = (joined[-1][0], joined[-1][1] + length)
        else:
            joined.append((offset, length))
    return tuple(joined)

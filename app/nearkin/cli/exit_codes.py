"""Define the exit codes of the command.

Where restic has a code for a case, the code is the same. Invariant: a code keeps its meaning.
"""

from __future__ import annotations

import errno
from enum import IntEnum

from nearkin_shared.errors import (
    BadInput,
    Corrupt,
    FormatTooNew,
    NoRoom,
    NoStore,
    NotFound,
    PreconditionFailed,
    StoreLocked,
    WrongKey,
)


class ExitCode(IntEnum):
    """The meaning of each exit code of a command."""

    DONE = 0
    FAILED = 1
    """Unreachable, denied, or any other failure without a code of its own."""
    USAGE = 2
    """A wrong command line, or a setting, key, range or file that is refused."""
    INCOMPLETE = 3
    """`backup` could not read some entries, `restore` not write some, or `copy` some versions; all else is done."""
    NOT_FOUND = 4
    """The store has no such key or version."""
    DAMAGED = 5
    """Stored data are damaged; `get --salvage` wrote what is left of them."""
    NO_ROOM = 6
    """A device is full, or a quota of it is used up: that of the store, or of what a command writes."""
    PRECONDITION_FAILED = 7
    """The key's newest version is not the one that a conditional put names; nothing was stored."""
    TOO_NEW = 8
    """Stored data have the format of a later Nearkin; they are not damaged, and this one cannot read them."""
    NO_STORE = 10
    """There is no store at the path."""
    LOCKED = 11
    """Another process has the store; --wait waits for it."""
    WRONG_KEY = 12
    """The key-encryption key of an encrypted store is wrong or missing."""
    HUNG_UP = 129
    INTERRUPTED = 130
    PIPE_CLOSED = 141
    """The reader of stdout went away (silent)."""
    TERMINATED = 143


def is_device_full(err: OSError) -> bool:
    """Return whether a device, or a quota of it, has no room left."""
    return err.errno in (errno.ENOSPC, errno.EDQUOT)


_CODES: tuple[tuple[type[Exception], ExitCode], ...] = (
    (WrongKey, ExitCode.WRONG_KEY),
    (BadInput, ExitCode.USAGE),
    (NoStore, ExitCode.NO_STORE),
    (NotFound, ExitCode.NOT_FOUND),
    (Corrupt, ExitCode.DAMAGED),
    (FormatTooNew, ExitCode.TOO_NEW),
    (NoRoom, ExitCode.NO_ROOM),
    (PreconditionFailed, ExitCode.PRECONDITION_FAILED),
    (StoreLocked, ExitCode.LOCKED),
)


def exit_code_of(err: Exception) -> ExitCode:
    """Return the exit code for an error."""
    if isinstance(err, OSError) and is_device_full(err):
        return ExitCode.NO_ROOM
    return next((code for kind, code in _CODES if isinstance(err, kind)), ExitCode.FAILED)

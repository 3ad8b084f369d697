"""Exit codes of the command. Invariant: a code keeps its meaning; restic's codes are used for the cases it knows."""

from __future__ import annotations

from enum import IntEnum

from nearkin.errors import BadInput, NoStore, StoreLocked


class ExitCode(IntEnum):
    """What the exit code of a command means."""

    DONE = 0
    FAILED = 1
    """Not found, damaged, unreachable, denied, out of room, or any other failure."""
    USAGE = 2
    """A wrong command line, or a setting, key, range or file that is refused."""
    INCOMPLETE = 3
    """`put -r` could not read some files; all others are stored."""
    NO_STORE = 10
    """There is no store at the path."""
    LOCKED = 11
    """Another process has the store; --wait waits for it."""
    HUNG_UP = 129
    INTERRUPTED = 130
    PIPE_CLOSED = 141
    """The reader of stdout went away (silent)."""
    TERMINATED = 143


_CODES: tuple[tuple[type[Exception], ExitCode], ...] = (
    (BadInput, ExitCode.USAGE),
    (NoStore, ExitCode.NO_STORE),
    (StoreLocked, ExitCode.LOCKED),
)


def exit_code_of(err: Exception) -> ExitCode:
    """Return the exit code for an error."""
    return next((code for kind, code in _CODES if isinstance(err, kind)), ExitCode.FAILED)

"""Notes of the processes that have an LMDB environment open, to detect crashes.

    open.<boot>.<process>.<start>.<number>      an empty file in the environment's folder, removed on close
    open.damage                                 LMDB reported damage; removed with the environment

LMDB reads its file through memory: damage may end the process (SIGSEGV, SIGBUS, an assertion), and then every later
one. The note of a process that died makes the next one check all pages first (page_check.py). A process killed for
other reasons leaves a note too: that costs a check, and no rebuild.

A note need not survive a power cut: the next process that meets the damage leaves another one.
"""

from __future__ import annotations

import atexit
import os
from contextlib import suppress
from functools import cache
from itertools import count
from pathlib import Path

from nearkin_shared.utils.private_files import open_private

PREFIX = "open."
DAMAGE_NOTE = PREFIX + "damage"
"""Note that LMDB reported damage: the next process that opens the environment sets it aside."""
CRASHES_MAX = 5
"""Notes of dead processes, without a close in between, that mean damage even if the page check finds none.

A process that has had the index open for SETTLED_SECONDS (environments.py) removes the notes of earlier ones.
"""
_numbers = count(1)
_written: set[Path] = set()
"""Notes of this process."""


@cache
def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", "")[:16]
    except OSError:
        return "unknown"


def _start_time(process: int) -> str | None:
    """Return when a process started, in ticks since boot.

    None if it does not exist, "0" if the time is unknown.
    """
    try:
        # The name may contain spaces and parentheses; behind it the start time is the 20th field.
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19]
    except (FileNotFoundError, ProcessLookupError):
        if Path("/proc/self/stat").exists():
            return None
    except (OSError, IndexError):
        pass
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return None
    except OSError:
        pass
    return "0"


def write_note(folder: Path) -> Path | None:
    """Write a note that this process opens an environment; None if that is impossible."""
    process = os.getpid()
    note = folder / f"{PREFIX}{_boot()}.{process}.{_start_time(process)}.{next(_numbers)}"
    try:
        os.close(open_private(note, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
    except OSError:  # read-only, or a full disk: then a crash is not noticed
        return None
    _written.add(note)
    return note


def write_damage_note(folder: Path) -> None:
    """Write the note that an environment is damaged, if that is possible."""
    with suppress(OSError):
        os.close(open_private(folder / DAMAGE_NOTE, os.O_WRONLY | os.O_CREAT))


def remove_note(note: Path | None) -> None:
    """Remove a note."""
    if note is not None:
        _written.discard(note)
        with suppress(OSError):
            note.unlink()


def dead_notes(folder: Path) -> list[Path]:
    """Return the notes of processes that no longer exist."""
    try:
        names = [name for name in os.listdir(folder) if name.startswith(PREFIX)]
    except OSError:
        return []
    return [folder / name for name in names if not _is_alive(name)]


def _is_alive(name: str) -> bool:
    parts = name.split(".")
    return (
        len(parts) == 5
        and parts[1] == _boot()
        and parts[2].isdecimal()
        and len(parts[2]) <= 10
        and _start_time(int(parts[2])) == parts[3]
    )


def _remove_notes() -> None:
    """Remove the notes of a process that ends in order, even if it closed nothing."""
    for note in list(_written):
        if note.name.split(".")[2] == str(os.getpid()):
            remove_note(note)


atexit.register(_remove_notes)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_written.clear)

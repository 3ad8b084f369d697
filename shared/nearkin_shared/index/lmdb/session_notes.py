"""Notes of the processes that have an LMDB environment open, so that a crash by a damaged page is noticed.

    open.<boot>.<process>.<start>.<number>      an empty file in the environment's folder, removed when it is closed

LMDB reads its file through memory: damage may end the process (SIGSEGV, SIGBUS, an assertion), and then each one after
it. The note of a process that died makes the next one check all pages first (page_check.py). A process that was killed
for other reasons leaves one too: that costs a check, and no rebuild.

A note need not survive a power cut: the process that meets the damage after it leaves another one.
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
CRASHES_MAX = 5
"""So many notes of dead processes, and no close in between, mean damage that a check of the pages does not show."""
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
    """Return when a process was started, in ticks since boot; None where there is none, "0" if it is unknown."""
    try:
        # Behind the name, which may hold spaces and parentheses, the start is the 20th field.
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
    """Note that this process opens an environment; None where nothing can be written in the folder."""
    process = os.getpid()
    note = folder / f"{PREFIX}{_boot()}.{process}.{_start_time(process)}.{next(_numbers)}"
    try:
        os.close(open_private(note, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
    except OSError:  # read-only, or a full disk: then a crash is not noticed
        return None
    _written.add(note)
    return note


def remove_note(note: Path | None) -> None:
    """Remove a note."""
    if note is not None:
        _written.discard(note)
        with suppress(OSError):
            note.unlink()


def dead_notes(folder: Path) -> list[Path]:
    """Return the notes that processes left which are not there any more."""
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


def _forget_notes() -> None:
    """A process that ends in order has not crashed, even if it closed nothing."""
    for note in list(_written):
        if note.name.split(".")[2] == str(os.getpid()):
            remove_note(note)


atexit.register(_forget_notes)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_written.clear)

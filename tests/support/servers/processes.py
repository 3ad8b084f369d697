"""Manage processes that outlive the command that started them.

Invariant: only processes that this module started are ever signalled.

A member's note holds its pid and the kernel's start time: the kernel may have given the pid to another process since.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from nearkin_shared.utils.frozen import frozen

TERM_SECONDS = 45.0
"""A worker finishes its batch and its open container first."""
KILL_SECONDS = 20.0


@frozen
class Member:
    """A process by name.

    `started`: clock ticks since boot, and the boot's id, so that a reboot is noticed too.
    """

    name: str
    pid: int
    started: str

    @classmethod
    def of(cls, name: str, pid: int) -> Member:
        """Return the note of a process that runs. Raises ProcessLookupError."""
        started = _start_time(pid)
        if started is None:
            raise ProcessLookupError(pid)
        return cls(name, pid, started)

    @property
    def alive(self) -> bool:
        """Return whether the process with this start time runs."""
        return _start_time(self.pid) == self.started

    def write(self, folder: Path) -> None:
        """Write the note, whole or not at all."""
        fresh = folder / f".{self.name}.new"
        fresh.write_text(json.dumps(asdict(self)))
        fresh.replace(folder / f"{self.name}.pid")

    def forget(self, folder: Path) -> None:
        """Delete the note."""
        (folder / f"{self.name}.pid").unlink(missing_ok=True)

    def end(self) -> bool:
        """End the process by SIGTERM, and after TERM_SECONDS by SIGKILL; return whether SIGTERM was enough."""
        try:
            handle = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return True
        try:
            if not self.alive:  # checked after the handle was opened: a handle never changes its process
                return True
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(handle, signal.SIGTERM)
            if _wait_for_end(handle, TERM_SECONDS):
                return True
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(handle, signal.SIGKILL)
            _wait_for_end(handle, KILL_SECONDS)
            return False
        finally:
            os.close(handle)


def read(folder: Path, name: str) -> Member | None:
    """Return the note of a member, None if there is none."""
    try:
        return Member(**json.loads((folder / f"{name}.pid").read_text()))
    except (FileNotFoundError, ValueError, TypeError):
        return None


def launch(
    name: str, command: Sequence[str], log: Path, folder: Path, environment: Mapping[str, str] | None = None
) -> Member:
    """Start a program in a session of its own, so that Ctrl-C in this one does not reach it; keep its note.

    `environment`: variables in addition to those of this process.
    """
    with log.open("ab") as output:
        started = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            env={**os.environ, **(environment or {})},
        )
    started.returncode = 0  # it is meant to outlive this process, which never waits for it
    member = Member.of(name, started.pid)
    member.write(folder)
    return member


def _start_time(pid: int) -> str | None:
    """Return the start time of a process, or None if it does not run or waits to be reaped."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return None if fields[0] in "ZX" else f"{fields[19]} {boot}"


def _wait_for_end(handle: int, seconds: float) -> bool:
    waiting = select.poll()
    waiting.register(handle, select.POLLIN)
    return bool(waiting.poll(seconds * 1000))

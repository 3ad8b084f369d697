"""Measure commands and functions.

The process that measures commands stays small and reads no corpus into memory: the peak memory that the kernel
reports for a child is never below that of the process it was forked from.

Invariant: every command is timed the same way, and its bytes are on disk before the clock stops.
"""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from nearkin_shared.errors import BadInput, PermanentError
from nearkin_shared.utils.frozen import frozen
from nearkin_shared.utils.terminal import printable

SHA1_BLOCK_BYTES = 8192  # the target of a chunk
COPY_BYTES = 1 << 20
COMMAND_SECONDS_MAX = 4 * 3600
"""Of one command; a put of 100 GB at 10 MB/s takes less."""
ANSWER_SECONDS_MAX = 60
"""Of a command that is asked for its version, or makes one delta."""
OUTPUT_BYTES_MAX = 4096
"""Of what a command that failed wrote to stderr, its end."""
_SHA1_SECONDS = 0.2
_SHA1_BLOCKS_A_ROUND = 500

Steps = Callable[[int, int, str], None]
"""Called with the number of steps done, of all steps, and the name of the current one."""


@dataclass(frozen=True, slots=True)
class RunPlan:
    """How a suite is run: on which core, how often, and by which command."""

    core: int | None
    runs: int
    warmups: int
    command: str
    steps: Steps | None


class CommandFailed(PermanentError):
    """A measured command did not end with 0, or what it gave back is not what it was given."""


@frozen
class Cost:
    """The cost of one command: wall time, processor time and peak memory.

    `sync_seconds` of the wall seconds are for the file system.
    """

    seconds: float
    sync_seconds: float
    cpu_seconds: float
    """Of the process and those it waited for, in user and system code; writing out by the system is not in it."""
    peak_bytes: int


def choose_core(core: int | None) -> int | None:
    """Return the core to measure on: `core`, or the last one this process may use.

    None if none can be chosen. Raises BadInput for a core that this process may not use, and for any on a system that
    cannot pin.
    """
    if not hasattr(os, "sched_getaffinity"):
        if core is not None:
            raise BadInput(f"--core {core}: this system cannot keep a process on one core; leave it out")
        return None
    allowed = sorted(os.sched_getaffinity(0))
    if core is None:
        return allowed[-1]
    if core not in allowed:
        raise BadInput(f"--core {core}: choose one of {', '.join(map(str, allowed))}")
    return core


@contextmanager
def pin_to_core(core: int | None) -> Iterator[None]:
    """Keep this process, and all it starts, on one core while the block runs."""
    if core is None:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def run(
    command: Sequence[str],
    environment: Mapping[str, str],
    *,
    stdin: Path | Sequence[Path] = (),
    stdout: Path | None = None,
    sync: Path | None = None,
) -> Cost:
    """Run a command and return its cost.

    stdin: a file, or several that `cat` joins: its time is part of the command's.
    sync: a folder; dirty pages of its file system are written out before the clock stops.
    Raises CommandFailed with the last line it wrote to stderr.
    """
    with ExitStack() as files:
        errors = files.enter_context(tempfile.TemporaryFile())
        target = files.enter_context(open(stdout or os.devnull, "wb"))
        started = time.perf_counter()
        source: IO[bytes] = files.enter_context(open(stdin if isinstance(stdin, Path) else os.devnull, "rb"))
        if not isinstance(stdin, Path) and stdin:
            joined = files.enter_context(subprocess.Popen(["cat", "--", *map(str, stdin)], stdout=subprocess.PIPE))
            assert joined.stdout is not None
            source = joined.stdout
        process = subprocess.Popen(command, stdin=source, stdout=target, stderr=errors, env=dict(environment))
        source.close()  # else `cat` is never notified that its reader has ended
        usage = reap(process)
        ended = time.perf_counter()
        if process.returncode != 0:
            raise CommandFailed(ending(command, process.returncode, errors))
    if sync is not None:
        write_out(sync)
    synced = time.perf_counter()
    return Cost(synced - started, synced - ended, *usage)


@contextmanager
def kill_on_timeout(process: subprocess.Popen[Any]) -> Iterator[None]:
    """Kill a process that still runs `COMMAND_SECONDS_MAX` after the block began."""
    timer = threading.Timer(COMMAND_SECONDS_MAX, process.kill)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def reap(process: subprocess.Popen[bytes]) -> tuple[float, int]:
    """Wait for a process; return its processor time, seconds, and peak memory, bytes.

    Its `returncode` is set. It is killed if the wait is interrupted.
    """
    try:
        with kill_on_timeout(process):
            _, status, usage = os.wait4(process.pid, 0)
    except BaseException:
        process.kill()
        process.wait()
        raise
    process.returncode = os.waitstatus_to_exitcode(status)  # reaped here: Popen must not wait for it again
    return usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024


def ending(command: Sequence[str], code: int, errors: IO[bytes]) -> str:
    """Return how a command failed: its exit code and the last line of the file `errors`."""
    errors.seek(max(0, errors.seek(0, os.SEEK_END) - OUTPUT_BYTES_MAX))
    lines = errors.read(OUTPUT_BYTES_MAX).decode(errors="replace").strip().splitlines()
    return f"{' '.join(command)}: exit {code}: {lines[-1] if lines else 'no output'}"


def run_short(command: Sequence[str], cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run a short command to its end and return its output; non-text bytes are replaced.

    Raises CommandFailed if it cannot be run, or has not ended in time: all its processes are killed then.
    """
    try:
        with subprocess.Popen(
            command, cwd=cwd, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True, errors="replace", start_new_session=True,
        ) as process:  # fmt: skip
            try:
                outputs = process.communicate(timeout=ANSWER_SECONDS_MAX)
            except BaseException:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                raise
    except subprocess.TimeoutExpired as error:
        raise CommandFailed(f"{' '.join(command)}: did not end within {ANSWER_SECONDS_MAX} s") from error
    except OSError as error:
        raise CommandFailed(f"{' '.join(command)}: {error.strerror}") from error
    return subprocess.CompletedProcess(command, process.returncode, *outputs)


def first_line(done: subprocess.CompletedProcess[str]) -> str:
    """Return the first line of a command's stdout, or of stderr if stdout is empty, as text."""
    lines = (done.stdout.strip() or done.stderr.strip()).splitlines()
    return printable(lines[0]) if lines else "unknown"


def write_out(folder: Path) -> None:
    """Have what is dirty on a folder's file system written out."""
    subprocess.run(["sync", "--file-system", str(folder)], check=True)


def stored_bytes(folder: Path) -> int:
    """Return the total size of the files below `folder`, or of a file.

    As `du --apparent-size`, without folders.
    """
    if folder.is_file():
        return folder.stat().st_size
    return sum(
        os.stat(os.path.join(parent, name), follow_symlinks=False).st_size
        for parent, _, names in os.walk(folder)
        for name in names
    )


def same_bytes(one: Path, other: Path) -> bool:
    """Compare two files, byte for byte."""
    with one.open("rb") as first, other.open("rb") as second:
        while True:
            block = first.read(COPY_BYTES)
            if block != second.read(COPY_BYTES):
                return False
            if not block:
                return True


def read_through(paths: Sequence[Path]) -> int:
    """Read files once, so that none is measured with a cold cache; return their total length."""
    total_bytes = 0
    for path in paths:
        with path.open("rb", buffering=0) as file:
            while block := file.read(COPY_BYTES):
                total_bytes += len(block)
    return total_bytes


def sha1_mbps(seconds: float = _SHA1_SECONDS, clock: Callable[[], float] = time.perf_counter) -> float:
    """Return the speed of one SHA-1 stream over 8 KiB blocks, MB/s.

    OpenSSL through `hashlib`, call cost included. It runs for `seconds` of `clock`: wall time, or `time.thread_time`
    for processor time.
    """
    block = bytes(SHA1_BLOCK_BYTES)
    blocks = 0
    started = clock()
    while (elapsed := clock() - started) < seconds:
        for _ in range(_SHA1_BLOCKS_A_ROUND):
            hashlib.sha1(block, usedforsecurity=False).digest()
        blocks += _SHA1_BLOCKS_A_ROUND
    return blocks * SHA1_BLOCK_BYTES / elapsed / 1e6

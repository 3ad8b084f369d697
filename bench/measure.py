"""Measuring. Invariant: every command is timed the same way, and its bytes are on disk before the clock stops.

This process stays small and reads no corpus: the peak memory that the kernel reports for a child is never below that of
the process it was forked from.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

SHA1_BLOCK_BYTES = 8192  # the target of a chunk
_SHA1_SECONDS = 0.5
_SHA1_BLOCKS_A_ROUND = 2000


class CommandError(Exception):
    """A measured command did not end with 0; the text has its last line."""


@dataclass(frozen=True, slots=True)
class Cost:
    """What one command took: wall seconds (`sync_seconds` of them for the file system) and peak memory, bytes."""

    seconds: float
    sync_seconds: float
    peak_bytes: int


def pin(core: int) -> None:
    """Keep this process and all it starts on one core."""
    os.sched_setaffinity(0, {core})


def run(
    command: Sequence[str],
    environment: Mapping[str, str],
    *,
    stdin: Path | None = None,
    stdout: Path | None = None,
    sync: Path | None = None,
) -> Cost:
    """Run a command and return its cost.

    sync: a folder; what is dirty on its file system is written out before the clock stops.
    Raises CommandError with the last line it wrote to stderr.
    """
    with (
        open(stdin or os.devnull, "rb") as source,
        open(stdout or os.devnull, "wb") as target,
        open(os.devnull, "r+b") if sync is None else open(sync / "stderr.txt", "w+b") as errors,
    ):
        started = time.perf_counter()
        process = subprocess.Popen(command, stdin=source, stdout=target, stderr=errors, env=dict(environment))
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)  # reaped above: Popen must not wait for it again
        ended = time.perf_counter()
        if process.returncode != 0:
            errors.seek(0)
            said = errors.read().decode(errors="replace").strip().splitlines()
            raise CommandError(f"{' '.join(command)}: exit {process.returncode}: {said[-1] if said else ''}")
    if sync is not None:
        write_out(sync)
    synced = time.perf_counter()
    return Cost(synced - started, synced - ended, usage.ru_maxrss * 1024)


def write_out(folder: Path) -> None:
    """Have what is dirty on a folder's file system written out."""
    subprocess.run(["sync", "--file-system", str(folder)], check=True)


def stored_bytes(folder: Path) -> int:
    """Return the lengths of all files below `folder`, summed (as `du --apparent-size` counts them, folders aside)."""
    return sum(
        os.stat(os.path.join(parent, name), follow_symlinks=False).st_size
        for parent, _, names in os.walk(folder)
        for name in names
    )


def same_bytes(one: Path, other: Path) -> bool:
    """Compare two files, byte for byte."""
    with one.open("rb") as first, other.open("rb") as second:
        while True:
            block = first.read(1 << 20)
            if block != second.read(1 << 20):
                return False
            if not block:
                return True


def read_through(paths: Sequence[Path]) -> int:
    """Read files once, so that none is measured with a cold cache, and return their lengths, summed."""
    total_bytes = 0
    for path in paths:
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                total_bytes += len(block)
    return total_bytes


def sha1_megabytes_per_second() -> float:
    """Return the speed of one SHA-1 stream over 8 KiB blocks: OpenSSL through `hashlib`, call cost included."""
    block = bytes(SHA1_BLOCK_BYTES)
    blocks = 0
    started = time.perf_counter()
    while (elapsed := time.perf_counter() - started) < _SHA1_SECONDS:
        for _ in range(_SHA1_BLOCKS_A_ROUND):
            hashlib.sha1(block).digest()
        blocks += _SHA1_BLOCKS_A_ROUND
    return blocks * SHA1_BLOCK_BYTES / elapsed / 1e6

"""Test the pages of large memory, as the kernel reports them."""

from __future__ import annotations

import mmap
import os
import platform
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from nearkin_shared.limits import MIB
from nearkin_shared.types import U8
from nearkin_shared.utils.memory import CACHED_SECONDS_MAX, HUGE_BYTES, SMALL_BYTES, Mapper, release_file_pages

THP = Path("/sys/kernel/mm/transparent_hugepage/enabled")
linux_only = pytest.mark.skipif(sys.platform != "linux" or not THP.exists(), reason="huge pages are Linux's")


def flags_of(array: U8) -> set[str]:
    """Return the kernel's flags of the mapping that holds an array.

    "hg" wants huge pages, "nh" none.
    """
    address = array.ctypes.data
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        bounds = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
        if bounds is not None:
            inside = int(bounds[1], 16) <= address < int(bounds[2], 16)
        elif inside and line.startswith("VmFlags:"):
            return set(line.split()[1:])
    raise AssertionError(f"no mapping holds {address:x}")


class Ticking:
    """A clock that advances by a fixed time at each touch."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.now, self.asked = seconds, 0.0, 0

    def __call__(self) -> float:
        self.asked += 1
        self.now += self.seconds
        return self.now


@pytest.mark.parametrize("size_bytes", [0, 1, 4096, HUGE_BYTES - 1, HUGE_BYTES, HUGE_BYTES + 1, 18 * MIB + 5])
@pytest.mark.parametrize("seconds", [0.0, 2 * CACHED_SECONDS_MAX])
def test_memory_is_zeroed_and_writable_to_its_end(size_bytes: int, seconds: float) -> None:
    array = Mapper(Ticking(seconds)).map(size_bytes)
    assert array.shape == (size_bytes,)
    assert not array.any()
    array[:] = 7
    assert int(array.sum()) == 7 * size_bytes


@linux_only
def test_huge_pages_are_requested_while_they_are_fast() -> None:
    mapper = Mapper(Ticking(CACHED_SECONDS_MAX / 2))
    arrays = [mapper.map(4 * MIB) for _ in range(40)]
    assert all("hg" in flags_of(array) for array in arrays)


@linux_only
def test_slow_huge_page_makes_the_next_ones_small() -> None:
    """Huge pages are tried again later."""
    clock = Ticking(2 * CACHED_SECONDS_MAX)
    mapper = Mapper(clock)
    arrays = [mapper.map(SMALL_BYTES // 4) for _ in range(10)]
    assert all("nh" in flags_of(array) for array in arrays)
    assert clock.asked == 2 * 2, "the first and the sixth page must be tried, with a reading before and after"
    clock.seconds = 0.0
    arrays += [mapper.map(SMALL_BYTES // 4) for _ in range(2)]
    assert "hg" in flags_of(arrays[-1])


@linux_only
def test_less_than_a_huge_page_is_allocated_at_once() -> None:
    array = Mapper().map(MIB)
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    array[:] = 1
    assert resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before < MIB // 4096 // 4


FREED = """
import resource
import numpy as np
from nearkin_shared.utils.memory import give_back_free, large_from_system

def held_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()

large_from_system()
before = held_bytes()
pieces = [np.ones(200_000, np.uint8) for _ in range(500)]
kept = pieces[9::10]
del pieces
between = held_bytes()
give_back_free()
print(between - before, held_bytes() - before)
assert all(piece.all() for piece in kept)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="it is glibc's malloc")
def test_free_memory_between_used_pieces_is_returned() -> None:
    """A heap shrinks by itself at its end only, not between pieces in use."""
    done = subprocess.run([sys.executable, "-c", FREED], capture_output=True, text=True, check=True)
    between, after = map(int, done.stdout.split())
    assert between > 80_000_000
    assert after < 30_000_000


HEAPS = """
import ctypes, sys, tempfile, threading
from nearkin_shared.utils.memory import one_heap

if sys.argv[1:]:
    one_heap()
together = threading.Barrier(4)

def take():
    together.wait(60)
    kept = [bytearray(100_000) for _ in range(10)]  # malloc's, not Python's own of small pieces
    together.wait(60)

threads = [threading.Thread(target=take) for _ in range(4)]
for one in threads: one.start()
for one in threads: one.join()
libc = ctypes.CDLL(None)
libc.fdopen.restype = ctypes.c_void_p
with tempfile.TemporaryFile() as output:
    stream = ctypes.c_void_p(libc.fdopen(output.fileno(), b"w"))
    libc.malloc_info(0, stream)
    libc.fflush(stream)
    output.seek(0)
    print(output.read().count(b"<heap nr="))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="it is glibc's malloc")
@pytest.mark.parametrize(("setting", "set_by_user", "shared"), [("", "", 0), ("one", "", 1), ("one", "8", 0)])
def test_threads_share_one_heap_unless_configured(setting: str, set_by_user: str, shared: int) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "MALLOC_ARENA_MAX"}
    if set_by_user:
        environment["MALLOC_ARENA_MAX"] = set_by_user
    done = subprocess.run(
        [sys.executable, "-c", HEAPS, *filter(None, [setting])],
        capture_output=True, text=True, check=True, env=environment,
    )  # fmt: skip
    assert (int(done.stdout) == 1) == bool(shared)


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's list of mappings is Linux's")
def test_released_pages_of_a_file_are_mapped_again_with_their_content(tmp_path: Path) -> None:
    """Pages of another file's mapping stay."""
    contents = [bytes([number]) * (4 * MIB) for number in (1, 2)]
    mappings = []
    for number, content in enumerate(contents):
        path = tmp_path / str(number)
        path.write_bytes(content)
        with path.open("r+b") as file:
            mappings.append((path, mmap.mmap(file.fileno(), 0)))
    assert [mapped[:] for _, mapped in mappings] == contents
    status = mappings[0][0].stat()
    release_file_pages((status.st_dev, status.st_ino))
    assert resident_bytes(mappings[0][0]) == 0
    assert resident_bytes(mappings[1][0]) == 4 * MIB
    assert [mapped[:] for _, mapped in mappings] == contents


def resident_bytes(path: Path) -> int:
    """Return how much of a file's mapping is resident."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            inside = line.endswith(str(path))
        elif inside and line.startswith("Rss:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"{path} is not mapped")

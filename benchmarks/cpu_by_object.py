"""Measure the CPU time of running processes, and sample it by shared object.

Invariant: the measured process runs unchanged; no function is wrapped.

    with Timed({"dedup": pid}) as timed: ...
    timed.seconds["dedup"]
    with Sampled({"dedup": pid}) as sampled: ...
    sampled.classes["dedup"]["interpreter"]

`perf` samples the instruction pointer. A sample in libpython is the interpreter's own time (bytecode, objects,
garbage collection); a sample elsewhere is time of that object's code. A call into the C library or the kernel is
counted there, whichever object made it. Sampling adds up to 15 % to the time of each process.
"""

from __future__ import annotations

import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

SAMPLES_A_SECOND = 997
"""Not a divisor of any timer's rate, so that nothing periodic is always or never hit."""
START_SECONDS = 0.3
CLASSES = ("kernels", "libraries", "numpy", "system", "interpreter")
"""Groups of shared objects: our kernels and zstd for blocks; the clients of Kafka, Redis and the store with their
compression and checksums; numpy's loops and array creation; the C library (copies) and the operating system;
libpython.
"""


KERNELS = (
    *("_chunking.", "_estimate.", "_features.", "_fingerprint.", "_gather.", "_nametable.", "_xdelta3."),
    *("_zstd.", "blake3."),
)
SYSTEM = ("[", "libc.", "ld-linux", "libm.", "libstdc", "libgcc")


def cpu_clock(pid: int) -> int:
    """Return the clock of a process's CPU time, as clock_getcpuclockid(3): nanoseconds, ended threads included."""
    return ~pid << 3 | 2


def class_of(shared_object: str) -> str:
    """Return the class of a shared object by its file's name."""
    if shared_object.startswith(("libpython", "python3")):
        return "interpreter"
    if shared_object.startswith(SYSTEM):
        return "system"
    if any(part in shared_object for part in ("multiarray", "numpy", "openblas")):
        return "numpy"
    return "kernels" if shared_object.startswith(KERNELS) else "libraries"


class Timed:
    """Clock of the CPU time of processes between entry and exit, in `seconds` by process."""

    def __init__(self, pids: Mapping[str, int]) -> None:
        self.pids = pids
        self._before: dict[str, float] = {}
        self.seconds: dict[str, float] = {}
        self.classes: dict[str, dict[str, float]] = {}
        """By process and class, if they are sampled."""
        self.objects: dict[str, dict[str, float]] = {}
        """By process and shared object, if they are sampled."""

    def __enter__(self) -> Self:
        self._before = self._clocks()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, err: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.seconds = {name: after - self._before[name] for name, after in self._clocks().items()}

    def _clocks(self) -> dict[str, float]:
        return {name: time.clock_gettime(cpu_clock(pid)) for name, pid in self.pids.items()}


class Sampled(Timed):
    """The same, with samples of `perf`: `classes` and `objects` divide the seconds."""

    def __init__(self, pids: Mapping[str, int]) -> None:
        super().__init__(pids)
        self._folder = tempfile.TemporaryDirectory(prefix="nearkin-perf-")
        self._perfs: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Self:
        for name, pid in self.pids.items():
            command = ["perf", "record", "-q", "-F", str(SAMPLES_A_SECOND), "-p", str(pid), "-o", self._file(name)]
            self._perfs[name] = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        time.sleep(START_SECONDS)
        return super().__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, err: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, err, trace)
        for name, perf in self._perfs.items():
            perf.send_signal(signal.SIGINT)
            perf.wait()
            samples = self._samples(name)
            each = self.seconds[name] / max(1, sum(samples.values()))
            self.objects[name] = {found: count * each for found, count in samples.items()}
            self.classes[name] = dict.fromkeys(CLASSES, 0.0)
            for found, seconds in self.objects[name].items():
                self.classes[name][class_of(found)] += seconds
        self._folder.cleanup()

    def _file(self, name: str) -> str:
        return str(Path(self._folder.name) / name)

    def _samples(self, name: str) -> dict[str, int]:
        command = ["perf", "report", "-i", self._file(name), "--stdio", "-q", "-F", "sample,dso", "-t", "|"]
        found = subprocess.run(command, capture_output=True, text=True, check=False).stdout
        samples: dict[str, int] = {}
        for line in found.splitlines():
            count, _, shared_object = line.partition("|")
            if count.strip().isdigit():
                samples[shared_object.strip()] = samples.get(shared_object.strip(), 0) + int(count)
        return samples

"""Measure a solid archive of the whole history.

It has the best reduction and the worst access: no version can be added, deleted or read alone. It is measured as it
is used: all versions are compressed at once, and a version is restored by decompressing the archive and keeping that
part.

Invariant: one zstd frame holds the whole history.
"""

from __future__ import annotations

import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from typing_extensions import override

from nearkin.lab.measure import COPY_BYTES, CommandFailed, Cost, ending, kill_on_timeout, reap
from nearkin.lab.tools.base_tool import Peer


class ZstdLong(Peer):
    """zstd with its largest window, 2 GiB, over the versions one after another."""

    name = "zstd-long"
    program = "zstd"
    settings = "-3 --long=31 over all versions as one stream; a get decompresses all of it"
    install = "Debian and Ubuntu: apt install zstd; macOS: brew install zstd"
    appends = False
    level: ClassVar[int] = 3

    @override
    def create(self) -> None:
        self.repository.mkdir()
        self._lengths: list[int] = []

    @override
    def put(self, version: int, source: Path) -> Cost:
        raise NotImplementedError(f"{self.name}: nothing can be added to it")

    @override
    def put_history(self, sources: Sequence[Path]) -> Cost:
        self._lengths = [source.stat().st_size for source in sources]
        # the length lets zstd fit its tables to a short history, as it does for a file
        words = (f"-{self.level}", "--long=31", "-q", "-c", f"--stream-size={sum(self._lengths)}")
        return self._run(*words, stdin=sources, stdout=self.repository / "archive.zst", sync=True)

    @override
    def get(self, version: int, target: Path) -> Cost:
        start = sum(self._lengths[: version - 1])
        stop = start + self._lengths[version - 1]
        command = [*self.command, "-d", "--long=31", "-q", "-c", str(self.repository / "archive.zst")]
        started = time.perf_counter()
        with (
            target.open("wb") as file,
            tempfile.TemporaryFile() as errors,
            subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=errors, env=self.environment, bufsize=0
            ) as process,
        ):
            assert process.stdout is not None
            place, block = 0, memoryview(bytearray(COPY_BYTES))
            with kill_on_timeout(process):
                while count := process.stdout.readinto(block):  # type: ignore[attr-defined]  # unbuffered: a raw file
                    if place < stop and place + count > start:
                        file.write(block[max(0, start - place) : min(count, stop - place)])
                    place += count
            usage = reap(process)
            if process.returncode != 0:
                raise CommandFailed(ending(command, process.returncode, errors))
        return Cost(time.perf_counter() - started, 0.0, *usage)


class ZstdLong9(ZstdLong):
    """The same at level 9."""

    name = "zstd-long-9"
    settings = "-9 --long=31 over all versions as one stream; a get decompresses all of it"
    level = 9

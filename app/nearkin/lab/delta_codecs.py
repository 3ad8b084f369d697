"""Encode and decode pairs with each compared delta codec.

A delta that is no smaller than its target is refused: the chunk would be kept whole. That rule is the same for all.

Invariant: all codecs encode the same pairs, and all decoded bytes are compared.
"""

from __future__ import annotations

import os
import resource
import shutil
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import ClassVar

import numpy as np
from backports.zstd import ZstdDict, compress, decompress
from typing_extensions import override

from nearkin.lab.measure import CommandFailed, first_line, run_short
from nearkin.lab.similar_chunks import ChunkPairs, Lengths, starts_of
from nearkin.lab.tools.base_tool import MissingPeer
from nearkin_shared.kernels.xdelta3 import decode_many, encode_many

_START_RUNS = 9


class Codec(ABC):
    """One codec with its settings: `encode`, then `decode`, then `wrong`.

    Only the first two are timed.
    """

    name: ClassVar[str]
    settings: ClassVar[str]
    ours: ClassVar[bool] = False
    install: ClassVar[str] = "it comes with nearkin"

    def __init__(self, pairs: ChunkPairs, folder: Path) -> None:
        """Prepare the pairs for the codec; `folder` is empty and its own. Raises MissingPeer."""
        self.pairs = pairs
        self.folder = folder

    @classmethod
    def version(cls) -> str:
        """Return the codec's version, or what it comes with."""
        return "in this process"

    def clock(self) -> float:
        """Return the time that passes while the codec works, seconds: processor time."""
        return time.thread_time()

    def start_seconds(self) -> float:
        """Return the fixed cost of a call: the start of a process, 0 in this process."""
        return 0.0

    @abstractmethod
    def encode(self) -> Lengths:
        """Encode every pair; return the deltas' lengths, 0 if no smaller than the target."""

    @abstractmethod
    def decode(self) -> None:
        """Decode every delta that was kept."""

    @abstractmethod
    def wrong(self) -> int:
        """Return how many decoded targets are not what was encoded."""


class Xdelta3(Codec):
    """Nearkin's xdelta3: the C library, all pairs in one call."""

    name = "xdelta3"
    settings = "the library, level 1, one call for all pairs"
    ours = True
    level: ClassVar[int] = 1

    @override
    def encode(self) -> Lengths:
        targets, bases = self.pairs.targets, self.pairs.bases
        self._deltas, lengths = encode_many(
            targets.payload,
            targets.offsets,
            targets.lengths,
            bases.payload,
            bases.offsets,
            bases.lengths,
            level=self.level,
            limit_bytes=np.maximum(targets.lengths, 1) - np.uint32(1),
        )
        self._kept = np.flatnonzero(lengths)
        self._lengths = lengths[self._kept]
        return lengths

    @override
    def decode(self) -> None:
        bases = self.pairs.bases.take(self._kept)
        self._decoded = decode_many(
            self._deltas,
            starts_of(self._lengths),
            self._lengths,
            bases.payload,
            bases.offsets,
            bases.lengths,
            self.pairs.targets.lengths[self._kept],
        )

    @override
    def wrong(self) -> int:
        targets = self.pairs.targets.take(self._kept)
        starts = starts_of(targets.lengths).tolist()
        decoded = (self._decoded[start:].data for start in starts)
        return sum(bytes(found[: len(want)]) != want for found, want in zip(decoded, targets.slices(), strict=True))


class Xdelta39(Xdelta3):
    """The same at its slowest level."""

    name = "xdelta3-9"
    settings = "the library, level 9, one call for all pairs"
    level = 9


class Zstd(Codec):
    """zstd without a base, as the reference that shows the gain of bases."""

    name = "zstd-alone"
    settings = "level 3, no base, one call a chunk"
    level: ClassVar[int] = 3
    with_base: ClassVar[bool] = False

    def __init__(self, pairs: ChunkPairs, folder: Path) -> None:
        super().__init__(pairs, folder)
        self._targets = pairs.targets.slices()
        self._bases = pairs.bases.slices()

    @override
    def encode(self) -> Lengths:
        if self.with_base:
            whole = [
                compress(target, level=self.level, zstd_dict=ZstdDict(base, is_raw=True).as_prefix)
                for target, base in zip(self._targets, self._bases, strict=True)
            ]
        else:
            whole = [compress(target, level=self.level) for target in self._targets]
        sizes = zip(whole, self._targets, strict=True)
        self._deltas = [delta if len(delta) < len(target) else b"" for delta, target in sizes]
        return np.array([len(delta) for delta in self._deltas], dtype=np.uint32)

    @override
    def decode(self) -> None:
        if self.with_base:
            self._decoded = [
                decompress(delta, zstd_dict=ZstdDict(base, is_raw=True).as_prefix) if delta else b""
                for delta, base in zip(self._deltas, self._bases, strict=True)
            ]
        else:
            self._decoded = [decompress(delta) if delta else b"" for delta in self._deltas]

    @override
    def wrong(self) -> int:
        found = zip(self._deltas, self._decoded, self._targets, strict=True)
        return sum(bool(delta) and decoded != target for delta, decoded, target in found)


class ZstdPrefix(Zstd):
    """zstd with the base as prefix."""

    name = "zstd-prefix"
    settings = "level 3, the base as prefix, one call a pair"
    with_base = True


class Command(Codec):
    """A codec that is a command: one process per pair, with files for its data."""

    program: ClassVar[str]
    version_words: ClassVar[tuple[str, ...]]

    def __init__(self, pairs: ChunkPairs, folder: Path) -> None:
        super().__init__(pairs, folder)
        self.command: str = self.find()
        for number, (target, base) in enumerate(zip(pairs.targets.slices(), pairs.bases.slices(), strict=True)):
            (folder / f"{number}.target").write_bytes(target)
            (folder / f"{number}.base").write_bytes(base)
        for kind in ("target", "base"):
            (folder / f"start.{kind}").write_bytes(b"0")

    @classmethod
    def find(cls) -> str:
        """Return the path of the command. Raises MissingPeer."""
        found = shutil.which(cls.program)
        if found is None:
            raise MissingPeer(f"{cls.program} is not installed")
        return found

    @classmethod
    @override
    def version(cls) -> str:
        return first_line(run_short([cls.find(), *cls.version_words])).partition(",")[0].strip("* ")

    @override
    def clock(self) -> float:
        children = resource.getrusage(resource.RUSAGE_CHILDREN)
        return time.thread_time() + children.ru_utime + children.ru_stime

    @override
    def start_seconds(self) -> float:
        seconds = []
        for _ in range(_START_RUNS):
            started = self.clock()
            self._run(self.encode_words("start"))
            seconds.append(self.clock() - started)
        return sorted(seconds)[_START_RUNS // 2]

    @override
    def encode(self) -> Lengths:
        lengths = np.zeros(len(self.pairs), dtype=np.uint32)
        for number, target_bytes in enumerate(self.pairs.targets.lengths.tolist()):
            self._run(self.encode_words(str(number)))
            delta_bytes = os.stat(self.folder / f"{number}.delta").st_size
            lengths[number] = delta_bytes if delta_bytes < target_bytes else 0
        self._kept = np.flatnonzero(lengths).tolist()
        return lengths

    @override
    def decode(self) -> None:
        for number in self._kept:
            self._run(self.decode_words(str(number)))

    @override
    def wrong(self) -> int:
        return sum(
            (self.folder / f"{number}.decoded").read_bytes() != (self.folder / f"{number}.target").read_bytes()
            for number in self._kept
        )

    @abstractmethod
    def encode_words(self, name: str) -> tuple[str, ...]:
        """Return the arguments that write `name.delta`."""

    @abstractmethod
    def decode_words(self, name: str) -> tuple[str, ...]:
        """Return the arguments that write `name.decoded`."""

    def _run(self, words: tuple[str, ...]) -> None:
        done = run_short([self.command, *words], self.folder)
        if done.returncode != 0:
            output_lines = done.stderr.strip().splitlines()
            raise CommandFailed(
                f"{self.program} {' '.join(words)}: exit {done.returncode}: {output_lines[-1] if output_lines else ''}"
            )


class Xdelta3Command(Command):
    """The xdelta3 command, at the library's settings."""

    name = "xdelta3-command"
    program = "xdelta3"
    settings = "-1 -S none -A, one process a pair"
    install = "Debian and Ubuntu: apt install xdelta3; macOS: brew install xdelta"
    version_words: ClassVar[tuple[str, ...]] = ("-V",)

    @override
    def encode_words(self, name: str) -> tuple[str, ...]:
        # -A with nothing: no file names in the delta
        return ("-e", "-f", "-q", "-1", "-S", "none", "-A=", "-s", f"{name}.base", f"{name}.target", f"{name}.delta")

    @override
    def decode_words(self, name: str) -> tuple[str, ...]:
        return ("-d", "-f", "-q", "-s", f"{name}.base", f"{name}.delta", f"{name}.decoded")


class ZstdCommand(Command):
    """`zstd --patch-from`."""

    name = "zstd-patch-from"
    program = "zstd"
    settings = "-3 --patch-from, one process a pair"
    install = "Debian and Ubuntu: apt install zstd; macOS: brew install zstd"
    version_words: ClassVar[tuple[str, ...]] = ("--version",)

    @override
    def encode_words(self, name: str) -> tuple[str, ...]:
        return ("-3", "-f", "-q", f"--patch-from={name}.base", f"{name}.target", "-o", f"{name}.delta")

    @override
    def decode_words(self, name: str) -> tuple[str, ...]:
        return ("-d", "-f", "-q", f"--patch-from={name}.base", f"{name}.delta", "-o", f"{name}.decoded")


OWN: tuple[type[Codec], ...] = (Xdelta3, Xdelta39, ZstdPrefix, Zstd)
"""Those that run in this process: always there."""
PEERS: tuple[type[Command], ...] = (Xdelta3Command, ZstdCommand)

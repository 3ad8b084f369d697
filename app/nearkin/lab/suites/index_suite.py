"""Measure kinds of index by number of chunks.

Names and directories are generated: no chunk is stored, so the index of a store of 8 TB fits a small machine. All
chunks are different, without super-features, which are the same in each kind.

    exact     the LMDB index
    tablets   tag table, directories (generated in place of reads), LMDB for the rest
    sampled   the same with hooks alone, one in 64
    tags      the tag table alone, for numbers of chunks beyond the time for whole containers

Invariant: every kind is asked for the same names, in batches as a put asks, and each answer is checked.
"""

from __future__ import annotations

import os
import resource
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from nearkin.lab.measure import pin_to_core
from nearkin.lab.suites.index_loss import LossFigures
from nearkin_shared.errors import BadInput, PermanentError
from nearkin_shared.formats.directory import BlockTable, ChunkTable, Directory, PrefixTable, SegmentTable
from nearkin_shared.index.container_entries import ContainerEntries
from nearkin_shared.index.lmdb.lmdb_index import LmdbIndex
from nearkin_shared.index.tablets.container_tags import ContainerTags
from nearkin_shared.index.tablets.tablet_index import TabletIndex
from nearkin_shared.index.tablets.tablet_tables import TabletOptions
from nearkin_shared.index.tablets.tag_snapshot import FILE_NAME, read_snapshot, write_snapshot
from nearkin_shared.limits import GIB
from nearkin_shared.types import NAME_BYTES, SEGMENT_ID_BYTES, U8, U64, Bools, ContainerId, Locations

KINDS = ("exact", "tablets", "sampled", "tags")
HOOK_LEVEL = 6
"""Level of a sampled index: one tag in 64 is a hook."""
CHUNKS_A_CONTAINER, CHUNKS_A_SEGMENT = 512, 16
CHUNK_BYTES = 8192
CONTAINERS_A_WRITE = 16
BATCH_NAMES = 2048
"""Names of one lookup: a batch of a put has as many."""
LOOKUPS = 1 << 18
COLD_LOOKUPS = 1 << 12
CHUNKS_MIN, CHUNKS_MAX = 10_000, 2_000_000_000
MAP_BYTES = 1024 * GIB
DOMAIN = bytes(16)
_FIRST_ID = 1 << 60
_ABSENT = 1 << 40
"""Number of the first container that is in no index."""
_STATE = b"benchmark's tags"
_MIX = np.uint64(0x9E3779B97F4A7C15)


@dataclass(slots=True)
class IndexFigures:
    """Figures of one kind at one number of chunks.

    Microseconds are CPU time of one chunk or name.
    """

    kind: str
    chunks: int
    memory_bytes_a_chunk: float | None = None
    """Of tags; None: the page cache's."""
    disk_bytes_a_chunk: float = 0.0
    insert_us: float = 0.0
    known_us: float = 0.0
    new_us: float = 0.0
    mixed_us: float = 0.0
    missed_percent: float = 0.0
    """Of the known stream."""
    directories_a_1000_known: float = 0.0
    directories_a_1000_new: float = 0.0
    cold_known_us: float = 0.0
    """Wall time of a name after the files of the index left the page cache."""
    cold_new_us: float = 0.0
    open_seconds: float = 0.0
    """CPU time from open to the first answer."""
    rebuild_seconds: float | None = None
    """CPU time from open to the first answer without a snapshot."""


def generate_words(container: int, count: int, words: int) -> U64:
    """Return uint64[count, words] that differ between containers."""
    first = np.uint64(container * CHUNKS_A_CONTAINER * 4 & 0xFFFFFFFFFFFFFFFF)
    mixed = (np.arange(count * words, dtype=np.uint64) + first + np.uint64(1)) * _MIX
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (mixed ^ (mixed >> np.uint64(31))).reshape(count, words)


def generate_names(number: int) -> U8:
    """Return the names of a container, uint8[CHUNKS_A_CONTAINER, 32]."""
    names = generate_words(number, CHUNKS_A_CONTAINER, NAME_BYTES // 8).view(np.uint8)
    names[:, 28:] = np.frombuffer(np.uint32(CHUNK_BYTES).tobytes(), np.uint8)
    return names


def generate_entries(number: int) -> ContainerEntries:
    """Return the entries of a container of raw chunks."""
    count, container = CHUNKS_A_CONTAINER, ContainerId(_FIRST_ID + number)
    lengths = np.full(count, CHUNK_BYTES, np.uint32)
    none8, none32 = np.zeros(count, np.uint8), np.zeros(count, np.uint32)
    starts = np.arange(count, dtype=np.uint32) * np.uint32(CHUNK_BYTES)
    chunks = ChunkTable(generate_names(number), lengths, none32, starts, lengths, none8, Locations.empty(count), none8)
    segments = count // CHUNKS_A_SEGMENT
    own = Locations(np.full(count, container, np.uint64), np.arange(count, dtype=np.uint32))
    bounds = np.arange(segments + 1, dtype=np.uint32) * np.uint32(CHUNKS_A_SEGMENT)
    one = np.array([count * CHUNK_BYTES], np.uint32)
    blocks = BlockTable(np.array([56], np.uint64), one, one, *(np.zeros(1, np.uint8) for _ in range(3)))
    recipes = SegmentTable(bounds, np.zeros(segments, np.uint8), own)
    tables = blocks, chunks, recipes, PrefixTable.empty(1)
    directory = Directory(container, DOMAIN, 1, ("none",), *tables, count * CHUNK_BYTES, count * 28, 500)
    ids = generate_words(number + (_ABSENT << 1), segments, 3).view(np.uint8)[:, :SEGMENT_ID_BYTES]
    return ContainerEntries(directory, np.ascontiguousarray(ids), {})


class GeneratedDirectories:
    """Directories of generated containers, in place of stored ones."""

    def directory(self, container: ContainerId) -> Directory:
        """Return a container's directory."""
        return generate_entries(container - _FIRST_ID).directory


class _Tags:
    """The tag table alone, with the calls of an index that are measured."""

    directory_reads = 0

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self._folder = folder
        self._tags = ContainerTags(24, read_snapshot(folder, _STATE, 24))

    def insert(self, number: int) -> None:
        self._tags.add(_FIRST_ID + number)
        self._tags.put(_FIRST_ID + number, _check_tags(generate_names(number)))

    def locate_chunks(self, names: U8) -> tuple[Locations, Bools]:
        """Return the first candidate of each name; it is not proved."""
        rows, containers = self._tags.candidates(_check_tags(names))
        locations, found = Locations.empty(len(names)), np.zeros(len(names), np.bool_)
        locations.containers[rows[::-1]], found[rows] = containers[::-1], True
        return locations, found

    @property
    def memory_bytes(self) -> int:
        """Return the bytes of tags and container numbers."""
        return self._tags.memory_bytes

    def close(self) -> None:
        write_snapshot(self._folder, _STATE, self._tags.snapshot)


_Index = LmdbIndex | _Tags


def run(
    chunks: Sequence[int], kinds: Sequence[str], core: int | None, work: Path | None = None
) -> Iterator[IndexFigures]:
    """Measure each kind at each number of chunks; yield the figures as they are known.

    work: a folder on the file system to measure; None: the temporary folder's. Raises BadInput, PermanentError.
    """
    for kind in kinds:
        if kind not in KINDS:
            raise BadInput(f'kind "{kind}": choose {", ".join(KINDS)}')
    for count in chunks:
        if not CHUNKS_MIN <= count <= CHUNKS_MAX:
            raise BadInput(f"chunks {count}: want {CHUNKS_MIN} to {CHUNKS_MAX}")
    with pin_to_core(core):
        for count in chunks:
            for kind in kinds:
                with tempfile.TemporaryDirectory(dir=work, prefix="nearkin-index-") as folder:
                    yield _measure(kind, -(-count // CHUNKS_A_CONTAINER), Path(folder) / "index")


def _measure(kind: str, containers: int, folder: Path) -> IndexFigures:
    figures = IndexFigures(kind, containers * CHUNKS_A_CONTAINER)
    index = _open(kind, folder)
    figures.insert_us = _fill(index, containers) / figures.chunks * 1e6
    _measure_lookups(index, figures, containers)
    if isinstance(index, TabletIndex | _Tags):
        figures.memory_bytes_a_chunk = _tag_bytes(index) / figures.chunks
    index.close()
    disk_bytes = sum(path.stat().st_blocks * 512 for path in folder.iterdir())
    figures.disk_bytes_a_chunk = disk_bytes / figures.chunks
    figures.open_seconds = _measure_open(kind, folder, figures, containers)
    if kind in ("tablets", "sampled"):
        (folder / FILE_NAME).unlink(missing_ok=True)
        began = time.process_time()
        index = _open(kind, folder)
        _check(index.locate_chunks(generate_names(0)), 0)
        figures.rebuild_seconds = time.process_time() - began
        index.close()
    return figures


def _open(kind: str, folder: Path) -> _Index:
    if kind == "tags":
        return _Tags(folder)
    if kind == "exact":
        return LmdbIndex(folder, DOMAIN, MAP_BYTES)
    options = TabletOptions() if kind == "tablets" else TabletOptions(is_sampled=True, level=HOOK_LEVEL)
    return TabletIndex(folder, DOMAIN, MAP_BYTES, GeneratedDirectories(), options)


def _fill(index: _Index, containers: int) -> float:
    """Publish containers; return the CPU seconds without those of generating them."""
    seconds = 0.0
    for first in range(0, containers, CONTAINERS_A_WRITE):
        numbers = range(first, min(first + CONTAINERS_A_WRITE, containers))
        if isinstance(index, _Tags):
            began = time.process_time()
            for number in numbers:
                index.insert(number)
        else:
            many = [generate_entries(number) for number in numbers]
            began = time.process_time()
            index.publish_many(many)
        seconds += time.process_time() - began
    return seconds


def _measure_lookups(index: _Index, figures: IndexFigures, containers: int) -> None:
    """Ask for a known stream, for new names, and for both in turn."""
    each = BATCH_NAMES // CHUNKS_A_CONTAINER
    batches = min(LOOKUPS, figures.chunks) // BATCH_NAMES
    starts = np.random.default_rng(1).integers(0, max(1, containers - each * batches), 1)
    known = [int(starts[0]) + at * each for at in range(batches)]
    new = [_ABSENT + at * each for at in range(batches)]
    reads = _reads(index)
    figures.known_us, missed = _ask(index, known)
    figures.missed_percent = missed * 100
    figures.directories_a_1000_known = (_reads(index) - reads) / (batches * BATCH_NAMES) * 1000
    reads = _reads(index)
    figures.new_us = _ask(index, new)[0]
    figures.directories_a_1000_new = (_reads(index) - reads) / (batches * BATCH_NAMES) * 1000
    figures.mixed_us = _ask(index, [number for pair in zip(known, new, strict=True) for number in pair])[0]


def _ask(index: _Index, firsts: Sequence[int], clock: Callable[[], float] = time.process_time) -> tuple[float, float]:
    """Look up the names of batches of containers.

    Return (microseconds of a name, share not found).
    """
    seconds, missed = 0.0, 0
    for first in firsts:
        names = np.concatenate([generate_names(first + i) for i in range(BATCH_NAMES // CHUNKS_A_CONTAINER)])
        began = clock()
        answer = index.locate_chunks(names)
        seconds += clock() - began
        _check(answer, first)
        missed += int(np.count_nonzero(~answer[1]))
    return seconds / (len(firsts) * BATCH_NAMES) * 1e6, missed / (len(firsts) * BATCH_NAMES)


def _check(answer: tuple[Locations, Bools], first: int) -> None:
    """Compare an answer with what was published.

    Raises: PermanentError. A tag alone may name a container that does not have the name.
    """
    locations, found = answer
    expected = np.uint64(_FIRST_ID + first) + np.arange(len(found), dtype=np.uint64) // np.uint64(CHUNKS_A_CONTAINER)
    right = found & (locations.containers == expected) if first < _ABSENT else ~found
    if right.mean() < 0.99:
        raise PermanentError(f"index: {np.count_nonzero(~right)} of {len(right)} answers are wrong")


def _measure_open(kind: str, folder: Path, figures: IndexFigures, containers: int) -> float:
    """Open an index that is not in the page cache.

    Return the CPU seconds up to the first answer.
    """
    for path in folder.iterdir():
        drop_pages(path)
    began = time.process_time()
    index = _open(kind, folder)
    if isinstance(index, _Tags):
        index.locate_chunks(generate_names(_ABSENT)[:1])
    else:  # reads none of the pages that the lookups below read
        index.locate_segments(np.zeros((1, SEGMENT_ID_BYTES), np.uint8))
    seconds = time.process_time() - began
    batches = COLD_LOOKUPS // BATCH_NAMES
    numbers = np.random.default_rng(2).integers(0, max(1, containers - 8), batches)
    figures.cold_new_us = _ask(index, [_ABSENT + at for at in numbers.tolist()], time.perf_counter)[0]
    figures.cold_known_us = _ask(index, numbers.tolist(), time.perf_counter)[0]
    index.close()
    return seconds


def drop_pages(path: Path) -> None:
    """Write a file out and drop it from the page cache, where the system can."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def _reads(index: _Index) -> int:
    return index.directory_reads if isinstance(index, TabletIndex | _Tags) else 0


def _tag_bytes(index: TabletIndex | _Tags) -> int:
    return index.memory_bytes if isinstance(index, _Tags) else index.tag_bytes


def _check_tags(names: U8) -> U64:
    return np.ascontiguousarray(names[:, 20:28]).view(np.uint64).ravel()


def table_of(rows: Sequence[IndexFigures | LossFigures]) -> str:
    """Return a Markdown table of figures."""
    columns = list(asdict(rows[0])) if rows else []
    lines = [f"| {' | '.join(name.replace('_', ' ') for name in columns)} |", "|" + "---|" * len(columns)]
    for row in rows:
        cells = ("" if value is None else _cell(value) for value in asdict(row).values())
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(value: float | str) -> str:
    if isinstance(value, float):
        return f"{value:.3g}" if value < 1000 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else value


def peak_bytes() -> int:
    """Return the peak memory of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

"""Count the work of the engine.

The engine runs without the services' packages, so without a metrics library. nearkin_shared.observability.metrics
exposes the metrics declared here. The number of label values does not grow with the data.

Invariant: counting needs no library, keeps no object alive and never fails.
"""

from __future__ import annotations

import bisect
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Generic, TypeVar

Labels = tuple[str, ...]
Owner = TypeVar("Owner")

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
DEPTHS = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)


class Counter:
    """A number that only grows, by labels; from any thread."""

    def __init__(self, name: str, text: str, labels: Labels) -> None:
        self.name, self.text, self.labels = name, text, labels
        self._values: dict[Labels, int] = {}
        self._lock = threading.Lock()

    def add(self, count: int, *labels: str) -> None:
        """Count."""
        with self._lock:
            self._values[labels] = self._values.get(labels, 0) + count

    def values(self) -> Mapping[Labels, int]:
        """Return what was counted so far."""
        with self._lock:
            return dict(self._values)


class Histogram:
    """A histogram by one label, safe between threads.

    `bounds` ascend; +Inf follows the last one.
    """

    def __init__(self, name: str, text: str, label: str | None, bounds: tuple[float, ...]) -> None:
        self.name, self.text, self.bounds = name, text, bounds
        self.labels: Labels = () if label is None else (label,)
        self._values: dict[Labels, tuple[list[int], float]] = {}
        self._lock = threading.Lock()

    def add(self, value: float, *labels: str, times: int = 1) -> None:
        """Take a value, `times` times."""
        place = bisect.bisect_left(self.bounds, value)
        with self._lock:
            counts, total = self._values.get(labels, ([0] * (len(self.bounds) + 1), 0.0))
            counts[place] += times
            self._values[labels] = counts, total + value * times

    @contextmanager
    def time(self, *labels: str) -> Iterator[None]:
        """Take the seconds that the block inside needs, unless it raises."""
        began = time.perf_counter()
        yield
        self.add(time.perf_counter() - began, *labels)

    def values(self) -> Mapping[Labels, tuple[list[int], float]]:
        """Return (values in each bucket, their sum) by labels."""
        with self._lock:
            return {labels: (list(counts), total) for labels, (counts, total) in self._values.items()}


class Gauge(Generic[Owner]):
    """A size read from its owners on request, summed over all live ones by one label."""

    def __init__(self, name: str, text: str, label: str, read: Callable[[Owner], float]) -> None:
        self.name: str = name
        self.text: str = text
        self.labels: Labels = (label,)
        self._read = read
        self._owners: dict[str, weakref.WeakSet[Owner]] = {}
        self._lock = threading.Lock()

    def watch(self, owner: Owner, label: str) -> None:
        """Ask this one too, as long as it lives."""
        with self._lock:
            self._owners.setdefault(label, weakref.WeakSet()).add(owner)

    def leave(self, owner: Owner, label: str) -> None:
        """Remove an owner explicitly.

        A finalizer would run Python code, in which a KeyboardInterrupt is lost.
        """
        with self._lock:
            if label in self._owners:
                self._owners[label].discard(owner)

    def values(self) -> Mapping[Labels, float]:
        """Return the sums now."""
        with self._lock:
            owners = {label: list(alive) for label, alive in self._owners.items()}
        return {(label,): sum(map(self._read, alive)) for label, alive in owners.items()}


STAGE_SECONDS = Histogram("nearkin_stage_seconds", "A stage's work on one batch, with what it reads.", "stage", SECONDS)
LOOKUPS = Counter(
    "nearkin_index_lookups", "Keys looked up in the index, and whether they were there.", ("table", "found")
)
INDEX_READS = Counter(
    "nearkin_index_reads",
    "Reads of lookups in a local index: entries (exact), or directories, and segment ids of a container.",
    ("table",),
)
DEDUP_SEGMENTS = Counter("nearkin_dedup_segments", "Segments by where they were known from.", ("level",))
DEDUP_CHUNKS = Counter("nearkin_dedup_chunks", "Chunks by the level that dropped them, or fresh.", ("level",))
DEDUP_BYTES = Counter("nearkin_dedup_bytes", "Bytes of chunks by the level that dropped them, or fresh.", ("level",))
BASE_CHUNKS = Counter("nearkin_base_chunks", "Stored chunks by the policy that found their base, or none.", ("policy",))
BASE_BYTES = Counter("nearkin_base_bytes", "Bytes of these chunks, before they were encoded.", ("policy",))
DEPTH = Histogram("nearkin_chunk_depth", "Stored chunks by the length of their chain of bases.", None, DEPTHS)
CACHE_LOOKUPS = Counter(
    "nearkin_cache_lookups", "Reads of a cache, and whether it had what was wanted.", ("cache", "found")
)
AHEAD_BLOCKS = Counter(
    "nearkin_read_ahead_blocks",
    "Blocks read from a far store: ahead of being wanted, late, or ahead in vain.",
    ("read",),
)
MENDED = Counter(
    "nearkin_parity_reconstructions", "Damaged objects that parity was asked for, and whether it knew.", ("known",)
)
COUNTS = (
    *(LOOKUPS, INDEX_READS, DEDUP_SEGMENTS, DEDUP_CHUNKS, DEDUP_BYTES, BASE_CHUNKS, BASE_BYTES, CACHE_LOOKUPS),
    *(AHEAD_BLOCKS, MENDED),
)
SPREADS = (STAGE_SECONDS, DEPTH)
LEVELS: list[Gauge[object]] = []
"""Declared by who can read them."""


def level(name: str, text: str, label: str, read: Callable[[Owner], float]) -> Gauge[Owner]:
    """Return a level that is shown."""
    made = Gauge(name, text, label, read)
    LEVELS.append(made)  # type: ignore[arg-type]  # each is asked for values alone
    return made

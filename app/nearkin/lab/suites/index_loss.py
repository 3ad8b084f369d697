"""Measure what a sampled index costs in stored bytes.

Versions are put oldest first into a store with the kind `exact`, and into one for each level of hooks; each put opens
the store again, so that only the files of the index lead it to earlier containers.

Invariant: every version is read back and compared.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import nearkin
from nearkin.lab.measure import pin_to_core, same_bytes
from nearkin.lab.measurement_record import Corpus
from nearkin.store import Store
from nearkin_shared.config.loader import load
from nearkin_shared.errors import PermanentError
from nearkin_shared.index.tablets import hook_levels
from nearkin_shared.limits import MIB
from nearkin_shared.observability import counters

TARGET_BYTES = MIB
"""Of containers: small ones, so that the stores have many."""
LEVELS = (4, 6, 8)
"""Levels of hooks: one in 16, 64 and 256 tags."""

_TABLES = ("chunks", "segments")


@dataclass(slots=True)
class LossFigures:
    """Figures of one corpus with one kind of index."""

    corpus: str
    kind: str
    hooks_one_in: int = 1
    chunks: int = 0
    """Chunks stored."""
    containers: int = 0
    memory_bytes_a_chunk: float | None = None
    """Of tags and container numbers; None: the page cache's."""
    duplicates_missed_percent: float = 0.0
    """Of those that the exact index finds."""
    stored_bytes: int = 0
    more_stored_percent: float = 0.0
    expected_loss_percent: float = 0.0
    """As `nearkin stats` states it."""
    put_cpu_seconds: float = 0.0
    names_asked: int = 0
    """Of chunks and segments, by the puts of all versions but the first."""
    index_reads: int = 0
    """Reads of these lookups: entries of an exact index; else directories, and segment ids of a container."""


def run(corpora: Sequence[Corpus], core: int | None, work: Path | None = None) -> Iterator[LossFigures]:
    """Put each corpus with every kind; yield the figures as they are known.

    Raises: PermanentError when a version differs after it was read back.
    """
    with pin_to_core(core):
        for corpus in corpora:
            exact: LossFigures | None = None
            duplicates = 0
            for level in (None, 0, *LEVELS):
                with tempfile.TemporaryDirectory(dir=work, prefix="nearkin-index-") as folder, _levels(level or 0):
                    figures, found = _measure(corpus, level, Path(folder) / "store")
                if exact is None:
                    exact, duplicates = figures, found
                figures.duplicates_missed_percent = (1 - found / max(1, duplicates)) * 100
                figures.more_stored_percent = (figures.stored_bytes / exact.stored_bytes - 1) * 100
                yield figures


class _Counted(NamedTuple):
    """Counts since the start of the process."""

    names: int
    reads: int


@contextmanager
def _levels(level: int) -> Iterator[None]:
    before, hook_levels.LEVEL_FIRST = hook_levels.LEVEL_FIRST, level
    try:
        yield
    finally:
        hook_levels.LEVEL_FIRST = before


def _measure(corpus: Corpus, level: int | None, root: Path) -> tuple[LossFigures, int]:
    """Return the figures of one store, and the number of duplicate chunks that it found."""
    kind = "exact" if level is None else "sampled"
    figures = LossFigures(corpus.name, kind, 1 << (level or 0))
    settings, _ = load(overrides={"index": {"kind": kind}, "container": {"target_bytes": TARGET_BYTES}})
    counted = _Counted(0, 0)
    for number, source in enumerate(corpus.paths):
        if number == 1:
            counted = _counted()
        began = time.process_time()
        with nearkin.open_store(root, settings=settings, create=True) as store:
            store.put("blob", source)
        figures.put_cpu_seconds += time.process_time() - began
    if len(corpus.paths) > 1:
        now = _counted()
        figures.names_asked, figures.index_reads = now.names - counted.names, now.reads - counted.reads
    with nearkin.open_store(root, settings=settings) as store:
        _compare(store, corpus, root.parent / "restored")
        sums = store.stats()
    assert sums.index is not None
    figures.stored_bytes = sums.ledger.stored_bytes
    figures.expected_loss_percent = sums.index.missed_share * 100
    figures.chunks = sums.ledger.raw_chunks + sums.ledger.delta_chunks
    figures.containers = sums.containers
    if sums.index.memory_bytes is not None:
        figures.memory_bytes_a_chunk = sums.index.memory_bytes / figures.chunks
    return figures, sums.ledger.duplicate_chunks


def _counted() -> _Counted:
    """Return the lookups of this process so far."""
    names = sum(count for labels, count in counters.LOOKUPS.values().items() if labels[0] in _TABLES)
    reads = sum(count for labels, count in counters.INDEX_READS.values().items() if labels[0] in _TABLES)
    return _Counted(names, reads)


def _compare(store: Store, corpus: Corpus, target: Path) -> None:
    for number, source in enumerate(corpus.paths, 1):
        with target.open("wb") as file:
            store.get("blob", number).write_to(file)
        if not same_bytes(target, source):
            raise PermanentError(f"{corpus.name}: version {number} differs after it was read back")

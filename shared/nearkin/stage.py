"""Stages. Invariant: a stage imports no client; it says what it must know, then decides over a whole batch.

    reads(batch, facts) -> Reads | None      asked again until None, at most ROUNDS_MAX times
    decide(batch, facts) -> result           no input or output inside

The runner answers `Reads` from an index and a container source; the same stage runs embedded and behind Kafka.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeVar

from nearkin.records import U8, U32, U64, Bools, Locations

ROUNDS_MAX = 3

BatchT_contra = TypeVar("BatchT_contra", contravariant=True)
ResultT_co = TypeVar("ResultT_co", covariant=True)


@dataclass(frozen=True, slots=True)
class Reads:
    """What a stage wants to know; each field is one batch question, None where it asks nothing.

    `segment_ids` uint8[s, 20]; `names` uint8[n, 32]; `super_features` uint64[f, k] under `sketch`; `contents` the
    locations whose bytes and depths are wanted.
    """

    segment_ids: U8 | None = None
    names: U8 | None = None
    sketch: str | None = None
    super_features: U64 | None = None
    contents: Locations | None = None


@dataclass(frozen=True, slots=True)
class Found:
    """Where things lie: rows not found are zeros."""

    locations: Locations
    found: Bools


@dataclass(frozen=True, slots=True)
class FoundBases:
    """Base candidates and the rank of the super-feature that found each, with the sketches they were asked by."""

    super_features: U64
    locations: Locations
    ranks: U8
    found: Bools


@dataclass(frozen=True, slots=True)
class Contents:
    """Bytes of stored chunks, one after another; `available` False rows (lost or broken bases) have length 0."""

    payload: U8
    offsets: U64
    lengths: U32
    depths: U8
    available: Bools


@dataclass(frozen=True, slots=True)
class Facts:
    """The answers so far."""

    segments: Found | None = None
    chunks: Found | None = None
    bases: FoundBases | None = None
    contents: Contents | None = None


class Stage(Protocol[BatchT_contra, ResultT_co]):
    """A pure function over a batch, in two halves."""

    name: str

    def reads(self, batch: BatchT_contra, facts: Facts) -> Reads | None:
        """Name the facts still missing, or None when `decide` may run."""

    def decide(self, batch: BatchT_contra, facts: Facts) -> ResultT_co:
        """Return the stage's result."""


class FactSource(Protocol):
    """What a runner gives its stages to read from."""

    def answer(self, reads: Reads, facts: Facts) -> Facts:
        """Return `facts` with the answers to `reads` added."""


def run_stage(stage: Stage[BatchT_contra, ResultT_co], batch: BatchT_contra, source: FactSource) -> ResultT_co:
    """Run one stage over one batch."""
    facts = Facts()
    for _ in range(ROUNDS_MAX):
        wanted = stage.reads(batch, facts)
        if wanted is None:
            return stage.decide(batch, facts)
        facts = source.answer(wanted, facts)
    if stage.reads(batch, facts) is not None:
        raise RuntimeError(f"stage {stage.name} still asks after {ROUNDS_MAX} rounds")
    return stage.decide(batch, facts)

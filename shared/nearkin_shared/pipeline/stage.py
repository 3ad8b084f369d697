"""Stages. Invariant: a stage imports no client; it says what it must know, then decides over a whole batch.

    reads(batch, facts) -> Reads | None      asked again until None, at most ROUNDS_MAX times
    decide(batch, facts) -> result           no input or output inside

The runner answers `LookupRequest` from an index and a container source; the same stage runs embedded and behind Kafka.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Protocol, TypeVar

from nearkin_shared.observability import counters
from nearkin_shared.types import U8, U32, U64, Bools, Locations, Pieces
from nearkin_shared.utils.frozen import frozen

LOOKUP_PASSES_MAX = 40
"""The delta stage asks most: for eight spans of a batch up to four times each, and six times for the whole of it."""

BatchT_contra = TypeVar("BatchT_contra", contravariant=True)
ResultT_co = TypeVar("ResultT_co", covariant=True)


class Anchor(IntEnum):
    """What a place in the stream is known by."""

    NONE = 0
    CHUNK = 1
    """A stored chunk: the place where its container's recipes mention it first."""
    SEGMENT = 2
    """A stored segment: container and ordinal of its recipe."""
    ROW = 3
    """A row of a container's recipes."""
    CONTINUED = 4
    """Where the gap before it ended."""


@frozen
class Gaps:
    """Runs of fresh chunks in stream order and what stands around them; one row each. `kinds` are Anchors.

    `fresh` uint32[g] chunks in the gap.
    """

    left: Locations
    left_kinds: U8
    right: Locations
    right_kinds: U8
    fresh: U32

    def __len__(self) -> int:
        return len(self.fresh)


@frozen
class Neighbours:
    """What lay in gaps when their surroundings were stored: gap g has rows bounds[g] to bounds[g + 1] of `chunks`.

    `fresh` uint32[g] as in the question. `ends` (container, row of its recipes): where each gap's left side goes on;
    container 0 where that is not known.
    """

    fresh: U32

    bounds: U32
    chunks: Locations
    ends: Locations


@frozen
class LookupRequest:
    """What a stage wants to know; each field is one batch question, None where it asks nothing.

    `segment_ids` uint8[s, 20]; `names` uint8[n, 32]; `super_features` uint64[f, k] under `sketch`; `gaps` whose stored
    neighbours are wanted; `contents`, `similar` and `lower` the locations whose bytes and depths are wanted. With
    `depth_below` a chunk that is as deep as that is replaced by its own base, and so on down; with `no_deltas` so is
    one that is kept as a VCDIFF delta. With `bounds` uint32[g + 1] of groups of `contents`, or of `lower`,
    each group has what stood beside the ancestors in it as well.
    """

    segment_ids: U8 | None = None
    names: U8 | None = None
    sketch: str | None = None
    super_features: U64 | None = None
    gaps: Gaps | None = None
    contents: Locations | None = None
    similar: Locations | None = None
    lower: Locations | None = None
    depth_below: int | None = None
    no_deltas: bool = False
    bounds: U32 | None = None


@frozen
class FoundLocations:
    """Where things lie: rows not found are zeros."""

    locations: Locations
    found: Bools


@frozen
class FoundBases:
    """Base candidates and the rank of the super-feature that found each, with the sketches they were asked by."""

    super_features: U64
    locations: Locations
    ranks: U8
    found: Bools


@frozen
class Contents:
    """Bytes of stored chunks; `available` False rows (lost or broken bases, or beyond the bound) have length 0.

    `locations` are those asked for, or what replaced them, and what was added: `bounds` are then those of the groups.
    Rows of one location share its bytes, which lie where they were decoded as a rule: they are looked at for one batch,
    and not to be kept.
    """

    locations: Locations
    pieces: Pieces
    depths: U8
    available: Bools
    bounds: U32 | None = None


@frozen
class LookupResults:
    """The answers so far."""

    segments: FoundLocations | None = None
    chunks: FoundLocations | None = None
    bases: FoundBases | None = None
    neighbours: Neighbours | None = None
    contents: Contents | None = None
    similar: Contents | None = None
    lower: Contents | None = None


class Stage(Protocol[BatchT_contra, ResultT_co]):
    """A pure function over a batch, in two halves."""

    name: str

    def reads(self, batch: BatchT_contra, facts: LookupResults) -> LookupRequest | None:
        """Name the facts still missing, or None when `decide` may run."""

    def decide(self, batch: BatchT_contra, facts: LookupResults) -> ResultT_co:
        """Return the stage's result."""


class LookupSource(Protocol):
    """What a runner gives its stages to read from."""

    def answer(self, reads: LookupRequest, facts: LookupResults) -> LookupResults:
        """Return `facts` with the answers to `reads` added."""


def run_stage(stage: Stage[BatchT_contra, ResultT_co], batch: BatchT_contra, source: LookupSource) -> ResultT_co:
    """Run one stage over one batch."""
    with counters.STAGE_SECONDS.time(stage.name):
        facts = LookupResults()
        for _ in range(LOOKUP_PASSES_MAX):
            wanted = stage.reads(batch, facts)
            if wanted is None:
                return stage.decide(batch, facts)
            facts = source.answer(wanted, facts)
        if stage.reads(batch, facts) is not None:
            raise RuntimeError(f"stage {stage.name} still asks after {LOOKUP_PASSES_MAX} rounds")
        return stage.decide(batch, facts)

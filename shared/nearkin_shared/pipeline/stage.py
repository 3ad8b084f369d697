"""Stage protocol: a stage requests lookups, then decides over a whole batch.

Invariant: a stage imports no client and does no input or output.

    reads(batch, facts) -> LookupRequest | None    repeated until None, at most LOOKUP_PASSES_MAX times
    decide(batch, facts) -> result                 pure

The runner answers `LookupRequest` from an index and a container source; the same stage runs embedded and behind Kafka.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Protocol, TypeVar

from nearkin_shared.observability import counters
from nearkin_shared.types import U8, U32, U64, Bools, Locations, Pieces
from nearkin_shared.utils.frozen import frozen

LOOKUP_PASSES_MAX = 40
"""Upper bound on lookup passes.

The delta stage needs most: up to four for each of eight spans of a batch, and six for the whole batch.
"""

BatchT_contra = TypeVar("BatchT_contra", contravariant=True)
ResultT_co = TypeVar("ResultT_co", covariant=True)


class Anchor(IntEnum):
    """Kinds of reference that identify a position in a stream."""

    NONE = 0
    CHUNK = 1
    """A stored chunk: the position of its first row in its container's recipes."""
    SEGMENT = 2
    """A stored segment: container and ordinal of its recipe."""
    ROW = 3
    """A row of a container's recipes."""
    CONTINUED = 4
    """The end of the previous gap."""


@frozen
class Gaps:
    """Runs of fresh chunks in stream order with their stored neighbours, one row per run.

    `left_kinds` and `right_kinds` are Anchors; `fresh` uint32[g] is the number of chunks in the gap.
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
    """Chunks stored in each gap at an earlier time.

    Gap g has rows bounds[g] to bounds[g + 1] of `chunks`. `fresh` uint32[g] as in the request. `ends` is (container,
    row of its recipes) at which each gap's left side continues; container 0 if unknown.
    """

    fresh: U32

    bounds: U32
    chunks: Locations
    ends: Locations


@frozen
class LookupRequest:
    """Lookups that a stage needs; each field is one lookup over the batch, None for no lookup.

    `segment_ids` uint8[s, 20]; `names` uint8[n, 32]; `super_features` uint64[f, k] under `sketch`; `gaps` for stored
    neighbours; `contents`, `similar` and `lower` for the bytes and depths of the chunks at these locations. With
    `depth_below`, a chunk at this depth or more is replaced by its own base, recursively; with `no_deltas` so is a
    chunk stored as a VCDIFF delta. With `bounds` uint32[g + 1], the bounds of groups of `contents` or of `lower`, the
    stream neighbours of the ancestors are added to each group.
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
    """Locations from an index; rows not found are zeros."""

    locations: Locations
    found: Bools


@frozen
class FoundBases:
    """Base candidates, the rank of the super-feature that found each, and the request."""

    super_features: U64
    locations: Locations
    ranks: U8
    found: Bools


@frozen
class Contents:
    """Bytes of stored chunks; rows with `available` False have length 0.

    A row is unavailable if its chunk or a base is lost or corrupt, or beyond the bound. `locations` are the requested
    locations or their replacements, and added ones; `bounds` are then the bounds of the groups. Rows of one location
    share its bytes, usually a view of the decoded block: valid for one batch only.
    """

    locations: Locations
    pieces: Pieces
    depths: U8
    available: Bools
    bounds: U32 | None = None


@frozen
class LookupResults:
    """Lookup results so far."""

    segments: FoundLocations | None = None
    chunks: FoundLocations | None = None
    bases: FoundBases | None = None
    neighbours: Neighbours | None = None
    contents: Contents | None = None
    similar: Contents | None = None
    lower: Contents | None = None


class Stage(Protocol[BatchT_contra, ResultT_co]):
    """Pure function over a batch, in two halves."""

    name: str

    def reads(self, batch: BatchT_contra, facts: LookupResults) -> LookupRequest | None:
        """Return the lookups still missing, or None when `decide` may run."""

    def decide(self, batch: BatchT_contra, facts: LookupResults) -> ResultT_co:
        """Return the stage's result."""


class LookupSource(Protocol):
    """Source from which a runner answers the lookups of its stages."""

    def answer(self, reads: LookupRequest, facts: LookupResults) -> LookupResults:
        """Return `facts` with the answers to `reads` added."""


def run_stage(stage: Stage[BatchT_contra, ResultT_co], batch: BatchT_contra, source: LookupSource) -> ResultT_co:
    """Run one stage over one batch."""
    with counters.STAGE_SECONDS.time(stage.name):
        facts = LookupResults()
        for _ in range(LOOKUP_PASSES_MAX):
            request = stage.reads(batch, facts)
            if request is None:
                return stage.decide(batch, facts)
            facts = source.answer(request, facts)
        if stage.reads(batch, facts) is not None:
            raise RuntimeError(f"stage {stage.name} requests lookups after {LOOKUP_PASSES_MAX} passes (bug)")
        return stage.decide(batch, facts)

"""Reading chunks back. Invariant: memory is bounded by the batch asked for and the block cache, whatever the chain.

wanted rows -> plan (directories) -> encodings (one visit a block) -> deltas: the same for their bases, level by level
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nearkin.errors import Corrupt, NotFound
from nearkin.kernels.gather import gather
from nearkin.kernels.xdelta3 import decode_many
from nearkin.limits import DEPTH_MAX
from nearkin.records import U8, U32, U64, ZERO, ContainerId, Locations
from nearkin.stage import Contents
from nearkin.store.containers import ContainerSource


@dataclass(slots=True)
class Plan:
    """How each wanted row is kept: arrays of one row each."""

    locations: Locations
    lengths: U32
    encoded: U32
    blocks: U32
    positions: U32
    depths: U8
    bases: Locations
    names: U8
    """uint8[n, 32]; zeros for the built-in zero chunk."""
    ranks: U8


def offsets_of(lengths: U32) -> U64:
    """Return where each of the consecutive pieces starts, bytes."""
    wide = lengths.astype(np.uint64)
    return np.cumsum(wide, dtype=np.uint64) - wide


class ChunkReader:
    """Bytes of chunks by location."""

    def __init__(self, source: ContainerSource) -> None:
        self._source = source

    def plan(self, locations: Locations) -> Plan:
        """Return how the rows are kept. Raises Corrupt for an ordinal that its container does not have."""
        count = len(locations)
        plan = Plan(
            locations,
            np.zeros(count, np.uint32),
            np.zeros(count, np.uint32),
            np.zeros(count, np.uint32),
            np.zeros(count, np.uint32),
            np.zeros(count, np.uint8),
            Locations.empty(count),
            np.zeros((count, 32), np.uint8),
            np.zeros(count, np.uint8),
        )
        for container, rows in grouped(locations.containers):
            ordinals = locations.ordinals[rows]
            if container == ZERO:
                plan.lengths[rows] = ordinals
                continue
            chunks = self._source.directory(ContainerId(container)).chunks
            if int(ordinals.max()) >= len(chunks):
                raise Corrupt(
                    f"container {container:016x} has {len(chunks)} chunks, number {int(ordinals.max())} is wanted"
                )
            plan.lengths[rows] = chunks.lengths[ordinals]
            plan.encoded[rows] = chunks.encoded[ordinals]
            plan.blocks[rows] = chunks.blocks[ordinals]
            plan.positions[rows] = chunks.positions[ordinals]
            plan.depths[rows] = chunks.depths[ordinals]
            plan.bases.containers[rows] = chunks.bases.containers[ordinals]
            plan.bases.ordinals[rows] = chunks.bases.ordinals[ordinals]
            plan.names[rows] = chunks.names[ordinals]
            plan.ranks[rows] = chunks.ranks[ordinals]
        return plan

    def fetch(self, plan: Plan) -> U8:
        """Return the rows' bytes, one after another, decoded but not yet verified. Raises Corrupt or NotFound."""
        levels = [plan]
        while True:
            deltas = np.flatnonzero(levels[-1].depths)
            if not len(deltas):
                break
            if len(levels) > DEPTH_MAX:
                raise Corrupt(f"a chain of more than {DEPTH_MAX} deltas")
            below = self.plan(levels[-1].bases.take(deltas))
            if np.any(below.depths >= levels[-1].depths[deltas]):
                raise Corrupt("a delta's base is not shallower than the delta")
            levels.append(below)
        payload, lengths = np.zeros(0, np.uint8), np.zeros(0, np.uint32)
        while levels:
            level = levels.pop()
            payload, lengths = self._level(level, payload, lengths), level.lengths
        return payload

    def contents(self, locations: Locations) -> Contents:
        """Return bytes and depths of what can be read; a chunk that is lost or broken is not available, no error."""
        try:
            plan = self.plan(locations)
            payload = self.fetch(plan)
        except (Corrupt, NotFound):
            return self._contents_piecewise(locations)
        return Contents(payload, offsets_of(plan.lengths), plan.lengths, plan.depths, np.ones(len(locations), np.bool_))

    def _contents_piecewise(self, locations: Locations) -> Contents:
        """Read container by container, leaving out what fails: only on the way through damage."""
        count = len(locations)
        lengths, depths, available = np.zeros(count, np.uint32), np.zeros(count, np.uint8), np.zeros(count, np.bool_)
        offsets, parts, position = np.zeros(count, np.uint64), [], 0
        for _, rows in grouped(locations.containers):
            try:
                plan = self.plan(locations.take(rows))
                payload = self.fetch(plan)
            except (Corrupt, NotFound):
                continue
            lengths[rows], depths[rows], available[rows] = plan.lengths, plan.depths, True
            offsets[rows] = offsets_of(plan.lengths) + np.uint64(position)
            parts.append(payload)
            position += len(payload)
        return Contents(np.concatenate(parts) if parts else np.zeros(0, np.uint8), offsets, lengths, depths, available)

    def _level(self, plan: Plan, bases: U8, base_lengths: U32) -> U8:
        """Return the rows' bytes; `bases` are those of the deltas' bases, in order, each of its base length."""
        zero = plan.locations.containers == np.uint64(ZERO)
        total = int(plan.lengths.sum(dtype=np.uint64))
        out = np.zeros(total, np.uint8) if zero.any() else np.empty(total, np.uint8)
        starts = offsets_of(plan.lengths)
        self._copy(plan, np.flatnonzero((plan.depths == 0) & ~zero), out, starts)
        deltas = np.flatnonzero(plan.depths)
        if len(deltas):
            sizes, lengths = plan.encoded[deltas], plan.lengths[deltas]
            at = offsets_of(sizes)
            encodings = np.empty(int(sizes.sum(dtype=np.uint64)), np.uint8)
            places = np.zeros(len(plan.lengths), np.uint64)
            places[deltas] = at
            self._copy(plan, deltas, encodings, places)
            decoded = decode_many(encodings, at, sizes, bases, offsets_of(base_lengths), base_lengths, lengths)
            gather([decoded], np.zeros(len(deltas), np.int32), offsets_of(lengths), lengths, out, starts[deltas])
        return out

    def _copy(self, plan: Plan, wanted: NDArray[np.intp], out: U8, places: U64) -> None:
        """Copy the encodings of the wanted rows into `out`, row i at places[i]: one visit a block, one call each."""
        order = wanted[np.lexsort((plan.blocks[wanted], plan.locations.containers[wanted]))]
        containers, blocks = plan.locations.containers[order], plan.blocks[order]
        changes = np.flatnonzero((containers[1:] != containers[:-1]) | (blocks[1:] != blocks[:-1])) + 1
        for rows in np.split(order, changes) if len(order) else []:
            block = self._source.block(ContainerId(int(plan.locations.containers[rows[0]])), int(plan.blocks[rows[0]]))
            which, positions = np.zeros(len(rows), np.int32), plan.positions[rows].astype(np.uint64)
            gather([block], which, positions, plan.encoded[rows], out, places[rows])


def grouped(containers: U64) -> list[tuple[int, NDArray[np.intp]]]:
    """Return (container, its rows) for each container, rows ascending. Unlike np.unique it does not import numpy.ma."""
    if not len(containers):
        return []
    if (containers[1:] == containers[0]).all():
        return [(int(containers[0]), np.arange(len(containers)))]
    order = np.argsort(containers, kind="stable")
    changes = np.flatnonzero(np.diff(containers[order])) + 1
    return [(int(containers[rows[0]]), rows) for rows in np.split(order, changes)]

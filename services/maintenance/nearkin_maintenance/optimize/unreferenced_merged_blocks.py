"""Chains of gathered blocks. Invariant: one is given up as a whole, and only where that is estimated to save bytes.

S0 (raw) <- S1 <- S2       each of several versions; what leans on S0 leans on all of it
dead        dead  live     S2 kept raw: S0 and S1 go, with what refers to them
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nearkin_maintenance.gc.mark import LiveSet, Masks, is_in, mask_of
from nearkin_shared.formats.block_kinds import merged_blocks, reference_blocks
from nearkin_shared.formats.directory import Directory
from nearkin_shared.storage.container_graph import topological_order
from nearkin_shared.types import Bools

NONE = -1
RAW_SHARE_MIN = 0.35
"""What compression leaves of a stretch at least, so as not to expect too much of a new root."""
_NO_ROWS: Bools = np.zeros(0, np.bool_)


@dataclass(slots=True)
class Chain:
    """Gathered blocks that lean on one another, from the one that leans on nothing: bytes stored."""

    root_bytes: int
    root_raw_bytes: int
    own_bytes: int
    """Decoded, of the stretch with which the root began."""
    live_bytes: int = 0
    dead_bytes: int = 0
    leaning_bytes: int = 0
    leaning_raw_bytes: int = 0
    """Of the blocks that lean on the root, or on what leans on it."""
    roots: int = 0
    """Live ones that lean on dead ones: without these they lean on nothing."""
    root_lives: bool = False

    def is_given_up(self, share: float) -> bool:
        """Return whether that is estimated to save more than a share of what the chain takes."""
        if self.root_lives or not self.roots:
            return False
        gain = self.dead_bytes - self.roots * self.new_root_bytes()
        return gain > share * (self.dead_bytes + self.live_bytes)

    def new_root_bytes(self) -> float:
        """Return what a block takes more that leans on nothing any more: a stretch of raw chunks.

        The root has one, and what later versions changed, which takes about as much as where it leans on that stretch.
        """
        a_change = self.leaning_bytes / max(1, self.leaning_raw_bytes)
        without = self.root_bytes - a_change * (self.root_raw_bytes - self.own_bytes)
        return min(self.root_bytes, max(without, RAW_SHARE_MIN * self.own_bytes))


def dead_chains(reach: LiveSet, needed: Masks, share: float) -> Masks:
    """Return the dead gathered blocks, and what refers to them, that others hold which would take clearly less without.

    By whole blocks: what a part of one takes is little.
    """
    chains: list[Chain] = []
    of: dict[int, NDArray[np.int32]] = {}
    lives: dict[int, Bools] = {}
    for container in topological_order(sorted(needed), lambda c: reach.directory(c).base_containers()):
        directory = reach.directory(container)
        chunks, blocks = directory.chunks, directory.blocks
        used, living = np.zeros(len(blocks), np.bool_), np.zeros(len(blocks), np.bool_)
        used[chunks.blocks[mask_of(needed[container], len(chunks)) & chunks.there]] = True
        living[chunks.blocks[mask_of(reach.chunks.get(container, _NO_ROWS), len(chunks)) & chunks.there]] = True
        lives[container] = living
        chain = of[container] = np.full(len(blocks), NONE, np.int32)
        whole = np.flatnonzero(used & merged_blocks(directory))
        for number in whole[np.argsort(blocks.depths[whole], kind="stable")].tolist():
            stored, leans_on_dead = int(blocks.stored[number]), False
            if not blocks.depths[number]:
                chain[number] = len(chains)
                raw, own = int(blocks.raw[number]), _own_bytes(directory, number)
                chains.append(Chain(stored, raw, own, root_lives=bool(living[number])))
            else:
                first = directory.prefixes.of(number).take(slice(0, 1))
                other, ordinal = int(first.containers[0]), int(first.ordinals[0])
                if other in of:
                    block = int(reach.directory(other).chunks.blocks[ordinal])
                    chain[number], leans_on_dead = of[other][block], not lives[other][block]
            if chain[number] != NONE:
                counted = chains[chain[number]]
                if blocks.depths[number]:
                    counted.leaning_bytes += stored
                    counted.leaning_raw_bytes += int(blocks.raw[number])
                if living[number]:
                    counted.live_bytes += stored
                    counted.roots += leans_on_dead
                else:
                    counted.dead_bytes += stored
    gone = np.array([chain.is_given_up(share) for chain in chains], np.bool_)
    given_up: Masks = {}
    for container, chain in of.items():
        chunks = reach.directory(container).chunks
        dead = ~lives[container] & (chain != NONE)
        dead[dead] = gone[chain[dead]]
        rows = chunks.there & dead[chunks.blocks]
        refers = chunks.there & (reference_blocks(reach.directory(container)) & ~lives[container])[chunks.blocks]
        refers[refers] = is_in(given_up, chunks.bases.take(refers))
        if (rows | refers).any():
            given_up[container] = rows | refers
    return given_up


def _own_bytes(directory: Directory, block: int) -> int:
    """Return the decoded bytes of a block's first chunks, those one behind the other: what is taken in lies behind."""
    rows = np.flatnonzero(directory.chunks.there & (directory.chunks.blocks == block))
    first = int(np.argmax(np.append(np.diff(rows) > 1, True))) + 1
    return int(directory.chunks.encoded[rows[:first]].sum(dtype=np.int64))

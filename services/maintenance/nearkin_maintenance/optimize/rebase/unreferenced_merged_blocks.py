"""Find chains of merged blocks whose dead blocks are worth dropping.

S0 (raw) <- S1 <- S2       each holds several versions; a block that depends on S0 depends on all of it
dead        dead  live     S2 stored raw: S0 and S1 are deleted, with their reference blocks

Invariant: a dead part of a chain is dropped as a whole, and only if that is estimated to save bytes.
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
"""Compression leaves at least this share of a region: keeps the estimate of a new root cautious."""
_NO_ROWS: Bools = np.zeros(0, np.bool_)


@dataclass(slots=True)
class Chain:
    """Stored bytes of merged blocks that depend on one another, from the raw root on."""

    root_bytes: int
    root_raw_bytes: int
    own_bytes: int
    """Decoded bytes of the region with which the root started."""
    live_bytes: int = 0
    dead_bytes: int = 0
    dependent_bytes: int = 0
    dependent_raw_bytes: int = 0
    """Of all blocks above the root."""
    roots: int = 0
    """Live blocks with a dead base block: they become raw."""
    root_lives: bool = False

    def should_drop(self, share: float) -> bool:
        """Return whether dropping the dead blocks saves an estimated `share` of the chain."""
        if self.root_lives or not self.roots:
            return False
        gain = self.dead_bytes - self.roots * self.new_root_bytes()
        return gain > share * (self.dead_bytes + self.live_bytes)

    def new_root_bytes(self) -> float:
        """Return the bytes by which a block grows when it becomes raw: a region of raw chunks.

        The root holds such a region, and changes of later versions, which are estimated at the ratio of dependent
        blocks.
        """
        change_ratio = self.dependent_bytes / max(1, self.dependent_raw_bytes)
        unchanged_bytes = self.root_bytes - change_ratio * (self.root_raw_bytes - self.own_bytes)
        return min(self.root_bytes, max(unchanged_bytes, RAW_SHARE_MIN * self.own_bytes))


def merged_blocks_to_drop(live_set: LiveSet, needed: Masks, share: float) -> Masks:
    """Return the dead merged blocks, with their references, that are worth dropping.

    Only whole blocks: a part of one saves little.
    """
    chains: list[Chain] = []
    chain_numbers: dict[int, NDArray[np.int32]] = {}
    is_live_block: dict[int, Bools] = {}
    for container in topological_order(sorted(needed), lambda c: live_set.directory(c).base_containers()):
        directory = live_set.directory(container)
        chunks, blocks = directory.chunks, directory.blocks
        used, is_live = np.zeros(len(blocks), np.bool_), np.zeros(len(blocks), np.bool_)
        used[chunks.blocks[mask_of(needed[container], len(chunks)) & chunks.there]] = True
        is_live[chunks.blocks[mask_of(live_set.chunks.get(container, _NO_ROWS), len(chunks)) & chunks.there]] = True
        is_live_block[container] = is_live
        chain = chain_numbers[container] = np.full(len(blocks), NONE, np.int32)
        whole = np.flatnonzero(used & merged_blocks(directory))
        for number in whole[np.argsort(blocks.depths[whole], kind="stable")].tolist():
            stored, has_dead_base = int(blocks.stored[number]), False
            if not blocks.depths[number]:
                chain[number] = len(chains)
                raw, own = int(blocks.raw[number]), _own_bytes(directory, number)
                chains.append(Chain(stored, raw, own, root_lives=bool(is_live[number])))
            else:
                first = directory.prefixes.of(number).take(slice(0, 1))
                other, ordinal = int(first.containers[0]), int(first.ordinals[0])
                if other in chain_numbers:
                    block = int(live_set.directory(other).chunks.blocks[ordinal])
                    chain[number], has_dead_base = chain_numbers[other][block], not is_live_block[other][block]
            if chain[number] != NONE:
                this_chain = chains[chain[number]]
                if blocks.depths[number]:
                    this_chain.dependent_bytes += stored
                    this_chain.dependent_raw_bytes += int(blocks.raw[number])
                if is_live[number]:
                    this_chain.live_bytes += stored
                    this_chain.roots += has_dead_base
                else:
                    this_chain.dead_bytes += stored
    is_dropped = np.array([chain.should_drop(share) for chain in chains], np.bool_)
    dropped: Masks = {}
    for container, chain in chain_numbers.items():
        chunks = live_set.directory(container).chunks
        dead = ~is_live_block[container] & (chain != NONE)
        dead[dead] = is_dropped[chain[dead]]
        rows = chunks.there & dead[chunks.blocks]
        is_reference = (
            chunks.there & (reference_blocks(live_set.directory(container)) & ~is_live_block[container])[chunks.blocks]
        )
        is_reference[is_reference] = is_in(dropped, chunks.bases.take(is_reference))
        if (rows | is_reference).any():
            dropped[container] = rows | is_reference
    return dropped


def _own_bytes(directory: Directory, block: int) -> int:
    """Return the decoded bytes of a block's own chunks: its first rows, consecutive.

    Merged ones follow.
    """
    rows = np.flatnonzero(directory.chunks.there & (directory.chunks.blocks == block))
    first = int(np.argmax(np.append(np.diff(rows) > 1, True))) + 1
    return int(directory.chunks.encoded[rows[:first]].sum(dtype=np.int64))

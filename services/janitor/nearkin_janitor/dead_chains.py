"""Chains of gathered blocks. Invariant: one is given up as a whole, and only where that is estimated to save bytes.

S0 (raw) <- S1 <- S2       each of several versions; what leans on S0 leans on all of it
dead        dead  live     S2 kept raw: S0 and S1 go, with what refers to them
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nearkin.records import Bools
from nearkin_janitor.order import leaning_last
from nearkin_janitor.reach import Masks, Reach, filled, is_in
from nearkin_janitor.settled import gathered, referring

NONE = -1
_NO_ROWS: Bools = np.zeros(0, np.bool_)


@dataclass(slots=True)
class _Chain:
    """Gathered blocks that lean on one another, from the one that leans on nothing: bytes stored."""

    root_bytes: int
    live_bytes: int = 0
    dead_bytes: int = 0
    roots: int = 0
    """Live ones that lean on dead ones: without these they lean on nothing."""
    root_lives: bool = False


def dead_chains(reach: Reach, needed: Masks, share: float) -> Masks:
    """Return the dead gathered blocks, and what refers to them, that others hold which would take clearly less without.

    By whole blocks: what a part of one takes is little.
    """
    chains: list[_Chain] = []
    of: dict[int, NDArray[np.int32]] = {}
    lives: dict[int, Bools] = {}
    for container in leaning_last(sorted(needed), lambda c: reach.directory(c).leans_on()):
        directory = reach.directory(container)
        chunks, blocks = directory.chunks, directory.blocks
        used, living = np.zeros(len(blocks), np.bool_), np.zeros(len(blocks), np.bool_)
        used[chunks.blocks[filled(needed[container], len(chunks)) & chunks.there]] = True
        living[chunks.blocks[filled(reach.chunks.get(container, _NO_ROWS), len(chunks)) & chunks.there]] = True
        lives[container] = living
        chain = of[container] = np.full(len(blocks), NONE, np.int32)
        whole = np.flatnonzero(used & gathered(directory))
        for number in whole[np.argsort(blocks.depths[whole], kind="stable")].tolist():
            stored, leans_on_dead = int(blocks.stored[number]), False
            if not blocks.depths[number]:
                chain[number] = len(chains)
                chains.append(_Chain(stored, root_lives=bool(living[number])))
            else:
                first = directory.prefixes.of(number).take(slice(0, 1))
                other, ordinal = int(first.containers[0]), int(first.ordinals[0])
                if other in of:
                    block = int(reach.directory(other).chunks.blocks[ordinal])
                    chain[number], leans_on_dead = of[other][block], not lives[other][block]
            if chain[number] != NONE:
                counted = chains[chain[number]]
                if living[number]:
                    counted.live_bytes += stored
                    counted.roots += leans_on_dead
                else:
                    counted.dead_bytes += stored
    gone = np.array([_is_gone(chain, share) for chain in chains], np.bool_)
    given_up: Masks = {}
    for container, chain in of.items():
        chunks = reach.directory(container).chunks
        dead = ~lives[container] & (chain != NONE)
        dead[dead] = gone[chain[dead]]
        rows = chunks.there & dead[chunks.blocks]
        refers = chunks.there & (referring(reach.directory(container)) & ~lives[container])[chunks.blocks]
        refers[refers] = is_in(given_up, chunks.bases.take(refers))
        if (rows | refers).any():
            given_up[container] = rows | refers
    return given_up


def _is_gone(chain: _Chain, share: float) -> bool:
    if chain.root_lives or not chain.roots:
        return False
    gain = chain.dead_bytes - chain.roots * chain.root_bytes
    return gain > share * (chain.dead_bytes + chain.live_bytes)

"""What chunks are offered as new bases: only what is written before them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest

from nearkin_maintenance.gc.mark import LiveSet
from nearkin_maintenance.optimize.rebase.base_trees import BaseTrees
from nearkin_maintenance.optimize.rebase.replacement_bases import ReplacementBases

OLDER, NEWER = 10, 20
"""Ids. With several writers the older container may have been sealed last, and lean on the newer one."""


@pytest.mark.parametrize(("order", "offered"), [((OLDER, NEWER), [(OLDER, 0)]), ((NEWER, OLDER), [])])
def test_a_chunk_is_offered_what_is_written_before_it_alone(
    order: tuple[int, int], offered: list[tuple[int, int]]
) -> None:
    """What is said to be less deep is so once its container is written; an older one may be the next to be written."""
    depths = {OLDER: np.array([0], np.uint8), NEWER: np.array([2], np.uint8)}
    one_family = {container: np.zeros(1, np.int32) for container in depths}
    reach = SimpleNamespace(
        chunks={container: np.ones(1, np.bool_) for container in depths},
        directory=lambda container: SimpleNamespace(chunks=SimpleNamespace(depths=depths[container])),
    )
    families = SimpleNamespace(
        by_container=one_family, count=1, trees_of=lambda container, ordinals: one_family[container][ordinals]
    )
    heirs = ReplacementBases(cast("LiveSet", reach), cast("BaseTrees", families), [OLDER, NEWER], order)
    ordinals = np.zeros(1, np.uint32)
    found = heirs.candidates(NEWER, ordinals, np.array([2], np.uint8))
    assert list(zip(found.containers.tolist(), found.ordinals.tolist(), strict=True)) == offered
    assert not len(heirs.candidates(OLDER, ordinals, np.array([2], np.uint8))), "nothing came before it"

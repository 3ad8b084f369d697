"""Test the candidates for replacement bases: only chunks that are written earlier."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest

from nearkin_maintenance.gc.mark import LiveSet
from nearkin_maintenance.optimize.rebase.base_trees import BaseTrees
from nearkin_maintenance.optimize.rebase.replacement_bases import ReplacementBases

OLDER, NEWER = 10, 20
"""Container ids. With several writers the older container may be finished last, and have its bases in the newer
one.
"""


@pytest.mark.parametrize(("order", "offered"), [((OLDER, NEWER), [(OLDER, 0)]), ((NEWER, OLDER), [])])
def test_candidates_are_chunks_written_earlier(order: tuple[int, int], offered: list[tuple[int, int]]) -> None:
    """A candidate's lower depth counts once its container is written.

    An older container may be the next to be written.
    """
    depths = {OLDER: np.array([0], np.uint8), NEWER: np.array([2], np.uint8)}
    one_family = {container: np.zeros(1, np.int32) for container in depths}
    reach = SimpleNamespace(
        chunks={container: np.ones(1, np.bool_) for container in depths},
        directory=lambda container: SimpleNamespace(chunks=SimpleNamespace(depths=depths[container])),
    )
    families = SimpleNamespace(
        by_container=one_family, count=1, trees_of=lambda container, ordinals: one_family[container][ordinals]
    )
    replacements = ReplacementBases(cast("LiveSet", reach), cast("BaseTrees", families), [OLDER, NEWER], order)
    ordinals = np.zeros(1, np.uint32)
    found = replacements.candidates(NEWER, ordinals, np.array([2], np.uint8))
    assert list(zip(found.containers.tolist(), found.ordinals.tolist(), strict=True)) == offered
    assert not len(replacements.candidates(OLDER, ordinals, np.array([2], np.uint8))), "no chunk is written earlier"

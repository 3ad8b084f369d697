"""Test plans of GC runs and their pending-delete records (nearkin_maintenance.gc.gc_plan)."""

from __future__ import annotations

import numpy as np
import pytest

from nearkin_maintenance.gc.gc_plan import (
    ContainerAction,
    ContainerRemoval,
    GcPlan,
    carry_over,
    is_same_record,
    record_of,
    record_removal,
)
from nearkin_shared.formats.pending_delete_record import PendingDelete
from nearkin_shared.types import U32

WHOLE = {ContainerAction.MARK_CONTAINER, ContainerAction.DELETE}


def _ordinals(*numbers: int) -> U32:
    return np.array(numbers, np.uint32)


def _pending(at_us: int, *chunks: int, whole: bool = False) -> PendingDelete:
    return PendingDelete(at_us, _ordinals(*chunks), _ordinals(), whole)


@pytest.mark.parametrize("action", ContainerAction)
def test_removal_action_states_whether_container_is_whole(action: ContainerAction) -> None:
    """Only an action on all data of a container counts as whole."""
    assert ContainerRemoval(action, _ordinals(1), _ordinals()).whole_container == (action in WHOLE)


def test_plan_whole_containers_withdraw_all_entries() -> None:
    """The index withdraws all entries of whole containers, and the listed ones of others."""
    plan = GcPlan(
        {
            1: ContainerRemoval(ContainerAction.DELETE, _ordinals(0, 1), _ordinals(0)),
            2: ContainerRemoval(ContainerAction.REWRITE, _ordinals(3), _ordinals(1)),
        },
        {3: _ordinals(5)},
    )
    assert plan.chunks[1] is None
    assert plan.chunks[2] is not None
    assert plan.chunks[2].tolist() == [3]
    assert {container: rows.tolist() for container, rows in plan.segments.items()} == {2: [1], 3: [5]}


def test_record_of_marked_container_is_whole() -> None:
    """A pending-delete record distinguishes whole containers from parts."""
    plan = GcPlan(
        {
            1: ContainerRemoval(ContainerAction.MARK_CONTAINER, _ordinals(0), _ordinals()),
            2: ContainerRemoval(ContainerAction.MARK_CHUNKS, _ordinals(4), _ordinals()),
        }
    )
    record = record_of(plan, 70)
    assert [(entry.at_us, entry.whole) for entry in record.values()] == [(70, True), (70, False)]


def test_record_removal_rewritten_container_keeps_the_rest() -> None:
    """Chunks that a rewrite left in place stay pending, with their time."""
    record = {1: _pending(10, 1, 2, 3), 2: _pending(10, 4)}
    record_removal(record, 1, ContainerRemoval(ContainerAction.REWRITE, _ordinals(2), _ordinals()))
    record_removal(record, 2, ContainerRemoval(ContainerAction.REWRITE, _ordinals(4), _ordinals()))
    assert is_same_record(record, {1: _pending(10, 1, 3)})


def test_carry_over_new_chunks_wait_for_the_older() -> None:
    """Chunks that became unreachable later are recorded after the older ones are deleted."""
    assert is_same_record({1: carry_over(_pending(10, 1, 2), _pending(20, 2, 3))}, {1: _pending(10, 2)})
    assert is_same_record({1: carry_over(_pending(10, 1), _pending(20, 3))}, {1: _pending(20, 3)})

"""States of a local store's index: each listed transition happens, every other one is refused."""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import Enum
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from nearkin.local.index_states import (
    BACKLOG_TRANSITIONS,
    LOCK_TRANSITIONS,
    NOTES_TRANSITIONS,
    IllegalTransition,
    IndexBacklog,
    IndexEvent,
    IndexStates,
    LockState,
    NotesState,
)

Table = Mapping[Any, Mapping[IndexEvent, Any]]
REGIONS: list[tuple[str, type[Enum], Table]] = [
    ("lock", LockState, LOCK_TRANSITIONS),
    ("backlog", IndexBacklog, BACKLOG_TRANSITIONS),
    ("notes", NotesState, NOTES_TRANSITIONS),
]
CASES = [
    (name, state, event, table[state].get(event))
    for name, states, table in REGIONS
    for state, event in product(states, IndexEvent)
    if any(event in row for row in table.values())
]
INITIAL: dict[str, Enum] = {
    "lock": LockState.UNLOCKED,
    "backlog": IndexBacklog.COMPLETE,
    "notes": NotesState.CURRENT,
}


def states_of(states: IndexStates) -> dict[str, Enum]:
    return {"lock": states.lock, "backlog": states.backlog, "notes": states.notes}


@pytest.mark.parametrize(
    ("region", "state", "event", "target"),
    CASES,
    ids=[f"{region}-{state.name}-{event.name}" for region, state, event, _ in CASES],
)
def test_event_changes_state_as_listed_or_is_refused(
    region: str, state: Enum, event: IndexEvent, target: Enum | None
) -> None:
    states = IndexStates()
    setattr(states, region, state)
    before = states_of(states)
    if target is None:
        with pytest.raises(IllegalTransition, match=rf"event {event.name} in .*{state.name}.*report it"):
            states.apply(event)
        assert states_of(states) == before
    else:
        states.apply(event)
        assert states_of(states) == {**before, region: target}


def test_every_event_is_known_to_a_region() -> None:
    known = {event for _, _, table in REGIONS for row in table.values() for event in row}
    assert known == set(IndexEvent)


@pytest.mark.parametrize(("region", "states", "table"), REGIONS)
def test_every_state_is_reached_and_left_by_close(region: str, states: type[Enum], table: Table) -> None:
    reached = {INITIAL[region]}
    while True:
        further = reached | {target for state in reached for target in table[state].values()}
        if further == reached:
            break
        reached = further
    assert reached == set(states) == set(table)
    assert all(IndexEvent.CLOSED in row for row in table.values())


def test_event_of_two_regions_that_one_refuses_changes_neither(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(NOTES_TRANSITIONS, NotesState.CURRENT, {})
    states = IndexStates()
    states.apply(IndexEvent.WRITE_LOCKED)
    with pytest.raises(IllegalTransition):
        states.apply(IndexEvent.CLOSED)
    assert states.lock is LockState.LOCKED


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        ([], set()),
        ([IndexEvent.WRITE_LOCKED], {"is_locked", "is_writing"}),
        ([IndexEvent.WRITE_LOCKED, IndexEvent.ANNOUNCED], {"is_locked", "is_writing", "is_announced"}),
        (
            [IndexEvent.WRITE_LOCKED, IndexEvent.ANNOUNCED, IndexEvent.CLAIMED, IndexEvent.PUT_STARTED],
            {"is_locked", "is_writing", "is_announced", "is_claimed", "is_putting", "may_lack_data"},
        ),
        ([IndexEvent.PUT_STARTED, IndexEvent.PUT_PUBLISHED], {"is_putting"}),
        ([IndexEvent.PUT_STARTED, IndexEvent.PUT_ENDED], {"may_lack_data"}),
        ([IndexEvent.WITHDRAWAL_LOCKED], {"is_locked"}),
        ([IndexEvent.STEP_LOCKED, IndexEvent.CLAIMED], {"is_locked", "is_step", "is_claimed"}),
    ],
)
def test_properties_follow_the_states(events: list[IndexEvent], expected: set[str]) -> None:
    states = IndexStates()
    for event in events:
        states.apply(event)
    names = ["is_locked", "is_writing", "is_step", "is_announced", "is_claimed", "is_putting", "may_lack_data"]
    assert {name for name in names if getattr(states, name)} == expected


def test_pictures_show_the_transitions_between_states() -> None:
    text = (Path(__file__).parents[3] / "docs/internals/local-index.md").read_text()
    pictures = re.findall(r"```mermaid\n(.*?)```", text, re.DOTALL)
    assert len(pictures) == len(REGIONS)
    for picture, (_, _, table) in zip(pictures, REGIONS, strict=True):
        shown = re.findall(r"^    (\w+) --> (\w+) : (\w+)$", picture, re.MULTILINE)
        listed = {
            (state.name, target.name, event.name)
            for state, row in table.items()
            for event, target in row.items()
            if target is not state and event is not IndexEvent.CLOSED
        }
        assert set(shown) == listed

"""Trials: neighbours are left untried only in a long blob that found few bases among them, and looked at again."""

from __future__ import annotations

from pathlib import Path

from nearkin import open_store
from nearkin.testing.generated import mutated, random_bytes, text_like
from nearkin.testing.stores import settings
from nearkin_delta.trials import CHUNKS_MIN, EVERY, Trials


def fed(trials: Trials, blob: object, batches: int, found: int, tried: int = 512) -> list[bool]:
    answers = []
    for _ in range(batches):
        answers.append(trials.wanted(blob))
        if answers[-1]:
            trials.heard(tried, found)
    return answers


def test_one_batch_in_four_is_tried_where_few_are_found() -> None:
    trials = Trials()
    before = CHUNKS_MIN // 512
    assert fed(trials, "a", before, found=20) == [True] * before
    assert fed(trials, "a", 3 * EVERY, found=20) == ([False] * (EVERY - 1) + [True]) * 3


def test_where_many_are_found_all_are_tried() -> None:
    assert all(fed(Trials(), "a", 50, found=70))


def test_it_begins_again_when_more_are_found() -> None:
    trials = Trials()
    fed(trials, "a", 20, found=20)
    answers = fed(trials, "a", 60, found=400)
    assert not all(answers[: 2 * EVERY])
    assert all(answers[-30:])


def test_each_blob_is_judged_by_itself_and_several_at_once_always_tried() -> None:
    trials = Trials()
    fed(trials, "a", 20, found=0)
    assert fed(trials, "b", 2, found=0) == [True, True]
    fed(trials, "b", 20, found=0)
    assert fed(trials, None, 20, found=0) == [True] * 20
    assert fed(trials, "b", 1, found=0) == [True]


def test_a_small_blob_is_always_tried() -> None:
    assert all(fed(Trials(), "a", 100, found=0, tried=CHUNKS_MIN // 100 - 1))


def test_with_a_share_of_nothing_all_are_tried() -> None:
    assert all(fed(Trials(0), "a", 50, found=0))


def test_chunks_without_old_neighbours_say_nothing_of_those_that_have_some(tmp_path: Path) -> None:
    first = text_like(12_000_000, 1)
    second = random_bytes(24_000_000, 2) + mutated(first, 3, edits=2000, edit_bytes_max=30)
    deltas = []
    for tries in (False, True):
        with open_store(tmp_path / str(tries), settings=settings({"base": {"try_all": tries}})) as store:
            store.put("k", first)
            deltas.append(store.put("k", second).ledger.delta_chunks)
    assert deltas[0] == deltas[1] > 800

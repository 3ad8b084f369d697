"""Trials: neighbours are left untried only in a long blob that found few bases among them, and looked at again."""

from __future__ import annotations

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

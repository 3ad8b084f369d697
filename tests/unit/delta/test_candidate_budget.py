"""Test the candidate budget.

Candidates are skipped only in a long blob with few bases, and sampled again.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from nearkin import open_store
from nearkin.lab.generated_data import mutate, random_bytes, text_like
from nearkin_delta.candidate_budget import CHUNKS_MIN, EVERY, RANK_CHUNKS_MIN, CandidateBudget, RankBudget
from tests.support.data.stores import settings


def fed(trials: CandidateBudget, blob: object, batches: int, found: int, tried: int = 512) -> list[bool]:
    answers = []
    for _ in range(batches):
        answers.append(trials.should_try(blob))
        if answers[-1]:
            trials.record_result(tried, found)
    return answers


def test_budget_with_few_bases_tries_one_batch_in_eight() -> None:
    trials = CandidateBudget()
    before = CHUNKS_MIN // 512
    assert fed(trials, "a", before, found=20) == [True] * before
    assert fed(trials, "a", 3 * EVERY, found=20) == ([False] * (EVERY - 1) + [True]) * 3


def test_budget_with_many_bases_tries_all() -> None:
    assert all(fed(CandidateBudget(), "a", 50, found=70))


def test_budget_resumes_when_more_bases_are_found() -> None:
    trials = CandidateBudget()
    fed(trials, "a", 20, found=20)
    answers = fed(trials, "a", 60, found=400)
    assert not all(answers[: 2 * EVERY])
    assert all(answers[-30:])


def test_budget_judges_each_blob_alone() -> None:
    """Candidates of a batch of several blobs are always tried."""
    trials = CandidateBudget()
    fed(trials, "a", 20, found=0)
    assert fed(trials, "b", 2, found=0) == [True, False]
    fed(trials, "b", 20, found=0)
    assert fed(trials, None, 20, found=0) == [True] * 20
    assert fed(trials, "b", 1, found=0) == [True]


def test_budget_of_small_blob_is_unlimited() -> None:
    assert all(fed(CandidateBudget(), "a", 100, found=0, tried=CHUNKS_MIN // 100 - 1))


def test_budget_with_share_zero_is_unlimited() -> None:
    assert all(fed(CandidateBudget(0), "a", 50, found=0))


def test_rank_budget_judges_each_rank_by_its_candidates() -> None:
    trials, tried = RankBudget(), list[tuple[int, int]]()
    ranks = np.repeat(np.array([0, 2], np.uint8), RANK_CHUNKS_MIN)
    for _ in range(1 + EVERY):
        chosen = trials.should_try("a", ranks)
        assert all(len(set(chosen[ranks == rank])) == 1 for rank in (0, 2)), "a rank must be tried as a whole"
        tried.append((int(chosen[0]), int(chosen[-1])))
        trials.record_result(ranks[chosen], ranks[chosen] == 0)  # all of the first rank are bases, of the third none
    assert tried == [(1, 1)] + [(1, 0)] * (EVERY - 1) + [(1, 1)]


def test_rank_below_its_cost_is_tried_in_few_batches() -> None:
    trials, requested = RankBudget(), list[list[bool]]()
    for _ in range(1 + EVERY):
        ranks = np.flatnonzero(trials.should_request("a", 3)).astype(np.uint8)
        requested.append([rank in ranks for rank in range(3)])
        named = np.repeat(ranks, RANK_CHUNKS_MIN)
        trials.record_result(named, named == 0)
    assert requested == [[True] * 3] + [[True, False, False]] * (EVERY - 1) + [[True] * 3]
    assert trials.should_request("another", 3).all()


def test_unknown_ranks_are_tried_and_none_is_accepted() -> None:
    trials = RankBudget()
    assert trials.should_try("a", np.array([7, 1, 7], np.uint8)).all()
    assert trials.should_try("a", np.zeros(0, np.uint8)).tolist() == []
    trials.record_result(np.zeros(0, np.uint8), np.zeros(0, np.bool_))


def test_chunks_without_neighbours_do_not_count_for_ranks(tmp_path: Path) -> None:
    first = text_like(12_000_000, 1)
    second = random_bytes(24_000_000, 2) + mutate(first, 3, edits=2000, edit_bytes_max=30)
    deltas = []
    for tries in (False, True):
        with open_store(tmp_path / str(tries), settings=settings({"block": {"thorough": tries}}), create=True) as store:
            store.put("k", first)
            deltas.append(store.put("k", second).ledger.delta_chunks)
    assert deltas[0] == deltas[1] > 800

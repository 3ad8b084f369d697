"""Test queues that are served by round robin."""

from __future__ import annotations

from nearkin_committer.round_robin import RoundRobin


def filled(**items_of: str) -> RoundRobin[str, str]:
    queues: RoundRobin[str, str] = RoundRobin()
    for key, items in items_of.items():
        for item in items:
            queues.add(key, item)
    return queues


def taken(queues: RoundRobin[str, str], count: int) -> str:
    return "".join(queues.take()[1] for _ in range(count))


def test_two_queues_are_served_alternately() -> None:
    queues = filled(b="56", a="1234")
    assert taken(queues, 6) == "152634"
    assert len(queues) == 0


def test_item_of_an_empty_queue_is_next() -> None:
    queues = filled(a="1234", b="56")
    taken(queues, 2)
    queues.add("c", "7")
    assert taken(queues, 1) == "7"


def test_queue_that_is_filled_again_waits() -> None:
    """A queue with one item at a time would otherwise be served alone."""
    queues = filled(a="1111")
    found = ""
    for _ in range(6):
        queues.add("b", "2")
        found += taken(queues, 1)
    assert found.count("1") >= 2

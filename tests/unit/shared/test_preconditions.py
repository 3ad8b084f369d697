"""Test preconditions of puts, their messages, and the checker of histories."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime
from math import inf

import pytest

from nearkin_shared.errors import BadInput, Corrupt, PreconditionFailed
from nearkin_shared.formats.message import End, Envelope, decode, encode
from nearkin_shared.preconditions import ANY, DIGESTS_MAX, Precondition, precondition_of, tags_of
from nearkin_shared.results import VersionInfo
from tests.support.checks.linearizability import ABSENT, Operation, is_linearizable

ONE, TWO = f"blake3:{'1' * 64}", f"blake3:{'2' * 64}"
NEWEST = VersionInfo("k", 3, 1, datetime(2026, 1, 1, tzinfo=UTC), ONE, None, 1, 1, {})
END = End(Envelope(bytes(16), "t", "k"), 1, bytes(16), 5, bytes(32))


@pytest.mark.parametrize(
    ("precondition", "newest", "holds"),
    [
        (Precondition(if_none_match=(ANY,)), None, True),
        (Precondition(if_none_match=(ANY,)), NEWEST, False),
        (Precondition(if_none_match=(TWO,)), NEWEST, True),
        (Precondition(if_none_match=(TWO, ONE)), NEWEST, False),
        (Precondition(if_match=(ANY,)), None, False),
        (Precondition(if_match=(ANY,)), NEWEST, True),
        (Precondition(if_match=(TWO, ONE)), NEWEST, True),
        (Precondition(if_match=()), NEWEST, False),
        (Precondition(if_match=(ONE,), if_none_match=(ONE,)), NEWEST, False),
    ],
)
def test_precondition_is_decided_by_the_newest_version(
    precondition: Precondition, newest: VersionInfo | None, holds: bool
) -> None:
    """F.16: a precondition is compared with the newest visible version only."""
    if holds:
        precondition.check("k", newest)
    else:
        with pytest.raises(PreconditionFailed, match="precondition failed"):
            precondition.check("k", newest)


def test_arguments_that_are_no_digest_are_refused() -> None:
    """F.16: a value that no version can match is an error of the caller."""
    assert precondition_of(None, None) is None
    assert precondition_of(ONE, "*") == Precondition((ONE,), (ANY,))
    for text in ("", "1", "blake3:12", ONE.upper()):
        with pytest.raises(BadInput, match="if_match"):
            precondition_of(text, None)
    with pytest.raises(BadInput, match="at most"):
        tags_of("If-Match", [f"blake3:{number:064x}" for number in range(DIGESTS_MAX + 1)])


def test_end_with_precondition_has_message_format_2() -> None:
    """F.16: a worker that does not know preconditions must refuse the message."""
    for precondition in (Precondition((ONE, TWO)), Precondition(None, (ANY,)), Precondition((), (TWO,))):
        conditional = replace(END, precondition=precondition)
        assert encode(conditional)[4] == 2
        assert decode(encode(conditional), "m") == conditional
    assert encode(END)[4] == 1
    assert decode(encode(END), "m") == END


@pytest.mark.parametrize("tags", ["*", [1], ["x"], [ONE] * (DIGESTS_MAX + 1)])
def test_end_with_hostile_precondition_is_corrupt(tags: object) -> None:
    """F.16: values that arrive by Kafka are bounded and validated."""
    data = encode(replace(END, precondition=Precondition((ANY,))))
    header, text = data[: data.index(b"{")], json.loads(data[data.index(b"{") :])
    payload = json.dumps({**text, "if_match": tags}).encode()
    with pytest.raises(Corrupt, match="if_match"):
        decode(header[:40] + len(payload).to_bytes(4, "little") + header[44:] + payload, "m")


# --- the checker -----------------------------------------------------------------------------------------------------


def put(
    started: float, ended: float, value: str, expected: str | None = None, *, done: bool | None = True
) -> Operation:
    return Operation("put", started, ended, value, expected, done)


def test_checker_accepts_overlapping_puts_in_any_order() -> None:
    """F.16: of two overlapping conditional puts either may win."""
    history = [put(0, 9, "a", ABSENT), put(1, 5, "b", ABSENT, done=False), Operation("get", 6, 7, "a")]
    assert is_linearizable(history)
    assert is_linearizable([put(0, 9, "a"), put(1, 8, "b"), Operation("get", 2, 3, "b"), Operation("get", 4, 5, "a")])


def test_checker_refuses_two_winners_of_one_state() -> None:
    """F.16: the checker detects two `If-None-Match: *` of one key that are both answered 201."""
    assert not is_linearizable([put(0, 9, "a", ABSENT), put(1, 8, "b", ABSENT)])
    assert not is_linearizable([put(0, 1, "x"), put(2, 9, "a", "x"), put(3, 8, "b", "x")])


def test_checker_refuses_stale_reads_and_lost_deletions() -> None:
    """F.16: a read sees the last completed write.

    A put conditional on a deleted version does not undo the deletion.
    """
    assert not is_linearizable([put(0, 1, "a"), put(2, 3, "b"), Operation("get", 4, 5, "a")])
    erasure = Operation("delete", 2, 4)
    assert not is_linearizable([put(0, 1, "a"), erasure, put(3, 6, "b", "a"), Operation("get", 7, 8, "b")])
    assert is_linearizable([put(0, 1, "a"), erasure, put(3, 6, "b", "a"), Operation("get", 7, 8, None)])


def test_checker_accepts_either_effect_of_a_lost_answer() -> None:
    """F.16: a call without an answer may take effect at any time after it began, or never."""
    lost = put(0, inf, "a", done=None)
    assert is_linearizable([lost, Operation("get", 1, 2, None), Operation("get", 3, 4, "a")])
    assert is_linearizable([lost, Operation("get", 1, 2, None)])
    assert not is_linearizable([lost, Operation("get", 1, 2, "a"), Operation("get", 3, 4, None)])

"""Names that shards sent ahead: found only under a grant that lasts, bounded, and checked."""

from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import msgspec
import numpy as np
import pytest

from nearkin_shared.errors import BadInput
from nearkin_shared.index.shards import held_names, shard_messages
from nearkin_shared.index.shards.held_names import (
    ANSWERS_WITHOUT,
    CARRIED_BYTES_FIRST,
    CARRIED_BYTES_MIN,
    HELD_SECONDS,
    NAMES_MAX,
    HeldNames,
)
from nearkin_shared.index.shards.key_ranges import owners_of_names
from nearkin_shared.index.shards.shard_messages import CARRIED_BYTES_MAX, Carried, CarriedRows, Located, Lookup
from nearkin_shared.types import U8, Bools, Locations

SHARDS = 2
CONTAINER = 1 << 40


class Clock:
    """Seconds that the test sets."""

    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


@pytest.fixture
def clock() -> Iterator[Clock]:
    clock = Clock()
    with mock.patch.object(held_names, "now_seconds", clock):
        yield clock


def names_of(shard: int, count: int, seed: int = 0) -> U8:
    """Return random chunk names of one shard."""
    names = np.random.default_rng(seed).integers(0, 256, (count, 32), np.uint8)
    names[:, 0] = names[:, 0] // 2 + 128 * shard
    return names


def carried(grant: bytes, names: U8 | None = None, first: int = 0) -> Carried:
    """Return an answer with these names at ascending ordinals."""
    if names is None:
        return Carried(grant)
    count = len(names)
    containers = np.full(count, CONTAINER, np.uint64)
    return Carried.of(grant, CarriedRows(names, containers, np.arange(first, first + count, dtype=np.uint32)))


def find(held: HeldNames, names: U8) -> tuple[Locations, Bools]:
    return held.find("chunks", names, owners_of_names(names, SHARDS))


def test_held_name_is_found_until_its_grant_ends(clock: Clock) -> None:
    """Each shard has a grant of its own, counted from before the request; others are not found."""
    held, first, second = HeldNames(SHARDS), names_of(0, 100), names_of(1, 100)
    held.note(0, "chunks", carried(b"a", first), 100.0)
    held.note(1, "chunks", carried(b"b", second), 100.5)
    locations, found = find(held, np.concatenate([first, second, first ^ np.uint8(1)]))
    assert found.tolist() == [True] * 200 + [False] * 100
    assert locations.ordinals[:200].tolist() == [*range(100), *range(100)]
    assert set(locations.containers[:200].tolist()) == {CONTAINER}
    clock.seconds = 100.0 + HELD_SECONDS
    assert not find(held, first)[1].any()
    assert find(held, second)[1].all()


def test_same_grant_prolongs_and_another_one_drops(clock: Clock) -> None:
    """An answer without names counts; a request that was sent before changes nothing."""
    held, names = HeldNames(SHARDS), names_of(0, 100)
    held.note(0, "chunks", carried(b"a", names), 100.0)
    held.note(0, "segments", carried(b"a"), 100.9)
    held.note(0, "chunks", carried(b"a"), 99.0)
    clock.seconds = 101.8
    assert find(held, names)[1].all()
    held.note(0, "segments", carried(b"b"), 101.7)
    assert not find(held, names)[1].any()


def test_late_answer_of_an_earlier_grant_ends_with_it(clock: Clock) -> None:
    """Its names are not held under the grant of a later request."""
    held, names, later = HeldNames(SHARDS), names_of(0, 100), names_of(0, 100, seed=1)
    held.note(0, "chunks", carried(b"b", later), 100.9)
    held.note(0, "chunks", carried(b"a", names), 100.0)
    assert find(held, names)[1].all()
    assert not find(held, later)[1].any()
    clock.seconds = 100.0 + HELD_SECONDS
    assert not find(held, names)[1].any()


def test_names_beyond_the_bound_replace_the_oldest(clock: Clock) -> None:
    """A client that reads on holds at most NAMES_MAX, and the last answers among them."""
    held, each = HeldNames(SHARDS), 8000
    answers = [names_of(0, each, seed) for seed in range(NAMES_MAX["chunks"] // each + 4)]
    for names in answers:
        held.note(0, "chunks", carried(b"a", names), clock.seconds)
    count = sum(int(find(held, names)[1].sum()) for names in answers)
    assert NAMES_MAX["chunks"] // 2 - each < count <= NAMES_MAX["chunks"]
    assert find(held, answers[-1])[1].all()
    assert not find(held, answers[0])[1].any()


def test_budget_follows_the_use_of_carried_names(clock: Clock) -> None:
    """It doubles up to the bound of an answer while names are used, halves while they are not, and pauses."""
    held = HeldNames(SHARDS)
    assert held.budget("chunks", 0) == CARRIED_BYTES_FIRST
    for seed in range(6):
        names = names_of(0, 100, seed)
        held.note(0, "chunks", carried(b"a", names), clock.seconds)
        find(held, names)
    assert held.budget("chunks", 0) == CARRIED_BYTES_MAX
    assert held.budget("chunks", 1) == CARRIED_BYTES_FIRST
    for seed in range(6):
        held.note(0, "chunks", carried(b"a", names_of(0, 100, seed)), clock.seconds)
    assert [held.budget("chunks", 0) for _ in range(ANSWERS_WITHOUT + 1)] == [0] * ANSWERS_WITHOUT + [CARRIED_BYTES_MIN]
    assert held.budget("features", 0) == 0


def test_carried_names_of_another_shard_are_refused(clock: Clock) -> None:
    """Their shard did not vouch for them: nothing of the answer is held."""
    held = HeldNames(SHARDS)
    names = np.concatenate([names_of(0, 100), names_of(1, 1)])
    with pytest.raises(BadInput, match="other shards"):
        held.note(0, "chunks", carried(b"a", names), clock.seconds)
    assert held.is_empty("chunks")


@pytest.mark.parametrize(
    "fields",
    [
        {"grant": b""},
        {"grant": bytes(65)},
        {"counts": bytes(8)},
        {"containers": bytes(16)},
        {"ordinals": bytes(4)},
        {"ordinals": bytes(41)},
        {"keys": bytes(CARRIED_BYTES_MAX + 32)},
        {"keys": bytes(32 * 9)},
    ],
)
def test_carried_lengths_that_disagree_are_refused(fields: dict[str, bytes]) -> None:
    """No row of a damaged answer is taken for another."""
    sound = msgspec.to_builtins(carried(b"a", names_of(0, 10)), builtin_types=(bytes,))
    located = {"containers": b"", "ordinals": b"", "found": b""}

    def decoded(**changed: bytes) -> CarriedRows:
        data = msgspec.msgpack.encode({**located, "carried": {**sound, **changed}})
        found: Carried = shard_messages.decode_answer("locate", data).carried
        return found.rows("chunks")

    assert len(decoded().keys) == 10
    with pytest.raises(BadInput):
        decoded(**fields)


class EarlierLookup(msgspec.Struct):
    """Request of a release whose shards carry no names."""

    table: str
    keys: bytes


class EarlierLocated(msgspec.Struct):
    """Answer of that release."""

    containers: bytes
    ordinals: bytes
    found: bytes


def test_messages_are_read_by_an_earlier_release() -> None:
    """A shard of it ignores the budget; a client of it ignores the names, which it never gets."""
    lookup = shard_messages.encode(Lookup("chunks", bytes(32), 1000))
    assert msgspec.msgpack.decode(lookup, type=EarlierLookup) == EarlierLookup("chunks", bytes(32))
    earlier = msgspec.msgpack.encode(EarlierLookup("chunks", bytes(32)))
    assert shard_messages.decode_request("locate", earlier) == Lookup("chunks", bytes(32), 0)
    plain = Located(bytes(8), bytes(4), bytes(1))
    answer = EarlierLocated(bytes(8), bytes(4), bytes(1))
    assert shard_messages.encode(plain) == msgspec.msgpack.encode(answer)
    assert shard_messages.decode_answer("locate", msgspec.msgpack.encode(answer)) == plain
    full = Located(bytes(8), bytes(4), bytes(1), carried(b"a", names_of(0, 10)))
    assert msgspec.msgpack.decode(shard_messages.encode(full), type=EarlierLocated) == answer

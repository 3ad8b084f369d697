"""Frozen dataclasses: ours beside the library's own."""

from __future__ import annotations

import copy
import pickle
from dataclasses import FrozenInstanceError, dataclass, field, fields, replace
from typing import Any

import pytest

from nearkin.config_reduction import DeltaSettings
from nearkin.frozen import frozen, held


@frozen
class Ours:
    """A record."""

    number: int
    name: str = "a"
    secret: str = field(default="s", repr=False)
    note: list[int] = field(default_factory=list, compare=False)


@held
class Held:
    """A record that stays as it was made."""

    number: int
    name: str = "a"


@dataclass(frozen=True, slots=True)
class Theirs:
    """The same record, as the library makes it."""

    number: int
    name: str = "a"
    secret: str = field(default="s", repr=False)
    note: list[int] = field(default_factory=list, compare=False)


MADE: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
    ((1,), {}),
    ((1, "b"), {}),
    ((2,), {"note": [1]}),
    ((1,), {"secret": "t"}),
]


@pytest.mark.parametrize(("args", "named"), MADE)
@pytest.mark.parametrize(("others", "others_named"), MADE)
def test_they_compare_hash_and_print_as_the_librarys_do(
    args: tuple[Any, ...], named: dict[str, Any], others: tuple[Any, ...], others_named: dict[str, Any]
) -> None:
    ours, theirs = Ours(*args, **named), Theirs(*args, **named)
    assert repr(ours) == repr(theirs).replace("Theirs", "Ours")
    same = theirs == Theirs(*others, **others_named)
    assert (ours == Ours(*others, **others_named)) is same
    assert (hash(ours) == hash(Ours(*others, **others_named))) is same
    assert ours != theirs
    assert [each.name for each in fields(Ours)] == [each.name for each in fields(Theirs)]


def test_they_are_replaced_copied_and_pickled() -> None:
    ours = Ours(1, note=[3])
    assert replace(ours, name="z") == Ours(1, "z")
    for other in (copy.copy(ours), copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert other == ours
        assert other.note == [3]


def test_no_field_can_be_added() -> None:
    with pytest.raises(AttributeError):
        Ours(1).other = 3  # type: ignore[attr-defined]


@pytest.mark.parametrize("made", [Held(1), DeltaSettings()], ids=["held", "settings"])
def test_what_is_held_cannot_be_set_or_deleted(made: Any) -> None:
    name = fields(made)[0].name
    before = repr(made)
    with pytest.raises(FrozenInstanceError, match=f"{type(made).__name__}.{name} cannot be set"):
        setattr(made, name, 3)
    with pytest.raises(FrozenInstanceError):
        delattr(made, name)
    assert repr(made) == before
    assert pickle.loads(pickle.dumps(made)) == made
    assert replace(made) == made

"""Compare the frozen dataclasses with those of the library."""

from __future__ import annotations

import copy
import inspect
import pickle
from dataclasses import FrozenInstanceError, asdict, astuple, dataclass, field, fields, replace
from typing import Any

import pytest

from nearkin_shared.config.reduction import DeltaSettings
from nearkin_shared.utils.frozen import frozen, held


@frozen
class Ours:
    """A record."""

    number: int
    name: str = "a"
    secret: str = field(default="s", repr=False)
    note: list[int] = field(default_factory=list, compare=False)


@held
class Held:
    """A record that is immutable."""

    number: int
    name: str = "a"


@dataclass(frozen=True, slots=True)
class Theirs:
    """The same record, made by the library."""

    number: int
    name: str = "a"
    secret: str = field(default="s", repr=False)
    note: list[int] = field(default_factory=list, compare=False)


@frozen
class Plain:
    """A record with types and values only."""

    number: int
    name: str = "a"
    ratio: float = 0.5


@dataclass(frozen=True, slots=True)
class TheirPlain:
    """The same record, made by the library."""

    number: int
    name: str = "a"
    ratio: float = 0.5


@frozen
class Nothing:
    """A record without fields."""


@frozen
class Checked:
    """A record that validates its values."""

    number: int

    def __post_init__(self) -> None:
        if self.number < 0:
            raise ValueError(self.number)


MADE: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
    ((1,), {}),
    ((1, "b"), {}),
    ((2,), {"note": [1]}),
    ((1,), {"secret": "t"}),
]


@pytest.mark.parametrize(("args", "named"), MADE)
@pytest.mark.parametrize(("others", "others_named"), MADE)
def test_records_compare_hash_and_print_as_the_library_s(
    args: tuple[Any, ...], named: dict[str, Any], others: tuple[Any, ...], others_named: dict[str, Any]
) -> None:
    ours, theirs = Ours(*args, **named), Theirs(*args, **named)
    assert repr(ours) == repr(theirs).replace("Theirs", "Ours")
    same = theirs == Theirs(*others, **others_named)
    assert (ours == Ours(*others, **others_named)) is same
    assert (hash(ours) == hash(Ours(*others, **others_named))) is same
    assert ours != theirs  # type: ignore[comparison-overlap]
    assert [each.name for each in fields(Ours)] == [each.name for each in fields(Theirs)]


def test_records_are_replaced_copied_and_pickled() -> None:
    ours = Ours(1, note=[3])
    assert replace(ours, name="z") == Ours(1, "z")
    for other in (copy.copy(ours), copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert other == ours
        assert other.note == [3]


def test_no_field_can_be_added() -> None:
    with pytest.raises(AttributeError):
        Ours(1).other = 3  # type: ignore[attr-defined]


@pytest.mark.parametrize("made", [Held(1), DeltaSettings()], ids=["held", "settings"])
def test_fields_of_frozen_record_cannot_be_set_or_deleted(made: Any) -> None:
    name = fields(made)[0].name
    before = repr(made)
    with pytest.raises(FrozenInstanceError, match=f"{type(made).__name__}.{name} cannot be set"):
        setattr(made, name, 3)
    with pytest.raises(FrozenInstanceError):
        delattr(made, name)
    assert repr(made) == before
    assert pickle.loads(pickle.dumps(made)) == made
    assert replace(made) == made


@pytest.mark.parametrize(
    ("args", "named"),
    [((1,), {}), ((1, "b"), {}), ((1, "b", 2.5), {}), ((), {"ratio": 1.5, "number": 3}), ((4,), {"name": "c"})],
)
def test_plain_record_is_constructed_as_the_library_s(args: tuple[Any, ...], named: dict[str, Any]) -> None:
    ours, theirs = Plain(*args, **named), TheirPlain(*args, **named)
    assert astuple(ours) == astuple(theirs)


@pytest.mark.parametrize(
    ("args", "named"),
    [((), {}), ((1, "b", 2.5, 4), {}), ((1,), {"number": 2}), ((1,), {"colour": "red"}), ((), {"name": "b"})],
)
def test_plain_record_refuses_as_the_library_s(args: tuple[Any, ...], named: dict[str, Any]) -> None:
    """Both raise the same error with the same message."""
    with pytest.raises(TypeError) as theirs:
        TheirPlain(*args, **named)
    with pytest.raises(TypeError) as ours:
        Plain(*args, **named)
    assert str(ours.value) == str(theirs.value).replace("TheirPlain", "Plain")


def test_signature_is_the_library_s() -> None:
    assert inspect.signature(Plain) == inspect.signature(TheirPlain)
    assert inspect.signature(Ours) == inspect.signature(Theirs)


def test_each_class_has_its_own_fields() -> None:
    """Classes of three fields share the code of `__init__`, but neither names nor values."""
    other = frozen(type("Other", (), {"__annotations__": {"x": "int", "y": "int", "z": "int"}, "z": 7}))
    made, plain = other(1, 2), Plain(3)
    assert (made.x, made.y, made.z) == (1, 2, 7)
    assert (plain.number, plain.name, plain.ratio) == (3, "a", 0.5)
    with pytest.raises(TypeError, match="missing 2 required positional arguments: 'x' and 'y'"):
        other()


def test_record_without_fields_and_validating_record_work() -> None:
    assert Nothing() == Nothing()
    assert Checked(1).number == 1
    with pytest.raises(ValueError, match="-1"):
        Checked(-1)


def test_default_before_a_field_without_one_is_refused() -> None:
    space = {"__annotations__": {"x": "int", "y": "int"}, "x": 7}
    with pytest.raises(TypeError):
        dataclass(type("Theirs", (), dict(space)))
    with pytest.raises(TypeError, match=r"x has a default, and a field after it has none"):
        frozen(type("Other", (), dict(space)))


def test_plain_class_is_a_dataclass_of_the_library() -> None:
    """Ours have all attributes of the classes that the library makes; no signature becomes the docstring."""
    made: Any = frozen(type("Other", (), {"__annotations__": {"x": "int", "y": "int"}, "y": 7}))
    library: Any = dataclass(slots=True)(type("Other", (), {"__annotations__": {"x": "int", "y": "int"}, "y": 7}))
    assert made.__doc__ == "Other"
    assert (made.__slots__, made.__match_args__) == (library.__slots__, library.__match_args__)
    assert asdict(made(1)) == {"x": 1, "y": 7}
    for ours, theirs in zip(fields(made), fields(library), strict=True):
        assert repr(ours) == repr(theirs)
    sub: Any = dataclass(slots=True)(type("Sub", (made,), {"__annotations__": {"z": "int"}, "z": 8}))
    assert astuple(sub(1)) == (1, 7, 8)
    with pytest.raises(ValueError, match="use default_factory"):
        frozen(type("Other", (), {"__annotations__": {"x": "list"}, "x": []}))


def test_nested_record_has_the_qualified_name_of_the_library() -> None:
    """Name a nested class in `repr` and for pickle as the library does."""

    class Outer:
        @frozen
        class Plain:
            """A plain record."""

            number: int

        @dataclass(frozen=True, slots=True)
        class OfTheLibrary:
            """The same of the library."""

            number: int

    assert repr(Outer.Plain(1)) == repr(Outer.OfTheLibrary(1)).replace("OfTheLibrary", "Plain")
    assert Outer.Plain.__qualname__ == Outer.OfTheLibrary.__qualname__.replace("OfTheLibrary", "Plain")

"""Test `get --salvage` of a damaged version and `get --at` of a time."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nearkin import open_store
from nearkin.lab.generated_data import random_bytes, text_like
from nearkin.salvage import place
from nearkin_shared.storage.manifests import object_name
from tests.support.checks.commands import InProcess
from tests.support.data.stores import SMALL, containers, flip, settings
from tests.support.fakes.scripted_gateway import TOKEN, ScriptedGateway

CHOSEN = settings(SMALL)
CONTENT = random_bytes(900_000, 1) + bytes(100_000) + text_like(500_000, 2)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    with open_store(tmp_path / "store", settings=CHOSEN, create=True) as store:
        for number in range(3):  # in containers of their own
            store.put(f"part{number}", CONTENT[number * 500_000 : (number + 1) * 500_000])
        store.put("disk.img", CONTENT)
    return tmp_path / "store"


def check_holes(written: bytes, holes: list[dict[str, object]]) -> int:
    """Check that bytes outside holes are the content and inside are zero.

    Return the lost bytes.
    """
    expected, lost = bytearray(CONTENT), 0
    for hole in holes:
        offset, length = int(str(hole["offset"])), int(str(hole["length_bytes"]))
        expected[offset : offset + length] = bytes(length)
        lost += length
        assert str(hole["object_name"]).startswith("containers/")
        assert hole["reason"]
    assert written == bytes(expected)
    return lost


@pytest.mark.parametrize("damage", ["bit", "truncated", "missing"])
def test_salvage_writes_all_but_lost_bytes(root: Path, tmp_path: Path, call: InProcess, damage: str) -> None:
    """Write readable bytes, and zeros with a list for lost ones.

    Without the option nothing (I8).
    """
    victim = containers(root)[1]
    if damage == "bit":
        flip(victim, 5000)
    elif damage == "truncated":
        victim.write_bytes(victim.read_bytes()[:1000])
    else:
        victim.unlink()
    out = tmp_path / "out"
    refused = call("--store", root, "get", "disk.img", "-o", out)
    assert refused.returncode != 0
    assert not out.exists()
    done = call("--store", root, "--json", "get", "disk.img", "--salvage", "-o", out)
    assert done.returncode == refused.returncode
    report = json.loads(done.stdout)
    assert report["lost_bytes"] == check_holes(out.read_bytes(), report["holes"])
    assert 0 < report["lost_bytes"] < len(CONTENT) / 2
    assert report["written_bytes"] == len(CONTENT)
    to_stdout = call("--store", root, "get", "disk.img", "--salvage")
    assert to_stdout.stdout == out.read_bytes()
    assert f"{report['lost_bytes']:,} of {len(CONTENT):,} bytes are lost" in to_stdout.stderr.decode()
    assert to_stdout.stderr.decode().count("hole: offset ") == len(report["holes"])


def test_salvage_of_a_sound_version_is_a_get(root: Path, tmp_path: Path, call: InProcess) -> None:
    """Where nothing is lost the exit code is 0 and the list of holes empty."""
    report = call.answer("--store", root, "get", "disk.img", "--salvage", "-o", tmp_path / "out")
    assert (report["holes"], report["lost_bytes"]) == ([], 0)
    assert (tmp_path / "out").read_bytes() == CONTENT


def test_salvage_of_everything_lost_is_one_size_of_zeros(root: Path, tmp_path: Path, call: InProcess) -> None:
    """With all containers gone the file has the version's size and no content."""
    for path in containers(root):
        path.unlink()
    done = call("--store", root, "--json", "get", "disk.img", "--salvage", "-o", tmp_path / "out")
    assert json.loads(done.stdout)["lost_bytes"] == len(CONTENT)
    assert (tmp_path / "out").read_bytes() == bytes(len(CONTENT))


@given(st.lists(st.tuples(st.integers(0, 50), st.booleans()), max_size=12))
def test_salvage_places_known_parts_exactly(parts: list[tuple[int, bool]]) -> None:
    """Place the parts before the first and after the last unknown one exactly.

    The rest is one gap.
    """
    total = sum(length for length, _ in parts)
    starts = [sum(length for length, _ in parts[:number]) for number in range(len(parts))]
    placed = place([length if known else None for length, known in parts], total)
    assert sum(part.length_bytes for part in placed) == total
    assert sum(part.number is None for part in placed) <= 1
    for part in placed:
        if part.number is not None:
            assert (part.offset, part.length_bytes) == (starts[part.number], parts[part.number][0])


# --- get --at --------------------------------------------------------------------------------------------------------


NOW = datetime.now(UTC)


def stopped_at(seconds: float) -> Callable[[], float]:
    """Return a clock that always shows this time."""
    return lambda: seconds


@pytest.fixture
def dated(tmp_path: Path) -> Path:
    """A store with versions of 30, 20 and 10 hours ago."""
    for number, hours in enumerate((30, 20, 10), 1):
        moment = (NOW - timedelta(hours=hours)).timestamp()
        with open_store(tmp_path / "dated", settings=CHOSEN, create=True, clock=stopped_at(moment)) as store:
            store.put("db", f"version {number}".encode())
            store.put("db2", b"another key")
    return tmp_path / "dated"


@pytest.mark.parametrize(
    ("at", "content"), [("25h", b"version 1"), ("15h", b"version 2"), ("1h", b"version 3"), ("1d1h", b"version 1")]
)
def test_at_writes_the_version_of_that_time(dated: Path, call: InProcess, at: str, content: bytes) -> None:
    """`--at` takes how long ago, or a time, and writes what was the newest version then."""
    assert call("--store", dated, "get", "db", "--at", at).stdout == content
    hours = int(at.removesuffix("h")) if "d" not in at else 25
    moment = f"{NOW - timedelta(hours=hours):%Y-%m-%dT%H:%M:%SZ}"
    assert call("--store", dated, "get", "db", "--at", moment).stdout == content


def test_at_names_a_deleted_version(dated: Path, call: InProcess) -> None:
    """Name a version that was deleted since; never write an older one instead of it."""
    with open_store(dated, settings=CHOSEN) as store:
        store.delete("db", 2)
    refused = call("--store", dated, "get", "db", "--at", "15h")
    assert refused.returncode != 0
    assert refused.stdout == b""
    assert b"version 2 (deleted " in refused.stderr
    assert b"was the version of" in refused.stderr
    assert b"`nearkin undelete db@2` restores it, or name another: db@1 of " in refused.stderr
    assert b"--version" not in refused.stderr
    assert call("--store", dated, "get", "db", "--at", "1h").stdout == b"version 3"
    with open_store(dated, settings=CHOSEN) as store:
        store.delete("db")
    assert b"version 3 (deleted " in call("--store", dated, "get", "db", "--at", "1h").stderr


def test_at_ignores_deleted_versions_made_after(dated: Path, call: InProcess) -> None:
    """Ignore a version that was deleted since and was made after that time."""
    with open_store(dated, settings=CHOSEN) as store:
        store.delete("db", 3)
        assert [one.created for one in store.list_deleted("db")] == [NOW - timedelta(hours=10)]
    assert call("--store", dated, "get", "db", "--at", "15h").stdout == b"version 2"
    assert b"version 3 (deleted " in call("--store", dated, "get", "db", "--at", "9h").stderr


def test_at_names_deleted_versions_of_unknown_time(dated: Path, call: InProcess) -> None:
    """Name a deleted version that may have been the newest if its manifest cannot be read."""
    with open_store(dated, settings=CHOSEN) as store:
        store.put("db", b"with long metadata", metadata={"x": "y" * 5000})  # the index leaves its time out
        store.delete("db", 4)
    (dated / object_name("default", "db", 4)).write_bytes(b"damaged")
    refused = call("--store", dated, "get", "db", "--at", "5h")
    assert b"version 4 (deleted " in refused.stderr
    assert b"may be the version of" in refused.stderr
    assert call("--store", dated, "get", "db", "--at", "15h").stdout == b"version 2"


def test_at_ignores_versions_deleted_before(tmp_path: Path, call: InProcess) -> None:
    """Ignore a version that was deleted before that time."""
    root = tmp_path / "store"
    for hours, action in ((30, "put"), (20, "put"), (15, "delete")):
        moment = (NOW - timedelta(hours=hours)).timestamp()
        with open_store(root, settings=CHOSEN, create=True, clock=stopped_at(moment)) as store:
            if action == "put":
                store.put("db", f"{hours} hours ago".encode())
            else:
                store.delete("db", 2)
    assert call("--store", root, "get", "db", "--at", "10h").stdout == b"30 hours ago"
    assert call("--store", root, "get", "db", "--at", "17h").returncode != 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--at", "40h"], b"had no version at"),
        (["--at", "2999-01-01"], b"in the future"),
        (["--at", "yesterday"], b"yesterday"),
        (["--at", "1h", "--version", "1"], b"one of them"),
        (["--salvage", "--range", "0-9"], b"--salvage"),
    ],
)
def test_at_and_salvage_refuse_no_match(dated: Path, call: InProcess, arguments: list[str], message: bytes) -> None:
    """Times without a version and options that exclude each other are refused by name."""
    done = call("--store", dated, "get", "db", *arguments)
    assert done.returncode != 0
    assert message in done.stderr


def test_at_works_through_a_server(tmp_path: Path, call: InProcess) -> None:
    """Use `--at` with --server; --salvage reports that it needs the store's files."""
    with ScriptedGateway(tmp_path / "served") as gateway:
        gateway.read().put("db", b"served")
        served = ["--server", gateway.url, "get", "db"]
        env = {"NEARKIN_TOKEN": TOKEN}
        after = f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%S.%fZ}"
        assert call(*served, "--at", after, env=env).stdout == b"served"
        assert b"had no version" in call(*served, "--at", "2d", env=env).stderr
        assert b"name it with --store" in call(*served, "--salvage", env=env).stderr
        gateway.read().put("db", b"later")
        gateway.read().delete("db", 2)
        assert call(*served, "--at", after, env=env).stdout == b"served"

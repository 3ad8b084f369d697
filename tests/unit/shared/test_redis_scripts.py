"""Test the Lua scripts of the Redis index.

Each file is loaded, complete, and part of the wheel.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import numpy as np
import pytest

from nearkin_shared.index import redis as redis_package
from nearkin_shared.index.redis.connection import RedisServer
from nearkin_shared.index.redis.key_encoding import Keys
from nearkin_shared.index.redis.scripts import DAMAGED, SOURCES

FOLDER = Path(redis_package.__file__).parent / "lua"
SCRIPTS = sorted(path.stem for path in FOLDER.glob("*.lua"))
INCLUDES = sorted(path.stem for path in (FOLDER / "include").glob("*.lua"))
PYPROJECT = Path(__file__).parents[3] / "pyproject.toml"


def test_sources_have_one_script_per_file() -> None:
    assert sorted(SOURCES) == SCRIPTS
    assert len(SCRIPTS) > 20


@pytest.mark.parametrize("name", SCRIPTS)
def test_source_contains_its_file_and_includes(name: str) -> None:
    """Every line of the file and of its includes is in the source; no include line remains."""
    source = SOURCES[name].splitlines()
    assert f"'{DAMAGED}'" in source[0]
    paths = [FOLDER / f"{name}.lua"]
    while paths:
        for line in paths.pop().read_text().splitlines():
            included = re.fullmatch(r"--include (\w+)", line)
            if included:
                paths.append(FOLDER / "include" / f"{included[1]}.lua")
            assert (line in source) is (included is None)


@pytest.mark.parametrize("name", INCLUDES)
def test_include_is_used_by_a_file(name: str) -> None:
    files = [*FOLDER.glob("*.lua"), *(FOLDER / "include").glob("*.lua")]
    assert any(re.search(rf"(?m)^--include {name}$", path.read_text()) for path in files)


@pytest.mark.parametrize("name", SCRIPTS)
def test_file_begins_with_a_comment_on_its_reply(name: str) -> None:
    assert re.match(r"-- [A-Z]", (FOLDER / f"{name}.lua").read_text())


def test_call_names_the_script_by_its_sha1() -> None:
    command, sha, key_count, *rest = RedisServer.call("release", ["lease"], b"holder")
    assert (command, key_count, rest) == ("EVALSHA", 1, ["lease", b"holder"])
    assert re.fullmatch(r"[0-9a-f]{40}", sha)


def test_wheel_contains_every_lua_file() -> None:
    """The package data of the wheel match every file below `lua`."""
    patterns = tomllib.loads(PYPROJECT.read_text())["tool"]["setuptools"]["package-data"]["nearkin_shared.index.redis"]
    root = FOLDER.parent
    listed = {path for pattern in patterns for path in root.glob(pattern)}
    assert listed == {path for path in FOLDER.rglob("*") if path.is_file()}


@pytest.mark.parametrize("level", [0, 1, 7, 8, 13, 24])
def test_bucket_order_groups_rows_of_any_bucket(level: int) -> None:
    """Rows of a bucket follow one another, however many buckets a partition has, and keep their order."""
    drawn = np.random.default_rng(level)
    keys = Keys(drawn.integers(0, 3, (600, 5), np.uint8), drawn.integers(0, 1 << 16, 600, np.uint16))
    order = keys.bucket_order(4)
    hashes = keys.rows[:, 0] + (keys.rows[:, 1].astype(np.int64) << 8) + (keys.rows[:, 2].astype(np.int64) << 16)
    buckets = (hashes % (1 << level)) * 4 + keys.partitions % 4
    assert sorted(order.tolist()) == list(range(600))
    arranged = buckets[order]
    assert np.count_nonzero(np.diff(arranged)) == len(np.unique(buckets)) - 1
    same = (arranged[1:] == arranged[:-1]) & (hashes[order][1:] == hashes[order][:-1])
    assert np.all(np.diff(order)[same] > 0)

"""Test failpoints.

Unarmed ones do nothing, armed ones act once at their pass, and each name is used once.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from nearkin_shared.errors import BadInput, StoreUnavailable
from nearkin_shared.utils import failpoints
from nearkin_shared.utils.failpoints import POINTS, ArmedFailpoint, arm, disarm, failpoint, parse_failpoints
from tests.support.data.stores import process

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def off() -> Iterator[None]:
    yield
    disarm()


def test_each_failpoint_name_is_used_at_one_step() -> None:
    placed = []
    for folder in ("app", "shared", "services"):
        for path in (ROOT / folder).rglob("*.py"):
            placed += re.findall(r'failpoint\("([^"]+)"\)', path.read_text())
    assert sorted(placed) == sorted(POINTS)
    assert len(POINTS) >= 25


def test_unarmed_failpoints_pass_any_name() -> None:
    failpoint("put.begun")
    failpoint("no such point")


def test_armed_failpoint_fails_at_its_pass_only() -> None:
    arm("put.begun:2:error")
    failpoint("put.begun")
    failpoint("gc.begun")
    with pytest.raises(StoreUnavailable, match=r"put\.begun, hit 2"):
        failpoint("put.begun")
    failpoint("put.begun")
    assert disarm() == {"put.begun": 3, "gc.begun": 1}
    assert disarm() == {}


def test_watch_receives_each_pass() -> None:
    passes: list[str] = []
    arm((), passes.append)
    failpoint("gc.begun")
    failpoint("put.begun")
    assert passes == ["gc.begun", "put.begun"]


def test_arming_an_unlisted_name_is_refused() -> None:
    arm(())
    with pytest.raises(BadInput, match="no such point"):
        failpoint("no such point")


def test_failpoint_text_is_parsed() -> None:
    assert parse_failpoints("put.begun:1:kill, gc.done:12:sleep=0.5") == (
        ArmedFailpoint("put.begun", 1, "kill"),
        ArmedFailpoint("gc.done", 12, "sleep", 0.5),
    )


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("put.begin:1:kill", "choose one of .*put.begun"),
        ("put.begun", "NAME:COUNT:ACTION"),
        ("put.begun:0:kill", "from 1"),
        ("put.begun:1:explode", "kill, stop, error or sleep"),
        ("put.begun:1:kill=3", "kill, stop, error or sleep"),
        ("put.begun:1:sleep", "sleep=SECONDS"),
        ("put.begun:1:sleep=long", "not a number"),
        ("put.begun:1:sleep=61", "0 to 60"),
        ("put.begun:1:sleep=nan", "0 to 60"),
        (",".join(["put.begun:1:error"] * 65), "at most 64"),
    ],
)
def test_invalid_failpoint_text_is_refused_with_valid_forms(text: str, complaint: str) -> None:
    with pytest.raises(BadInput, match=complaint):
        parse_failpoints(text)


def test_environment_arms_a_process_that_dies_at_the_step(tmp_path: Path) -> None:
    script = """
import os, sys
os.environ["NEARKIN_FAILPOINT"] = "commit.manifest:2:kill"
from nearkin import open_store
with open_store(sys.argv[1], create=True) as store:
    for number in range(3):
        print(store.put("k", b"content").info.version, flush=True)
"""
    child = process(script, tmp_path / "s")
    text, _ = child.communicate(timeout=60)
    assert child.returncode == -signal.SIGKILL
    assert text.split() == ["1"]
    assert failpoints.VARIABLE == "NEARKIN_FAILPOINT"

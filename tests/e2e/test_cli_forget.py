"""`nearkin forget`: the keys that it applies to."""

from __future__ import annotations

from pathlib import Path

import pytest

from nearkin import open_store
from tests.support.checks.commands import InProcess, assert_refused, new_store


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Return a store with 3 versions of each of 3 keys."""
    root = new_store(tmp_path / "store")
    with open_store(root) as opened:
        for key in ("home", "home-archive", "home/kim"):
            for number in range(3):
                opened.put(key, b"%d" % number)
    return root


def kept(store: Path) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    with open_store(store, read_only=True) as opened:
        for info in opened.versions(all_versions=True):
            found.setdefault(info.key, []).append(info.version)
    return {key: sorted(versions) for key, versions in found.items()}


def test_forget_of_a_key_leaves_longer_keys_alone(store: Path, call: InProcess) -> None:
    done = call("--store", store, "forget", "home", "--keep-last", "1")
    assert (done.returncode, done.stderr) == (0, b"")
    assert kept(store) == {"home": [3], "home-archive": [1, 2, 3], "home/kim": [1, 2, 3]}


def test_forget_of_a_glob_applies_to_what_it_matches(store: Path, call: InProcess) -> None:
    assert call("--store", store, "forget", "home[-/]*", "--keep-last", "2").returncode == 0
    assert kept(store) == {"home": [1, 2, 3], "home-archive": [2, 3], "home/kim": [2, 3]}
    assert call("--store", store, "forget", "--keep-last", "1").returncode == 0
    assert kept(store) == {"home": [3], "home-archive": [3], "home/kim": [3]}


@pytest.mark.parametrize("pattern", ["nokey", "hom", "home/", "x*"])
def test_forget_of_no_key_has_the_exit_code_of_get(store: Path, pattern: str, call: InProcess) -> None:
    done = call("--store", store, "forget", pattern, "--keep-last", "1")
    assert done.returncode == call("--store", store, "get", "nokey", "-o", "-").returncode == 4
    assert b"no such key" in done.stderr
    assert kept(store) == {"home": [1, 2, 3], "home-archive": [1, 2, 3], "home/kim": [1, 2, 3]}


def test_undelete_brings_back_what_one_forget_took(store: Path, call: InProcess) -> None:
    assert call("--store", store, "rm", "home", "--version", "1").returncode == 0
    with open_store(store) as opened:
        opened.put("home", b"4")
    assert call("--store", store, "forget", "home*", "--keep-last", "1").returncode == 0
    assert kept(store) == {"home": [4], "home-archive": [3], "home/kim": [3]}
    done = call("--store", store, "undelete", "home")
    assert done.stdout == b"undeleted 2 versions of home\n"
    assert kept(store) == {"home": [2, 3, 4], "home-archive": [3], "home/kim": [3]}


@pytest.mark.parametrize("period", ["last", "hourly", "daily", "weekly", "monthly", "yearly"])
def test_forget_with_rules_of_zero_alone_is_refused(store: Path, period: str, call: InProcess) -> None:
    """A count of 0 is no rule: alone it would apply the policies of the settings; next to a rule it is accepted."""
    before = kept(store)
    for options in ((), ("--dry-run",)):
        done = call("--store", store, "forget", "home", f"--keep-{period}", "0", *options)
        assert_refused(done, 2, f"--keep-{period} 0: is no rule, and no other is given; want a number above 0")
    assert kept(store) == before
    words = ("--keep-within", "1d") if period == "last" else ("--keep-last", "1")
    assert call("--store", store, "forget", "home", f"--keep-{period}", "0", *words).returncode == 0


def test_forget_prune_names_the_command_that_frees(store: Path, call: InProcess) -> None:
    before = kept(store)
    refused = call("--store", store, "forget", "--keep-last", "1", "--prune")
    assert_refused(refused, 2, "--prune: forget frees no space; run it without --prune; `nearkin gc` frees the space")
    assert kept(store) == before
    assert b"prune" not in call("forget", "--help").stdout


def test_forget_ends_with_the_command_that_frees_space(store: Path, call: InProcess) -> None:
    """Only where a version went, and neither with --quiet nor --json."""
    rules = ("--keep-last", "1")
    assert b"nearkin gc" not in call("--store", store, "forget", "home", *rules, "--dry-run").stdout
    last = call("--store", store, "forget", "home", *rules).stdout.decode().splitlines()[-1]
    assert last == "`nearkin gc` frees their space, once `nearkin undelete` can no longer restore them"
    assert b"nearkin gc" not in call("--store", store, "forget", "home", *rules).stdout
    assert call("--store", store, "-q", "forget", "home-archive", *rules).stdout == b""
    assert len(call.answer("--store", store, "forget", "home/kim", *rules)["versions"]) == 3

"""Test commands with --server: output and exit code equal those of a local store."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.checks.commands import new_store
from tests.support.data.samples import noise
from tests.support.fakes.scripted_gateway import TOKEN, ScriptedGateway

FIRST = noise(200_000, "server").tobytes()
SECOND = FIRST[:120_000] + b"inserted" + FIRST[120_000:]


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedGateway]:
    with ScriptedGateway(tmp_path_factory.mktemp("served") / "store") as server:
        yield server


@pytest.fixture(scope="module")
def folder(gateway: ScriptedGateway) -> Path:
    """The same store, as a local one; two versions of one key are in it."""
    answer(gateway, "put", "db/dump", "-", "--meta", "host=db1", stdin=FIRST)
    answer(gateway, "put", "db/dump", "-", stdin=SECOND)
    return gateway.read().root


def run(
    *arguments: str | Path, stdin: bytes = b"", env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[bytes]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("NEARKIN_")}
    return subprocess.run(
        [sys.executable, "-m", "nearkin.cli", *arguments],
        input=stdin,
        capture_output=True,
        env={**kept, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry), **(env or {})},
        timeout=60,
        check=False,
    )


def run_on_server(
    gateway: ScriptedGateway, *arguments: str | Path, stdin: bytes = b"", token: str = TOKEN
) -> subprocess.CompletedProcess[bytes]:
    return run(*arguments, stdin=stdin, env={"NEARKIN_SERVER": gateway.url, "NEARKIN_TOKEN": token})


def answer(gateway: ScriptedGateway, *arguments: str | Path, stdin: bytes = b"") -> Any:
    return value_of(run_on_server(gateway, "--json", *arguments, stdin=stdin))


def value_of(done: subprocess.CompletedProcess[bytes]) -> Any:
    assert (done.returncode, done.stderr) == (0, b"")
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    "arguments",
    [
        ("ls",),
        ("ls", "db/", "--versions"),
        ("info", "db/dump"),
        ("info", "db/dump", "--version", "1"),
        ("explain", "db/dump"),
        ("explain", "db/dump", "--segments"),
    ],
    ids=" ".join,
)
def test_json_equals_that_of_a_local_store(gateway: ScriptedGateway, folder: Path, arguments: tuple[str, ...]) -> None:
    local = value_of(run("--store", folder, "--json", *arguments))
    assert local
    assert answer(gateway, *arguments) == local
    for_people = run_on_server(gateway, *arguments)
    assert for_people.stdout == run("--store", folder, *arguments).stdout


def test_stats_have_the_same_names(gateway: ScriptedGateway, folder: Path) -> None:
    local, found = value_of(run("--store", folder, "stats", "--json")), answer(gateway, "stats")
    passing = {"base_cache_hits", "base_cache_misses", "index_bytes"}  # of the process, not of the store
    assert list(found) == list(local)
    assert {name: found[name] for name in local if name not in passing} == {
        name: local[name] for name in local if name not in passing
    }
    assert b"base cache" in run_on_server(gateway, "stats").stdout


def test_put_and_get(gateway: ScriptedGateway, tmp_path: Path) -> None:
    new_store(tmp_path / "store")
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_bytes(FIRST)
    put = answer(gateway, "put", "file", source, "--meta", "a=b")
    local = value_of(run("--store", tmp_path / "store", "--json", "put", "file", source, "--meta", "a=b"))
    assert list(put) == list(local)
    assert (put["digest"], put["metadata"], put["version"]) == (local["digest"], {"a": "b"}, 1)
    got = answer(gateway, "get", "file", "-o", target)
    assert target.read_bytes() == FIRST
    assert list(got) == list(value_of(run("--store", tmp_path / "store", "--json", "get", "file", "-o", target)))
    assert run_on_server(gateway, "get", "file", "--range", "-100").stdout == FIRST[-100:]
    assert run_on_server(gateway, "get", "file", "--version", "1", "--range", "5-9").stdout == FIRST[5:10]


def test_tree_commands_through_a_server(gateway: ScriptedGateway, tmp_path: Path) -> None:
    """Every command of trees works on a store behind a server."""
    home = tmp_path / "home"
    (home / "etc").mkdir(parents=True)
    (home / "etc" / "fstab").write_bytes(FIRST)
    first = answer(gateway, "backup", "trees/home", home)
    (home / "etc" / "new").write_bytes(b"new")
    assert answer(gateway, "backup", "trees/home", home, "--dry-run")["new_files"] == 1
    second = answer(gateway, "backup", "trees/home", home, "--verbose")
    states = [(one["state"], one["size_bytes"]) for one in second["file_states"]]
    assert states == [("new", len(FIRST)), ("new", 3)]  # this server takes no ranges of the first version
    before, after = (f"trees/home@{one['version']}" for one in (first, second))
    assert [one["path"] for one in answer(gateway, "ls", "-R", f"{after}:/")] == ["/etc", "/etc/fstab", "/etc/new"]
    assert [one["version"] for one in answer(gateway, "find", "new")] == [second["version"]]
    assert [one["paths"] for one in answer(gateway, "ls", "trees/", "--versions")] == [[str(home)]] * 2
    assert answer(gateway, "info", "trees/home@latest")["version"] == second["version"]
    assert [one["path"] for one in answer(gateway, "ls", "trees/home@latest:/etc")] == ["/etc/fstab", "/etc/new"]
    assert answer(gateway, "diff", before, after)["counts"]["added"] == 1
    assert run_on_server(gateway, "dump", f"{before}:/etc/fstab").stdout == FIRST
    assert answer(gateway, "export", after, "-o", tmp_path / "t.tar")["entries"] == 4
    assert answer(gateway, "restore", after, "-o", tmp_path / "target")["failed"] == 0
    assert (tmp_path / "target" / "etc" / "fstab").read_bytes() == FIRST


def test_get_broken_off_keeps_the_output_file(gateway: ScriptedGateway, folder: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_bytes(b"before")
    gateway.script("ok", "rot")
    done = run_on_server(gateway, "get", "db/dump", "-o", target)
    assert (done.returncode, target.read_bytes()) == (5, b"before")
    assert b"get it again" in done.stderr
    assert list(tmp_path.iterdir()) == [target]


@pytest.mark.parametrize(
    ("arguments", "code", "problem"),
    [
        (("get", "none"), 4, b"key 'none': the store has none"),
        (("info", "db/dump", "--version", "7"), 4, b"version 7"),
        (("get", "db/dump", "--range", "900000-"), 2, b"range starts at byte 900000"),
        (("verify",), 2, b"verify: reads the files of a local store, name it with --store"),
        (("rebuild-index",), 2, b"rebuild-index: reads the files of a local store"),
        (("config", "--set", "delta"), 2, b"want name=value"),
    ],
    ids=lambda part: " ".join(part) if isinstance(part, tuple) else "",
)
def test_refusals_are_one_line_with_the_local_exit_code(
    gateway: ScriptedGateway, folder: Path, arguments: tuple[str, ...], code: int, problem: bytes
) -> None:
    done = run_on_server(gateway, *arguments)
    assert (done.returncode, done.stdout) == (code, b"")
    assert problem in done.stderr
    assert done.stderr.count(b"\n") == 1
    as_json = run_on_server(gateway, "--json", *arguments, *(["-o", os.devnull] if arguments[0] == "get" else []))
    assert set(json.loads(as_json.stderr)["error"]) == {"kind", "message"}


def test_token_from_environment_is_never_printed(gateway: ScriptedGateway) -> None:
    """Read a token from the environment; no output contains it."""
    token = "not-the-right-one"
    for arguments in (("ls",), ("--json", "ls"), ("config", "--local"), ("config", "--local", "--json")):
        done = run_on_server(gateway, *arguments, token=token)
        assert token.encode() not in done.stdout + done.stderr
        assert done.returncode == (0 if "config" in arguments else 1)
    assert b"***" in run_on_server(gateway, "config", "--local").stdout
    assert run("ls", "--token", "x").returncode == 2
    broken = run_on_server(gateway, "ls", token="two words")
    assert (broken.returncode, b"two words" in broken.stderr) == (2, False)


def test_config_is_the_services_and_set_changes_it(gateway: ScriptedGateway) -> None:
    before = answer(gateway, "config")
    assert before["features.algorithm"] == {"value": "finesse", "source": f"{gateway.url} revision 1"}
    changed = answer(gateway, "config", "--set", "features.algorithm=odess", "--set", "delta.max_depth=3")
    assert changed["features.algorithm"]["value"] == "odess"
    assert changed["delta.max_depth"]["value"] == 3
    assert b"odess" in run_on_server(gateway, "config").stdout
    refused = run("config", "--set", "features.algorithm=odess")
    assert (refused.returncode, b"--server" in refused.stderr) == (2, True)


def test_store_and_server_are_not_mixed_up(gateway: ScriptedGateway, folder: Path, tmp_path: Path) -> None:
    both = {"NEARKIN_SERVER": gateway.url, "NEARKIN_STORE": str(tmp_path / "none"), "NEARKIN_TOKEN": TOKEN}
    words: list[list[str | Path]] = [[], ["--store", folder, "--server", gateway.url]]
    for arguments in words:
        done = run(*arguments, "ls", env=both)
        assert (done.returncode, b"name one of them with --store or --server" in done.stderr) == (2, True)
    assert run("--server", gateway.url, "ls", env=both).returncode == 0
    assert run("--store", folder, "ls", env=both).returncode == 0
    done = run("--store", gateway.url, "ls")
    assert (done.returncode, b"--server" in done.stderr) == (2, True)


def test_local_commands_load_nothing_of_the_client(tmp_path: Path) -> None:
    new_store(tmp_path / "store")
    script = (
        "import sys; from nearkin.cli import main; "
        "code = main(['--store', sys.argv[1], 'put', 'k', '-']); "
        "print(code, [name for name in ('httpx', 'tenacity', 'anyio', 'pydantic') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "store")],
        input=b"content",
        capture_output=True,
        timeout=60,
        check=True,
        env={**os.environ, "NEARKIN_TOKEN": "t", "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)},
    )
    assert done.stdout.splitlines()[-1] == b"0 []"


def test_rm_and_undelete_are_the_same_behind_a_server(gateway: ScriptedGateway) -> None:
    for content in (b"one", b"two"):
        answer(gateway, "put", "rm/me", "-", stdin=content)
    assert answer(gateway, "rm", "rm/me", "--version", "1") == {"key": "rm/me", "version": 1, "deleted": 1}
    assert [entry["version"] for entry in answer(gateway, "ls", "rm/", "--versions")] == [2]
    assert run_on_server(gateway, "rm", "rm/me").stdout == b"deleted 1 version of rm/me\n"
    removal = run_on_server(gateway, "rm", "rm/me")
    assert (removal.returncode, removal.stdout, removal.stderr.count(b"\n")) == (4, b"", 1)
    assert [entry["version"] for entry in answer(gateway, "ls", "--deleted", "rm/")] == [1, 2]
    assert answer(gateway, "undelete", "rm/me") == {"key": "rm/me", "version": None, "undeleted": 1}
    assert run_on_server(gateway, "get", "rm/me").stdout == b"two"

"""Test help and wrong usage: examples, and one line of error before a store is touched."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import pytest

from nearkin import cli
from tests.support.checks.commands import InProcess, assert_refused, command, environment, new_store, run

COMMANDS = (
    "backup",
    "restore",
    "find",
    "diff",
    "dump",
    "export",
    "import-tar",
    "put",
    "get",
    "ls",
    "mount",
    "drill",
    "webdav",
    "rm",
    "forget",
    "undelete",
    "retain",
    "info",
    "stats",
    "verify",
    "repair",
    "gc",
    "rebuild-index",
    "explain",
    "config",
    "copy",
    "completion",
    "serve",
    "token",
    "dlq",
    "init",
    "keys",
    "bench",
    "docs",
    "version",
)


@pytest.mark.parametrize(("name", "here"), [("snapshots", "ls --versions"), ("check", "verify"), ("prune", "gc")])
def test_commands_of_restic_and_borg_are_named(call: InProcess, name: str, here: str) -> None:
    assert_refused(call(name), 2, f"No such command '{name}': it is `nearkin {here}` here")


def test_help_imports_neither_numpy_nor_pydantic_nor_rich() -> None:
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "nearkin.cli", "--help"],
        capture_output=True, env=environment(), timeout=60, check=True,
    )  # fmt: skip
    imported = {line.rpartition(b"|")[2].strip().decode().partition(".")[0] for line in done.stderr.splitlines()}
    assert "click" in imported
    assert not imported & {"numpy", "pydantic", "pydantic_settings", "rich", "lmdb", "obstore", "json", "secrets"}


@pytest.mark.parametrize("name", COMMANDS)
def test_command_help_has_an_example(call: InProcess, name: str) -> None:
    done = call(name, "--help")
    assert done.returncode == 0
    assert re.search(rf"^  (\w+=\S+ |.*\| )?nearkin .*\b{name}\b", done.stdout.decode(), re.MULTILINE)


@pytest.mark.parametrize("name", COMMANDS)
def test_command_help_has_one_example_a_line(call: InProcess, name: str) -> None:
    """Several commands on one line are joined by the shell; the rest of a line is a comment."""
    for line in call(name, "--help").stdout.decode().splitlines():
        if line.startswith("  nearkin "):
            commands = re.split(r"&& |\| |; |\$\(", line.partition(" #")[0])
            assert all(len(re.findall(r"(?:^|\s)nearkin\s", part)) <= 1 for part in commands), line


def test_help_lists_every_command() -> None:
    text = run("--help").stdout.decode()
    listed = re.findall(r"^  ([a-z-]+) {2,}\S", text.partition("Commands:")[2], re.MULTILINE)
    assert sorted(listed) == sorted(COMMANDS)
    assert "..." not in text.partition("Commands:")[2]


def test_no_command_shows_help_as_wrong_usage() -> None:
    done = run()
    assert (done.returncode, done.stdout) == (2, b"")
    assert b"Commands:" in done.stderr


# ---------------------------------------------------------------- wrong usage


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--nonsense"], "--nonsense"),
        (["nonsense"], "nonsense"),
        (["put"], "KEY"),
        (["put", "key"], "FILE"),
        (["get"], "KEY"),
        (["get", "key", "--nonsense"], "--nonsense"),
        (["get", "key", "--version", "one"], "one"),
        (["get", "key", "--version", "0"], "0"),
        (["get", "key", "--range", "1"], "range '1'"),
        (["get", "key", "--range", "5-4"], "ends before it starts"),
        (["get", ""], "must not be empty"),
        (["get", b"\xff"], "not valid UTF-8"),
        (["dlq", "list"], "dlq: name the gateway with --server URL, or Kafka with --bootstrap HOST:PORT"),
        (["ls", b"\xff"], "not valid UTF-8"),
        (["put", "", "-"], "must not be empty"),
        (["put", "k" * 1025, "-"], "1025 bytes, at most 1024"),
        (["put", b"caf\xe9", "-"], r"'caf\xe9': not valid UTF-8"),
        (["put", "key", "no/such/file"], "no/such/file"),
        (["put", "key", "."], "is a folder"),
        (["put", "-r", "no/such/folder"], "`nearkin backup KEY FOLDER`"),
        (["backup", "home"], "no path is given"),
        (["restore", b"\xff:/etc", "-o", "d"], "not valid UTF-8"),
        (["dump", ""], "must not be empty"),
        (["diff", "home", b"\xff"], "not valid UTF-8"),
        (["find", "", "home"], "pattern ''"),
        (["ls", "-l"], "name it, as in `nearkin ls -l home:/`"),
        (["restore", "home", "-o", "d", "--delete", "-i", "x"], "--delete: not with --include"),
        (["backup", "home", ".", "--exclude-larger-than", "1 parsec"], "--exclude-larger-than '1 parsec'"),
        (["backup", "home", ".", "--exclude-file", "no/such/file"], "no/such/file"),
        (["backup", "home", "--files-from", "no/such/list"], "no/such/list"),
        (["backup", "home", ".", "--meta", "tags=a"], "give --tag"),
        (["put", "key", "-", "--meta", "novalue"], "novalue"),
        (["put", "key", "-", "--meta", "a=1", "--meta", "a=2"], "given twice"),
        (["put", "key", "-", "--sha256", "12"], "64 hex digits"),
        (["verify", "--sample", "0"], "sample '0'"),
        (["verify", "--sample", "101%"], "sample '101%'"),
        (["verify", "--since", "9999-12-31T23:59-23:59"], "since '9999-12-31T23:59-23:59'"),
        (["config", "--set", "features.algorithm=" + "[" * 100_000], "--server"),
        (["put", "key", "\x1b]0;title\x07\u202e"], r"\x1b]0;title\x07\u202e"),
        (["backup", "k", "--files-from", "no\x9b31m\rlist"], r"no\x9b31m\rlist"),
        (["--config", "no/such.toml", "ls"], "no/such.toml"),
    ],
)
def test_wrong_usage_is_one_line_and_exits_2(
    tmp_path: Path, call: InProcess, arguments: list[str | bytes], problem: str
) -> None:
    """Report wrong usage in one line with exit code 2; touch no store."""
    assert_refused(call(*arguments, env={"NEARKIN_STORE": str(tmp_path / "store")}), 2, problem)
    assert not (tmp_path / "store").exists()


def test_refused_connection_names_a_remedy(call: InProcess) -> None:
    """Nothing listens on port 9."""
    assert_refused(call("--server", "http://127.0.0.1:9", "ls"), 1, "is the gateway running, and the address right?")


@pytest.mark.parametrize(
    ("arguments", "env", "problem"),
    [
        (["stats"], {}, "use --store FOLDER or --server URL, or set NEARKIN_STORE or NEARKIN_SERVER"),
        (["--store", "", "stats"], {}, 'store ""'),
        (["--store", "s3://bucket/prefix", "stats"], {}, "not in this build"),
        (["stats", "--store", "S3://bucket"], {}, "not in this build"),
        (["stats"], {"NEARKIN_STORE": "gs://bucket"}, "not in this build"),
        (["--store", "file://host/folder", "stats"], {}, "three slashes"),
        (["config"], {"NEARKIN_DELTA__MAX_DEPTH": "99"}, "delta.max_depth"),
        (["config"], {"NEARKIN_FEATURES__ALGORITHM": "fineese"}, "choose"),
    ],
)
def test_refused_store_or_setting_names_remedy(
    call: InProcess, arguments: list[str], env: dict[str, str], problem: str
) -> None:
    """Name the remedy when a store or setting is refused."""
    assert_refused(call(*arguments, env=env), 2, problem)


@pytest.mark.parametrize(
    "arguments", [["--json", "--nonsense"], ["get", "--json", ""], ["--json", "stats"], ["get", "key", "--json"]]
)
def test_errors_are_one_json_object_with_json(call: InProcess, arguments: list[str]) -> None:
    done = call(*arguments)
    error = json.loads(done.stderr)["error"]
    assert (done.returncode, done.stdout) == (2, b"")
    assert sorted(error) == ["kind", "message"]


def test_reading_creates_no_missing_store(tmp_path: Path, call: InProcess) -> None:
    for name in (["ls"], ["stats"], ["get", "key"], ["info", "key"], ["explain", "key"], ["verify"], ["rebuild-index"]):
        assert_refused(call("--store", tmp_path / "none", *name), 10, "none")
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(("given", "threads"), [(None, "1"), ("4", "4")])
def test_command_starts_no_unused_threads(monkeypatch: pytest.MonkeyPatch, given: str | None, threads: str) -> None:
    """Start no threads of numpy's linear algebra unless the user sets their number.

    They would spin on the core that a short put needs.
    """

    def ended(code: int) -> NoReturn:
        raise SystemExit(code)

    monkeypatch.setattr(cli, "main", lambda: 7)
    monkeypatch.setattr(os, "_exit", ended)
    monkeypatch.setattr("nearkin.cli.set_threshold", lambda _: None)
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", given or "")  # restores the earlier value at the end
    if given is None:
        monkeypatch.delenv("OPENBLAS_NUM_THREADS")
    with pytest.raises(SystemExit, match="7"):
        cli.run()
    assert os.environ["OPENBLAS_NUM_THREADS"] == threads


def test_index_without_address_space_names_limit(tmp_path: Path) -> None:
    """Name limit and setting if the address space is too small for the index."""
    new_store(tmp_path / "s")
    run("put", "key", "-", "--store", tmp_path / "s", stdin=b"x")
    done = subprocess.run(
        ["/bin/sh", "-c", 'ulimit -v 4000000; exec "$@"', "sh", *command("--store", tmp_path / "s", "ls")],
        capture_output=True, env=environment(), timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert b"index.map_bytes" in done.stderr
    assert b"delete" not in done.stderr


@pytest.mark.parametrize("module", ["nearkin", "nearkin.cli"])
def test_command_runs_as_a_module(module: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", module, "version", "--json"],
        capture_output=True,
        env=environment(),
        timeout=60,
        check=True,
    )
    assert done.stdout == run("version", "--json").stdout

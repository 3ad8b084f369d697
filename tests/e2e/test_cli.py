"""The command, run as people and scripts run it: a process with arguments, pipes and an exit code."""

from __future__ import annotations

import hashlib
import io
import json
import os
import pty
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3

from nearkin import Store, open_store
from nearkin.cli import main
from nearkin.cli.arguments import parse_range, parse_sample, store_folder
from nearkin.cli.ledger import human_bytes
from nearkin.errors import BadInput, ConfigError
from nearkin.testing import demo

COMMANDS = (
    "put",
    "get",
    "ls",
    "rm",
    "forget",
    "undelete",
    "info",
    "stats",
    "verify",
    "repair",
    "gc",
    "rebuild-index",
    "explain",
    "config",
    "serve",
    "token",
    "dlq",
    "bench",
    "docs",
    "version",
)
LEDGER = {
    "logical_bytes", "stored_bytes", "reduction_ratio", "chunks", "duplicate_chunks", "delta_chunks", "raw_chunks",
    "dedup_saved_bytes", "delta_saved_bytes", "compression_saved_bytes", "dcr", "dce", "seconds",
}  # fmt: skip

FIRST = random.Random(1).randbytes(300_000) + b"a line that compresses well\n" * 10_000
SECOND = FIRST[:150_000] + b"an insertion" + FIRST[150_000:290_000] + FIRST[290_100:]


def environment(more: dict[str, str] | None = None) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("NEARKIN_") or name[8:] in _KERNEL}
    return {**kept, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry), **(more or {})}


_KERNEL = ("KERNELS", "CPU")


def command(*arguments: str | bytes | Path) -> list[str | bytes | Path]:
    return [sys.executable, "-m", "nearkin.cli", *arguments]


def run(
    *arguments: str | bytes | Path, stdin: bytes = b"", env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        command(*arguments), input=stdin, capture_output=True, env=environment(env), timeout=60, check=False
    )


def answer(*arguments: str | bytes | Path, stdin: bytes = b"", env: dict[str, str] | None = None) -> Any:
    return answered(run("--json", *arguments, stdin=stdin, env=env))


def answered(done: subprocess.CompletedProcess[bytes]) -> Any:
    """The one JSON value of a command that succeeded."""
    assert (done.returncode, done.stderr) == (0, b"")
    return json.loads(done.stdout)


class InProcess:
    """The same entry point in this process: starting one is most of a test. Each command runs as a process too."""

    def __init__(self, capture: pytest.CaptureFixture[bytes], patch: pytest.MonkeyPatch) -> None:
        self._capture, self._patch = capture, patch
        for name in [name for name in os.environ if name.startswith("NEARKIN_") and name[8:] not in _KERNEL]:
            patch.delenv(name)

    def __call__(
        self, *arguments: str | bytes | Path, stdin: bytes = b"", env: dict[str, str] | None = None
    ) -> subprocess.CompletedProcess[bytes]:
        for name, value in (env or {}).items():
            self._patch.setenv(name, value)
        self._patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        code = main([os.fsdecode(argument) for argument in arguments])
        out, err = self._capture.readouterr()
        return subprocess.CompletedProcess(arguments, code, out, err)

    def answer(self, *arguments: str | bytes | Path, stdin: bytes = b"", env: dict[str, str] | None = None) -> Any:
        return answered(self("--json", *arguments, stdin=stdin, env=env))


@pytest.fixture
def call(capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch) -> InProcess:
    return InProcess(capfdbinary, monkeypatch)


def assert_refused(done: subprocess.CompletedProcess[bytes], code: int, says: str) -> None:
    """One line on stderr, nothing on stdout."""
    line = done.stderr.decode()
    assert done.returncode == code, line
    assert done.stdout == b""
    assert line.startswith("nearkin: ")
    assert line.count("\n") == 1
    assert says in line


@pytest.fixture(scope="module")
def puts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """A store that holds two versions of one key and one of another; and what the puts answered."""
    folder = tmp_path_factory.mktemp("filled")
    store = folder / "store"
    (folder / "first").write_bytes(FIRST)
    answers = [
        answer("--store", store, "put", "db/dump", folder / "first", "--meta", "host=db1", "--meta", "note=a=b"),
        answer("--store", store, "put", "db/dump", "-", stdin=SECOND),
    ]
    with open_store(store) as opened:
        opened.put("notes", b"hello")
    return store, answers


@pytest.fixture(scope="module")
def store(puts: tuple[Path, list[dict[str, Any]]]) -> Path:
    """Read it, never change it."""
    return puts[0]


@pytest.fixture
def copied(store: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(store, tmp_path / "copied"))


def damage(store: Path) -> None:
    """Flip one byte in the middle of every container."""
    containers = [path for path in store.rglob("*") if path.is_file() and "containers" in path.parts]
    assert containers
    for path in containers:
        path.chmod(0o644)
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)


# ---------------------------------------------------------------- help


def test_help_imports_neither_numpy_nor_pydantic_nor_rich() -> None:
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "nearkin.cli", "--help"],
        capture_output=True, env=environment(), timeout=60, check=True,
    )  # fmt: skip
    imported = {line.rpartition(b"|")[2].strip().decode().partition(".")[0] for line in done.stderr.splitlines()}
    assert "click" in imported
    assert not imported & {"numpy", "pydantic", "pydantic_settings", "rich", "lmdb", "obstore"}


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_teaches_by_example(call: InProcess, name: str) -> None:
    done = call(name, "--help")
    assert done.returncode == 0
    assert re.search(rf"^  (\w+=\S+ |.*\| )?nearkin .*\b{name}\b", done.stdout.decode(), re.MULTILINE)


def test_the_commands_are_all_listed_in_the_help() -> None:
    text = run("--help").stdout.decode()
    listed = re.findall(r"^  ([a-z-]+) {2,}\S", text.partition("Commands:")[2], re.MULTILINE)
    assert sorted(listed) == sorted(COMMANDS)
    assert "..." not in text.partition("Commands:")[2]


def test_no_command_shows_the_help_and_is_wrong_usage() -> None:
    done = run()
    assert (done.returncode, done.stdout) == (2, b"")
    assert b"Commands:" in done.stderr


# ---------------------------------------------------------------- wrong usage


@pytest.mark.parametrize(
    ("arguments", "says"),
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
        (["ls", b"\xff"], "not valid UTF-8"),
        (["put", "", "-"], "must not be empty"),
        (["put", "k" * 1025, "-"], "1025 bytes, at most 1024"),
        (["put", b"caf\xe9", "-"], r"'caf\udce9': not valid UTF-8"),
        (["put", "key", "no/such/file"], "no/such/file"),
        (["put", "key", "."], "is a folder"),
        (["put", "-r", "no/such/folder"], "no/such/folder"),
        (["put", "-r", "-"], "not stdin"),
        (["put", "key", "-", "--meta", "novalue"], "novalue"),
        (["put", "key", "-", "--meta", "a=1", "--meta", "a=2"], "given twice"),
        (["put", "key", "-", "--sha256", "12"], "64 hex digits"),
        (["put", "-r", ".", "--sha256", "0" * 64], "not with --recursive"),
        (["verify", "--sample", "0"], "sample '0'"),
        (["verify", "--sample", "101%"], "sample '101%'"),
        (["--config", "no/such.toml", "ls"], "no/such.toml"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2_and_touches_no_store(
    tmp_path: Path, call: InProcess, arguments: list[str | bytes], says: str
) -> None:
    assert_refused(call(*arguments, env={"NEARKIN_STORE": str(tmp_path / "store")}), 2, says)
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize(
    ("arguments", "env", "says"),
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
def test_a_store_or_setting_that_is_refused_says_what_would_be_right(
    call: InProcess, arguments: list[str], env: dict[str, str], says: str
) -> None:
    assert_refused(call(*arguments, env=env), 2, says)


@pytest.mark.parametrize(
    "arguments", [["--json", "--nonsense"], ["get", "--json", ""], ["--json", "stats"], ["get", "key", "--json"]]
)
def test_errors_are_one_json_object_with_json(call: InProcess, arguments: list[str]) -> None:
    done = call(*arguments)
    error = json.loads(done.stderr)["error"]
    assert (done.returncode, done.stdout) == (2, b"")
    assert sorted(error) == ["kind", "message"]


def test_a_store_that_is_not_there_is_not_made_by_reading(tmp_path: Path, call: InProcess) -> None:
    for name in (["ls"], ["stats"], ["get", "key"], ["info", "key"], ["explain", "key"], ["verify"], ["rebuild-index"]):
        assert_refused(call("--store", tmp_path / "none", *name), 1, "none")
    assert not (tmp_path / "none").exists()


# ---------------------------------------------------------------- put


def test_put_answers_with_the_version_and_a_ledger_that_adds_up(puts: tuple[Path, list[dict[str, Any]]]) -> None:
    for put, content in zip(puts[1], (FIRST, SECOND), strict=True):
        assert put.keys() >= LEDGER | {"key", "version", "digest", "size_bytes"}
        assert put["size_bytes"] == put["logical_bytes"] == len(content)
        assert put["digest"] == f"blake3:{blake3(content).hexdigest()}"
        kinds = ("duplicate_chunks", "delta_chunks", "raw_chunks", "zero_chunks")
        assert put["chunks"] == sum(put[kind] for kind in kinds)
        saved = put["dedup_saved_bytes"] + put["delta_saved_bytes"] + put["compression_saved_bytes"]
        assert put["logical_bytes"] - saved == put["block_bytes"]
    assert [put["version"] for put in puts[1]] == [1, 2]
    assert puts[1][1]["duplicate_chunks"] > 0


def test_put_shows_people_every_step_of_the_savings(tmp_path: Path, call: InProcess) -> None:
    done = call("put", "key", "-", "--store", tmp_path / "store", stdin=FIRST)
    assert (done.returncode, done.stderr) == (0, b"")
    lines = done.stdout.decode().splitlines()
    assert "key version 1" in lines[0]
    steps = ("logical", "after dedup", "after delta", "after compression", "stored, with everything")
    assert [step for line in lines for step in steps if line.strip().startswith(step)] == list(steps)
    assert "MB/s" in done.stdout.decode()


def test_the_sha256_of_the_content_is_checked(tmp_path: Path, call: InProcess) -> None:
    wrong = call("put", "key", "-", "--sha256", "0" * 64, stdin=FIRST, env={"NEARKIN_STORE": str(tmp_path)})
    assert_refused(wrong, 2, hashlib.sha256(FIRST).hexdigest())
    assert call.answer("ls", env={"NEARKIN_STORE": str(tmp_path)}) == []
    right = hashlib.sha256(FIRST).hexdigest()
    put = call.answer("put", "key", "-", "--sha256", right.upper(), stdin=FIRST, env={"NEARKIN_STORE": str(tmp_path)})
    assert put["version"] == 1


def test_a_named_pipe_is_put_as_it_comes(tmp_path: Path, call: InProcess) -> None:
    os.mkfifo(tmp_path / "pipe")
    writer = threading.Thread(target=(tmp_path / "pipe").write_bytes, args=(SECOND,))
    writer.start()
    put = call.answer("put", "key", tmp_path / "pipe", "--store", tmp_path / "store")
    writer.join()
    assert put["digest"] == f"blake3:{blake3(SECOND).hexdigest()}"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    tree = tmp_path / "tree"
    (tree / "sub/empty").mkdir(parents=True)
    (tree / "a.txt").write_bytes(b"aaaa")
    (tree / "sub/naïve [b].bin").write_bytes(FIRST)
    (tree / "link").symlink_to("a.txt")
    (tree / "sub/loop").symlink_to(tree)
    os.mkfifo(tree / "pipe")
    return tree


def test_a_folder_becomes_a_key_per_file_and_links_and_pipes_are_told(
    tmp_path: Path, tree: Path, call: InProcess
) -> None:
    done = call("--json", "put", "home/", "-r", tree, env={"NEARKIN_STORE": str(tmp_path / "store")})
    put = json.loads(done.stdout)
    assert done.returncode == 0
    assert [(blob["key"], blob["size_bytes"]) for blob in put["blobs"]] == [
        ("home/a.txt", 4),
        ("home/sub/naïve [b].bin", len(FIRST)),
    ]
    assert put.keys() >= LEDGER
    for name in ("logical_bytes", "stored_bytes", "chunks", "raw_chunks", "dedup_saved_bytes"):
        assert put[name] == sum(blob[name] for blob in put["blobs"])
    assert [Path(skipped["path"]).name for skipped in put["skipped"]] == ["link", "pipe", "loop"]
    assert done.stderr == b""


def test_a_folder_without_prefix_uses_the_relative_paths(tmp_path: Path, tree: Path, call: InProcess) -> None:
    done = call("put", "-r", tree, "--meta", "host=db1", env={"NEARKIN_STORE": str(tmp_path / "store")})
    assert done.returncode == 0
    assert b"2 files below" in done.stdout
    notices = done.stderr.decode().splitlines()
    assert [Path(notice.rpartition(": ")[2]).name for notice in notices] == ["link", "pipe", "loop"]
    assert all(notice.startswith("nearkin: skipped, ") for notice in notices)
    found = call.answer("ls", env={"NEARKIN_STORE": str(tmp_path / "store")})
    assert {info["key"]: info["metadata"] for info in found} == {
        "a.txt": {"host": "db1"},
        "sub/naïve [b].bin": {"host": "db1"},
    }
    assert call("get", "sub/naïve [b].bin", env={"NEARKIN_STORE": str(tmp_path / "store")}).stdout == FIRST


def test_a_store_below_the_folder_is_not_put_into_itself(tmp_path: Path, tree: Path, call: InProcess) -> None:
    call("put", "-r", tree, "--store", tree / "store")
    put = call.answer("put", "-r", tree, "--store", tree / "store")
    assert [blob["key"] for blob in put["blobs"]] == ["a.txt", "sub/naïve [b].bin"]
    assert {"path": str(tree / "store"), "why": "the store itself"} in put["skipped"]
    assert_refused(call("put", "-r", tree / "store", "--store", tree / "store"), 2, "is the store itself")


def test_a_file_name_that_is_not_utf8_stops_the_folder_before_anything_is_put(tmp_path: Path, call: InProcess) -> None:
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree/a").write_bytes(b"fine")
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/tree/caf\xe9")).write_bytes(b"not")
    assert_refused(call("put", "-r", tmp_path / "tree", "--store", tmp_path / "store"), 2, r"caf\udce9")
    assert not (tmp_path / "store").exists()


# ---------------------------------------------------------------- get


def test_every_version_comes_back_byte_for_byte(store: Path, tmp_path: Path, call: InProcess) -> None:
    assert run("--store", store, "get", "db/dump").stdout == SECOND
    assert call("--store", f"file://{store}", "get", "db/dump", "--version", "1").stdout == FIRST
    done = call("--store", store, "get", "db/dump", "-o", tmp_path / "out")
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
    assert (tmp_path / "out").read_bytes() == SECOND
    assert os.listdir(tmp_path) == ["out"]


@pytest.mark.parametrize(
    ("text", "piece"), [("5-9", slice(5, 10)), ("-100000", slice(-100000, None)), ("570000-", slice(570000, None))]
)
def test_a_range_is_that_slice(store: Path, text: str, piece: slice, call: InProcess) -> None:
    assert call("--store", store, "get", "db/dump", "--range", text).stdout == SECOND[piece]


def test_get_explain_tells_what_was_read(store: Path, tmp_path: Path, call: InProcess) -> None:
    done = call("--store", store, "get", "db/dump", "--range", "0-99", "--explain", "-o", tmp_path / "out")
    assert done.returncode == 0
    assert re.fullmatch(rb"read [\d.]+ \w+ of \d+ containers?: \d+ directories, \d+ blocks?\n", done.stderr)
    told = call.answer("--store", store, "get", "db/dump", "--explain", "-o", tmp_path / "out")["reads"]
    assert told["blocks_decoded"] == told["block_reads"] > 0
    assert 0 < told["containers"] <= told["directory_reads"]
    assert told["bytes"] > 1000


def test_a_range_past_the_end_is_refused(store: Path, call: InProcess) -> None:
    assert_refused(call("--store", store, "get", "notes", "--range", "5-"), 2, "the blob has 5 bytes")


def test_get_with_json_describes_the_file_it_wrote(store: Path, tmp_path: Path, call: InProcess) -> None:
    got = call.answer("--store", store, "get", "notes", "--range", "1-3", "-o", tmp_path / "out")
    assert (got["key"], got["size_bytes"], got["written_bytes"]) == ("notes", 5, 3)
    assert (tmp_path / "out").read_bytes() == b"ell"


def test_an_output_is_replaced_with_its_mode_kept_and_links_followed(
    store: Path, tmp_path: Path, call: InProcess
) -> None:
    (tmp_path / "old").write_bytes(b"old")
    (tmp_path / "old").chmod(0o640)
    (tmp_path / "link").symlink_to("old")
    assert call("--store", store, "get", "notes", "-o", tmp_path / "link").returncode == 0
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "old").read_bytes() == b"hello"
    assert (tmp_path / "old").stat().st_mode & 0o777 == 0o640


def test_an_output_that_cannot_be_written_is_wrong_usage(store: Path, tmp_path: Path, call: InProcess) -> None:
    assert_refused(call("--store", store, "get", "notes", "-o", tmp_path), 2, "is a folder")
    assert_refused(call("--store", store, "get", "notes", "-o", tmp_path / "no/out"), 2, "no such file or directory")
    assert call("--store", store, "get", "notes", "-o", "/dev/null").returncode == 0


@pytest.mark.parametrize(
    "arguments",
    [
        ["get", "db/nothing", "-o", "/dev/null"],
        ["get", "notes", "--version", "2", "-o", "/dev/null"],
        ["info", "no"],
        ["explain", "no"],
    ],
)
def test_what_is_not_there_is_exit_code_1(store: Path, call: InProcess, arguments: list[str]) -> None:
    assert_refused(call("--store", store, *arguments), 1, arguments[1])
    done = call("--store", store, "--json", *arguments)
    assert json.loads(done.stderr)["error"]["kind"] == "NotFound"


def test_a_damaged_store_fails_gets_and_verify_and_leaves_the_output_as_it_was(
    copied: Path, tmp_path: Path, call: InProcess
) -> None:
    damage(copied)
    (tmp_path / "out").write_bytes(b"precious")
    done = call("--store", copied, "--json", "get", "db/dump", "-o", tmp_path / "out")
    assert (done.returncode, done.stdout) == (1, b"")
    assert json.loads(done.stderr)["error"]["kind"] == "Corrupt"
    assert (tmp_path / "out").read_bytes() == b"precious"
    assert sorted(os.listdir(tmp_path)) == ["copied", "out"]
    verified = call("--store", copied, "--json", "verify")
    report = json.loads(verified.stdout)
    assert (verified.returncode, report["ok"]) == (1, False)
    assert all(item["object_name"] and item["problem"] for item in report["damage"])
    touched = {(v["key"], v["version"]) for item in report["damage"] for v in item["versions"]}
    assert ("db/dump", 1) in touched
    told = call("--store", copied, "verify")
    assert told.returncode == 1
    assert b"touches db/dump version 1" in told.stdout

    assert b"put the same data again" in told.stdout
    assert call.answer("--store", copied, "put", "db/dump", "-", stdin=FIRST)["duplicate_chunks"] == 0
    assert call("--store", copied, "get", "db/dump").stdout == FIRST


# ---------------------------------------------------------------- the others


def test_ls_lists_what_it_can_and_names_what_it_cannot(copied: Path, call: InProcess) -> None:
    (manifest,) = (copied / "manifests").rglob("*2.nkm")
    manifest.write_bytes(manifest.read_bytes()[:100])
    listed = call("--store", copied, "ls", "--versions")
    assert listed.returncode == 1
    assert [line.split()[-2:] for line in listed.stdout.decode().splitlines()] == [["v1", "db/dump"], ["v1", "notes"]]
    (line,) = listed.stderr.decode().splitlines()
    assert line.startswith("nearkin: 'db/dump' version 2 cannot be read: manifests/")
    as_json = call("--store", copied, "--json", "ls")
    assert as_json.returncode == 1
    assert [info["key"] for info in json.loads(as_json.stdout)] == ["notes"]
    assert json.loads(as_json.stderr)["error"]["kind"] == "Corrupt"


def test_ls_lists_the_newest_versions_or_all_or_those_of_a_prefix(store: Path, call: InProcess) -> None:
    newest = answer("--store", store, "ls")
    assert [(info["key"], info["version"]) for info in newest] == [("db/dump", 2), ("notes", 1)]
    assert newest[0].keys() >= {"key", "version", "size_bytes", "created", "digest"}
    assert re.fullmatch(r"20\d\d-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", newest[0]["created"])
    every = call.answer("ls", "db/", "--versions", "--store", store)
    assert sorted((info["key"], info["version"]) for info in every) == [("db/dump", 1), ("db/dump", 2)]
    assert call.answer("--store", store, "ls", "nothing/") == []
    lines = call("--store", store, "ls").stdout.decode().splitlines()
    assert [line.split()[-2:] for line in lines] == [["v2", "db/dump"], ["v1", "notes"]]


def test_a_key_never_steers_the_terminal(tmp_path: Path, call: InProcess) -> None:
    key = "red \x1b[31m\n[bold]"
    call.answer("put", key, "-", env={"NEARKIN_STORE": str(tmp_path)})
    assert call.answer("ls", env={"NEARKIN_STORE": str(tmp_path)})[0]["key"] == key
    for arguments in (["ls"], ["info", key], ["explain", key]):
        shown = call(*arguments, env={"NEARKIN_STORE": str(tmp_path)}).stdout.decode()
        assert r"red \x1b[31m\n[bold]" in shown
        assert "\x1b" not in shown


def test_info_shows_one_version(store: Path, call: InProcess) -> None:
    info = answer("--store", store, "info", "db/dump", "--version", "1")
    assert (info["size_bytes"], info["metadata"]) == (len(FIRST), {"host": "db1", "note": "a=b"})
    shown = call("--store", store, "info", "db/dump", "--version", "1").stdout.decode()
    assert info["digest"] in shown
    assert "note=a=b" in shown


def test_stats_add_up(store: Path, call: InProcess) -> None:
    stats = answer("--store", store, "stats")
    assert stats.keys() >= LEDGER | {"parts", "depths", "versions", "keys", "containers", "index_bytes"}
    assert (stats["versions"], stats["keys"]) == (3, 2)
    assert stats["logical_bytes"] == len(FIRST) + len(SECOND) + 5
    assert sum(stats["parts"].values()) == stats["stored_bytes"]
    assert stats["reduction_ratio"] == pytest.approx(stats["logical_bytes"] / stats["stored_bytes"])
    shown = call("--store", store, "stats").stdout.decode()
    assert shown.startswith("3 versions of 2 keys")


def test_verify_of_a_sound_store_finds_nothing(store: Path, call: InProcess) -> None:
    report = answer("--store", store, "verify")
    assert (report["ok"], report["damage"], report["sample"], report["versions"]) == (True, [], None, 3)
    sampled = call.answer("--store", store, "verify", "--sample", "50%")
    assert (sampled["ok"], sampled["sample"]) == (True, 0.5)
    assert call("--store", store, "verify").stdout.startswith(b"no damage")


def test_a_lost_index_is_rebuilt_from_what_is_stored(copied: Path, call: InProcess) -> None:
    shutil.rmtree(copied / "index")
    report = answer("--store", copied, "rebuild-index")
    assert (report["versions"], report["skipped"]) == (3, [])
    assert call("--store", copied, "get", "db/dump").stdout == SECOND
    assert call.answer("--store", copied, "stats")["versions"] == 3


def test_explain_accounts_for_every_byte(store: Path, call: InProcess) -> None:
    whole = answer("--store", store, "explain", "db/dump", "--segments")
    assert sum(segment["length_bytes"] for segment in whole["segments"]) == len(SECOND)
    assert sum(kind["bytes"] for kind in whole["kinds"].values()) == len(SECOND)
    for kind in ("duplicate", "zero", "delta", "raw"):
        assert whole["kinds"][kind]["chunks"] == whole[f"{kind}_chunks"]
    assert whole["segment_count"] == len(whole["segments"])
    assert "segments" not in call.answer("--store", store, "explain", "db/dump", "--version", "1")
    shown = call("--store", store, "explain", "db/dump", "--segments").stdout.decode()
    assert shown.startswith("segment ")
    assert "db/dump version 2" in shown


def test_config_shows_each_value_and_where_it_came_from(tmp_path: Path, call: InProcess) -> None:
    file = tmp_path / "nearkin.toml"
    file.write_text("[delta]\nmax_depth = 3\n[block]\nlevel = 9\n")
    settings = call.answer("--config", file, "config", "--store", "here", env={"NEARKIN_BLOCK__LEVEL": "5"})
    assert settings["delta.max_depth"] == {"value": 3, "source": f"file {file}"}
    assert settings["block.level"] == {"value": 5, "source": "environment NEARKIN_BLOCK__LEVEL"}
    assert settings["store"] == {"value": "here", "source": "argument"}
    assert settings["chunker.algorithm"]["source"] == "default"
    shown = call("config", "--config", file).stdout.decode()
    assert re.search(r"delta\.max_depth +3 +file ", shown)
    file.write_text("[delta]\nmax_dept = 3\n")
    assert_refused(call("--config", file, "config"), 2, "delta.max_dept")
    file.write_text("[delta\n")
    assert_refused(call("--config", file, "config"), 2, "nearkin.toml")


def test_version_says_what_runs() -> None:
    assert run("version").stdout.startswith(b"nearkin ")
    assert answer("version").keys() == {"version", "python", "kernels"}


def test_version_is_an_option_too_and_is_the_one_that_was_built(call: InProcess) -> None:
    import tomllib

    with (Path(__file__).parents[2] / "pyproject.toml").open("rb") as file:
        built = tomllib.load(file)["project"]["version"]
    assert call.answer("--version") == call.answer("version")
    assert call.answer("version")["version"] == built
    assert call("--version").stdout.startswith(f"nearkin {built} (Python ".encode())
    assert call("--version", "get", "k").stdout == call("version").stdout


# ---------------------------------------------------------------- the demo


@pytest.fixture
def releases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Two small releases instead of the downloads."""
    paths = [tmp_path / "one.tar", tmp_path / "two.tar"]
    for path, content in zip(paths, (FIRST, SECOND), strict=True):
        path.write_bytes(content)
    monkeypatch.setattr(demo, "_releases", lambda _versions, _cache: paths)
    return paths


def test_the_demo_passes_when_everything_comes_back(
    releases: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert demo.main(["--store", str(tmp_path / "store")]) == 0
    shown = capsys.readouterr().out
    assert shown.splitlines()[-1] == "PASS"
    assert shown.count("came back byte for byte") == len(releases) + 1


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (SECOND[:-1] + b"?", "version 2 differs from two.tar"),
        (SECOND[:-1], "version 2 differs from two.tar"),
        (SECOND + b"?", "two.tar goes on"),
    ],
)
def test_the_demo_fails_on_any_difference(
    releases: list[Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    content: bytes,
    says: str,
) -> None:
    put = demo._put

    def put_then_change(store: Store, source: Path) -> None:
        put(store, source)
        source.write_bytes(content if source == releases[1] else source.read_bytes())

    monkeypatch.setattr(demo, "_put", put_then_change)
    assert demo.main([]) == 1
    captured = capsys.readouterr()
    assert "PASS" not in captured.out
    assert captured.err.startswith("FAIL: ")
    assert says in captured.err


# ---------------------------------------------------------------- pipes, terminals, signals


@pytest.mark.parametrize("env", [{}, {"FORCE_COLOR": "1", "TERM": "xterm"}])
def test_a_pipe_gets_no_progress_bar(tmp_path: Path, env: dict[str, str]) -> None:
    assert run("put", "key", "-", "--store", tmp_path, stdin=FIRST, env=env).stderr == b""
    assert run("get", "key", "-o", tmp_path / "out", "--store", tmp_path, env=env).stderr == b""


@pytest.mark.parametrize(("options", "drawn"), [([], True), (["--json"], False)])
def test_a_terminal_gets_a_progress_bar_unless_json_is_asked_for(
    tmp_path: Path, options: list[str], drawn: bool
) -> None:
    ours, theirs = pty.openpty()
    done = subprocess.run(
        command("put", "key", "-", "--store", tmp_path, *options),
        input=FIRST, stdout=subprocess.PIPE, stderr=theirs, env=environment({"TERM": "xterm"}), timeout=60, check=True,
    )  # fmt: skip
    os.close(theirs)
    try:
        seen = os.read(ours, 65536)
    except OSError:  # Linux says so when the other end is closed and nothing is left
        seen = b""
    os.close(ours)
    assert done.stdout
    assert (b"put" in seen) is drawn


@pytest.mark.parametrize("env", [{"PYTHONUNBUFFERED": ""}, {"PYTHONUNBUFFERED": "1"}])
def test_a_reader_that_goes_away_is_no_error_to_speak_of(store: Path, env: dict[str, str]) -> None:
    with subprocess.Popen(
        command("--store", store, "get", "db/dump"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(env),
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(10)
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 141


def test_a_closed_stdout_is_refused_in_one_line(store: Path) -> None:
    done = subprocess.run(
        ["/bin/sh", "-c", '"$@" >&-', "sh", *command("--store", store, "get", "notes")],
        stderr=subprocess.PIPE, env=environment(), timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (2, b"nearkin: stdout is closed: name a file with -o\n")


def test_a_full_disk_is_one_line(store: Path) -> None:
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            command("--store", store, "get", "notes"),
            stdout=full,
            stderr=subprocess.PIPE,
            env=environment(),
            check=False,
        )
    assert done.returncode == 1
    assert done.stderr.startswith(b"nearkin: ")
    assert done.stderr.count(b"\n") == 1


@pytest.fixture
def reading(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A put that has opened its store and waits for the rest of stdin."""
    with subprocess.Popen(
        command("put", "key", "-", "--store", tmp_path / "store"),
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment(),
    ) as process:  # fmt: skip
        deadline = time.monotonic() + 30
        while not (tmp_path / "store" / "index").exists():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        time.sleep(0.3)  # from the index to the first read
        yield process
        process.kill()


@pytest.mark.parametrize(
    ("number", "code", "line"), [(signal.SIGINT, 130, b"interrupted"), (signal.SIGTERM, 143, b"terminated")]
)
def test_an_interrupted_put_says_so_in_one_line_and_stores_no_version(
    reading: subprocess.Popen[bytes], tmp_path: Path, number: signal.Signals, code: int, line: bytes, call: InProcess
) -> None:
    reading.send_signal(number)
    assert reading.wait(30) == code
    assert reading.stderr is not None
    assert reading.stderr.read() == b"nearkin: " + line + b"\n"
    assert call.answer("--store", tmp_path / "store", "ls") == []


def test_a_second_writer_is_told_that_the_store_is_locked(reading: subprocess.Popen[bytes], tmp_path: Path) -> None:
    done = run("--json", "--store", tmp_path / "store", "put", "other", "-", stdin=b"other")
    assert done.returncode == 1
    assert json.loads(done.stderr)["error"]["kind"] == "StoreLocked"
    assert reading.poll() is None


# ---------------------------------------------------------------- what arguments mean


@pytest.mark.parametrize(
    ("text", "size_bytes", "expected"),
    [
        ("0-0", 10, (0, 1)),
        ("2-5", 10, (2, 6)),
        ("2-", 10, (2, 10)),
        ("2-99", 10, (2, 10)),
        ("-3", 10, (7, 10)),
        ("-99", 10, (0, 10)),
        ("-5", 0, (0, 0)),
    ],
)
def test_a_range_counts_both_its_ends(text: str, size_bytes: int, expected: tuple[int, int]) -> None:
    assert parse_range(text).resolve(size_bytes) == expected


@pytest.mark.parametrize("text", ["", "-", "-0", "a-b", "1-2,4-5", "1 - 2", "٣-٤", "+1-2", "1-0", "9" * 20 + "-"])
def test_a_range_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(BadInput):
        parse_range(text)


@pytest.mark.parametrize(
    ("text", "expected"), [("1%", 0.01), ("0.01", 0.01), ("100%", 1.0), ("1", 1.0), (".5", 0.5), ("2.5%", 0.025)]
)
def test_a_sample_is_a_share_or_a_percentage(text: str, expected: float) -> None:
    assert parse_sample(text) == pytest.approx(expected)


@pytest.mark.parametrize("text", ["", "%", ".", "0", "0%", "-1%", "1.01", "nan", "inf", "1e-2", "five"])
def test_a_sample_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(BadInput):
        parse_sample(text)


def test_a_store_is_a_path_or_a_file_url() -> None:
    assert store_folder("some/where") == Path("some/where")
    assert store_folder("file:///with%20space") == Path("/with space")
    assert store_folder("file://localhost/there") == Path("/there")
    for refused in (None, "", "s3://bucket", "http://host", "file://host/there", "file:///nul%00"):
        with pytest.raises(ConfigError):
            store_folder(refused)


@pytest.mark.parametrize(
    ("count_bytes", "text"),
    [
        (0, "0 B"),
        (9999, "9,999 B"),
        (10_000, "10.0 kB"),
        (999_499, "999 kB"),
        (999_500, "1.00 MB"),
        (-2_500_000, "-2.50 MB"),
    ],
)
def test_bytes_are_shown_with_three_digits(count_bytes: int, text: str) -> None:
    assert human_bytes(count_bytes) == text


# --- rm, undelete ----------------------------------------------------------------------------------------------------


def test_rm_and_undelete_say_what_they_did(call: InProcess, tmp_path: Path) -> None:
    store = {"NEARKIN_STORE": str(tmp_path / "store")}
    for content in (b"one", b"two"):
        call("put", "db/dump", "-", stdin=content, env=store)
    call("put", "db/other", "-", stdin=b"x")
    assert call.answer("rm", "db/dump", "--reason", "wrong host") == {"key": "db/dump", "version": None, "deleted": 2}
    assert_refused(call("get", "db/dump"), 1, "the store has none")
    assert_refused(call("rm", "db/dump"), 1, "there is none")
    assert_refused(call("info", "db/dump", "--version", "1"), 1, "the store has none")
    assert [entry["key"] for entry in call.answer("ls", "--versions")] == ["db/other"]
    gone = call.answer("ls", "--deleted", "db/")
    assert [(entry["key"], entry["version"], entry["reason"]) for entry in gone] == [
        ("db/dump", 1, "wrong host"),
        ("db/dump", 2, "wrong host"),
    ]
    assert set(gone[0]) == {"key", "version", "deleted", "until", "who", "reason"}
    lines = call("ls", "--deleted").stdout.decode().splitlines()
    assert re.fullmatch(r"\S+Z  until \S+Z  v1     \S+@\S+  db/dump  # wrong host", lines[0])
    assert "and 2 versions deleted, 6 B" in call("stats").stdout.decode()
    assert call("undelete", "db/dump").stdout == b"undeleted 2 versions of db/dump\n"
    assert call("get", "db/dump").stdout == b"two"
    assert_refused(call("undelete", "db/dump"), 1, "not deleted, or never there")
    assert call("rm", "db/dump", "--version", "2").stdout == b"deleted 1 version of db/dump\n"
    assert call("get", "db/dump").stdout == b"one"
    assert call.answer("stats")["deleted_versions"] == 1


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("rm",), "KEY"),
        (("rm", ""), "must not be empty"),
        (("rm", "k", "--version", "0"), "version"),
        (("rm", "k", "--reason", "x" * 2000), "reason of 2000 bytes"),
        (("ls", "--deleted", "--versions"), "give one of them"),
        (("undelete", "k", "--version", "x"), "version"),
    ],
)
def test_what_rm_refuses_changes_nothing(
    call: InProcess, tmp_path: Path, arguments: tuple[str, ...], says: str
) -> None:
    call("put", "k", "-", stdin=b"x", env={"NEARKIN_STORE": str(tmp_path / "store")})
    assert_refused(call(*arguments), 2, says)
    assert call("get", "k").stdout == b"x"

"""Test contents that `put` must not store: failed commands, empty input, changing files."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import pytest

from nearkin import create_store, open_store
from tests.support.checks.commands import InProcess, assert_refused, new_store, run


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return new_store(tmp_path / "store")


def python(script: str) -> tuple[str, ...]:
    return "--from-command", "--", sys.executable, "-c", script


def keys(root: Path) -> list[str]:
    with open_store(root) as store:
        return [info.key for info in store.versions()]


def test_put_from_command_stores_its_output(call: InProcess, root: Path) -> None:
    """`put KEY --from-command -- CMD` stores what a successful command writes."""
    call("--store", root, "put", "dump", *python("print('row ' * 100_000)"))
    assert call("--store", root, "get", "dump").stdout == b"row " * 100_000 + b"\n"


@pytest.mark.parametrize(
    ("end", "problem"),
    [("sys.exit(3)", "failed with exit code 3"), ("os.kill(os.getpid(), 9)", "was ended by SIGKILL")],
)
def test_put_from_failed_command_stores_nothing(call: InProcess, root: Path, end: str, problem: str) -> None:
    """Store nothing if the command fails after output; report its exit code and stderr."""
    script = f"import os, sys; os.write(1, bytes(3_000_000)); os.write(2, b'connection lost'); {end}"
    done = call("--store", root, "--json", "put", "dump", *python(script))
    assert done.returncode != 0
    message = json.loads(done.stderr)["error"]["message"]
    assert problem in message
    assert "nothing was stored" in message
    assert message.endswith("its stderr: connection lost")
    assert keys(root) == []


def test_put_from_unknown_command_is_refused(call: InProcess, root: Path) -> None:
    """A command that cannot be started, or none, is a usage error."""
    missing = call("--store", root, "put", "dump", "--from-command", "--", "no-such-program")
    assert_refused(missing, 2, "command 'no-such-program': cannot be run: no such file")
    assert_refused(call("--store", root, "put", "dump", "--from-command"), 2, "give the command after --")
    assert keys(root) == []


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("dump", "{source}", "--from-command", "--", "{touch}", "{made}"), "before -- is a source"),
        (("dump", "--from-command", "{source}", "--", "{touch}", "{made}"), "before -- is a source"),
        (("dump", "--from-command", "{touch}", "{made}"), "give the command after --"),
        (("--from-command", "--", "dump", "{touch}", "{made}"), "give the command after --"),
    ],
)
def test_put_with_source_and_command_runs_nothing(
    arguments: tuple[str, ...], reason: str, call: InProcess, root: Path, tmp_path: Path
) -> None:
    """A source next to a command, or a command that is not after `--`, is refused: nothing runs, nothing is stored."""
    made, touch, source = tmp_path / "made", shutil.which("touch"), tmp_path / "source"
    source.write_text("content")
    named = [one.format(made=made, touch=touch, source=source) for one in arguments]
    assert_refused(call("--store", root, "put", *named), 2, reason)
    assert not made.exists()
    assert keys(root) == []


def test_option_instead_of_value_is_refused(call: InProcess, root: Path) -> None:
    """`--keep-tag --dry-run` deletes nothing: an option is no value of another, unless both are joined by `=`."""
    assert call("--store", root, "put", "dump", "/dev/null", "--allow-empty").returncode == 0
    assert call("--store", root, "put", "dump", "/dev/null", "--allow-empty").returncode == 0
    forget = ("--store", root, "forget", "dump", "--keep-last", "1")
    assert_refused(call(*forget, "--keep-tag", "--dry-run"), 2, "--keep-tag: its value is missing before --dry-run")
    assert_refused(call("--store", "-q", "ls"), 2, "--store: its value is missing before -q")
    with open_store(root) as store:
        assert [info.version for info in store.versions("dump", all_versions=True)] == [1, 2]
    assert call("--store", root, "put", "dump", "/dev/null", "--allow-empty", "--meta=--json=x").returncode == 0


def test_put_from_command_without_store_runs_nothing(call: InProcess, tmp_path: Path) -> None:
    """The command is not started if there is no store for its output."""
    script = f"open({str(tmp_path / 'ran')!r}, 'w')"
    assert call("--store", tmp_path / "none", "put", "dump", *python(script)).returncode != 0
    assert not (tmp_path / "ran").exists()


def test_put_of_empty_stdin_needs_allow_empty(call: InProcess, root: Path) -> None:
    """Refuse an empty standard input, as of a failed dump in a pipe, without --allow-empty."""
    assert_refused(call("--store", root, "put", "dump", "-"), 2, "standard input is empty; nothing was stored")
    assert_refused(call("--store", root, "put", "dump", *python("")), 2, "the command's output is empty")
    assert keys(root) == []
    assert call("--store", root, "put", "dump", "-", "--allow-empty").returncode == 0
    assert call("--store", root, "put", "log", "--allow-empty", *python("")).returncode == 0
    assert keys(root) == ["dump", "log"]


@pytest.mark.skipif(not os.path.exists("/dev/fd"), reason="the system has no /dev/fd")
def test_put_of_empty_descriptor_needs_allow_empty(call: InProcess, root: Path, tmp_path: Path) -> None:
    """Refuse an empty device or file behind /dev/stdin or /dev/fd as empty standard input."""
    (tmp_path / "empty").touch()
    with (tmp_path / "empty").open() as file:
        source = f"/dev/fd/{file.fileno()}"
        assert_refused(
            call("--store", root, "put", "dump", source), 2, f'source "{source}" is empty; nothing was stored'
        )
        assert_refused(call("--store", root, "put", "dump", "/dev/null"), 2, 'source "/dev/null" is empty')
        assert keys(root) == []
        assert call("--store", root, "put", "dump", source, "--allow-empty").returncode == 0
        assert call("--store", root, "put", "file", tmp_path / "empty").returncode == 0
    assert keys(root) == ["dump", "file"]


def test_put_of_changing_file_sets_source_changed(tmp_path: Path) -> None:
    """Flag a file that another process writes during the put, in result and version."""
    path = tmp_path / "file"
    path.write_bytes(bytes(8_000_000))
    changed = False

    def change(_count: int) -> None:
        nonlocal changed
        if not changed:
            changed = True
            with path.open("r+b") as file:  # in place: the size stays the same
                file.seek(7_000_000)
                file.write(b"new")
            os.utime(path, ns=(1, 1))

    with create_store(tmp_path / "store") as store:
        assert store.put("torn", path, progress=change).source_changed
        assert store.info("torn").source_changed
        assert not store.put("whole", path).source_changed


def test_put_of_growing_file_warns(root: Path, tmp_path: Path) -> None:
    """`put` warns on stderr of a file that changed while it was read, and JSON has the flag."""
    script = (
        "import os, sys; from nearkin.local import source_feed; from nearkin.cli import main\n"
        "read = source_feed._read_into\n"
        "def growing(file, window, name):\n"
        "    count = read(file, window, name)\n"
        "    if count: open(name, 'ab').write(b'!')\n"
        "    return count if count > 1 else 0\n"
        "source_feed._read_into = growing; sys.exit(main(sys.argv[1:]))"
    )
    (tmp_path / "log").write_bytes(b"line\n" * 1000)
    import subprocess

    for flags in ((), ("--json",)):
        words = [sys.executable, "-c", script, "--store", str(root), *flags, "put", "log", str(tmp_path / "log")]
        done = subprocess.run(words, capture_output=True, check=True)
        if flags:
            assert json.loads(done.stdout)["source_changed"] is True
        else:
            assert b"changed while it was read, log version 1 may mix two states" in done.stderr


def test_put_of_unchanged_file_is_not_flagged(root: Path, tmp_path: Path) -> None:
    """A file that stays the same is stored without a warning."""
    (tmp_path / "file").write_bytes(b"same")
    done = run("--store", root, "--json", "put", "file", tmp_path / "file")
    assert (json.loads(done.stdout)["source_changed"], done.stderr) == (False, b"")

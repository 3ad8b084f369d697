"""Exit codes of real commands, and --wait for the store's lock."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nearkin import open_store
from nearkin.cli.exit_codes import ExitCode
from nearkin_shared.formats.columns import CHECK_BYTES, check_bytes
from tests.support.checks.commands import FIRST, InProcess, command, damage, environment, new_store, run

HOLD = (
    "import sys, nearkin\n"
    "with nearkin.open_store(sys.argv[1]) as store:\n"
    "    store.put('held', b'x')\n"
    "    print('holds', flush=True)\n"
    "    sys.stdin.read()\n"
)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return new_store(tmp_path / "store")


def hold(root: Path) -> subprocess.Popen[bytes]:
    """Start a process that holds the store's lock until its stdin is closed."""
    words = [sys.executable, "-c", HOLD, str(root)]
    process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment())
    assert process.stdout is not None
    assert process.stdout.readline() == b"holds\n"
    return process


def test_exit_codes_distinguish_failures(call: InProcess, root: Path, tmp_path: Path) -> None:
    """Done, failed, usage and no store have codes of their own, as the help lists them."""
    assert call("--store", root, "ls").returncode == ExitCode.DONE.value == 0
    assert call("--store", root, "get", "none").returncode == ExitCode.NOT_FOUND.value == 4
    assert call("--store", root, "put").returncode == ExitCode.USAGE.value == 2
    assert call("--store", tmp_path / "none", "ls").returncode == ExitCode.NO_STORE.value == 10
    help_text = " ".join(call("--help").stdout.decode().split())
    for code in ExitCode:
        assert f"{code.value} " in help_text[help_text.index("Exit codes:") :]


def test_later_format_has_its_own_exit_code(call: InProcess, root: Path) -> None:
    """Exit with 8 for a manifest of a later format, and with 5 if anything is damaged besides."""
    for key in ("first", "second"):
        assert call("--store", root, "put", key, "-", stdin=os.urandom(20_000)).returncode == ExitCode.DONE
    first = min(path for path in (root / "manifests").rglob("*") if path.is_file())
    data = bytearray(first.read_bytes())
    data[4:6] = (99).to_bytes(2, "little")
    data[-CHECK_BYTES:] = check_bytes(bytes(data[:-CHECK_BYTES]))
    first.chmod(0o600)
    first.write_bytes(data)
    done = call("--store", root, "--json", "verify")
    assert done.returncode == ExitCode.TOO_NEW.value == 8, done.stdout
    assert [one["too_new"] for one in json.loads(done.stdout)["damage"]] == [True]
    text = call("--store", root, "verify").stdout.decode()
    assert "cannot be read: manifests/" in text
    assert "no damage, 1 object of a later format" in text
    assert call("--store", root, "repair").returncode == ExitCode.TOO_NEW
    damage(root)
    done = call("--store", root, "--json", "verify")
    assert done.returncode == ExitCode.DAMAGED
    assert {one["too_new"] for one in json.loads(done.stdout)["damage"]} == {False, True}


def test_locked_store_has_its_own_exit_code(call: InProcess, root: Path) -> None:
    """Exit with 11 if another process writes to the store; --wait SECONDS waits that long."""
    with hold(root) as holder:
        assert call("--store", root, "put", "k", "-", stdin=b"x").returncode == ExitCode.LOCKED.value == 11
        assert call("--store", root, "gc").returncode == ExitCode.LOCKED
        began = time.monotonic()
        assert call("--store", root, "put", "k", "-", "--wait", "0.3", stdin=b"x").returncode == ExitCode.LOCKED
        assert time.monotonic() - began >= 0.3
        assert holder.stdin is not None
        holder.stdin.close()


@pytest.mark.parametrize("words", [("put", "k", "/etc/hostname"), ("rm", "held"), ("gc",), ("rebuild-index",)])
def test_wait_outlasts_another_writer(root: Path, words: tuple[str, ...]) -> None:
    """With --wait a command does its work once the other process has closed the store."""
    with hold(root) as holder:
        waiting = subprocess.Popen(command("--store", root, "--wait", "60", *words), env=environment())
        with pytest.raises(subprocess.TimeoutExpired):
            waiting.wait(2)
        assert holder.stdin is not None
        holder.stdin.close()
        assert waiting.wait(60) == 0
    with open_store(root) as store:
        assert not store.verify().damage


def encrypted(tmp_path: Path, name: str = "right.key") -> dict[str, str]:
    """Generate a key-encryption key and return the environment that names it."""
    file = tmp_path / name
    assert run("keys", "generate", file).returncode == 0
    return {"NEARKIN_STORAGE__ENCRYPTION": "aes-256-gcm", "NEARKIN_STORAGE__KEY_FILE": str(file)}


def test_not_found_and_precondition_have_own_exit_codes(root: Path) -> None:
    """A missing key or version is 4, a conditional put over another version is 7."""
    assert run("--store", root, "put", "k", "-", stdin=b"x").returncode == 0
    assert run("--store", root, "get", "none").returncode == ExitCode.NOT_FOUND.value == 4
    assert run("--store", root, "get", "k", "--version", "9").returncode == ExitCode.NOT_FOUND
    assert run("--store", root, "info", "none").returncode == ExitCode.NOT_FOUND
    refused = run("--store", root, "put", "k", "-", "--if-none-match", "*", stdin=b"y")
    assert refused.returncode == ExitCode.PRECONDITION_FAILED.value == 7


def test_damage_has_its_own_exit_code(root: Path, tmp_path: Path) -> None:
    """Exit with 5 on damage in get, get --salvage, verify and repair; copy exits with 3.

    `copy` exits with 3 because it copies part of the versions.
    """
    assert run("--store", root, "put", "k", "-", stdin=FIRST).returncode == 0
    damage(root)
    for words in (("get", "k"), ("get", "k", "--salvage"), ("verify",), ("verify", "k"), ("repair",)):
        assert run("--store", root, *words).returncode == ExitCode.DAMAGED.value == 5, words
    copied = run("--store", new_store(tmp_path / "copy"), "copy", "--from", root)
    assert copied.returncode == ExitCode.INCOMPLETE.value == 3, copied.stderr


def test_wrong_key_has_its_own_exit_code(tmp_path: Path) -> None:
    """A wrong or missing key-encryption key is 12, as restic's wrong password."""
    right = encrypted(tmp_path)
    root = tmp_path / "sealed"
    assert run("--store", root, "init", env=right).returncode == 0
    assert run("--store", root, "ls", env=encrypted(tmp_path, "wrong.key")).returncode == ExitCode.WRONG_KEY.value == 12
    assert run("--store", root, "ls").returncode == ExitCode.WRONG_KEY
    assert run("--store", root, "ls", env=right).returncode == ExitCode.DONE


def test_full_disk_has_its_own_exit_code(tmp_path: Path) -> None:
    """A put that does not fit on the store's device exits with 6."""
    if os.geteuid() != 0:
        pytest.skip("only root may mount the small disk that this test fills")
    disk = tmp_path / "disk"
    disk.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(disk)]
    if subprocess.run(words, capture_output=True, check=False).returncode != 0:
        pytest.skip("no small disk can be mounted here")
    try:
        root = new_store(disk / "store")
        content = random.Random(2).randbytes(6 << 20)
        assert run("--store", root, "put", "k", "-", stdin=content).returncode == ExitCode.NO_ROOM.value == 6
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


@pytest.mark.parametrize("words", [("get", "blob"), ("export", "tree"), ("dump", "tree:/file")])
def test_full_output_device_has_the_same_code(tmp_path: Path, words: tuple[str, str]) -> None:
    """A version that does not fit on the device of its output exits with 6, as `restore` does."""
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "file").write_bytes(bytes(3_000_000))
    root = new_store(tmp_path / "store")
    assert run("--store", root, "put", "blob", folder / "file").returncode == 0
    assert run("--store", root, "backup", "tree", folder).returncode == 0
    done = run("--store", root, *words, "-o", "/dev/full")
    assert done.returncode == ExitCode.NO_ROOM, done.stderr
    assert b"free space on that filesystem" in done.stderr


def test_keys_of_a_missing_store_name_init(tmp_path: Path) -> None:
    """Exit with 10 and name `nearkin init` if no store exists, also for object_store.url."""
    env = encrypted(tmp_path)
    for more in ({"NEARKIN_STORE": str(tmp_path / "none")}, {"NEARKIN_OBJECT_STORE__URL": str(tmp_path / "none")}):
        done = run("keys", "list", env={**env, **more})
        assert done.returncode == ExitCode.NO_STORE
        assert b"`nearkin init` makes one" in done.stderr


def test_serve_waits_for_the_lock(root: Path, tmp_path: Path) -> None:
    """`serve --wait` starts once the other process has closed the store."""
    with hold(root) as holder, (tmp_path / "out").open("w+b") as out:
        words = command("serve", root, "--port", "0", "--no-token", "--wait", "60")
        with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=out, env=environment()) as serving:
            assert serving.stdout is not None
            with pytest.raises(subprocess.TimeoutExpired):
                serving.wait(3)
            assert holder.stdin is not None
            holder.stdin.close()
            assert serving.stdout.readline().startswith(b"http://")
            serving.terminate()
            assert serving.wait(60) == 0

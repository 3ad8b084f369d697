"""Targets of `get` that are no regular files of their own name."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from nearkin import create_store
from tests.support.checks.commands import command, environment, run

CONTENT = b"content " * 100_000


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("targets") / "store"
    with create_store(folder) as store:
        store.put("key", CONTENT)
    return folder


@pytest.mark.parametrize("target", ["/dev/stdout", "/proc/self/fd/1", "/dev/fd/1"])
def test_get_to_dev_stdout_keeps_the_log(root: Path, tmp_path: Path, target: str) -> None:
    """`get -o /dev/stdout >> log` appends to the log and does not replace it."""
    (tmp_path / "log").write_bytes(b"before\n")
    inode = (tmp_path / "log").stat().st_ino
    with (tmp_path / "log").open("ab") as log:
        done = subprocess.run(command("--store", root, "get", "key", "-o", target), stdout=log, env=environment())
    assert done.returncode == 0
    assert (tmp_path / "log").read_bytes() == b"before\n" + CONTENT
    assert (tmp_path / "log").stat().st_ino == inode


def test_get_to_pipes_writes_to_them(root: Path, tmp_path: Path) -> None:
    """Pipes, `>(command)`, named pipes and devices are opened as they are."""
    assert run("--store", root, "get", "key", "-o", "/dev/stdout").stdout == CONTENT
    assert run("--store", root, "get", "key", "-o", "/dev/null").returncode == 0
    words = " ".join(str(word) for word in command("--store", root, "get", "key", "-o"))
    script = f'{words} >(cat > "$0/substituted"; touch "$0/done"); until [ -e "$0/done" ]; do :; done'
    subprocess.run(["bash", "-c", script, str(tmp_path)], check=True, env=environment(), timeout=60)
    assert (tmp_path / "substituted").read_bytes() == CONTENT
    os.mkfifo(tmp_path / "fifo")
    with subprocess.Popen(command("--store", root, "get", "key", "-o", tmp_path / "fifo"), env=environment()) as child:
        assert (tmp_path / "fifo").read_bytes() == CONTENT
    assert child.returncode == 0


def test_get_to_mounted_file_writes_in_place(root: Path, tmp_path: Path) -> None:
    """Write a mounted file, as in containers, in place: rename fails with EBUSY."""
    if shutil.which("unshare") is None or os.geteuid() != 0:
        pytest.skip("mounting takes root and unshare")
    (tmp_path / "host").write_bytes(b"old and longer " * 100_000)
    (tmp_path / "target").write_bytes(b"")
    mount = 'mount --bind "$0/host" "$0/target" || exit 77; shift 0; exec "$@"'
    words = ["unshare", "-m", "sh", "-c", mount, str(tmp_path), *command("--store", root, "get", "key", "-o")]
    done = subprocess.run([*words, tmp_path / "target"], capture_output=True, env=environment(), timeout=60)
    if done.returncode == 77 or b"unshare failed" in done.stderr:
        pytest.skip("this container may not mount")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "host").read_bytes() == CONTENT
    assert sorted(os.listdir(tmp_path)) == ["host", "target"]

"""Names and output under other encodings than UTF-8."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from nearkin import create_store
from tests.support.checks.commands import run

NAME = "café ✓"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("encodings") / "store"
    with create_store(folder) as store:
        for key in ("first", NAME, "last"):
            store.put(key, b"x")
    return folder


@pytest.mark.parametrize("encoding", ["latin-1", "ascii"])
def test_ls_in_other_encodings_lists_all(root: Path, encoding: str) -> None:
    """Characters that stdout cannot show are escaped; the listing does not end half-way."""
    done = run("--store", root, "ls", env={"PYTHONIOENCODING": encoding})
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(b"\n") == 3
    assert b"\\u2713" in done.stdout
    assert b"last" in done.stdout


def test_keys_in_latin1_locale_are_the_same(root: Path, tmp_path: Path) -> None:
    """Treat the bytes of keys, file names and store paths alike under a Latin-1 locale."""
    made = shutil.which("localedef") and subprocess.run(
        ["localedef", "-i", "en_US", "-f", "ISO-8859-1", tmp_path / "en_US.ISO-8859-1"],
        check=False,
        capture_output=True,
    )
    if not made or not (tmp_path / "en_US.ISO-8859-1").exists():
        pytest.skip("localedef cannot make a Latin-1 locale here")
    env = {"LOCPATH": str(tmp_path), "LC_ALL": "en_US.ISO-8859-1", "PYTHONUTF8": "0"}
    done = run("--store", root, "get", NAME.encode(), env=env)
    assert (done.returncode, done.stdout) == (0, b"x"), done.stderr
    listed = run("--store", root, "ls", env=env)
    assert listed.returncode == 0, listed.stderr
    assert "café \\u2713".encode("latin-1") in listed.stdout
    copy = tmp_path / "naïve"
    shutil.copytree(root, copy)
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / NAME).write_bytes(b"y")
    assert run("--store", os.fsencode(copy), "put", NAME, tmp_path / "tree" / NAME, env=env).returncode == 0
    assert run("--store", copy, "get", NAME).stdout == b"y"

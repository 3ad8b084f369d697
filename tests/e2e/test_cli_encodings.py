"""Names and output under other encodings than UTF-8."""

from __future__ import annotations

import json
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


BYTES = b"bad\xe9"


@pytest.mark.parametrize(
    "words",
    [
        ["put", BYTES, "/etc/hostname"],
        ["get", BYTES],
        ["rm", BYTES],
        ["ls", BYTES],
        ["put", "k", BYTES],
        ["put", "k", "/etc/hostname", "--meta", b"a=" + BYTES],
        ["rm", "first", "--reason", BYTES],
        ["config", BYTES],
        ["repair", "--from", BYTES],
    ],
    ids=lambda words: " ".join(map(str, words[:2])),
)
def test_bytes_that_are_not_utf8_are_shown_as_bytes(root: Path, words: list[str | bytes]) -> None:
    """F.7: A key of other bytes is refused, as over HTTP; each error shows the byte, in text and in JSON."""
    for as_json in ([], ["--json"]):
        done = run("--store", root, *as_json, *words)
        assert done.returncode in (1, 2), done.stderr
        assert b"udce9" not in done.stderr
        message = json.loads(done.stderr)["error"]["message"] if as_json else done.stderr.decode()
        assert "bad\\xe9" in message
        if words[:1] in (["get"], ["ls"]):
            assert "`iconv -f latin1 -t utf8`" in message


def test_json_of_paths_that_are_not_utf8_is_readable(root: Path, tmp_path: Path) -> None:
    """F.7: A path of other bytes is shown as in errors; no lone surrogate, which most readers of JSON refuse."""
    folder = tmp_path / os.fsdecode(BYTES)
    shutil.copytree(root, folder)
    done = run("--store", folder, "--json", "config", "store")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)["store"]
    assert found["value"] == f"{tmp_path}/bad\\xe9"
    assert bytes.fromhex(found["value_hex"]) == os.fsencode(tmp_path) + b"/" + BYTES
    done = run("--json", "init", os.fsencode(tmp_path) + b"/\x1b new " + BYTES)
    made = json.loads(done.stdout)
    assert made["store"] == f"{tmp_path}/\x1b new bad\\xe9"
    assert bytes.fromhex(made["store_hex"]) == os.fsencode(tmp_path) + b"/\x1b new " + BYTES
    assert "store_hex" not in json.loads(run("--json", "init", tmp_path / "plain").stdout)


def test_characters_beyond_the_basic_plane_stay(root: Path) -> None:
    """F.7: Half of a character beyond U+FFFF is no byte: keys with one are printed as they are."""
    key = "dizzy \N{DIZZY SYMBOL} \\udce9"
    with create_store(root.parent / "dizzy") as store:
        store.put(key, b"x")
    done = run("--store", root.parent / "dizzy", "--json", "ls")
    assert [info["key"] for info in json.loads(done.stdout)] == [key]
    assert "dizzy \N{DIZZY SYMBOL}" in run("--store", root.parent / "dizzy", "get", f"{key} none").stderr.decode()

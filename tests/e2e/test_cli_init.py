"""`nearkin init`, and commands on a path without a store."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from nearkin import create_store, open_store
from nearkin_shared.errors import BadInput, NotFound
from tests.support.checks.commands import InProcess, assert_refused, run

REMEDY = "is the disk mounted? `nearkin init` makes one"
COMMANDS = (
    ("put", "key", "-"),
    ("backup", "key", str(Path(__file__).parent)),
    ("get", "key"),
    ("ls",),
    ("rm", "key"),
    ("stats",),
    ("verify",),
    ("repair",),
    ("gc",),
    ("rebuild-index",),
    ("forget", "--keep-last", "1"),
)


@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: words[0])
def test_command_without_store_is_refused(call: InProcess, tmp_path: Path, words: tuple[str, ...]) -> None:
    """Each command refuses a path without a store, names `nearkin init`, and creates nothing."""
    mount_point = tmp_path / "disk"
    mount_point.mkdir()
    for place in (mount_point, mount_point / "nearkin"):
        done = call(*words, env={"NEARKIN_STORE": str(place)})
        assert_refused(done, 10, f"no store at {place}; {REMEDY}")
    assert list(mount_point.iterdir()) == []


def test_serve_without_store_is_refused(tmp_path: Path) -> None:
    """`nearkin serve PATH` refuses a path without a store."""
    done = run("serve", tmp_path / "store", "--no-token", "--port", "0")
    assert (done.returncode, done.stdout) == (10, b"")
    assert REMEDY.encode() in done.stderr
    assert os.listdir(tmp_path) == []


def test_command_on_other_folder_is_refused(call: InProcess, tmp_path: Path) -> None:
    """A folder with other files is no store, and init does not turn it into one."""
    (tmp_path / "photo.jpg").write_bytes(b"mine")
    assert_refused(call("--store", tmp_path, "ls"), 10, f"no store at {tmp_path}; {REMEDY}")
    assert_refused(call("init", tmp_path), 2, "the folder is not empty")
    assert os.listdir(tmp_path) == ["photo.jpg"]


def test_init_creates_store_for_other_commands(tmp_path: Path) -> None:
    """Put and get after `nearkin init PATH`; a second init is refused and changes nothing."""
    store = tmp_path / "deep" / "store"
    assert b"created store" in run("init", store).stdout
    before = (store / "nearkin.json").read_bytes()
    assert run("--store", store, "put", "key", "-", stdin=b"content").returncode == 0
    assert_refused(run("init", "--store", store), 2, "already exists")
    assert (store / "nearkin.json").read_bytes() == before
    assert run("--store", store, "get", "key").stdout == b"content"


def test_init_answers_with_path_and_id(call: InProcess, tmp_path: Path) -> None:
    """`init --json` prints the store's path and id."""
    answer = call.answer("init", tmp_path / "store")
    with open_store(tmp_path / "store", create=True) as store:
        assert answer == {"store": str(tmp_path / "store"), "id": store.store_id}


def test_init_with_server_is_refused(call: InProcess, tmp_path: Path) -> None:
    """Init creates local stores only, and takes one path."""
    assert_refused(call("init", "--server", "http://127.0.0.1:1"), 2, "creates a local store")
    assert_refused(call("init", "--store", tmp_path / "a", tmp_path / "b"), 2, "name one of them")
    assert os.listdir(tmp_path) == []


def test_api_open_without_store_is_refused(tmp_path: Path) -> None:
    """Create a store with `create=True` only; `create_store` refuses an existing one."""
    with pytest.raises(NotFound, match="no store at"):
        open_store(tmp_path / "store")
    with pytest.raises(NotFound, match="no store at"):
        open_store(tmp_path / "store", create=True, read_only=True)
    assert os.listdir(tmp_path) == []
    with create_store(tmp_path / "store") as store:
        store.put("key", b"content")
    with pytest.raises(BadInput, match="already exists"):
        create_store(tmp_path / "store")
    with open_store(tmp_path / "store", create=True) as store:
        assert store.get("key").read() == b"content"

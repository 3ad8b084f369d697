"""Stores that this process may read and not write: read-only media, another user's files."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from nearkin import open_store
from tests.support.data.stores import ENCRYPTED, SMALL, settings

READING = """
import logging, os, sys, tempfile
from pathlib import Path
from nearkin import open_store
from nearkin_shared.errors import StoreUnavailable
from tests.support.data.stores import ENCRYPTED, SMALL, settings
logging.basicConfig(stream=sys.stderr, format="%(message)s")
chosen = settings(SMALL, ENCRYPTED if sys.argv[2] == "encrypted" else {})
def read(root):
    with open_store(root, settings=chosen) as store:
        listed = [(found.key, found.version) for found in store.versions(all_versions=True)]
        sums = store.stats()
        assert store.explain("k") and not store.verify().damage and not store.verify_key("k").damage
        print(listed, len(store.get("k").read()), sums.versions, sums.deleted_versions, sums.parts)
        store.versions()
with tempfile.TemporaryDirectory() as warm:  # all modules are loaded while they can be read
    with open_store(Path(warm) / "s", settings=chosen, create=True) as store:
        store.put("k", b"x")
    out, sys.stdout = sys.stdout, open(os.devnull, "w")
    (Path(warm) / "s" / "index").rename(Path(warm) / "gone")
    read(Path(warm) / "s")
    sys.stdout = out
if os.geteuid() == 0 and sys.argv[3] == "other":
    os.setgroups([]); os.setgid(65534); os.setuid(65534)
os.environ["TMPDIR"] = tempfile.tempdir = sys.argv[4]
read(sys.argv[1])
print(sorted(os.listdir(sys.argv[4])))
try:
    with open_store(sys.argv[1], settings=chosen) as store:
        store.put("k", b"more")
except StoreUnavailable as err:
    print("refused", err)
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    """Return a folder that other users can reach: pytest's own folders are private."""
    made = Path(tempfile.mkdtemp())
    made.chmod(0o755)
    (made / "tmp").mkdir()
    (made / "tmp").chmod(0o777)
    yield made
    for path in [made, *made.rglob("*")]:
        path.chmod(0o700)
    shutil.rmtree(made)


def make_store(root: Path, kind: str) -> str:
    """Put two versions and a deleted one; return the lines that a reader prints of the store."""
    with open_store(root, settings=settings(SMALL, ENCRYPTED if kind == "encrypted" else {}), create=True) as store:
        store.put("k", bytes(range(256)) * 2000)
        store.put("k", bytes(range(256)) * 2000 + b"more")
        store.put("other", b"z")
        store.delete("other")
        sums = store.stats()
        return f"[('k', 1), ('k', 2)] 512004 {sums.versions} {sums.deleted_versions} {sums.parts}"


def run_reader(root: Path, kind: str, user: str, temporary: Path, stderr: list[str] | None = None) -> list[str]:
    """Run the reader in a process of its own; return its lines, and its log in `stderr`."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", READING, str(root), kind, user, str(temporary)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 0, run.stderr
    if stderr is not None:
        stderr += [line for line in run.stderr.splitlines() if "temporary index" in line]
    return run.stdout.splitlines()


@pytest.mark.parametrize(("kind", "has_index"), [("plain", True), ("encrypted", False)])
def test_store_of_another_user_is_read(folder: Path, kind: str, has_index: bool) -> None:
    """F.8: A user who may read a store and not write its index lists, restores and verifies it."""
    root = folder / "s"
    expected = make_store(root, kind)
    if not has_index:
        shutil.rmtree(root / "index")
    for path in sorted([root, *root.rglob("*")], reverse=True):
        path.chmod(0o555 if path.is_dir() else 0o444)
    before = {path: path.stat().st_mtime_ns for path in root.rglob("*")}
    logged: list[str] = []
    found = run_reader(root, kind, "other", folder / "tmp", logged)
    assert found[:2] == [expected, "[]"]  # nothing is left in the temporary folder while the process lives
    assert found[2].startswith("refused")
    assert "cannot write here" in found[2]
    assert [str(folder / "tmp") in line for line in logged] == [True]
    assert {path: path.stat().st_mtime_ns for path in root.rglob("*")} == before


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
@pytest.mark.parametrize("has_index", [True, False])
def test_store_on_a_read_only_mount_is_read(folder: Path, has_index: bool) -> None:
    """F.8: A store on read-only media is listed, with its index and without."""
    root, mounted = folder / "s", folder / "mounted"
    expected = make_store(root, "plain")
    if not has_index:
        shutil.rmtree(root / "index")
    mounted.mkdir()
    bound = subprocess.run(["mount", "--bind", str(root), str(mounted)], capture_output=True, check=False)
    if bound.returncode:
        pytest.skip("this container may not mount")
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", str(mounted)], check=True)
        found = run_reader(mounted, "plain", "same", folder / "tmp")
    finally:
        subprocess.run(["umount", str(mounted)], check=True)
    assert found[:2] == [expected, "[]"]
    assert "Read-only file system" in found[2]


def test_reader_during_a_writer_shows_new_versions(folder: Path) -> None:
    """F.8: A reader with a temporary index shows a version that a writer adds to a key, and newer keys in time."""
    from nearkin.local import temporary_index

    root = folder / "s"
    make_store(root, "plain")
    with open_store(root, settings=settings(SMALL)) as reader, open_store(root, settings=settings(SMALL)) as writer:
        temporary = reader._index._temporary
        assert [name for name, _ in temporary.get(OSError("x")).manifest_names("default", "")] == ["k", "k", "other"]
        writer.put("new", b"1")
        assert temporary.get(OSError("x")) is temporary.get(OSError("x"))
        temporary._made_at -= temporary_index.REUSED_SECONDS_MIN + 60
        assert "new" in [name for name, _ in temporary.get(OSError("x")).manifest_names("default", "")]

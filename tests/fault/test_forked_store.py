"""A Store that is open when its process forks: the child has neither its lock, nor its index, nor its put."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CHILD_TRIES = """
import multiprocessing, sys
import nearkin
from nearkin_shared.errors import StoreLocked

def tries(store, go, results):
    try:
        store.put("child", b"of the child")
        results.put("written by two")
    except StoreLocked as err:
        results.put(str(err))
    results.put([info.key for info in store.versions()])
    go.get()
    store.put("child", b"of the child")
    results.put(store.get("child").read())
    results.put([info.key for info in store.versions()])
    store.close()

fork = multiprocessing.get_context("fork")
go, results = fork.Queue(), fork.Queue()
store = nearkin.open_store(sys.argv[1], create=True)
store.put("parent", b"of the parent")
many = store.put_many([("first", b"1"), ("second", b"2")]) if sys.argv[2] == "putting" else None
if many is not None:
    next(many)
child = fork.Process(target=tries, args=(store, go, results))
child.start()
print(results.get(timeout=60))
print(results.get(timeout=60))
store.put("later", b"of the parent") if many is None else list(many)
store.close()
with nearkin.open_store(sys.argv[1], create=True) as again:  # the child, which lives, does not keep it locked
    again.put("again", b"of the parent")
go.put(None)
print(results.get(timeout=60))
print(results.get(timeout=60))
child.join(60)
print(child.exitcode)
with nearkin.open_store(sys.argv[1], create=True) as again:
    print(again.verify().damage)
"""


@pytest.mark.parametrize(("at", "keys"), [("idle", ["later"]), ("putting", ["first", "second"])])
def test_store_in_a_forked_child_leaves_lock_to_its_parent(tmp_path: Path, at: str, keys: list[str]) -> None:
    """A store in a forked child leaves lock, index and put to its parent."""
    run = [sys.executable, "-c", CHILD_TRIES, str(tmp_path / "store"), at]
    done = subprocess.run(run, capture_output=True, text=True, timeout=300, check=False)
    assert not done.stderr
    locked, listed, *rest = done.stdout.splitlines()
    assert "is being written by process" in locked
    assert "'parent'" in listed
    assert rest == ["b'of the child'", str(sorted(["again", "child", "parent", *keys])), "0", "()"]

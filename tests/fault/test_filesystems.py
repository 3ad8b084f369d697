"""Filesystems without hard links, or whose folders cannot be synced: a shim fails these calls by errno."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from nearkin.store import objects as module
from nearkin.store.objects import AlreadyExists, LocalObjects

SHIM = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>
static int set_by(const char *name) { const char *value = getenv(name); return value ? atoi(value) : 0; }
#define FAIL_IF(name) do { int number = set_by(name); if (number) { errno = number; return -1; } } while (0)
int link(const char *a, const char *b) { FAIL_IF("E_LINK"); return linkat(-100, a, -100, b, 0); }
int linkat(int d, const char *a, int e, const char *b, int f) {
  FAIL_IF("E_LINK");
  int (*real)(int, const char *, int, const char *, int) = dlsym(RTLD_NEXT, "linkat");
  return real(d, a, e, b, f);
}
int renameat2(int d, const char *a, int e, const char *b, unsigned f) {
  FAIL_IF("E_RENAMEAT2");
  int (*real)(int, const char *, int, const char *, unsigned) = dlsym(RTLD_NEXT, "renameat2");
  return real(d, a, e, b, f);
}
int fsync(int fd) {
  struct stat found;
  if (set_by("E_FSYNC") && !fstat(fd, &found) && S_ISDIR(found.st_mode)) FAIL_IF("E_FSYNC");
  int (*real)(int) = dlsym(RTLD_NEXT, "fsync");
  return real(fd);
}
"""

WRITING = """
import sys
from pathlib import Path
from nearkin import open_store
from nearkin.store.objects import AlreadyExists, LocalObjects
from nearkin.testing.stores import SMALL, settings
with open_store(sys.argv[1], settings=settings(SMALL), create=True) as store:
    store.put("k", b"content")
    store.put("k", b"more")
with open_store(sys.argv[1], settings=settings(SMALL)) as store:
    assert store.get("k").read() == b"more" and len(store.versions(all_versions=True)) == 2
    assert store.verify().damage == ()
objects = LocalObjects(Path(sys.argv[1]))
try:
    objects.put_new("nearkin.json", b"other")
except AlreadyExists:
    print("kept")
"""


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shim")
    (folder / "shim.c").write_text(SHIM)
    command = ["cc", "-shared", "-fPIC", "-o", str(folder / "shim.so"), str(folder / "shim.c"), "-ldl"]
    subprocess.run(command, check=True, timeout=60)
    return folder / "shim.so"


@pytest.mark.parametrize(
    "failing",
    [
        {"E_LINK": errno.EPERM},
        {"E_LINK": errno.EOPNOTSUPP, "E_RENAMEAT2": errno.EINVAL},
        {"E_FSYNC": errno.EINVAL},
        {"E_LINK": errno.EMLINK, "E_RENAMEAT2": errno.ENOSYS, "E_FSYNC": errno.ENOTSUP},
    ],
)
def test_store_without_links_or_folder_sync_works(tmp_path, shim, failing):
    """F.5: A store works where links or syncs of folders are not offered, and no name is replaced."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "LD_PRELOAD": str(shim)}
    environment |= {name: str(number) for name, number in failing.items()}
    command = [sys.executable, "-c", WRITING, str(tmp_path / "s")]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert (run.returncode, run.stdout) == (0, "kept\n"), run.stderr


def test_link_that_succeeded_and_answers_eexist_counts(tmp_path, monkeypatch):
    """F.5: NFS may repeat a link that it has made, and answer that the name is taken."""
    real = os.link

    def link(source: Path, target: Path) -> None:
        real(source, target)
        raise FileExistsError(errno.EEXIST, "File exists")

    monkeypatch.setattr(module.os, "link", link)
    objects = LocalObjects(tmp_path)
    objects.put_new("a/x", b"1")
    monkeypatch.undo()
    with pytest.raises(AlreadyExists):
        objects.put_new("a/x", b"2")
    assert objects.get("a/x") == b"1"


def test_other_failures_of_a_folder_sync_are_errors(tmp_path, shim):
    """F.5: A folder that could not be synced for another reason fails the put."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "LD_PRELOAD": str(shim)}
    command = [sys.executable, "-c", WRITING, str(tmp_path / "s")]
    environment["E_FSYNC"] = str(errno.EIO)
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode
    assert "StoreUnavailable" in run.stderr

"""Filesystems without hard links, or whose folders cannot be synced: a shim fails these calls by errno."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from nearkin import open_store
from nearkin_shared.objectstore.base import AlreadyExists
from nearkin_shared.objectstore.local import LocalObjectStore
from nearkin_shared.utils import mounts
from tests.support.data.stores import SMALL, settings

SHIM = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <sys/file.h>
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
int flock(int fd, int operation) {
  FAIL_IF("E_FLOCK");
  int (*real)(int, int) = dlsym(RTLD_NEXT, "flock");
  return real(fd, operation);
}
static int controlled(const char *name, int fd, int command, void *argument) {
  if (command == F_OFD_SETLK || command == F_OFD_SETLKW) FAIL_IF("E_OFD");
  int (*real)(int, int, void *) = dlsym(RTLD_NEXT, name);
  return real(fd, command, argument);
}
#define CONTROL(name) int name(int fd, int command, ...) { \
  va_list more; va_start(more, command); void *argument = va_arg(more, void *); va_end(more); \
  return controlled(#name, fd, command, argument); }
CONTROL(fcntl)
CONTROL(fcntl64)
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
from nearkin_shared.objectstore.base import AlreadyExists
from nearkin_shared.objectstore.local import LocalObjectStore
from tests.support.data.stores import SMALL, settings
with open_store(sys.argv[1], settings=settings(SMALL), create=True) as store:
    store.put("k", b"content")
    store.put("k", b"more")
with open_store(sys.argv[1], settings=settings(SMALL)) as store:
    assert store.get("k").read() == b"more" and len(store.versions(all_versions=True)) == 2
    assert store.verify().damage == ()
objects = LocalObjectStore(Path(sys.argv[1]))
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
        {"E_LINK": errno.EINVAL},
        {"E_LINK": errno.EOPNOTSUPP, "E_RENAMEAT2": errno.EINVAL},
        {"E_FSYNC": errno.EINVAL},
        {"E_LINK": errno.EMLINK, "E_RENAMEAT2": errno.ENOSYS, "E_FSYNC": errno.ENOTSUP},
        {"E_FLOCK": errno.ENOSYS},
        {"E_FLOCK": errno.ENOLCK, "E_LINK": errno.EPERM, "E_RENAMEAT2": errno.EINVAL},
    ],
)
def test_store_without_links_or_folder_sync_works(tmp_path: Path, shim: Path, failing: dict[str, int]) -> None:
    """F.5: A store works on a filesystem without links or syncs of folders, and no name is replaced."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "LD_PRELOAD": str(shim)}
    environment |= {name: str(number) for name, number in failing.items()}
    command = [sys.executable, "-c", WRITING, str(tmp_path / "s")]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert (run.returncode, run.stdout) == (0, "kept\n"), run.stderr


def test_link_that_succeeded_and_answers_eexist_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """F.5: NFS may repeat a link that succeeded, and answer that the name exists."""
    real = os.link

    def link(source: Path, target: Path) -> None:
        real(source, target)
        raise FileExistsError(errno.EEXIST, "File exists")

    monkeypatch.setattr(os, "link", link)
    objects = LocalObjectStore(tmp_path)
    objects.put_new("a/x", b"1")
    monkeypatch.undo()
    with pytest.raises(AlreadyExists):
        objects.put_new("a/x", b"2")
    assert objects.get("a/x") == b"1"


def test_other_failures_of_a_folder_sync_are_errors(tmp_path: Path, shim: Path) -> None:
    """F.5: A folder that could not be synced for another reason fails the put."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "LD_PRELOAD": str(shim)}
    command = [sys.executable, "-c", WRITING, str(tmp_path / "s")]
    environment["E_FSYNC"] = str(errno.EIO)
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode
    assert "StoreUnavailable" in run.stderr


HOLDING = """
import sys
from pathlib import Path
from nearkin_shared.errors import NearkinError
from nearkin.local.process_lock import WriterLock
lock = WriterLock(Path(sys.argv[1]))
try:
    lock.acquire()
    print("held", flush=True)
    sys.stdin.read()
except NearkinError as err:
    print(type(err).__name__, err, flush=True)
"""


def start_holder(root: Path, shim: Path, **failing: int) -> subprocess.Popen[str]:
    """Start a process that acquires the store's lock, prints the result and waits for the end of its input."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "LD_PRELOAD": str(shim)}
    environment |= {name: str(number) for name, number in failing.items()}
    command = [sys.executable, "-c", HOLDING, str(root)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True)


def first_line(holder: subprocess.Popen[str]) -> str:
    assert holder.stdout is not None
    return holder.stdout.readline()


def test_lock_without_flock_excludes_and_ends_with_process(tmp_path: Path, shim: Path) -> None:
    """F.5: Without flock one process writes at a time, and a killed holder's lock is free at once."""
    for _ in range(2):
        with start_holder(tmp_path, shim, E_FLOCK=errno.ENOTSUP) as holder:
            assert first_line(holder) == "held\n"
            with start_holder(tmp_path, shim, E_FLOCK=errno.ENOTSUP) as other:
                answer = first_line(other)
            assert answer.startswith("StoreLocked")
            assert f"process {holder.pid}" in answer
            holder.kill()


def test_filesystem_without_locks_names_the_remedy(tmp_path: Path, shim: Path) -> None:
    """F.5: Without any kind of lock nothing is written, and the error names the remedy."""
    with start_holder(tmp_path, shim, E_FLOCK=errno.ENOLCK, E_OFD=errno.EINVAL) as holder:
        answer = first_line(holder)
    assert answer.startswith("StoreUnavailable")
    assert "has no file locks" in answer
    assert "move the store to another filesystem" in answer


@pytest.mark.parametrize(("kind", "warnings"), [("nfs4", 1), ("fuse.sshfs", 1), ("ext4", 0)])
def test_index_on_a_network_filesystem_is_warned_of_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, kind: str, warnings: int
) -> None:
    """F.5: An index on a network filesystem is used with one warning in a process."""
    root = tmp_path / "s"
    device = tmp_path.stat().st_dev
    line = f"36 35 {os.major(device)}:{os.minor(device)} / / rw shared:1 - {kind} server:/export rw\n"
    (tmp_path / "mountinfo").write_text(f"1 1 0:999999 / /proc rw - proc proc rw\nshort\n{line}")
    monkeypatch.setattr(mounts, "MOUNTS", tmp_path / "mountinfo")
    for _ in range(2):
        with open_store(root, settings=settings(SMALL), create=True) as store:
            store.put("k", b"content")
            assert store.versions()
    assert caplog.text.count("network filesystem") == warnings


def test_filesystem_type_is_read_from_the_kernel(tmp_path: Path) -> None:
    """F.5: The type of a real mount is found, and a missing path has none."""
    assert mounts.filesystem_type(Path("/proc/self")) == "proc"
    assert mounts.filesystem_type(tmp_path / "missing") is None

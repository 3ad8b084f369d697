"""Mount a store by FUSE, read-only.

Invariant: a request that fails ends with an error number, and one that finds damage is logged; the mount stays.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nearkin.trees.mounted_store import MountedStore, Status
from nearkin_shared.errors import BadInput, ConfigError, NearkinError, NotFound

if TYPE_CHECKING:
    from types import ModuleType

DEVICE = Path("/dev/fuse")
ATTRIBUTE_SECONDS = 60
"""How long the kernel keeps names and attributes: versions never change, but `forget` deletes some."""
_log = logging.getLogger("nearkin")


def load_fuse() -> ModuleType:
    """Return the FUSE library. Raises ConfigError if it, libfuse or the device is missing."""
    try:
        import mfusepy
    except ModuleNotFoundError as err:
        raise ConfigError(f"mount: {err.name} is not installed; pip install 'nearkin[mount]'") from err
    except (OSError, AttributeError) as err:
        raise ConfigError(f"mount: {err}; install the package fuse3 of your distribution (macOS: macFUSE)") from err
    if os.uname().sysname == "Linux" and not DEVICE.exists():
        raise ConfigError(
            f"mount: {DEVICE} does not exist; load the kernel module (modprobe fuse), or start the container with "
            "--device /dev/fuse --cap-add SYS_ADMIN"
        )
    if os.geteuid() and shutil.which("fusermount3") is None and shutil.which("fusermount") is None:
        raise ConfigError("mount: fusermount3 is not installed, which users other than root need; install fuse3")
    module: ModuleType = mfusepy
    return module


def check_mount_point(folder: Path) -> None:
    """Raise BadInput unless a folder exists and is empty."""
    try:
        is_empty = not os.listdir(folder)
    except OSError as err:
        raise BadInput(f"mount: {str(folder)!r}: {err.strerror}; name an existing, empty folder") from err
    if not is_empty:
        raise BadInput(f"mount: {str(folder)!r}: is not empty; name an empty folder")


def mount_store(store: MountedStore, folder: Path, on_mount: Callable[[], None], *, allow_other: bool) -> None:
    """Mount a store and serve it until it is unmounted, or SIGINT, SIGTERM or SIGHUP arrives.

    `on_mount` is called once the mount exists. Raises ConfigError, BadInput.
    """
    fuse = load_fuse()
    check_mount_point(folder)
    operations = _operations(fuse, store, on_mount)
    with _default_signals():
        try:
            fuse.FUSE(
                operations,
                str(folder),
                foreground=True,
                nothreads=True,
                fsname="nearkin",
                ro=True,
                use_ino=True,
                kernel_cache=True,
                attr_timeout=ATTRIBUTE_SECONDS,
                entry_timeout=ATTRIBUTE_SECONDS,
                allow_other=allow_other,
                default_permissions=allow_other,
            )
        except RuntimeError as err:  # libfuse printed the reason
            raise ConfigError(
                f"mount: {str(folder)!r}: libfuse refused (code {err}), the line above has its reason; --allow-other "
                "of a user needs user_allow_other in /etc/fuse.conf"
            ) from err
        finally:
            store.close_all()


@contextmanager
def _default_signals() -> Iterator[None]:
    """Let libfuse handle the signals that end a mount: it leaves handlers of others alone."""
    numbers = (signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, signal.SIG_DFL) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def error_numbers(action: str, path: str) -> Iterator[None]:
    """Raise errors of a store as error numbers; log those that are no plain absence."""
    try:
        yield
    except NotFound as err:
        raise OSError(errno.ENOENT, os.strerror(errno.ENOENT)) from err
    except NotADirectoryError as err:
        raise OSError(errno.ENOTDIR, os.strerror(errno.ENOTDIR)) from err
    except IsADirectoryError as err:
        raise OSError(errno.EISDIR, os.strerror(errno.EISDIR)) from err
    except (NearkinError, OSError) as err:
        _log.error("mount: %s %r failed: %s", action, path, err)
        raise OSError(errno.EIO, os.strerror(errno.EIO)) from err


def _operations(fuse: ModuleType, store: MountedStore, on_mount: Callable[[], None]) -> Any:
    """Return the callbacks of a mount; the library's base class is known once it is imported."""

    class StoreOperations(fuse.Operations):  # type: ignore[misc, name-defined]
        use_ns = True

        def init(self, _path: str) -> None:
            on_mount()

        def getattr(self, path: str, _handle: int | None = None) -> dict[str, int]:
            with error_numbers("stat", path):
                return _attributes(store.status(os.fsencode(path)))

        def readdir(self, path: str, _handle: int) -> Iterator[tuple[str, dict[str, int], int]]:
            yield from ((name, {}, 0) for name in (".", ".."))
            with error_numbers("list", path):
                for name, mode, inode in store.children(os.fsencode(path)):
                    yield os.fsdecode(name), {"st_mode": mode, "st_ino": inode}, 0

        def readlink(self, path: str) -> str:
            with error_numbers("readlink", path):
                return os.fsdecode(store.link_target(os.fsencode(path)))

        def listxattr(self, path: str) -> list[str]:
            with error_numbers("listxattr", path):
                return [os.fsdecode(name) for name in store.xattrs(os.fsencode(path))]

        def getxattr(self, path: str, name: str, _position: int = 0) -> bytes:
            with error_numbers("getxattr", path):
                found = store.xattrs(os.fsencode(path)).get(os.fsencode(name))
            if found is None:
                raise OSError(fuse.ENOATTR, os.strerror(fuse.ENOATTR))
            return found

        def open(self, path: str, _flags: int) -> int:
            with error_numbers("open", path):
                return store.open(os.fsencode(path))

        def read(self, path: str, size: int, offset: int, handle: int) -> bytes:
            with error_numbers("read", path):
                return store.read(handle, offset, size)

        def release(self, _path: str, handle: int) -> int:
            store.close(handle)
            return 0

    return StoreOperations()


def _attributes(status: Status) -> dict[str, int]:
    return {**status._asdict(), "st_atime": status.st_mtime, "st_ctime": status.st_mtime}

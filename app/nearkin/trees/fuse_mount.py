"""Mount a store by FUSE, read-only.

Invariant: the mount ends when it is unmounted or a signal arrives, and all open files are closed then.
"""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes.util import find_library
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING

from nearkin.trees.fuse_callbacks import fuse_callbacks, fuse_operations
from nearkin.trees.mounted_store import MountedStore
from nearkin_shared.errors import BadInput, ConfigError
from nearkin_shared.utils.mounts import MOUNT_SOURCE

if TYPE_CHECKING:
    from types import ModuleType

LIBRARY_VARIABLE = "FUSE_LIBRARY_NAME"
"""Environment variable that names the library for mfusepy."""
DEVICE = Path("/dev/fuse")
ATTRIBUTE_SECONDS = 60
"""How long the kernel keeps names and attributes: versions never change, but `forget` deletes some."""


def load_fuse() -> ModuleType:
    """Return the FUSE library. Raises ConfigError if it, libfuse or the device is missing."""
    try:
        with _preferred_library():
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


@contextmanager
def _preferred_library() -> Iterator[None]:
    """Let mfusepy load libfuse 3 where it can be used.

    With libfuse 2 the kernel asks for the attributes of each entry of a listing.
    """
    is_usable = not os.geteuid() or shutil.which("fusermount3") is not None
    if LIBRARY_VARIABLE in os.environ or not is_usable or find_library("fuse3") is None:
        yield
        return
    os.environ[LIBRARY_VARIABLE] = "fuse3"
    try:
        yield
    finally:
        del os.environ[LIBRARY_VARIABLE]


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
    with _default_signals(), _working_folder() as restore_folder:
        is_mounted = Event()

        def start() -> None:
            is_mounted.set()
            restore_folder()
            on_mount()

        try:
            fuse_callbacks(fuse, store)(
                fuse_operations(fuse, store, start),
                str(folder),
                foreground=True,
                nothreads=True,
                fsname=MOUNT_SOURCE,
                ro=True,
                use_ino=True,
                kernel_cache=True,
                attr_timeout=ATTRIBUTE_SECONDS,
                entry_timeout=ATTRIBUTE_SECONDS,
                allow_other=allow_other,
                default_permissions=allow_other,
            )
        except RuntimeError as err:  # libfuse printed the reason
            if is_mounted.is_set():  # libfuse 3: a signal ended the mount
                return
            raise ConfigError(
                f"mount: {str(folder)!r}: libfuse refused (code {err}), the line above has its reason; --allow-other "
                "of a user needs user_allow_other in /etc/fuse.conf"
            ) from err
        finally:
            store.close_all()


@contextmanager
def _working_folder() -> Iterator[Callable[[], None]]:
    """Yield a function that enters the working folder again.

    libfuse 3 leaves it, and the path of a store may be relative.
    """
    descriptor = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield lambda: os.fchdir(descriptor)
    finally:
        os.close(descriptor)


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

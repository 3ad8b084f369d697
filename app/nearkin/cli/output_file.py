"""Write the output of a get.

Invariant: a regular file is complete or unchanged; it is written in the same folder, then renamed. With `mode_max` a
file never has content and a wider mode.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
import sys
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import BinaryIO

from nearkin.cli.exit_codes import is_device_full
from nearkin_shared.errors import BadInput

COPY_BYTES = 1 << 20
LINKS_MAX = 40
"""Symbolic links of one path that are followed, as by Linux."""
_NEW_MODE = 0o666
"""Of a new file; the umask takes from it."""
_NEW_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
STDOUT = "standard output"
"""The name of stdout in error messages."""


class OutputFile:
    """A context that opens the file to write to: stdout for None and `-`.

    Raises BadInput if it cannot be written.
    """

    def __init__(self, name: str | None, *, mode_max: int | None = None) -> None:
        """`mode_max`: the permission bits that a regular file has at most.

        None: a new file has those that the umask leaves, an existing one keeps its own.
        """
        given = None if name in (None, "-") else str(name)
        self._descriptor = None if given is None else _descriptor_of(given)
        self._target = None if given is None else Path(os.path.realpath(given))  # through links, like cp
        if self._descriptor is not None:
            self._target = Path(str(given))
        self._beside: Path | None = None
        self._file: BinaryIO | None = None
        self._mode_max = None if mode_max is None else mode_max & 0o777

    def __enter__(self) -> BinaryIO:
        try:
            return self._opened()
        except BaseException:  # a Ctrl-C or SIGTERM too: `__exit__` is not called if `__enter__` raises
            self._discard()
            raise

    def _opened(self) -> BinaryIO:
        if self._target is None:
            if sys.stdout is None:
                raise BadInput("stdout is closed: name a file with -o")
            # not sys.stdout.buffer: PYTHONUNBUFFERED makes that a raw file, whose write may end short without an error
            sys.stdout.flush()
            self._file = os.fdopen(sys.stdout.fileno(), "wb", closefd=False)
            return self._file
        try:
            if self._descriptor is not None:
                # a duplicate keeps position and append mode; opening the name again would truncate a log
                self._file = os.fdopen(os.dup(self._descriptor), "wb")
                return self._file
            mode = self._target.stat().st_mode if self._target.exists() else None
            if mode is not None and stat.S_ISDIR(mode):
                raise BadInput(f'output "{self._target}": is a folder')
            if mode is not None and not stat.S_ISREG(mode):  # a pipe or device cannot be replaced by a rename
                self._file = self._target.open("wb")
                return self._file
            self._beside = self._target.with_name(f".nearkin-{os.urandom(8).hex()}.part")
            created = _NEW_MODE if self._mode_max is None else self._mode_max
            self._file = os.fdopen(os.open(self._beside, _NEW_FLAGS, created), "wb")
            if mode is not None:
                self._beside.chmod(self._existing_mode(mode))
        except (OSError, ValueError) as err:
            if isinstance(err, OSError) and is_device_full(err):  # no room for one more name
                raise
            reason = err.strerror if isinstance(err, OSError) and err.strerror else str(err)
            raise BadInput(f'output "{self._target}": {reason.lower()}') from err
        return self._file

    def _existing_mode(self, mode: int) -> int:
        """Return the permission bits of a file that replaces one of this mode."""
        return stat.S_IMODE(mode) if self._mode_max is None else mode & self._mode_max

    def __exit__(self, kind: type[BaseException] | None, err: BaseException | None, trace: object) -> None:
        """Rename the complete file to its target, or remove an incomplete one.

        System errors then name the target.
        """
        try:
            self._end(kind)
        except OSError as ended:
            self._name(ended)
            raise
        if isinstance(err, OSError):
            self._name(err)

    def _name(self, err: OSError) -> None:
        """Say of which file it is that there was, say, no room for it."""
        if err.errno is not None and err.filename is None:
            err.filename = STDOUT if self._target is None else str(self._target)

    def _end(self, kind: type[BaseException] | None) -> None:
        try:
            if self._file is not None:
                with suppress(OSError) if kind is not None else nullcontext():  # the first failure is the one to report
                    self._file.close()
            if kind is None and self._beside is not None and self._target is not None:
                self._replace(self._beside, self._target)
                self._beside = None
        finally:
            self._discard()

    def _replace(self, written: Path, target: Path) -> None:
        """Rename the written file to the target.

        A target that is a mount point, as in containers, is overwritten with a copy.
        """
        try:
            written.replace(target)
        except OSError as err:
            if err.errno != errno.EBUSY:
                raise
            with written.open("rb") as source, target.open("wb") as file:
                mode = os.fstat(file.fileno()).st_mode
                if self._existing_mode(mode) != stat.S_IMODE(mode):
                    os.fchmod(file.fileno(), self._existing_mode(mode))
                shutil.copyfileobj(source, file, COPY_BYTES)
            written.unlink()

    def _discard(self) -> None:
        if self._file is not None:
            with suppress(OSError):
                self._file.close()
        if self._beside is not None:
            self._beside.unlink(missing_ok=True)


def _descriptor_of(name: str) -> int | None:
    """Return the open descriptor that a path such as /dev/stdout or /dev/fd/63 names.

    None for any other path.
    """
    path = name
    own = {f"/proc/{os.getpid()}/fd", f"/proc/{os.getpid()}/task/{os.getpid()}/fd", "/dev/fd"}
    for _ in range(LINKS_MAX):
        folder, last = os.path.split(os.path.abspath(path))
        if os.path.realpath(folder) in own and last.isdecimal():
            return int(last)
        try:
            path = os.path.join(folder, os.readlink(path))
        except OSError:
            return None
    return None

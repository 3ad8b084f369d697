"""Contents that `put` reads from a command or a pipe.

Invariant: a command that fails, and a pipe that ends empty without --allow-empty, store nothing.
"""

from __future__ import annotations

import io
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, BinaryIO, cast

from typing_extensions import override

from nearkin_shared.errors import BadInput, SourceFailed

STDERR_TAIL_BYTES = 4096
"""Of a command's stderr that an error repeats."""
END_SECONDS_MAX = 10.0
"""Between SIGTERM and SIGKILL for a command that is no longer needed."""


class PipeSource(io.RawIOBase):
    """A pipe as a source; refuses an empty one unless `allow_empty`."""

    def __init__(self, file: BinaryIO, name: str, *, allow_empty: bool) -> None:
        self._file = file
        self._name = name
        self._may_end = allow_empty

    @override
    def readable(self) -> bool:
        return True

    @override
    def readinto(self, buffer: Any, /) -> int | None:
        """Fill `buffer`. Raises BadInput for an empty pipe."""
        count: int | None = self._file.readinto(buffer)  # type: ignore[attr-defined]
        if count:
            self._may_end = True
        elif count == 0:
            self._check_end()
        return count

    def _check_end(self) -> None:
        if not self._may_end:
            raise BadInput(f"{self._name} is empty; nothing was stored. --allow-empty stores an empty version")


class CommandSource(PipeSource):
    """The stdout of a command; raises SourceFailed at its end if the command failed."""

    def __init__(self, process: subprocess.Popen[bytes], tail: _StderrTail, *, allow_empty: bool) -> None:
        assert process.stdout is not None
        super().__init__(cast("BinaryIO", process.stdout), "the command's output", allow_empty=allow_empty)
        self._process = process
        self._tail = tail

    @override
    def _check_end(self) -> None:
        code = self._process.wait()
        if code:
            how = f"was ended by {_signal_name(-code)}" if code < 0 else f"failed with exit code {code}"
            raise SourceFailed(f"command {self._process.args[0]!r} {how}; nothing was stored{self._tail.text()}")  # type: ignore[index]
        super()._check_end()


class _StderrTail:
    """Copies a command's stderr to ours and keeps the end of it."""

    def __init__(self, file: BinaryIO, *, shown: bool) -> None:
        self._file = file
        self._shown = shown
        self._kept = b""
        self._thread = threading.Thread(target=self._copy, name="nearkin-stderr", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait until all is copied; not for ever, since a grandchild may hold stderr open."""
        self._thread.join(END_SECONDS_MAX)

    def text(self) -> str:
        """Return the end of what was written, as the end of an error message."""
        self.wait()
        found = self._kept.decode(errors="backslashreplace").strip()
        return f"; its stderr: {found}" if found else ""

    def _copy(self) -> None:
        with self._file:
            while piece := self._file.read(STDERR_TAIL_BYTES):
                self._kept = (self._kept + piece)[-STDERR_TAIL_BYTES:]
                if self._shown and sys.stderr is not None:
                    sys.stderr.write(piece.decode(errors="backslashreplace"))
                    sys.stderr.flush()


@contextmanager
def run_command(words: Sequence[str], *, allow_empty: bool, show_stderr: bool) -> Iterator[CommandSource]:
    """Run a command and yield its stdout as a source; end it if the block ends first.

    Raises BadInput.
    """
    try:
        process = subprocess.Popen(  # noqa: S603 - the command that the user gave
            words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0
        )
    except (OSError, ValueError) as err:
        reason = err.strerror if isinstance(err, OSError) and err.strerror else str(err)
        raise BadInput(f"command {words[0]!r}: cannot be run: {reason.lower()}") from err
    assert process.stdout is not None
    assert process.stderr is not None
    tail = _StderrTail(process.stderr, shown=show_stderr)  # type: ignore[arg-type]
    try:
        yield CommandSource(process, tail, allow_empty=allow_empty)
    finally:
        process.stdout.close()
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(END_SECONDS_MAX)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        tail.wait()


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"

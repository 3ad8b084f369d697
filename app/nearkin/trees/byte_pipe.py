# size: used by uploads and by the WebDAV server
"""Read bytes that a function writes, in a thread of its own.

    thread: write(file) -> pipe -> read

Invariant: an error of the function is raised by `read` at the end, so that a failed stream never ends as a whole one.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from typing import BinaryIO

from nearkin_shared.errors import NearkinError, SourceFailed

READ_BYTES = 256 * 1024


class BytePipe:
    """The bytes that a function writes to a file; `close` ends the function by an error."""

    def __init__(self, write: Callable[[BinaryIO], None], what: str) -> None:
        """`what`: name of the stream in messages."""
        reading, writing = os.pipe()
        self._file = os.fdopen(reading, "rb", buffering=0)
        self._writing = os.fdopen(writing, "wb")
        self._write = write
        self._what = what
        self._failure: BaseException | None = None
        self._ahead: deque[bytes] = deque()
        """Pieces that `read` returns next."""
        self._thread = threading.Thread(target=self._run, name=f"nearkin-{what}", daemon=True)
        self._thread.start()

    def read(self, count: int = READ_BYTES) -> bytes:
        """Return the next bytes; nothing at the end. Raises the error that ended the function."""
        if self._ahead:
            return self._ahead.popleft()
        data = self._file.read(count)
        if not data:
            self._thread.join()
            if isinstance(self._failure, NearkinError):
                raise self._failure
            if self._failure is not None:
                raise SourceFailed(f"{self._what}: reading it failed: {self._failure}") from self._failure
        return data

    def read_ahead(self, bytes_max: int) -> bytes | None:
        """Return all bytes if they are at most `bytes_max`, else None: `read` returns them then.

        Raises the error that ended the function.
        """
        pieces, count = [], 0
        while piece := self.read():
            pieces.append(piece)
            count += len(piece)
            if count > bytes_max:
                self._ahead = deque(pieces)
                return None
        return b"".join(pieces)

    def close(self) -> None:
        """End the thread and the pipe."""
        self._file.close()  # the thread's next write fails
        self._thread.join()

    def _run(self) -> None:
        try:
            with self._writing:
                self._write(self._writing)
        except BrokenPipeError:
            pass  # the reader gave up
        except BaseException as err:
            self._failure = err

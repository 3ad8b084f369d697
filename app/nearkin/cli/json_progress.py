"""Print the progress of a backup as JSON lines on stdout.

    {"message_type": "status", ...}    each second, and once at the end
    {"message_type": "verbose_status", ...}    with --verbose, for each file that is new or changed
    {"message_type": "error", ...}     for each entry that is not stored as it is
    {"message_type": "summary", ...}   the last line, printed by the command itself

Names of messages and fields are those of `restic backup --json`.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from threading import Event, Thread
from typing import TYPE_CHECKING

from nearkin.cli.session import is_quiet
from nearkin_shared.utils.terminal import to_json

if TYPE_CHECKING:
    from nearkin.cli.progress import EntriesDone
    from nearkin.trees.backup_walk import PathProblem

STATUS_SECONDS = 1.0
"""Between two status lines."""


@contextmanager
def json_lines(read: Callable[[], EntriesDone], problems: Sequence[PathProblem]) -> Iterator[None]:
    """Print status and error lines while the block runs; --quiet omits the status.

    Another thread calls `read` each second. `problems` grows meanwhile.
    """
    started, stop, printed = time.monotonic(), Event(), 0
    quiet = is_quiet()  # the thread has no command

    def print_new() -> None:
        nonlocal printed
        while printed < len(problems):
            problem = problems[printed]
            printed += 1
            fields = {"item": os.fsdecode(problem.path), "error": {"message": problem.reason}, "during": "archival"}
            print_json_message("error", fields)
        if not quiet:
            print_json_message("status", status_fields(read(), time.monotonic() - started))

    def follow() -> None:
        with suppress(OSError, ValueError):  # no reader: the summary fails with it, in the thread of the command
            while not stop.wait(STATUS_SECONDS):
                print_new()

    thread = Thread(target=follow, name="nearkin-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
    print_new()


def print_json_message(kind: str, fields: Mapping[str, object]) -> None:
    """Print one JSON line, at once."""
    if sys.stdout is not None:
        sys.stdout.write(f"{to_json({'message_type': kind, **fields})}\n")  # at once: another thread prints, too
        sys.stdout.flush()


def status_fields(done: EntriesDone, elapsed_seconds: float) -> dict[str, object]:
    """Return the fields of a status line; without a total those that need it are absent."""
    fields: dict[str, object] = {
        "seconds_elapsed": round(elapsed_seconds, 3),
        "files_done": done.files,
        "bytes_done": done.done_bytes,
        "error_count": done.errors,
    }
    if done.total_bytes is not None:
        total = max(done.total_bytes, done.done_bytes)
        fields |= {"total_bytes": total, "percent_done": done.done_bytes / total if total else 1.0}
        if done.done_bytes:
            left = (total - done.done_bytes) / done.done_bytes * elapsed_seconds
            fields["seconds_remaining"] = round(left, 3)
    return fields

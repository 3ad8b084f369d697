"""Draw progress bars.

Invariant: bars are drawn on stderr only if that is a terminal; never with `--json` or `--quiet`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, Thread
from typing import TYPE_CHECKING, NamedTuple

from nearkin.cli.session import is_quiet

if TYPE_CHECKING:
    from rich.progress import Progress, ProgressColumn

BytesTaken = Callable[[int], None]
"""Called with the bytes read since the last call."""
Counted = Callable[[int, int], None]
"""Called with the number of steps done and of all steps."""

REDRAW_SECONDS = 0.2
"""Between two looks at the counts of a backup or restore."""


class EntriesDone(NamedTuple):
    """The state of a backup or restore."""

    files: int
    done_bytes: int
    errors: int
    total_bytes: int | None
    """None: not known."""


StepTold = Callable[[int, int, str], None]
"""Called with the number of steps done, of all steps, and the name of the current one."""


@contextmanager
def bytes_bar(label: str, total_bytes: int | None, *, shown: bool) -> Iterator[BytesTaken | None]:
    """Draw a bar over bytes while the block runs.

    Yields None if nothing is drawn. `total_bytes` None: not known.
    """
    if not is_drawn(shown=shown):
        yield None
        return
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with _bars(TextColumn("{task.description}", markup=False), *columns) as bars:
        bar = bars.add_task(label, total=total_bytes)
        yield lambda taken_bytes: bars.advance(bar, taken_bytes)


@contextmanager
def count_bar(label: str, *, shown: bool) -> Iterator[Counted | None]:
    """Draw a bar over counted steps while the block runs; yields None where nothing is drawn."""
    if not is_drawn(shown=shown):
        yield None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn

    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with _bars(TextColumn("{task.description}", markup=False), *columns) as bars:
        bar = bars.add_task(label, total=None)
        yield lambda done, total: bars.update(bar, completed=done, total=total)


@contextmanager
def steps_bar(label: str, *, shown: bool) -> Iterator[StepTold | None]:
    """Draw a bar over counted steps, each with a text; yields None where nothing is drawn."""
    if not is_drawn(shown=shown):
        yield None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn

    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with _bars(TextColumn("{task.description}", markup=False), *columns) as bars:
        bar = bars.add_task(label, total=None)
        yield lambda done, total, text: bars.update(bar, completed=done, total=total, description=f"{label}: {text}")


@contextmanager
def entries_bar(label: str, read: Callable[[], EntriesDone], *, shown: bool) -> Iterator[None]:
    """Draw files, bytes, errors and the time that is left while the block runs.

    Another thread calls `read` a few times a second.
    """
    if not is_drawn(shown=shown):
        yield
        return
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    stop = Event()
    with _bars(TextColumn("{task.description}", markup=False), *columns) as bars:
        bar = bars.add_task(label, total=None)

        def follow() -> None:
            ends = False
            while not ends:
                ends = stop.wait(REDRAW_SECONDS)
                done = read()
                errors = f", {done.errors:,} errors" if done.errors else ""
                total = None if done.total_bytes is None else max(done.total_bytes, done.done_bytes)
                text = f"{label}: {done.files:,} files{errors}"
                bars.update(bar, completed=done.done_bytes, total=total, description=text)

        thread = Thread(target=follow, name="nearkin-progress", daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()


def is_drawn(*, shown: bool) -> bool:
    """Return whether a bar would be drawn."""
    return shown and _is_terminal()


def _bars(*columns: ProgressColumn) -> Progress:
    from rich.console import Console
    from rich.progress import Progress

    return Progress(*columns, console=Console(stderr=True), transient=True)


def _is_terminal() -> bool:
    if is_quiet():
        return False
    # not rich's own opinion: FORCE_COLOR makes it take a pipe for a terminal
    return sys.stderr is not None and sys.stderr.isatty()

"""Draw progress bars.

Invariant: bars are drawn on stderr only if that is a terminal; never with `--json` or `--quiet`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from nearkin.cli.session import is_quiet

if TYPE_CHECKING:
    from rich.progress import Progress, ProgressColumn

BytesTaken = Callable[[int], None]
"""Called with the bytes read since the last call."""
Counted = Callable[[int, int], None]
"""Called with the number of steps done and of all steps."""

StepTold = Callable[[int, int, str], None]
"""Called with the number of steps done, of all steps, and the name of the current one."""


@contextmanager
def bytes_bar(label: str, total_bytes: int | None, *, shown: bool) -> Iterator[BytesTaken | None]:
    """Draw a bar over bytes while the block runs.

    Yields None if nothing is drawn. `total_bytes` None: not known.
    """
    if not shown or not _is_terminal():
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
    if not shown or not _is_terminal():
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
    if not shown or not _is_terminal():
        yield None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn

    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with _bars(TextColumn("{task.description}", markup=False), *columns) as bars:
        bar = bars.add_task(label, total=None)
        yield lambda done, total, text: bars.update(bar, completed=done, total=total, description=f"{label}: {text}")


def _bars(*columns: ProgressColumn) -> Progress:
    from rich.console import Console
    from rich.progress import Progress

    return Progress(*columns, console=Console(stderr=True), transient=True)


def _is_terminal() -> bool:
    if is_quiet():
        return False
    # not rich's own opinion: FORCE_COLOR makes it take a pipe for a terminal
    return sys.stderr is not None and sys.stderr.isatty()

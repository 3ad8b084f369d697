"""End started processes when SIGTERM ends this one, as `timeout` does.

Python ends on SIGTERM without running `finally` and `with`: workers that a benchmark started went on running.
"""

from __future__ import annotations

import signal
import sys
import threading
from types import FrameType

EXIT_CODE = 128 + signal.SIGTERM
"""As a shell reports it."""


def exit_on_sigterm() -> None:
    """Let SIGTERM raise SystemExit in the main thread, unless the process handles it already."""
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _exit)


def _exit(_number: int, _frame: FrameType | None) -> None:
    sys.exit(EXIT_CODE)

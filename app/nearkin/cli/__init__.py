"""Run the `nearkin` command.

Only click and the standard library are imported before a command is known: `nearkin --help` answers in under 0.2 s.

Invariant: every run ends with a code of `exit_codes.py`, and a failure prints its reason in one line.
"""

from __future__ import annotations

import io
import os
import signal
import sys
import threading
from contextlib import suppress
from gc import set_threshold
from types import FrameType
from typing import NoReturn

import click

from nearkin.cli.exit_codes import ExitCode, exit_code_of, is_device_full
from nearkin_shared.errors import Corrupt, NearkinError

_OUTPUT_OPTION = "nearkin_output"
"""An -X option that hands the encoding of stdout and stderr to a restarted interpreter."""

__all__ = ["main", "run"]


class _Terminated(BaseException):
    """SIGTERM or SIGHUP, its argument, as an exception, so that unfinished files are removed."""


def main(arguments: list[str] | None = None) -> int:
    """Run one command and return its exit code; `arguments` default to the process's own."""
    _escape_output()
    given = sys.argv[1:] if arguments is None else arguments
    options = given[: given.index("--")] if "--" in given else given
    as_json = "--json" in options
    in_main_thread = threading.current_thread() is threading.main_thread()
    before = {signal.SIGTERM: signal.signal(signal.SIGTERM, _terminate)} if in_main_thread else {}
    if in_main_thread and signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:  # nohup has it ignored
        before[signal.SIGHUP] = signal.signal(signal.SIGHUP, _terminate)
    try:
        code = _run(given, as_json)
        if sys.stdout is not None:
            sys.stdout.flush()
    except BrokenPipeError:
        return _pipe_gone()
    except OSError as err:  # stdout's last bytes did not fit, such as on a full disk
        from nearkin.cli.output_file import STDOUT

        if err.errno is not None and err.filename is None:
            err.filename = STDOUT
        code = _fail("OSError", _with_remedy(err), ExitCode.FAILED, as_json)
        return _drop_stdout(code)
    except KeyboardInterrupt as err:
        return _fail("Interrupted", _with_notes("interrupted", err), ExitCode.INTERRUPTED, as_json)
    except _Terminated as err:
        if err.args[0] == signal.SIGHUP:
            with suppress(OSError):  # a closed terminal takes no message
                _fail("HungUp", _with_notes("hung up", err), ExitCode.HUNG_UP, as_json)
            return ExitCode.HUNG_UP
        return _fail("Terminated", _with_notes("terminated", err), ExitCode.TERMINATED, as_json)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return code


def run() -> NoReturn:
    """Run one command as a process of its own: the `nearkin` command."""
    set_threshold(200_000)  # most objects of a command live to its end: collecting took 4 % of a put
    # numpy's linear algebra, of which nothing is used, starts a thread for each further core, which then spins: 0.13 s
    # of processor time, on the core that a short put could have had.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    _use_utf8()
    code = main()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):
            stream.flush()
    # All threads are joined and all files closed: taking the interpreter apart would cost another 0.1 s.
    os._exit(code)


def _use_utf8() -> None:
    """Restart the interpreter in UTF-8 mode if the locale has another encoding.

    Keys and names are bytes, the same in every locale. The output keeps the encoding of the terminal.
    """
    if sys.getfilesystemencoding() != "utf-8" and sys.executable:
        encoding = getattr(sys.stdout, "encoding", None) or "ascii"
        options = ["-X", "utf8", "-X", f"{_OUTPUT_OPTION}={encoding}"]
        os.execv(sys.executable, [sys.executable, *options, *sys.orig_argv[1:]])  # noqa: S606 - our own command line


def _escape_output() -> None:
    """Let stdout and stderr escape characters that their encoding lacks.

    A listing thus never ends in the middle.
    """
    encoding = sys._xoptions.get(_OUTPUT_OPTION)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors != "backslashreplace":
            stream.reconfigure(encoding=encoding if isinstance(encoding, str) else None, errors="backslashreplace")


def _run(given: list[str], as_json: bool) -> int:  # noqa: PLR0911 - one exit code per kind of failure
    from nearkin.cli.commands import nearkin

    instruction = os.environ.get("_NEARKIN_COMPLETE")  # nearkin.cli.completion.COMPLETION_VARIABLE
    if instruction:
        from nearkin.cli.completion import complete

        return complete(instruction)
    try:
        with nearkin.make_context("nearkin", list(given)) as context:
            code = nearkin.invoke(context)
            return code if isinstance(code, int) else ExitCode.DONE
    except click.exceptions.Exit as end:
        return end.exit_code
    except click.exceptions.NoArgsIsHelpError as err:
        click.echo(err.ctx.get_help() if err.ctx else err.format_message(), err=True)
        return ExitCode.USAGE
    except click.UsageError as err:
        command = err.ctx.command_path if err.ctx else "nearkin"
        message = " ".join(err.format_message().split()).rstrip(".")
        return _fail("Usage", f"{message}; see {command} --help", ExitCode.USAGE, as_json)
    except (BrokenPipeError, KeyboardInterrupt):
        raise
    except (NearkinError, OSError) as err:
        return _fail(type(err).__name__, _with_remedy(err), exit_code_of(err), as_json)
    except Exception as err:
        if os.environ.get("NEARKIN_DEBUG"):
            raise
        message = f"internal error, please report it: {type(err).__name__}: {err} (NEARKIN_DEBUG=1 shows where)"
        return _fail("Internal", message, ExitCode.FAILED, as_json)


def _with_remedy(err: NearkinError | OSError) -> str:
    """Return the message of an error, with a remedy for errors of its kind if it names none."""
    message = str(err)
    if isinstance(err, Corrupt) and "`nearkin" not in message:
        message += "; `nearkin verify` lists the damage and the versions that it affects"
    elif isinstance(err, OSError) and is_device_full(err):
        message += "; free space on that filesystem, or write to another one"
    return _with_notes(message, err)


def _with_notes(message: str, err: BaseException) -> str:
    """Return a message with what the command noted on the error, such as how to continue."""
    return "; ".join([message, *getattr(err, "__notes__", ())])


def _fail(kind: str, message: str, code: int, as_json: bool) -> int:
    line = " ".join(message.split("\n"))
    if "udc" in line or not line.isprintable():
        from nearkin_shared.utils.terminal import with_bytes_shown

        line = with_bytes_shown(line)
    if as_json:
        import json

        line = json.dumps({"error": {"kind": kind, "message": line}})
    else:
        line = f"nearkin: {line}"
        if not line.isprintable():  # a path, or the text of a server
            from nearkin_shared.utils.terminal import printable

            line = printable(line)
    if sys.stderr is not None:
        print(line, file=sys.stderr, flush=True)
    return code


def _pipe_gone() -> int:
    return _drop_stdout(ExitCode.PIPE_CLOSED)


def _drop_stdout(code: int) -> int:
    """Redirect stdout to /dev/null.

    Otherwise the interpreter reports the same failure a second time when it flushes stdout at exit.
    """
    try:
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, sys.stdout.fileno())
        os.close(nothing)
    except (OSError, ValueError, AttributeError):
        pass
    return code


def _terminate(number: int, _frame: FrameType | None) -> NoReturn:
    # once: `timeout` sends it twice, and the second would cut short what cleans up after the first
    for ends in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(ends) is _terminate:
            signal.signal(ends, signal.SIG_IGN)
    raise _Terminated(number)

"""Run one program for an owner.

Invariant: the program never outlives its owner, however that ends.

    python -I -S supervisor.py OWNER_PID FOLDER PROGRAM ARGUMENT...

    owner dies  -> the keeper sees it by pidfd and kills the program
    keeper dies -> the kernel kills the program (PR_SET_PDEATHSIG: of the thread that forked, and this has but one)

FOLDER is removed when the owner dies; `-` keeps all. The owner need not be the parent: workers of a test run share a
server that belongs to the run. The program's pid is written to standard output, as one line; its own output is that
of the keeper's standard error. SIGTERM, SIGINT and SIGHUP are forwarded. Only the standard library is imported: the
start takes 30 ms, without site-packages.
"""

from __future__ import annotations

import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
from functools import partial

PR_SET_PDEATHSIG = 1
HANDED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
NO_PROGRAM = 127


def _die_with(keeper_pid: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")
    if os.getppid() != keeper_pid:  # the keeper died meanwhile
        os._exit(NO_PROGRAM)


def main(owner_pid: int, folder: str, command: list[str]) -> int:
    """Run `command` until it ends or process `owner_pid` does; return its exit status, as a shell would."""
    try:
        owner = os.pidfd_open(owner_pid)
    except ProcessLookupError:
        return 0  # died before this point: nothing was started
    try:
        # This process has one thread and imports nothing more, so preexec_fn is safe here.
        program = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=2,
            preexec_fn=partial(_die_with, os.getpid()),
        )
    except OSError as err:
        print(f"{command[0]}: {err.strerror}", file=sys.stderr)
        return NO_PROGRAM
    for number in HANDED_ON:
        signal.signal(number, lambda received, _: program.send_signal(received))
    print(program.pid, flush=True)
    os.close(1)
    ended = select.poll()
    ended.register(owner, select.POLLIN)
    ended.register(os.pidfd_open(program.pid), select.POLLIN)
    if any(descriptor == owner for descriptor, _ in ended.poll()):
        program.kill()
        program.wait()
        if folder != "-":
            shutil.rmtree(folder, ignore_errors=True)
    status = program.wait()
    return 128 - status if status < 0 else status


if __name__ == "__main__":
    os._exit(main(int(sys.argv[1]), sys.argv[2], sys.argv[3:]))

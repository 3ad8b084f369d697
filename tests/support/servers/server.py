"""Run a server for one test or one cluster.

Invariant: it has its own folder and port on loopback, and it always ends.

Started under a keeper (`tests.support.servers.supervisor`), so that it dies with its owner however that ends; or
detached, when a cluster is to outlive the command that started it. Data and port stay over a restart.

    Server(folder)   .start()  .stop()  .kill()  .restart()   also `with`; .pid, .port, .log
"""

from __future__ import annotations

import os
import random
import select
import signal
import socket
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from nearkin_shared.errors import RetryableError
from tests.support.servers import supervisor

LOOPBACK = "127.0.0.1"
LOG_LINES = 15
"""Length of the log's end in the error of a server that did not start."""
LOG_BYTES = 16 * 1024
EXIT_SECONDS_MAX = 20.0
"""Wait after a SIGKILL: a large process on a busy machine does not end at once."""
PORT_TRIES = 100


class ServerFailed(RetryableError):
    """A server did not start, or ended by itself; the text contains the end of its log."""


def free_port(second_above: int = 0) -> int:
    """Return a free TCP port of loopback. Raises ServerFailed if none of 100 is free.

    `second_above`: the port so far above it, which its server takes too, is also free.

    Drawn from below the range that the system gives to clients: a port from within it can be taken by a client while
    the server restarts, and a client that keeps trying it can even connect to itself.
    """
    lowest_of_clients = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    for _ in range(PORT_TRIES):
        port = random.SystemRandom().randrange(10_000, max(lowest_of_clients - second_above, 10_100))
        if _is_free(port) and (not second_above or _is_free(port + second_above)):
            return port
    raise ServerFailed(f"no free port on {LOOPBACK} after {PORT_TRIES} tries")


def _is_free(port: int) -> bool:
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((LOOPBACK, port))
        except OSError:
            return False
        return True


def accepts(port: int) -> bool:
    """Return whether something on loopback accepts a connection on `port`."""
    try:
        socket.create_connection((LOOPBACK, port), timeout=1).close()
    except OSError:
        return False
    return True


class Server(ABC):
    """Common operations of all servers; a subclass defines the command and the readiness check."""

    name: str
    start_seconds: float = 30.0
    stop_seconds: float = 20.0

    def __init__(
        self, folder: Path, *, port: int | None = None, owner_pid: int | None = None, detached: bool = False
    ) -> None:
        """Prepare a server; `detached`: it outlives its owner.

        Else it dies with its owner, this process by default.

        With another owner the folder is the owner's as well: it is removed when the owner ends.
        """
        self.folder = folder
        self.port = port or free_port()
        self.log = folder / f"{self.name}.log"
        self.pid = 0
        """Pid of the server itself, not of its keeper; 0 while it does not run."""
        self._owner_pid = owner_pid or os.getpid()
        self._folder_to_remove = "-" if self._owner_pid == os.getpid() else str(folder)
        self._detached = detached
        self._parent: subprocess.Popen[str] | None = None
        self._handle = -1
        self.on_launch: Callable[[int], None] = lambda pid: None
        """Receives the pid before the server is ready, so that a note exists even of a server that hangs."""

    @abstractmethod
    def command(self) -> list[str]:
        """Return program and arguments; called after `prepare`."""

    @abstractmethod
    def ready(self) -> bool:
        """Return whether a client would be served now; takes a second at most."""

    def prepare(self) -> None:  # noqa: B027 - most have nothing to prepare
        """Create in the folder the files that the server needs before each start."""

    def environment(self) -> Mapping[str, str]:
        """Return variables for the server in addition to those of this process."""
        return {}

    @property
    def running(self) -> bool:
        """Return whether the server's process is alive."""
        return self._handle >= 0 and not _wait_for_end(self._handle, 0)

    def start(self) -> Self:
        """Start and wait until it serves.

        Raises ServerFailed with the end of its log, and leaves nothing running.
        """
        if self._handle >= 0:
            if self.running:
                return self
            self._forget()  # it ended by itself
        self.folder.mkdir(parents=True, exist_ok=True)
        self.prepare()
        try:
            self._launch()
            self.on_launch(self.pid)
            self._await()
        except BaseException:
            self.kill()
            raise
        return self

    def stop(self) -> None:
        """Stop the server cleanly, or by SIGKILL after `stop_seconds`."""
        if self._handle >= 0:
            self._signal(signal.SIGTERM)
            if not _wait_for_end(self._handle, self.stop_seconds):
                self._signal(signal.SIGKILL)
                _wait_for_end(self._handle, EXIT_SECONDS_MAX)
        self._forget()

    def kill(self) -> None:
        """Kill the server by SIGKILL, as a crash would; its data stay unchanged."""
        if self._handle >= 0:
            self._signal(signal.SIGKILL)
            _wait_for_end(self._handle, EXIT_SECONDS_MAX)
        self._forget()

    def restart(self) -> Self:
        """Stop cleanly, then start over the same data, on the same port."""
        self.stop()
        return self.start()

    def leave_to_owner(self) -> None:
        """Release a server that another process owns: from here on it ends with that process."""
        if self._parent is not None:
            if self._parent.stdout is not None:
                self._parent.stdout.close()
            self._parent.returncode = 0  # another process waits for it: else `Popen` would warn of it at our end
        if self._handle >= 0:
            os.close(self._handle)
        self._parent, self._handle, self.pid = None, -1, 0

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, err: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    # --- the process -------------------------------------------------------------------------------------------------

    def _launch(self) -> None:
        environment = {**os.environ, **self.environment()}
        kept = [sys.executable, "-I", "-S", str(supervisor.__file__), str(self._owner_pid), self._folder_to_remove]
        with self.log.open("a") as log:
            if self._detached:
                self._parent = subprocess.Popen(
                    self.command(),
                    env=environment,
                    cwd=self.folder,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                    text=True,
                )
                self.pid = self._parent.pid
            else:
                self._parent = subprocess.Popen(
                    [*kept, *self.command()],
                    env=environment,
                    cwd=self.folder,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                )
                assert self._parent.stdout is not None
                line = self._parent.stdout.readline()
                if not line:
                    raise self._failed("did not start")
                self.pid = int(line)
        try:
            self._handle = os.pidfd_open(self.pid)
        except ProcessLookupError as err:
            raise self._failed("ended at once") from err

    def _await(self) -> None:
        deadline = time.monotonic() + self.start_seconds
        while not self.ready():
            if not self.running:
                raise self._failed("ended while it started")
            if time.monotonic() > deadline:
                raise self._failed(f"not ready after {self.start_seconds:.0f} s")
            time.sleep(0.02)
        if not self.running:  # another process answered on this port
            raise self._failed("ended while it started")

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._handle, number)

    def _forget(self) -> None:
        if self._parent is not None:
            try:
                self._parent.wait(EXIT_SECONDS_MAX)
            except subprocess.TimeoutExpired:  # the keeper of an ended server
                self._parent.kill()
                self._parent.wait()
            if self._parent.stdout is not None:
                self._parent.stdout.close()
        if self._handle >= 0:
            os.close(self._handle)
        self._parent, self._handle, self.pid = None, -1, 0

    def _failed(self, what: str) -> ServerFailed:
        return ServerFailed(f"{self.name} on port {self.port} {what}; the end of {self.log}:\n{log_end(self.log)}")


def log_end(log: Path) -> str:
    """Return the last lines of a log, indented."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - LOG_BYTES))
            lines = file.read().decode(errors="replace").splitlines()[-LOG_LINES:]
    except OSError as err:
        lines = [f"unreadable: {err.strerror}"]
    return "\n".join(f"  {line}" for line in lines) or "  (no output)"


def _wait_for_end(handle: int, seconds: float) -> bool:
    """Return whether the process behind a pidfd ends within `seconds`."""
    waiting = select.poll()
    waiting.register(handle, select.POLLIN)
    return bool(waiting.poll(seconds * 1000))

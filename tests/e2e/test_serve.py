"""Test `nearkin serve`: its output, its access rules and its end."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest

from tests.support.checks.commands import new_store

TEMPORARY = "nearkin-serve-"


def environment(folder: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("NEARKIN_")}
    return {
        **kept,
        "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry),
        "TMPDIR": str(folder),
    }


@contextmanager
def serving(
    folder: Path, *arguments: str, before: tuple[str, ...] = ()
) -> Iterator[tuple[subprocess.Popen[str], list[str]]]:
    if not (folder / "store").exists():
        new_store(folder / "store")
    with (folder / "log").open("w") as log:
        child = subprocess.Popen(
            [*before, sys.executable, "-m", "nearkin.cli", "serve", *arguments],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=environment(folder),
        )
        assert child.stdout is not None
        try:
            lines = [child.stdout.readline().strip()]
            assert lines[0], (folder / "log").read_text()
            if "--json" not in arguments and "--no-token" not in arguments:
                lines.append(child.stdout.readline().strip())
            yield child, lines
        finally:
            if child.poll() is None:
                child.kill()
            child.wait(60)
            child.stdout.close()


def test_serve_full_connections_leave_files(tmp_path: Path) -> None:
    """Keep descriptors for files although connections take nearly all that the soft limit allows."""
    bounded = ("sh", "-c", 'ulimit -S -n 150 && exec "$@"', "sh")  # not this process, which may have more open
    with ExitStack() as connections:
        server = serving(tmp_path, str(tmp_path / "store"), "--port", "0", "--no-token", before=bounded)
        _, (url,) = connections.enter_context(server)
        client = connections.enter_context(httpx.Client(base_url=url))
        large = os.urandom(3_000_000)  # more than one frame: it waits in a file
        assert client.put("/v1/blobs/first", content=large).status_code == 201
        for _ in range(135):
            idle = connections.enter_context(
                socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2].strip("/"))))
            )
            idle.sendall(b"GET /livez HTTP/1.1\r\n")
        assert client.put("/v1/blobs/second", content=large).status_code == 201
        assert client.get("/v1/blobs/first").content == large


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "nearkin.cli", "serve", *arguments],
        capture_output=True,
        text=True,
        env=environment(folder),
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM], ids=["ctrl-c", "term"])
def test_serve_uses_a_token_until_stopped(tmp_path: Path, ending: signal.Signals) -> None:
    """Serve a store with a token of this run until it is stopped."""
    with serving(tmp_path, str(tmp_path / "store"), "--port", "0") as (child, (url, token_line)):
        token = token_line.removeprefix("token ")
        headers = {"Authorization": f"Bearer {token}"}
        assert httpx.put(f"{url}v1/blobs/a", content=b"a").status_code == 401
        assert httpx.put(f"{url}v1/blobs/a", content=b"a", headers=headers).status_code == 201
        assert httpx.get(f"{url}v1/config", headers=headers).status_code == 200
        assert list(tmp_path.glob(f"{TEMPORARY}*"))
        child.send_signal(ending)
        assert child.wait(60) == 0
        assert not list(tmp_path.glob(f"{TEMPORARY}*"))
    log = (tmp_path / "log").read_text()
    assert token not in log
    assert "Traceback" not in log


def test_serve_without_token_prints_json(tmp_path: Path) -> None:
    """Serve without a token with --no-token; print one JSON line with --json."""
    with serving(tmp_path, str(tmp_path / "store"), "--port", "0", "--no-token", "--json") as (_, (line,)):
        announced = json.loads(line)
        assert announced["token"] is None
        assert httpx.put(f"{announced['url']}/v1/blobs/a", content=b"a").status_code == 201


def test_serve_of_served_store_is_refused(tmp_path: Path) -> None:
    """Refuse in one line a store that is served already."""
    with serving(tmp_path, str(tmp_path / "store"), "--port", "0"):
        done = run(tmp_path, str(tmp_path / "store"), "--port", "0")
    assert done.returncode == 11
    assert "Traceback" not in done.stderr
    assert re.search("^nearkin: store .* is being written by process", done.stderr, re.MULTILINE)
    assert "--wait SECONDS" in done.stderr  # It names the option


def test_serve_on_taken_port_is_refused(tmp_path: Path) -> None:
    new_store(tmp_path / "store")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = run(tmp_path, str(tmp_path / "store"), "--port", str(port))
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert f'nearkin: gateway.port "{port}" on 127.0.0.1: cannot be listened on' in done.stderr


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--host", "0.0.0.0", "STORE"], "auth.tokens_file"),
        ([], "no store given"),
        (["--store", "STORE", "STORE"], "name one of them"),
    ],
    ids=["strangers", "no store", "two stores"],
)
def test_serve_of_bad_arguments_is_one_line(tmp_path: Path, arguments: list[str], why: str) -> None:
    done = run(tmp_path, *(str(tmp_path / "store") if entry == "STORE" else entry for entry in arguments))
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (2, "", 1), done.stderr
    assert why in done.stderr

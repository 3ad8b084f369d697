"""Test GC over HTTP and by command: start, pause, resume, status."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nearkin import open_store
from nearkin.embedded import gateway_backend as looked_after
from nearkin_shared.storage.gc_pause import GcPauseFlag, Pause
from nearkin_shared.utils import failpoints
from tests.support.checks.waiting import until
from tests.support.servers.gateways import RunningGateway, embedded, running

CHANGES = {"deletion": {"undelete_seconds": 0}, "gc": {"grace_seconds": 0, "interval_seconds": 0}}


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningGateway]:
    with running(embedded(tmp_path_factory.mktemp("gc") / "store", CHANGES)) as made:
        yield made


def ask(gateway: RunningGateway, action: object) -> Any:
    with gateway.client() as client:
        return client.post("/v1/gc", json={"action": action})


def state(gateway: RunningGateway) -> dict[str, Any]:
    with gateway.client() as client:
        answer = client.get("/v1/gc")
    assert answer.status_code == 200
    found: dict[str, Any] = answer.json()
    return found


def run(gateway: RunningGateway) -> dict[str, Any]:
    """Request a GC run and return its result."""
    before = ask(gateway, "run")
    assert before.status_code == 202
    return await_run_after(gateway, before.json()["last"])


def await_run_after(gateway: RunningGateway, before: object) -> dict[str, Any]:
    """Return the result of the next GC run that ends after the one `before`."""
    last: dict[str, Any] = {}

    def ended() -> bool:
        last.clear()
        last.update(state(gateway)["last"] or {})
        return last != (before or {})

    until(ended)
    return last


def command(gateway: RunningGateway, *arguments: str) -> subprocess.CompletedProcess[bytes]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("NEARKIN_")}
    return subprocess.run(
        [sys.executable, "-m", "nearkin.cli", "--server", gateway.url, *arguments],
        capture_output=True,
        env={**kept, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)},
        timeout=180,
        check=False,
    )


def test_gc_run_is_started_and_reported(gateway: RunningGateway) -> None:
    with gateway.client() as client:
        client.put("/v1/blobs/gone", content=os.urandom(300_000)).raise_for_status()
        client.delete("/v1/blobs/gone").raise_for_status()
    assert run(gateway)["versions"] == 1
    done = run(gateway)
    assert (done["failure"], done["containers_deleted"]) == (None, 1)
    assert done["freed_bytes"] > 300_000


@pytest.fixture
def marked_run() -> Iterator[tuple[threading.Event, threading.Event]]:
    """Stop the next GC run after its mark phase.

    Yield (event that it is there, event to continue).
    """
    reached, on = threading.Event(), threading.Event()

    def watch(name: str) -> None:
        if name == "gc.marked":
            reached.set()
            on.wait(60)

    failpoints.arm((), watch)
    try:
        yield reached, on
    finally:
        on.set()
        failpoints.disarm()


def test_requests_continue_during_a_gc_run(
    gateway: RunningGateway, marked_run: tuple[threading.Event, threading.Event]
) -> None:
    """Serve uploads, deletions and downloads during a GC run."""
    reached, on = marked_run
    before = ask(gateway, "run").json()["last"]
    assert reached.wait(60)
    with gateway.client() as client:
        client.put("/v1/blobs/beside", content=b"one").raise_for_status()
        client.put("/v1/blobs/beside", content=b"two").raise_for_status()
        client.delete("/v1/blobs/beside", params={"version": 1}).raise_for_status()
        assert client.get("/v1/blobs/beside").content == b"two"
    assert state(gateway)["last"] == before  # it has not ended
    on.set()
    assert await_run_after(gateway, before)["failure"] is None
    with gateway.client() as client:
        assert client.get("/v1/blobs/beside").content == b"two"


def test_stopping_gateway_ends_the_gc_run(tmp_path: Path, marked_run: tuple[threading.Event, threading.Event]) -> None:
    reached, on = marked_run
    with running(embedded(tmp_path / "store", CHANGES)) as gateway:
        with gateway.client() as client:
            client.put("/v1/blobs/k", content=b"kept").raise_for_status()
        ask(gateway, "run").raise_for_status()
        assert reached.wait(60)
        threading.Timer(0.3, on.set).start()
    with open_store(tmp_path / "store", create=True) as store:  # the lock is free, and nothing is pending delete
        assert store.put("k", b"after").info.version == 2
        assert store.gc_state().pending_delete_containers == 0


def test_gc_run_failing_at_start_keeps_writer(gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the writer at work if a GC run cannot even begin."""
    plain, refused = threading.Thread.start, threading.Event()

    def start(thread: threading.Thread) -> None:
        if thread.name == "nearkin-gateway-collector":
            refused.set()
            raise RuntimeError("can't start new thread")
        plain(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    monkeypatch.setattr(looked_after, "BROKEN_SECONDS", 0.1)
    assert ask(gateway, "run").status_code == 202
    assert refused.wait(30)
    with gateway.client() as client:
        assert client.put("/v1/blobs/after", content=b"x").status_code == 201
    before = state(gateway)["last"]
    # Not `undo`: the writer may be about to check how long to wait, and would wait a minute.
    monkeypatch.setattr(threading.Thread, "start", plain)
    assert await_run_after(gateway, before)["failure"] is None  # the request is not forgotten


def test_gc_run_while_paused_is_refused(gateway: RunningGateway) -> None:
    assert ask(gateway, "pause").json()["paused"]["by"]
    refused = ask(gateway, "run")
    assert (refused.status_code, refused.json()["type"]) == (409, "urn:nearkin:problem:paused")
    assert ask(gateway, "resume").json()["paused"] is None
    assert run(gateway)["failure"] is None


@pytest.mark.parametrize("action", ["stop", None, 7, ["run"]])
def test_unknown_action_is_refused_with_list(gateway: RunningGateway, action: object) -> None:
    refused = ask(gateway, action)
    assert refused.status_code == 400
    assert "run, pause, resume" in refused.json()["detail"]


def test_command_behind_gateway_equals_local(gateway: RunningGateway) -> None:
    done = command(gateway, "gc", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["failure"] is None
    assert b"paused       since" in command(gateway, "gc", "--pause").stdout
    refused = command(gateway, "gc")
    assert refused.returncode != 0
    assert b"paused" in refused.stderr
    assert json.loads(command(gateway, "gc", "--status", "--json").stdout)["paused"]["by"]
    assert command(gateway, "gc", "--resume").stdout.startswith(b"not paused")


def test_paused_gc_run_is_retried_puts_continue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Retry a due, paused GC run now and then; puts continue whatever the pause folder has."""
    checks: list[float] = []
    read = GcPauseFlag.read

    def record_read(pauses: GcPauseFlag) -> Pause | None:
        if threading.current_thread().name == "nearkin-gateway-writer":
            checks.append(time.monotonic())
        return read(pauses)

    changes = {**CHANGES, "gc": {"grace_seconds": 0, "interval_seconds": 1}}
    with running(embedded(tmp_path / "store", changes)) as gateway:
        ask(gateway, "pause").raise_for_status()
        last = state(gateway)["last"]
        monkeypatch.setattr(GcPauseFlag, "read", record_read)
        until(lambda: len(checks) > 3)
        assert checks[3] - checks[0] > 2.0  # once a second, not again and again
        (tmp_path / "store" / "pause" / "notes.txt").write_text("a file that is no pause record")
        before = len(checks)
        until(lambda: len(checks) > before)
        with gateway.client() as client:
            assert client.put("/v1/blobs/after", content=b"1").status_code == 201
        (tmp_path / "store" / "pause" / "notes.txt").unlink()
        ask(gateway, "resume").raise_for_status()
        until(lambda: state(gateway)["last"] != last)

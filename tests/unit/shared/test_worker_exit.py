"""Test how a worker exits: a setting that a stage refuses is reported as a setting."""

from __future__ import annotations

import signal
import socket
from collections.abc import Iterator

import pytest

from nearkin_shared.config.loader import with_changes
from nearkin_shared.config.settings import Settings
from nearkin_shared.errors import ConfigError, NearkinError, PermanentError
from nearkin_shared.kafka import worker
from nearkin_shared.kafka.worker import exit_code


def test_setting_refused_by_a_stage_has_no_traceback(caplog: pytest.LogCaptureFixture) -> None:
    assert exit_code("delta", [ConfigError('gc.grace_seconds "2": too short')], alive=False) == 2
    (line,) = caplog.records
    assert line.getMessage() == 'delta: gc.grace_seconds "2": too short'
    assert not line.exc_info


@pytest.mark.parametrize(("alive", "code"), [(False, 0), (True, 1)])
def test_loop_that_does_not_end_is_a_failure(alive: bool, code: int, caplog: pytest.LogCaptureFixture) -> None:
    assert exit_code("delta", [], alive=alive) == code
    assert exit_code("delta", [RuntimeError("broken")], alive=alive) == 1
    assert caplog.records[-1].exc_info


@pytest.fixture
def _own_signals() -> Iterator[None]:
    """Restore the signal handlers of the process, which a worker replaces."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("_own_signals")
@pytest.mark.parametrize(
    ("failure", "code"),
    [(ConfigError("object_store.url: not set"), 2), (PermanentError("topic nearkin.frames: refused"), 1)],
)
def test_setting_refused_before_the_first_message_has_code(
    failure: NearkinError, code: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A setting refused at the start has the exit code of the gateway."""

    def refuse(*_: object) -> None:
        raise failure

    monkeypatch.setattr(worker, "_connect", refuse)
    assert worker.run_worker("chunker", [], Settings(), None, "w", None) == code
    (line,) = caplog.records
    assert line.getMessage() == f"chunker: {failure}"
    assert not line.exc_info


@pytest.mark.usefixtures("_own_signals")
def test_used_port_has_the_exit_code_of_a_setting() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        settings = with_changes(Settings(), {"monitor": {"port": taken.getsockname()[1]}})
        assert worker.run_worker("chunker", [], settings, None, "w", None) == 2

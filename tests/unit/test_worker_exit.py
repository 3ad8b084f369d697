"""How a worker ends: what a stage refuses is a setting, told as one."""

from __future__ import annotations

import pytest

from nearkin.errors import ConfigError
from nearkin.runners.kafka.worker import exit_code


def test_a_setting_that_a_stage_refuses_is_told_without_a_traceback(caplog: pytest.LogCaptureFixture) -> None:
    assert exit_code("delta", [ConfigError('gc.grace_seconds "2": too short')], alive=False) == 2
    (told,) = caplog.records
    assert told.getMessage() == 'delta: gc.grace_seconds "2": too short'
    assert not told.exc_info


@pytest.mark.parametrize(("alive", "code"), [(False, 0), (True, 1)])
def test_a_loop_that_does_not_end_is_a_failure(alive: bool, code: int, caplog: pytest.LogCaptureFixture) -> None:
    assert exit_code("delta", [], alive=alive) == code
    assert exit_code("delta", [RuntimeError("broken")], alive=alive) == 1
    assert caplog.records[-1].exc_info

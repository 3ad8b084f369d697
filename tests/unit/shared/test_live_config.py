"""Test both watchers of the live configuration, file and topic.

Neither reverts what the other read meanwhile.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

from nearkin_shared.config.loader import load
from nearkin_shared.config.settings import Settings
from nearkin_shared.kafka.live_config import LiveConfig


class Meanwhile:
    """A lock that lets another change happen before its first acquisition."""

    def __init__(self, happens: Callable[[], object]) -> None:
        self._happens: Callable[[], object] | None = happens
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        happens, self._happens = self._happens, None
        if happens is not None:
            happens()
        self._lock.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, err: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock.release()


def message(read_only: bool) -> bytes:
    return json.dumps({"changes": {"service": {"read_only": read_only}}, "id": str(read_only)}).encode()


def started(tmp_path: Path) -> tuple[LiveConfig, Path, Any]:
    file = tmp_path / "nearkin.toml"
    file.write_text('[delta]\ncodec = "none"\n')
    hot = LiveConfig(load(file)[0], file, None)
    return hot, file, hot


def test_change_on_topic_while_file_is_read_is_kept(tmp_path: Path) -> None:
    """A starting gateway must not go back to an older message.

    Its next change would put that in force everywhere.
    """
    hot, _, inside = started(tmp_path)
    hot.on_message(message(True), "first")
    inside._lock = Meanwhile(lambda: hot.on_message(message(False), "second"))
    hot.reread()
    assert not hot.settings.service.read_only
    assert hot.changes == {"service": {"read_only": False}}


def test_change_of_file_while_topic_is_read_is_kept(tmp_path: Path) -> None:
    hot, file, inside = started(tmp_path)
    hot.reread()
    file.write_text('[delta]\ncodec = "xdelta3"\n')
    inside._lock = Meanwhile(hot.reread)
    hot.on_message(message(True), "first")
    assert hot.settings.service.read_only
    assert hot.settings.delta.codec == "xdelta3"


def test_change_of_a_later_constant_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    """Apply the rest of a change that an older release sent, without what became a constant."""
    hot = LiveConfig(Settings(), None, None)
    hot.on_message(b'{"changes": {"block": {"level": 5, "raw_bytes": "1MiB"}, "features": {"count": 6}}}', "older")
    assert hot.changes == {"block": {"level": 5}}
    assert "block.raw_bytes is a constant now" in caplog.text

"""Test the log lines of services.

Machine readable, with the blob's context, and never with a secret.
"""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from nearkin_shared.config.loader import load, with_changes
from nearkin_shared.config.settings import Settings
from nearkin_shared.errors import ConfigError
from nearkin_shared.observability import log_setup

TRACE = "0af7651916cd43dd8448eb211c80319c"
TRACEPARENT = f"00-{TRACE}-b7ad6b7169203331-01"
TOKEN = "nk_01234567_" + "aB3-_" * 8 + "xyz"
KEY = 'wJalr"XUtnFEMI\\K7MDENG/bPxRfiCYé'
PASSWORD = "correct horse battery"
SECRETS = {
    "token": "some-other-gateways-token",
    "object_store": {"secret_access_key": KEY, "access_key_id": "AKIDEXAMPLE", "session_token": "FwoGZXIvYXdz"},
    "redis": {"password": PASSWORD},
    "kafka": {"sasl_password": "kafkas own"},
}
_log = logging.getLogger("nearkin.tests")


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def started(format_: str, settings: Settings | None = None) -> io.StringIO:
    stream = io.StringIO()
    settings = with_changes(settings or Settings(), {"logs": {"format": format_}})
    log_setup.start(settings, logging.INFO, stream)
    return stream


def failing(contents: bytes) -> None:
    raise ValueError(f"{PASSWORD}: {TOKEN}, {len(contents)} bytes")


def lines(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_json_line_has_event_time_source_and_blob() -> None:
    stream = started("json")
    with log_setup.about(b"\x01" * 16, "shop", TRACEPARENT.encode()):
        _log.warning("took %d bytes\nof it", 5)
    _log.info("idle")
    _log.debug("not logged")
    about, idle = lines(stream)
    assert about.pop("timestamp").endswith("Z")
    assert about == {
        "event": "took 5 bytes\nof it",
        "level": "warning",
        "logger": "nearkin.tests",
        "blob": "01" * 16,
        "tenant": "shop",
        "trace_id": TRACE,
        "span_id": "b7ad6b7169203331",
    }
    assert set(idle) == {"event", "level", "logger", "timestamp"}


@pytest.mark.parametrize("trace", [None, b"", b"nonsense", "\xff"])
def test_blob_without_a_trace_has_none(trace: bytes | str | None) -> None:
    stream = started("json")
    with log_setup.about(b"\x02" * 16, "shop", trace):
        _log.info("x")
    assert "trace_id" not in lines(stream)[0]


@pytest.mark.parametrize("format_", ["text", "json"])
def test_log_shows_no_token_and_no_secret_setting(format_: str) -> None:
    settings = with_changes(Settings(), SECRETS)
    stream = started(format_, settings)
    with log_setup.about(b"\x03" * 16, KEY, None):
        _log.error("Authorization: Bearer %s, or bearer abcdef123456; %s", TOKEN, KEY)
        _log.error("%r", {"password": PASSWORD, "key": KEY})
        try:
            failing(b"contents " + b"of a blob")
        except ValueError:
            _log.exception("failed with %s", "kafkas own")
    text = stream.getvalue()
    for secret in (TOKEN, TOKEN[12:], KEY, json.dumps(KEY)[1:-1], PASSWORD, "kafkas own", "abcdef123456"):
        assert secret not in text
    assert "wJalr" not in text
    assert "contents of a blob" not in text  # a traceback shows no variables
    assert "nk_01234567_***" in text  # the token's id may be shown
    assert "ValueError" in text
    assert "Traceback" in text
    if format_ == "json":
        assert len(lines(stream)) == 3


def test_text_is_the_default_and_unknown_formats_are_refused() -> None:
    assert load()[0].logs.format == "text"
    stream = started("text")
    _log.info("plain")
    assert stream.getvalue().endswith(" INFO nearkin.tests: plain\n")
    with pytest.raises(ConfigError, match=r'logs.format "xml"'):
        load(None, {"logs": {"format": "xml"}})

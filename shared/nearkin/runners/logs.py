"""What a service writes on stderr. Invariant: no secret of the settings and no token is in it, whoever logs it and how.

text   2026-01-31 12:00:00,000 INFO nearkin.gateway: ...
json   one object a line: timestamp, level, logger, event; of work on a blob also blob, tenant, and where there is a
       trace trace_id and span_id; exception
"""

from __future__ import annotations

import json
import logging
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import reduce
from typing import TextIO

import structlog

from nearkin.config import HIDDEN, SECRETS, Settings
from nearkin.masking import url_secrets

TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
SECRET_CHARACTERS_MIN = 6
"""Shorter ones are left: to hide `a` everywhere would hide the log, and say what the secret is."""
_TOKEN = re.compile(r"(nk_[0-9a-f]{8})_[A-Za-z0-9_-]{20,}")
_BEARER = re.compile(r"(?i)(bearer\s+)(?!nk_[0-9a-f]{8})[A-Za-z0-9._~+/=-]{6,}")


class Hiding(logging.Formatter):
    """Formats as another one does, and hides secrets in what comes out: in a message, a value, or a traceback."""

    def __init__(self, inner: logging.Formatter, secrets: Iterator[str]) -> None:
        super().__init__()
        self._inner = inner
        forms = {form for text in secrets for form in _written(text)}
        self._secrets = sorted(forms, key=len, reverse=True)  # one may be part of another

    def format(self, record: logging.LogRecord) -> str:
        """Return the line, or the lines."""
        text = self._inner.format(record)
        for secret in self._secrets:
            text = text.replace(secret, HIDDEN)
        return _BEARER.sub(rf"\1{HIDDEN}", _TOKEN.sub(rf"\1_{HIDDEN}", text))


def start(settings: Settings, level: int, stream: TextIO | None = None) -> None:
    """Let all that this process logs from `level` on go to `stream` (stderr), in the settings' format."""
    handler = logging.StreamHandler(sys.stderr if stream is None else stream)
    inner = _json() if settings.logs.format == "json" else logging.Formatter(TEXT)
    handler.setFormatter(Hiding(inner, _secrets(settings)))
    logging.basicConfig(level=level, handlers=[handler], force=True)


@contextmanager
def about(blob: bytes, tenant: str, trace: bytes | str | None) -> Iterator[None]:
    """Say in what is logged inside which blob it is about. `trace`: the W3C traceparent, where there is one."""
    with structlog.contextvars.bound_contextvars(**_known(blob, tenant, trace)):
        yield


def bind(blob: bytes, tenant: str, trace: bytes | str | None) -> None:
    """Say it in all that this task logs from now on: for a request, whose task ends with it."""
    structlog.contextvars.bind_contextvars(**_known(blob, tenant, trace))


def _known(blob: bytes, tenant: str, trace: bytes | str | None) -> dict[str, str]:
    known = {"blob": blob.hex(), "tenant": tenant}
    text = trace.decode("ascii", "replace") if isinstance(trace, bytes) else trace or ""
    parts = text.split("-")
    if len(parts) >= 4:  # version, trace id, span id, flags
        known |= {
            "trace_id": parts[1][:32],
            "span_id": parts[2][:16],
        }  # OpenTelemetry's names in logs that are not its own
    return known


def _json() -> logging.Formatter:
    return structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=[
            structlog.contextvars.merge_contextvars,
            structlog.stdlib.add_log_level,
            structlog.stdlib.add_logger_name,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
        ],
        processors=[
            structlog.stdlib.ProcessorFormatter.remove_processors_meta,
            structlog.processors.format_exc_info,  # without the frames' variables: these are contents
            structlog.processors.JSONRenderer(ensure_ascii=False),
        ],
    )


def _written(text: str) -> Iterator[str]:
    """Yield how a text can look in a line: as it is, as `repr` shows it, and each as JSON writes it."""
    for form in (text, repr(text)[1:-1]):
        yield form
        yield json.dumps(form)[1:-1]
        yield json.dumps(form, ensure_ascii=False)[1:-1]


def _secrets(settings: Settings) -> Iterator[str]:
    for name in SECRETS:
        value = reduce(getattr, name.split("."), settings)
        if isinstance(value, str):
            parts = {value, *value.replace(",", " ").split()}  # several keys stand in one setting, each a secret
            yield from (part for part in parts if len(part) >= SECRET_CHARACTERS_MIN)
    for url in filter(None, (settings.redis.url, settings.object_store.url, settings.server)):
        yield from (secret for secret in url_secrets(url) if len(secret) >= SECRET_CHARACTERS_MIN)

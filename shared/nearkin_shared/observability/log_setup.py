"""Set up the logs of a service on stderr.

    text   2026-01-31 12:00:00,000 INFO nearkin.gateway: ...
           2026-01-31 12:00:00,000 INFO nearkin.audit: blob.read tenant="shop" bytes=5    (`log_event`)
    json   one object a line: timestamp, level, logger, event; for work on a blob also blob, tenant, and with a trace
           trace_id and span_id; exception

Invariant: no secret of the settings and no token appears in a log line.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from functools import reduce
from pathlib import Path
from typing import TextIO

import structlog

from nearkin_shared.config.settings import HIDDEN, SECRETS, Settings
from nearkin_shared.errors import ConfigError, StoreUnavailable
from nearkin_shared.observability import metrics
from nearkin_shared.utils.private_files import open_private
from nearkin_shared.utils.url_masking import url_secrets

AUDIT = "nearkin.audit"
"""Logger of the audit log (nearkin_gateway.monitoring.audit_log)."""

TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
SECRET_CHARACTERS_MIN = 6
"""Shorter ones are left: to hide `a` everywhere would hide the log, and say what the secret is."""
_log = logging.getLogger("nearkin.logs")
_TOKEN = re.compile(r"(nk_[0-9a-f]{8})_[A-Za-z0-9_-]{20,}")
_BEARER = re.compile(r"(?i)(bearer\s+)(?!nk_[0-9a-f]{8})[A-Za-z0-9._~+/=-]{6,}")


class Hiding(logging.Formatter):
    """Masks secrets in the output of another formatter: messages, values, tracebacks."""

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
    """Send log records from `level` on to `stream` (stderr), in the settings' format."""
    handler = logging.StreamHandler(sys.stderr if stream is None else stream)
    inner = _json() if settings.logs.format == "json" else logging.Formatter(TEXT)
    handler.setFormatter(Hiding(inner, _secrets(settings)))
    logging.basicConfig(level=level, handlers=[handler], force=True)
    logging.getLogger("httpx").setLevel(logging.WARNING)  # a line for each request to an index shard otherwise


def log_event(logger: logging.Logger, level: int, event: str, fields: Mapping[str, object]) -> None:
    """Log an event with fields: of their own in a line of JSON, `name=JSON` in a line of text."""
    if logger.isEnabledFor(level):
        logger.log(level, "%s%s", event, _Pairs(fields), extra={"fields": {"event": event, **fields}})


class _Pairs:
    """Fields as text, made only where a formatter wants the message."""

    def __init__(self, fields: Mapping[str, object]) -> None:
        self._fields = fields

    def __str__(self) -> str:
        return "".join(f" {name}={json.dumps(value)}" for name, value in self._fields.items())


@contextmanager
def audit_file(settings: Settings) -> Iterator[None]:
    """Write the audit log to `audit.path`, if set, during the block. Raises ConfigError."""
    if settings.audit.path is None or settings.audit.records == "none":
        yield
        return
    path = Path(settings.audit.path).expanduser()
    try:
        handler = _PrivateFile(path)
    except (OSError, StoreUnavailable) as err:
        raise ConfigError(f'audit.path "{path}": cannot be opened for appending: {err}') from err
    handler.setFormatter(Hiding(_json(), _secrets(settings)))
    logger = logging.getLogger(AUDIT)
    logger.addHandler(handler)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = True
        handler.close()


class _PrivateFile(logging.Handler):
    """Append records to a file of mode 0600; reopen it after it was moved or replaced.

    Invariant: no error reaches the code that logs. A record that cannot be written is counted, and the next one opens
    the path again.
    """

    _SILENT_SECONDS = 60.0

    def __init__(self, path: Path) -> None:
        """Open the file. Raises OSError, StoreUnavailable."""
        self._path = path
        self._lost = 0
        """Records lost since the last report."""
        self._reported: float | None = None
        self._is_recovery_reported = False
        self._is_line_cut = False
        self._descriptor: int | None = _open_for_records(path)
        super().__init__()

    def emit(self, record: logging.LogRecord) -> None:
        """Append one line."""
        try:
            line = (self.format(record) + "\n").encode("utf-8", "backslashreplace")
            self._append(self._current_descriptor(), line)
        except Exception:  # whatever it is: the request at work must not fail because of its record
            self.handleError(record)
        else:
            self._report_recovery()

    def _current_descriptor(self) -> int:
        """Return the descriptor of the file at the path, reopened if it is another one."""
        if self._descriptor is not None:
            held = os.fstat(self._descriptor)
            with suppress(OSError):
                named = os.stat(self._path, follow_symlinks=False)
                if (named.st_dev, named.st_ino) == (held.st_dev, held.st_ino):
                    return self._descriptor
            self._release()
        self._descriptor = _open_for_records(self._path)
        return self._descriptor

    def _append(self, descriptor: int, line: bytes) -> None:
        # Without a buffer: a record that was counted as lost must not be written later, nor fail the next one.
        rest = b"\n" + line if self._is_line_cut else line
        while rest:
            written = os.write(descriptor, rest)
            rest = rest[written:]
            self._is_line_cut = bool(rest)

    def _release(self) -> None:
        descriptor, self._descriptor, self._is_line_cut = self._descriptor, None, False
        if descriptor is not None:
            os.close(descriptor)

    def close(self) -> None:
        """Close the file."""
        with self.lock or nullcontext(), suppress(OSError):
            self._release()
        super().close()

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - the base class names it
        """Count a lost record, and report it at most once in `_SILENT_SECONDS`."""
        metrics.AUDIT_LOST.inc()
        self._lost += 1
        now = time.monotonic()
        if self._reported is None or now - self._reported >= self._SILENT_SECONDS:
            self._reported, self._is_recovery_reported = now, False
            _log.error(
                "audit.path %s: records are lost: %s; make the path a file that can be written",
                self._path, sys.exc_info()[1],
            )  # fmt: skip

    def _report_recovery(self) -> None:
        if self._lost and not self._is_recovery_reported:  # once after each report of a loss, which are rare
            self._is_recovery_reported = True
            _log.warning("audit.path %s: records are written again; %d were lost", self._path, self._lost)
            self._lost = 0


def _open_for_records(path: Path) -> int:
    """Open an audit file for appending. Raises OSError, LinkRefused."""
    descriptor = open_private(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    links = os.fstat(descriptor).st_nlink
    if links > 1:
        os.close(descriptor)
        message = f"has {links} hard links, another user may have made it one of a file elsewhere; remove it"
        raise OSError(errno.EMLINK, message, str(path))
    return descriptor


@contextmanager
def about(blob: bytes, tenant: str, trace: bytes | str | None) -> Iterator[None]:
    """Add a blob's identity to the records logged in the block.

    `trace`: the W3C traceparent, if there is one.
    """
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


def _event_fields(_logger: object, _method: str, event_dict: structlog.typing.EventDict) -> structlog.typing.EventDict:
    """Add the fields of `log_event` to a line of JSON."""
    fields = getattr(event_dict["_record"], "fields", None)
    return event_dict if fields is None else {**event_dict, **fields}


def _json() -> logging.Formatter:
    return structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=[
            structlog.contextvars.merge_contextvars,
            _event_fields,
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
    """Yield the forms of a text in a line: as it is, as in `repr`, and each in JSON."""
    for form in (text, repr(text)[1:-1]):
        yield form
        yield json.dumps(form)[1:-1]
        yield json.dumps(form, ensure_ascii=False)[1:-1]


def _secrets(settings: Settings) -> Iterator[str]:
    for name in SECRETS:
        value = reduce(getattr, name.split("."), settings)
        if isinstance(value, str):
            parts = {value, *value.replace(",", " ").split()}  # one setting may contain several keys, each a secret
            yield from (part for part in parts if len(part) >= SECRET_CHARACTERS_MIN)
    for url in filter(None, (settings.redis.url, settings.object_store.url, settings.server)):
        yield from (secret for secret in url_secrets(url) if len(secret) >= SECRET_CHARACTERS_MIN)

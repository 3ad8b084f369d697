"""Trace requests with OpenTelemetry.

    request -> chunker -> dedup -> resemblance -> delta -> committer      a blob's own trace, each span below the last

A span has blob, tenant, sizes and durations, but no keys, contents, tokens or error messages. The library
(`pip install 'nearkin[tracing]'`) is imported only if `tracing.endpoint` is set.

Invariant: no work waits for the collector, and an untraced operation costs one comparison.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from itertools import islice
from typing import TYPE_CHECKING

from nearkin_shared.config.settings import Settings
from nearkin_shared.errors import ConfigError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Link, Span, SpanContext, SpanKind

_log = logging.getLogger("nearkin.tracing")

LINKS_MAX = 128
"""The library's bound of links of a span; further ones are dropped."""
QUEUE_SPANS_MAX = 4096
"""Spans that wait for the collector; those beyond are dropped, and the library says so in the log."""
BATCH_SPANS_MAX = 512
EXPORT_SECONDS = 10.0
STOP_SECONDS = 5.0
"""How long a process that ends waits for the collector to take the last spans."""

_SAMPLED = frozenset(bytes([digit]) for digit in b"13579bdf")
"""Last digits of a traceparent whose lowest flag, sampled, is set."""

Attributes = Mapping[str, str | int | float]


class Tracing:
    """The source of spans in a process that is traced."""

    def __init__(self, settings: Settings, service: str, instance: str, exporter: SpanExporter | None = None) -> None:
        """`instance` distinguishes the processes of a service. Raises ConfigError.

        ConfigError: the library is missing. `exporter` replaces the exporter to `tracing.endpoint`.
        """
        try:
            from opentelemetry import trace
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.sdk.trace.sampling import ALWAYS_ON, ParentBased, TraceIdRatioBased
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError as err:
            raise ConfigError(
                f'tracing.endpoint "{settings.tracing.endpoint}": opentelemetry is not installed; '
                "pip install 'nearkin[tracing]'"
            ) from err
        self._api = trace
        self._propagator = TraceContextTextMapPropagator()
        about = {
            "service.name": f"nearkin-{service}",
            "service.namespace": "nearkin",
            "service.instance.id": instance,
            "service.version": _version(),
        }
        resource = Resource.create(about)
        self._processor = BatchSpanProcessor(
            _exporter(settings) if exporter is None else exporter,
            max_queue_size=QUEUE_SPANS_MAX,
            max_export_batch_size=BATCH_SPANS_MAX,
        )
        # Two providers with one exporter: a batch is recorded if a blob in it is, regardless of the ratio.
        sampled = TracerProvider(
            sampler=ParentBased(TraceIdRatioBased(settings.tracing.ratio)), resource=resource, shutdown_on_exit=False
        )
        always = TracerProvider(sampler=ALWAYS_ON, resource=resource, shutdown_on_exit=False)
        for provider in (sampled, always):
            provider.add_span_processor(self._processor)
        self._sampled = sampled.get_tracer("nearkin")
        self._always = always.get_tracer("nearkin")
        self._open: dict[bytes, Span] = {}

    def context(self, traceparent: bytes | str | None) -> SpanContext | None:
        """Return the context that a W3C traceparent is, None where it is none."""
        if not traceparent:
            return None
        text = traceparent.decode("ascii", "replace") if isinstance(traceparent, bytes) else traceparent
        found = self._api.get_current_span(self._propagator.extract({"traceparent": text})).get_span_context()
        return found if found.is_valid else None

    def context_of(self, traceparent: bytes | None) -> SpanContext | None:
        """Return the context of a traceparent whose trace is recorded, else None."""
        if traceparent is None or traceparent[-1:] not in _SAMPLED:  # of most: 0.1 us in place of 6 (ADR 26)
            return None
        found = self.context(traceparent)
        return found if found is not None and found.trace_flags.sampled else None

    def begin(
        self,
        name: str,
        parent: SpanContext | None,
        kind: str = "internal",
        links: Iterable[SpanContext] = (),
        attributes: Attributes | None = None,
    ) -> Span:
        """Begin a span below `parent`; without one begin a trace at the rate `tracing.ratio`."""
        context = self._api.set_span_in_context(
            self._api.INVALID_SPAN if parent is None else self._api.NonRecordingSpan(parent)
        )
        return self._sampled.start_span(
            name, context, self._kind(kind), dict(attributes or {}), self._links(links), record_exception=False
        )

    def begin_batch(self, name: str, links: Iterable[SpanContext], attributes: Attributes) -> Span:
        """Begin a span of its own trace, for work on what belongs to the traces in `links`."""
        context = self._api.set_span_in_context(self._api.INVALID_SPAN)
        return self._always.start_span(
            name, context, self._kind("consumer"), dict(attributes), self._links(links), record_exception=False
        )

    def traceparent(self, span: Span) -> bytes:
        """Return a span's context as messages carry it."""
        carrier: dict[str, str] = {}
        self._propagator.inject(carrier, self._api.set_span_in_context(span))
        return carrier["traceparent"].encode()

    def open(self, span: Span) -> bytes:
        """Return `traceparent(span)`; until it is closed, `record_failure` finds the span by it."""
        found = self.traceparent(span)
        self._open[found] = span
        return found

    def close(self, span: Span, err: BaseException | None = None) -> None:
        """End a span; an error is recorded by its name only."""
        self._open.pop(self.traceparent(span), None)
        if err is not None:
            self._mark(span, err)
        span.end()

    def record_failure(self, traceparent: bytes | None, err: BaseException) -> None:
        """Say of the open span with this context that its work failed."""
        span = self._open.get(traceparent or b"")
        if span is not None:
            self._mark(span, err)

    def describe(self, traceparent: bytes, attributes: Attributes) -> None:
        """Say more of the open span with this context."""
        span = self._open.get(traceparent)
        if span is not None:
            span.set_attributes(dict(attributes))

    def stop(self) -> None:
        """Send what waits, within STOP_SECONDS, and end."""
        ending = threading.Thread(target=self._processor.shutdown, name="nearkin-tracing-end", daemon=True)
        ending.start()  # the library waits for a collector that is away for longer
        ending.join(STOP_SECONDS)

    def _mark(self, span: Span, err: BaseException) -> None:
        span.set_status(self._api.StatusCode.ERROR, type(err).__name__)

    def _kind(self, name: str) -> SpanKind:
        return self._api.SpanKind[name.upper()]

    def _links(self, contexts: Iterable[SpanContext]) -> list[Link]:
        alone = {(one.trace_id, one.span_id): one for one in contexts}
        return [self._api.Link(one) for one in islice(alone.values(), LINKS_MAX)]


_current: Tracing | None = None


def start(settings: Settings, service: str, instance: str) -> None:
    """Trace this process from now on where `tracing.endpoint` is set. Raises ConfigError."""
    global _current  # noqa: PLW0603  # one collector for a process, as its logs have one stream
    if settings.tracing.endpoint is not None:
        _current = Tracing(settings, service, instance)
        _log.info("traces go to %s", settings.tracing.endpoint)


def stop() -> None:
    """Send what waits, and trace no more."""
    global _current
    ending, _current = _current, None
    if ending is not None:
        ending.stop()


def current() -> Tracing | None:
    """Return what makes spans here, None where nothing is traced."""
    return _current


@contextmanager
def span(
    name: str, traceparent: bytes | None, attributes: Attributes | None = None, *, begins: bool = False
) -> Iterator[bytes | None]:
    """Trace the block; yield the context for subsequent work. `begins`: a trace may begin.

    If this process does not trace or the trace is not recorded, it yields `traceparent`.
    """
    tracing = _current
    parent = None if tracing is None else tracing.context(traceparent)
    if tracing is None or (parent is None and not begins):
        yield traceparent
        return
    made = tracing.begin(name, parent, attributes=attributes)
    with closing(tracing, made):
        yield tracing.open(made)


@contextmanager
def linked_span(name: str, traceparents: Iterable[bytes | None], attributes: Attributes) -> Iterator[None]:
    """Trace the block in a span with links to the recorded ones among `traceparents`."""
    tracing = _current
    links = [] if tracing is None else [found for one in traceparents if (found := tracing.context_of(one)) is not None]
    if tracing is None or not links:
        yield
        return
    with closing(tracing, tracing.begin_batch(name, links, attributes)):
        yield


@contextmanager
def closing(tracing: Tracing, made: Span) -> Iterator[None]:
    """End a span with the block inside, however that ends."""
    try:
        yield
    except BaseException as err:
        tracing.close(made, err)
        raise
    tracing.close(made)


def record_failure(traceparent: bytes | None, err: BaseException) -> None:
    """Say of the open span with this context that its work failed."""
    if _current is not None:
        _current.record_failure(traceparent, err)


def describe(traceparent: str | None, attributes: Attributes) -> None:
    """Say more of the open span with this context."""
    if _current is not None and traceparent is not None:
        _current.describe(traceparent.encode(), attributes)


def about(blob: bytes, tenant: str) -> dict[str, str]:
    """Return the span attributes of a blob."""
    return {"nearkin.blob": blob.hex(), "nearkin.tenant": tenant}


def _exporter(settings: Settings) -> SpanExporter:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    endpoint = str(settings.tracing.endpoint).rstrip("/")
    return OTLPSpanExporter(endpoint=f"{endpoint}/v1/traces", timeout=EXPORT_SECONDS)


def _version() -> str:
    try:
        return version("nearkin")
    except PackageNotFoundError:  # run from a source tree
        return "0"

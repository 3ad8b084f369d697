"""Test traces as an OTLP collector receives them: linked batches, and nothing private."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from nearkin_gateway.auth import tokens
from nearkin_shared.config.loader import load, with_changes
from nearkin_shared.config.settings import Settings
from nearkin_shared.kafka.clients import create_named, producer
from nearkin_shared.observability import tracing
from nearkin_shared.observability.tracing import Tracing
from tests.support.checks.waiting import until
from tests.support.data.samples import noise
from tests.support.servers.pipeline import MODULES, SPLIT, Pipeline
from tests.support.servers.server import free_port

STAGES = ("chunker", "dedup", "resemblance", "delta", "committer")
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
CALLER = "00f067aa0ba902b7"
SERVER, CONSUMER = 2, 5


@dataclass(frozen=True)
class Span:
    service: str
    name: str
    trace: str
    id: str
    parent: str
    links: frozenset[str]
    kind: int
    failed: str
    about: dict[str, Any] = field(hash=False, compare=False)


@dataclass
class Collector:
    """An OpenTelemetry collector: OTLP over HTTP."""

    port: int = 0
    spans: list[Span] = field(default_factory=list)
    raw: bytes = b""

    def take(self, body: bytes) -> None:
        request = ExportTraceServiceRequest.FromString(body)
        self.raw += body
        for batch in request.resource_spans:
            service = next(one.value.string_value for one in batch.resource.attributes if one.key == "service.name")
            for span in (span for scope in batch.scope_spans for span in scope.spans):
                assert 0 < span.start_time_unix_nano <= span.end_time_unix_nano
                self.spans.append(
                    Span(
                        service,
                        span.name,
                        span.trace_id.hex(),
                        span.span_id.hex(),
                        span.parent_span_id.hex(),
                        frozenset(link.span_id.hex() for link in span.links),
                        span.kind,
                        span.status.message if span.status.code == 2 else "",
                        {one.key: one.value.string_value or one.value.int_value for one in span.attributes},
                    )
                )

    def of(self, trace: str) -> list[Span]:
        return [span for span in self.spans if span.trace == trace]


@pytest.fixture
def collector() -> Iterator[Collector]:
    made = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces"
            body = self.rfile.read(int(self.headers["content-length"]))
            assert self.headers.get("content-encoding") is None
            made.take(body)
            self.send_response(200)
            self.send_header("content-type", "application/x-protobuf")
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        made.port = server.server_address[1]
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield made
        server.shutdown()
        thread.join()


def below(spans: list[Span], parent: str) -> list[Span]:
    return [span for span in spans if span.parent == parent]


def test_trace_spans_request_to_commit(
    kafka: Any,
    redis: Any,
    topic_prefix: str,
    key_prefix: str,
    tmp_path: Path,
    collector: Collector,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Trace a blob from the request to its commit, with links to batches."""
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "200")  # the library's own is 5 s
    port = free_port()
    text, _ = tokens.create(tmp_path / "tokens.json", "default", tokens.SCOPES)
    sections: dict[str, dict[str, object]] = {
        "kafka": {"bootstrap_servers": kafka.bootstrap, "topic_prefix": topic_prefix, "partitions": 1},
        "redis": {"url": redis.url, "prefix": key_prefix},
        "object_store": {"url": str(tmp_path / "objects")},
        "gateway": {"port": port},
        "auth": {"tokens_file": str(tmp_path / "tokens.json")},
        "logs": {"format": "json"},
        "ingest": {"topics": [f"users-{topic_prefix}x"]},
        "tracing": {"endpoint": f"http://127.0.0.1:{collector.port}", "ratio": 0.0},
    }
    data = noise(1_500_000, "tracing").tobytes() + b"NEVER-IN-A-SPAN" * 1000
    with Pipeline(tmp_path / "pipeline", sections) as pipeline:
        pipeline.start("gateway")
        pipeline.start("ingest")
        url = f"http://127.0.0.1:{port}"
        with httpx.Client(base_url=url, headers={"Authorization": f"Bearer {text}"}, timeout=60) as client:
            until(lambda: _ready(client), pipeline.logs)
            # The caller's decision is followed; without one the ratio is 0.
            for name, flags in (("private-a", "01"), ("private-b", "00"), ("private-c", None)):
                headers = {} if flags is None else {"traceparent": f"00-{TRACE}-{CALLER}-{flags}"}
                answer = client.put(f"/v1/blobs/{name}", params={"wait": 60}, content=data, headers=headers)
                assert answer.status_code == 201, pipeline.logs()
            blob = client.put(  # waits for nothing, so that both may meet in one batch
                "/v1/blobs/private-d", content=data, headers={"traceparent": f"00-{'d' * 32}-{CALLER}-01"}
            ).json()["id"]
            client.get("/v1/blobs/private-a", headers={"traceparent": f"00-{'e' * 32}-{CALLER}-01"})

            create_named(load(pipeline.config_file)[0], [f"users-{topic_prefix}x"])
            sender = producer(pipeline.settings, "test")
            sender.produce(
                f"users-{topic_prefix}x",
                data[-900_000:],
                "private-f",
                headers=[("traceparent", f"00-{'f' * 32}-{CALLER}-01")],
            )
            assert sender.flush(20) == 0
            wanted = {TRACE, "d" * 32, "f" * 32}
            until(lambda: {one.trace for one in collector.spans if one.name == "commit"} >= wanted, pipeline.logs)
        assert set(pipeline.stop().values()) == {0}, pipeline.logs()

    spans = collector.of(TRACE)
    (request,) = below(spans, CALLER)
    assert (request.service, request.name, request.kind) == ("nearkin-gateway", "PUT /v1/blobs/{key:path}", SERVER)
    assert request.about["http.response.status_code"] == 201
    # Each stage's span is a child of a span of the previous stage.
    above = {request.id}
    for stage in STAGES:
        found = [span for span in spans if span.name == stage]
        service = "delta" if stage == "committer" else stage
        assert {span.service for span in found} == {f"nearkin-{service}"}, stage
        assert {span.parent for span in found} <= above, stage
        assert {span.kind for span in found} == {CONSUMER}
        above = {span.id for span in found}
    (commit,) = [span for span in spans if span.name == "commit"]
    assert commit.parent in above
    assert commit.about["nearkin.bytes"] == len(data)
    own = {span.about["nearkin.blob"] for span in spans}
    assert len(own) == 1
    assert {span.about["nearkin.tenant"] for span in spans} == {"default"}
    assert Counter(span.name for span in spans) == Counter(
        [request.name, *(span.name for span in spans if span.name in STAGES), "commit"]
    )

    # A batch is a trace of its own, linked to its messages; spans within the batch link to it.
    known = {span.id: span for span in collector.spans}
    batches = [span for span in collector.spans if span.name.endswith(" batch")]
    assert {span.name for span in batches} == {f"{stage} batch" for stage in STAGES}
    for batch in batches:
        assert batch.parent == ""
        assert batch.links
        assert len(collector.of(batch.trace)) == 1
        assert {known[link].trace for link in batch.links} <= wanted
        assert batch.about["messaging.batch.message_count"] >= len(batch.links)
    linked: defaultdict[str, set[str]] = defaultdict(set)
    for span in collector.spans:
        if span.name in STAGES:
            linked[span.name] |= {known[link].name for link in span.links if known[link].parent == ""}
    assert linked == {stage: {f"{stage} batch"} for stage in STAGES}
    stored = [span for span in collector.spans if span.name == "container"]
    assert {known[link].name for span in stored for link in span.links} == {"delta"}
    assert sum(span.about["nearkin.bytes"] for span in stored) > 1_500_000

    assert [span.name for span in below(collector.of("f" * 32), CALLER)] == ["ingest"]
    assert {span.name for span in collector.of("f" * 32)} >= {*STAGES, "commit"}
    (read,) = collector.of("e" * 32)
    assert read.name == "GET /v1/blobs/{key:path}"
    assert {span.about["nearkin.blob"] for span in collector.of("d" * 32)} == {blob.partition("-")[0]}
    assert {span.trace for span in collector.spans} - {span.trace for span in (*batches, *stored)} == {
        *wanted,
        "e" * 32,
    }
    assert not [span for span in collector.spans if span.failed]
    for hidden in (b"private-", b"NEVER-IN-A-SPAN", text.encode(), text[12:].encode(), redis.url.encode()):
        assert hidden not in collector.raw

    written = [json.loads(line) for line in (pipeline.folder / "gateway.log").read_text().splitlines()]
    logged_spans = {(line["trace_id"], line["span_id"]) for line in written if "bytes taken" in line["event"]}
    assert (TRACE, request.id) in logged_spans


def _ready(client: httpx.Client) -> bool:
    try:
        return client.get("/readyz").status_code == 200 and client.get("/v1/status/x").status_code != 401
    except httpx.HTTPError:
        return False


def settings_for(endpoint: str, ratio: float = 1.0) -> Settings:
    return with_changes(Settings(), {"tracing": {"endpoint": endpoint, "ratio": ratio}})


def finished(work: Callable[[Tracing], None], ratio: float = 1.0) -> list[Any]:
    """Return the spans that `work` ended."""
    kept = InMemorySpanExporter()
    made = Tracing(settings_for("http://127.0.0.1:9", ratio), "test", "one", kept)
    work(made)
    made.stop()
    return list(kept.get_finished_spans())


def test_ratio_is_the_share_of_traced_requests() -> None:
    def requests(made: Tracing) -> None:
        for _ in range(2000):
            made.begin("GET", None).end()

    assert len(finished(requests, 0.0)) == 0
    assert 100 < len(finished(requests, 0.1)) < 320  # 200 of 2,000; the bounds are 7 and 9 deviations away
    assert len(finished(requests, 1.0)) == 2000


def test_failure_is_traced_by_error_name_only() -> None:
    def work(made: Tracing) -> None:
        span = made.begin("dedup", None)
        made.record_failure(made.open(span), ValueError("key 'private'"))
        made.close(span)
        made.close(made.begin("delta", None), OSError("/private"))

    found = finished(work)
    assert [(span.status.status_code.name, span.status.description) for span in found] == [
        ("ERROR", "ValueError"),
        ("ERROR", "OSError"),
    ]
    assert "private" not in "".join(span.to_json() for span in found)


@pytest.mark.parametrize("text", [None, b"", b"nonsense", b"\xff" * 55, b"00-" + b"0" * 32 + b"-" + b"1" * 16 + b"-01"])
def test_invalid_context_has_no_parent(text: bytes | None) -> None:
    def work(made: Tracing) -> None:
        assert made.context(text) is None
        assert made.context_of(text) is None

    finished(work)


AWAY = """
import threading
from opentelemetry.sdk.trace.export import SpanExporter
from nearkin_shared.config.settings import Settings
from nearkin_shared.config.loader import with_changes
from nearkin_shared.observability.tracing import QUEUE_SPANS_MAX, Tracing

tried = []

class Away(SpanExporter):
    def export(self, spans):
        tried.append(threading.current_thread() is threading.main_thread())
        threading.Event().wait()

settings = with_changes(Settings(), {"tracing": {"endpoint": "http://127.0.0.1:9", "ratio": 1.0}})
made = Tracing(settings, "test", "one", Away())
for _ in range(3 * QUEUE_SPANS_MAX):
    made.close(made.begin("PUT", None))
made.stop()
waits = [one.name for one in threading.enumerate() if one.name == "nearkin-tracing-end"]
print(tried, waits)
"""


def test_unresponsive_collector_delays_nothing() -> None:
    """Drop spans beyond the queue instead of waiting, also when the process ends."""
    environment = {"PYTHONPATH": ":".join(filter(None, sys.path))}
    command = [sys.executable, "-c", AWAY]
    done = subprocess.run(command, check=True, env=environment, capture_output=True, text=True, timeout=120)
    assert done.stdout == "[False] ['nearkin-tracing-end']\n"


def test_nothing_is_traced_without_a_collector() -> None:
    tracing.start(Settings(), "test", "one")
    assert tracing.current() is None
    with tracing.span("x", b"given", begins=True) as context, tracing.linked_span("y", [b"given"], {}):
        assert context == b"given"
    tracing.stop()


def test_untraced_process_loads_no_exporter() -> None:
    """redis and fastapi import the rest by themselves where it is installed."""
    modules = [f"nearkin_{service}.__main__" for service in SPLIT if service not in MODULES]
    modules += [*MODULES.values(), "nearkin_gateway.server"]
    code = f"import sys, {', '.join(modules)}\nassert not [one for one in sys.modules if '.exporter.otlp' in one]"
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": ":".join(filter(None, sys.path))})


def test_collector_without_library_is_refused() -> None:
    code = (
        "import sys; sys.modules['opentelemetry'] = None\n"
        "import runpy; sys.argv = ['nearkin_dedup', '--worker', 'w']\n"
        "runpy.run_module('nearkin_dedup', run_name='__main__')"
    )
    environment = {
        "PYTHONPATH": ":".join(filter(None, sys.path)),
        "NEARKIN_TRACING__ENDPOINT": "http://collector:4318",
    }
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "pip install 'nearkin[tracing]'" in done.stderr
    assert "Traceback" not in done.stderr

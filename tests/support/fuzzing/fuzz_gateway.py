"""Fuzz the gateway with whole requests.

Invariant: the status of each answer is one that the API document lists for its route.

    METHOD target          the target as sent: bytes that no server accepts are percent-encoded
    name: value            any number of lines; a line that HTTP forbids is one that no server accepts
                           an empty line
    body                   sent in two pieces; cut to, or short of, the announced Content-Length

The application runs in this process, over a store of its own that is replaced every REQUESTS_A_STORE requests. `{id}`
in a target is the id of the latest resumable upload.
"""

from __future__ import annotations

import asyncio
import re
import tempfile
import threading
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import quote_from_bytes, unquote

from blake3 import blake3
from starlette.types import Message

from nearkin.embedded.gateway_backend import embedded_gateway
from nearkin_gateway import gateway_limits as limits
from nearkin_gateway.app import THREADS_MAX, create_app, openapi_document, with_middleware
from nearkin_gateway.server import make_gateway
from nearkin_shared.formats.tree_entry_group import DIGEST_BYTES, EntryKind, TreeEntry, encode_group
from nearkin_shared.formats.tree_layout import GroupInfo, TreeSummary, encode_end, group_digest, tree_digest
from nearkin_shared.formats.upload_parts import PARTS_MEDIA_TYPE, PartsEncoder
from nearkin_shared.results import CONTENT_TYPE_TREE
from tests.support.data.stores import SMALL
from tests.support.servers.gateways import embedded

REQUESTS_A_STORE = 2000
ANSWER_SECONDS_MAX = 300.0
"""Wall-clock limit of a request, on a machine that may be suspended meanwhile."""
_SENT_AS_THEY_ARE = "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~"
_METHOD = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,32}")
_NAME = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_VALUE = re.compile(rb"[\t\x20-\x7e\x80-\xff]*")
_FRAMING = (b"transfer-encoding", b"connection", b"upgrade", b"expect")
"""Headers that the server itself handles."""


class RequestRefused(Exception):
    """The answer had a status of 400 to 499, or one that allows a retry (503)."""


@cache
def _documented_statuses() -> Mapping[tuple[str, str], frozenset[int]]:
    """Return the documented statuses by (method, route)."""
    return {
        (method.upper(), path): frozenset(map(int, operation["responses"])) - {500}
        for path, operations in openapi_document()["paths"].items()
        for method, operation in operations.items()
    }


class _Running:
    """The application over a new store, with all its threads started."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="nearkin-fuzz-")
        self._slow_seconds, limits.SLOW_SECONDS = limits.SLOW_SECONDS, 5
        bounds = {"requests_per_second": 0, "body_bytes_max": "1MiB"}
        chosen = embedded(Path(self._folder.name) / "store", {**SMALL, "gateway": bounds})
        self.loop = asyncio.new_event_loop()
        app = create_app(make_gateway(chosen, embedded=embedded_gateway))
        self.app = with_middleware(app)
        self.upload, self.requests = "1", 0
        self._life: AbstractAsyncContextManager[Any] = app.router.lifespan_context(app)
        self.loop.run_until_complete(self._life.__aenter__())
        self.loop.run_until_complete(self._warm())

    async def _warm(self) -> None:
        """Start every thread, so that their memory and their allocators' is not counted for a request."""
        together = threading.Barrier(THREADS_MAX)
        await asyncio.gather(*(asyncio.to_thread(together.wait, 60) for _ in range(THREADS_MAX)))

    def close(self) -> None:
        """Stop the application."""
        self.loop.run_until_complete(self._life.__aexit__(None, None, None))
        self.loop.run_until_complete(self.loop.shutdown_default_executor())
        self.loop.close()
        self._folder.cleanup()


class Gateway:
    """Gateway that answers requests one after another."""

    def __init__(self) -> None:
        self._running: _Running | None = None

    def ready(self) -> list[bytes]:
        """Start, and return requests of every kind."""
        self._started()
        return requests()

    def close(self) -> None:
        """Stop the running application."""
        running, self._running = self._running, None
        if running is not None:
            running.close()

    def _started(self) -> _Running:
        if self._running is not None and self._running.requests >= REQUESTS_A_STORE:
            self.close()
        if self._running is None:
            self._running = _Running()
        return self._running

    def answer(self, data: bytes) -> int:
        """Return the status of the answer.

        Raises: RequestRefused; AssertionError for an undocumented status.
        """
        running = self._started()
        running.requests += 1
        scope, pieces = _request(data, running.upload)
        status, headers = running.loop.run_until_complete(
            asyncio.wait_for(_call(running.app, scope, pieces), ANSWER_SECONDS_MAX)
        )
        location = headers.get(b"location", b"").decode("latin-1")
        if location.startswith("/v1/uploads/"):
            running.upload = location.removeprefix("/v1/uploads/")
        route = getattr(scope.get("route"), "path", "").replace(":path}", "}")
        allowed = _documented_statuses().get((scope["method"], route))
        if allowed is None:
            assert status < 500, f"{scope['method']} {route!r}, which is not in the document: {status}"
        else:
            assert status in allowed, f"{scope['method']} {route}: {status}, which is not documented"
        if status >= 400:
            raise RequestRefused(status)
        return status


async def _call(app: Any, scope: dict[str, Any], pieces: list[Message]) -> tuple[int, dict[bytes, bytes]]:
    waiting = iter(pieces)
    answered = asyncio.Event()
    field_value: dict[str, Any] = {}

    async def receive() -> Message:
        message = next(waiting, None)
        if message is None:
            await answered.wait()
            return {"type": "http.disconnect"}
        return message

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            assert "status" not in field_value, "two answers"
            field_value.update(message)
        elif not message.get("more_body", False):
            answered.set()

    await app(scope, receive, send)
    assert answered.is_set(), "no answer, or one without an end"
    return field_value["status"], dict(field_value["headers"])


def _request(data: bytes, upload: str) -> tuple[dict[str, Any], list[Message]]:
    """Return the scope and the messages of a request, as a server makes them."""
    head, _, body = data.partition(b"\n\n")
    line, *lines = head.split(b"\n")
    method, _, target = line.partition(b" ")
    target = target.replace(b"{id}", upload.encode())
    sent = quote_from_bytes(target, safe=_SENT_AS_THEY_ARE).encode()
    raw_path, _, query = sent.partition(b"?")
    headers = []
    announced: int | None = None
    for given, _, field_value in (line.partition(b":") for line in lines):
        name, value = given.strip().lower(), field_value.strip(b" \t")
        if not _NAME.fullmatch(name) or not _VALUE.fullmatch(value) or name in _FRAMING:
            continue
        if name == b"content-length":
            if announced is not None or not value.isdigit() or len(value) > 18:
                continue
            announced = int(value)
        headers.append((name, value))
    if not any(name == b"host" for name, _ in headers):
        headers.append((b"host", b"localhost"))
    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": method.decode() if _METHOD.fullmatch(method) else "GET",
        "scheme": "http",
        "path": unquote(raw_path.decode()),
        "raw_path": raw_path if raw_path.startswith(b"/") else b"/" + raw_path,
        "query_string": query,
        "root_path": "",
        "headers": headers,
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 80),
        "state": {},
    }
    body = body if announced is None else body[:announced]
    pieces: list[Message] = [
        {"type": "http.request", "body": body[: len(body) // 2], "more_body": True},
        {"type": "http.request", "body": body[len(body) // 2 :], "more_body": announced not in (None, len(body))},
    ]
    if pieces[-1]["more_body"]:  # a client that announced more has closed the connection
        pieces.append({"type": "http.disconnect"})
    return scope, pieces


def _parse_request(line: str, *headers: str, body: bytes = b"") -> bytes:
    return "\n".join([line, *headers, "", ""]).encode() + body


def _tree_and_parts() -> tuple[bytes, bytes]:
    """Return a tree of one file, and a body of parts that copies half of the file."""
    content = b"content of a file"
    digest = blake3(content).digest(length=DIGEST_BYTES)
    rows = [
        TreeEntry(b"", b"", EntryKind.FOLDER, 0o700, 1, 2, 3, 4, 5, 0, 0, b"", b"", ()),
        TreeEntry(b"", b"f", EntryKind.FILE, 0o600, 1, 2, 3, 4, 5, len(content), 0, digest, b"", ()),
    ]
    block = encode_group(rows)
    group = GroupInfo(b"", b"", len(rows), len(block), len(content), group_digest(block))
    end = encode_end(TreeSummary(root=b"/", entries=len(rows)), [group])
    body = bytearray()
    encoder = PartsEncoder(body.extend)
    encoder.add_copy(0, 9)
    encoder.add_data(content[9:] + block + end)
    encoder.add_idle(3)
    encoder.end(len(content + block + end), tree_digest(end))
    return content + block + end, bytes(body)


def requests() -> list[bytes]:
    """Return one or more requests for every route, most of them successful."""
    tus = "tus-resumable: 1.0.0"
    octets = "content-type: application/offset+octet-stream"
    found = [
        _parse_request("PUT /v1/blobs/a", "x-nearkin-meta-host: db%201", body=b"some content " * 40),
        _parse_request("PUT /v1/blobs/a%2Fb?wait=0", "content-length: 5", "want-repr-digest: sha-256=5", body=b"12345"),
        _parse_request("PUT /v1/blobs/once", "if-none-match: *", "idempotency-key: k1", body=b"x"),
        _parse_request("POST /v1/blobs/a/b", 'if-match: "1"', body=bytes(3000)),
        _parse_request(
            "PUT /v1/blobs/d",
            "content-digest: sha-256=:n4bQgYhMfWWaL+qgxVrQFaO/TxsrC4Is0V1sFbDwCgg=:",
            body=b"test",
        ),
        _parse_request("GET /v1/blobs/a", "range: bytes=0-9"),
        _parse_request("GET /v1/blobs/a?version=1", 'if-none-match: "1-abc"', "range: bytes=-5", 'if-range: "x"'),
        _parse_request("HEAD /v1/blobs/a%2Fb"),
        _parse_request("GET /v1/blobs/a/versions?after=0&limit=5"),
        _parse_request("GET /v1/blobs?prefix=a&after=a&limit=2&versions=true"),
        _parse_request("DELETE /v1/blobs/a?version=1&reason=old", "idempotency-key: k2"),
        _parse_request("POST /v1/undelete/a?version=1&reason=not%20old"),
        _parse_request("GET /v1/deleted?prefix=a&limit=3"),
        _parse_request("GET /v1/status/abc?wait=0"),
        _parse_request("GET /v1/info/a?version=2"),
        _parse_request("GET /v1/explain/a?segments=10"),
        _parse_request(
            "PATCH /v1/config", "content-type: application/merge-patch+json", body=b'{"delta":{"max_depth":3}}'
        ),
        _parse_request(
            "PATCH /v1/config", "content-type: application/json", body=b'{"features":{"algorithm":"odess"}}'
        ),
        _parse_request("POST /v1/dead/replay", body=b'{"letters":["0:1","1:99"]}'),
        _parse_request("POST /v1/gc", body=b'{"action":"run"}'),
        _parse_request("POST /v1/gc", body=b'{"action":"pause"}'),
        _parse_request("POST /v1/gc", body=b'{"action":"resume"}'),
        _parse_request("OPTIONS /v1/uploads"),
        _parse_request("POST /v1/uploads", tus, "upload-length: 11", "upload-metadata: key YS9i,a ZGItMQ=="),
        _parse_request("POST /v1/uploads", tus, octets, "upload-length: 3", "upload-metadata: key YQ==", body=b"abc"),
        _parse_request("HEAD /v1/uploads/{id}", tus),
        _parse_request("GET /v1/uploads/{id}"),
        _parse_request("PATCH /v1/uploads/{id}", tus, octets, "upload-offset: 0", body=b"hello"),
        _parse_request(
            "PATCH /v1/uploads/{id}",
            tus,
            octets,
            "upload-offset: 5",
            "upload-checksum: sha1 LCfRzUBuRyEbTnCVUTLRuUhlO6M=",
            body=b" world",
        ),
        _parse_request(
            "POST /v1/uploads/{id}", "x-http-method-override: PATCH", tus, octets, "upload-offset: 0", body=b"he"
        ),
        _parse_request("DELETE /v1/uploads/{id}", tus),
        _parse_request(
            "POST /login", "content-type: application/x-www-form-urlencoded", body=b"token=nk_1_x&next=%2Fgc"
        ),
        _parse_request("POST /logout", "cookie: nearkin=abc", body=b"csrf=1"),
        _parse_request("GET /ui/static/style.css", 'if-none-match: "x"'),
    ]
    tree, parts = _tree_and_parts()
    found += [
        _parse_request("PUT /v1/blobs/tree", f"x-nearkin-meta-content-type: {CONTENT_TYPE_TREE}", body=tree),
        _parse_request("PUT /v1/blobs/tree", f"content-type: {PARTS_MEDIA_TYPE}", "nearkin-base: 1", body=parts),
    ]
    plain = ("stats", "workers", "scrub", "config", "reduction", "tenants", "growth", "pipeline", "dead", "audit", "gc")
    found += [_parse_request(f"GET /v1/{name}") for name in plain]
    return found + [
        _parse_request(f"GET {path}") for path in ("/livez", "/readyz", "/openapi.json", "/asyncapi.json", "/")
    ]

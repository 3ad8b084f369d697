"""Provide a gateway with scripted faults.

Invariant: its answers are those of the real gateway, its faults follow the script in order.

    with ScriptedGateway(folder) as gateway:
        gateway.script("busy", "cut:1000", "ok")     # faults of the next requests; later requests succeed
        nearkin.connect(gateway.url)

It does what the real gateway never does: wrong bytes, cut answers, pages of another program. It keeps blobs in a
local store, and answers a put as scripted: committed at once, or accepted and committed later.
"""

from __future__ import annotations

import json
import ssl
import threading
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self
from urllib.parse import parse_qs, unquote, urlsplit

from nearkin.store import Store, open_store
from nearkin_shared import results_json
from nearkin_shared.errors import BadInput, NearkinError, NotFound
from nearkin_shared.results import Deletion, PutResult, VersionInfo

TOKEN = "scripted-token"
FAULTS = (
    "ok",
    "busy",
    "reset",
    "cut:BYTES",
    "deny",
    "read-only",
    "html",
    "rot",
    "redirect",
    "accept",
    "accept-fail",
    "lost-reply",
)


class ScriptedGateway:
    """The server; `seen` holds the requests in order."""

    def __init__(self, folder: Path) -> None:
        self._store = open_store(folder, create=True)
        self.lock = threading.RLock()
        """Held by each user of the store, which is not thread-safe."""
        self._script: deque[str] = deque()
        self.seen: list[tuple[str, str, dict[str, str]]] = []
        self.puts: dict[str, PutResult] = {}
        """Stored puts by idempotency key."""
        self.accepted: dict[str, tuple[int, PutResult | None]] = {}
        """By id: how many more polls answer `pending`, then the result."""
        self.settings: dict[str, Any] = {"features": {"algorithm": "finesse"}}
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Handler, self))
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
        self._store.close()

    @property
    def url(self) -> str:
        """Return the URL of the gateway."""
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def speak_tls(self, certificate: Path, key: Path) -> None:
        """Use TLS for all connections from now on."""
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(certificate, key)
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True)

    def script(self, *faults: str) -> None:
        """Add the faults of the next requests."""
        assert all(fault.partition(":")[0] in {known.partition(":")[0] for known in FAULTS} for fault in faults)
        self._script.extend(faults)

    @property
    def faults_left(self) -> int:
        """Return the number of faults still to come."""
        return len(self._script)

    def next_fault(self) -> str:
        """Return the scripted fault of the current request."""
        with self.lock:
            return self._script.popleft() if self._script else "ok"

    def store_as(self, key: str, body: bytes, headers: dict[str, str]) -> PutResult:
        """Put a blob, once for each idempotency key."""
        with self.lock:
            number = headers.get("idempotency-key", "")
            if number not in self.puts:
                meta = "x-nearkin-meta-"
                metadata = {
                    unquote(name.removeprefix(meta)): unquote(value)
                    for name, value in headers.items()
                    if name.startswith(meta)
                }
                announced = headers.get("x-content-sha256")
                sha256 = bytes.fromhex(announced) if announced else None
                self.puts[number] = self._store.put(key, body, metadata=metadata, sha256=sha256)
            return self.puts[number]

    def read(self) -> Store:
        """Return the store, to read from."""
        return self._store


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def __init__(self, gateway: ScriptedGateway, *arguments: Any) -> None:
        self.gateway = gateway
        super().__init__(*arguments)

    def log_message(self, format: str, *arguments: object) -> None:
        """Log nothing."""

    def handle(self) -> None:
        """Ignore broken connections, which this server causes deliberately."""
        try:
            super().handle()
        except (ConnectionError, OSError):
            self.close_connection = True

    def do_GET(self) -> None:
        self._serve()

    def do_PUT(self) -> None:
        self._serve()

    def do_PATCH(self) -> None:
        self._serve()

    def do_POST(self) -> None:
        self._serve()

    def do_DELETE(self) -> None:
        self._serve()

    def _serve(self) -> None:
        headers = {name.lower(): value for name, value in self.headers.items()}
        self.gateway.seen.append((self.command, self.path, headers))
        fault = self.gateway.next_fault()
        if fault == "reset":
            self.close_connection = True
            self.connection.close()
            return
        body = b"".join(self._body(headers))
        match fault:
            case "busy":
                self._problem(503, "unavailable", "busy for a moment", {"Retry-After": "0"})
            case "deny":
                self._problem(403, "denied", "the token has no scope write")
            case "read-only":
                self._problem(503, "read-only", "service.read_only is set", {"Retry-After": "5"})
            case "html":
                self._answer(200, b"<html>router login</html>", {"Content-Type": "text/html"})
            case "redirect":
                self._answer(302, b"", {"Location": "http://elsewhere.example/"})
            case _ if headers.get("authorization") != f"Bearer {TOKEN}":
                self._problem(401, "unauthorized", "no token, or one that is not known")
            case _:
                try:
                    with self.gateway.lock:
                        self._route(headers, body, fault)
                except NotFound as err:
                    self._problem(404, "not-found", str(err))
                except BadInput as err:
                    self._problem(400, "bad-input", str(err))
                except NearkinError as err:
                    self._problem(500, "internal", str(err))

    def _route(self, headers: dict[str, str], body: bytes, fault: str) -> None:
        split = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(split.query).items()}
        parts = [unquote(part) for part in split.path.split("/")[1:]]
        store = self.gateway.read()
        version = int(query["version"]) if "version" in query else None
        match [self.command, *parts]:
            case ["PUT", "v1", "blobs", key]:
                self._put(key, headers, body, fault)
            case ["GET", "v1", "blobs"]:
                every = query.get("versions") == "all"
                self._page("blobs", store.versions(query.get("prefix", ""), all_versions=every), query)
            case ["GET", "v1", "blobs", key]:
                self._get(store.info(key, version), headers, fault)
            case ["GET", "v1", "blobs", key, "versions"]:
                self._page("versions", [v for v in store.versions(key, all_versions=True) if v.key == key], query)
            case ["GET", "v1", "info", key]:
                self._json(200, results_json.info_json(store.info(key, version)))
            case ["GET", "v1", "status", number]:
                self._status(number)
            case ["GET", "v1", "stats"]:
                self._json(200, results_json.stats_json(store.stats()))
            case ["GET", "v1", "explain", key]:
                self._json(200, results_json.explain_json(store.explain(key, version), segments=True))
            case ["GET", "v1", "config"]:
                self._json(200, {"revision": 1, "settings": self.gateway.settings})
            case ["PATCH", "v1", "config"]:
                self.gateway.settings |= json.loads(body)
                self._json(200, {"revision": 2, "settings": self.gateway.settings})
            case _:
                self._route_deletion(headers, parts, query, fault)

    def _route_deletion(self, headers: dict[str, str], parts: list[str], query: dict[str, str], fault: str) -> None:
        store = self.gateway.read()
        version = int(query["version"]) if "version" in query else None
        match [self.command, *parts]:
            case ["GET", "v1", "deleted"]:
                self._page("deleted", store.list_deleted(query.get("prefix", "")), query)
            case ["DELETE", "v1", "blobs", key]:
                more = {"undelete_seconds": 60, "reason": query.get("reason", "")}
                self._change(store.deletions.delete, key, version, headers, fault, **more)
            case ["POST", "v1", "undelete", key]:
                self._change(store.deletions.undelete, key, version, headers, fault)
            case _:
                self._problem(404, "not-found", "no such resource")

    def _put(self, key: str, headers: dict[str, str], body: bytes, fault: str) -> None:
        result = self.gateway.store_as(key, body, headers)
        if fault == "lost-reply":
            self.close_connection = True
            self.connection.close()
        elif fault.startswith("accept"):
            number = f"{len(self.gateway.accepted):032x}-{0:016x}"
            self.gateway.accepted[number] = (2, None if fault == "accept-fail" else result)
            self._json(202, {"id": number, "state": "pending", "status": f"/v1/status/{number}"})
        elif fault == "rot":
            self._json(201, {**results_json.put_json(result), "digest": f"blake3:{0:064x}"})
        else:
            self._json(201, results_json.put_json(result))

    def _change(
        self, what: Callable[..., int], key: str, version: int | None, headers: dict[str, str], fault: str, **more: Any
    ) -> None:
        """Delete or undelete; a repetition with the same idempotency key gets the first answer."""
        count = what("default", key, version, request=bytes.fromhex(headers["idempotency-key"]), **more)
        if fault == "lost-reply":
            self.close_connection = True
            self.connection.close()
        else:
            self._answer(204, b"", {"X-Nearkin-Versions": str(count)})

    def _status(self, number: str) -> None:
        left, result = self.gateway.accepted[number]
        self.gateway.accepted[number] = (max(0, left - 1), result)
        status: dict[str, object] = {"id": number, "state": "pending", "failure": None}
        if not left and result is None:
            status |= {"state": "failed", "failure": "the pipeline refused it"}
        elif not left and result is not None:
            status |= {"state": "committed", **results_json.info_json(result.info), "seconds": result.seconds}
            status["ledger"] = results_json.ledger_json(result.ledger, result.seconds)
        self._json(200, status)

    def _page(self, name: str, found: list[VersionInfo] | list[Deletion], query: dict[str, str]) -> None:
        start, count = (
            int(query.get("after", "0")),
            min(int(query["limit"]), 3),
        )  # so that a few versions take several pages
        following = str(start + count) if start + count < len(found) else None
        page = [
            results_json.deletion_json(entry) if isinstance(entry, Deletion) else results_json.info_json(entry)
            for entry in found[start : start + count]
        ]
        self._json(200, {name: page, "next": following, "damaged": []})

    def _get(self, info: VersionInfo, headers: dict[str, str], fault: str) -> None:
        start, status = 0, 200
        stop = info.size_bytes
        etag = f'"{info.digest}"'
        if "range" in headers and headers.get("if-range", etag) == etag:
            first, _, last = headers["range"].removeprefix("bytes=").partition("-")
            start, stop, status = int(first), int(last) + 1 if last else stop, 206
        blob = self.gateway.read().get(info.key, info.version, start=start, stop=stop)
        body = bytearray(blob.read())
        if fault == "rot" and body:
            body[len(body) // 2] ^= 1
        headers_sent = {"Content-Type": "application/octet-stream", "ETag": etag}
        if status == 206:
            headers_sent["Content-Range"] = f"bytes {start}-{stop - 1}/{info.size_bytes}"
        if fault.startswith("cut:"):
            self._answer(status, bytes(body[: int(fault[4:])]), headers_sent, announced_bytes=len(body))
            self.close_connection = True
            return
        self._answer(status, bytes(body), headers_sent)

    def _body(self, headers: dict[str, str]) -> Iterator[bytes]:
        if headers.get("transfer-encoding") != "chunked":
            yield self.rfile.read(int(headers.get("content-length", "0")))
            return
        while size_bytes := int(self.rfile.readline(), 16):
            yield self.rfile.read(size_bytes)
            self.rfile.readline()
        self.rfile.readline()

    def _json(self, status: int, value: object) -> None:
        self._answer(status, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _problem(self, status: int, name: str, detail: str, more: dict[str, str] | None = None) -> None:
        body = {"type": f"urn:nearkin:problem:{name}", "title": name, "status": status, "detail": detail}
        self._answer(status, json.dumps(body).encode(), {"Content-Type": "application/problem+json", **(more or {})})

    def _answer(self, status: int, body: bytes, headers: dict[str, str], announced_bytes: int | None = None) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body) if announced_bytes is None else announced_bytes))
        self.end_headers()
        self.wfile.write(body)

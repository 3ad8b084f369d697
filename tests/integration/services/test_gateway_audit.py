"""Test the audit log: real requests, bounded under a flood, without secrets."""

from __future__ import annotations

import base64
import io
import json
import logging
import os
import re
import stat
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from nearkin_gateway.app import openapi_document
from nearkin_gateway.auth import tokens
from nearkin_gateway.http.connection_protocol import PIPELINED_MAX
from nearkin_gateway.monitoring import audit_events
from nearkin_gateway.monitoring.audit_events import COMMON_FIELDS, EVENTS, OPERATIONS, REASONS, UNAUDITED
from nearkin_gateway.monitoring.audit_log import VALUE_CHARACTERS_MAX, Actor, AuditLog
from nearkin_shared.config.loader import with_changes
from nearkin_shared.config.settings import Settings
from nearkin_shared.errors import ConfigError
from nearkin_shared.observability import log_setup, metrics
from tests.support.checks.waiting import until
from tests.support.servers.gateways import RunningGateway, embedded, running

CONTENT = b"content-that-must-not-be-logged"
BAD = "nk_00000000_" + "A" * 43
ROOT = Path(__file__).parents[3]
Records = list[dict[str, Any]]


class Collected(logging.Handler):
    """Collects the fields of audit records, and every line of the process as JSON."""

    def __init__(self) -> None:
        super().__init__()
        self.records: Records = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append({**record.fields, "level": record.levelno})  # type: ignore[attr-defined]

    def of(self, event: str) -> Records:
        return [record for record in self.records if record["event"] == event]


@pytest.fixture(autouse=True)
def _looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens, "LOOK_SECONDS", 0.0)


@pytest.fixture
def collected() -> Iterator[Collected]:
    handler, logger = Collected(), logging.getLogger(log_setup.AUDIT)
    level = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    yield handler
    logger.removeHandler(handler)
    logger.setLevel(level)


@pytest.fixture
def written() -> Iterator[io.StringIO]:
    """Yield what the process logs as JSON."""
    root = logging.getLogger()
    handlers, level, stream = root.handlers[:], root.level, io.StringIO()
    log_setup.start(with_changes(Settings(), {"logs": {"format": "json"}}), logging.INFO, stream)
    yield stream
    root.handlers[:] = handlers
    root.setLevel(level)


class World:
    """A gateway with a token of every scope."""

    def __init__(self, gateway: RunningGateway, file: Path) -> None:
        self.gateway, self.file = gateway, file
        self.made: list[str] = []

    def token(self, *scopes: str, tenant: str = "default", days: int | None = 1) -> str:
        text, _ = tokens.create(self.file, tenant, scopes or tokens.SCOPES, days=days)
        self.made.append(text)
        return text

    def client(self, *scopes: str, tenant: str = "default") -> httpx.Client:
        return self.gateway.client(self.token(*scopes, tenant=tenant))


def world(folder: Path, audit: dict[str, Any] | None = None, **bounds: float) -> Iterator[World]:
    file = folder / "tokens.json"
    tokens.create(file, "default", ["read"])
    changes = {"auth": {"tokens_file": str(file)}, "audit": audit or {}}
    with running(embedded(folder / "store", changes), **bounds) as gateway:
        yield World(gateway, file)


@pytest.fixture
def audited_world(tmp_path: Path) -> Iterator[World]:
    yield from world(tmp_path, AUDIT_WINDOW_SECONDS=1)


def store_and_read(client: httpx.Client) -> None:
    assert client.put("/v1/blobs/a/key", content=CONTENT).status_code == 201
    assert client.get("/v1/blobs/a/key", headers={"Range": "bytes=2-5"}).status_code == 206
    client.head("/v1/blobs/a/key")
    client.get("/v1/blobs?prefix=a/")
    assert client.put("/v1/checkpoints/a/key", content=CONTENT).status_code == 201
    assert len(client.get("/v1/checkpoints/a/key/versions").json()["versions"]) == 1
    assert client.get("/v1/checkpoints/a/key?version=1").content == CONTENT
    assert client.delete("/v1/checkpoints/a/key").status_code == 204
    until = "2026-01-01T00:00:00Z"  # over by now: it can be deleted
    assert client.post("/v1/retention/a/key", params={"until": until}).status_code in (200, 400)
    assert client.delete("/v1/blobs/a/key", params={"reason": "old"}).status_code == 204
    assert client.post("/v1/undelete/a/key").status_code == 204


def upload(client: httpx.Client) -> None:
    described = {"Upload-Metadata": "key " + base64.b64encode(b"resumed").decode(), "Tus-Resumable": "1.0.0"}
    made = client.post("/v1/uploads", headers={**described, "Upload-Length": str(len(CONTENT))})
    place, kind = made.headers["location"], {"Content-Type": "application/offset+octet-stream"}
    client.head(place, headers={"Tus-Resumable": "1.0.0"})
    sent = client.patch(place, content=CONTENT, headers={"Tus-Resumable": "1.0.0", "Upload-Offset": "0", **kind})
    assert sent.status_code == 204
    client.delete(place, headers={"Tus-Resumable": "1.0.0"})


def operate(client: httpx.Client) -> None:
    client.get("/v1/stats")
    client.get("/v1/workers")
    assert client.patch("/v1/config", json={"service": {"read_only": False}}).status_code == 200
    for action in ("run", "pause", "resume"):
        assert client.post("/v1/gc", json={"action": action}).status_code == 202
    client.get("/v1/dead")
    client.get("/v1/dead/letters/0:1")
    for verb in ("replay", "drop"):  # an embedded gateway has none: 404
        client.post(f"/v1/dead/{verb}", json={"letters": ["0:1", "0:2"]})


def browse(gateway: RunningGateway, text: str) -> None:
    with gateway.client() as browser:
        browser.headers["Origin"] = gateway.url
        assert browser.post("/login", data={"token": text}).status_code == 303
        page = browser.get("/").text
        csrf = re.search(r'<meta name="nearkin-csrf" content="([0-9a-f]{64})">', page)
        assert csrf is not None
        assert browser.post("/logout", data={"csrf": csrf[1]}).status_code == 303


def test_audit_events_come_from_real_requests(audited_world: World, collected: Collected, written: io.StringIO) -> None:
    """Produce each event of the table with its fields alone; no line of the log has a secret."""
    text = audited_world.token()
    with audited_world.gateway.client(text) as client:
        store_and_read(client)
        upload(client)
        operate(client)
        browse(audited_world.gateway, text)
        tokens.revoke(audited_world.file, text.split("_")[1])
        assert client.get("/v1/blobs").status_code == 401
    assert (
        httpx.get(f"{audited_world.gateway.url}/v1/blobs", headers={"Authorization": f"Bearer {BAD}"}).status_code
        == 401
    )
    until(lambda: EVENTS.keys() - {record["event"] for record in collected.records} <= {"audit.suppressed"})
    for record in collected.records:
        event = EVENTS[record["event"]]
        assert record.keys() <= {*COMMON_FIELDS, *event.fields, "level"}, record
        assert record["level"] == event.level
    until(lambda: "token.revoked" in written.getvalue())
    log = written.getvalue()
    for hidden in (*(made.split("_", 2)[2] for made in audited_world.made), BAD, BAD[3:11] + "_", CONTENT.decode()):
        assert hidden not in log


def test_audit_records_name_actor_key_and_result(audited_world: World, collected: Collected) -> None:
    """A read has tenant, token id, peer, key, version, range, bytes and the id of its answer."""
    with audited_world.client("read", "write") as client:
        client.put("/v1/blobs/a/key", content=CONTENT)
        answer = client.get("/v1/blobs/a/key", headers={"Range": "bytes=2-5"})
        client.get("/v1/blobs/absent")
        until(lambda: len(collected.of("blob.read")) == 2)
        found, absent = collected.of("blob.read")
        (stored,) = collected.of("blob.stored")
    number = audited_world.made[0].split("_")[1]
    actor = {"tenant": "default", "token": number, "peer": "127.0.0.1"}
    assert found == {
        "event": "blob.read", **actor, "key": "a/key", "version": 1, "range": "2-5", "bytes": 4, "result": 206,
        "request_id": answer.headers["x-request-id"], "level": logging.INFO,
    }  # fmt: skip
    assert (absent["key"], absent["result"]) == ("absent", 404)
    assert {name: stored[name] for name in ("key", "version", "bytes", "result")} == {
        "key": "a/key", "version": 1, "bytes": len(CONTENT), "result": 201,
    }  # fmt: skip


def test_failed_authentication_is_recorded_with_its_reason(audited_world: World, collected: Collected) -> None:
    """Reasons are told apart; the id of a token is recorded only once its secret was proved."""
    url, expired = audited_world.gateway.url, audited_world.token("read")
    file = json.loads(audited_world.file.read_text())
    file["tokens"][-1]["expires"] = 1
    audited_world.file.write_text(json.dumps(file))
    reader, stranger = audited_world.token("read"), audited_world.token("read", "write", tenant="other")
    for given in (expired, reader[:-1] + ("A" if reader[-1] != "A" else "B")):
        assert httpx.get(f"{url}/v1/blobs", headers={"Authorization": f"Bearer {given}"}).status_code == 401
    for method, path, given in (("PUT", "/v1/blobs/x", reader), ("PUT", "/v1/blobs/x", stranger)):
        refused = httpx.request(method, f"{url}{path}", content=b"x", headers={"Authorization": f"Bearer {given}"})
        assert refused.status_code == 403
    httpx.get(f"{url}/v1/blobs")
    httpx.get(f"{url}/v1/blobs", cookies={"nearkin-session": "1.forged"})
    httpx.post(f"{url}/login", data={"token": BAD}, headers={"Origin": "https://elsewhere.example"})
    until(lambda: len(collected.of("auth.failed")) >= 7)
    failed = collected.of("auth.failed")
    found = {(record["reason"], record["via"]): record.get("token") for record in failed if "repeats" not in record}
    assert found == {
        ("expired", "bearer"): expired.split("_")[1],
        ("unknown", "bearer"): None,
        ("scope", "bearer"): reader.split("_")[1],
        ("foreign-tenant", "bearer"): stranger.split("_")[1],
        ("missing", "session"): None,
        ("session", "session"): None,
        ("cross-site", "login"): None,
    }
    assert {reason for reason, _ in found} <= set(REASONS)


def test_flood_of_bad_tokens_costs_few_records(audited_world: World, collected: Collected) -> None:
    """Summarise 1,000 requests with bad tokens: one first record, and counts of all others."""
    before, began = metrics.AUDIT_EVENTS.labels("auth.failed")._value.get(), time.monotonic()
    for first in range(0, 1000, PIPELINED_MAX):
        heads = [
            f"GET /v1/blobs HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer nk_{first + number:08x}_{'A' * 43}\r\n"
            for number in range(PIPELINED_MAX)
        ]
        audited_world.gateway.raw(("\r\n".join(heads) + "Connection: close\r\n\r\n").encode())

    def count_failures() -> int:
        return sum(record.get("repeats", 1) for record in collected.of("auth.failed"))

    until(lambda: count_failures() == 1000, count_failures)
    windows = time.monotonic() - began + 2  # of a second each: a first record and a summary
    assert len(collected.records) <= 2 * windows < 100
    assert metrics.AUDIT_EVENTS.labels("auth.failed")._value.get() - before == 1000
    assert not [record for record in collected.records if "token" in record]


def test_reads_beyond_the_rate_are_counted_and_changes_kept(tmp_path: Path, collected: Collected) -> None:
    """Beyond AUDIT_RECORDS_PER_SECOND reads are summed up by event; no deletion is left out."""
    for audited_world in world(tmp_path, AUDIT_WINDOW_SECONDS=3600, AUDIT_RECORDS_PER_SECOND=5):
        with audited_world.client() as client:
            for number in range(8):
                client.put(f"/v1/blobs/{number}", content=b"x")
                client.delete(f"/v1/blobs/{number}")
            began = time.monotonic()
            for _ in range(40):
                client.head("/v1/blobs/0")
            seconds = time.monotonic() - began
        until(lambda: len(collected.of("blob.deleted")) == 8)
    described = collected.of("blob.described")
    (suppressed,) = [record for record in collected.of("audit.suppressed") if record["suppressed"] == "blob.described"]
    assert len(described) + suppressed["count"] == 40
    assert len(described) <= 5 + 5 * seconds + 1
    assert len(collected.of("blob.stored")) == 8


def test_success_is_recorded_once_in_a_window(tmp_path: Path, collected: Collected) -> None:
    """The first use of a token from an address is a record, further ones are a number."""
    for audited_world in world(tmp_path, AUDIT_WINDOW_SECONDS=3600):
        with audited_world.client("read") as client:
            for _ in range(10):
                client.get("/v1/blobs")
    first, summary = collected.of("auth.succeeded")
    assert (first["via"], first.get("repeats"), summary["repeats"]) == ("bearer", None, 9)
    assert first["token"] == summary["token"] == audited_world.made[0].split("_")[1]


@pytest.mark.parametrize(("audit", "kept"), [({"records": "changes"}, {"blob.stored"}), ({"records": "none"}, set())])
def test_reads_and_the_whole_log_can_be_turned_off(
    tmp_path: Path, collected: Collected, audit: dict[str, Any], kept: set[str]
) -> None:
    """`changes` leaves changes and authentication, `none` nothing."""
    for audited_world in world(tmp_path, audit):
        with audited_world.client() as client:
            client.put("/v1/blobs/a", content=b"x")
            client.get("/v1/blobs/a")
            client.get("/v1/blobs")
    found = {record["event"] for record in collected.records} - {"token.created", "auth.succeeded"}
    assert found == kept


def test_audit_values_are_bounded_and_escaped(collected: Collected) -> None:
    """Bound the length of a key in a record.

    Line ends, invisible characters, backslashes forge none.
    """
    log = AuditLog(Settings().audit)
    log.record("blob.read", Actor("default"), {"key": "a\nb\x7f\u202e\u2028\\n" + "k" * 5000, "version": 1})
    (record,) = collected.records
    assert record["key"].startswith("a\\nb\\x7f\\u202e\\u2028\\\\nkkk")
    assert len(record["key"]) < VALUE_CHARACTERS_MAX + 40
    assert record["version"] == 1


def test_audit_file_is_private_json_and_survives_rotation(tmp_path: Path) -> None:
    """Write `audit.path` with mode 0600 and these records alone; open it again once moved."""
    path, log = tmp_path / "audit.json", AuditLog(Settings().audit)
    logging.getLogger(log_setup.AUDIT).setLevel(logging.INFO)
    with log_setup.audit_file(with_changes(Settings(), {"audit": {"path": str(path)}})):
        log.record("blob.read", Actor("default", "01234567", "::1"), {"key": "é", "result": 200})
        path.rename(tmp_path / "audit.1")
        log.record("blob.deleted", Actor("default"), {"key": "b"})
    first, second = (json.loads(file.read_text()) for file in (tmp_path / "audit.1", path))
    assert (first["event"], first["key"], first["peer"], first["logger"]) == ("blob.read", "é", "::1", log_setup.AUDIT)
    assert second["event"] == "blob.deleted"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    (tmp_path / "link").symlink_to(path)
    linked = with_changes(Settings(), {"audit": {"path": str(tmp_path / "link")}})
    with pytest.raises(ConfigError, match=r"audit\.path"), log_setup.audit_file(linked):
        pass


def events_in(path: Path) -> list[str]:
    return [json.loads(line)["event"] for line in path.read_text().splitlines()] if path.is_file() else []


def block_with_fifo(path: Path) -> None:
    path.rename(path.with_name("moved.json"))
    os.mkfifo(path)


@pytest.mark.parametrize(
    ("block", "unblock"),
    [
        (lambda path: path.parent.rename(path.parent.with_name("away")),
         lambda path: path.parent.with_name("away").rename(path.parent)),
        (block_with_fifo, os.unlink),
    ],
    ids=["folder-moved", "fifo"],
)  # fmt: skip
def test_blocked_audit_path_loses_records_and_no_request(
    tmp_path: Path, collected: Collected, block: Callable[[Path], Any], unblock: Callable[[Path], Any]
) -> None:
    """Continue puts while `audit.path` cannot be opened; count lost records.

    Use it once it can be.
    """
    path = tmp_path / "log" / "audit.json"
    path.parent.mkdir()
    lost = metrics.AUDIT_LOST._value
    before = lost.get()
    bad = {"Authorization": f"Bearer {BAD}"}
    with log_setup.audit_file(with_changes(Settings(), {"audit": {"path": str(path)}})):
        for audited_world in world(tmp_path, AUDIT_WINDOW_SECONDS=1):
            url = f"{audited_world.gateway.url}/v1/blobs"
            with audited_world.client() as client:
                assert client.put("/v1/blobs/a", content=b"1").status_code == 201
                block(path)
                assert [client.put("/v1/blobs/a", content=b"x").status_code for _ in range(3)] == [201] * 3
                with httpx.Client(headers=bad) as stranger:

                    def is_repeat_summarized(stranger: httpx.Client = stranger, url: str = url) -> bool:
                        """Fail twice within one window: on a loaded machine two single requests may take longer."""
                        assert [stranger.get(url).status_code for _ in range(2)] == [401] * 2
                        return any("repeats" in record for record in collected.of("auth.failed"))

                    until(is_repeat_summarized, poll_seconds=0.5)
                until(lambda: lost.get() - before >= 5, lost.get)  # three puts, a failure, and its summary
                unblock(path)
                assert client.put("/v1/blobs/b", content=b"x").status_code == 201
            until(lambda: "blob.stored" in events_in(path)[-2:], lambda: events_in(path))

            def is_failure_recorded(url: str = url) -> bool:
                httpx.get(url, headers=bad)
                return "auth.failed" in events_in(path)

            until(is_failure_recorded, lambda: events_in(path))


def test_audit_path_with_a_hard_link_is_refused(tmp_path: Path) -> None:
    """Append to no file that has another name, neither at start nor after a rotation."""
    path, victim, log = tmp_path / "audit.json", tmp_path / "victim", AuditLog(Settings().audit)
    victim.write_text("as it was")
    settings = with_changes(Settings(), {"audit": {"path": str(path)}})
    logging.getLogger(log_setup.AUDIT).setLevel(logging.INFO)
    with log_setup.audit_file(settings):
        path.unlink()
        path.hardlink_to(victim)
        before = metrics.AUDIT_LOST._value.get()
        log.record("blob.read", Actor("default"), {"key": "a"})
        assert metrics.AUDIT_LOST._value.get() == before + 1
    with pytest.raises(ConfigError, match=r"audit\.path.*2 hard links"), log_setup.audit_file(settings):
        pass
    assert victim.read_text() == "as it was"


def test_audit_windows_end_after_a_summary_that_failed(
    audited_world: World, collected: Collected, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error in one summary is logged, and later windows are summarized."""
    emit, failed = collected.emit, list[logging.LogRecord]()

    def fail_once(record: logging.LogRecord) -> None:
        if "repeats" in record.fields and not failed:  # type: ignore[attr-defined]
            failed.append(record)
            raise RuntimeError("no summary today")
        emit(record)

    monkeypatch.setattr(collected, "emit", fail_once)

    def is_summarized() -> bool:
        for _ in range(2):
            httpx.get(f"{audited_world.gateway.url}/v1/blobs", headers={"Authorization": f"Bearer {BAD}"})
        return any("repeats" in record for record in collected.of("auth.failed"))

    until(is_summarized)
    assert failed


def test_operations_have_an_audit_event() -> None:
    """A route that is added needs an event, or a reason to have none."""
    document = openapi_document()
    operations = {found["operationId"] for methods in document["paths"].values() for found in methods.values()}
    assert operations == OPERATIONS.keys() | UNAUDITED
    assert set(OPERATIONS.values()) <= EVENTS.keys()
    assert not Counter(UNAUDITED) & Counter(OPERATIONS)


def test_docs_page_has_the_table_of_audit_events() -> None:
    """Name every reason on the page; the generator has nothing to write.

    The generator is `python -m nearkin_gateway.monitoring.audit_events`.
    """
    page = (ROOT / audit_events.PAGE).read_text()
    assert audit_events.with_event_table(page) == page
    assert all(f"`{reason}`" in page for reason in REASONS)

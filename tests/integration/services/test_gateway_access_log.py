"""The access log: a line for each request, with an id that the answer carries."""

from __future__ import annotations

import logging
import re

import httpx
import pytest

from tests.support.checks.waiting import until
from tests.support.servers.gateways import RunningGateway


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "nearkin.access"]


def test_access_log_has_a_line_with_the_id_of_the_answer(
    client: httpx.Client, caplog: pytest.LogCaptureFixture
) -> None:
    """Write method, path, status, bytes and id in one line; keep a given id, omit the query."""
    with caplog.at_level(logging.INFO, "nearkin.access"):
        answer = client.put("/v1/blobs/logged?wait=1", content=b"12345", headers={"X-Request-ID": "ci-7.a"})
        made = client.get("/v1/blobs/absent").headers["x-request-id"]
        client.get("/readyz")
        until(lambda: len(lines(caplog)) >= 2)
        first, second = lines(caplog)
    assert answer.headers["x-request-id"] == "ci-7.a"
    assert re.fullmatch(
        r'method="PUT" path="/v1/blobs/logged" status=201 seconds=[\d.]+ received=5 sent=\d+ peer=127.0.0.1 '
        r"request=ci-7.a",
        first,
    )
    assert "status=404" in second
    assert second.endswith(f"request={made}")
    assert re.fullmatch("[0-9a-f]{16}", made)


def test_access_log_cannot_be_forged(
    gateway: RunningGateway, client: httpx.Client, caplog: pytest.LogCaptureFixture
) -> None:
    """Keep quotes, escapes and length of a path inside one bounded line without any token."""
    with caplog.at_level(logging.INFO, "nearkin.access"):
        gateway.raw(
            b'GET /v1/x"\\status=200"' + b"a" * 2000 + b" HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
            b"X-Request-ID: forged status=200\r\nAuthorization: Bearer nk_00000000_secretsecretsecretsecret\r\n\r\n"
        )
        (line,) = until(lambda: lines(caplog))
    assert r'path="/v1/x\"\\status=200\"aaa' in line
    assert len(line) < 600
    assert "forged" not in line
    assert "secret" not in line

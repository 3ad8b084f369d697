"""Test the OpenAPI document against the live gateway: every response is documented."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema_rs
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from nearkin_gateway.auth import tokens
from tests.support.checks.waiting import until
from tests.support.servers.gateways import RunningGateway, embedded, running

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]


@schemathesis.serializer("application/offset+octet-stream")
def octets(_context: Any, value: Any) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode()


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningGateway]:
    folder = tmp_path_factory.mktemp("openapi")
    tokens.create(folder / "tokens.json", "default", ["read"])
    changes = {
        "gateway": {"requests_per_second": 0},
        "auth": {"tokens_file": str(folder / "tokens.json")},
    }
    with running(embedded(folder / "store", changes), SLOW_SECONDS=2) as found:
        yield found


@pytest.fixture(scope="module")
def token(gateway: RunningGateway) -> str:
    folder = gateway.store.parent
    text = tokens.create(folder / "tokens.json", "default", ["read", "write", "delete", "admin", "operator"])[0]
    with gateway.client(text) as client:
        # A new token is taken within a second.
        until(lambda: client.put("/v1/blobs/there", content=b"x" * 1000).status_code == 201)
    return text


@pytest.fixture(scope="module")
def api(gateway: RunningGateway, token: str) -> Any:
    return schemathesis.openapi.from_url(f"{gateway.url}/openapi.json")


OPERATIONS = (
    "putBlob", "postBlob", "getBlob", "headBlob", "deleteBlob", "undeleteBlob", "extendRetention",
    "putCheckpoint", "listCheckpoints", "getCheckpoint", "deleteCheckpoints",
    "listDeleted",
    "listBlobs", "listVersions", "getInfo", "getStatus",
    "explain", "getStats", "listWorkers", "getScrub", "getConfig", "patchConfig", "livez", "readyz",
    "getReduction", "listTenants", "getGrowth", "getPipeline", "listDead", "showDead", "replayDead", "dropDead",
    "getAudit", "getGc", "changeGc",
    "tusOptions", "createUpload", "headUpload", "getUpload", "patchUpload", "deleteUpload",
)  # fmt: skip


@pytest.mark.parametrize("operation_id", OPERATIONS)
def test_responses_are_all_documented(api: Any, token: str, operation_id: str) -> None:
    operation = api.find_operation_by_id(operation_id)

    @settings(
        max_examples=30,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy())
    def holds(case: Any) -> None:
        response = case.call(headers={"Authorization": f"Bearer {token}"}, timeout=60)
        case.validate_response(response, checks=CHECKS)
        if "different" not in response.text:  # two digests, each of which is valid
            assert problem_of(response) not in BOUNDS - BEYOND.get(operation_id, set()), response.text

    holds()


BOUNDS = {
    *("invalid", "bad-idempotency-key", "bad-digest", "bad-checksum", "bad-length", "bad-offset", "tus-version"),
    *("bad-condition", "bad-json", "bad-media-type"),
}
"""Problems of requests that the document rules out: none that is made from it may be refused so."""
BEYOND = {"createUpload": {"bad-length"}}
"""Cases no schema can express: an upload has a length unless it is a final one."""


def problem_of(response: Any) -> str | None:
    """Return the name of the problem that a response is, None for another one."""
    if response.headers.get("content-type", [""])[0] != "application/problem+json" or not response.content:
        return None
    return str(response.json()["type"]).rpartition(":")[2]


OUTSIDE = [
    ("put", "/v1/blobs/k", "Idempotency-Key", "x" * 256),
    ("put", "/v1/blobs/k", "Content-MD5", "AAAA"),
    ("put", "/v1/blobs/k", "Content-Digest", "sha-256=:AAAA:"),
    ("put", "/v1/blobs/k", "X-Content-SHA256", "0" * 63),
    ("delete", "/v1/blobs/k", "Idempotency-Key", "x" * 256),
    ("post", "/v1/undelete/k", "Idempotency-Key", "x" * 256),
    ("post", "/v1/uploads", "Tus-Resumable", "0.2.2"),
    ("post", "/v1/uploads", "Upload-Length", "-1"),
    ("post", "/v1/uploads", "Upload-Concat", "whole"),
    ("patch", "/v1/uploads/" + "0" * 32, "Tus-Resumable", "0.2.2"),
    ("head", "/v1/uploads/" + "0" * 32, "Tus-Resumable", "0.2.2"),
    ("delete", "/v1/uploads/" + "0" * 32, "Tus-Resumable", "0.2.2"),
]


@pytest.mark.parametrize(("method", "path", "header", "value"), OUTSIDE)
def test_header_outside_its_documented_bounds_is_refused(
    gateway: RunningGateway, token: str, method: str, path: str, header: str, value: str
) -> None:
    """Refuse in code what the document rules out: no bound is documented only."""
    document = httpx.get(f"{gateway.url}/openapi.json").json()
    pattern = {"/v1/blobs/k": "/v1/blobs/{key}", "/v1/undelete/k": "/v1/undelete/{key}"}.get(
        path, "/v1/uploads/{id}" if path.endswith("0" * 32) else path
    )
    parameters = document["paths"][pattern][method]["parameters"]
    (found,) = [parameter for parameter in parameters if parameter["name"].lower() == header.lower()]
    schema = found["schema"]
    assert schema.keys() & {"pattern", "maxLength", "enum"}, found
    assert list(jsonschema_rs.validator_for(schema).iter_errors(value))
    assert found["required"] == (header in ("Tus-Resumable",))
    with gateway.client(token) as client:
        answer = client.request(method, path, headers={"Tus-Resumable": "1.0.0", header: value})
        assert answer.status_code in (400, 412), answer.text


def test_document_is_complete(gateway: RunningGateway) -> None:
    document = httpx.get(f"{gateway.url}/openapi.json").json()
    assert document["openapi"].startswith("3.1")
    assert "HTTPBearer" in document["components"]["securitySchemes"]
    seen = set()
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            assert operation["operationId"] in OPERATIONS
            named = f"{method} {path}"
            assert operation.get("description"), named
            assert operation["operationId"] not in seen, named
            seen.add(operation["operationId"])
            assert {"405", "431"} <= set(operation["responses"]), named
            if "security" in operation:
                assert {"401", "403", "429"} <= set(operation["responses"]), named
            for status, answer in operation["responses"].items():
                assert answer.get("description"), f"{named} {status}"
                if int(status) >= 400:
                    assert list(answer["content"]) == ["application/problem+json"], f"{named} {status}"

"""The page that renders the OpenAPI document, over HTTP."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from nearkin_gateway.app import openapi_document
from nearkin_gateway.auth import tokens
from nearkin_gateway.dashboard.api_reference import describe_schema
from nearkin_gateway.dashboard.rendering import POLICY
from tests.support.servers.gateways import RunningGateway, embedded, running


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningGateway]:
    folder: Path = tmp_path_factory.mktemp("reference")
    tokens.create(folder / "tokens.json", "default", ["read"])
    with running(embedded(folder / "store", {"auth": {"tokens_file": str(folder / "tokens.json")}})) as found:
        yield found


def _section(page: str, name: str) -> str:
    found = re.search(rf'<section class="card" id="{name}".*?</section>', page, re.DOTALL)
    assert found is not None, name
    return found[0]


def test_docs_page_has_a_section_for_each_operation(gateway: RunningGateway) -> None:
    """Show each route's method, path, scopes, parameters, bodies, statuses without a session."""
    answer = httpx.get(f"{gateway.url}/docs", timeout=60)
    assert answer.status_code == 200
    for path, operations in openapi_document()["paths"].items():
        for method, operation in operations.items():
            section = _section(answer.text, operation["operationId"])
            assert f"{method.upper()} {path}</h2>" in section
            scopes = {scope for entry in operation.get("security", ()) for scope in entry["HTTPBearer"]}
            assert set(re.findall(r'<span class="tag">(\w+)</span>', section)) == scopes, path
            for parameter in operation.get("parameters", ()):
                assert f'<th scope="row" class="mono">{parameter["name"]}</th>' in section
            for status in operation["responses"]:
                assert f'<th scope="row">{status}</th>' in section
            for media_type in operation.get("requestBody", {}).get("content", ()):
                assert media_type in section
    assert "at least 1, at most 1000, default 100" in _section(answer.text, "listBlobs")
    for name in openapi_document()["components"]["schemas"]:
        assert f'id="schema-{name}"' in answer.text
    targets = set(re.findall(r'href="#([^"]+)"', answer.text))
    assert targets <= set(re.findall(r'id="([^"]+)"', answer.text)), "every link within the page has its target"


def test_docs_page_loads_nothing_from_elsewhere(gateway: RunningGateway) -> None:
    """The page keeps the dashboard's policy: no inline script or style, no other host."""
    answer = httpx.get(f"{gateway.url}/docs", timeout=60)
    assert answer.headers["content-security-policy"] == POLICY
    assert not re.search(r"<style|\sstyle=|<script(?![^>]*\bsrc=)|\son\w+=", answer.text)
    assert all(url.startswith(("/", "#")) for url in re.findall(r'(?:src|href)="([^"]*)"', answer.text))


def test_dashboard_pages_link_to_the_docs_page(gateway: RunningGateway) -> None:
    """Every page of the dashboard links to the reference."""
    assert '<a href="/docs">API reference</a>' in httpx.get(f"{gateway.url}/login").text


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"type": "integer", "minimum": 1, "maximum": 9}, "integer, at least 1, at most 9"),
        ({"anyOf": [{"type": "string", "maxLength": 4}, {"type": "null"}]}, "string, at most 4 characters or null"),
        (
            {"type": "array", "items": {"$ref": "#/components/schemas/Page"}, "maxItems": 3},
            "array of Page, at most 3 items",
        ),
        ({"enum": ["run", "pause"], "default": "run"}, "'run' or 'pause', default 'run'"),
        ({"type": "string", "format": "date-time"}, "string (date-time)"),
        ({}, "any"),
    ],
)
def test_describe_schema_names_type_and_bounds(schema: dict[str, object], text: str) -> None:
    """Types and bounds are described in words."""
    assert describe_schema(schema) == text

"""Prepare the OpenAPI document for the page that renders it.

OpenAPI document -> Section per tag -> Operation per route -> parameters, bodies, responses
                 -> Schema per component
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nearkin_shared.utils.frozen import frozen

UNTAGGED = "other"
_REF = "#/components/schemas/"
_BOUNDS = (
    ("minimum", "at least {}"),
    ("exclusiveMinimum", "more than {}"),
    ("maximum", "at most {}"),
    ("exclusiveMaximum", "less than {}"),
    ("minLength", "at least {} characters"),
    ("maxLength", "at most {} characters"),
    ("minItems", "at least {} items"),
    ("maxItems", "at most {} items"),
    ("pattern", "pattern {}"),
    ("default", "default {!r}"),
)
"""Text for each bound of a schema."""


@frozen
class SchemaField:
    """A parameter of a route or a property of a schema."""

    name: str
    location: str
    """`path`, `query` or `header`; empty for a property."""
    kind: str
    required: bool
    description: str
    schema: str = ""
    """The component that the field refers to."""


@frozen
class Content:
    """A body in one media type."""

    media_type: str
    kind: str
    schema: str
    fields: tuple[SchemaField, ...]


@frozen
class DocumentedResponse:
    """A response of a route."""

    status: str
    description: str
    headers: tuple[SchemaField, ...]
    contents: tuple[Content, ...]


@frozen
class Operation:
    """A method of a path."""

    name: str
    method: str
    path: str
    scopes: tuple[str, ...]
    """The route needs a token with one of these; none: it needs no token."""
    description: str
    parameters: tuple[SchemaField, ...]
    bodies: tuple[Content, ...]
    answers: tuple[DocumentedResponse, ...]


@frozen
class Schema:
    """A component that bodies refer to."""

    name: str
    description: str
    fields: tuple[SchemaField, ...]


@frozen
class Reference:
    """All that the page shows."""

    sections: tuple[tuple[str, tuple[Operation, ...]], ...]
    schemas: tuple[Schema, ...]


def read_document(document: Mapping[str, Any]) -> Reference:
    """Return what the page shows of an OpenAPI document, in the document's order."""
    sections: dict[str, list[Operation]] = {}
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            tag = next(iter(operation.get("tags", ())), UNTAGGED)
            sections.setdefault(tag, []).append(_operation(path, method, operation))
    components = document.get("components", {}).get("schemas", {})
    schemas = [
        Schema(name, schema.get("description", ""), _properties(schema)) for name, schema in sorted(components.items())
    ]
    return Reference(tuple((tag, tuple(found)) for tag, found in sections.items()), tuple(schemas))


def describe_schema(schema: Mapping[str, Any]) -> str:
    """Return a schema's type and bounds in words, such as `integer, at least 1, at most 1000`."""
    return ", ".join([_type_of(schema), *_bounds_of(schema)])


def _operation(path: str, method: str, operation: Mapping[str, Any]) -> Operation:
    scopes = [scope for entry in operation.get("security", ()) for needed in entry.values() for scope in needed]
    return Operation(
        name=operation["operationId"],
        method=method.upper(),
        path=path,
        scopes=tuple(scopes),
        description=operation.get("description", ""),
        parameters=tuple(
            _field(entry["name"], entry["in"], entry.get("schema", {}), entry)
            for entry in operation.get("parameters", ())
        ),
        bodies=_contents(operation.get("requestBody", {})),
        answers=tuple(
            DocumentedResponse(
                status,
                answer.get("description", ""),
                tuple(
                    _field(name, "header", header.get("schema", {}), header)
                    for name, header in answer.get("headers", {}).items()
                ),
                _contents(answer),
            )
            for status, answer in sorted(operation["responses"].items())
        ),
    )


def _contents(holder: Mapping[str, Any]) -> tuple[Content, ...]:
    """Return the bodies of a request or a response."""
    found = []
    for media_type, content in holder.get("content", {}).items():
        schema = content.get("schema", {})
        found.append(Content(media_type, describe_schema(schema), _component_of(schema), _properties(schema)))
    return tuple(found)


def _properties(schema: Mapping[str, Any]) -> tuple[SchemaField, ...]:
    required = schema.get("required", ())
    return tuple(
        _field(name, "", entry, {**entry, "required": name in required})
        for name, entry in schema.get("properties", {}).items()
    )


def _field(name: str, location: str, schema: Mapping[str, Any], about: Mapping[str, Any]) -> SchemaField:
    return SchemaField(
        name,
        location,
        describe_schema(schema),
        bool(about.get("required")),
        about.get("description", schema.get("description", "")),
        _component_of(schema),
    )


def _type_of(schema: Mapping[str, Any]) -> str:
    if "$ref" in schema:
        return str(schema["$ref"]).removeprefix(_REF)
    if "const" in schema or "enum" in schema:
        return " or ".join(repr(value) for value in schema.get("enum", [schema.get("const")]))
    for name in ("anyOf", "oneOf", "allOf"):
        if name in schema:
            return " or ".join(describe_schema(choice) for choice in schema[name])
    kind = schema.get("type", "any")
    if kind == "array":
        return f"array of {describe_schema(schema.get('items', {}))}"
    if isinstance(kind, list):
        kind = " or ".join(kind)
    return f"{kind} ({schema['format']})" if "format" in schema else str(kind)


def _bounds_of(schema: Mapping[str, Any]) -> list[str]:
    return [text.format(schema[name]) for name, text in _BOUNDS if schema.get(name) is not None]


def _component_of(schema: Mapping[str, Any]) -> str:
    """Return the component that a schema refers to, directly, by items or by choices; or ""."""
    if "$ref" in schema:
        return str(schema["$ref"]).removeprefix(_REF)
    inner = [schema["items"]] if "items" in schema else [*schema.get("anyOf", ()), *schema.get("oneOf", ())]
    return next((found for entry in inner if (found := _component_of(entry))), "")

# size: shared by routes and OpenAPI
"""Bounds of request headers, documented in OpenAPI and enforced where a header is read.

FastAPI would answer 422 to a header out of bounds: here each has its own problem, and tus requires other statuses.
"""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Header

from nearkin_gateway.http.problems import TUS_VERSION
from nearkin_gateway.uploads.tus_headers import METADATA_CHARACTERS_MAX
from nearkin_gateway.uploads.upload_service import IDEMPOTENCY_KEY_CHARACTERS_MAX

REQUIRED = "x-nearkin-required"
"""Marks a header that FastAPI sees as optional: `document_parameters` moves the mark to its parameter."""
_UPLOAD_URL = "([^\\s#?]*/)?uploads/[0-9a-f]{32}"
_DIGEST = (
    "(sha-256=:[A-Za-z0-9+/]{43}=:|sha-512=:[A-Za-z0-9+/]{86}==:|md5=:[A-Za-z0-9+/]{22}==:|sha=:[A-Za-z0-9+/]{27}=:)"
)
_VERSIONS = "[1-9][0-9]{0,18}(-[1-9][0-9]{0,18})?"

IDEMPOTENCY_KEY: dict[str, Any] = {"minLength": 1, "maxLength": IDEMPOTENCY_KEY_CHARACTERS_MAX}
CONTENT_MD5: dict[str, Any] = {"pattern": "^[A-Za-z0-9+/]{22}==$"}
CONTENT_DIGEST: dict[str, Any] = {"pattern": f"^{_DIGEST}(, ?{_DIGEST})*$"}
"""Of the algorithms that are checked; members of others are ignored (RFC 9530, section 2)."""
CONTENT_SHA256: dict[str, Any] = {"pattern": "^[0-9a-fA-F]{64}$"}
TUS_RESUMABLE: dict[str, Any] = {"enum": [TUS_VERSION], REQUIRED: True}
UPLOAD_LENGTH: dict[str, Any] = {"pattern": "^[0-9]{1,19}$"}
UPLOAD_OFFSET: dict[str, Any] = {"pattern": "^[0-9]{1,19}$", REQUIRED: True}
UPLOAD_METADATA: dict[str, Any] = {"maxLength": METADATA_CHARACTERS_MAX}
UPLOAD_CHECKSUM: dict[str, Any] = {"pattern": "^(sha1 [A-Za-z0-9+/]{27}=|sha256 [A-Za-z0-9+/]{43}=)$"}
UPLOAD_CONCAT: dict[str, Any] = {"pattern": f"^(partial|final;{_UPLOAD_URL}( {_UPLOAD_URL})*)$"}
UPLOAD_ID: dict[str, Any] = {"pattern": "^[0-9a-f]{32}$"}
PutIfMatch = Annotated[str | None, Header(description="Only over this newest version (ETag); checked at the commit.")]
PutIfNoneMatch = Annotated[
    str | None, Header(description="`*`: only where there is no version; checked at the commit.")
]
NearkinBase = Annotated[
    str | None,
    Header(
        description="The version of the same key whose ranges a body of `application/vnd.nearkin.parts` copies.",
        json_schema_extra={"pattern": "^[1-9][0-9]{0,18}$"},
    ),
]
NearkinCheckpoints = Annotated[
    str | None,
    Header(
        description="The checkpoints of the key whose ranges such a body copies, behind the base: `1-3,7`.",
        json_schema_extra={"pattern": f"^{_VERSIONS}(, ?{_VERSIONS})*$"},
    ),
]


def document_parameters(operation: dict[str, Any]) -> None:
    """Document marked headers of an OpenAPI operation as required, no parameter as null.

    An optional parameter is no JSON value: the text `null` is refused.
    """
    for parameter in operation.get("parameters", ()):
        schema = parameter.get("schema", {})
        if schema.pop(REQUIRED, False):
            parameter["required"] = True
        kinds = [kind for kind in schema.get("anyOf", ()) if kind != {"type": "null"}]
        if len(kinds) == 1:
            del schema["anyOf"]
            schema.update(kinds[0])

"""List, show, replay and drop dead letters, for operators.

Invariant: a letter is replayed or dropped once, whichever gateway or command is asked.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import unquote

from fastapi import APIRouter, Path, Query, Request
from starlette.responses import JSONResponse, Response

from nearkin_gateway.auth.access import Operator
from nearkin_gateway.http import response_models
from nearkin_gateway.http.problems import Problem, responses
from nearkin_gateway.http.request_bodies import json_member
from nearkin_gateway.middleware.audit_requests import annotate
from nearkin_gateway.state import Gateway, gateway_of
from nearkin_shared.errors import BadInput
from nearkin_shared.kafka.dead_letter_json import (
    NAME_PATTERN,
    PREVIEW_BYTES,
    PREVIEW_BYTES_MAX,
    content_json,
    letter_json,
)

if TYPE_CHECKING:  # brings Kafka's client, which an embedded gateway does without
    from nearkin_gateway.monitoring.pipeline_state import PipelineState

LETTERS_MAX = 1000
BODY_BYTES_MAX = 64 * 1024
router = APIRouter()
_PLAIN = responses(400, 401, 403, 405, 422, 429, 431, 500, 503)
_LETTERS: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {
                "schema": {
                    "type": "object",
                    "required": ["letters"],
                    "properties": {
                        "letters": {
                            "type": "array",
                            "minItems": 1,
                            "maxItems": LETTERS_MAX,
                            "items": {"type": "string", "pattern": NAME_PATTERN, "example": "0:17"},
                        }
                    },
                }
            }
        },
    }
}

LetterName = Annotated[
    str,
    Path(description="PARTITION:OFFSET in the topic of dead letters.", json_schema_extra={"pattern": NAME_PATTERN}),
]
PreviewBytes = Annotated[int, Query(alias="bytes", ge=0, le=PREVIEW_BYTES_MAX, description="Most bytes of the value.")]


@router.get(
    "/v1/dead", responses=_PLAIN, response_model=response_models.Letters, operation_id="listDead", tags=["admin"]
)
async def list_dead(request: Request, _caller: Operator) -> Response:
    """List the newest dead letters that are not dropped, those that were replayed included."""
    return JSONResponse(await letters_json(gateway_of(request)))


@router.get(
    "/v1/dead/letters/{letter}",
    responses={**_PLAIN, **responses(404)},
    response_model=response_models.LetterContent,
    operation_id="showDead",
    tags=["admin"],
)
async def show_dead(
    request: Request, letter: LetterName, _caller: Operator, preview: PreviewBytes = PREVIEW_BYTES
) -> Response:
    """Return a dead letter with its key, its headers and the first bytes of its value."""
    annotate(request, letters=unquote(letter))
    gateway = gateway_of(request)
    found = await gateway.pools.control.run(_pipeline(gateway).letter, unquote(letter))
    return JSONResponse(content_json(found, preview))


@router.post(
    "/v1/dead/replay",
    responses={**_PLAIN, **responses(404, 408, 413)},
    response_model=response_models.ReplayedLetters,
    openapi_extra=_LETTERS,
    operation_id="replayDead",
    tags=["admin"],
)
async def replay_dead(request: Request, _caller: Operator) -> Response:
    """Send dead letters back to the topics they came from, each once."""
    gateway, names = gateway_of(request), await _requested_letters(request)
    replayed = await gateway.pools.control.run(_pipeline(gateway).replay, names)
    return JSONResponse({"replayed": [f"{letter.partition}:{letter.offset}" for letter in replayed]})


@router.post(
    "/v1/dead/drop",
    responses={**_PLAIN, **responses(404, 408, 413)},
    response_model=response_models.DroppedLetters,
    openapi_extra=_LETTERS,
    operation_id="dropDead",
    tags=["admin"],
)
async def drop_dead(request: Request, caller: Operator) -> Response:
    """Drop dead letters: they are neither listed nor replayed from then on.

    The records stay in the topic until its retention removes them.
    """
    gateway, names = gateway_of(request), await _requested_letters(request)
    dropped = await gateway.pools.control.run(_pipeline(gateway).drop, names, caller.name)
    return JSONResponse({"dropped": [f"{letter.partition}:{letter.offset}" for letter in dropped]})


async def letters_json(gateway: Gateway) -> dict[str, Any]:
    """Return the newest dead letters, newest first."""
    if gateway.pipeline is None:
        return {"embedded": True, "letters": []}
    letters = await gateway.pools.control.run(gateway.pipeline.letters)
    return {"embedded": False, "letters": [letter_json(letter) for letter in reversed(letters)]}


async def _requested_letters(request: Request) -> list[str]:
    """Return the letters that the body names. Raises Problem, BadInput."""
    want = '{"letters": ["PARTITION:OFFSET", ...]}'
    names = await json_member(request, BODY_BYTES_MAX, "letters", want)
    if not isinstance(names, list) or not 1 <= len(names) <= LETTERS_MAX:
        raise BadInput(f"letters: want a list of 1 to {LETTERS_MAX}")
    letters = [str(name) for name in names]
    annotate(request, letters=" ".join(letters), entries=len(letters))
    return letters


def _pipeline(gateway: Gateway) -> PipelineState:
    """Return what reads the topic of dead letters. Raises Problem 404 where no Kafka is used."""
    if gateway.pipeline is None:
        raise Problem(404, "not-found", "all stages run in this one process: there are no dead letters")
    return gateway.pipeline

"""Read request bodies.

Invariant: at most one frame is held, and a slow client is disconnected.

Only the time in which the gateway waits for the client counts, not the time in which the client waits.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from starlette.requests import ClientDisconnect, Request

from nearkin_gateway import gateway_limits as limits
from nearkin_gateway.http.problems import Problem
from nearkin_gateway.http.request_limits import ConcurrencyLimit
from nearkin_shared.limits import FRAME_BYTES_MAX

FRAME_SECONDS = 10.0
"""A frame is sent by then, full or not: the pipeline ends an idle upload (`upload_idle_seconds`)."""

DECLARED_DIGITS_MAX = 20
"""Digits of a length that are read: a longer one is too large for every bound, cut or not."""


def check_declared(request: Request, bytes_max: int) -> None:
    """Refuse a body that is declared too large, or encoded. Raises Problem."""
    if (declared_bytes(request) or 0) > bytes_max:
        raise _too_large(bytes_max)
    for name, plain in ("Content-Encoding", "identity"), ("Transfer-Encoding", "chunked"):
        coding = ", ".join(request.headers.getlist(name)).strip().lower()
        if coding not in (plain, ""):
            raise Problem(
                415,
                "encoded-body",
                f"{name} {coding:.40}: send the bytes as they are to be stored",
                headers={"Accept-Encoding": "identity"},
            )
    if "content-range" in request.headers:
        raise Problem(400, "partial-put", "Content-Range: a put stores a whole; /v1/uploads takes parts (tus)")


def asks_first(request: Request) -> bool:
    """Return whether the client waits for `100 Continue` before it sends the body.

    Raises Problem 417 for any other expectation.
    """
    expected = request.headers.get("expect", "").strip().lower()
    if expected not in ("", "100-continue"):
        raise Problem(417, "unknown-expectation", f"Expect {expected:.60}: want 100-continue, or no Expect")
    return bool(expected)


def declared_bytes(request: Request) -> int | None:
    """Return the length that a request declares for its body, if it does."""
    declared = request.headers.get("content-length", "")
    if not (declared.isascii() and declared.isdigit()):
        return None
    # Without leading zeros first, or 20 of them before the length would declare an empty body.
    return int((declared.lstrip("0") or "0")[:DECLARED_DIGITS_MAX])


async def chunks(
    request: Request,
    bytes_max: int,
    slots: ConcurrencyLimit | None = None,
    pace: Callable[[int], Awaitable[None]] | None = None,
) -> AsyncIterator[bytes]:
    """Yield the body in pieces of some 64 KiB. Raises Problem 408 or 413, ClientDisconnect.

    The minimum speed of a client rises with the number of used `slots`. `pace` may wait after each piece of a size.
    """
    window_seconds = limits.SLOW_SECONDS
    waited_seconds, window_got, total_bytes = 0.0, 0, 0
    while True:
        before = time.monotonic()
        try:
            async with asyncio.timeout(window_seconds - waited_seconds):
                message = await request.receive()
        except TimeoutError:
            message = None
        waited_seconds += time.monotonic() - before
        if message is not None:
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            body: bytes = message.get("body", b"")
            total_bytes += len(body)
            window_got += len(body)
            if total_bytes > bytes_max:
                raise _too_large(bytes_max)
            if body:
                if pace is not None:
                    await pace(len(body))
                yield body
            if not message.get("more_body", False):
                return
        if message is None or waited_seconds >= window_seconds:
            least = limits.SLOW_BYTES_PER_SECOND if slots is None else slots.least_bytes_per_second
            if window_got < window_seconds * least:
                raise Problem(
                    408,
                    "too-slow",
                    f"{window_got} bytes in {waited_seconds:.0f} s: want {least:.0f} a second at "
                    "least; /v1/uploads takes up where it stopped (tus)",
                )
            waited_seconds, window_got = 0.0, 0


async def read_body(request: Request, bytes_max: int) -> bytes:
    """Return a small body at once. Raises as `chunks` does."""
    return b"".join([piece async for piece in chunks(request, bytes_max)])


async def json_member(request: Request, bytes_max: int, name: str, want: str) -> Any:
    """Return one member of the JSON object in the body; `want` is an example for the error.

    Raises Problem 400 too.
    """
    try:
        return json.loads(await read_body(request, bytes_max))[name]
    except (ValueError, RecursionError, KeyError, TypeError) as err:
        raise Problem(400, "bad-json", f"want {want}") from err


async def frames(pieces: AsyncIterator[bytes | memoryview]) -> AsyncIterator[bytearray]:
    """Yield the same bytes in frames of FRAME_BYTES_MAX, or less after FRAME_SECONDS."""
    frame, began = bytearray(), 0.0
    async for piece in pieces:
        left = memoryview(piece)
        while len(frame) + len(left) >= FRAME_BYTES_MAX:
            room = FRAME_BYTES_MAX - len(frame)
            frame += left[:room]
            left = left[room:]
            yield frame
            frame = bytearray()
        began = began if frame else time.monotonic()
        frame += left
        if frame and time.monotonic() - began > FRAME_SECONDS:
            yield frame
            frame = bytearray()
    if frame:
        yield frame


def _too_large(bytes_max: int) -> Problem:
    return Problem(413, "too-large", f"the body may have at most {bytes_max} bytes")

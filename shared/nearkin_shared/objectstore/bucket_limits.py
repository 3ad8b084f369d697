# size: the limits, for the readiness check, without loading obstore
"""Bound the requests to a bucket."""

from __future__ import annotations

from nearkin_shared.utils.frozen import frozen


@frozen
class RequestLimits:
    """Timeouts and retries of requests to a bucket.

    `request_seconds` includes the body; no retry begins later than `retry_seconds` after the first attempt.
    """

    connect_seconds: int = 5
    request_seconds: int = 60
    retries: int = 20
    retry_seconds: int = 60


REQUEST_LIMITS = RequestLimits()
"""A server that restarts or fails over is back within a minute."""

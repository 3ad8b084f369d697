"""Check a gateway: `python -m nearkin.client.smoke`; `helm test` runs it in the cluster.

The gateway is ready and refuses a request without token. With NEARKIN_TOKEN a blob is put and read, and must be equal.
"""

from __future__ import annotations

import secrets
import sys
from collections.abc import Mapping

import httpx

from nearkin.client import connect
from nearkin_shared.config.loader import load
from nearkin_shared.errors import NearkinError

KEY = "nearkin-smoke-test"
BLOB_BYTES = 100_000
SECONDS_MAX = 60.0


class NotWell(NearkinError):
    """The gateway accepted a request that it should refuse, or the reverse."""


def smoke(server: str, token: str | None) -> list[str]:
    """Return what was found well. Raises NotWell, or what a request failed with."""
    well = []
    try:
        ready = httpx.get(f"{server}/readyz", timeout=SECONDS_MAX)
        stranger = httpx.get(f"{server}/v1/blobs", timeout=SECONDS_MAX)
    except httpx.HTTPError as err:
        raise NotWell(f"{server}: {type(err).__name__}: {err}") from err
    for what, answer, wanted in (("/readyz", ready, 200), ("/v1/blobs without a token", stranger, 401)):
        if answer.status_code != wanted:
            raise NotWell(f"{server}: {what}: {answer.status_code}, want {wanted}: {answer.text[:500]}")
        well.append(f"{what}: {wanted}")
    if token is not None:
        sent = secrets.token_bytes(BLOB_BYTES)
        with connect(server, token=token) as store:
            version = store.put(KEY, sent).info.version
            if store.get(KEY, version=version).read() != sent:
                raise NotWell(f"{server}: {KEY} version {version}: content differs from the put; run `nearkin verify`")
        well.append(f"{KEY} version {version}: {BLOB_BYTES} bytes put and got back")
    return well


def main(given: Mapping[str, object] | None = None) -> int:
    """Ask the gateway that NEARKIN_SERVER names; return the exit code."""
    try:
        settings = load(None, given)[0]
        if settings.server is None:
            raise NotWell("NEARKIN_SERVER: not set; want the gateway's URL")
        for line in smoke(settings.server.rstrip("/"), settings.token):
            print(line)
    except NearkinError as err:
        print(f"nearkin: {err}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

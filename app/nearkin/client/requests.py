"""Build the requests to the gateway. Invariant: no input or output in this module.

put     PUT ?wait= -> 201: committed
                   -> 202: GET /v1/status/{id} until it is committed or failed, or a timeout
"""

from __future__ import annotations

import json
import logging
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple
from urllib.parse import quote

from nearkin.client.http import Answer, Call, Conversation, T, blob_path
from nearkin.client.streaming import Upload
from nearkin_shared import results_json
from nearkin_shared.errors import BadInput, Corrupt, PreconditionFailed, StoreUnavailable
from nearkin_shared.formats.upload_parts import CHECKPOINTS_MAX, PARTS_MEDIA_TYPE
from nearkin_shared.preconditions import ANY, PRECONDITION, Precondition
from nearkin_shared.results import Damage, Deletion, Explanation, PutResult, Stats, VersionInfo
from nearkin_shared.validation import check_key, check_metadata, check_prefix, check_reason, check_version

_log = logging.getLogger("nearkin.client")

Broken = Callable[[Damage], None] | None
"""Called with each version that a listing omits because it cannot be read."""

PAGE_ENTRIES = 1000
BLOBS_PATH, CHECKPOINTS_PATH = "/v1/blobs", "/v1/checkpoints"
DEAD_LETTERS_MAX = 1000
"""Most letters in one request that the gateway accepts."""
PUTS_IN_FLIGHT_MAX = 64
"""Blobs of one `put_many` that are durable and not yet committed."""
LISTED_MAX = 1_000_000
"""Versions of one listing: 1 GB of memory."""
WAIT_SECONDS = 20.0
"""How long the gateway is asked to hold a put's answer back: proxies give up on silent ones after 60 s."""
POLL_SECONDS = 0.2
"""Between two questions for an outcome, should the gateway not wait as it was asked to."""
_VALUE_SAFE = "!\"#$&'()*+,-./:;<=>?@[]^_`{|}~"
_NAME_SAFE = frozenset("abcdefghijklmnopqrstuvwxyz0123456789-_.")


class AcceptedPut(NamedTuple):
    """A put whose bytes are durable and that will be committed, or fail."""

    key: str
    status_path: str
    upload: Upload


def accept(
    key: str,
    upload: Upload,
    metadata: Mapping[str, str],
    sha256: bytes | None,
    wait_seconds: float,
    commit_seconds: float,
    precondition: Precondition | None = None,
) -> Conversation[PutResult | AcceptedPut]:
    """Send a blob; the gateway may wait up to `wait_seconds` for its commit before it answers.

    Sent again after a break, it waits up to `commit_seconds` for what the first sending began.
    """
    check_key(key)
    headers = upload.headers()
    if metadata:
        check_metadata(metadata)
        headers |= metadata_headers(metadata)
    if sha256 is not None:
        if not isinstance(sha256, bytes) or len(sha256) != 32:
            raise BadInput(f"key {key!r}: SHA-256 {sha256!r:.100}: want its 32 bytes")
        headers["X-Content-SHA256"] = sha256.hex()
    if precondition is not None:
        headers |= precondition_headers(precondition)
    answer = yield Call(
        "PUT",
        blob_path(key),
        {"wait": f"{wait_seconds:g}"},
        headers,
        upload=upload,
        # A source that cannot be read again cannot be sent again either, to ask for the end of the commit.
        patience_seconds=wait_seconds if upload.is_rereadable else max(wait_seconds, commit_seconds),
        commit_seconds=commit_seconds,
    )
    return _put_answer(key, answer, upload)


def _put_answer(key: str, answer: Answer, upload: Upload) -> PutResult | AcceptedPut:
    if answer.status != 202:
        return _result_of(answer, answer.json(), upload)
    body = answer.json()
    identity = body.get("id") if isinstance(body, dict) else None
    if not isinstance(identity, str):
        raise answer.foreign(f"id {identity!r:.50}")
    return AcceptedPut(key, blob_path(identity, "/v1/status"), upload)


def metadata_headers(metadata: Mapping[str, str]) -> dict[str, str]:
    """Return percent-encoded `X-Nearkin-Meta-NAME: VALUE` headers that keep the case of names."""
    return {f"X-Nearkin-Meta-{_header_name(name)}": quote(text, safe=_VALUE_SAFE) for name, text in metadata.items()}


def _header_name(name: str) -> str:
    return "".join(c if c in _NAME_SAFE else "".join(f"%{byte:02X}" for byte in c.encode()) for c in name)


def precondition_headers(precondition: Precondition) -> dict[str, str]:
    """Return `If-Match` and `If-None-Match`: entity tags, or `*`."""
    named = {"If-Match": precondition.if_match, "If-None-Match": precondition.if_none_match}
    return {
        name: ", ".join(tag if tag == ANY else f'"{tag}"' for tag in tags)
        for name, tags in named.items()
        if tags is not None
    }


def await_commit(accepted: AcceptedPut, commit_seconds: float) -> Conversation[PutResult]:
    """Wait for the end of a put. Raises StoreUnavailable when it failed or time is up."""
    deadline = time.monotonic() + commit_seconds
    pause_seconds = 0.0
    while True:
        wait_seconds = max(0.0, min(WAIT_SECONDS, deadline - time.monotonic()))
        answer = yield Call(
            "GET",
            accepted.status_path,
            {"wait": f"{wait_seconds:.3f}"},
            after_seconds=pause_seconds,
            patience_seconds=wait_seconds,
        )
        body = answer.json()
        state = body.get("state") if isinstance(body, dict) else None
        if state == "committed":
            return _result_of(answer, body, accepted.upload)
        if state == "failed" and body.get("reason") == PRECONDITION:
            raise PreconditionFailed(str(body.get("failure"))[:500])
        if state == "failed":
            raise StoreUnavailable(f"key {accepted.key!r}: nothing was stored: {str(body.get('failure'))[:500]}")
        if state not in ("pending", "unknown"):
            raise answer.foreign(f"state {state!r:.50}")
        if state == "unknown" or time.monotonic() > deadline:
            why = (
                "the gateway forgot it"
                if state == "unknown"
                else f"not committed in {commit_seconds:.0f} s; it goes on"
            )
            raise StoreUnavailable(f"key {accepted.key!r}: {why}: see {accepted.status_path} and the key's versions")
        pause_seconds = POLL_SECONDS


def put_checkpoint(
    key: str, upload: Upload, metadata: Mapping[str, str], commit_seconds: float
) -> Conversation[PutResult]:
    """Send a checkpoint of a backup of `key`, and wait for its commit."""
    check_key(key)
    check_metadata(metadata)
    wait_seconds = min(WAIT_SECONDS, commit_seconds)
    answer = yield Call(
        "PUT",
        blob_path(key, CHECKPOINTS_PATH),
        {"wait": f"{wait_seconds:g}"},
        upload.headers() | metadata_headers(metadata),
        upload=upload,
        patience_seconds=max(wait_seconds, commit_seconds),
        commit_seconds=commit_seconds,
    )
    done = _put_answer(key, answer, upload)
    return done if isinstance(done, PutResult) else (yield from await_commit(done, commit_seconds))


def checkpoints(key: str) -> Conversation[list[VersionInfo]]:
    """Ask for the checkpoints of a key, oldest first, at most CHECKPOINTS_MAX."""
    check_key(key)
    answer = yield Call("GET", f"{blob_path(key, CHECKPOINTS_PATH)}/versions", {"limit": str(CHECKPOINTS_MAX)})
    page, damaged, _ = _page(answer, "versions", results_json.info_from)
    for damage in damaged:
        _warn(damage)
    return page


def delete_checkpoints(key: str) -> Conversation[int]:
    """Delete the checkpoints of a key; return how many there were."""
    check_key(key)
    answer = yield Call("DELETE", blob_path(key, CHECKPOINTS_PATH), patience_seconds=60.0)
    return _count_of(answer)


def put(
    key: str,
    upload: Upload,
    metadata: Mapping[str, str],
    sha256: bytes | None,
    commit_seconds: float,
    precondition: Precondition | None = None,
) -> Conversation[PutResult]:
    """Send a blob and wait for its commit."""
    wait_seconds = min(WAIT_SECONDS, commit_seconds)
    done = yield from accept(key, upload, metadata, sha256, wait_seconds, commit_seconds, precondition)
    return done if isinstance(done, PutResult) else (yield from await_commit(done, commit_seconds))


def _result_of(answer: Answer, body: object, upload: Upload) -> PutResult:
    result = _read(answer, lambda: results_json.put_from(body))
    if upload.digest and result.info.digest != upload.digest:
        raise Corrupt(
            f"key {result.info.key!r} version {result.info.version}: {result.info.digest} was stored, "
            f"{upload.digest} was sent: put it again"
        )
    return result


def info(key: str, version: int | None) -> Conversation[VersionInfo]:
    """Ask for a version, the newest by default."""
    check_key(key)
    if version is not None:
        check_version(version)
    answer = yield Call("GET", blob_path(key, "/v1/info"), {} if version is None else {"version": str(version)})
    return _read(answer, lambda: results_json.info_from(answer.json()))


def newest_base(key: str) -> Conversation[VersionInfo | None]:
    """Ask for the newest version; None if the server takes no ranges of it in a put."""
    check_key(key)
    answer = yield Call("GET", blob_path(key, "/v1/info"))
    accepted = [media_type.strip() for media_type in answer.headers.get("accept-post", "").split(",")]
    found = _read(answer, lambda: results_json.info_from(answer.json()))
    return found if PARTS_MEDIA_TYPE in accepted else None


def versions(prefix: str, all_versions: bool, broken: Broken) -> Conversation[list[VersionInfo]]:
    """Request the newest version, or all, of each key that starts with `prefix`, by page."""
    check_prefix(prefix)
    params = {"prefix": prefix} if prefix else {}
    if all_versions:
        params["versions"] = "all"
    return (yield from _pages("/v1/blobs", params, "blobs", results_json.info_from, broken))


def list_deleted(prefix: str, broken: Broken) -> Conversation[list[Deletion]]:
    """Ask for what is deleted and not collected, page by page."""
    check_prefix(prefix)
    params = {"prefix": prefix} if prefix else {}
    return (yield from _pages("/v1/deleted", params, "deleted", results_json.deletion_from, broken))


def delete(key: str, version: int | None, reason: str) -> Conversation[int]:
    """Delete a version, or all of a key; sent again after a break it is done once."""
    return (yield from _change("DELETE", blob_path(key), key, version, reason))


def undelete(key: str, version: int | None, reason: str) -> Conversation[int]:
    """Bring back a version, or what the latest deletion of the key took."""
    return (yield from _change("POST", blob_path(key, "/v1/undelete"), key, version, reason))


def retain(key: str, until: datetime, version: int | None, reason: str) -> Conversation[VersionInfo]:
    """Extend the retention of a version, the newest by default; a repeat changes nothing."""
    check_key(key)
    check_reason(reason)
    if version is not None:
        check_version(version)
    aware = until if until.tzinfo is not None else until.replace(tzinfo=UTC)
    params = {"until": aware.astimezone(UTC).isoformat()}
    params |= ({} if version is None else {"version": str(version)}) | ({"reason": reason} if reason else {})
    answer = yield Call("POST", blob_path(key, "/v1/retention"), params, patience_seconds=60.0)
    return _read(answer, lambda: results_json.info_from(answer.json()))


def _change(method: str, path: str, key: str, version: int | None, reason: str) -> Conversation[int]:
    check_key(key)
    check_reason(reason)
    if version is not None:
        check_version(version)
    params = ({} if version is None else {"version": str(version)}) | ({"reason": reason} if reason else {})
    answer = yield Call(method, path, params, {"Idempotency-Key": secrets.token_hex(16)}, patience_seconds=60.0)
    return _count_of(answer)


def _count_of(answer: Answer) -> int:
    count = answer.headers.get("x-nearkin-versions", "")
    if not (count.isascii() and count.isdecimal()):
        raise answer.foreign(f"X-Nearkin-Versions {count!r:.50}")
    return int(count)


def _pages(
    path: str,
    params: Mapping[str, str],
    name: str,
    reader: Callable[[object], T],
    broken: Broken,
) -> Conversation[list[T]]:
    found: list[T] = []
    after: str | None = None
    while True:
        more = {"limit": str(PAGE_ENTRIES)} | ({"after": after} if after is not None else {})
        answer = yield Call("GET", path, {**params, **more})
        page, damaged, following = _page(answer, name, reader)
        found += page
        for damage in damaged:
            (broken or _warn)(damage)
        if following is None:
            return found
        if len(found) >= LISTED_MAX:
            raise _too_many(params.get("prefix", ""))
        if following == after:
            raise answer.foreign("a page that leads to itself")
        after = following


def _page(answer: Answer, name: str, reader: Callable[[object], T]) -> tuple[list[T], list[Damage], str | None]:
    body = answer.json()

    def read() -> tuple[list[T], list[Damage], str | None]:
        if not isinstance(body, dict) or not isinstance(body.get(name), list):
            raise ValueError(f"no list of {name}")  # noqa: TRY004 - it is the text that is wrong
        following = body.get("next")
        damaged = [results_json.damage_from(entry) for entry in body.get("damaged") or []]
        return [reader(entry) for entry in body[name]], damaged, None if following is None else str(following)

    return _read(answer, read)


def _warn(damage: Damage) -> None:
    for key, version in damage.versions:
        _log.warning("%r version %d cannot be read: %s", key, version, damage.problem)


def _too_many(prefix: str) -> BadInput:
    return BadInput(f"prefix {prefix!r}: more than {LISTED_MAX:,} versions; list by a longer prefix")


def stats() -> Conversation[Stats]:
    """Ask for the sums over the store."""
    answer = yield Call("GET", "/v1/stats", patience_seconds=60.0)
    return _read(answer, lambda: results_json.stats_from(answer.json()))


def explain(key: str, version: int | None) -> Conversation[Explanation]:
    """Ask how each chunk of a version is kept."""
    found = yield from info(key, version)
    params = {"version": str(found.version), "segments": "true"}
    answer = yield Call("GET", blob_path(key, "/v1/explain"), params, patience_seconds=60.0)
    return _read(answer, lambda: results_json.explanation_from(answer.json(), found))


def config() -> Conversation[dict[str, Any]]:
    """Ask for the settings that the services run with."""
    answer = yield Call("GET", "/v1/config")
    return _object(answer)


def change_config(changes: Mapping[str, object]) -> Conversation[dict[str, Any]]:
    """Change settings of the running services (RFC 7396)."""
    headers = {"Content-Type": "application/merge-patch+json"}
    answer = yield Call("PATCH", "/v1/config", headers=headers, body=json.dumps(changes).encode())
    return _object(answer)


def gc_state() -> Conversation[dict[str, Any]]:
    """Request the result of the last GC run, and whether GC is paused."""
    answer = yield Call("GET", "/v1/gc")
    return _object(answer)


def change_gc(action: str) -> Conversation[dict[str, Any]]:
    """Request a GC run (`run`), or `pause` or `resume` GC."""
    headers = {"Content-Type": "application/json"}
    answer = yield Call("POST", "/v1/gc", headers=headers, body=json.dumps({"action": action}).encode())
    return _object(answer)


def dead_letters() -> Conversation[list[dict[str, Any]]]:
    """List the newest dead letters, newest first."""
    answer = yield Call("GET", "/v1/dead")
    letters = _object(answer).get("letters")
    if not isinstance(letters, list) or not all(isinstance(letter, dict) for letter in letters):
        raise answer.foreign("no list of letters")
    return letters


def dead_letter(name: str, value_bytes_max: int) -> Conversation[dict[str, Any]]:
    """Return a dead letter with its headers and the first bytes of its value."""
    path = f"/v1/dead/letters/{quote(name, safe=':')}"
    answer = yield Call("GET", path, {"bytes": str(value_bytes_max)})
    return _object(answer)


def settle_dead_letters(action: str, names: Sequence[str]) -> Conversation[list[str]]:
    """`replay` or `drop` dead letters; return their names."""
    result = {"replay": "replayed", "drop": "dropped"}[action]
    settled: list[str] = []
    for start in range(0, len(names), DEAD_LETTERS_MAX):
        body = json.dumps({"letters": list(names[start : start + DEAD_LETTERS_MAX])}).encode()
        headers = {"Content-Type": "application/json"}
        answer = yield Call("POST", f"/v1/dead/{action}", headers=headers, body=body)
        settled += [str(name) for name in _object(answer).get(result) or ()]
    return settled


def check_range(found: VersionInfo, start: int, stop: int | None) -> int:
    """Return where a range ends. Raises BadInput."""
    end = found.size_bytes if stop is None else min(stop, found.size_bytes)
    if not 0 <= start <= end:
        raise BadInput(f"range {start} to {stop}: {found.key!r} has {found.size_bytes} bytes")
    return end


def _object(answer: Answer) -> dict[str, Any]:
    body = answer.json()
    if not isinstance(body, dict):
        raise answer.foreign("not an object")
    return body


def _read(answer: Answer, reader: Callable[[], T]) -> T:
    try:
        return reader()
    except (ValueError, OverflowError) as err:
        raise answer.foreign(err) from err

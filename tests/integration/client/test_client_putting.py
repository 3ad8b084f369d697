"""Test faults during an upload.

It is stored once or not at all, and the caller learns which.
"""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import pytest

import nearkin
from nearkin.client import http
from nearkin.client.sync import RemoteStore
from nearkin_shared.errors import BadInput, Corrupt, RetryableError, SourceFailed, StoreUnavailable
from tests.support.data.samples import noise
from tests.support.fakes.pipes import Unseekable
from tests.support.fakes.scripted_gateway import TOKEN, ScriptedGateway

DATA = noise(300_000, "client").tobytes()


@pytest.mark.parametrize("fault", ["busy", "reset", "lost-reply"])
@pytest.mark.parametrize("kind", ["bytes", "path", "file"])
def test_put_failed_in_transit_is_stored_once(
    store: RemoteStore, gateway: ScriptedGateway, tmp_path: Path, fault: str, kind: str
) -> None:
    """Repeat a put that failed in transit; it is stored once."""
    (tmp_path / "file").write_bytes(DATA)
    source: Any = {"bytes": DATA, "path": tmp_path / "file", "file": io.BytesIO(DATA)}[kind]
    gateway.script(fault, fault)
    progress: list[int] = []
    assert store.put("k", source, progress=progress.append).info.version == 1
    assert sum(progress) == len(DATA)
    assert len(gateway.seen) == 3
    assert len({headers["idempotency-key"] for _, _, headers in gateway.seen}) == 1
    assert len(gateway.read().versions(all_versions=True)) == 1


def test_two_puts_of_one_content_are_two_versions(store: RemoteStore) -> None:
    assert [store.put("k", DATA).info.version for _ in range(2)] == [1, 2]


def test_pipe_is_never_sent_twice(store: RemoteStore, gateway: ScriptedGateway) -> None:
    gateway.script("busy")
    with pytest.raises(StoreUnavailable, match="busy for a moment"):
        store.put("k", Unseekable(DATA))
    assert len(gateway.seen) == 1
    assert gateway.read().versions() == []


def test_retries_end(store: RemoteStore, gateway: ScriptedGateway) -> None:
    gateway.script(*["busy"] * 50)
    with pytest.raises(StoreUnavailable, match="busy for a moment"):
        store.put("k", DATA)
    assert len(gateway.seen) == http.ATTEMPTS_MAX
    with pytest.raises(StoreUnavailable):
        store.info("k")
    assert len(gateway.seen) == 2 * http.ATTEMPTS_MAX


def test_read_only_gateway_is_not_retried(store: RemoteStore, gateway: ScriptedGateway) -> None:
    """Do not ask again a gateway that accepts no puts for now."""
    gateway.script("read-only")
    with pytest.raises(RetryableError, match=r"service\.read_only is set"):
        store.put("k", DATA)
    assert len(gateway.seen) == 1


def test_settings_are_changed_once_or_not_at_all(store: RemoteStore, gateway: ScriptedGateway) -> None:
    gateway.script("reset")
    with pytest.raises(RetryableError):
        store.change_config({"features": {"algorithm": "odess"}})
    assert len(gateway.seen) == 1


def test_accepted_put_is_followed_to_its_commit(store: RemoteStore, gateway: ScriptedGateway) -> None:
    gateway.script("accept", "busy")
    result = store.put("k", DATA)
    assert result.info.version == 1
    assert [path.partition("/v1/")[2][:6] for _, path, _ in gateway.seen] == ["blobs/", *["status"] * 4]


def test_accepted_put_that_fails_names_reason(store: RemoteStore, gateway: ScriptedGateway) -> None:
    gateway.script("accept-fail")
    with pytest.raises(RetryableError, match=r"key 'k': nothing was stored: the pipeline refused it"):
        store.put("k", DATA)


def test_uncommitted_put_names_its_status_url(gateway: ScriptedGateway) -> None:
    """Name the status to look at if a put is not committed in time."""
    gateway.script("accept")
    with (
        nearkin.connect(gateway.url, TOKEN, commit_seconds=0.01) as store,
        pytest.raises(RetryableError, match=r"not committed in 0 s; it goes on: see /v1/status/0000"),
    ):
        store.put("k", DATA)


def test_concurrent_puts_return_in_order(store: RemoteStore, gateway: ScriptedGateway) -> None:
    """Send many puts at once and return the results in order."""
    gateway.script(*["accept"] * 5, "ok", *["accept"] * 3)
    results = list(store.put_many((f"k{number}", str(number).encode()) for number in range(9)))
    assert [result.info.key for result in results] == [f"k{number}" for number in range(9)]
    assert [method for method, _, _ in gateway.seen[:6]] == ["PUT"] * 6


def test_stored_digest_is_compared_with_sent(store: RemoteStore, gateway: ScriptedGateway) -> None:
    gateway.script("rot")
    with pytest.raises(Corrupt, match=r"key 'k' version 1: blake3:0+ was stored, blake3:[0-9a-f]+ was sent"):
        store.put("k", DATA)


def test_wrong_sha256_stores_nothing(store: RemoteStore, gateway: ScriptedGateway) -> None:
    with pytest.raises(BadInput, match="SHA-256"):
        store.put("k", DATA, sha256=bytes(32))
    assert gateway.read().versions() == []


def test_shrinking_file_is_refused_growing_cut(store: RemoteStore, tmp_path: Path) -> None:
    """Refuse a file that shrinks; cut one that grows."""
    path = tmp_path / "file"
    path.write_bytes(DATA * 8)

    def shrink(_count: int) -> None:
        os.truncate(path, 10)

    with pytest.raises(BadInput, match=r"ended after \d+ bytes of 2400000"):
        store.put("k", path, progress=shrink)
    path.write_bytes(DATA)

    def grow(_count: int) -> None:
        with path.open("ab") as file:
            file.write(b"more")

    assert store.put("k", path, progress=grow).info.size_bytes == len(DATA)


@pytest.mark.parametrize(
    ("key", "source", "problem"),
    [
        ("", b"", "at least one character"),
        ("x" * 1025, b"", "1024"),
        ("a\0", b"", "NUL"),
        ("k", Path("/nothing"), "no such"),
        ("k", 5, "want a path"),
        ("k", "text", "want a path"),
    ],
)
def test_put_refused_locally_is_never_sent(
    store: RemoteStore, gateway: ScriptedGateway, key: str, source: Any, problem: str
) -> None:
    with pytest.raises(BadInput, match=problem):
        store.put(key, source)
    assert gateway.seen == []


class Failing(Unseekable):
    """A file on a bad disk."""

    def read(self, size: int = -1) -> bytes:
        raise OSError(5, "Input/output error")


def test_failing_source_is_not_retried(store: RemoteStore, gateway: ScriptedGateway) -> None:
    """Raise the source's own error and do not repeat the put."""
    with pytest.raises(SourceFailed, match="Input/output error"):
        store.put("k", Failing(b""))
    assert gateway.read().versions() == []


def test_output_accepting_nothing_ends_a_get(store: RemoteStore) -> None:
    class Full(io.RawIOBase):
        def write(self, data: object) -> None:
            return None

    store.put("k", DATA)
    with pytest.raises(BadInput, match="takes no more bytes"):
        store.get("k").write_to(Full())  # type: ignore[arg-type]

"""Test conditional puts, decided at the commit, by embedded gateway and local API."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from nearkin import connect
from nearkin.store import Item, Store, open_store
from nearkin_shared.errors import PreconditionFailed
from nearkin_shared.results import PutResult
from tests.support.checks.linearizability import ABSENT, Recorder, is_linearizable
from tests.support.servers.gateways import RunningGateway

ONLY_FIRST = {"If-None-Match": "*"}


def run_concurrently(count: int, work: Callable[[int], None]) -> None:
    """Run `work` in so many threads that begin at the same moment."""
    barrier, failures = threading.Barrier(count), list[BaseException]()

    def run_one(number: int) -> None:
        barrier.wait(30)
        try:
            work(number)
        except BaseException as err:
            failures.append(err)

    threads = [threading.Thread(target=run_one, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures, failures


def test_of_six_concurrent_first_puts_one_wins(gateway: RunningGateway, client: httpx.Client) -> None:
    """Create one of six concurrent `If-None-Match: *`; the five others are 412 and no version.

    All six were 201 once.
    """
    for key in ("six", "six again"):
        statuses: list[int] = []

        def one(number: int, key: str = key, statuses: list[int] = statuses) -> None:
            with gateway.client() as own:
                statuses.append(own.put(f"/v1/blobs/{key}", content=b"v%d" % number, headers=ONLY_FIRST).status_code)

        run_concurrently(6, one)
        assert sorted(statuses) == [201, 412, 412, 412, 412, 412]
        assert len(client.get(f"/v1/blobs/{key}/versions").json()["versions"]) == 1


def test_refused_put_names_existing_version(client: httpx.Client) -> None:
    """Return a problem of its own with 412 that names the existing version."""
    client.put("/v1/blobs/named", content=b"one")
    answer = client.put("/v1/blobs/named", content=b"two", headers={"If-Match": '"blake3:' + "0" * 64 + '"'})
    assert (answer.status_code, answer.json()["type"]) == (412, "urn:nearkin:problem:precondition-failed")
    assert "version 1" in answer.json()["detail"]
    many = ", ".join(f'"blake3:{number:064x}"' for number in range(33))
    assert client.put("/v1/blobs/named", content=b"two", headers={"If-Match": many}).status_code == 400


def test_client_raises_precondition_failed(gateway: RunningGateway) -> None:
    """The Python client takes the same arguments as the local store and raises the same error."""
    with connect(gateway.url) as remote:
        first = remote.put("by client", b"one", if_none_match="*")
        with pytest.raises(PreconditionFailed):
            remote.put("by client", b"two", if_none_match="*")
        assert remote.put("by client", b"two", if_match=first.info.digest).info.version == 2
        with pytest.raises(PreconditionFailed):
            remote.put("by client", b"three", if_match=first.info.digest)


def test_history_of_an_embedded_gateway_is_linearizable(gateway: RunningGateway) -> None:
    """Explain concurrent conditional puts, gets and deletions of a key by some order of them."""
    for seed in range(4):
        recorder, key = Recorder(), f"history {seed}"
        with gateway.client() as client:

            def work(
                worker: int, client: httpx.Client = client, recorder: Recorder = recorder, seed: int = seed
            ) -> None:
                drawn = random.Random(seed * 100 + worker)
                for step in range(7):
                    act(client, recorder, f"/v1/blobs/history {seed}", f"{worker}.{step}", drawn)

            run_concurrently(5, work)
        assert is_linearizable(recorder.operations), (key, recorder.operations)


def act(client: httpx.Client, recorder: Recorder, path: str, value: str, drawn: random.Random) -> None:
    """Do one call and record it."""
    started = recorder.start()
    match drawn.choice(["get", "create", "replace", "delete", "put"]):
        case "get":
            recorder.end("get", started, read(client, path)[0])
        case "create":
            answer = client.put(path, content=value.encode(), headers=ONLY_FIRST)
            recorder.end("put", started, value, ABSENT, done=is_done(answer, 412))
        case "replace":
            seen, tag = read(client, path)
            recorder.end("get", started, seen)
            if seen is not None:
                started = recorder.start()
                answer = client.put(path, content=value.encode(), headers={"If-Match": tag})
                recorder.end("put", started, value, seen, done=is_done(answer, 412))
        case "delete":
            recorder.end("delete", started, done=is_done(client.delete(path), 404))
        case _:
            answer = client.put(path, content=value.encode())
            recorder.end("put", started, value, done=is_done(answer, 412))


def read(client: httpx.Client, path: str) -> tuple[str | None, str]:
    answer = client.get(path)
    assert answer.status_code in (200, 404), answer.text
    return (answer.text, answer.headers["etag"]) if answer.status_code == 200 else (None, "")


def is_done(answer: httpx.Response, refused: int) -> bool:
    assert answer.status_code in (201, 204, refused), answer.text
    return answer.status_code != refused


# --- the local store --------------------------------------------------------------------------------------------------


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(tmp_path / "s", create=True)


def test_local_put_checks_its_precondition(store: Store) -> None:
    """`Store.put` has the conditions of the gateway; a refused put stores no version."""
    with store:
        first = store.put("k", b"one", if_none_match="*").info
        with pytest.raises(PreconditionFailed, match="version 1"):
            store.put("k", b"two", if_none_match="*")
        second = store.put("k", b"two", if_match=first.digest).info
        with pytest.raises(PreconditionFailed, match="version 2"):
            store.put("k", b"three", if_match=first.digest)
        with pytest.raises(PreconditionFailed, match="no version"):
            store.put("other", b"x", if_match="*")
        store.delete("k")
        with pytest.raises(PreconditionFailed, match="no version"):
            store.put("k", b"three", if_match=second.digest)
        assert store.put("k", b"three", if_none_match="*").info.version == 3
        assert [info.version for info in store.versions(all_versions=True)] == [3]


def test_refused_put_of_a_group_leaves_the_others(store: Store) -> None:
    """The committer decides for each blob of a group in order; one that is refused ends alone."""
    from nearkin_shared.preconditions import Precondition

    only_first = Precondition(if_none_match=("*",))
    items = [
        Item("k", b"one", precondition=only_first),
        Item("k", b"two", precondition=only_first),
        Item("l", b"three"),
    ]
    with store:
        outcomes = list(store.put_outcomes(items))
        assert [isinstance(outcome, PutResult) for outcome in outcomes] == [True, False, True]
        assert isinstance(outcomes[1], PreconditionFailed)
        assert store.get("k").read() == b"one"
        assert store.get("l").read() == b"three"
        assert store.stats().versions == 2


def test_bytes_of_a_refused_put_are_freed_by_gc(tmp_path: Path) -> None:
    """Free the containers of a put that lost at the commit: no version refers to them."""
    from nearkin.lab.generated_data import random_bytes
    from nearkin_shared.config.loader import with_changes
    from nearkin_shared.config.settings import Settings
    from nearkin_shared.preconditions import Precondition

    chosen = with_changes(Settings(), {"gc": {"grace_seconds": 0}})
    with open_store(tmp_path / "s", settings=chosen, create=True) as store:
        store.put("k", b"one")
        lost = Item("k", random_bytes(300_000, 1), precondition=Precondition(if_none_match=("*",)))
        assert isinstance(next(store.put_outcomes([lost])), PreconditionFailed)
        freed = sum(store.gc().freed_bytes for _ in range(3))
        assert freed >= 300_000
        assert store.get("k").read() == b"one"

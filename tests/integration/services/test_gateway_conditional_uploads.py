"""Conditional resumable uploads (tus): decided at the commit, as those of a put."""

from __future__ import annotations

import base64
import threading
from pathlib import Path

import httpx
import pytest

from nearkin_gateway.uploads.resumable_store import Resumable, StagedUpload, UploadOutcome
from nearkin_shared.errors import StoreUnavailable
from tests.support.servers.gateways import RunningGateway, embedded, running

TUS = {"Tus-Resumable": "1.0.0"}
OCTETS = {**TUS, "Content-Type": "application/offset+octet-stream"}
ONLY_FIRST = {"If-None-Match": "*"}
REFUSED = "urn:nearkin:problem:precondition-failed"


def begin(client: httpx.Client, key: str, length: int, headers: dict[str, str], body: bytes = b"") -> httpx.Response:
    described = {"Upload-Metadata": f"key {base64.b64encode(key.encode()).decode()}", "Upload-Length": str(length)}
    return client.post("/v1/uploads", headers={**(OCTETS if body else TUS), **described, **headers}, content=body)


def add(client: httpx.Client, url: str, offset: int, data: bytes) -> httpx.Response:
    return client.patch(url, headers={**OCTETS, "Upload-Offset": str(offset)}, content=data)


def begin_final(client: httpx.Client, key: str, data: list[bytes], headers: dict[str, str]) -> httpx.Response:
    urls = []
    for part in data:
        made = client.post(
            "/v1/uploads", headers={**OCTETS, "Upload-Concat": "partial", "Upload-Length": str(len(part))}, content=part
        )
        urls.append(str(made.headers["location"]))
    described = {"Upload-Metadata": f"key {base64.b64encode(key.encode()).decode()}"}
    concat = {"Upload-Concat": "final;" + " ".join(urls)}
    return client.post("/v1/uploads", headers={**TUS, **described, **concat, **headers})


def versions(client: httpx.Client, key: str) -> list[str]:
    listed = client.get(f"/v1/blobs/{key}/versions")
    return [info["digest"] for info in listed.json().get("versions", [])]


def is_refused(answer: httpx.Response) -> bool:
    return answer.status_code == 412 and answer.json()["type"] == REFUSED


def test_upload_overtaken_by_a_put_is_refused_at_the_end(client: httpx.Client) -> None:
    """Refuse with 412, also HEAD and a repeat, if the condition fails at the commit only."""
    url = begin(client, "overtaken", 6, ONLY_FIRST).headers["location"]
    assert add(client, url, 0, b"abc").status_code == 204
    client.put("/v1/blobs/overtaken", content=b"other")
    assert is_refused(add(client, url, 3, b"def"))
    assert client.head(url, headers=TUS).status_code == 412
    assert is_refused(add(client, url, 3, b"def"))
    result = client.get(url).json()
    assert (result["state"], result["reason"], result["status"]) == ("failed", "precondition-failed", None)
    assert (client.get("/v1/blobs/overtaken").content, len(versions(client, "overtaken"))) == (b"other", 1)


@pytest.mark.parametrize("kind", ["plain", "with-body", "final"])
def test_creation_whose_condition_fails_is_412(gateway: RunningGateway, client: httpx.Client, kind: str) -> None:
    """Refuse a failing condition before bytes are sent; keep nothing of the upload."""
    key = f"there {kind}"
    client.put(f"/v1/blobs/{key}", content=b"one")
    folder = gateway.store / "uploads"
    answer = {
        "plain": lambda: begin(client, key, 3, ONLY_FIRST),
        "with-body": lambda: begin(client, key, 3, ONLY_FIRST, b"two"),
        "final": lambda: begin_final(client, key, [b"tw", b"o"], ONLY_FIRST),
    }[kind]()
    assert is_refused(answer), answer.text
    metas = [path.read_text() for path in folder.glob("*/meta")] if folder.is_dir() else []
    assert not [meta for meta in metas if f'"key": "{key}"' in meta]
    assert len(versions(client, key)) == 1


@pytest.mark.parametrize("kind", ["plain", "with-body", "final"])
def test_upload_whose_condition_holds_is_committed(client: httpx.Client, kind: str) -> None:
    """If-Match with the newest version's tag stores the next one, by every way of creation."""
    key = f"replaced {kind}"
    tag = client.put(f"/v1/blobs/{key}", content=b"one").headers["etag"]
    match = {"If-Match": f'"blake3:{"0" * 64}", {tag}'}
    if kind == "final":
        answer = begin_final(client, key, [b"tw", b"o"], match)
    else:
        answer = begin(client, key, 3, match, b"two" if kind == "with-body" else b"")
    assert answer.status_code == 201, answer.text
    if kind == "plain":
        assert add(client, answer.headers["location"], 0, b"two").status_code == 204
    assert client.get(f"/v1/blobs/{key}").content == b"two"
    assert client.head(answer.headers["location"], headers=TUS).headers["upload-offset"] == "3"


def test_of_six_concurrent_uploads_one_is_stored(gateway: RunningGateway, client: httpx.Client) -> None:
    """Six uploads that were all begun before the first version: one is 204, five are 412."""
    urls = [begin(client, "six", 2, ONLY_FIRST).headers["location"] for _ in range(6)]
    barrier, statuses = threading.Barrier(6), list[int]()

    def finish(number: int) -> None:
        with gateway.client() as own:
            barrier.wait(30)
            statuses.append(add(own, urls[number], 0, b"v%d" % number).status_code)

    threads = [threading.Thread(target=finish, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(statuses) == [204, 412, 412, 412, 412, 412]
    assert len(versions(client, "six")) == 1


def test_condition_of_an_upload_is_bounded_as_of_a_put(client: httpx.Client) -> None:
    """More than 32 tags are 400 at the creation, and no upload is begun."""
    many = ", ".join(f'"blake3:{number:064x}"' for number in range(33))
    assert begin(client, "many", 3, {"If-Match": many}).status_code == 400
    assert client.put("/v1/blobs/many", content=b"one", headers={"If-Match": many}).status_code == 400


def test_condition_of_a_partial_upload_has_no_effect(client: httpx.Client) -> None:
    """Ignore the condition of a partial upload, which stores no blob; clients send it always."""
    client.put("/v1/blobs/part", content=b"one")
    answer = begin(client, "part", 3, {**ONLY_FIRST, "Upload-Concat": "partial"}, b"abc")
    assert (answer.status_code, answer.headers["upload-offset"]) == (201, "3")


def test_final_upload_repeated_after_a_refusal_is_412(client: httpx.Client) -> None:
    """Identify a repeated final upload by its condition: another condition, another upload."""
    answer = begin_final(client, "again", [b"a", b"b"], ONLY_FIRST)
    concat = client.head(answer.headers["location"], headers=TUS).headers["upload-concat"]
    described = {"Upload-Metadata": f"key {base64.b64encode(b'again').decode()}", "Upload-Concat": concat}
    again = client.post("/v1/uploads", headers={**TUS, **described, **ONLY_FIRST})
    assert (again.status_code, again.headers["location"]) == (201, answer.headers["location"])
    assert client.post("/v1/uploads", headers={**TUS, **described}).status_code == 404
    assert len(versions(client, "again")) == 1


def test_conditional_upload_survives_a_restart(tmp_path: Path) -> None:
    """The condition is kept with the upload: the gateway that goes on with it checks it."""
    with running(embedded(tmp_path)) as gateway, gateway.client() as client:
        url = begin(client, "later", 3, ONLY_FIRST).headers["location"]
        assert add(client, url, 0, b"ab").status_code == 204
        client.put("/v1/blobs/later", content=b"other")
    with running(embedded(tmp_path)) as gateway, gateway.client() as client:
        assert is_refused(add(client, url, 2, b"c"))
        assert len(versions(client, "later")) == 1


def test_committed_upload_not_noted_is_not_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Recognise an upload's own version in a repeated hand-over: stored once, reported so."""
    with running(embedded(tmp_path)) as gateway, gateway.client() as client:
        url = begin(client, "own", 3, ONLY_FIRST).headers["location"]
        plain, rooms = Resumable.finish, iter([False])

        def finish_with_room(resumable: Resumable, staged: StagedUpload, done: UploadOutcome) -> UploadOutcome:
            if not next(rooms, True):
                raise StoreUnavailable("no room left on the device")
            return plain(resumable, staged, done)

        monkeypatch.setattr(Resumable, "finish", finish_with_room)
        assert add(client, url, 0, b"abc").status_code == 204
        assert client.head(url, headers=TUS).headers["upload-offset"] == "3"
        assert client.get(url).json()["state"] == "handed-over"
        assert len(versions(client, "own")) == 1

"""Reserved keys over HTTP: no route reads, lists, stores or deletes one."""

from __future__ import annotations

import base64
import os
import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

import nearkin.trees.checkpoint_schedule
from nearkin.store import Store, open_store
from nearkin_shared.validation import checkpoint_key_of
from tests.support.servers.gateways import RunningGateway, embedded, running

KEY = checkpoint_key_of("home")
URL = f"/v1/blobs/{KEY}"


def tus(key: str) -> dict[str, str]:
    """Return the headers of a resumable upload."""
    metadata = f"key {base64.b64encode(key.encode()).decode()}"
    return {"Tus-Resumable": "1.0.0", "Upload-Length": "0", "Upload-Metadata": metadata}


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningGateway]:
    """A gateway whose store has checkpoints of a backup, one of them deleted."""
    folder = tmp_path_factory.mktemp("reserved")
    source = folder / "source"
    source.mkdir()
    for number in range(8):
        (source / f"{number}").mkdir()
        (source / f"{number}" / "file").write_bytes(os.urandom(100_000))
    with open_store(folder / "store", create=True) as store, pytest.MonkeyPatch.context() as patch:
        patch.setattr(nearkin.trees.checkpoint_schedule, "CHECKPOINT_BYTES_FIRST", 1)
        patch.setattr(nearkin.trees.checkpoint_schedule, "CHECKPOINT_BYTES_MIN", 1)
        with patch.context() as kept:
            kept.setattr(Store, "delete", lambda *_, **__: 0)
            store.backup("home", [source])
        versions = [info.version for info in store.versions(".nearkin/", all_versions=True)]
        assert len(versions) > 1, "checkpoints were made"
        store.delete(KEY, versions[0])
    with running(embedded(folder / "store")) as found:
        yield found


@pytest.mark.parametrize(
    ("method", "url", "headers"),
    [
        ("GET", URL, {}),
        ("HEAD", URL, {}),
        ("GET", URL.replace("/checkpoints/", "%2Fcheckpoints%2F"), {}),
        ("GET", URL.replace(".nearkin", "%2Enearkin"), {}),
        ("GET", f"{URL}/versions", {}),
        ("GET", f"/v1/info/{KEY}", {}),
        ("GET", f"/v1/explain/{KEY}", {}),
        ("PUT", URL, {}),
        ("POST", URL, {}),
        ("DELETE", URL, {}),
        ("POST", f"/v1/undelete/{KEY}", {}),
        ("POST", f"/v1/retention/{KEY}?until=2030-01-01", {}),
        ("POST", "/v1/uploads", tus(KEY)),
        ("GET", f"/ui/blob?key={KEY}", {}),
    ],
)
def test_reserved_key_is_refused(method: str, url: str, headers: dict[str, str], client: httpx.Client) -> None:
    """Each route that names a key answers 400, whether the key has versions or not."""
    answer = client.request(method, url, headers=headers)
    assert answer.status_code == 400
    if method != "HEAD":
        assert "reserved" in answer.text


@pytest.mark.parametrize("prefix", ["", ".", ".nearkin/", KEY])
def test_reserved_key_is_not_listed(prefix: str, client: httpx.Client) -> None:
    """No listing shows a reserved key, a deleted one included, not even under its own prefix."""
    for versions in ("newest", "all"):
        found = client.get("/v1/blobs", params={"prefix": prefix, "versions": versions}).json()
        assert [entry["key"] for entry in found["blobs"]] == [key for key in ["home"] if key.startswith(prefix)]
    assert client.get("/v1/deleted", params={"prefix": prefix}).json()["deleted"] == []
    for page in ("/ui/blobs", "/ui/deleted"):
        assert re.search(r"/ui/blob\?key=(?!home)", client.get(page, params={"prefix": prefix}).text) is None


def test_version_name_of_a_key_is_no_new_key(tmp_path: Path) -> None:
    """A key `mail@3` would hide version 3 of `mail`: no route makes it, one that exists is continued and deleted."""
    with running(embedded(tmp_path / "store")) as gateway, gateway.client() as client:
        assert client.put("/v1/blobs/mail@3", content=b"before").status_code == 201, "it hides nothing yet"
        for key in ("mail", "a@b.c", "ana@2026.example"):
            assert client.put(f"/v1/blobs/{key}", content=b"content").status_code == 201
        refused = (
            client.put("/v1/blobs/mail@4", content=b"content"),
            client.post("/v1/uploads", headers=tus("mail@4")),
        )
        for answer in refused:
            assert answer.status_code == 400
            assert "the store has the key 'mail'" in answer.json()["detail"]
            assert "is stored by a put of 'mail'" in answer.json()["detail"]
        assert client.put("/v1/blobs/mail@3", content=b"continued").status_code == 201
        assert client.get("/v1/blobs/mail@3").content == b"continued"
        assert client.put("/v1/blobs/a@b.c@home", content=b"content").status_code == 201
        assert client.delete("/v1/blobs/mail@3").status_code == 204
        keys = {entry["key"] for entry in client.get("/v1/blobs").json()["blobs"]}
        assert keys == {"mail", "a@b.c", "ana@2026.example", "a@b.c@home"}


def test_entry_name_of_a_key_is_no_new_key(tmp_path: Path) -> None:
    """A key `big:/r1` would hide the entry `r1` of `big`: no route makes it, one that exists is continued."""
    with running(embedded(tmp_path / "store")) as gateway, gateway.client() as client:
        assert client.put("/v1/blobs/big:/r1", content=b"before").status_code == 201, "it hides nothing yet"
        assert client.put("/v1/blobs/big", content=b"content").status_code == 201
        for key in ("big:/r2", "big:", "big@3:/r2", "big:/a:/b"):
            for answer in (
                client.put(f"/v1/blobs/{key}", content=b"content"),
                client.post("/v1/uploads", headers=tus(key)),
            ):
                assert (answer.status_code, "an entry of its tree" in answer.json()["detail"]) == (400, True), key
        for key in ("big:/r1", "s3://bucket/x", "big:r2"):
            assert client.put(f"/v1/blobs/{key}", content=b"content").status_code == 201, key
        assert client.delete("/v1/blobs/big:/r1").status_code == 204

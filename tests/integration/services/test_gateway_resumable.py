"""Resumable uploads: tus 1.0, by its Python client and by hand."""

from __future__ import annotations

import base64
import hashlib
import io
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tusclient.client import TusClient
from tusclient.exceptions import TusCommunicationError

from nearkin_gateway.http.problems import Problem
from nearkin_gateway.http.request_limits import Holders
from nearkin_gateway.uploads import finalize
from nearkin_gateway.uploads import resumable_store as stored
from nearkin_gateway.uploads.resumable_store import PART_BYTES, Meta, Resumable, StagedUpload, UploadOutcome
from nearkin_shared.crypto.key_wrapping import generate
from nearkin_shared.errors import Corrupt, NotFound, StoreUnavailable
from nearkin_shared.objectstore.local import LocalObjectStore
from tests.support.checks.waiting import until
from tests.support.data.samples import noise
from tests.support.servers.gateways import RunningGateway, embedded, running

MIB = 1024 * 1024
TUS = {"Tus-Resumable": "1.0.0"}
OCTETS = {**TUS, "Content-Type": "application/offset+octet-stream"}


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningGateway]:
    settings = embedded(tmp_path_factory.mktemp("store"), {"gateway": {"body_bytes_max": "64MiB"}})
    with running(settings, CHECKED_PATCH_BYTES=2 * MIB, SLOW_SECONDS=2) as found:
        yield found


@pytest.fixture(scope="module")
def client(gateway: RunningGateway) -> Iterator[httpx.Client]:
    with gateway.client() as found:
        yield found


def described(key: str, **more: str) -> str:
    return ",".join(f"{name} {base64.b64encode(text.encode()).decode()}" for name, text in {"key": key, **more}.items())


def begin(client: httpx.Client, key: str, length: int, **more: str) -> str:
    answer = client.post(
        "/v1/uploads", headers={**TUS, "Upload-Length": str(length), "Upload-Metadata": described(key, **more)}
    )
    assert answer.status_code == 201, answer.text
    return str(answer.headers["location"])


def add(client: httpx.Client, url: str, offset: int, data: Any, **headers: str) -> httpx.Response:
    return client.patch(url, content=data, headers={**OCTETS, "Upload-Offset": str(offset), **headers})


def parts_of(gateway: RunningGateway, url: str) -> list[str]:
    folder = gateway.store / "uploads" / url.rpartition("/")[2] / "parts"
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


def test_tuspy_upload_in_parts_makes_the_blob(gateway: RunningGateway, client: httpx.Client) -> None:
    data = os.urandom(5 * MIB + 17)
    uploader = TusClient(f"{gateway.url}/v1/uploads").uploader(
        file_stream=io.BytesIO(data), chunk_size=MIB, metadata={"key": "tus/ein schlüssel", "host": "db1"}
    )
    uploader.upload()
    assert uploader.url is not None
    result = client.get(httpx.URL(uploader.url).path).json()
    assert (result["state"], result["offset_bytes"], result["key"]) == ("handed-over", len(data), "tus/ein schlüssel")
    outcome = client.get(result["status"], params={"wait": 30}).json()
    assert (outcome["state"], outcome["metadata"], outcome["size_bytes"]) == ("committed", {"host": "db1"}, len(data))
    assert client.get("/v1/blobs/tus%2Fein%20schl%C3%BCssel").content == data
    assert parts_of(gateway, uploader.url) == []


def test_tuspy_resumes_where_it_stopped(gateway: RunningGateway, client: httpx.Client) -> None:
    data = os.urandom(4 * MIB)
    tus = TusClient(f"{gateway.url}/v1/uploads")
    first = tus.uploader(file_stream=io.BytesIO(data), chunk_size=MIB, metadata={"key": "tus/resumed"})
    first.upload(stop_at=2 * MIB)
    assert first.url is not None
    assert client.head(httpx.URL(first.url).path, headers=TUS).headers["upload-offset"] == str(2 * MIB)
    second = tus.uploader(file_stream=io.BytesIO(data), chunk_size=MIB, url=first.url)
    assert second.offset == 2 * MIB
    second.upload()
    assert client.get("/v1/blobs/tus/resumed").content == data


def test_tuspy_with_checksums_is_checked(gateway: RunningGateway, client: httpx.Client) -> None:
    data = os.urandom(3 * MIB + 1)
    tus = TusClient(f"{gateway.url}/v1/uploads")
    tus.uploader(
        file_stream=io.BytesIO(data), chunk_size=MIB, metadata={"key": "tus/checked"}, upload_checksum=True
    ).upload()
    assert client.get("/v1/blobs/tus/checked").content == data


def test_upload_continues_after_a_restart(tmp_path: Path) -> None:
    data = os.urandom(PART_BYTES + 1000)
    with running(embedded(tmp_path)) as first, first.client() as client:
        url = begin(client, "moved", len(data))
        assert add(client, url, 0, data[:100_000]).headers["upload-offset"] == "100000"
    with running(embedded(tmp_path)) as second, second.client() as client:
        assert client.head(url, headers=TUS).headers["upload-offset"] == "100000"
        assert add(client, url, 100_000, data[100_000:]).status_code == 204
        assert client.get("/v1/blobs/moved").content == data


def test_bytes_before_a_broken_line_are_kept(gateway: RunningGateway, client: httpx.Client) -> None:
    data = os.urandom(PART_BYTES + 500_000)
    url = begin(client, "broken", len(data))
    head = f"PATCH {url} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\nUpload-Offset: 0\r\n"
    head += "Tus-Resumable: 1.0.0\r\nContent-Type: application/offset+octet-stream\r\n\r\n"
    with socket.create_connection(("127.0.0.1", gateway.port)) as connection:
        connection.sendall(head.encode() + data[: PART_BYTES + 100_000])
    until(lambda: int(client.head(url, headers=TUS).headers["upload-offset"]) == PART_BYTES + 100_000)

    def added() -> int | None:
        status = add(client, url, PART_BYTES + 100_000, data[PART_BYTES + 100_000 :]).status_code
        return None if status == 423 else status  # durable, and its request is about to end

    assert until(added) == 204
    assert client.get("/v1/blobs/broken").content == data


def test_wrong_checksum_is_460_and_keeps_nothing(gateway: RunningGateway, client: httpx.Client) -> None:
    url = begin(client, "sum", 1000)
    wrong = base64.b64encode(hashlib.sha1(b"other").digest()).decode()
    answer = add(client, url, 0, b"x" * 1000, **{"Upload-Checksum": f"sha1 {wrong}"})
    assert (answer.status_code, answer.headers["content-type"]) == (460, "application/problem+json")
    assert client.head(url, headers=TUS).headers["upload-offset"] == "0"
    for text in ("md5 AAAA", "sha1", "sha1 ???"):
        assert add(client, url, 0, b"x", **{"Upload-Checksum": text}).status_code in (400, 460)
    latin: Any = {**OCTETS, "Upload-Offset": "0", "Upload-Checksum": "sha1 \u00e9".encode("latin-1")}
    assert client.patch(url, content=b"x", headers=latin).status_code == 400
    large = begin(client, "sum", 4 * MIB)
    right = base64.b64encode(hashlib.sha256(b"x" * 4 * MIB).digest()).decode()
    assert add(client, large, 0, b"x" * 4 * MIB, **{"Upload-Checksum": f"sha256 {right}"}).status_code == 413
    assert parts_of(gateway, large) == []


def test_wrong_offset_is_409_excess_is_413(client: httpx.Client) -> None:
    url = begin(client, "offsets", 100)
    assert add(client, url, 10, b"x").status_code == 409
    assert add(client, url, 0, b"x" * 60).status_code == 204
    assert add(client, url, 0, b"x" * 60).status_code == 409
    assert add(client, url, 60, b"x" * 41).status_code == 413
    assert add(client, url, 60, b"x" * 40).status_code == 204
    assert add(client, url, 100, b"").status_code == 409
    assert client.get("/v1/blobs/offsets").content == b"x" * 100


def test_refused_length_or_coding_keeps_nothing(gateway: RunningGateway, client: httpx.Client) -> None:
    """Store no part of a request refused for its length or coding."""

    def chunked() -> Iterator[bytes]:
        yield b"x" * 100
        time.sleep(0.3)
        yield b"y"

    def declared() -> bytes:
        head = f"PATCH {url} HTTP/1.1\r\nHost: localhost\r\nTus-Resumable: 1.0.0\r\nUpload-Offset: 0\r\n"
        return (head + f"Content-Type: {OCTETS['Content-Type']}\r\nContent-Length: 101\r\n\r\n").encode() + b"x" * 100

    url = begin(client, "too-long", 100)
    assert add(client, url, 0, chunked()).status_code == 413
    assert gateway.raw(declared(), timeout=2).startswith(b"HTTP/1.1 413")
    assert add(client, url, 0, b"x" * 10, **{"Content-Encoding": "gzip"}).status_code == 415
    assert client.head(url, headers=TUS).headers["upload-offset"] == "0"
    assert client.get("/v1/blobs/too-long").status_code == 404


def test_creation_may_bring_the_first_bytes_or_all_or_none(client: httpx.Client) -> None:
    def create(key: str, length: int, data: bytes) -> httpx.Response:
        headers = {**OCTETS, "Upload-Length": str(length), "Upload-Metadata": described(key)}
        return client.post("/v1/uploads", headers=headers, content=data)

    some = create("with/some", 10, b"12345")
    assert (some.status_code, some.headers["upload-offset"]) == (201, "5")
    assert add(client, some.headers["location"], 5, b"67890").status_code == 204
    assert client.get("/v1/blobs/with/some").content == b"1234567890"
    assert create("with/all", 5, b"12345").headers["upload-offset"] == "5"
    assert client.get("/v1/blobs/with/all").content == b"12345"
    assert create("with/none", 0, b"").status_code == 201
    assert client.get("/v1/blobs/with/none").content == b""


def test_announced_sha256_is_checked_at_the_end(client: httpx.Client) -> None:
    good = begin(client, "announced", 5, sha256=hashlib.sha256(b"hello").hexdigest())
    add(client, good, 0, b"hello")
    assert client.get("/v1/blobs/announced").content == b"hello"
    bad = begin(client, "misannounced", 5, sha256="0" * 64)
    add(client, bad, 0, b"hello")
    result = client.get(bad).json()
    assert (result["state"], result["status"]) == ("failed", None)
    assert "SHA-256" in result["failure"]
    assert client.get("/v1/blobs/misannounced").status_code == 404


def test_options_names_the_extensions(client: httpx.Client) -> None:
    headers = client.options("/v1/uploads").headers
    assert (headers["tus-version"], headers["tus-max-size"]) == ("1.0.0", str(64 * MIB))
    assert set(headers["tus-extension"].split(",")) == {
        "creation", "creation-with-upload", "checksum", "expiration", "termination", "concatenation",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Tus-Resumable": "0.2.2"}, 412),
        ({"Upload-Length": ""}, 400),
        ({"Upload-Length": "-1"}, 400),
        ({"Upload-Length": "9" * 30}, 400),
        ({"Upload-Length": str(65 * MIB)}, 413),
        ({"Upload-Metadata": ""}, 400),
        ({"Upload-Metadata": "key ???"}, 400),
        ({"Upload-Metadata": "key " + base64.b64encode(b"\xff").decode()}, 400),
        ({"Upload-Metadata": "key " + base64.b64encode(b"k" * 2000).decode()}, 400),
        ({"Upload-Metadata": described("k") + "," + described("k")}, 400),
        ({"Upload-Metadata": described("k", sha256="12")}, 400),
    ],
)
def test_invalid_creation_is_refused(client: httpx.Client, headers: dict[str, str], status: int) -> None:
    whole = {**TUS, "Upload-Length": "10", "Upload-Metadata": described("k"), **headers}
    answer = client.post("/v1/uploads", headers=whole)
    assert (answer.status_code, answer.headers["tus-resumable"]) == (status, "1.0.0")
    if status == 412:
        assert answer.headers["tus-version"] == "1.0.0"


def test_termination_removes_all_of_it(gateway: RunningGateway, client: httpx.Client) -> None:
    url = begin(client, "terminated", 100)
    add(client, url, 0, b"x" * 10)
    assert client.delete(url, headers=TUS).status_code == 204
    assert client.head(url, headers=TUS).status_code == 404
    assert client.delete(url, headers=TUS).status_code == 404
    assert not list((gateway.store / "uploads" / url.rpartition("/")[2]).rglob("*.*"))
    assert parts_of(gateway, url) == []
    other = begin(client, "overridden", 100)
    assert client.post(other, headers={**TUS, "X-HTTP-Method-Override": "DELETE"}).status_code == 204


@pytest.mark.parametrize("number", ["x", "0" * 32, "..%2F..%2Fmanifests", "%00", "A" * 32])
def test_unknown_upload_is_404(client: httpx.Client, number: str) -> None:
    assert client.head(f"/v1/uploads/{number}", headers=TUS).status_code == 404
    assert add(client, f"/v1/uploads/{number}", 0, b"x").status_code == 404


def test_slow_patch_is_408_and_keeps_its_bytes(gateway: RunningGateway, client: httpx.Client) -> None:
    url = begin(client, "slow", 1_000_000)
    head = f"PATCH {url} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000\r\nUpload-Offset: 0\r\n"
    head += "Tus-Resumable: 1.0.0\r\nContent-Type: application/offset+octet-stream\r\n\r\n"
    answer = gateway.raw(head.encode() + b"x" * 100, timeout=10)
    assert answer.startswith(b"HTTP/1.1 408")
    assert client.head(url, headers=TUS).headers["upload-offset"] == "100"
    assert gateway.gateway.resuming == set()


def test_tuspy_reports_a_refusal(gateway: RunningGateway) -> None:
    with pytest.raises(TusCommunicationError) as refused:
        TusClient(f"{gateway.url}/v1/uploads").uploader(file_stream=io.BytesIO(b"x"), metadata={"nokey": "x"}).upload()
    assert refused.value.status_code == 400


# --- what a gateway leaves behind ------------------------------------------------------------------------------------


def meta(length: int, lives_us: int = 3_600_000_000, tenant: str = "default") -> Meta:
    now_us = time.time_ns() // 1000
    return Meta(tenant, "left", length, now_us, now_us + lives_us)


def test_next_gateway_finishes_a_whole_upload(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hand over a complete upload of a crashed gateway in the next one."""
    monkeypatch.setattr(finalize, "SWEEP_SECONDS", 0.2)
    monkeypatch.setattr(stored, "UNSEEN_SECONDS", 0.5)
    with running(embedded(tmp_path)):
        pass
    resumable = Resumable(LocalObjectStore(tmp_path), 10)
    number = resumable.create(meta(6))
    resumable.stage(number, 0, b"abc", tenant="default")
    resumable.stage(number, 3, b"def", tenant="default")
    with running(embedded(tmp_path)) as gateway, gateway.client() as client:
        until(lambda: client.get("/v1/blobs/left").status_code == 200)
        assert client.get("/v1/blobs/left").content == b"abcdef"
        # The version is visible before the upload is marked: the mark is written after the commit.
        until(lambda: client.get(f"/v1/uploads/{number}").json()["state"] == "handed-over")


def test_next_head_hands_over_a_whole_upload(tmp_path: Path) -> None:
    with running(embedded(tmp_path)) as gateway, gateway.client() as client:
        resumable = Resumable(LocalObjectStore(tmp_path), 10)
        number = resumable.create(meta(3))
        resumable.stage(number, 0, b"abc", tenant="default")
        assert client.head(f"/v1/uploads/{number}", headers=TUS).headers["upload-offset"] == "3"
        assert client.get("/v1/blobs/left").content == b"abc"


def test_sweep_removes_expired_and_orphaned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove expired and orphaned uploads, and count the rest."""
    objects = LocalObjectStore(tmp_path)
    resumable = Resumable(objects, 2)
    late = resumable.create(meta(5, lives_us=-1))
    resumable.stage(late, 0, b"abc", tenant="default")
    live = resumable.create(meta(5))
    orphan = "0" * 32
    resumable.stage(orphan, 0, b"abc", tenant="default")
    with pytest.raises(Problem):
        resumable.check_room(Holders("default", "", ""))
    handed: list[StagedUpload] = []
    resumable.sweep(handed.append)
    assert not list(objects.names(f"uploads/{late}"))
    assert list(objects.names(f"uploads/{orphan}"))  # it may be half made
    monkeypatch.setattr(stored, "UNSEEN_SECONDS", 0.0)
    resumable.sweep(handed.append)
    assert not list(objects.names(f"uploads/{orphan}"))
    assert list(objects.names(f"uploads/{live}"))
    resumable.check_room(Holders("default", "", ""))
    assert not handed


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("meta", b"{}"),
        ("meta", b"not json"),
        ("meta", b'{"tenant": "default", "key": "k", "length_bytes": 3, "created_us": 1, "expires_us": "soon"}'),
        ("done", b'{"blob": 7}'),
        ("done", b'{"other": 7}'),
    ],
)
def test_damaged_upload_does_not_stop_the_sweep(tmp_path: Path, name: str, data: bytes) -> None:
    """Sweep other uploads although the notes of one are damaged."""
    objects = LocalObjectStore(tmp_path)
    resumable = Resumable(objects, 10)
    damaged, late = resumable.create(meta(5)), resumable.create(meta(5, lives_us=-1))
    resumable.stage(damaged, 0, b"abc", tenant="default")
    if name == "meta":
        objects.replace(f"uploads/{damaged}/meta", data)
    else:
        objects.put_new(f"uploads/{damaged}/done", data)
    with pytest.raises(Corrupt, match="does not parse"):
        resumable.load("default", damaged)
    handed: list[StagedUpload] = []
    resumable.sweep(handed.append)
    assert not list(objects.names(f"uploads/{late}"))
    assert not handed


@pytest.mark.parametrize("encryption", ["none", "aes-256-gcm"])
def test_damaged_part_is_requested_again_at_once(tmp_path: Path, encryption: str) -> None:
    """Ask for a damaged part at once.

    The hand-over was repeated until the upload expired without a report, or stored damage.
    """
    generate(tmp_path / "store.key")
    sealed = {"storage": {"encryption": encryption, "key_file": str(tmp_path / "store.key")}}
    if encryption == "none":
        del sealed["storage"]
    data = [noise(size, str(size)).tobytes() for size in (900_000, 700_000, 5_000)]
    with running(embedded(tmp_path / "store", sealed)) as gateway, gateway.client() as client:
        url = begin(client, "mended", sum(map(len, data)))
        for number, part in enumerate(data[:2]):
            assert add(client, url, sum(map(len, data[:number])), part).status_code == 204
        first, second = (
            gateway.store / "uploads" / url.rpartition("/")[2] / "parts" / n for n in parts_of(gateway, url)
        )
        flipped = bytearray(second.read_bytes())
        flipped[-100] ^= 1
        second.write_bytes(flipped)
        refused = add(client, url, 1_600_000, data[2])
        assert refused.status_code == 409, refused.text
        assert refused.json()["type"].endswith(":damaged-part")
        assert "from 900000 on" in refused.json()["detail"]
        assert client.head(url, headers=TUS).headers["upload-offset"] == "900000"
        assert client.get(url).json()["state"] == "receiving"
        assert add(client, url, 900_000, data[1]).status_code == 204  # what came after it is there still
        assert client.head(url, headers=TUS).headers["upload-offset"] == str(sum(map(len, data)))
        assert client.get(url).json()["state"] == "handed-over"
        assert client.get("/v1/blobs/mended").content == b"".join(data)
        assert [info["version"] for info in client.get("/v1/blobs/mended/versions").json()["versions"]] == [1]

        url = begin(client, "asked", 1_000_000)
        add(client, url, 0, data[0])
        (first,) = (gateway.store / "uploads" / url.rpartition("/")[2] / "parts" / n for n in parts_of(gateway, url))
        first.write_bytes(first.read_bytes()[:-200] + bytes(200))
        gateway.gateway.resumable.stage(url.rpartition("/")[2], 900_000, bytes(100_000), tenant="default")
        asked = client.head(url, headers=TUS)  # of a gateway that died before it handed it over
        assert (asked.status_code, asked.headers["upload-offset"]) == (200, "0")


def test_all_parts_are_resent_after_a_damaged_one(tmp_path: Path) -> None:
    """Send all parts again, in other sizes, after a damaged part.

    Old part borders ended the chain within the new parts: 204 for a truncated blob.
    """
    data = noise(400, "borders").tobytes()
    with running(embedded(tmp_path)) as gateway, gateway.client() as client:
        url = begin(client, "borders", 400)
        for offset in (0, 100, 200):
            assert add(client, url, offset, data[offset : offset + 100]).status_code == 204
        part = gateway.store / "uploads" / url.rpartition("/")[2] / "parts" / f"{100:016x}"
        flipped = bytearray(part.read_bytes())
        flipped[5] ^= 1
        part.write_bytes(flipped)
        assert add(client, url, 300, data[300:]).status_code == 409
        assert client.head(url, headers=TUS).headers["upload-offset"] == "100"
        assert add(client, url, 100, data[100:250]).status_code == 204
        assert client.head(url, headers=TUS).headers["upload-offset"] == "250"
        assert add(client, url, 250, data[250:]).status_code == 204
        assert client.get(url).json()["state"] == "handed-over"
        assert client.get("/v1/blobs/borders").content == data


def test_whole_upload_outlives_its_expiry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep a complete upload beyond its expiry until it is handed over."""
    resumable = Resumable(LocalObjectStore(tmp_path), 10)
    number = resumable.create(meta(5, lives_us=-1))
    resumable.stage(number, 0, b"abc", tenant="default")
    with pytest.raises(NotFound):
        resumable.load("default", number)
    resumable.stage(number, 3, b"de", tenant="default")
    handed: list[StagedUpload] = []
    monkeypatch.setattr(stored, "UNSEEN_SECONDS", 0.0)
    resumable.sweep(handed.append)
    assert [staged.id for staged in handed] == [number]
    assert resumable.load("default", number).whole
    monkeypatch.setattr(stored, "WHOLE_SECONDS", 0)
    resumable.sweep(handed.append)
    with pytest.raises(NotFound):
        resumable.load("default", number)


def test_truncated_part_is_sent_again(tmp_path: Path) -> None:
    with running(embedded(tmp_path)) as gateway, gateway.client() as client:
        url = begin(client, "cut", 9_000)
        assert add(client, url, 0, bytes(5_000)).status_code == 204
        (part,) = (gateway.store / "uploads" / url.rpartition("/")[2] / "parts" / n for n in parts_of(gateway, url))
        for left_bytes in (0, 10, 16, 3_000):
            part.write_bytes(part.read_bytes()[:left_bytes])
            offset = int(client.head(url, headers=TUS).headers["upload-offset"])
            assert offset == max(0, left_bytes - 16)
            if not offset:
                assert add(client, url, 0, bytes(5_000)).status_code == 204
        assert add(client, url, offset, bytes(9_000 - offset)).status_code == 409
        assert client.head(url, headers=TUS).headers["upload-offset"] == "0"
        assert add(client, url, 0, bytes(offset)).status_code == 204  # the rest is there still
        assert client.head(url, headers=TUS).headers["upload-offset"] == "9000"
        assert client.get("/v1/blobs/cut").content == bytes(9_000)


def test_stored_upload_not_noted_is_stored_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with running(embedded(tmp_path)) as gateway, gateway.client() as client:
        url = begin(client, "once", 3)
        plain, rooms = Resumable.finish, iter([False])

        def only_with_room(resumable: Resumable, staged: StagedUpload, done: UploadOutcome) -> UploadOutcome:
            if not next(rooms, True):
                raise StoreUnavailable("no room left on the device")
            return plain(resumable, staged, done)

        monkeypatch.setattr(Resumable, "finish", only_with_room)
        assert add(client, url, 0, b"abc").status_code == 204
        assert client.get(url).json()["state"] == "staged"
        assert client.head(url, headers=TUS).status_code == 200
        result = client.get(url).json()
        assert result["state"] == "handed-over"
        assert client.get(result["status"]).json()["version"] == 1
        assert [info["version"] for info in client.get("/v1/blobs/once/versions").json()["versions"]] == [1]


def test_expired_upload_is_404(tmp_path: Path) -> None:
    with running(embedded(tmp_path)) as gateway, gateway.client() as client:
        number = Resumable(LocalObjectStore(tmp_path), 10).create(meta(5, lives_us=-1))
        assert client.head(f"/v1/uploads/{number}", headers=TUS).status_code == 404
        foreign = Resumable(LocalObjectStore(tmp_path), 10).create(meta(5, tenant="other"))
        assert client.head(f"/v1/uploads/{foreign}", headers=TUS).status_code == 404


def test_uploads_beyond_the_limit_are_refused(tmp_path: Path) -> None:
    with (
        running(embedded(tmp_path, {"gateway": {"address_share": 1}}), RESUMABLE_MAX=2, TENANT_SHARE=1) as gateway,
        gateway.client() as client,
    ):
        begin(client, "a", 5)
        begin(client, "b", 5)
        answer = client.post("/v1/uploads", headers={**TUS, "Upload-Length": "5", "Upload-Metadata": described("c")})
        assert (answer.status_code, "retry-after" in answer.headers) == (503, True)

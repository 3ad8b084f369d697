"""Test blobs over HTTP on a real socket, with an embedded store."""

from __future__ import annotations

import base64
import hashlib
import random
import threading
from contextlib import ExitStack
from email.parser import BytesParser
from email.policy import HTTP
from pathlib import Path
from urllib.parse import quote

import httpx
import pytest
from blake3 import blake3

from nearkin.store import open_store
from nearkin_gateway.http.request_limits import Holders
from nearkin_gateway.http.url_keys import quote_key
from nearkin_gateway.state import EXPLANATIONS_MAX
from nearkin_shared.limits import FRAME_BYTES_MAX
from nearkin_shared.storage.manifests import object_name
from tests.support.checks.waiting import until
from tests.support.servers.gateways import RunningGateway, embedded, running


def noise(count: int, seed: int = 1) -> bytes:
    return random.Random(seed).randbytes(count)


def test_put_returns_digest_and_ledger(client: httpx.Client) -> None:
    data = noise(300_000)
    answer = client.put("/v1/blobs/first", content=data)
    assert answer.status_code == 201
    result = answer.json()
    digest = f"blake3:{blake3(data).hexdigest()}"
    assert (result["state"], result["version"], result["digest"], result["size_bytes"]) == (
        "committed",
        1,
        digest,
        len(data),
    )
    assert result["ledger"]["logical_bytes"] == len(data)
    assert answer.headers["etag"] == f'"{digest}"'
    got = client.get(answer.headers["location"])
    assert (got.status_code, got.content, got.headers["etag"]) == (200, data, f'"{digest}"')
    head = client.head("/v1/blobs/first")
    assert (head.status_code, head.content, head.headers["content-length"]) == (200, b"", str(len(data)))
    assert client.get(result["status"]).json()["version"] == 1


def test_stored_page_is_a_download(client: httpx.Client) -> None:
    """GET returns the stored type, under headers that forbid to run it."""
    client.put("/v1/blobs/page.html", content=b"<script>alert(1)</script>", headers={"Content-Type": "text/html"})
    for headers, status in (({}, 200), ({"Range": "bytes=0-3"}, 206)):
        for answer in (client.get("/v1/blobs/page.html", headers=headers), client.head("/v1/blobs/page.html")):
            assert answer.status_code in (status, 200)
            assert answer.headers["content-type"] == "text/html"
            assert answer.headers["x-content-type-options"] == "nosniff"
            assert answer.headers["content-disposition"] == "attachment"
            assert answer.headers["content-security-policy"] == "sandbox; default-src 'none'"
            assert answer.headers["cross-origin-resource-policy"] == "same-origin"


def test_explanations_beyond_limit_are_503(gateway: RunningGateway, client: httpx.Client) -> None:
    client.put("/v1/blobs/explained", content=noise(100_000))
    with ExitStack() as taken:
        for number in range(EXPLANATIONS_MAX):
            taken.enter_context(gateway.gateway.explanations.one(Holders(f"t{number}", "", "")))
        busy = client.get("/v1/explain/explained")
        assert (busy.status_code, "retry-after" in busy.headers) == (503, True)
        page = client.get("/ui/blob?key=explained")
        assert (page.status_code, f"{EXPLANATIONS_MAX} explanations are running" in page.text) == (200, True)
    assert client.get("/v1/explain/explained?segments=true").json()["segments"]
    assert not gateway.gateway.explanations.taken_count


@pytest.mark.parametrize("size", [0, 1, FRAME_BYTES_MAX - 1, FRAME_BYTES_MAX, FRAME_BYTES_MAX + 1, 5_000_001])
def test_sizes_around_a_frame_are_restored(client: httpx.Client, size: int) -> None:
    data = noise(size)
    assert client.post(f"/v1/blobs/size/{size}", content=data).status_code == 201
    assert client.get(f"/v1/blobs/size/{size}").content == data


def test_chunked_body_of_any_size_is_one_blob(client: httpx.Client) -> None:
    rng = random.Random(5)
    parts = [rng.randbytes(rng.choice([1, 10, 70_000, 1_000_000])) for _ in range(12)]
    assert client.put("/v1/blobs/chunked", content=iter(parts)).status_code == 201
    assert client.get("/v1/blobs/chunked").content == b"".join(parts)


@pytest.mark.parametrize(
    "key",
    [
        "a/b/c", "/leading", "trailing/", "a//b", "../../etc/passwd", "..", ".", "a/../b", "notes/versions",
        "versions", "x/versions/versions", "y/versions/1", "%2F", "%", "a b+c?d#e&f=g", "ключ/鍵/🔑", "\u202egnp.exe",
        "line\nbreak\r\ttab", "e\u0301", "\x7f\x01", "a" * 1024, "C:\\windows\\system32", "con", "~root",
        "$(id)", "'; drop table--", "\ufeff", "\u00e9", "\U0010ffff",
    ],
)  # fmt: skip
def test_any_key_is_stored_as_sent(client: httpx.Client, key: str) -> None:
    data = key.encode() * 3
    encoded = quote_key(key)
    put = client.put(f"/v1/blobs/{encoded}", content=data)
    assert put.status_code == 201, put.text
    assert put.json()["key"] == key
    assert client.get(put.headers["location"]).content == data
    listed = client.get(f"/v1/blobs/{encoded}/versions").json()["versions"]
    assert {entry["key"] for entry in listed} == {key}
    info = client.get(f"/v1/info/{encoded}").json()
    assert info["key"] == key
    assert client.get("/v1/blobs", params={"prefix": key, "limit": 1}).json()["blobs"][0]["key"] == key


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("", 400),
        ("%FF", 400),
        ("%C0%AF", 400),
        ("%ED%A0%80", 400),
        ("a%00b", 400),
        ("k" * 1025, 414),
        ("a/versions", 405),
    ],
)
def test_invalid_key_is_refused_with_a_problem(client: httpx.Client, path: str, status: int) -> None:
    answer = client.put(f"/v1/blobs/{path}", content=b"x")
    assert answer.status_code == status
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.json()["status"] == status


def test_slashes_may_be_literal_or_encoded(client: httpx.Client) -> None:
    client.put("/v1/blobs/one/two", content=b"here")
    assert client.get("/v1/blobs/one%2Ftwo").content == b"here"
    assert client.get("/v1/blobs/one%2ftwo").content == b"here"
    assert client.get("/v1/blobs/one%252Ftwo").status_code == 404


# --- versions and listings -------------------------------------------------------------------------------------------


def test_versions_stay_and_are_listed_in_pages(client: httpx.Client) -> None:
    for number in range(5):
        client.put("/v1/blobs/aged", content=f"v{number}".encode())
    assert client.get("/v1/blobs/aged").content == b"v4"
    assert client.get("/v1/blobs/aged", params={"version": 2}).content == b"v1"
    assert client.get("/v1/blobs/aged", params={"version": 6}).status_code == 404
    found, after = [], 0
    while after is not None:
        page = client.get("/v1/blobs/aged/versions", params={"after": after, "limit": 2}).json()
        found += [entry["version"] for entry in page["versions"]]
        after = page["next"]
    assert found == [1, 2, 3, 4, 5]
    listed, following = [], ""
    while following is not None:
        query = {"prefix": "aged", "versions": "all", "limit": 2, "after": following}
        page = client.get("/v1/blobs", params=query).json()
        listed += [(entry["key"], entry["version"]) for entry in page["blobs"]]
        following = page["next"]
    assert listed == [("aged", number) for number in range(1, 6)]


def test_listing_pages_have_each_key_once(client: httpx.Client) -> None:
    keys = sorted(f"page/{number:03d}{'é' if number % 3 else ''}" for number in range(23))
    for key in keys:
        client.put(f"/v1/blobs/{quote(key)}", content=b"x")
        client.put(f"/v1/blobs/{quote(key)}", content=b"y")
    found: list[str] = []
    url = "/v1/blobs?prefix=page/&limit=5"
    while True:
        answer = client.get(url)
        found += [entry["key"] for entry in answer.json()["blobs"]]
        assert {entry["version"] for entry in answer.json()["blobs"]} == {2}
        if answer.json()["next"] is None:
            break
        url = answer.links["next"]["url"]
    assert found == keys


@pytest.mark.parametrize("url", ["/v1/blobs", "/v1/deleted"])
@pytest.mark.parametrize("query", ["prefix=page/%ff", "prefix=%C3%28&limit=5", "after=%80"])
def test_non_utf8_query_is_refused(client: httpx.Client, url: str, query: str) -> None:
    """Refuse `%ff`: with its bytes replaced it would list keys that begin with U+FFFD."""
    answer = client.get(f"{url}?{query}")
    assert answer.status_code == 400
    assert answer.json()["type"] == "urn:nearkin:problem:bad-query"
    assert "not UTF-8" in answer.json()["detail"]
    assert client.get(f"{url}?prefix=p%C3%A9").status_code == 200


# --- ranges ----------------------------------------------------------------------------------------------------------


def test_ranges_equal_python_slices(client: httpx.Client) -> None:
    data = noise(2_000_000, seed=9)
    client.put("/v1/blobs/ranged", content=data)
    rng = random.Random(3)
    cases = [(0, 0), (0, len(data) - 1), (len(data) - 1, len(data) - 1), (5, len(data) + 100)]
    cases += [tuple(sorted(rng.sample(range(len(data)), 2))) for _ in range(10)]  # type: ignore[misc]
    for first, last in cases:
        answer = client.get("/v1/blobs/ranged", headers={"Range": f"bytes={first}-{last}"})
        assert (answer.status_code, answer.content) == (206, data[first : last + 1])
        end = min(last, len(data) - 1)
        assert answer.headers["content-range"] == f"bytes {first}-{end}/{len(data)}"
    assert client.get("/v1/blobs/ranged", headers={"Range": "bytes=1999990-"}).content == data[1999990:]
    assert client.get("/v1/blobs/ranged", headers={"Range": "bytes=-7"}).content == data[-7:]
    assert client.get("/v1/blobs/ranged", headers={"Range": "bytes=-9999999"}).content == data


@pytest.mark.parametrize("text", ["bytes=2000000-", "bytes=99999999999-", "bytes=-0"])
def test_range_past_the_end_is_416_with_size(client: httpx.Client, text: str) -> None:
    client.put("/v1/blobs/short", content=b"0123456789")
    answer = client.get("/v1/blobs/short", headers={"Range": text})
    assert (answer.status_code, answer.headers["content-range"]) == (416, "bytes */10")


@pytest.mark.parametrize(
    "text", ["bytes=5-2", "bytes=0-1,4-3", "lines=1-2", "bytes=a-b", "bytes=-", "garbage", "bytes=--1"]
)
def test_meaningless_range_is_ignored(client: httpx.Client, text: str) -> None:
    client.put("/v1/blobs/short", content=b"0123456789")
    answer = client.get("/v1/blobs/short", headers={"Range": text})
    assert (answer.status_code, answer.content) == (200, b"0123456789")


def test_several_ranges_are_sent_as_parts(client: httpx.Client) -> None:
    """Ranges far apart come as multipart/byteranges in their order, each with its offsets; neighbours come as one."""
    data = noise(9_000_000, seed=11)
    client.put("/v1/blobs/parts", content=data, headers={"Content-Type": "text/x-log"})
    answer = client.get("/v1/blobs/parts", headers={"Range": "bytes=8000000-, 0-99, 1000000-5999999"})
    assert answer.status_code == 206
    assert "content-range" not in answer.headers
    message = BytesParser(policy=HTTP).parsebytes(
        b"Content-Type: " + answer.headers["content-type"].encode() + b"\r\n\r\n" + answer.content
    )
    parts = [(part["content-range"], part.get_payload(decode=True)) for part in message.iter_parts()]
    assert {part.get_content_type() for part in message.iter_parts()} == {"text/x-log"}
    assert parts == [
        ("bytes 8000000-8999999/9000000", data[8_000_000:]),
        ("bytes 0-99/9000000", data[:100]),
        ("bytes 1000000-5999999/9000000", data[1_000_000:6_000_000]),
    ]
    joined = client.get("/v1/blobs/parts", headers={"Range": "bytes=5-9,0-4"})
    assert (joined.headers["content-range"], joined.content) == ("bytes 0-9/9000000", data[:10])
    refused = client.get("/v1/blobs/parts", headers={"Range": "bytes=" + ",".join(f"{n}-{n}" for n in range(0, 99, 3))})
    assert (refused.status_code, refused.headers["content-range"]) == (416, "bytes */9000000")


@pytest.mark.parametrize(
    ("path", "methods"),
    [
        ("/v1/blobs/some/key", "DELETE, GET, HEAD, POST, PUT"),
        ("/v1/blobs/some/key/versions", "GET"),
        ("/v1/blobs", "GET"),
        ("/v1/uploads/0", "DELETE, GET, HEAD, PATCH"),
        ("/v1/uploads", "OPTIONS, POST"),
        ("/v1/config", "GET, PATCH"),
        ("/v1/gc", "GET, POST"),
    ],
)
def test_wrong_method_names_allowed_ones(client: httpx.Client, path: str, methods: str) -> None:
    answer = client.request("TRACE", path)
    assert (answer.status_code, answer.headers["allow"]) == (405, methods)


# --- digests, metadata -----------------------------------------------------------------------------------------------


def test_announced_digests_are_checked_before_anything_is_stored(client: httpx.Client) -> None:
    """A wrong digest is a mismatch, a malformed one a bad digest."""
    data = noise(1_500_000, seed=4)
    sha256 = hashlib.sha256(data)
    good = f"sha-256=:{base64.b64encode(sha256.digest()).decode()}:"
    wrong = f"sha-256=:{base64.b64encode(bytes(32)).decode()}:"
    for headers in (
        {"Content-Digest": good},
        {"X-Content-SHA256": sha256.hexdigest()},
        {"Want-Repr-Digest": "sha-256=10"},
    ):
        answer = client.put("/v1/blobs/checked", content=data, headers=headers)
        assert (answer.status_code, answer.json()["sha256"]) == (201, sha256.hexdigest())
    assert client.head("/v1/blobs/checked").headers["repr-digest"] == good
    for headers in (
        {"Content-Digest": wrong},
        {"X-Content-SHA256": "0" * 64},
        {"Content-Digest": f"adler=:x:, {wrong}"},
    ):
        answer = client.put("/v1/blobs/wrong", content=data, headers=headers)
        assert (answer.status_code, answer.json()["type"]) == (400, "urn:nearkin:problem:digest-mismatch")
    for headers in (
        {"Content-Digest": "sha-256=:?:"},
        {"Content-Digest": f"md5=:x:, {good}"},
        {"Content-Digest": f"md5=:x:, {wrong}"},
        {"X-Content-SHA256": "abc"},
    ):
        answer = client.put("/v1/blobs/wrong", content=data, headers=headers)
        assert (answer.status_code, answer.json()["type"]) == (400, "urn:nearkin:problem:bad-digest")
    assert client.get("/v1/blobs/wrong").status_code == 404


@pytest.mark.parametrize(
    ("wanted", "with_sha256", "without"),
    [
        (None, "sha-256", ""),
        ("sha-256=10", "sha-256", ""),
        ("sha-256=1;q=x , unixsum=9, Sha-256=3, sha-512", "sha-256", ""),
        ("blake3=3", "blake3", "blake3"),
        ("blake3=3, sha-256=10", "sha-256, blake3", "blake3"),
        ("sha-256=2,blake3=3,sha-512=10", "blake3, sha-256", "blake3"),
        ("sha-256=0", "", ""),
        ("sha-256=0, blake3=1", "blake3", "blake3"),
        ("sha-256=5, sha-256=0", "", ""),
        ("blake3=11", "sha-256", ""),
        ("sha-512=10", "sha-256", ""),
    ],
)
def test_read_has_the_stored_digests_that_are_wanted(
    client: httpx.Client, wanted: str | None, with_sha256: str, without: str
) -> None:
    """Choose among stored digests by weight; compute none, and ignore what is unknown or malformed (RFC 9530)."""
    data = noise(1000, seed=8)
    shown = {"sha-256": hashlib.sha256(data).digest(), "blake3": blake3(data).digest(), "": b""}
    client.put("/v1/blobs/both", content=data, headers={"Want-Repr-Digest": "sha-256=1"})
    client.put("/v1/blobs/one", content=data)
    headers = {} if wanted is None else {"Want-Repr-Digest": wanted}
    for key, names in (("both", with_sha256), ("one", without)):
        members = [f"{name}=:{base64.b64encode(shown[name]).decode()}:" for name in names.split(", ") if name]
        for answer in (
            client.get(f"/v1/blobs/{key}", headers=headers),
            client.get(f"/v1/blobs/{key}", headers={**headers, "Range": "bytes=5-9"}),
            client.head(f"/v1/blobs/{key}", headers=headers),
        ):
            assert answer.headers.get("repr-digest") == (", ".join(members) or None)


def test_metadata_survive_whatever_is_in_them(client: httpx.Client) -> None:
    metadata = {"host": "db1", "CamelCase": "Ünïcödé", "with space": "line\nbreak", "percent": "100%", "empty": ""}
    headers = {
        "X-Nearkin-Meta-"
        + "".join(c if c.islower() else "".join(f"%{b:02X}" for b in c.encode()) for c in name): quote(value)
        for name, value in metadata.items()
    }
    assert client.put("/v1/blobs/meta", content=b"x", headers=headers).json()["metadata"] == metadata
    back = client.head("/v1/blobs/meta").headers
    assert {name: value for name, value in back.items() if name.startswith("x-nearkin-meta")} == {
        "x-nearkin-meta-host": "db1",
        "x-nearkin-meta-%43amel%43ase": quote("Ünïcödé"),
        "x-nearkin-meta-with%20space": "line%0Abreak",
        "x-nearkin-meta-percent": "100%25",
        "x-nearkin-meta-empty": "",
    }
    assert client.get("/v1/info/meta").json()["metadata"] == metadata


def test_concurrent_puts_of_one_key_give_ordered_versions(gateway: RunningGateway) -> None:
    versions = []

    def put(number: int) -> None:
        with gateway.client() as mine:
            versions.append(mine.put("/v1/blobs/race", content=b"%d" % number).json()["version"])

    threads = [threading.Thread(target=put, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(versions) == list(range(1, 9))


# --- the rest --------------------------------------------------------------------------------------------------------


def test_unknown_status_is_404(client: httpx.Client) -> None:
    result = client.put("/v1/blobs/status", content=b"x").json()
    forged = result["id"][:-1] + ("0" if result["id"][-1] != "0" else "1")
    assert client.get(f"/v1/status/{forged}").status_code == 404
    assert client.get("/v1/status/nonsense").status_code == 404


def test_stats_and_explanations_are_those_of_the_store(client: httpx.Client) -> None:
    client.put("/v1/blobs/explained", content=noise(200_000, seed=21))
    stats = client.get("/v1/stats").json()
    assert stats["logical_bytes"] > 0
    assert sum(stats["parts"].values()) == stats["stored_bytes"]
    found = client.get("/v1/explain/explained", params={"segments": True}).json()
    assert sum(segment["length_bytes"] for segment in found["segments"]) == 200_000
    assert client.get("/v1/explain/nothing").status_code == 404


def test_hot_settings_change_and_bad_ones_are_refused(client: httpx.Client) -> None:
    before = client.get("/v1/config").json()
    assert [name for name, section in before["settings"].items() if section == {}] == []
    changed = client.patch("/v1/config", json={"features": {"algorithm": "ntransform"}})
    assert changed.json()["revision"] != before["revision"]
    client.put("/v1/blobs/toggled", content=noise(400_000, seed=31))

    def sketches() -> list[str]:
        return list(client.get("/v1/stats").json()["sketches"])

    until(lambda: any(name.startswith("ntransform") for name in sketches()), sketches)  # sums are kept for 2 s
    for patch in (
        {"features": {"algorithm": "fineese"}},
        {"container": {"target_bytes": 1}},
        {"features": 3},
        {"x": {"y": 1}},
    ):
        refused = client.patch("/v1/config", json=patch)
        assert (refused.status_code, refused.json()["type"]) == (422, "urn:nearkin:problem:bad-setting")
    assert "choose finesse" in client.patch("/v1/config", json={"features": {"algorithm": "fineese"}}).json()["detail"]
    assert client.get("/v1/config").json()["settings"]["features"]["algorithm"] == "ntransform"
    assert client.patch("/v1/config", content=b"{", headers={"Content-Type": "application/json"}).status_code == 400
    assert client.patch("/v1/config", content=b"a=1", headers={"Content-Type": "text/plain"}).status_code == 415
    back = client.patch("/v1/config", json={"features": {"algorithm": None}}).json()
    assert (back["revision"], back["settings"]) == (before["revision"], before["settings"])


def test_read_only_refuses_puts_and_serves_reads(client: httpx.Client) -> None:
    client.put("/v1/blobs/kept", content=b"x")
    client.patch("/v1/config", json={"service": {"read_only": True}})
    refused = client.put("/v1/blobs/kept", content=b"y")
    assert (refused.status_code, "retry-after" in refused.headers) == (503, True)
    assert client.get("/v1/blobs/kept").content == b"x"
    client.patch("/v1/config", json={"service": {"read_only": None}})
    assert client.put("/v1/blobs/kept", content=b"y").status_code == 201


def test_unknown_resources_and_methods_are_problems(client: httpx.Client) -> None:
    for method, path, status in (
        ("GET", "/nothing", 404),
        ("GET", "/v2", 404),
        ("POST", "/v1/stats", 405),
        ("TRACE", "/v1/blobs/x", 405),
    ):
        answer = client.request(method, path)
        assert (answer.status_code, answer.headers["content-type"]) == (status, "application/problem+json")
    invalid = client.get("/v1/blobs", params={"limit": 0})
    assert (invalid.status_code, invalid.json()["errors"][0]["field"]) == (422, "query.limit")


def test_damage_cuts_the_body_or_is_a_problem(tmp_path: Path) -> None:
    """Cut the body at damage in the middle; return a problem for damage at the start."""
    data = noise(48_000_000, seed=77)
    with running(embedded(tmp_path)) as first, first.client() as client:
        assert client.put("/v1/blobs/hurt", content=data).status_code == 201
    containers = sorted((tmp_path / "containers").rglob("*.nkc"))
    assert len(containers) >= 3
    _flip(containers[-1])
    with running(embedded(tmp_path)) as again, again.client() as client:
        got = bytearray()
        with client.stream("GET", "/v1/blobs/hurt") as answer:
            assert answer.status_code == 200
            with pytest.raises(httpx.RemoteProtocolError):
                _read_into(got, answer)
        assert 0 < len(got) < len(data)
        assert data.startswith(got)
        assert client.get("/livez").status_code == 200
    _flip(containers[0], at=0.01)  # in its first block
    with running(embedded(tmp_path)) as again, again.client() as client:
        answer = client.get("/v1/blobs/hurt")
        assert (answer.status_code, answer.json()["type"]) == (500, "urn:nearkin:problem:corrupt")


def test_broken_manifest_is_named_hides_no_other(tmp_path: Path) -> None:
    """A listed newest version without a good manifest is an error, and no 404."""
    with running(embedded(tmp_path)) as gateway, gateway.client() as client:
        for key in ("a", "b", "c"):
            client.put(f"/v1/blobs/{key}", content=key.encode())
        broken, lost = (tmp_path / object_name("default", key, 1) for key in ("a", "b"))
        _flip(broken)
        lost.unlink()
        page = client.get("/v1/blobs", params={"limit": 2}).json()
        assert ([entry["key"] for entry in page["blobs"]], page["next"]) == (["a"], "b")
        assert [entry["key"] for entry in page["damaged"]] == ["b"]
        assert [entry["key"] for entry in client.get("/v1/blobs", params={"after": "b"}).json()["blobs"]] == ["c"]
        assert client.get("/v1/blobs/a/versions").json()["damaged"][0]["version"] == 1
        assert client.get("/v1/blobs/a").status_code == 500
        missing = client.get("/v1/blobs/b")
        assert (missing.status_code, missing.json()["type"]) == (500, "urn:nearkin:problem:corrupt")
        assert client.get("/v1/blobs/c").content == b"c"


def _read_into(got: bytearray, answer: httpx.Response) -> None:
    for piece in answer.iter_raw():
        got += piece


def _flip(path: Path, at: float = 0.5) -> None:
    data = bytearray(path.read_bytes())
    data[int(len(data) * at)] ^= 1
    path.chmod(0o600)
    path.write_bytes(data)


def test_gateway_and_library_read_each_other(tmp_path: Path) -> None:
    """Read with the library what a gateway stored, and vice versa."""
    with open_store(tmp_path, create=True) as store:
        store.put("from/library", b"library")
    with running(embedded(tmp_path)) as gateway, gateway.client() as client:
        assert client.get("/v1/blobs/from/library").content == b"library"
        client.put("/v1/blobs/from/gateway", content=b"gateway")
    with open_store(tmp_path, create=True) as store:
        assert store.get("from/gateway").read() == b"gateway"


def test_password_of_a_url_is_not_shown(tmp_path: Path) -> None:
    url = {"redis": {"url": "redis://user:hunter2@127.0.0.1:6379/0"}}
    with running(embedded(tmp_path, url)) as gateway, gateway.client() as client:
        shown = client.get("/v1/config")
    assert "hunter2" not in shown.text
    assert shown.json()["settings"]["redis"]["url"].endswith("@127.0.0.1:6379/0")

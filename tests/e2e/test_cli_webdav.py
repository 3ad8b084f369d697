"""`nearkin webdav`: requests of real clients, archives, authentication and damage."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import socket
import stat
import subprocess
import tarfile
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from xml.etree import ElementTree

import httpx
import pytest

from nearkin import open_store
from tests.support.checks.commands import InProcess, assert_refused, command, environment
from tests.support.data.archives import archive_of, sparse_member
from tests.support.fakes.scripted_gateway import TOKEN, ScriptedGateway

PASSWORD = "correct horse battery"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with entries of many kinds."""
    root = tmp_path_factory.mktemp("webdav") / "source"
    (root / "deep" / "er").mkdir(parents=True)
    (root / "empty").mkdir()
    (root / "large.bin").write_bytes(os.urandom(9_000_000))
    (root / "small.txt").write_bytes(b"small")
    (root / "page & <b>.html").write_bytes(b"<script>1</script>")
    (root / "deep" / "umlaut ä").write_bytes(b"1")
    (root / "deep" / "symlink").symlink_to("../small.txt")
    (root / "deep" / "up").symlink_to("..")
    (root / "deep" / "outside").symlink_to("../../../../etc/passwd")
    (root / "absolute").symlink_to("/etc/passwd")
    os.link(root / "small.txt", root / "deep" / "hard link")
    os.mkfifo(root / "fifo")
    Path(os.fsdecode(os.fsencode(root) + b"/bytes \xff")).write_bytes(b"1")
    with (root / "sparse").open("wb") as file:
        file.seek(1 << 20)
        file.write(os.urandom(8192))
        file.truncate(5 << 20)
    (root / "small.txt").chmod(0o640)
    os.utime(root / "small.txt", (1, 1_234_567_890))
    return root


@pytest.fixture(scope="module")
def store(source: Path) -> Path:
    folder = source.parent / "store"
    with open_store(folder, create=True) as opened:
        opened.backup("home/kim", [source])
        opened.put("home/kim", b"the second version is a blob")
        opened.put("blob", b"blob")
    return folder


@contextmanager
def served(*arguments: str | Path, options: Sequence[str | Path] = ()) -> Iterator[str]:
    """Run the server for a block; yield its URL; it must end with code 0 at SIGINT."""
    line = command("--json", *arguments, "webdav", "--port", "0", *options)
    process = subprocess.Popen(
        line, env=environment() | {"NEARKIN_TOKEN": TOKEN}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        first = process.stdout.readline()
        assert first, process.stderr and process.stderr.read()
        yield json.loads(first)["url"]
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    finally:
        if process.poll() is None:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(30)
            process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def url(store: Path) -> Iterator[str]:
    with served("--store", store) as found:
        yield found


def listed(url: str, path: str) -> dict[str, ElementTree.Element]:
    answer = httpx.request("PROPFIND", url + path, headers={"Depth": "1"})
    assert answer.status_code == 207, answer.text
    responses = ElementTree.fromstring(answer.content).findall("{DAV:}response")
    return {response.findtext("{DAV:}href", ""): response for response in responses}


def test_folders_are_those_of_the_mount(url: str) -> None:
    assert set(listed(url, "")) == {"/", "/blob/", "/home/"}
    names = [name.removeprefix("/home/kim/") for name in listed(url, "home/kim/")]
    assert names[0] == ""
    assert set(names) >= {"1/", "2", "latest"}
    assert any(name.endswith(("Z", "Z/")) for name in names)
    assert set(listed(url, "home/kim/1/deep/")) == {
        f"/home/kim/1/deep/{name}" for name in ("", "er/", "symlink", "hard%20link", "umlaut%20%C3%A4")
    }
    entry = listed(url, "home/kim/1/")["/home/kim/1/small.txt"]
    assert entry.findtext(".//{DAV:}getcontentlength") == "5"
    assert entry.findtext(".//{DAV:}getlastmodified") == "Fri, 13 Feb 2009 23:31:30 GMT"
    assert entry.find(".//{DAV:}resourcetype/{DAV:}collection") is None


def test_files_and_ranges_are_read(url: str, source: Path) -> None:
    content = (source / "large.bin").read_bytes()
    whole = httpx.get(url + "home/kim/1/large.bin")
    assert (whole.status_code, whole.content == content) == (200, True)
    part = httpx.get(url + "home/kim/1/large.bin", headers={"Range": "bytes=5000001-5070000"})
    assert (part.status_code, part.content == content[5_000_001:5_070_001]) == (206, True)
    assert part.headers["content-range"] == "bytes 5000001-5070000/9000000"
    assert httpx.get(url + "home/kim/1/large.bin", headers={"Range": "bytes=9000000-"}).status_code == 416
    assert httpx.get(url + "home/kim/1/sparse").content == (source / "sparse").read_bytes()
    assert httpx.get(url + "home/kim/latest").content == b"the second version is a blob"
    assert httpx.get(url + "blob/1").content == b"blob"
    assert httpx.get(url + "home/kim/1/deep/symlink").content == b"small"
    unchanged = httpx.get(url + "home/kim/1/small.txt", headers={"If-None-Match": f"{whole.headers['etag']}"})
    assert unchanged.status_code == 200
    same = httpx.get(url + "home/kim/1/large.bin", headers={"If-None-Match": f"{whole.headers['etag']}"})
    assert same.status_code == 304


@pytest.mark.parametrize(
    "path",
    ["nothing", "home/kim/9", "home/kim/1/nothing", "home/kim/1/absolute", "home/kim/1/deep/outside", "blob/1/x"],
)
def test_paths_that_are_not_shown_are_not_found(url: str, path: str) -> None:
    assert httpx.get(url + path).status_code == 404
    assert httpx.request("PROPFIND", url + path, headers={"Depth": "0"}).status_code == 404


@pytest.mark.parametrize("method", ["PUT", "DELETE", "MKCOL", "PROPPATCH", "LOCK", "MOVE", "COPY", "POST"])
def test_nothing_can_be_changed(url: str, method: str) -> None:
    headers = {"Destination": f"{url}home/kim/1/other"}
    answer = httpx.request(method, url + "home/kim/1/small.txt", headers=headers, content=b"")
    assert answer.status_code in (403, 405, 501)
    assert httpx.get(url + "home/kim/1/small.txt").content == b"small"


def test_pages_of_folders_are_escaped(url: str) -> None:
    page = httpx.get(url + "home/kim/1/")
    assert page.status_code == 200
    assert "page &amp; &lt;b&gt;.html" in page.text
    assert "?archive=zip" in page.text
    file = httpx.get(url + "home/kim/1/page%20%26%20%3Cb%3E.html")
    assert file.headers["content-security-policy"] == "sandbox"


def test_unbounded_listing_and_other_hosts_are_refused(url: str) -> None:
    answer = httpx.request("PROPFIND", url, headers={"Depth": "infinity"})
    assert answer.status_code == 403
    assert "propfind-finite-depth" in answer.text
    assert httpx.get(url, headers={"Host": "attacker.example:8081"}).status_code == 403
    assert httpx.get(url, headers={"Host": "localhost"}).status_code == 200


def test_folder_is_downloaded_as_tar(url: str, source: Path, tmp_path: Path) -> None:
    answer = httpx.get(url + "home/kim/1/?archive=tar")
    assert answer.headers["content-disposition"].endswith("1.tar")
    with tarfile.open(fileobj=io.BytesIO(answer.content)) as archive:
        archive.extractall(tmp_path, filter="fully_trusted")
    compared = subprocess.run(
        ["diff", "-r", "--no-dereference", "--exclude=fifo", source, tmp_path], capture_output=True, check=False
    )
    assert (compared.returncode, compared.stdout) == (0, b"")
    part = httpx.get(url + "home/kim/1/deep?archive=tar")
    with tarfile.open(fileobj=io.BytesIO(part.content)) as archive:
        assert sorted(archive.getnames()) == [".", "er", "hard link", "outside", "symlink", "umlaut ä", "up"]


def test_folder_is_downloaded_as_zip(url: str, source: Path, tmp_path: Path) -> None:
    answer = httpx.get(url + "home/kim/1/?archive=zip")
    with zipfile.ZipFile(io.BytesIO(answer.content)) as archive:
        assert archive.testzip() is None
        members = {member.filename: member for member in archive.infolist()}
        assert members["small.txt"].date_time == (2009, 2, 13, 23, 31, 30)
        assert stat.S_IMODE(members["small.txt"].external_attr >> 16) == 0o640
        assert stat.S_ISLNK(members["deep/symlink"].external_attr >> 16)
        assert archive.read("deep/symlink") == b"../small.txt"
        assert archive.read("bytes \\xff") == b"1"
        assert members["empty/"].is_dir()
        for name in ("large.bin", "sparse", "deep/hard link", "deep/umlaut ä"):
            assert archive.read(name) == (source / name).read_bytes()
    assert "fifo" not in members
    if shutil.which("unzip"):
        (tmp_path / "t.zip").write_bytes(answer.content)
        subprocess.run(["unzip", "-tqq", tmp_path / "t.zip"], check=True)
    assert httpx.get(url + "home/kim/?archive=zip").status_code == 400
    assert httpx.get(url + "home/kim/1/?archive=rar").status_code == 400
    assert httpx.get(url + "home/kim/8/?archive=tar").status_code == 404


def test_curl_copies_a_file(url: str, source: Path, tmp_path: Path) -> None:
    subprocess.run(["curl", "-sfo", tmp_path / "copy", f"{url}home/kim/1/large.bin"], check=True)
    assert (tmp_path / "copy").read_bytes() == (source / "large.bin").read_bytes()
    listing = ["curl", "-sf", "-X", "PROPFIND", "-H", "Depth: 1", f"{url}home/kim/1/"]
    assert b"large.bin" in subprocess.run(listing, check=True, capture_output=True).stdout


def test_password_is_required(store: Path, tmp_path: Path) -> None:
    (tmp_path / "password").write_text(f"{PASSWORD}\n")
    options = ("--password-file", tmp_path / "password", "--user", "kim")
    with served("--store", store, options=options) as url:
        for auth in (None, ("kim", "wrong"), ("other", PASSWORD)):
            answer = httpx.get(url + "blob/1", auth=auth)
            assert answer.status_code == 401
            assert "Basic" in answer.headers["www-authenticate"]
        for header in ("Basic", "Basic !!", "Basic a2lt", "Basic /w==", "basic a2lt", "Other x", "x"):
            answer = httpx.get(url + "blob/1", headers={"Authorization": header})
            assert (answer.status_code, header) == (401, header)
        assert httpx.get(url + "home/kim/1/?archive=tar").status_code == 401
        assert httpx.get(url + "blob/1", auth=("kim", PASSWORD)).content == b"blob"
        assert httpx.get(url + "blob/1", auth=("kim", PASSWORD), headers={"Host": "backup.example"}).status_code == 200


def test_wrong_options_are_refused(store: Path, tmp_path: Path, call: InProcess) -> None:
    (tmp_path / "short").write_text("short\n")
    for options, reason in (
        (("--host", "0.0.0.0"), "without --password-file only loopback is served"),
        (("--password-file", tmp_path / "short"), "fewer than 12 characters"),
        (("--password-file", tmp_path / "missing"), "no such file"),
        (("--certificate", tmp_path / "short"), "name both of them"),
    ):
        assert_refused(call("--store", store, "webdav", *options), 2, reason)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        line = command("--store", store, "webdav", "--port", str(taken.getsockname()[1]))
        done = subprocess.run(line, env=environment(), capture_output=True, check=False)
        assert_refused(done, 2, "webdav: 127.0.0.1 port")


def test_store_behind_a_server_is_served(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").write_bytes(b"remote")
    with ScriptedGateway(tmp_path / "served") as gateway:
        subprocess.run(
            command("--server", gateway.url, "backup", "k", tmp_path / "folder"),
            env=environment() | {"NEARKIN_TOKEN": TOKEN},
            check=True,
        )
        with served("--server", gateway.url) as url:
            assert httpx.get(url + "k/1/file").text == "remote"


def test_damaged_content_breaks_the_connection(source: Path, tmp_path: Path) -> None:
    with open_store(tmp_path / "store", create=True) as store:
        store.backup("home", [source])
    (container,) = sorted((tmp_path / "store" / "containers").rglob("*.nkc"), key=lambda path: -path.stat().st_size)[:1]
    content = bytearray(container.read_bytes())
    content[len(content) // 2] ^= 1
    container.chmod(0o600)
    container.write_bytes(content)
    with served("--store", tmp_path / "store") as url:
        for path in ("home/1/large.bin", "home/1/?archive=tar", "home/1/?archive=zip"):
            with pytest.raises(httpx.RemoteProtocolError):
                httpx.get(url + path)
        assert httpx.get(url + "home/1/small.txt").content == b"small"


def answer_of(url: str, request: bytes) -> bytes:
    """Return the first line of the answer to a request that no client library would send."""
    parts = httpx.URL(url)
    with socket.create_connection((parts.host, parts.port or 80), 30) as connection:
        connection.sendall(request + b"\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        return connection.makefile("rb").readline().strip()


@pytest.mark.parametrize(
    ("request_line", "status"),
    [
        (b"GET /home/kim/1/bytes%20%ff HTTP/1.1", b"404 Not Found"),
        (b"PROPFIND /home/kim/1/%ff/x HTTP/1.1", b"404 Not Found"),
        (b"GET /home/kim/1/%ff?archive=tar HTTP/1.1", b"404 Not Found"),
        (b"GET * HTTP/1.1", b"400 Bad Request"),
        (b"OPTIONS * HTTP/1.1", b"200 OK"),
    ],
)
def test_every_path_has_an_answer(url: str, request_line: bytes, status: bytes) -> None:
    """Paths that are not UTF-8 ended the connection without one."""
    assert answer_of(url, request_line) == b"HTTP/1.1 " + status


def test_endless_holes_are_refused(tmp_path: Path) -> None:
    """A file of 16 TiB from an archive of 2 KB: ranges and tar are served, 16 TiB of zeros are not."""
    size = 16 << 40
    archive = archive_of([sparse_member("huge", size, ((size - 4, 4),), b"tail"), ("small", b"1")])
    with open_store(tmp_path / "store", create=True) as store:
        store.import_tar("home", io.BytesIO(archive))
    with served("--store", tmp_path / "store") as url:
        answer = httpx.get(url + "home/1/huge")
        assert (answer.status_code, "1,099,511,627,776 at most" in answer.text) == (403, True)
        assert "request a range" in answer.text
        too_long = httpx.get(url + "home/1/huge", headers={"Range": "bytes=1-1199511627776"})
        assert too_long.status_code == 403
        part = httpx.get(url + "home/1/huge", headers={"Range": "bytes=5-2000004"})
        assert (part.status_code, part.content) == (206, bytes(2_000_000))
        assert httpx.get(url + "home/1/huge", headers={"Range": "bytes=-6"}).content == b"\0\0tail"
        refused = httpx.get(url + "home/1/?archive=zip")
        assert (refused.status_code, "download as tar" in refused.text) == (403, True)
        assert httpx.get(url + "home/1/huge?archive=zip").status_code == 403
        with tarfile.open(fileobj=io.BytesIO(httpx.get(url + "home/1/?archive=tar").content)) as found:
            assert sorted(found.getnames()) == [".", "huge", "small"]
        assert httpx.get(url + "home/1/small?archive=zip").status_code == 200


def test_store_that_vanishes_is_not_an_empty_one(source: Path, tmp_path: Path) -> None:
    """An unmounted disk is an error, never a file or a version that does not exist (I10)."""
    with open_store(tmp_path / "store", create=True) as store:
        store.backup("home", [source])
    with served("--store", tmp_path / "store") as url:
        assert httpx.get(url + "home/1/small.txt").content == b"small"
        (tmp_path / "store").rename(tmp_path / "elsewhere")
        for path in ("home/1/large.bin", "home/1/?archive=tar"):
            assert httpx.get(url + path).status_code == 500
        (tmp_path / "elsewhere").rename(tmp_path / "store")
        assert httpx.get(url + "home/1/large.bin").content == (source / "large.bin").read_bytes()

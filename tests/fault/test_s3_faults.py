"""Faults between here and S3: every answer is correct, and no partial object is taken for a whole one."""

from __future__ import annotations

import secrets
import socketserver
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import pytest

from nearkin.lab.generated_data import random_bytes
from nearkin_shared.config.loader import with_changes
from nearkin_shared.config.settings import Settings
from nearkin_shared.errors import ConfigError, NotFound, StoreUnavailable
from nearkin_shared.objectstore.base import AlreadyExists
from nearkin_shared.objectstore.bucket_limits import RequestLimits
from nearkin_shared.objectstore.factory import open_store_of
from nearkin_shared.objectstore.s3 import S3ObjectStore
from tests.support.checks.waiting import until
from tests.support.fakes.faulty_http import FaultyHttp
from tests.support.servers.servers import S3

DATA = random_bytes(300_000, 1)
OTHER = random_bytes(300_000, 2)
RETRIES = 3


@pytest.fixture
def bucket(versitygw: S3) -> str:
    return versitygw.make_bucket(f"b{secrets.token_hex(6)}")


@pytest.fixture
def direct(versitygw: S3, bucket: str) -> S3ObjectStore:
    """The same store without faults."""
    return S3ObjectStore(versitygw.settings(bucket))


def open_through(proxy: FaultyHttp, server: S3, bucket: str, retries: int = RETRIES, **changed: Any) -> S3ObjectStore:
    limits = RequestLimits(request_seconds=4, retries=retries)
    return S3ObjectStore(server.settings(bucket, endpoint=proxy.url, **changed), limits)


# --- writing ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("script", "puts"),
    [
        ("E", 2),  # never reached the server
        ("5", 2),
        ("C", 2),  # 409: no object was created
        ("L", 1),  # done, the reply lost: a check is enough, nothing is sent twice
        ("F", 1),  # done, and answered with an error
        ("D", 1),  # done, the client had given up
        ("W", 2),  # arrives after the client had given up and sent it again
        ("EEE", 4),
        ("5EL", 3),
        ("EFE", 2),
    ],
)
def test_put_that_was_done_reports_success(
    versitygw: S3, bucket: str, direct: S3ObjectStore, script: str, puts: int
) -> None:
    """A put that was done reports success."""
    with FaultyHttp(versitygw.port, script, held=lambda: until(lambda: list(direct.names("")))) as proxy:
        open_through(proxy, versitygw, bucket).put_new("a/b", DATA)
        assert len(proxy.met) == puts
    assert direct.get("a/b") == DATA
    assert list(direct.names("")) == [("a/b", len(DATA))]


@pytest.mark.parametrize("script", ["", "E", "5", "C", "L", "F", "D", "W"])
def test_put_of_an_existing_name_never_reports_success(
    versitygw: S3, bucket: str, direct: S3ObjectStore, script: str
) -> None:
    """A put of a name that another writer created never reports success."""
    direct.put_new("a", OTHER)
    with FaultyHttp(versitygw.port, script) as proxy:
        for data in (DATA, OTHER):  # equal bytes do not make the object the caller's own
            with pytest.raises(AlreadyExists, match="a: already there"):
                open_through(proxy, versitygw, bucket).put_new("a", data)
        assert proxy.spent
    assert direct.get("a") == OTHER


@pytest.mark.parametrize("letter", ["E", "5", "C"])
def test_put_that_failed_leaves_nothing(versitygw: S3, bucket: str, direct: S3ObjectStore, letter: str) -> None:
    """A put that never reached the server raises and leaves nothing."""
    with FaultyHttp(versitygw.port, letter * 20) as proxy:
        with pytest.raises(StoreUnavailable, match=rf"^a: .*; tried {RETRIES + 1} times; it may or may not be there$"):
            open_through(proxy, versitygw, bucket).put_new("a", DATA)
        assert len(proxy.met) == RETRIES + 1
    with pytest.raises(NotFound):
        direct.get("a")


def test_put_of_unknown_outcome_is_an_error(versitygw: S3, bucket: str, direct: S3ObjectStore) -> None:
    """A put whose outcome cannot be checked is not reported as done."""
    with FaultyHttp(versitygw.port, "L" * 20) as writes, FaultyHttp(writes.port, "5" * 20, method="GET") as reads:
        with pytest.raises(StoreUnavailable, match=r"503.*may or may not be there"):
            open_through(reads, versitygw, bucket).put_new("a", DATA)
        assert len(writes.met) == len(reads.met) == RETRIES + 1
    assert direct.get("a") == DATA


def test_second_check_settles_an_unknown_outcome(versitygw: S3, bucket: str, direct: S3ObjectStore) -> None:
    """A second check settles an outcome that could not be checked."""
    with FaultyHttp(versitygw.port, "L") as writes, FaultyHttp(writes.port, "5E", method="GET") as reads:
        open_through(reads, versitygw, bucket).put_new("a", DATA)
        assert (len(writes.met), len(reads.met)) == (3, 3)
    assert direct.get("a") == DATA


def test_late_put_does_not_overwrite_another_object(versitygw: S3, bucket: str, direct: S3ObjectStore) -> None:
    """A late put does not overwrite an object that was created meanwhile.

    The first try hangs past its timeout, others create the name, then the first one reaches the server.
    """
    taken = threading.Event()

    def take() -> None:
        until(lambda: len(proxy.met) > 1)  # the first try was given up
        direct.put_new("a", OTHER)
        taken.set()

    with FaultyHttp(versitygw.port, "W" + "E" * 20, held=lambda: taken.wait(60)) as proxy:
        thread = threading.Thread(target=take)
        thread.start()
        with pytest.raises(AlreadyExists):
            open_through(proxy, versitygw, bucket, retries=12).put_new("a", DATA)
        thread.join()
    assert direct.get("a") == OTHER


# --- reading ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("script", ["E", "5", "L", "H", "EH5"])
def test_read_is_whole_or_an_error(versitygw: S3, bucket: str, direct: S3ObjectStore, script: str) -> None:
    """A read is whole or an error."""
    direct.put_new("a", DATA)
    with FaultyHttp(versitygw.port, script, method="GET") as proxy:
        assert open_through(proxy, versitygw, bucket).get("a") == DATA
        assert proxy.spent
    with FaultyHttp(versitygw.port, script, method="GET") as proxy:
        found = open_through(proxy, versitygw, bucket).get_ranges("a", [0, 299_000], [1000, 300_000])
        assert found == [DATA[:1000], DATA[299_000:]]
    with FaultyHttp(versitygw.port, script * 20, method="GET") as proxy, pytest.raises(StoreUnavailable):
        open_through(proxy, versitygw, bucket).get("a")


@pytest.mark.parametrize("script", ["E", "5", "L"])
def test_listing_is_whole_or_an_error(versitygw: S3, bucket: str, direct: S3ObjectStore, script: str) -> None:
    """A listing is whole or an error."""
    expected = {f"m/{number:04d}": 1 for number in range(1100)}  # two pages
    for name in expected:
        direct.put_new(name, b"x")
    for before in ("", "."):
        with FaultyHttp(versitygw.port, before + script, method="GET") as proxy:
            assert dict(open_through(proxy, versitygw, bucket).names("m")) == expected
            assert proxy.spent
        with FaultyHttp(versitygw.port, before + script * 20, method="GET") as proxy:
            objects = open_through(proxy, versitygw, bucket)
            with pytest.raises(StoreUnavailable):
                list(objects.names("m"))


def test_listing_with_truncated_page_is_an_error(versitygw: S3, bucket: str, direct: S3ObjectStore) -> None:
    """A page of names that is cut short is an error."""
    direct.put_new("m/a", b"x")
    with FaultyHttp(versitygw.port, "H", method="GET") as proxy:
        objects = open_through(proxy, versitygw, bucket)
        with pytest.raises(StoreUnavailable, match="body error"):
            list(objects.names("m"))
        assert list(objects.names("m")) == [("m/a", 1)]


@pytest.fixture
def own(tmp_path_factory: pytest.TempPathFactory, versitygw: S3) -> Iterator[S3]:
    with S3(tmp_path_factory.mktemp("own"), program=versitygw.program) as server:
        yield server


def test_server_away_for_a_while_only_costs_time(own: S3) -> None:
    """A server that is away for a while costs time and nothing else."""
    objects = S3ObjectStore(own.settings(own.make_bucket("bucket")), RequestLimits(retries=20))
    contents = {f"a/{number}": random_bytes(50_000, number) for number in range(200)}
    failed: list[BaseException] = []

    def write() -> None:
        try:
            for name, data in contents.items():
                objects.put_new(name, data)
                assert objects.get(name) == data
        except BaseException as err:
            failed.append(err)

    writer = threading.Thread(target=write)
    writer.start()
    for _ in range(2):
        time.sleep(0.1)
        own.kill()
        time.sleep(1.5)
        own.start()
    writer.join(300)
    assert not writer.is_alive()
    assert failed == []
    assert {name: objects.get(name) for name, _ in objects.names("")} == contents


def test_server_away_for_eight_seconds_is_awaited(own: S3) -> None:
    """The limits in force outlast a restart: their waits grow."""
    objects = S3ObjectStore(own.settings(own.make_bucket("bucket")))
    objects.put_new("a/1", DATA)
    own.kill()
    starting = threading.Timer(8, own.start)
    starting.start()
    assert objects.get("a/1") == DATA
    starting.join()


# --- messages for the operator ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"url": "s3://no-such-bucket"}, "bucket no-such-bucket at http.*NoSuchBucket: make the bucket, or correct"),
        ({"secret_access_key": "wrong"}, "SignatureDoesNotMatch: check object_store.access_key_id and"),
        ({"access_key_id": "unknown-key"}, "XAdminUserNotFound: check object_store.access_key_id and"),
        ({"access_key_id": None, "secret_access_key": None}, "no keys found: set object_store.access_key_id and"),
        ({"region": "eu-west-1"}, 'expecting "us-east-1"; correct object_store.region'),
        ({"endpoint": "http://127.0.0.1:9"}, "ConnectionRefused; nothing listens there: start the server, or correct"),
    ],
)
def test_wrong_setup_is_one_line_and_no_empty_store(
    versitygw: S3,
    direct: S3ObjectStore,
    bucket: str,
    changed: dict[str, Any],
    text: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A wrong setup is one line with the remedy, and never an empty store."""
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", "http://127.0.0.1:9")  # else a role is requested from 169.254.169.254
    direct.put_new("a", DATA)
    objects = S3ObjectStore(versitygw.settings(bucket, **changed), RequestLimits(retries=1))
    for call in (
        objects.check,
        lambda: objects.get("a"),
        lambda: objects.get_ranges("a", [0], [5]),
        lambda: objects.put_new("b", DATA),
        lambda: objects.delete("a"),
        lambda: list(objects.names("a")),
    ):
        with pytest.raises(StoreUnavailable, match=text) as refused:
            call()
        assert "\n" not in str(refused.value)
        assert "wrong" not in str(refused.value).replace("is wrong", "")  # the secret
    with pytest.raises(StoreUnavailable):
        objects.size_bytes("a")
    assert dict(direct.names("")) == {"a": len(DATA)}


def test_ranges_beyond_a_truncated_object_are_empty(bucket: str, direct: S3ObjectStore) -> None:
    """Ranges beyond the end of an object that was cut short are empty.

    The client joins them to one, and panics: not an Exception, so that no handler caught it and a worker ended.
    """
    direct.put_new("a", DATA[:100])
    for places in ([(0, 10), (200, 300)], [(60, 70), (150, 160)], [(0, 10), (101, 110), (200, 201), (50, 60)]):
        found = direct.get_ranges("a", [start for start, _ in places], [end for _, end in places])
        assert list(found) == [DATA[:100][start:end] for start, end in places]


def test_ranges_in_any_order_are_the_requested_ones(direct: S3ObjectStore) -> None:
    """Ranges far apart, overlapping and out of order return the requested bytes."""
    data = random_bytes(5_000_000, 7)
    direct.put_new("a", data)
    places = [
        (4_000_000, 4_000_100),
        (0, 10),
        (5, 20),
        (7, 7),
        (10, 12),
        (1_048_596, 1_048_600),
        (2_500_000, 9_000_000),
    ]
    found = direct.get_ranges("a", [start for start, _ in places], [end for _, end in places])
    assert list(found) == [data[start:end] for start, end in places]


PAGES = {
    "404": b"HTTP/1.1 404 Not Found\r\nContent-Length: 16\r\nConnection: close\r\n\r\n<html>404</html>",
    "200": b"HTTP/1.1 200 OK\r\nContent-Length: 18\r\nConnection: close\r\n\r\n<html>login</html>",
}


class Pages(socketserver.BaseRequestHandler):
    """A proxy whose own servers are down, or a server's console: it answers each request with a page."""

    page = b""

    def handle(self) -> None:
        received = self.request.recv(1 << 16)
        self.request.sendall(self.page.partition(b"<html>")[0] if received.startswith(b"HEAD") else self.page)


@pytest.mark.parametrize("status", sorted(PAGES))
def test_page_of_a_proxy_is_no_answer_about_an_object(versitygw: S3, bucket: str, status: str) -> None:
    """A page of a proxy is no answer about an object."""
    handler = type("Paged", (Pages,), {"page": PAGES[status]})
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), handler) as listener:
        thread = threading.Thread(target=listener.serve_forever, args=(0.05,))
        thread.start()
        try:
            url = f"http://127.0.0.1:{listener.server_address[1]}"
            objects = S3ObjectStore(versitygw.settings(bucket, endpoint=url), RequestLimits(retries=1, retry_seconds=2))
            calls: list[Callable[[], object]] = [
                objects.check,
                lambda: objects.get("a"),
                lambda: objects.size_bytes("a"),
            ]
            calls += [lambda: objects.put_new("a", b"x"), lambda: objects.replace("a", b"x")]
            calls += [lambda: objects.get_ranges("a", [0], [1])]
            calls += [lambda: list(objects.names("a"))]
            if status == "404":  # a 200 gives no hint
                calls += [lambda: objects.delete("a")]
            for call in calls:
                with pytest.raises(StoreUnavailable):
                    call()
        finally:
            listener.shutdown()
            thread.join()


def test_session_token_of_the_environment_is_not_sent(
    versitygw: S3, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A session token in the environment is not sent with other keys."""
    monkeypatch.setenv("AWS_SESSION_TOKEN", "of another role")
    objects = S3ObjectStore(versitygw.settings(bucket), RequestLimits(retries=0))
    objects.put_new("a", DATA)
    assert objects.get("a") == DATA


@pytest.mark.parametrize("changed", [{"url": "s3://bucket/a//b"}, {"url": "s3://bucket/../x"}, {"ca_file": __file__}])
def test_setting_refused_by_the_client_is_a_setting_error(versitygw: S3, changed: dict[str, Any]) -> None:
    """A value that the client refuses is a refused setting."""
    with pytest.raises(ConfigError, match="object_store: "):
        S3ObjectStore(versitygw.settings("bucket", **changed))


@pytest.mark.parametrize(
    "changed",
    [
        {"access_key_id": "key\n"},
        {"secret_access_key": "hidden\n"},
        {"session_token": "token\n"},
        {"region": "eu\nwest"},
        {"endpoint": "http://user:hidden@127.0.0.1:9"},
        {"endpoint": "http://"},
        {"endpoint": "http://127.0.0.1:99999"},
    ],
)
def test_setting_that_panics_the_client_is_refused(versitygw: S3, changed: dict[str, Any]) -> None:
    """Settings at which the client would panic are refused."""
    with pytest.raises(ValueError, match=next(iter(changed))) as refused:
        versitygw.settings("bucket", **changed)
    assert "hidden" not in str(refused.value)


def test_server_without_conditional_create_is_refused(
    versitygw: S3, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that overwrites despite a conditional create is refused."""
    changes = {"object_store": asdict(versitygw.settings(bucket)), "storage": {"create": True}}
    settings = with_changes(Settings(), changes)
    open_store_of(settings)
    open_store_of(settings)
    monkeypatch.setattr(S3ObjectStore, "put_new", lambda self, name, *parts: self.replace(name, b"".join(parts)))
    with pytest.raises(ConfigError, match="If-None-Match"):
        open_store_of(settings)

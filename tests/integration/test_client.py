"""The client against a gateway that fails as it is told to: what is put is stored once, what is got is what was put."""

from __future__ import annotations

import asyncio
import io
import os
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

import nearkin
from nearkin.client import exchange
from nearkin.client.aio import AsyncRemoteStore
from nearkin.client.remote import RemoteStore
from nearkin.errors import (
    BadInput,
    ConfigError,
    Corrupt,
    Denied,
    NotFound,
    Permanent,
    Retryable,
    SourceFailed,
    StoreUnavailable,
)
from nearkin.formats import answers
from nearkin.testing.gateway import TOKEN, ScriptedGateway
from nearkin.testing.samples import noise

DATA = noise(300_000, "client").tobytes()
KEYS = ("a/b", "..", ".", "ä ö%2F?#&=+", "versions/1", "a//b/", "\u202e\n", "x" * 1024)

T = TypeVar("T")


@pytest.fixture(autouse=True)
def _soon_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "_jitter", lambda _state: 0.001)
    for name in [name for name in os.environ if name.startswith("NEARKIN_TOKEN")]:
        monkeypatch.delenv(name)


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[ScriptedGateway]:
    with ScriptedGateway(tmp_path / "store") as server:
        yield server


@pytest.fixture
def store(gateway: ScriptedGateway) -> Iterator[RemoteStore]:
    with nearkin.connect(gateway.url, TOKEN, commit_seconds=5.0) as opened:
        yield opened


class Unseekable(io.RawIOBase):
    """A pipe's manners."""

    def __init__(self, data: bytes) -> None:
        self._data = io.BytesIO(data)

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        return self._data.read(size)


# --- the same calls as to a local store ------------------------------------------------------------------------------


def test_every_call_answers_what_the_store_itself_does(store: RemoteStore, gateway: ScriptedGateway) -> None:
    first = store.put("a/b", DATA, metadata={"näme": "wert\n", "Kase-%41": " %20 "})
    second = store.put("a/b", DATA[:200_000] + b"between" + DATA[200_000:])
    local = gateway.read()
    assert (first.info.version, second.info.version) == (1, 2)
    assert second.ledger.delta_chunks
    for found, expected in (
        (store.info("a/b"), local.info("a/b")),
        (store.info("a/b", 1), local.info("a/b", 1)),
        (first.info, local.info("a/b", 1)),
    ):
        assert answers.info_json(found) == answers.info_json(expected)
    assert store.stats() == local.stats()
    explained = store.explain("a/b", 1)
    assert answers.explain_json(explained, segments=True) == answers.explain_json(
        local.explain("a/b", 1), segments=True
    )
    assert store.get("a/b").read() == local.get("a/b").read()
    assert store.get("a/b", 1, start=5, stop=70_000).read() == DATA[5:70_000]
    assert store.get("a/b", 1, start=299_999).read() == DATA[-1:]
    assert store.get("a/b", 1, start=7, stop=7).read() == b""
    file = io.BytesIO()
    heard: list[int] = []
    assert store.get("a/b", 1).write_to(file, progress=heard.append) == len(DATA) == sum(heard)
    assert file.getvalue() == DATA


@pytest.mark.parametrize("key", KEYS, ids=ascii)
def test_any_key_goes_there_and_back(store: RemoteStore, key: str) -> None:
    assert store.put(key, b"content of " + key.encode()).info.key == key
    assert store.get(key).read() == b"content of " + key.encode()
    assert store.info(key, 1).key == key
    assert store.explain(key).info.key == key


@pytest.mark.parametrize("size", [0, 1, 65_536, 1_048_576, 1_048_577])
def test_blobs_of_every_size_come_back(store: RemoteStore, size: int) -> None:
    data = noise(size, "size").tobytes()
    assert store.put("k", data).info.size_bytes == size
    assert store.get("k").read() == data


def test_paths_files_and_pipes_are_sources(store: RemoteStore, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(DATA)
    for number, source in enumerate((tmp_path / "file", io.BytesIO(DATA), Unseekable(DATA), DATA), 1):
        heard: list[int] = []
        assert store.put("k", source, progress=heard.append).info.version == number  # type: ignore[arg-type]
        assert sum(heard) == len(DATA)
        assert store.get("k").read() == DATA
    half = io.BytesIO(DATA)
    half.seek(100_000)
    assert store.put("k", half).info.size_bytes == 200_000


def test_a_listing_takes_as_many_pages_as_it_needs(store: RemoteStore) -> None:
    keys = [f"p/{number:02}" for number in range(8)]
    results = list(store.put_many((key, key.encode()) for key in [*keys, "q"]))
    assert [result.info.key for result in results] == [*keys, "q"]
    store.put("p/03", b"again")
    assert [info.key for info in store.versions("p/")] == keys
    assert [info.key for info in store.versions()] == [*keys, "q"]
    found = [(info.key, info.version) for info in store.versions("p/0", all_versions=True)]
    assert found == [(key, 1) for key in keys[:4]] + [("p/03", 2)] + [(key, 1) for key in keys[4:]]
    assert store.versions("nothing") == []


def test_settings_of_the_services_are_shown_and_changed(store: RemoteStore) -> None:
    assert store.config()["settings"]["features"]["algorithm"] == "finesse"
    changed = store.change_config({"features": {"algorithm": "odess"}})
    assert changed["settings"]["features"]["algorithm"] == "odess"


# --- faults on the way up --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["busy", "reset", "lost-reply"])
@pytest.mark.parametrize("kind", ["bytes", "path", "file"])
def test_a_put_that_fails_on_the_way_is_sent_again_and_stored_once(
    store: RemoteStore, gateway: ScriptedGateway, tmp_path: Path, fault: str, kind: str
) -> None:
    (tmp_path / "file").write_bytes(DATA)
    source: Any = {"bytes": DATA, "path": tmp_path / "file", "file": io.BytesIO(DATA)}[kind]
    gateway.script(fault, fault)
    heard: list[int] = []
    assert store.put("k", source, progress=heard.append).info.version == 1
    assert sum(heard) == len(DATA)
    assert len(gateway.seen) == 3
    assert len({headers["idempotency-key"] for _, _, headers in gateway.seen}) == 1
    assert len(gateway.read().versions(all_versions=True)) == 1


def test_two_puts_of_one_content_are_two_versions(store: RemoteStore) -> None:
    assert [store.put("k", DATA).info.version for _ in range(2)] == [1, 2]


def test_a_pipe_is_never_sent_twice(store: RemoteStore, gateway: ScriptedGateway) -> None:
    gateway.script("busy")
    with pytest.raises(StoreUnavailable, match="busy for a moment"):
        store.put("k", Unseekable(DATA))  # type: ignore[arg-type]
    assert len(gateway.seen) == 1
    assert gateway.read().versions() == []


def test_retries_end(store: RemoteStore, gateway: ScriptedGateway) -> None:
    gateway.script(*["busy"] * 50)
    with pytest.raises(StoreUnavailable, match="busy for a moment"):
        store.put("k", DATA)
    assert len(gateway.seen) == exchange.ATTEMPTS_MAX
    with pytest.raises(StoreUnavailable):
        store.info("k")
    assert len(gateway.seen) == 2 * exchange.ATTEMPTS_MAX


def test_a_gateway_that_takes_no_puts_for_now_is_not_asked_again(store: RemoteStore, gateway: ScriptedGateway) -> None:
    gateway.script("read-only")
    with pytest.raises(Retryable, match=r"service\.read_only is set"):
        store.put("k", DATA)
    assert len(gateway.seen) == 1


def test_settings_are_changed_once_or_not_at_all(store: RemoteStore, gateway: ScriptedGateway) -> None:
    gateway.script("reset")
    with pytest.raises(Retryable):
        store.change_config({"features": {"algorithm": "odess"}})
    assert len(gateway.seen) == 1


def test_an_accepted_put_is_followed_to_its_commit(store: RemoteStore, gateway: ScriptedGateway) -> None:
    gateway.script("accept", "busy")
    result = store.put("k", DATA)
    assert result.info.version == 1
    assert [path.partition("/v1/")[2][:6] for _, path, _ in gateway.seen] == ["blobs/", *["status"] * 4]


def test_an_accepted_put_that_fails_says_why(store: RemoteStore, gateway: ScriptedGateway) -> None:
    gateway.script("accept-fail")
    with pytest.raises(Retryable, match=r"key 'k': nothing was stored: the pipeline said no"):
        store.put("k", DATA)


def test_a_put_that_is_not_committed_in_time_says_where_to_look(gateway: ScriptedGateway) -> None:
    gateway.script("accept")
    with (
        nearkin.connect(gateway.url, TOKEN, commit_seconds=0.01) as store,
        pytest.raises(Retryable, match=r"not committed in 0 s; it goes on: see /v1/status/0000"),
    ):
        store.put("k", DATA)


def test_many_puts_are_on_their_way_at_once_and_come_in_order(store: RemoteStore, gateway: ScriptedGateway) -> None:
    gateway.script(*["accept"] * 5, "ok", *["accept"] * 3)
    results = list(store.put_many((f"k{number}", str(number).encode()) for number in range(9)))
    assert [result.info.key for result in results] == [f"k{number}" for number in range(9)]
    assert [method for method, _, _ in gateway.seen[:6]] == ["PUT"] * 6


def test_what_was_stored_is_compared_with_what_was_sent(store: RemoteStore, gateway: ScriptedGateway) -> None:
    gateway.script("rot")
    with pytest.raises(Corrupt, match=r"key 'k' version 1: blake3:0+ was stored, blake3:[0-9a-f]+ was sent"):
        store.put("k", DATA)


def test_a_wrong_sha256_stores_nothing(store: RemoteStore, gateway: ScriptedGateway) -> None:
    with pytest.raises(BadInput, match="SHA-256"):
        store.put("k", DATA, sha256=bytes(32))
    assert gateway.read().versions() == []


def test_a_file_that_shrinks_is_refused_and_one_that_grows_is_cut(store: RemoteStore, tmp_path: Path) -> None:
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
    ("key", "source", "says"),
    [
        ("", b"", "at least one character"),
        ("x" * 1025, b"", "1024"),
        ("a\0", b"", "NUL"),
        ("k", Path("/nothing"), "no such"),
        ("k", 5, "want a Path"),
        ("k", "text", "want a Path"),
    ],
)
def test_what_is_refused_here_is_never_sent(
    store: RemoteStore, gateway: ScriptedGateway, key: str, source: Any, says: str
) -> None:
    with pytest.raises(BadInput, match=says):
        store.put(key, source)
    assert gateway.seen == []


class Failing(Unseekable):
    """A file on a bad disk."""

    def read(self, size: int = -1) -> bytes:
        raise OSError(5, "Input/output error")


def test_a_source_that_fails_is_the_source_s_failure_and_is_not_tried_again(
    store: RemoteStore, gateway: ScriptedGateway
) -> None:
    with pytest.raises(SourceFailed, match="Input/output error"):
        store.put("k", Failing(b""))  # type: ignore[arg-type]
    assert gateway.read().versions() == []


def test_an_output_that_takes_nothing_ends_a_get(store: RemoteStore) -> None:
    class Full(io.RawIOBase):
        def write(self, data: object) -> None:
            return None

    store.put("k", DATA)
    with pytest.raises(BadInput, match="takes no more bytes"):
        store.get("k").write_to(Full())  # type: ignore[arg-type]


# --- faults on the way down ------------------------------------------------------------------------------------------


def test_a_get_that_breaks_goes_on_where_it_was(store: RemoteStore, gateway: ScriptedGateway) -> None:
    store.put("k", DATA)
    info = store.info("k")
    gateway.seen.clear()
    gateway.script("ok", "cut:100000", "reset", "busy", "cut:150000", "cut:0")
    assert store.get("k").read() == DATA
    ranges = [headers.get("range") for _, path, headers in gateway.seen if "/info/" not in path]
    assert ranges[0] is None
    assert [text for text in ranges[1:] if text] == [f"bytes={at}-299999" for at in [100_000] * 3 + [250_000] * 2]
    assert all(headers["if-range"] == f'"{info.digest}"' for _, _, headers in gateway.seen if "range" in headers)


def test_a_range_that_breaks_goes_on_too(store: RemoteStore, gateway: ScriptedGateway) -> None:
    store.put("k", DATA)
    gateway.script("ok", "cut:50", "cut:50")
    assert store.get("k", start=1000, stop=200_000).read() == DATA[1000:200_000]


def test_wrong_bytes_never_look_like_a_good_get(store: RemoteStore, gateway: ScriptedGateway) -> None:
    store.put("k", DATA)
    gateway.script("ok", "rot")
    file = io.BytesIO()
    with pytest.raises(Corrupt, match=r"'k' version 1: blake3:[0-9a-f]+ came"):
        store.get("k").write_to(file)
    assert len(file.getvalue()) < len(DATA)


def test_a_gateway_that_always_breaks_is_given_up(
    store: RemoteStore, gateway: ScriptedGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put("k", DATA)
    monkeypatch.setattr("nearkin.client.transfer.RESUMES_MAX", 5)
    gateway.script("ok", *["cut:10"] * 100)
    with pytest.raises(StoreUnavailable, match="broke 5 times, at byte 60"):
        store.get("k").read()


def test_a_reader_that_stops_early_gives_its_connection_back(store: RemoteStore) -> None:
    store.put("k", DATA)
    for _ in range(100):  # more than there are connections
        next(iter(store.get("k")))
    assert store.get("k").read() == DATA


# --- answers that are no successes -----------------------------------------------------------------------------------


def test_errors_come_as_our_own(store: RemoteStore, gateway: ScriptedGateway) -> None:
    with pytest.raises(NotFound, match="key 'none': the store has none"):
        store.get("none")
    store.put("k", DATA)
    with pytest.raises(NotFound, match="version 9"):
        store.get("k", 9)
    with pytest.raises(BadInput, match="range 5 to 2"):
        store.get("k", start=5, stop=2)
    with pytest.raises(BadInput, match="versions count from 1"):
        store.info("k", 0)
    gateway.script("deny")
    with pytest.raises(Denied, match="has no scope write"):
        store.put("k", DATA)


def test_a_token_that_is_missing_or_wrong_is_denied_and_never_told(gateway: ScriptedGateway) -> None:
    for token in (None, "another-token"):
        with nearkin.connect(gateway.url, token) as store, pytest.raises(Denied) as raised:
            store.put("k", DATA)
        assert "another-token" not in str(raised.value)
    assert len(gateway.seen) == 2


def test_another_program_s_page_is_told_from_a_gateway_s(store: RemoteStore, gateway: ScriptedGateway) -> None:
    gateway.script("html", "redirect")
    with pytest.raises(Permanent, match=r"GET http://127.*/v1/stats: not what a Nearkin gateway answers"):
        store.stats()
    with pytest.raises(Permanent, match=r"302.*http://elsewhere.example/"):
        store.stats()


def test_nobody_listening_is_retryable_and_names_the_server() -> None:
    with nearkin.connect("http://127.0.0.1:9", TOKEN) as store, pytest.raises(Retryable, match=r"127\.0\.0\.1:9"):
        store.stats()


@pytest.mark.parametrize("url", ["", "127.0.0.1", "ftp://h", "http://user:pw@h", "http://h?x"])
def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="server"):
        nearkin.connect(url)


def test_the_token_comes_from_the_environment_and_is_not_in_what_is_printed(
    gateway: ScriptedGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NEARKIN_TOKEN", TOKEN)
    with nearkin.connect(gateway.url) as store:
        assert store.versions() == []
    assert TOKEN not in repr(exchange.Endpoint.of(gateway.url, TOKEN))


def test_a_token_over_plain_http_to_another_machine_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    exchange.Endpoint.of("http://nearkin.example", TOKEN)
    assert "unencrypted" in caplog.text
    caplog.clear()
    for url in ("https://nearkin.example", "http://localhost:1", "http://[::1]"):
        exchange.Endpoint.of(url, TOKEN)
    assert caplog.text == ""


# --- threads, asyncio ------------------------------------------------------------------------------------------------


def test_threads_share_a_store(store: RemoteStore) -> None:
    found: dict[int, bytes] = {}

    def work(number: int) -> None:
        store.put(f"k{number}", DATA + str(number).encode())
        found[number] = store.get(f"k{number}").read()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {number: DATA + str(number).encode() for number in range(8)}


def awaited(gateway: ScriptedGateway, work: Callable[[AsyncRemoteStore], Awaitable[T]]) -> T:
    async def run() -> T:
        async with nearkin.connect_async(gateway.url, TOKEN, commit_seconds=5.0) as store:
            return await work(store)

    return asyncio.run(run())


async def _slices() -> AsyncIterator[bytes]:
    for at in range(0, len(DATA), 70_000):
        yield DATA[at : at + 70_000]


def test_asyncio_has_the_same_calls(gateway: ScriptedGateway, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(DATA)

    async def work(store: AsyncRemoteStore) -> None:
        for number, source in enumerate((DATA, tmp_path / "file", io.BytesIO(DATA), _slices()), 1):
            gateway.script("busy" if number < 4 else "accept")
            result = await store.put("k", source, metadata={"a": "b"})
            assert (result.info.version, result.info.metadata) == (number, {"a": "b"})
        gateway.script("ok", "cut:100000", "reset")
        assert await (await store.get("k", 1)).read() == DATA
        assert await (await store.get("k", start=5, stop=500)).read() == DATA[5:500]
        with (tmp_path / "out").open("wb", buffering=0) as file:
            assert await (await store.get("k")).write_to(file) == len(DATA)
        assert (tmp_path / "out").read_bytes() == DATA
        many = [result.info.key async for result in store.put_many((f"m{n}", b"%d" % n) for n in range(5))]
        assert many == [f"m{n}" for n in range(5)]
        assert [info.key for info in await store.versions("m")] == many
        assert (await store.stats()).versions == 9
        assert (await store.explain("k")).info.version == 4
        assert (await store.config())["revision"] == 1
        await store.change_config({"features": {"algorithm": "none"}})

    awaited(gateway, work)


def test_asyncio_raises_the_same_errors(gateway: ScriptedGateway) -> None:
    async def work(store: AsyncRemoteStore) -> None:
        with pytest.raises(NotFound):
            await store.get("none")
        gateway.script("busy")
        with pytest.raises(StoreUnavailable, match="busy for a moment"):
            await store.put("k", _slices())
        await store.put("k", DATA)
        gateway.script("ok", "rot")
        with pytest.raises(Corrupt):
            await (await store.get("k")).read()

    awaited(gateway, work)


# --- deleting --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["lost-reply", "busy", "reset"])
def test_a_deletion_whose_answer_is_lost_is_asked_for_again_and_done_once(
    store: RemoteStore, gateway: ScriptedGateway, fault: str
) -> None:
    store.put("k", b"one")
    store.put("k", b"two")
    gateway.script(fault)
    assert store.delete("k", reason="täglich") == 2
    assert {entry.reason for entry in store.deleted()} == {"täglich"}
    asked = [headers["idempotency-key"] for method, _, headers in gateway.seen if method == "DELETE"]
    assert len(asked) == 2
    assert len(set(asked)) == 1
    with pytest.raises(NotFound):
        store.delete("k")
    gateway.script(fault)
    assert store.undelete("k") == 2
    assert store.get("k").read() == b"two"


def test_who_may_not_delete_is_told_so(store: RemoteStore, gateway: ScriptedGateway) -> None:
    store.put("k", b"one")
    gateway.script("deny")
    with pytest.raises(Denied):
        store.delete("k")
    with pytest.raises(BadInput):
        store.delete("k", 0)
    with pytest.raises(BadInput):
        store.delete("")
    assert store.get("k").read() == b"one"

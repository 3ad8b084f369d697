"""Test the gateway's functions without a socket.

Upload statuses, budgets, rates, ranges, digests, keys.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.datastructures import Headers

from nearkin.embedded.gateway_backend import StoreListing
from nearkin.store import open_store
from nearkin_gateway.auth import tokens
from nearkin_gateway.auth.sessions import SKEW_SECONDS, Sessions
from nearkin_gateway.blocking_threads import WorkerPools
from nearkin_gateway.catalog import version_catalog
from nearkin_gateway.catalog.pipeline_listing import PipelineListing
from nearkin_gateway.catalog.version_catalog import VERSION_MAX, VersionCatalog, _after
from nearkin_gateway.http import request_bodies, request_limits
from nearkin_gateway.http.digests import metadata_headers, metadata_of
from nearkin_gateway.http.problems import Problem, from_error
from nearkin_gateway.http.ranges import etag, last_modified, wanted_ranges
from nearkin_gateway.http.request_limits import Budget, ConcurrencyLimit, Holders, Rates
from nearkin_gateway.http.url_keys import decode_key, quote_key
from nearkin_gateway.uploads.upload_status import ENTRY_BYTES, UploadIds, UploadStatuses, new_id
from nearkin_shared.errors import StoreUnavailable
from nearkin_shared.index.catalog import CatalogEntry
from nearkin_shared.index.redis.catalog_encoding import member_start
from nearkin_shared.limits import FRAME_BYTES_MAX
from nearkin_shared.objectstore.local import LocalObjectStore
from nearkin_shared.results import Ledger, VersionInfo
from nearkin_shared.storage import descriptor
from nearkin_shared.storage.manifests import object_name

SECRET = bytes(range(32))


def event(blob: bytes, origin: bytes | None = None, *, state: str = "committed", padding: int = 0) -> dict[str, Any]:
    return {
        "id": blob.hex(),
        "origin": (origin or blob).hex(),
        "state": state,
        "tenant": "t",
        "key": "k" * padding,
    }


# --- upload statuses and ids -----------------------------------------------------------------------------------------


def test_upload_id_is_readable_by_its_tenant_only() -> None:
    tickets, blob = UploadIds(SECRET), new_id()
    ticket = tickets.of("shop", blob)
    assert tickets.read("shop", ticket) == blob
    assert tickets.read("other", ticket) is None
    assert UploadIds(bytes(32)).read("shop", ticket) is None
    for wrong in (ticket[:-1], ticket + "0", ticket.upper(), "", "x" * 49, f"{ticket}\n"):
        assert tickets.read("shop", wrong) is None


def test_origins_differ_by_key_tenant_and_idempotency_key() -> None:
    tickets = UploadIds(SECRET)
    found = {tickets.origin(*parts) for parts in (("a", "b", "c"), ("ab", "", "c"), ("a", "bc", ""), ("a", "b", "d"))}
    assert len(found) == 4
    assert tickets.origin("a", "b", "c") in found


def test_evicted_upload_status_is_known_to_be_forgotten() -> None:
    outcomes = UploadStatuses(20_000)
    first = new_id()
    outcomes.add(event(first, padding=1000))
    assert outcomes.get(first) is not None
    time.sleep(0.002)
    blobs = [new_id() for _ in range(40)]
    for blob in blobs:
        outcomes.add(event(blob, padding=1000))
    assert len(outcomes) < 20
    assert outcomes.get(first) is None
    assert outcomes.may_be_forgotten(first)
    assert outcomes.of_origin(first) is None
    assert outcomes.get(blobs[-1]) is not None
    time.sleep(0.002)
    assert not outcomes.may_be_forgotten(new_id())


def test_first_event_of_an_origin_is_kept() -> None:
    """A repeated event changes nothing."""
    outcomes, first, second, origin = UploadStatuses(10_000), new_id(), new_id(), new_id()
    outcomes.add(event(first, origin))
    outcomes.add(event(first, origin, state="failed"))
    outcomes.add(event(second, origin))
    assert len(outcomes) == 2
    assert (outcomes.get(first) or {})["state"] == "committed"
    assert (outcomes.of_origin(origin) or {})["id"] == first.hex()


def test_upload_failed_then_committed_is_committed() -> None:
    outcomes, blob = UploadStatuses(10_000), new_id()
    outcomes.add(event(blob, blob, state="failed"))
    outcomes.add(event(blob, blob))
    assert (outcomes.get(blob) or {})["state"] == "committed"
    assert outcomes.of_origin(blob) is not None
    assert outcomes._bytes == len(outcomes._events[blob.hex()]) + ENTRY_BYTES


def test_failed_attempt_is_not_the_status_of_its_origin() -> None:
    outcomes, blob, origin = UploadStatuses(10_000), new_id(), new_id()
    outcomes.add(event(blob, origin, state="failed"))
    assert outcomes.of_origin(origin) is None


def test_waiter_is_notified_and_leaves_nothing() -> None:
    async def run() -> None:
        outcomes, blob = UploadStatuses(10_000), new_id()
        waiters = [asyncio.create_task(outcomes.wait(blob, 5)) for _ in range(3)]
        await asyncio.sleep(0)
        assert await outcomes.wait(new_id(), 0.01) is None
        outcomes.add(event(blob), json.dumps(event(blob)).encode())
        assert [(await waiter or {})["id"] for waiter in waiters] == [blob.hex()] * 3
        assert outcomes._waiting == {}

    asyncio.run(run())


# --- limits ----------------------------------------------------------------------------------------------------------


def test_budget_is_never_overdrawn_and_is_given_in_order() -> None:
    async def run() -> None:
        budget, order = Budget(10), []

        async def take(number: int, count: int) -> None:
            await budget.take(count)
            assert budget.used_bytes <= 10
            order.append(number)

        await budget.take(8)
        tasks = [asyncio.create_task(take(number, count)) for number, count in enumerate((5, 1, 9))]
        await asyncio.sleep(0)
        assert order == []  # the small one does not overtake the first
        budget.give(8)
        await asyncio.sleep(0)
        assert order == [0, 1]
        tasks[2].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        budget.give(6)
        assert budget.used_bytes == 0
        await budget.take(50)  # more than the whole budget: it passes alone
        budget.give(50)

    asyncio.run(run())


@given(st.lists(st.tuples(st.integers(1, 12), st.booleans()), max_size=30))
def test_budget_with_any_cancellation_ends_empty(steps: list[tuple[int, bool]]) -> None:
    async def run() -> None:
        budget = Budget(10)

        async def use(count: int) -> None:
            await budget.take(count)
            try:
                await asyncio.sleep(0)
            finally:
                budget.give(count)

        tasks = [asyncio.create_task(use(count)) for count, _ in steps]
        await asyncio.sleep(0)
        for task, (_, cancelled) in zip(tasks, steps, strict=True):
            if cancelled:
                task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert budget.used_bytes == 0

    asyncio.run(run())


def test_rate_passes_a_burst_and_then_so_many_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    rates = Rates(10)
    for _ in range(10):
        rates.take("a")
    with pytest.raises(Problem) as refused:
        rates.take("a")
    assert refused.value.status == 429
    rates.take("b")
    now += 0.35
    for _ in range(3):
        rates.take("a")
    with pytest.raises(Problem):
        rates.take("a")
    monkeypatch.setattr(request_limits, "CALLERS_MAX", 5)
    for number in range(100):
        rates.take(f"caller {number}")
    assert len(rates._buckets) <= 6


def test_slot_is_returned_after_any_outcome() -> None:
    slots, holders = ConcurrencyLimit("things", 1), Holders("t", "", "")
    with pytest.raises(RuntimeError), slots.one(holders):
        raise RuntimeError
    with slots.one(holders), pytest.raises(Problem), slots.one(holders):
        pass
    assert slots.taken_count == 0


# --- bodies, ranges, headers, keys -----------------------------------------------------------------------------------


@settings(deadline=None)
@given(
    st.lists(
        st.sampled_from([1, 7, 65_536, FRAME_BYTES_MAX - 1, FRAME_BYTES_MAX, FRAME_BYTES_MAX + 1, 2_000_000]),
        max_size=5,
    )
)
def test_frames_are_full_but_the_last_and_hold_the_body(sizes: list[int]) -> None:
    async def run() -> None:
        pieces = [bytes([number + 1]) * size for number, size in enumerate(sizes)]

        async def body() -> Any:
            for piece in pieces:
                yield piece

        found = [bytes(frame) async for frame in request_bodies.frames(body())]
        assert b"".join(found) == b"".join(pieces)
        assert all(len(frame) == FRAME_BYTES_MAX for frame in found[:-1])
        assert all(0 < len(frame) <= FRAME_BYTES_MAX for frame in found[-1:])

    asyncio.run(run())


def test_slowly_filling_frame_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_bodies, "FRAME_SECONDS", 0.02)

    async def run() -> None:
        async def body() -> Any:
            for _ in range(4):
                yield b"x"
                await asyncio.sleep(0.03)

        assert len([frame async for frame in request_bodies.frames(body())]) > 1

    asyncio.run(run())


def version(size_bytes: int) -> VersionInfo:
    return VersionInfo("k", 1, size_bytes, datetime.now(UTC), "blake3:00", None, 0, 0, {})


@given(st.integers(0, 50), st.integers(0, 60), st.integers(0, 60), st.sampled_from(["A-B", "A-", "-B"]))
def test_ranges_agree_with_slices(size: int, first: int, last: int, form: str) -> None:
    data = bytes(range(size))
    text = form.replace("A", str(first)).replace("B", str(last))
    whole = bytes(
        data[first : last + 1] if form == "A-B" else data[first:] if form == "A-" else data[-last:] if last else b""
    )
    if not whole and not (form == "A-B" and last < first) and not (form == "-B" and not size and last):
        with pytest.raises(Problem) as refused:
            wanted_ranges(Headers({"range": f"bytes={text}"}), version(size))
        assert refused.value.status == 416
        return
    found = wanted_ranges(Headers({"range": f"bytes={text}"}), version(size))
    if found is None:
        assert (form == "A-B" and last < first) or (form == "-B" and not size)
    else:
        ((start, stop),) = found
        assert data[start:stop] == whole


def test_if_range_with_a_date_ignores_the_range() -> None:
    """Two versions of one second have the same date."""
    info = version(10)
    headers = {"range": "bytes=5-", "if-range": last_modified(info)}
    assert wanted_ranges(Headers(headers), info) is None
    assert wanted_ranges(Headers({**headers, "if-range": etag(info)}), info) == [(5, 10)]


@given(
    st.dictionaries(
        st.text(st.characters(codec="utf-8"), min_size=1, max_size=20),
        st.text(st.characters(codec="utf-8"), max_size=50),
        max_size=10,
    )
)
def test_metadata_headers_round_trip(metadata: dict[str, str]) -> None:
    headers = metadata_headers(metadata)
    sent = {name.lower(): value for name, value in headers.items()}  # header names have no case
    assert len(sent) == len(metadata)
    assert all(name.isascii() and value.isascii() and value.isprintable() for name, value in sent.items())
    assert metadata_of(Headers(sent)) == metadata


@given(st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=60))
def test_key_in_url_round_trips(key: str) -> None:
    assert decode_key(quote_key(key)) == key
    assert "/" not in quote_key(key)
    assert quote_key(key) not in (".", "..")


# --- problems --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("kafka broker-0.internal:9092,[fd00::1]:9093: down", "kafka (an address),(an address): down"),
        ("redis 10.1.2.3:6379: refused", "redis (an address): refused"),
        ("index /var/lib/nearkin/index: no room", "index (a folder): no room"),
        ("a: http://minio.local:9000/bucket?X=1: 503", "a: (an address) 503"),
        ("store ~/s/t is being written by process 7", "store (a folder) is being written by process 7"),
        ("containers/1a/b.nkc: no room left on the device; nothing was changed", None),
        ("2 messages not acknowledged in 30 s, and/or lost", None),
    ],
)
def test_problem_shows_no_path_or_backend_address(text: str, shown: str | None) -> None:
    assert from_error(StoreUnavailable(text)).detail == (shown or text)


# --- sessions --------------------------------------------------------------------------------------------------------


def test_session_of_a_clock_ahead_is_open(tmp_path: Path) -> None:
    """A session that begins further in the future is refused."""
    _, token = tokens.create(tmp_path / "tokens.json", "t", ["read"])
    sessions = Sessions(SECRET, tokens.TokenFile(tmp_path / "tokens.json"), 3600)
    now = time.time()
    cookie = sessions.open(token, now + 5)
    assert sessions.read(cookie, now) is not None
    assert sessions.read(sessions.open(token, now + 3600), now) is None
    assert sessions.read(cookie, now + 3605 + SKEW_SECONDS) is None


# --- pages of a listing ----------------------------------------------------------------------------------------------


def test_page_token_is_a_valid_version(tmp_path: Path) -> None:
    assert _after("k\0" + "9" * 40) == ("k", VERSION_MAX)
    key, version = _after("k\0" + "9" * 40)
    assert version is not None
    assert member_start(key, version)


def test_page_ends_before_its_size_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names and metadata of a page are bounded."""
    monkeypatch.setattr(version_catalog, "PAGE_BYTES_MAX", 100_000)
    with open_store(tmp_path / "s", create=True) as store:
        for number in range(5):
            store.put("k", b"", metadata={"a": "x" * 60_000})
            store.put(f"l{number}", b"", metadata={"a": "x" * 60_000})
        objects = LocalObjectStore(tmp_path / "s")
        found = VersionCatalog(objects, descriptor.read(objects), store.settings, StoreListing(store))
        pages, after, has_more = [], 0, True
        while has_more:
            page, following = found.versions("default", "k", after, 100)
            pages.append([info.version for info in page.found])
            has_more, after = following is not None, following or 0
        assert pages == [[1, 2], [3, 4], [5]]
        start: str | None
        keys, start = [], ""
        while start is not None:
            page, start = found.list_versions("default", "l", start, 100, all_versions=False)
            keys.append([info.key for info in page.found])
        assert keys == [["l0", "l1"], ["l2", "l3"], ["l4"]]


def named(listing: PipelineListing, tenant: str) -> list[tuple[str, int]]:
    return [(entry.key, entry.version) for entry in listing.catalog_after(tenant, "", "", None, 10)]


def test_listing_without_index_skips_unreadable_manifest(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Every tenant keeps its listing while the index is rebuilt."""
    with open_store(tmp_path / "s", create=True) as store:
        for key in ("a", "b", "c", "d"):
            store.put(key, key.encode())
        store.delete("c")
        store.delete("d")
    objects = LocalObjectStore(tmp_path / "s")
    names = {name: objects.get(name) for name, _ in objects.names("manifests")}
    manifest = object_name("default", "b", 1)
    objects.replace(manifest, names[manifest][:-1] + bytes([names[manifest][-1] ^ 1]))
    (mark,) = (name for name in names if name.startswith(object_name("default", "d", 1)[:-4]) and ".nkt" in name)
    objects.replace(mark, names[mark][:-1] + bytes([names[mark][-1] ^ 1]))

    class Unfinished:
        has_catalog = False

    listing = PipelineListing(Unfinished(), descriptor.read(objects), objects)  # type: ignore[arg-type]
    assert named(listing, "default") == [("a", 1), ("c", 1), ("d", 1)]
    assert named(listing, "other") == []
    assert list(listing.marked_keys("default", "")) == ["c"]
    assert manifest in caplog.text
    assert mark in caplog.text


def test_listing_begun_without_index_survives_its_rebuild(tmp_path: Path) -> None:
    """New listings use the index.

    Listings that began without it still have the entries that they remembered.
    """
    with open_store(tmp_path / "s", create=True) as store:
        store.put("a", b"a")
        objects = LocalObjectStore(tmp_path / "s")

        class Made:
            has_catalog = False

            def catalog_after(self, *_: object) -> Iterator[CatalogEntry]:
                return iter([CatalogEntry(key, 1, 0, 0.0, Ledger()) for key in ("a", "b")])

        index = Made()
        listing = PipelineListing(index, descriptor.read(objects), objects)  # type: ignore[arg-type]
        assert named(listing, "default") == [("a", 1)]
        store.put("b", b"b")
        read = listing._version_of

        def read_late(name: str) -> tuple[str, str, int] | None:
            index.has_catalog = True
            assert named(listing, "default") == [("a", 1), ("b", 1)]
            return read(name)

        listing._version_of = read_late  # type: ignore[method-assign]
        assert named(listing, "default") == [("a", 1), ("b", 1)]


# --- threads ---------------------------------------------------------------------------------------------------------


def test_worker_pools_closed_end_their_threads() -> None:
    """F.15: each pool finishes its queue and ends its threads.

    The event loop's pool serves later calls.
    """

    async def use() -> list[str]:
        pools = WorkerPools()
        all_pools = [pools.hashing, pools.disk, pools.control]
        names = [await pool.run(lambda: threading.current_thread().name) for pool in all_pools]
        queued = asyncio.ensure_future(pools.disk.run(time.sleep, 0.05))
        await asyncio.sleep(0)
        await pools.close()
        assert queued.done()
        late = [await pool.run(lambda: threading.current_thread().name) for pool in all_pools]
        assert not set(late) & set(names)
        return names

    names = asyncio.run(use())
    assert not set(names) & {thread.name for thread in threading.enumerate()}

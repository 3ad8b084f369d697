"""Threads share a client; asyncio has the same calls and errors."""

from __future__ import annotations

import asyncio
import io
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest

import nearkin
from nearkin.client.aio import AsyncRemoteStore
from nearkin.client.sync import RemoteStore
from nearkin_shared.errors import Corrupt, NotFound, StoreUnavailable
from tests.support.data.samples import noise
from tests.support.fakes.scripted_gateway import TOKEN, ScriptedGateway

DATA = noise(300_000, "client").tobytes()
T = TypeVar("T")


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
        sources: list[Any] = [DATA, tmp_path / "file", io.BytesIO(DATA), _slices()]
        for number, source in enumerate(sources, 1):
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

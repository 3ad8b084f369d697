"""Test faults during a download: the bytes are those that were put, or an error is raised."""

from __future__ import annotations

import io

import pytest

from nearkin.client.sync import RemoteStore
from nearkin_shared.errors import Corrupt, StoreUnavailable
from tests.support.data.samples import noise
from tests.support.fakes.scripted_gateway import ScriptedGateway

DATA = noise(300_000, "client").tobytes()


def test_get_broken_off_continues_at_its_offset(store: RemoteStore, gateway: ScriptedGateway) -> None:
    store.put("k", DATA)
    info = store.info("k")
    gateway.seen.clear()
    gateway.script("ok", "cut:100000", "reset", "busy", "cut:150000", "cut:0")
    assert store.get("k").read() == DATA
    ranges = [headers.get("range") for _, path, headers in gateway.seen if "/info/" not in path]
    assert ranges[0] is None
    assert [text for text in ranges[1:] if text] == [f"bytes={at}-299999" for at in [100_000] * 3 + [250_000] * 2]
    assert all(headers["if-range"] == f'"{info.digest}"' for _, _, headers in gateway.seen if "range" in headers)


def test_range_broken_off_continues(store: RemoteStore, gateway: ScriptedGateway) -> None:
    store.put("k", DATA)
    gateway.script("ok", "cut:50", "cut:50")
    assert store.get("k", start=1000, stop=200_000).read() == DATA[1000:200_000]


def test_wrong_bytes_never_look_like_a_good_get(store: RemoteStore, gateway: ScriptedGateway) -> None:
    store.put("k", DATA)
    gateway.script("ok", "rot")
    file = io.BytesIO()
    with pytest.raises(Corrupt, match=r"'k' version 1: digest blake3:[0-9a-f]+, want"):
        store.get("k").write_to(file)
    assert len(file.getvalue()) < len(DATA)


def test_gateway_always_breaking_is_given_up(
    store: RemoteStore, gateway: ScriptedGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put("k", DATA)
    monkeypatch.setattr("nearkin.client.streaming.RESUMES_MAX", 5)
    gateway.script("ok", *["cut:10"] * 100)
    with pytest.raises(StoreUnavailable, match="broke 5 times, at byte 60"):
        store.get("k").read()


def test_reader_stopping_early_frees_connection(store: RemoteStore) -> None:
    """Give the connection back when a reader stops early."""
    store.put("k", DATA)
    for _ in range(100):  # more than there are connections
        next(iter(store.get("k")))
    assert store.get("k").read() == DATA

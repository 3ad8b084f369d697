"""Every call through a server answers what the store itself does."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

import nearkin
from nearkin.client.sync import RemoteStore
from nearkin_shared import results_json
from nearkin_shared.errors import PermanentError
from tests.support.data.samples import noise
from tests.support.fakes.pipes import Unseekable
from tests.support.fakes.scripted_gateway import TOKEN, ScriptedGateway

DATA = noise(300_000, "client").tobytes()
KEYS = ("a/b", "..", ".", "ä ö%2F?#&=+", "versions/1", "a//b/", "\u202e\n", "x" * 1024)


def test_calls_return_what_the_store_does(store: RemoteStore, gateway: ScriptedGateway) -> None:
    """Return from every call what the store itself returns."""
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
        assert results_json.info_json(found) == results_json.info_json(expected)
    assert store.stats() == local.stats()
    explained = store.explain("a/b", 1)
    assert results_json.explain_json(explained, segments=True) == results_json.explain_json(
        local.explain("a/b", 1), segments=True
    )
    assert store.get("a/b").read() == local.get("a/b").read()
    assert store.get("a/b", 1, start=5, stop=70_000).read() == DATA[5:70_000]
    assert store.get("a/b", 1, start=299_999).read() == DATA[-1:]
    assert store.get("a/b", 1, start=7, stop=7).read() == b""
    file = io.BytesIO()
    progress: list[int] = []
    assert store.get("a/b", 1).write_to(file, progress=progress.append) == len(DATA) == sum(progress)
    assert file.getvalue() == DATA


@pytest.mark.parametrize("key", KEYS, ids=ascii)
def test_any_key_survives_put_and_get(store: RemoteStore, key: str) -> None:
    assert store.put(key, b"content of " + key.encode()).info.key == key
    assert store.get(key).read() == b"content of " + key.encode()
    assert store.info(key, 1).key == key
    assert store.explain(key).info.key == key


@pytest.mark.parametrize("size", [0, 1, 65_536, 1_048_576, 1_048_577])
def test_blobs_of_every_size_are_restored(store: RemoteStore, size: int) -> None:
    data = noise(size, "size").tobytes()
    assert store.put("k", data).info.size_bytes == size
    assert store.get("k").read() == data


def test_paths_files_and_pipes_are_sources(store: RemoteStore, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(DATA)
    for number, source in enumerate((tmp_path / "file", io.BytesIO(DATA), Unseekable(DATA), DATA), 1):
        progress: list[int] = []
        assert store.put("k", source, progress=progress.append).info.version == number  # type: ignore[arg-type]
        assert sum(progress) == len(DATA)
        assert store.get("k").read() == DATA
    half = io.BytesIO(DATA)
    half.seek(100_000)
    assert store.put("k", half).info.size_bytes == 200_000


def test_listing_fetches_all_pages(store: RemoteStore) -> None:
    keys = [f"p/{number:02}" for number in range(8)]
    results = list(store.put_many((key, key.encode()) for key in [*keys, "q"]))
    assert [result.info.key for result in results] == [*keys, "q"]
    store.put("p/03", b"again")
    assert [info.key for info in store.versions("p/")] == keys
    assert [info.key for info in store.versions()] == [*keys, "q"]
    found = [(info.key, info.version) for info in store.versions("p/0", all_versions=True)]
    assert found == [(key, 1) for key in keys[:4]] + [("p/03", 2)] + [(key, 1) for key in keys[4:]]
    assert store.versions("nothing") == []


def test_closed_client_reports_that(gateway: ScriptedGateway) -> None:
    with nearkin.connect(gateway.url, TOKEN) as store:
        assert store.versions() == []
    with pytest.raises(PermanentError, match="was closed"):
        store.versions()
    assert len(gateway.seen) == 1


def test_settings_of_the_services_are_shown_and_changed(store: RemoteStore) -> None:
    assert store.config()["settings"]["features"]["algorithm"] == "finesse"
    changed = store.change_config({"features": {"algorithm": "odess"}})
    assert changed["settings"]["features"]["algorithm"] == "odess"

"""Test faults during a download: the bytes are those that were put, or an error is raised."""

from __future__ import annotations

import io
import os
import zipfile
from pathlib import Path

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
        next(store.get("k").pieces())
    assert store.get("k").read() == DATA


def test_remote_blob_reads_as_a_file(store: RemoteStore, gateway: ScriptedGateway) -> None:
    """Reads in a row use one request; a seek opens a short range."""
    store.put("k", DATA)
    with store.get("k") as blob:
        gateway.seen.clear()
        assert b"".join(iter(lambda: blob.read(7000), b"")) == DATA
        assert len(gateway.seen) == 1
        assert blob.seek(-10, io.SEEK_END) == len(DATA) - 10
        buffer = bytearray(20)
        assert blob.readinto(buffer) == 10
        assert buffer[:10] == DATA[-10:]
        reader = io.BufferedReader(blob)
        reader.seek(1000)
        assert reader.read(50) == DATA[1000:1050]
    with pytest.raises(ValueError, match="closed"):
        blob.read()


def test_remote_blob_that_is_closed_early_frees_its_connection(store: RemoteStore) -> None:
    store.put("k", DATA)
    for _ in range(100):  # more than there are connections
        with store.get("k") as blob:
            assert blob.read(1) == DATA[:1]


def test_remote_archive_is_read_in_place(store: RemoteStore) -> None:
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as zipped:
        zipped.writestr("a", DATA)
        zipped.writestr("b", b"second")
    store.put("zip", archive.getvalue())
    with store.get("zip") as blob, zipfile.ZipFile(blob) as opened:
        assert opened.read("b") == b"second"
        assert opened.read("a") == DATA


def test_remote_wrong_bytes_are_not_read_to_the_end(store: RemoteStore, gateway: ScriptedGateway) -> None:
    """I8: the digest of the whole is compared in `read(n)` too."""
    store.put("k", DATA)
    gateway.script("ok", "rot")
    blob = store.get("k")
    with pytest.raises(Corrupt, match="digest"):
        list(iter(lambda: blob.read(5000), b""))
    assert blob.tell() < len(DATA)


def test_remote_put_takes_paths_files_and_blobs(store: RemoteStore, tmp_path: Path) -> None:
    path = tmp_path / "sources" / "file"
    path.parent.mkdir()
    path.write_bytes(DATA)
    with path.open("rb") as file, os.scandir(path.parent) as entries:  # os.DirEntry: an os.PathLike that is no Path
        for source in (*entries, file, io.BytesIO(DATA), bytearray(DATA)):
            assert store.put("k", source).info.size_bytes == len(DATA)
    with store.get("k") as blob:
        assert store.put("copy", blob).info.digest == store.info("k").digest

"""Test stores with `chunker.rules`: round trips, deduplication between paths, small costs of changed pages."""

from __future__ import annotations

import io
import sqlite3
from pathlib import Path

import pytest

from nearkin import open_store
from nearkin.lab.generated_data import random_bytes, text_like
from tests.support.data import content_samples as samples
from tests.support.data.stores import SMALL, settings

RULED = settings({"chunker": {"rules": "all"}, "index": {"map_bytes": 256 * 1024 * 1024}})
FILM = samples.mp4(4_000_000, 1_200_000)
PHOTO = samples.jpeg(900_000, 21)


def weights(changed: int | None = None) -> bytes:
    """Return a safetensors file of eight layers, one of them changed."""
    layers = {f"layer.{number}": random_bytes(400_000, number) for number in range(8)}
    if changed is not None:
        layers[f"layer.{changed}"] = random_bytes(400_000, 100 + changed)
    return samples.safetensors_file(layers)


@pytest.mark.parametrize("small", [False, True])
def test_round_trip_of_every_kind(tmp_path: Path, small: bool) -> None:
    """Also with batches that end within items, blocks smaller than a large chunk, and an index that is rebuilt."""
    contents = {
        "film": FILM,
        "photo": PHOTO,
        "gz": samples.compressed(800_000),
        "random": random_bytes(2_500_000, 3),
        "db": samples.sqlite_file(tmp_path / "db", 9_000),
        "pg": samples.postgres_file(150),
        "tar": samples.tar_file({"a": PHOTO, "b": text_like(50_000, 4), "c": b"c"}),
        "weights": weights(),
        "text": text_like(600_000, 5),
        "empty": b"",
    }
    chosen = settings(RULED, SMALL) if small else RULED
    with open_store(tmp_path / "s", settings=chosen, create=True) as store:
        for key, content in contents.items():
            if content:
                store.put(key, io.BytesIO(content) if small else content)
        list(store.put_many((f"group {key}", content) for key, content in contents.items()))
        assert not store.verify().damage
        for key, content in contents.items():
            assert store.get(f"group {key}").read() == content
            if content:
                assert store.get(key).read() == content
                assert store.info(f"group {key}").size_bytes == len(content)
        middle = store.get("film", start=1_000_000, stop=1_300_000).read()
        assert middle == FILM[1_000_000:1_300_000]


def test_large_chunks_need_few_index_entries(tmp_path: Path) -> None:
    counts = {}
    for rules in ("none", "media"):
        chosen = settings(RULED, {"chunker": {"rules": rules}})
        with open_store(tmp_path / rules, settings=chosen, create=True) as store:
            counts[rules] = store.put("film", samples.jpeg(6_000_000)).ledger.chunks
    assert counts["media"] * 15 < counts["none"]


def test_file_in_tree_tar_and_blob_is_stored_once(tmp_path: Path) -> None:
    """The kind is that of the bytes: names and positions change no cut."""
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "photo.txt").write_bytes(PHOTO)
    (folder / "weights").write_bytes(weights())
    (folder / "note").write_bytes(text_like(40_000, 6))
    with open_store(tmp_path / "s", settings=RULED, create=True) as store:
        store.put("photo", PHOTO)
        store.put("weights", weights())
        backup = store.backup("tree", [folder])
        tar = samples.tar_file({"x": PHOTO, "y": text_like(3_000, 7)})
        again = store.put("tar", tar)
    assert backup.put is not None
    assert backup.put.ledger.unique_bytes < 60_000  # the note, and the entries
    assert again.ledger.unique_bytes == len(tar) - len(PHOTO)


def test_changed_rows_of_a_database_store_little(tmp_path: Path) -> None:
    """Pages that did not change are known, also where pages next to them did."""
    path = tmp_path / "db"
    first = samples.sqlite_file(path, 30_000)
    base = sqlite3.connect(path)
    base.execute("UPDATE entries SET name = 'changed' WHERE id IN (5, 15000, 29000)")
    base.execute("INSERT INTO entries VALUES (40000, 'new', x'00')")
    base.commit()
    base.close()
    second = path.read_bytes()
    assert len(second) == len(first) != 0
    changed_pages = sum(first[at : at + 4096] != second[at : at + 4096] for at in range(0, len(first), 4096))
    with open_store(tmp_path / "s", settings=RULED, create=True) as store:
        store.put("db", first)
        result = store.put("db", second)
        assert store.get("db", 2).read() == second
    assert result.ledger.unique_bytes <= 4096 * changed_pages
    assert result.ledger.stored_bytes < 12_000


def test_changed_layer_stores_that_layer(tmp_path: Path) -> None:
    with open_store(tmp_path / "s", settings=RULED, create=True) as store:
        store.put("w", weights())
        result = store.put("w", weights(changed=3))
    assert 400_000 <= result.ledger.unique_bytes < 410_000

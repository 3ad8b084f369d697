"""Paths of a mounted store, without FUSE: names of keys, bounds of the caches, new versions."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from nearkin.store import Store, open_store
from nearkin.trees import mounted_store
from nearkin.trees.mounted_store import MountedStore, escape_key
from nearkin_shared.errors import NotFound


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """Return a store with one tree of three folders."""
    for number in range(3):
        (tmp_path / "source" / f"folder {number}").mkdir(parents=True)
        for name in range(5):
            (tmp_path / "source" / f"folder {number}" / f"{name}").write_bytes(b"%d" % name * 100)
    with open_store(tmp_path / "store", create=True) as opened:
        opened.backup("tree", [tmp_path / "source"])
        yield opened


@pytest.mark.parametrize(
    ("key", "names"),
    [
        ("a/b", [b"a", b"b"]),
        ("3/3", [b"3", b"%33"]),
        ("a/latest", [b"a", b"%6Catest"]),
        ("a/2026-11-28T10:15:00Z", [b"a", b"%32026-11-28T10:15:00Z"]),
        ("a//b/", [b"a", b"%2F", b"b", b"%2F"]),
        ("../.", [b"%2E%2E", b"%2E"]),
        ("100%", [b"100%25"]),
    ],
)
def test_key_is_escaped_where_a_folder_could_not_be_named(key: str, names: list[bytes]) -> None:
    assert escape_key(key) == names


def test_entries_are_found_beyond_the_bounds_of_the_caches(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mounted_store, "FOLDER_ENTRIES_MAX", 4)
    monkeypatch.setattr(mounted_store, "CACHED_ENTRIES_MAX", 3)
    monkeypatch.setattr(mounted_store, "OPEN_FILES_MAX", 2)
    paths = MountedStore(store)
    assert [name for name, _, _ in paths.children(b"/tree/1")] == [b"folder 0", b"folder 1", b"folder 2"]
    handles = [paths.open(b"/tree/1/folder %d/%d" % (folder, name)) for folder in range(3) for name in range(5)]
    for _ in range(2):
        for number, handle in enumerate(handles):
            assert paths.read(handle, 50, 100) == b"%d" % (number % 5) * 50
            assert len(paths._open_files) <= 2
    assert len(paths._folders) <= 4
    paths.close_all()
    assert not paths._open_files
    with pytest.raises(NotFound):
        paths.status(b"/tree/1/folder 1/5")
    with pytest.raises(NotADirectoryError):
        list(paths.children(b"/tree/latest"))
    with pytest.raises(IsADirectoryError):
        paths.open(b"/tree/1")


def test_new_versions_appear_after_the_refresh(store: Store) -> None:
    now = [0.0]
    paths = MountedStore(store, lambda: now[0])
    assert paths.link_target(b"/tree/latest") == b"1"
    store.put("tree", b"blob")
    store.put("new", b"blob")
    assert paths.link_target(b"/tree/latest") == b"1"
    now[0] = mounted_store.REFRESH_SECONDS
    assert paths.link_target(b"/tree/latest") == b"2"
    assert paths.status(b"/new/1").st_size == 4

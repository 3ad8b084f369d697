"""Test how further names of files are recognised."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from nearkin.trees.hard_links import HardLinks


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Return a file with three names."""
    (tmp_path / "a").write_bytes(b"content")
    for name in ("b", "c"):
        os.link(tmp_path / "a", tmp_path / name)
    return tmp_path / "a"


def test_file_is_forgotten_once_all_its_names_are_seen(file: Path) -> None:
    links, status = HardLinks(), file.stat()
    assert links.find(status) is None
    links.add(status, b"a")
    assert (links.find(status), len(links), links.find(status), len(links)) == (b"a", 1, b"a", 0)


def test_file_with_one_name_is_not_kept(tmp_path: Path) -> None:
    (tmp_path / "single").touch()
    links = HardLinks()
    links.add((tmp_path / "single").stat(), b"single")
    assert len(links) == 0


@pytest.mark.parametrize("change", ["size", "mtime"])
def test_other_file_with_the_same_inode_is_no_link(change: str, file: Path) -> None:
    """An inode that was used again while the tree was walked must not give a file the content of another."""
    links = HardLinks()
    links.add(file.stat(), b"a")
    if change == "size":
        status = file.stat()
        file.write_bytes(b"another content")
        os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    else:
        os.utime(file, ns=(9, 9))
    assert (links.find(file.stat()), len(links)) == (None, 0)

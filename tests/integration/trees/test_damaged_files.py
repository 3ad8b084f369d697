"""Trees with a damaged file: it alone is lost, whatever precedes it or is read together with it."""

from __future__ import annotations

import io
import os
import random
import tarfile
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

import nearkin
from nearkin.store import Store, open_store
from nearkin.trees.content_stream import ContentStream
from nearkin.trees.mounted_store import MountedStore
from nearkin.trees.restore_counts import RestoreOptions
from nearkin.trees.stored_content import read_file
from nearkin.trees.tar_writer import TarWriter
from nearkin.trees.zip_writer import write_zip
from nearkin_shared.errors import Corrupt
from nearkin_shared.formats.manifest import Manifest
from nearkin_shared.reading.restore import VersionReader
from tests.support.data.stores import containers, flip
from tests.support.servers.gateways import embedded, running

SMALL_BYTES, LARGE_BYTES = 60_000, 300_000
"""Of a file that shares a segment with its neighbours, and of one that has its own."""
SOUND = ["a", "c", "d/link", "d/y"]


@pytest.fixture(scope="module", params=[SMALL_BYTES, LARGE_BYTES])
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with files of random bytes."""
    folder, draw = tmp_path_factory.mktemp("damaged") / "source", random.Random(7)
    (folder / "d").mkdir(parents=True)
    for name in ("a", "b", "c", "d/y"):
        (folder / name).write_bytes(draw.randbytes(request.param))
    os.link(folder / "a", folder / "d" / "link")
    return folder


@pytest.fixture(scope="module", params=["changed byte", "missing container"])
def damaged(request: pytest.FixtureRequest, source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a store that lost the content of file b, which is in a container of its own."""
    store, content = tmp_path_factory.mktemp("stores") / "store", (source / "b").read_bytes()
    with open_store(store, create=True) as opened:
        opened.put("first", content)
        opened.backup("home", [source])
    (lost,) = [path for path in containers(store) if content[:64] in path.read_bytes()]
    if request.param == "missing container":
        lost.unlink()
        return store
    flip(lost, lost.read_bytes().find(content[:64]) + 1000)
    return store


def restored(target: Path, source: Path) -> list[str]:
    """Return the files below a folder; each has the content of its source."""
    found = sorted(str(path.relative_to(target)) for path in target.rglob("*") if path.is_file())
    assert all((target / name).read_bytes() == (source / name).read_bytes() for name in found)
    return found


def test_restore_loses_the_damaged_file_alone(damaged: Path, source: Path, tmp_path: Path) -> None:
    with open_store(damaged) as store:
        counts = store.restore("home", tmp_path / "target")
    assert [problem.path for problem in counts.problems] == [b"b"]
    assert (counts.files, counts.failed, counts.damaged) == (3, 1, 1)
    assert restored(tmp_path / "target", source) == SOUND


def test_restore_without_the_damaged_file_is_complete(damaged: Path, source: Path, tmp_path: Path) -> None:
    """A file that is left out is read over: its damage is of no other."""
    options = RestoreOptions(accepts=lambda entry: entry.path != b"b")
    with open_store(damaged) as store:
        assert store.restore("home", tmp_path / "target", options=options).is_complete
    assert restored(tmp_path / "target", source) == SOUND


def test_restore_through_a_gateway_loses_one_file(damaged: Path, source: Path, tmp_path: Path) -> None:
    with running(embedded(damaged)) as gateway, nearkin.connect(gateway.url) as store:
        counts = store.restore("home", tmp_path / "target")
        assert store.get("home", stop=(source / "a").stat().st_size).read() == (source / "a").read_bytes()
    assert [problem.path for problem in counts.problems] == [b"b"]
    assert counts.damaged == 1
    assert restored(tmp_path / "target", source) == SOUND


def test_file_in_front_of_damage_is_read(damaged: Path, source: Path) -> None:
    """By an archive's reader of all contents, and from a mounted store."""
    with open_store(damaged) as store:
        tree, paths = store.tree("home"), MountedStore(store)
        with store.get("home", stop=tree.content_bytes) as contents:
            for name in ("a", "c", "d/y"):
                placed = tree.find(name.encode())
                assert b"".join(read_file(contents, placed)) == (source / name).read_bytes()
                handle = paths.open(b"/home/1/" + name.encode())
                assert paths.read(handle, 0, LARGE_BYTES) == (source / name).read_bytes()
            with pytest.raises(Corrupt):
                b"".join(read_file(contents, tree.find(b"b")))
        paths.close_all()


@pytest.mark.parametrize("kind", ["tar", "zip"])
def test_archive_of_a_folder_has_no_part_in_damage(kind: str, damaged: Path, source: Path) -> None:
    """Its hard link has content in front of the damage, and its file some behind it, which is read over."""
    output = io.BytesIO()
    with open_store(damaged) as store:
        tree = store.tree("home")
        with store.get("home", stop=tree.content_bytes) as contents:
            if kind == "tar":
                TarWriter(tree, contents).write(b"d", output)
            else:
                write_zip(tree, contents, b"d", output)
    output.seek(0)
    if kind == "zip":
        with zipfile.ZipFile(output) as archive:
            found = {name: archive.read(name) for name in archive.namelist()}
    else:
        with tarfile.open(fileobj=output) as members:
            files = {member.name: members.extractfile(member) for member in members if member.isfile()}
            found = {name: file.read() for name, file in files.items() if file is not None}
    assert found == {name: (source / "d" / name).read_bytes() for name in ("link", "y")}


def test_sound_tree_is_read_as_one_stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without damage no file is opened alone, nor anything read twice."""
    (tmp_path / "source").mkdir()
    for number in range(40):
        (tmp_path / "source" / f"{number:02}").write_bytes(os.urandom(10_000))
    opened: list[tuple[int, int]] = []
    with open_store(tmp_path / "store", create=True) as store:
        store.backup("home", [tmp_path / "source"])
        open_range = Store._range

        def record(self: Store, manifest: Manifest, start: int, stop: int) -> VersionReader:
            opened.append((start, stop))
            return open_range(self, manifest, start, stop)

        monkeypatch.setattr(Store, "_range", record)
        assert store.restore("home", tmp_path / "target").is_complete
    assert opened[1:] == [(0, 400_000)]


def _pieces(broken: range, opened: list[tuple[int, int]]) -> Callable[[int, int], Iterable[memoryview]]:
    """Return ranges of ten bytes a piece, of which some cannot be read."""

    def open_range(start: int, stop: int) -> Iterable[memoryview]:
        opened.append((start, stop))
        for first in range(start, stop, 10):
            if first < broken.stop and min(first + 10, stop) > broken.start:
                raise Corrupt("damaged")
            yield memoryview(bytes(range(first, min(first + 10, stop))))

    return open_range


def test_stream_opens_a_damaged_range_once_more() -> None:
    """And ranges next to it, of which a piece could not be read, once each; then it reads on as one stream."""
    opened: list[tuple[int, int]] = []
    stream = ContentStream(_pieces(range(35, 40), opened), 100)
    assert b"".join(stream.read(0, 33)) == bytes(range(33))
    with pytest.raises(Corrupt):
        b"".join(stream.read(33, 45))
    stream.close()
    assert b"".join(stream.read(45, 60)) == bytes(range(45, 60))
    assert b"".join(stream.read(60, 100)) == bytes(range(60, 100))
    assert opened == [(0, 100), (30, 33), (33, 100), (33, 45), (45, 100)]

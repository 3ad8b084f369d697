"""A version is a file: the standard library reads it, and damage is never passed on."""

from __future__ import annotations

import gc
import io
import random
import shutil
import tarfile
import threading
import tracemalloc
import zipfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from nearkin.blob import Blob, VersionFile
from nearkin.store import Store, open_store
from nearkin_shared.errors import BadInput, Corrupt
from nearkin_shared.limits import KIB, MIB
from nearkin_shared.reading.restore import BATCH_BYTES
from tests.support.data.samples import noise
from tests.support.data.stores import flip

SIZE_BYTES = 12 * MIB + 345
CONTENT = noise(SIZE_BYTES, "blob file").tobytes()


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("blob") / "store"
    with open_store(path, create=True) as store:
        store.put("large", CONTENT)
        store.put("empty", b"")
        store.put("lines", b"one\ntwo\n\nlast" + b"x" * 20_000)
    return path


@pytest.fixture
def store(root: Path) -> Iterator[Store]:
    with open_store(root, read_only=True) as opened:
        yield opened


@pytest.fixture
def blob(store: Store) -> Iterator[Blob]:
    with store.get("large") as opened:
        yield opened


def test_read_by_sizes_returns_what_a_file_returns(blob: Blob) -> None:
    file = io.BytesIO(CONTENT)
    for size in (0, 1, 100, BATCH_BYTES, 5 * MIB, 3, -1, 10, -1):
        assert blob.read(size) == file.read(size)
        assert blob.tell() == file.tell()


def test_read_after_random_seeks_returns_what_a_file_returns(blob: Blob) -> None:
    """Seeks inside the held piece, just past it, far ahead, back, and beyond the end."""
    file, draw = io.BytesIO(CONTENT), random.Random(7)
    for _ in range(150):
        whence = draw.choice((io.SEEK_SET, io.SEEK_CUR, io.SEEK_END))
        offset = draw.choice((0, draw.randrange(300), draw.randrange(SIZE_BYTES + 100)))
        offset = -offset if whence == io.SEEK_END else offset
        if whence == io.SEEK_END and -offset > SIZE_BYTES:
            continue
        assert blob.seek(offset, whence) == file.seek(offset, whence)
        size = draw.choice((1, 22, 70_000, 600_000))
        assert blob.read(size) == file.read(size)


def test_readinto_fills_the_buffer_except_at_the_end(blob: Blob) -> None:
    buffer = bytearray(5 * MIB)
    assert blob.readinto(buffer) == len(buffer)
    assert buffer == CONTENT[: len(buffer)]
    blob.seek(-7, io.SEEK_END)
    assert (blob.readinto(buffer), bytes(buffer[:7])) == (7, CONTENT[-7:])
    assert blob.readinto(buffer) == 0
    assert blob.readinto(bytearray()) == 0
    blob.seek(0)
    with pytest.raises(TypeError, match="read-only"):
        blob.readinto(bytes(5))


def test_range_positions_count_from_its_start(store: Store) -> None:
    with store.get("large", start=1000, stop=9_000_000) as part:
        assert (part.size_bytes, part.seek(0, io.SEEK_END)) == (8_999_000, 8_999_000)
        assert part.seek(-5, io.SEEK_CUR) == 8_998_995
        assert part.read() == CONTENT[8_999_995:9_000_000]
        assert part.seek(2) == 2
        assert part.read(3) == CONTENT[1002:1005]


def test_pieces_and_write_to_ignore_the_position(blob: Blob) -> None:
    blob.seek(123)
    blob.read(10)
    assert b"".join(blob.pieces()) == CONTENT
    out = io.BytesIO()
    assert blob.write_to(out) == SIZE_BYTES
    assert out.getvalue() == CONTENT
    assert blob.read(10) == CONTENT[133:143]


def test_buffered_reader_and_copyfileobj_return_the_bytes(blob: Blob, tmp_path: Path) -> None:
    reader = io.BufferedReader(blob)
    assert reader.read(10) == CONTENT[:10]
    assert reader.peek(5)[:5] == CONTENT[10:15]
    reader.seek(6_000_000)
    assert reader.read(100_000) == CONTENT[6_000_000:6_100_000]
    reader.seek(0)
    with (tmp_path / "copy").open("wb") as file:
        shutil.copyfileobj(reader, file)
    assert (tmp_path / "copy").read_bytes() == CONTENT
    blob.seek(0)
    with (tmp_path / "raw").open("wb") as file:
        shutil.copyfileobj(blob, file)
    assert (tmp_path / "raw").read_bytes() == CONTENT


def test_lines_are_those_of_a_file(store: Store) -> None:
    with store.get("lines") as blob:
        assert list(blob) == list(io.BytesIO(store.get("lines").read()))
        blob.seek(4)
        assert blob.readline() == b"two\n"
        assert io.TextIOWrapper(io.BufferedReader(store.get("lines"))).readline() == "one\n"


@pytest.mark.parametrize("mode", ["w", "w:gz"])
def test_tar_and_zip_archives_open_from_a_blob(tmp_path: Path, mode: str) -> None:
    names = [f"folder/{number}" for number in range(6)]
    contents = {name: noise(700_000 + len(name), name).tobytes() for name in names}
    tar, archive = io.BytesIO(), io.BytesIO()
    with tarfile.open(fileobj=tar, mode=mode) as made, zipfile.ZipFile(archive, "w") as zipped:  # type: ignore[call-overload]
        for name, content in contents.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            made.addfile(member, io.BytesIO(content))
            zipped.writestr(name, content)
    with open_store(tmp_path / "store", create=True) as store:
        store.put("a.tar", tar)
        assert store.get("a.tar").read() == b""  # a file is read from its position on
        tar.seek(0)
        store.put("a.tar", tar)
        store.put("a.zip", archive.getvalue())
        with store.get("a.tar") as blob, tarfile.open(fileobj=blob) as opened:
            assert opened.getnames() == names
            for name in reversed(names):
                found = opened.extractfile(name)
                assert found is not None
                assert found.read() == contents[name]
        with store.get("a.zip") as blob, zipfile.ZipFile(blob) as unzipped:
            assert unzipped.testzip() is None
            assert unzipped.read(names[3]) == contents[names[3]]


def test_seek_reads_a_short_range_first(store: Store) -> None:
    """The table of contents of an archive does not cost the blocks in front of it."""
    with store.get("large") as blob:
        blob.seek(-22, io.SEEK_END)
        blob.read(22)
        blob.seek(1000)
        blob.read(1)
        assert blob.costs.blocks_decoded == 2  # each has 4 MiB


def test_memory_of_reads_is_bounded(store: Store) -> None:
    """A version of 12 MiB read in small steps needs the pieces held and read ahead, not its size in copies."""
    with store.get("large") as blob:
        blob.read(1)
        tracemalloc.start()
        try:
            while blob.read(64 * KIB):
                pass
            _, peak_bytes = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert peak_bytes < 6 * BATCH_BYTES


def test_empty_version_reads_as_an_empty_file(store: Store) -> None:
    with store.get("empty") as blob:
        assert (blob.read(), blob.read(5), blob.readinto(bytearray(3)), blob.seek(4), blob.read()) == (
            b"",
            b"",
            0,
            4,
            b"",
        )


def test_closed_or_misused_file_is_refused(store: Store) -> None:
    blob = store.get("large")
    for call in (lambda: blob.seek(-1), lambda: blob.seek(0, 3), lambda: blob.seek(-SIZE_BYTES - 1, io.SEEK_END)):
        with pytest.raises(ValueError, match="want 0"):
            call()
    with pytest.raises(TypeError):
        blob.seek(1.5)  # type: ignore[arg-type]
    assert (blob.readable(), blob.seekable(), blob.writable(), blob.isatty()) == (True, True, False, False)
    with pytest.raises(io.UnsupportedOperation):
        blob.fileno()
    blob.close()
    blob.close()
    for read in (blob.read, blob.tell, blob.pieces, blob.readline, lambda: blob.readinto(bytearray(1)), blob.seekable):
        with pytest.raises(ValueError, match=r"closed"):
            read()


def test_dropped_blob_ends_its_thread(store: Store) -> None:
    blob = store.get("large")
    blob.read(10)
    threads = [thread for thread in threading.enumerate() if thread.name == "nearkin-restore"]
    assert threads
    del blob
    gc.collect()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()


def read_to_error(blob: Blob) -> bytes:
    """Return the bytes before an error; all of them if there is none."""
    got = bytearray()
    with suppress(Corrupt):
        while piece := blob.read(100_000):
            got += piece
    return bytes(got)


def test_damaged_version_is_never_read_as_sound(root: Path, tmp_path: Path) -> None:
    """I8: the bytes before the damage are right, and the error stays until a seek."""
    broken = tmp_path / "broken"
    shutil.copytree(root, broken)
    largest = max((broken / "containers").rglob("*.nkc"), key=lambda path: path.stat().st_size)
    flip(largest, largest.stat().st_size * 3 // 4)
    with open_store(broken, read_only=True) as store, store.get("large") as blob:
        sound = read_to_error(blob)
        assert (sound, blob.tell()) == (CONTENT[: len(sound)], len(sound))
        first = blob.failure
        assert isinstance(first, Corrupt)
        with pytest.raises(Corrupt) as second:
            blob.readinto(bytearray(10))
        assert second.value is first is blob.failure
        assert blob.seek(0) == 0
        assert blob.read(1000) == CONTENT[:1000]


def test_wrong_whole_digest_withholds_the_last_piece(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """I8: chunks that are sound and together are another version raise before the last piece."""
    blob = store.get("large")
    monkeypatch.setattr(blob._reader, "_manifest", replace(blob._reader._manifest, blake3=bytes(32)))
    assert len(read_to_error(blob)) < SIZE_BYTES
    assert "BLAKE3" in str(blob.failure)


class ShortReader:
    """A file-like object with `read` alone, which returns less than it is asked for."""

    def __init__(self, content: bytes) -> None:
        self._file = io.BytesIO(content)

    def read(self, size: int, /) -> bytes:
        return self._file.read(min(size, 1000))


class FilePath:
    """An os.PathLike that is no Path."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __fspath__(self) -> str:
        return str(self._path)


def test_put_takes_paths_files_blobs_and_bytes(tmp_path: Path) -> None:
    content = CONTENT[:300_000]
    path = tmp_path / "file"
    path.write_bytes(content)
    with open_store(tmp_path / "store", create=True) as store, path.open("rb") as file:
        store.put("first", content)
        sources = [path, FilePath(path), file, ShortReader(content), bytearray(content), memoryview(content)]
        for source in [*sources, store.get("first"), io.BufferedReader(store.get("first"))]:
            assert store.put("k", source).info.digest == store.info("first").digest  # type: ignore[arg-type]
        for wrong in (5, "text", None, object()):
            with pytest.raises(BadInput, match="want a path, bytes, or a file"):
                store.put("k", wrong)  # type: ignore[arg-type]
        with pytest.raises(BadInput, match="no such file"):
            store.put("k", FilePath(tmp_path / "none"))


def test_blob_is_a_version_file() -> None:
    assert issubclass(Blob, VersionFile)
    assert issubclass(Blob, io.RawIOBase)

"""Test sparse files: each kind of file reads back as written."""

from __future__ import annotations

import io
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, cast

import pytest

from nearkin_shared.errors import BadInput
from nearkin_shared.limits import MIB
from nearkin_shared.utils.sparse_file import HOLE_BYTES, grows
from nearkin_shared.validation import write_pieces

LOT = random.Random(29)


def content(runs: int) -> bytes:
    """Return alternating zeros and other bytes, in lengths around that of a hole."""
    parts = []
    for number in range(runs):
        size = LOT.choice((1, 4095, HOLE_BYTES - 1, HOLE_BYTES, HOLE_BYTES + 1, 3 * HOLE_BYTES + 17))
        parts.append(bytes(size) if number % 2 else LOT.randbytes(size - 1) + b"\x01")
    return b"".join(parts)


def cut(data: bytes) -> Iterator[memoryview]:
    at = 0
    while at < len(data):
        size = LOT.choice((1, 100, HOLE_BYTES // 2, HOLE_BYTES, 5 * HOLE_BYTES + 3))
        yield memoryview(data)[at : at + size]
        at += size


@pytest.mark.parametrize("buffering", [0, -1])
@pytest.mark.parametrize("runs", range(1, 9))
def test_file_reads_back_as_written(tmp_path: Path, runs: int, buffering: int) -> None:
    data = content(runs)
    with (tmp_path / "file").open("wb", buffering=buffering) as file:
        assert write_pieces(cut(data), file, None) == len(data)
        assert file.tell() == len(data)
        file.write(b"behind")
    assert (tmp_path / "file").read_bytes() == data + b"behind"


def test_zeros_take_no_space(tmp_path: Path) -> None:
    data = b"a" + bytes(4 * MIB) + b"z" + bytes(4 * MIB)
    (tmp_path / "as it is").write_bytes(data)
    with (tmp_path / "holes").open("wb") as file:
        write_pieces([memoryview(data)], file, None)
    taken = (tmp_path / "as it is").stat().st_blocks * 512
    if taken < len(data):
        pytest.skip("this file system detects zeros by itself")
    assert (tmp_path / "holes").stat().st_blocks * 512 <= 4 * HOLE_BYTES
    assert (tmp_path / "holes").read_bytes() == data


@pytest.mark.parametrize("mode", ["r+b", "ab", "a+b"])
def test_existing_content_is_overwritten_or_appended_to(tmp_path: Path, mode: str) -> None:
    path, zeros = tmp_path / "file", bytes(4 * HOLE_BYTES)
    path.write_bytes(b"x" * 10 * HOLE_BYTES)
    with path.open(mode) as file:
        write_pieces([memoryview(zeros)], cast("BinaryIO", file), None)
    before = b"x" * 10 * HOLE_BYTES
    assert path.read_bytes() == (zeros + before[len(zeros) :] if mode == "r+b" else before + zeros)


def test_buffered_bytes_are_written_first(tmp_path: Path) -> None:
    with (tmp_path / "file").open("w+b") as file:
        file.write(b"head")
        write_pieces([memoryview(bytes(3 * HOLE_BYTES))], file, None)
        write_pieces([memoryview(bytes(HOLE_BYTES))], file, None)
    assert (tmp_path / "file").read_bytes() == b"head" + bytes(4 * HOLE_BYTES)


def test_failed_read_keeps_the_bytes_written_before(tmp_path: Path) -> None:
    def failing() -> Iterator[memoryview]:
        yield memoryview(b"a" + bytes(3 * HOLE_BYTES))
        raise BadInput("no more")

    with (tmp_path / "file").open("wb") as file, pytest.raises(BadInput, match="no more"):
        write_pieces(failing(), file, None)
    assert (tmp_path / "file").read_bytes() == b"a" + bytes(3 * HOLE_BYTES)


class Counting(io.FileIO):
    """A file class that counts the bytes written."""

    seen = 0

    def write(self, data: memoryview) -> int:  # type: ignore[override]
        self.seen += len(data)
        return super().write(data)


def test_custom_file_class_receives_every_byte(tmp_path: Path) -> None:
    zeros = bytes(5 * HOLE_BYTES)
    with Counting(tmp_path / "file", "w") as file:
        write_pieces([memoryview(zeros)], file, None)
        assert file.seen == len(zeros)
    memory = io.BytesIO()
    write_pieces([memoryview(zeros)], memory, None)
    assert memory.getvalue() == zeros


def test_pipe_receives_zeros_without_holes() -> None:
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb") as read, os.fdopen(writing, "wb", buffering=0) as write:
        assert not grows(write)
        write_pieces([memoryview(bytes(HOLE_BYTES // 2))], write, None)
        write.close()
        assert read.read() == bytes(HOLE_BYTES // 2)


def test_write_to_closed_file_is_refused(tmp_path: Path) -> None:
    file: BinaryIO = (tmp_path / "file").open("wb")
    file.close()
    with pytest.raises(ValueError, match="closed"):
        write_pieces([memoryview(b"a")], file, None)

"""Test the files that a get writes.

Short writes continue, and a file that accepts nothing is an error, not a loop.
"""

from __future__ import annotations

import io
from typing import Any

import pytest

from nearkin_shared.errors import BadInput
from nearkin_shared.validation import check_metadata, write_pieces

PIECES = [memoryview(b"first piece"), memoryview(b""), memoryview(b"second")]


class Raw(io.RawIOBase):
    """A raw file that accepts as many bytes as a test sets."""

    def __init__(self, *takes: int | None) -> None:
        self.takes = list(takes)
        self.got = b""

    def write(self, data: Any) -> int | None:
        taken = self.takes.pop(0) if self.takes else len(data)
        self.got += bytes(data[: taken or 0])
        return taken


def test_raw_file_may_accept_less_than_it_is_given() -> None:
    file, counts = Raw(3, 1), list[int]()
    assert write_pieces(PIECES, file, counts.append) == 17  # type: ignore[arg-type]
    assert file.got == b"first piecesecond"
    assert counts == [11, 0, 6]


@pytest.mark.parametrize("taken", [None, 0])
def test_file_that_would_block_is_refused(taken: int | None) -> None:
    with pytest.raises(BadInput, match="non-blocking"):
        write_pieces(PIECES, Raw(3, taken), None)  # type: ignore[arg-type]


def test_writer_without_a_count_accepted_all() -> None:
    class Collecting:
        got = b""

        def write(self, data: memoryview) -> None:
            self.got += data

    file = Collecting()
    assert write_pieces(PIECES, file, None) == 17  # type: ignore[arg-type]
    assert file.got == b"first piecesecond"


@pytest.mark.parametrize("metadata", [[1], "abc", {"a": 1}, {1: "a"}])
def test_metadata_that_is_no_map_of_texts_is_refused(metadata: Any) -> None:
    with pytest.raises(BadInput, match="metadata"):
        check_metadata(metadata)
    check_metadata({"a": "", "ä": "x", "": "y"})

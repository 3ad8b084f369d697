"""Test containers: each damage is detected, and never decoded into other data."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest

from nearkin_shared.errors import BadInput, Corrupt, FormatTooNew
from nearkin_shared.formats import columns, container_layout
from nearkin_shared.formats.block import decode_block, encode_block
from nearkin_shared.formats.block_kinds import block_roles
from nearkin_shared.formats.container import EncodedContainer, copied_block, decode_container, encode_container
from nearkin_shared.formats.directory import ChunkTable
from tests.support.data import samples

REFUSALS = (Corrupt, FormatTooNew)


def same(left: Any, right: Any) -> bool:
    """Return whether two values of nested dataclasses, arrays and plain values are equal."""
    if hasattr(left, "__dataclass_fields__"):
        return all(same(getattr(left, f.name), getattr(right, f.name)) for f in fields(left))
    return np.array_equal(left, right) if isinstance(left, np.ndarray) else bool(left == right)


def test_container_round_trips() -> None:
    directory, blocks = samples.read_all(samples.small_container())
    assert (directory.container, directory.domain, directory.depth_max) == (samples.CONTAINER, samples.DOMAIN, 2)
    assert directory.sketch_names == samples.SKETCHES
    assert [len(b) for b in blocks] == directory.blocks.raw.tolist() == [400, 20, 80]
    assert directory.blocks.codecs.tolist() == [container_layout.ZSTD, container_layout.STORED, container_layout.STORED]
    assert directory.chunks.bases.containers.tolist() == [0, 0, samples.CONTAINER, samples.OLDER, 0, 0]
    assert directory.chunks.positions.tolist() == [0, 100, 0, 12, 0, 30]
    assert directory.segments.chunks.ordinals.tolist() == [0, 1, 5, 6, 7, 65536, 65536, 2, 3, 9, 4, 5]
    assert directory.chunks.names.tolist() == samples.names_of([100, 300, 90, 120, 30, 50]).tolist()


def test_empty_container_is_156_bytes() -> None:
    data = samples.empty_container()
    directory, blocks = samples.read_all(data)
    assert (len(data), blocks, len(directory.chunks), len(directory.segments)) == (156, [], 0, 0)


def test_rewritten_container_keeps_ordinals_and_lists_removed() -> None:
    data, before = samples.rest_container(), decode_container(samples.small_container(), "whole")
    assert int.from_bytes(data[4:6], "little") == container_layout.VERSION == 5
    assert int.from_bytes(samples.small_container()[4:6], "little") == container_layout.VERSION_WHOLE == 3
    directory = decode_container(data, "rest")
    assert directory.chunks.there.tolist() == [True, False, False, True, False, False]
    assert directory.chunks.names[[0, 3]].tolist() == before.chunks.names[[0, 3]].tolist()
    assert not directory.chunks.names[[1, 2, 4, 5]].any()
    assert directory.chunks.blocks.tolist() == [3, 0, 0, 4, 0, 0]
    assert directory.chunks.depths.tolist() == [0, 0, 0, 1, 0, 0]
    assert directory.blocks.raw.tolist() == [0, 0, 0, 100, 8]
    assert [len(directory.segments), *np.diff(directory.segments.bounds).tolist()] == [3, 5, 5, 0]
    for number, raw in ((3, b"The quick brown fox. " * 5), (4, bytes(samples.noise(8, "delta")))):
        start = int(directory.blocks.offsets[number])
        record = data[start - container_layout.BLOCK.size : start + int(directory.blocks.stored[number])]
        assert decode_block(record, "block").tobytes() == raw[:100]
    assert len(data) < len(samples.small_container())


def test_removed_chunks_have_no_other_data() -> None:
    directory = samples.directory_of(samples.rest_container())
    names = container_layout.DIRECTORY.size
    assert directory[:4] == b"NKD4"
    for count in (1, 3, 7, 1 << 31):
        wrong = directory[:names] + count.to_bytes(4, "little") + directory[names + 4 :]
        with pytest.raises(Corrupt):
            decode_container(samples.with_directory(samples.rest_container(), wrong), "wrong")
    chunks = decode_container(samples.rest_container(), "rest").chunks
    for name, value in (("lengths", 0), ("blocks", 3)):
        column = getattr(chunks, name).copy()
        column[0 if name == "lengths" else 1] = value
        with pytest.raises(Corrupt):
            decode_container(_written(chunks, {name: column}), "wrong")


def _written(chunks: ChunkTable, changes: dict[str, Any]) -> bytes:
    """Return the sample rewritten with another chunk table, under valid checksums."""
    whole = decode_container(samples.rest_container(), "rest")
    columns_of = {f.name: getattr(chunks, f.name) for f in fields(chunks)} | changes
    raw = np.frombuffer(b"The quick brown fox. " * 20, np.uint8)[:100]
    packer = samples.compressor()
    last = encode_block(samples.noise(8, "delta"), container_layout.XDELTA3, 1, packer)
    blocks = [None, None, None, encode_block(raw, container_layout.RAW, 0, packer), last]
    return encode_container(
        samples.CONTAINER,
        samples.DOMAIN,
        2,
        samples.SKETCHES,
        blocks,
        ChunkTable(**columns_of),
        whole.segments,
    ).data


@pytest.mark.parametrize(
    "make",
    [
        samples.small_container,
        samples.patch_container,
        samples.rest_container,
        samples.merged_container,
        samples.empty_container,
    ],
)
def test_each_flipped_bit_is_detected(make: Callable[[], bytes]) -> None:
    data = bytearray(make())
    for position in range(len(data) * 8):
        data[position // 8] ^= 1 << position % 8
        with pytest.raises(REFUSALS):
            samples.read_all(bytes(data))
        data[position // 8] ^= 1 << position % 8
    samples.read_all(bytes(data))


def test_each_truncation_and_extension_is_detected() -> None:
    data = samples.small_container()
    for length in range(len(data)):
        with pytest.raises(REFUSALS):
            samples.read_all(data[:length])
        with pytest.raises(REFUSALS):
            samples.read_all(data[length + 1 :])
    with pytest.raises(REFUSALS):
        samples.read_all(data + b"\0")


def test_random_bytes_are_no_container() -> None:
    chance = random.Random(1)
    for length in (0, 1, 31, 32, 63, 64, 65, 500, 5000):
        for start in (b"", b"NKC1", b"NKC1\2\0\0\0"):
            with pytest.raises(REFUSALS):
                samples.read_all(start + chance.randbytes(length))


@pytest.mark.parametrize(
    ("at", "value", "error"), [(4, 9, FormatTooNew), (6, 1, FormatTooNew), (4, 0, Corrupt), (4, 1, Corrupt)]
)
def test_unknown_versions_and_flags_are_refused(at: int, value: int, error: type[Exception]) -> None:
    data = bytearray(samples.small_container())
    data[at] = value
    with pytest.raises(Corrupt, match="checksum"):  # a flipped bit is not mistaken for a later format
        samples.read_all(bytes(data))
    with pytest.raises(error, match=f"format {data[4]}"):
        samples.read_all(samples.with_directory(bytes(data), samples.directory_of(bytes(data))))


def test_container_above_its_bound_is_refused_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nearkin_shared.formats.container.CONTAINER_BYTES_MAX", 714)
    with pytest.raises(BadInput, match="at most 714"):
        samples.read_all(samples.small_container())


# --- blocks ----------------------------------------------------------------------------------------------------------


def block(
    codec: int = container_layout.STORED, kind: int = 0, raw: int = 5, payload: bytes = b"hello", reserved: int = 0
) -> bytes:
    """Return a block record with a valid checksum, whatever its fields."""
    lead = container_layout.BLOCK.pack(b"NKB1", codec, kind, 0, reserved, raw, len(payload), b"")[:-8]
    return lead + columns.check_bytes(lead, payload) + payload


def test_block_of_nothing_is_stored_raw() -> None:
    made = encode_block(np.zeros(0, np.uint8), container_layout.RAW, 0, samples.compressor())
    assert (made.codec, made.stored_bytes) == (container_layout.STORED, 0)
    assert len(decode_block(made.header + bytes(made.payload), "b")) == 0


def test_noise_is_stored_raw_and_text_is_compressed() -> None:
    for raw, codec in (
        (samples.noise(5000, "n"), container_layout.STORED),
        (np.zeros(5000, np.uint8), container_layout.ZSTD),
    ):
        made = encode_block(raw, container_layout.RAW, 0, samples.compressor())
        assert made.codec == codec
        assert np.array_equal(decode_block(made.header + bytes(made.payload), "b"), raw)


@pytest.mark.parametrize(
    ("record", "error"),
    [
        (block(raw=6), Corrupt),
        (block(codec=container_layout.ZSTD), Corrupt),
        (block(codec=container_layout.ZSTD, payload=b""), Corrupt),
        (block(raw=container_layout.BLOCK_RAW_BYTES_MAX + 1), Corrupt),
        (block(codec=2), FormatTooNew),
        (block(kind=len(container_layout.KINDS)), FormatTooNew),
        (block(reserved=1), FormatTooNew),
        (block()[:23], Corrupt),
        (block() + b"x", Corrupt),
    ],
)
def test_block_with_unknown_fields_is_refused(record: bytes, error: type[Exception]) -> None:
    with pytest.raises(error):
        decode_block(record, "b")


def test_block_that_decompresses_beyond_its_size_is_corrupt() -> None:
    made = encode_block(np.zeros(5000, np.uint8), container_layout.RAW, 0, samples.compressor())
    for raw in (0, 4999, 5001, container_layout.BLOCK_RAW_BYTES_MAX):
        with pytest.raises(Corrupt):
            decode_block(block(container_layout.ZSTD, 0, raw, bytes(made.payload)), "b")


# --- containers before they are written ------------------------------------------------------------------------------


def parts_of(data: bytes) -> list[bytes]:
    """Return a container in the pieces in which it is written."""
    offset, size, _, _, _ = container_layout.FOOTER.unpack(data[-container_layout.FOOTER.size :])
    cuts = [0, container_layout.HEADER.size, offset, offset + size, len(data) - 12, len(data) - 4, len(data)]
    return [data[start:stop] for start, stop in itertools.pairwise(cuts)]


def test_container_parts_are_verified_before_the_write() -> None:
    data = samples.small_container()
    parts = parts_of(data)
    found = EncodedContainer(parts, 0, 0).read_back("made")
    assert np.array_equal(found.rows, decode_container(data, "whole").rows)
    header, blocks, directory, lead, check, magic = parts
    for index in (0, 2, 3, 4, 5):  # of blocks the directory holds their lengths only
        wrong = list(parts)
        wrong[index] = bytes([wrong[index][0] ^ 1]) + wrong[index][1:]
        with pytest.raises(Corrupt):
            EncodedContainer(wrong, 0, 0).read_back("made")
    with pytest.raises(Corrupt):
        EncodedContainer([header, blocks + b"x", directory, lead, check, magic], 0, 0).read_back("made")
    # a footer that is consistent in itself, and names an offset one byte too low
    offset, size = len(header) + len(blocks) - 1, len(directory) + 1
    lead = container_layout.FOOTER.pack(offset, size, columns.check_bytes(directory), b"", b"")[:20]
    moved = [header, blocks, directory, lead, columns.check_bytes(header, lead), magic]
    with pytest.raises(Corrupt, match="its footer states"):
        EncodedContainer(moved, 0, 0).read_back("made")


@pytest.mark.parametrize(
    ("roles", "message"),
    [
        ([0, 1, 3], "a block of unknown role"),
        ([1, 1, 2], "a removed block with a role"),
        ([0, 2, 2], "a reference block without a prefix"),
        ([0, 1], "roles are not those of its blocks"),
    ],
)
def test_wrong_roles_are_refused(roles: list[int], message: str) -> None:
    data = samples.merged_container()
    directory = samples.directory_of(data)
    right, wrong = (columns.pack([np.array(values, "u1")]) for values in ([0, 1, 2], roles))
    assert directory.count(right) == 1
    with pytest.raises(Corrupt, match=message):
        decode_container(samples.with_directory(data, directory.replace(right, wrong)), "wrong")


def test_merged_block_of_deltas_is_refused() -> None:
    """A merged block that depends on others has a prefix, which GC runs read."""
    data = samples.rest_container()
    directory = samples.directory_of(data)
    right, wrong = (columns.pack([np.array([0, 0, 0, 0, role], "u1")]) for role in (0, container_layout.MERGED))
    assert directory.count(right) == 1
    with pytest.raises(Corrupt, match="a merged block of deltas"):
        decode_container(samples.with_directory(data, directory.replace(right, wrong)), "wrong")


def test_ranks_of_merged_chunks_give_deltas_no_role() -> None:
    """Guess no role that a container of format 5 could not record."""
    found = decode_container(samples.rest_container(), "rest")
    for rank in (container_layout.MERGED_RANK, container_layout.REFERENCE_RANK):
        chunks = replace(found.chunks, ranks=np.full(6, rank, np.uint8))
        unrecorded = replace(found, blocks=replace(found.blocks, roles=None), chunks=chunks)
        assert block_roles(unrecorded).tolist() == [0] * 5


def test_copied_block_keeps_its_role() -> None:
    data = samples.merged_container()
    directory = decode_container(data, "merged")
    rows, roles = directory.block_rows, block_roles(directory).tolist()
    copied = [copied_block(directory, number, data[rows[number].place], roles[number]) for number in (1, 2)]
    assert [block.role for block in copied] == [container_layout.MERGED, container_layout.REFERENCE]

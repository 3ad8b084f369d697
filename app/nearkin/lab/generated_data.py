"""Generate data that do not depend on the machine.

Only the raw output of a bit generator is used (numpy freezes that stream, not the results of its distributions), and
only integer arithmetic follows it.

    vm_image:  | boot area, 1 MiB | file | file | zeros | file ... | free space, zeros |
                                    `- 4 KiB aligned, made of 256 KiB pieces that depend on (file, piece) alone

Invariant: the same arguments give the same bytes on every machine and with every numpy version.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import field, replace
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from nearkin_shared.errors import BadInput
from nearkin_shared.utils.frozen import frozen

BLOCK_BYTES = 4096
PIECE_BYTES = 256 << 10  # the unit in which contents are drawn: smaller ones spend their time in set-up, not in bytes
BOOT_BYTES = 1 << 20  # partition tools leave the first MiB to the boot loader
_PIECE_BLOCKS = PIECE_BYTES // BLOCK_BYTES

_WORDS = 4096
_PHRASES = 1 << 14  # of two words, 12 bytes on average: zstd -3 shrinks the text 3.4 times


def _raw(count: int, *seed: int) -> NDArray[np.uint64]:
    """Return `count` random 64-bit words, uint64[count], from every number of `seed`."""
    words: NDArray[np.uint64] = np.random.PCG64(np.random.SeedSequence(seed)).random_raw(count)
    return words


class _Draw:
    """A stream of small decisions.

    Invariant: the n-th answer depends on the seed and on n alone.
    """

    def __init__(self, *seed: int) -> None:
        self._bits = np.random.PCG64(np.random.SeedSequence(seed))

    def below(self, bound: int) -> int:
        """Return a whole number from 0 to bound - 1."""
        return int(self._bits.random_raw()) % bound

    def percent(self, chance: int) -> bool:
        """Return true `chance` times in a hundred."""
        return self.below(100) < chance


def random_bytes(byte_count: int, seed: int = 0) -> bytes:
    """Return `byte_count` bytes that nothing compresses. Negative counts raise BadInput."""
    _check_count("byte_count", byte_count)
    return _raw(-(-byte_count // 8), 1, seed).astype("<u8").tobytes()[:byte_count]


@cache
def _phrases() -> list[bytes]:
    """Return the phrases of generated text: pairs of words of a Markov chain over letters."""
    draw = _Draw(2)
    follows = [[draw.below(26) for _ in range(7)] for _ in range(26)]  # seven successors a letter: about 2.8 bits each
    words = []
    for _ in range(_WORDS):
        letter = draw.below(26)
        word = bytearray()
        for _ in range(2 + min(draw.below(9), draw.below(9))):
            word.append(97 + letter)
            letter = follows[letter][draw.below(7)]
        words.append(bytes(word))
    ends = [b" ", b" ", b" ", b" ", b" ", b", ", b".\n", b" = ", b"();\n", b"\n    "]
    pairs = []
    for _ in range(_PHRASES):
        first, second = (words[min(draw.below(_WORDS), draw.below(_WORDS))] for _ in range(2))
        pairs.append(first + b" " + second + ends[draw.below(len(ends))])
    return pairs


def text_like(byte_count: int, seed: int = 0) -> bytes:
    """Return `byte_count` bytes of words with a skewed frequency, as in source code.

    Raises BadInput for a negative count.
    """
    _check_count("byte_count", byte_count)
    phrases = _phrases()
    parts: list[bytes] = []
    made_bytes = 0
    while made_bytes < byte_count:
        picks = _raw((byte_count - made_bytes) // 10 + 16, 3, seed, made_bytes)
        # the smaller of two draws: the first phrases are common and the last ones rare
        skewed = np.minimum(picks & np.uint64(_PHRASES - 1), (picks >> np.uint64(32)) & np.uint64(_PHRASES - 1))
        part = b"".join(map(phrases.__getitem__, skewed.tolist()))
        parts.append(part)
        made_bytes += len(part)
    return b"".join(parts)[:byte_count]


def records_like(byte_count: int, seed: int = 0) -> bytes:
    """Return `byte_count` bytes of 32-byte records, as of a database or an object file.

    Each has a counter, a kind out of 64, a slowly growing time, a skewed 16-bit value and three random bytes; the rest
    is zero. Negative counts raise BadInput.
    """
    _check_count("byte_count", byte_count)
    count = -(-byte_count // 32)
    picks = _raw(count, 4, seed)
    records = np.zeros((count, 4), dtype="<u8")
    start = int(_raw(1, 5, seed)[0]) & 0xFFFF_FFFF
    records[:, 0] = np.arange(start, start + count, dtype=np.uint64) | ((picks & np.uint64(63)) << np.uint64(40))
    records[:, 1] = np.uint64(start << 20) + np.cumsum((picks >> np.uint64(6)) & np.uint64(0xFFF), dtype=np.uint64)
    records[:, 2] = np.minimum((picks >> np.uint64(18)) & np.uint64(0x3FF), (picks >> np.uint64(28)) & np.uint64(0x3FF))
    records[:, 3] = (picks >> np.uint64(40)) & np.uint64(0xFF_FFFF)
    return records.tobytes()[:byte_count]


def mutate(data: bytes, seed: int = 0, edits: int = 8, edit_bytes_max: int = 64) -> bytes:
    """Return `data` after `edits` random insertions, deletions and overwrites.

    Each has 1 to `edit_bytes_max` bytes. Offsets, kinds and new bytes depend on `seed`. Edits may touch one another;
    an edit at the end may be cut short. Raises BadInput for a negative number of edits and for `edit_bytes_max` below
    1.
    """
    _check_count("edits", edits)
    if edit_bytes_max < 1:
        raise BadInput(f"edit_bytes_max {edit_bytes_max}: must be at least 1")
    draw = _Draw(6, seed)
    plan = sorted((draw.below(len(data) + 1), draw.below(3), 1 + draw.below(edit_bytes_max)) for _ in range(edits))
    parts: list[bytes] = []
    copied_bytes = 0
    for number, (drawn_place, kind, byte_count) in enumerate(plan):
        place = max(drawn_place, copied_bytes)
        parts.append(data[copied_bytes:place])
        copied_bytes = place
        if kind != 0:  # delete or overwrite
            copied_bytes = min(place + byte_count, len(data))
        if kind != 1:  # insert or overwrite
            parts.append(random_bytes(byte_count if kind == 0 else copied_bytes - place, seed * 1_000_003 + number))
    parts.append(data[copied_bytes:])
    return b"".join(parts)


def _check_count(name: str, value: int) -> None:
    if value < 0:
        raise BadInput(f"{name} {value}: must not be negative")


# ------------------------------------------------------------------ virtual machine images


_MAKERS = {"text": text_like, "records": records_like, "random": random_bytes}


@frozen
class _Patch:
    """One changed block of an extent: rewritten whole, or touched in 8 bytes."""

    block: int
    seed: int
    whole: bool


@frozen
class _Extent:
    """A run of `blocks` disk blocks with a content from its block `first` on.

    Zeros are kind `_FREE`.
    """

    kind: str
    content: int
    first: int
    blocks: int
    tail_bytes: int = 0  # zero bytes that fill up the last block
    patches: tuple[_Patch, ...] = field(default=())


_FREE = "zero"


def _first_layout(draw: _Draw, blocks: int) -> list[_Extent]:
    """Return the extents of generation 0 after the boot area.

    Files fill four fifths of the disk; free space follows.
    """
    extents: list[_Extent] = []
    used = 0
    while used < blocks * 4 // 5:
        room = blocks - used
        if extents and draw.percent(15):  # a copy: packages carry the same files more than once
            extent = extents[draw.below(len(extents))]
            extent = replace(extent, blocks=min(extent.blocks, room))
        elif draw.percent(10):
            extent = _Extent(_FREE, 0, 0, min(1 + draw.below(64), room))
        else:
            extent = _new_file(draw, room)
        extents.append(extent)
        used += extent.blocks
    if used < blocks:
        extents.append(_Extent(_FREE, 0, 0, blocks - used))
    return extents


def _new_file(draw: _Draw, room_blocks: int) -> _Extent:
    """Return a file of 4 KiB to 8 MiB, at most `room_blocks` blocks.

    Each power of two is as likely as the next.
    """
    kind = ("text", "text", "text", "records", "records", "records", "random")[draw.below(7)]
    size = 1 << draw.below(11)
    return _Extent(kind, draw.below(1 << 62), 0, min(size + draw.below(size + 1), room_blocks), draw.below(BLOCK_BYTES))


def _next_layout(draw: _Draw, extents: list[_Extent]) -> list[_Extent]:
    """Return the next generation's layout, with files rewritten, appended, moved, added.

    Appended, moved and added data are written to the free space at the end; a moved file's old bytes stay at their
    offset, as they do on a disk.
    """
    total = sum(extent.blocks for extent in extents)
    free = extents[-1].blocks if extents and extents[-1].kind == _FREE else 0
    kept = extents[: len(extents) - (1 if free else 0)]
    changed: list[_Extent] = []
    added: list[_Extent] = []
    for extent in kept:
        happens = draw.below(100)
        if extent.kind == _FREE or happens >= 30:
            changed.append(extent)
        elif happens < 10:  # one area rewritten
            start = draw.below(extent.blocks)
            area = range(start, min(start + 1 + draw.below(extent.blocks), extent.blocks))
            changed.append(_apply_patches(extent, [_Patch(block, draw.below(1 << 62), True) for block in area]))
        elif happens < 24:  # one block in four touched, as by an update in place
            touched = [block for block in range(extent.blocks) if draw.below(4) == 0]
            changed.append(_apply_patches(extent, [_Patch(block, draw.below(1 << 62), False) for block in touched]))
        elif happens < 27:  # appended
            changed.append(extent)
            added.append(replace(extent, first=extent.first + extent.blocks, blocks=1 + draw.below(32), patches=()))
        else:  # moved
            changed.append(extent)
            added.append(extent)
    added.extend(_new_file(draw, total) for _ in range(1 + len(kept) // 50))
    for extent in added:
        blocks = min(extent.blocks, free)
        if blocks:
            kept_patches = tuple(patch for patch in extent.patches if patch.block < blocks)
            changed.append(replace(extent, blocks=blocks, patches=kept_patches))
            free -= blocks
    return [*changed, _Extent(_FREE, 0, 0, free)] if free else changed


def _apply_patches(extent: _Extent, patches: list[_Patch]) -> _Extent:
    return replace(extent, patches=extent.patches + tuple(patches))


def _extent_pieces(extent: _Extent) -> Iterator[bytes]:
    """Yield an extent's bytes, at most PIECE_BYTES at a time."""
    end = extent.first + extent.blocks
    for piece in range(extent.first // _PIECE_BLOCKS, -(-end // _PIECE_BLOCKS)):
        from_block = max(extent.first, piece * _PIECE_BLOCKS)
        to_block = min(end, (piece + 1) * _PIECE_BLOCKS)
        if extent.kind == _FREE:
            yield bytes((to_block - from_block) * BLOCK_BYTES)
            continue
        skip_bytes = (from_block - piece * _PIECE_BLOCKS) * BLOCK_BYTES
        drawn_bytes = (to_block - piece * _PIECE_BLOCKS) * BLOCK_BYTES
        data = bytearray(_MAKERS[extent.kind](drawn_bytes, extent.content + piece)[skip_bytes:])
        if to_block == end and extent.tail_bytes:
            data[-extent.tail_bytes :] = bytes(extent.tail_bytes)
        for patch in extent.patches:
            block = extent.first + patch.block
            if from_block <= block < to_block:
                at = (block - from_block) * BLOCK_BYTES
                if patch.whole:
                    data[at : at + BLOCK_BYTES] = _MAKERS[extent.kind](BLOCK_BYTES, patch.seed)
                else:
                    at += patch.seed % (BLOCK_BYTES - 8)
                    data[at : at + 8] = random_bytes(8, patch.seed)
        yield bytes(data)


def vm_image(mebibytes: int, seed: int = 0, generation: int = 0) -> Iterator[bytes]:
    """Yield a disk image of `mebibytes` MiB in pieces of at most PIECE_BYTES.

    Generation 0 has a boot area, files of text, records and random bytes, each on a 4 KiB boundary, some of them
    copies, with zeros between and a fifth of the disk free. In each later generation a quarter of the files have
    areas rewritten or blocks touched in 8 bytes, and others are appended, moved and added: one used block in eight
    changes (300 MiB, seed 0), a fifth of those by 8 bytes only. Raises BadInput below 2 MiB and for a negative
    generation.

    Invariant: the same arguments give the same bytes.
    """
    if mebibytes < 2:
        raise BadInput(f"mebibytes {mebibytes}: an image has at least 2")
    _check_count("generation", generation)
    blocks = ((mebibytes << 20) - BOOT_BYTES) // BLOCK_BYTES
    layout = _first_layout(_Draw(7, seed), blocks)
    for number in range(generation):
        layout = _next_layout(_Draw(8, seed, number), layout)
    assert sum(extent.blocks for extent in layout) == blocks
    return _image_pieces(layout, seed)


def _image_pieces(layout: list[_Extent], seed: int) -> Iterator[bytes]:
    boot = random_bytes(446, seed) + bytes(64) + b"\x55\xaa"
    assert len(boot) == 512  # a master boot record: code, four empty partition entries, signature
    yield boot + bytes(PIECE_BYTES - len(boot))
    for _ in range(BOOT_BYTES // PIECE_BYTES - 1):
        yield bytes(PIECE_BYTES)
    for extent in layout:
        yield from _extent_pieces(extent)


def write_vm_image(path: Path, mebibytes: int, seed: int = 0, generation: int = 0) -> Path:
    """Write `vm_image(mebibytes, seed, generation)` to `path`, completely or not at all.

    Returns `path`.
    """
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("wb") as file:
        file.writelines(vm_image(mebibytes, seed, generation))
    return partial.replace(path)

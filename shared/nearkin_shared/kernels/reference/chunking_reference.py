"""Define the chunkers in plain Python.

Invariant: a cut depends only on the bytes of its own chunk, never on their delivery.

    chunk start      min_bytes            target_bytes (fastcdc)        max_bytes
    |----------------|====================|=============================|
       never cut        stricter mask         looser mask                 always cut

A chunk of L bytes, min_bytes < L < max_bytes, ends where the hash of its last bytes (a full window, wholly inside the
chunk because min_bytes >= window) matches. So the hash at a position is a pure function of the window before
it, and this file computes it for every position from its formula, without rolling, before it walks the chunks.

The first length tried is min_bytes + 1: thus PRUNE counts its trials in E[S] (section 4.1, equation 2).
"""

from __future__ import annotations

import hashlib
import operator
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from nearkin_shared.errors import BadInput

if TYPE_CHECKING:
    from typing_extensions import Buffer

    Payload: TypeAlias = Buffer | NDArray[Any]
    """Any C-contiguous bytes-like object; read as bytes, never written."""

CHUNK_BYTES_MIN = 64  # the Gear hash remembers 64 bytes: a smaller chunk would look before its own start
CHUNK_BYTES_MAX = 900 * 1024  # a chunk is never above a segment, a segment never above a Kafka message
WINDOW_BYTES = 48  # as LBFS, and as PRUNE section 4.2
WINDOW_BYTES_MIN = 16
WINDOW_BYTES_MAX = 256

GEAR_WINDOW_BYTES = 64
GEAR_SHA256 = "a6796932db02618617d30d05625f863a1f29c7051106ec93ea5416567ac9ee3b"

RABIN_POLYNOMIAL = 0x395478949AA17D
"""Irreducible over GF(2), of degree 53: the first such x^53 + r(x) with r from BLAKE2b of 0, 1, 2, ...

tests/unit/shared/test_chunking.py finds it again.
"""
RABIN_DEGREE = 53

INCK_MODULUS = (1 << 31) - 1

TARGET_PATTERN = 0x9E377
"""A window ends a chunk where the hash's low bits equal this number's: floor(2^20 / golden ratio).

For 6 to 19 bits it is not 0, else a run of zero bytes were cut at every minimum. From 9 bits up it is above 257 and not
all ones, so that INC-K's kernel may leave a remainder of 0 to 257 as 2^31 - 1 more without changing an answer.
"""


def _gear_table() -> NDArray[np.uint64]:
    """Return the Gear table, uint64[256].

    Entry b is BLAKE2b-64 of the byte b, personalised `nearkin gear`, as little-endian.
    """
    digests = [hashlib.blake2b(bytes([b]), digest_size=8, person=b"nearkin gear").digest() for b in range(256)]
    raw = b"".join(digests)
    assert hashlib.sha256(raw).hexdigest() == GEAR_SHA256  # another table: no stored data would deduplicate again
    table = np.frombuffer(raw, dtype="<u8").astype(np.uint64)
    table.setflags(write=False)
    return table


GEAR: NDArray[np.uint64] = _gear_table()
"""uint64[256], read-only: the value that each byte adds to the Gear hash."""


def gear_mask(mask_bits: int) -> int:
    """Return the Gear mask of `mask_bits` (0 to 48) bits, spread evenly over bits 15 to 62.

    Bit k sees the last k + 1 bytes, hence the high part, as in FastCDC. Bit 63 is free so that the hash after the
    first of two bytes can be tested shifted left by one. Of the steps coprime to 48, 29 is nearest 48 / golden ratio:
    every prefix of the sequence is spread, and a stricter mask contains a looser one.
    """
    return sum(1 << (62 - 29 * k % 48) for k in range(mask_bits))


def payload_view(data: Payload) -> memoryview:
    """Return `data` as a flat memoryview of bytes.

    Errors: BadInput when it is no bytes-like object, or not C-contiguous.
    """
    try:
        view = memoryview(data)
    except (TypeError, ValueError, BufferError) as err:
        raise BadInput(f"data of type {type(data).__name__}: give a C-contiguous bytes-like object") from err
    if not view.c_contiguous:
        raise BadInput(f"data of strides {view.strides}: give a C-contiguous bytes-like object")
    if view.nbytes == 0:
        return memoryview(b"")
    try:
        return view.cast("B")
    except (TypeError, ValueError) as err:
        raise BadInput(f"data of item format {view.format!r}: give a bytes-like object of native items") from err


def _integer(name: str, value: int) -> int:
    try:
        return operator.index(value)
    except TypeError as err:
        raise BadInput(f"{name} {value!r}: give an integer") from err


def check_bounds(min_bytes: int, target_bytes: int, max_bytes: int) -> tuple[int, int, int]:
    """Return the bounds as integers: 64 <= min_bytes <= target_bytes <= max_bytes <= 921600.

    Errors: BadInput naming the value.
    """
    least, target, most = (
        _integer("min_bytes", min_bytes),
        _integer("target_bytes", target_bytes),
        _integer("max_bytes", max_bytes),
    )
    if least < CHUNK_BYTES_MIN:
        raise BadInput(f"min_bytes {least}: give at least {CHUNK_BYTES_MIN}")
    if most > CHUNK_BYTES_MAX:
        raise BadInput(f"max_bytes {most}: give at most {CHUNK_BYTES_MAX}")
    if least > most:
        raise BadInput(f"min_bytes {least}: give at most max_bytes, {most}")
    if not least <= target <= most:
        raise BadInput(f"target_bytes {target}: give between min_bytes, {least}, and max_bytes, {most}")
    return least, target, most


def check_window(min_bytes: int, window_bytes: int) -> int:
    """Return the window as a plain integer: 16 <= window_bytes <= min(256, min_bytes).

    Errors: BadInput naming the value.
    """
    window = _integer("window_bytes", window_bytes)
    most = min(WINDOW_BYTES_MAX, min_bytes)
    if not WINDOW_BYTES_MIN <= window <= most:
        raise BadInput(f"window_bytes {window}: give between {WINDOW_BYTES_MIN} and {most} (256, or min_bytes if less)")
    return window


def gear_mask_bits(target_bytes: int) -> tuple[int, int]:
    """Return the set bits (below target, above target) for fastcdc.

    log2(target_bytes), rounded, plus and minus 2.
    """
    nearest = (
        target_bytes * target_bytes
    ).bit_length() // 2  # floor(log2(t) + 0.5), in integers: same on every machine
    return nearest + 2, nearest - 2


def pattern_mask_bits(target_bytes: int, max_bytes: int) -> int:
    """Return log2(target_bytes), the bits of the target pattern for rabin and inck: 6 to 19.

    target_bytes is the mean distance from the minimum to a match, so it may lie below min_bytes: PRUNE's table 2 has 10
    bits with a minimum of 2 KiB. Errors: BadInput when it is no power of two between 64 and max_bytes.
    """
    target = _integer("target_bytes", target_bytes)
    if not CHUNK_BYTES_MIN <= target <= max_bytes or target & (target - 1):
        raise BadInput(
            f"target_bytes {target}: give a power of two between {CHUNK_BYTES_MIN} and max_bytes, {max_bytes}"
        )
    return target.bit_length() - 1


def _gear_hashes(data: memoryview) -> NDArray[np.uint64]:
    """Return each 64-byte window's hash.

    The sum of GEAR[b] << age, modulo 2^64; the newest byte has age 0.
    """
    gears = GEAR[np.frombuffer(data, dtype=np.uint8)]
    count = len(gears) - GEAR_WINDOW_BYTES + 1
    hashes = np.zeros(max(count, 0), dtype=np.uint64)
    if count > 0:
        for position in range(GEAR_WINDOW_BYTES):
            age = np.uint64(GEAR_WINDOW_BYTES - 1 - position)
            hashes += gears[position : position + count] << age
    return hashes


def _rabin_hashes(data: memoryview, window_bytes: int) -> NDArray[np.uint64]:
    """Return each window's remainder modulo RABIN_POLYNOMIAL.

    The window is a polynomial over GF(2), highest bit first.
    """
    values = np.frombuffer(data, dtype=np.uint8).astype(np.uint64)
    count = len(values) - window_bytes + 1
    hashes = np.zeros(max(count, 0), dtype=np.uint64)
    if count > 0:
        for position in range(window_bytes):
            hashes = hashes << np.uint64(8) | values[position : position + count]
            for degree in range(RABIN_DEGREE + 7, RABIN_DEGREE - 1, -1):
                has_term = hashes >> np.uint64(degree) & np.uint64(1)
                hashes ^= has_term * np.uint64(RABIN_POLYNOMIAL << (degree - RABIN_DEGREE))
    return hashes


def _inck_hashes(data: memoryview, window_bytes: int) -> NDArray[np.uint64]:
    """Return each window's remainder modulo 2^31 - 1.

    The window is a big-endian number (PRUNE section 4.2 with base 2^8).
    """
    values = np.frombuffer(data, dtype=np.uint8).astype(np.uint64)
    count = len(values) - window_bytes + 1
    hashes = np.zeros(max(count, 0), dtype=np.uint64)
    if count > 0:
        for position in range(window_bytes):
            hashes = (hashes * np.uint64(256) + values[position : position + count]) % np.uint64(INCK_MODULUS)
    return hashes


def _first_in(ends: NDArray[np.int64], after_bytes: int, up_to_bytes: int) -> int | None:
    """Return the first of the sorted `ends` in (after_bytes, up_to_bytes]."""
    place = int(np.searchsorted(ends, after_bytes, side="right"))
    if place < len(ends) and ends[place] <= up_to_bytes:
        return int(ends[place])
    return None


def _walk(
    total_bytes: int,
    min_bytes: int,
    target_bytes: int,
    max_bytes: int,
    final: bool,
    strict_ends: NDArray[np.int64],
    loose_ends: NDArray[np.int64],
) -> NDArray[np.uint32]:
    """Return the lengths of the certain chunks: strict ends up to the target, then loose."""
    lengths: list[int] = []
    start = 0
    while total_bytes - start >= max_bytes or (final and start < total_bytes):
        limit = min(start + max_bytes, total_bytes)
        middle = min(start + target_bytes, limit)
        end = _first_in(strict_ends, start + min_bytes, middle)
        if end is None:
            end = _first_in(loose_ends, middle, limit)
        if end is None:
            end = limit
        lengths.append(end - start)
        start = end
    return np.array(lengths, dtype=np.uint32)


def fastcdc_cut(data: Payload, min_bytes: int, target_bytes: int, max_bytes: int, final: bool) -> NDArray[np.uint32]:
    """See `nearkin_shared.kernels.native._chunking.fastcdc_cut`: same arguments, same answer."""
    view = payload_view(data)
    min_bytes, target_bytes, max_bytes = check_bounds(min_bytes, target_bytes, max_bytes)
    hashes = _gear_hashes(view)
    strict_bits, loose_bits = gear_mask_bits(target_bytes)
    strict_ends = np.flatnonzero((hashes & np.uint64(gear_mask(strict_bits))) == 0) + GEAR_WINDOW_BYTES
    loose_ends = np.flatnonzero((hashes & np.uint64(gear_mask(loose_bits))) == 0) + GEAR_WINDOW_BYTES
    return _walk(len(view), min_bytes, target_bytes, max_bytes, final, strict_ends, loose_ends)


def _pattern_ends(hashes: NDArray[np.uint64], mask_bits: int, window_bytes: int) -> NDArray[np.int64]:
    mask = (1 << mask_bits) - 1
    return np.flatnonzero((hashes & np.uint64(mask)) == np.uint64(TARGET_PATTERN & mask)) + window_bytes


def rabin_cut(
    data: Payload, min_bytes: int, target_bytes: int, max_bytes: int, final: bool, window_bytes: int = WINDOW_BYTES
) -> NDArray[np.uint32]:
    """See `nearkin_shared.kernels.native._chunking.rabin_cut`: same arguments, same answer."""
    view = payload_view(data)
    min_bytes, _, max_bytes = check_bounds(min_bytes, min_bytes, max_bytes)
    mask_bits = pattern_mask_bits(target_bytes, max_bytes)
    window_bytes = check_window(min_bytes, window_bytes)
    ends = _pattern_ends(_rabin_hashes(view, window_bytes), mask_bits, window_bytes)
    return _walk(len(view), min_bytes, min_bytes, max_bytes, final, ends, ends)


def inck_cut(
    data: Payload, min_bytes: int, target_bytes: int, max_bytes: int, final: bool, window_bytes: int = WINDOW_BYTES
) -> NDArray[np.uint32]:
    """See `nearkin_shared.kernels.native._chunking.inck_cut`: same arguments, same answer."""
    view = payload_view(data)
    min_bytes, _, max_bytes = check_bounds(min_bytes, min_bytes, max_bytes)
    mask_bits = pattern_mask_bits(target_bytes, max_bytes)
    window_bytes = check_window(min_bytes, window_bytes)
    ends = _pattern_ends(_inck_hashes(view, window_bytes), mask_bits, window_bytes)
    return _walk(len(view), min_bytes, min_bytes, max_bytes, final, ends, ends)


def _pieces(total_bytes: int, piece_bytes: int, final: bool) -> NDArray[np.uint32]:
    whole, rest_bytes = divmod(total_bytes, piece_bytes)
    lengths = np.full(whole + (final and rest_bytes > 0), piece_bytes, dtype=np.uint32)
    if final and rest_bytes:
        lengths[-1] = rest_bytes
    return lengths


def fixed_cut(data: Payload, chunk_bytes: int, final: bool) -> NDArray[np.uint32]:
    """Return the chunks of exactly `chunk_bytes` (64 to 921600); when `final`, the rest too.

    Returns uint32[chunks], bytes. Errors: BadInput naming the value. Source: static chunking, ALG-Dedupe section 4.3.
    """
    chunk = _integer("chunk_bytes", chunk_bytes)
    if not CHUNK_BYTES_MIN <= chunk <= CHUNK_BYTES_MAX:
        raise BadInput(f"chunk_bytes {chunk}: give between {CHUNK_BYTES_MIN} and {CHUNK_BYTES_MAX}")
    return _pieces(payload_view(data).nbytes, chunk, final)


def whole_cut(data: Payload, max_bytes: int, final: bool) -> NDArray[np.uint32]:
    """Return the whole blob as one chunk, or chunks of `max_bytes` (64 to 921600).

    While not `final` only pieces of exactly `max_bytes` are certain. Returns uint32[chunks], bytes.
    Errors: BadInput naming the value. Source: whole-file chunking, ALG-Dedupe section 4.3.
    """
    most = _integer("max_bytes", max_bytes)
    if not CHUNK_BYTES_MIN <= most <= CHUNK_BYTES_MAX:
        raise BadInput(f"max_bytes {most}: give between {CHUNK_BYTES_MIN} and {CHUNK_BYTES_MAX}")
    return _pieces(payload_view(data).nbytes, most, final)


def expected_chunk_bytes(min_bytes: int, max_bytes: int, mask_bits: int) -> float:
    """Return the mean chunk in bytes of rabin and inck for random data; 0 to 62 `mask_bits`.

    E[S] = min + 2^n * (1 - (1 - 2^-n)^N), N = max - min: PRUNE section 4.1, equation 2.
    Errors: BadInput naming the value.
    """
    min_bytes, _, max_bytes = check_bounds(min_bytes, min_bytes, max_bytes)
    bits = _integer("mask_bits", mask_bits)
    if not 0 <= bits <= 62:
        raise BadInput(f"mask_bits {bits}: give between 0 and 62")
    trials = max_bytes - min_bytes
    # expm1 and log1p keep the digits that 1 - (1 - 2^-n)^N loses for a large n
    missed_log = trials * np.log1p(-(2.0**-bits)) if bits else (-np.inf if trials else 0.0)
    return float(min_bytes - 2.0**bits * np.expm1(missed_log))

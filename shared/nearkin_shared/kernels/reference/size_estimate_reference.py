"""Define the estimate of compressed sizes in plain Python.

Invariant: integers only, so that every machine ranks the same candidates in the same order.

A chunk is parsed greedily as an LZ compressor would, and priced without writing a bit: matches by their offset and
length, literals by their order-0 entropy. Prices imitate zstd at level 3 on one chunk alone, without its effort:

    literals -- entropy + a symbol table, or 8 bits each if less ---+
    matches --- a code for both lengths + (a new offset: its log2) -+--> bytes, never above length + 10
    frame ----- 10 bytes, and 8 for the headers of its sections ----+

Candidates come first and the parse second. A position's candidate is the last earlier one whose five bytes have its
hash, whatever the parse takes; so they can be found without waiting for it, which doubled the speed on text.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from nearkin_shared.kernels.reference.features_reference import check_chunks

if TYPE_CHECKING:
    from nearkin_shared.kernels.reference.features_reference import Payload

FRAME_BYTES: Final = 10
"""A zstd frame's magic number and headers around one chunk; also the most an estimate exceeds its chunk by."""

HASH_BITS: Final = 12  # 4096 positions of 4 bytes: 16 KiB fit in L1 with an 8 KiB chunk
HASH_MULTIPLIER: Final = 0x9E3779B97F4A7C15  # 2^64 / golden ratio, odd
MATCH_MIN: Final = 5  # with 4 a seventh slower, the spread against zstd about the same: 1.7 to 1.4 % on text
TAIL_BYTES: Final = 10  # no match is looked for in the last bytes, so that eight can be read at the next position too

# Prices in bits: least squares of estimate / actual over chunks of 2, 8 and 32 KiB of text, source, JSON and binaries
# against backports.zstd level 3, rounded.
SECTION_BITS: Final = 64  # headers of the literals and the sequences, with the tables of the sequences' codes
MATCH_BITS: Final = 3  # the two length codes
NEW_OFFSET_BITS: Final = 7  # saved by a repeated offset, in addition to the offset's own bits
SYMBOL_BITS: Final = 3  # one symbol in the literals' Huffman table
LONG_MATCH_LOG2: Final = 5  # lengths from 2^5 and literal runs from 2^4 on pay for extra bits
LONG_LITERALS_LOG2: Final = 4

_LOG2_FRACTION_BITS = 16


def log2_of(value: int) -> int:
    """Return log2(value), value >= 1, in units of 2^-16, rounded down.

    Computed from its leading nine bits by squaring.
    """
    exponent = value.bit_length() - 1
    mantissa = value << 8 >> exponent << 54  # 62 fraction bits: 1.0 <= mantissa < 2.0
    fraction = 0
    for _ in range(_LOG2_FRACTION_BITS):
        mantissa = mantissa * mantissa >> 62
        fraction <<= 1
        if mantissa >> 63:
            mantissa >>= 1
            fraction |= 1
    return exponent << _LOG2_FRACTION_BITS | fraction


LOG2_FRACTIONS: Final = tuple(log2_of(256 + low) & 0xFFFF for low in range(256))
"""log2(1 + low / 256) in units of 2^-16."""


def _log2(value: int) -> int:
    exponent = value.bit_length() - 1
    return exponent << _LOG2_FRACTION_BITS | LOG2_FRACTIONS[(value << 8 >> exponent) & 255]


def _match_bits(literals: int, length: int, offset: int, last_offset: int) -> int:
    bits = MATCH_BITS
    if offset != last_offset:
        bits += NEW_OFFSET_BITS + offset.bit_length() - 1
    bits += max(0, length.bit_length() - LONG_MATCH_LOG2)
    return bits + max(0, literals.bit_length() - LONG_LITERALS_LOG2)


def _literal_bits(counts: list[int]) -> int:
    total = sum(counts)
    if not total:
        return 0
    entropy = total * _log2(total) - sum(count * _log2(count) for count in counts if count)
    symbols = sum(1 for count in counts if count)
    return min((max(entropy, 0) >> _LOG2_FRACTION_BITS) + SYMBOL_BITS * symbols, 8 * total)


def _candidates(chunk: bytes) -> dict[int, int]:
    """Return for even positions an earlier position with the same five bytes.

    Position 0 and the tail are excluded.
    """
    last = [0] * (1 << HASH_BITS)  # by hash; an unwritten entry contains position 0, and is compared like any other
    candidates = {}
    for at in range(max(0, len(chunk) - TAIL_BYTES)):
        five_bytes = int.from_bytes(chunk[at : at + MATCH_MIN], "little") << (64 - 8 * MATCH_MIN)
        key = (five_bytes * HASH_MULTIPLIER & 0xFFFFFFFFFFFFFFFF) >> (64 - HASH_BITS)
        if at % 2 == 0 and at and chunk[at : at + MATCH_MIN] == chunk[last[key] : last[key] + MATCH_MIN]:
            candidates[at] = last[key]
        last[key] = at
    return candidates


def _estimate(chunk: bytes) -> int:
    counts = [0] * 256  # of the literals
    bits = last_offset = 0
    anchor = 0  # the first byte no match has taken
    for at, candidate in _candidates(chunk).items():
        if at < anchor:
            continue
        start, source = at, candidate
        if last_offset and chunk[at : at + MATCH_MIN] == chunk[at - last_offset : at - last_offset + MATCH_MIN]:
            source = at - last_offset
        if start > anchor and source > 0 and chunk[start - 1] == chunk[source - 1]:
            start, source = start - 1, source - 1  # only even positions have candidates; the match may be one longer
        length = MATCH_MIN
        while start + length < len(chunk) and chunk[start + length] == chunk[source + length]:
            length += 1
        for byte in chunk[anchor:start]:
            counts[byte] += 1
        bits += _match_bits(start - anchor, length, start - source, last_offset)
        last_offset = start - source
        anchor = start + length
    for byte in chunk[anchor:]:
        counts[byte] += 1
    return min((bits + _literal_bits(counts) + SECTION_BITS + 7) // 8, len(chunk)) + FRAME_BYTES


def compressed_bytes_estimate(
    payload: Payload, offsets: NDArray[np.uint64], lengths: NDArray[np.uint32]
) -> NDArray[np.uint32]:
    """Estimated compressed bytes of each chunk alone; see the compiled kernel's stub."""
    data, offsets, lengths = check_chunks(payload, offsets, lengths)
    chunks = [
        data[offset : offset + length].tobytes()
        for offset, length in zip(offsets.tolist(), lengths.tolist(), strict=True)
    ]
    return np.array([min(_estimate(chunk), 0xFFFFFFFF) for chunk in chunks], np.uint32)

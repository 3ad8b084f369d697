"""Define the chunker `leastcdc` in plain Python.

Invariant: cuts depend on the bytes only, not on processor or delivery.

    chunk start      low_bytes           target_bytes          high_bytes              max_bytes
    |----------------|===================|=====================|-----------------------|
       never cut          at the least of the candidates           at the first one       always cut

An end is a candidate when a 16-bit hash of the 32 bytes before it is among the highest few, and its rank is a 64-bit
hash of the 48 bytes before it. A chunk ends at the candidate of least rank between low_bytes and high_bytes. These lie
evenly around the target, so random data's chunks have that mean (and 2 %: where a range reaches back over the one
before it, ends have lost once already). Streams that differ meet again at an end that is least for both.

The hash is made of 16-bit products and sums, so that 32 windows fit a wide vector. Ranks are 64-bit products, one at a
time, of one end in 512 (at a target of 8 KiB).
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from nearkin_shared.kernels.reference.chunking_reference import check_bounds, payload_view

if TYPE_CHECKING:
    from nearkin_shared.kernels.reference.chunking_reference import Payload

HASH_WINDOW_BYTES = 32
RANK_WINDOW_BYTES = 48

CONSTANTS_NUMBER = 8  # docs/adr/0012: of the first twelve that spare runs of one byte, the best on real data
CONSTANTS_SHA256 = "6951cfb68dae3d9058e2dd8d3d68780eaff7cdf5ececa053958c279c9d3b355c"

# At 8 KiB 128 of 65536 hashes: half as many cost 3 % of dedup on botocore, twice as many 6 % of the speed.
CANDIDATES_LOG2 = 20


def constants(number: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return four odd 16-bit multipliers and six 64-bit keys.

    BLAKE2b of `number`, personalised `nearkin least`.
    """
    raw = hashlib.blake2b(number.to_bytes(2, "little"), digest_size=56, person=b"nearkin least").digest()
    spread = tuple(int(word) | 1 for word in np.frombuffer(raw[:8], "<u2"))
    keys = tuple(int(word) for word in np.frombuffer(raw[8:], "<u8"))
    return spread, keys


SPREAD, KEYS = constants(CONSTANTS_NUMBER)
"""Multipliers of the older half of 4, 8, 16 and 32 bytes; keys that combine the six words of a rank."""

_RAW = np.array(SPREAD, "<u2").tobytes() + np.array(KEYS, "<u8").tobytes()
assert hashlib.sha256(_RAW).hexdigest() == CONSTANTS_SHA256  # others: no stored data would deduplicate again


def least_hash(target_bytes: int) -> int:
    """Return the hash from which an end is a candidate.

    There are 16 candidates in target_bytes of random data (64 to 921600).
    """
    return 65536 - max(1, (1 << CANDIDATES_LOG2) // target_bytes)


def cut_range(min_bytes: int, target_bytes: int, max_bytes: int) -> tuple[int, int]:
    """Return (low_bytes, high_bytes): 0.5 and 1.5 of the target, limited by the bounds."""
    low_bytes = max(min_bytes, target_bytes // 2)
    return low_bytes, min(2 * target_bytes - low_bytes, max_bytes)


def hashes(data: memoryview) -> NDArray[np.uint16]:
    """Return each 32-byte window's hash: a sum over its 16 little-endian words, modulo 2^16.

    The word that ends 2k bytes before the window's end is multiplied with the SPREAD of every bit that is set in k.
    """
    values = np.frombuffer(data, dtype=np.uint8).astype(np.uint16)
    count = max(len(values) - HASH_WINDOW_BYTES + 1, 0)
    sums = np.zeros(count, dtype=np.uint16)
    if count > 0:
        for k in range(HASH_WINDOW_BYTES // 2):
            factor = 1
            for bit, multiplier in enumerate(SPREAD):
                if k >> bit & 1:
                    factor = factor * multiplier % 65536
            first = HASH_WINDOW_BYTES - 2 - 2 * k
            words = values[first : first + count] | values[first + 1 : first + 1 + count] << np.uint16(8)
            sums += words * np.uint16(factor)
    return sums


def rank(window: bytes) -> int:
    """Return the rank of an end from the 48 bytes before it.

    Three products of two words, their halves combined.
    """
    words = [int(word) ^ key for word, key in zip(np.frombuffer(window, "<u8"), KEYS, strict=True)]
    folded = 0
    for first, second in zip(words[::2], words[1::2], strict=True):
        product = first * second
        folded ^= product >> 64 ^ product & (1 << 64) - 1
    return folded


def leastcdc_cut(data: Payload, min_bytes: int, target_bytes: int, max_bytes: int, final: bool) -> NDArray[np.uint32]:
    """See `nearkin_shared.kernels.native._leastcdc.leastcdc_cut`: same arguments, same answer."""
    view = payload_view(data)
    min_bytes, target_bytes, max_bytes = check_bounds(min_bytes, target_bytes, max_bytes)
    low_bytes, high_bytes = cut_range(min_bytes, target_bytes, max_bytes)
    candidates = np.flatnonzero(hashes(view) >= least_hash(target_bytes)) + HASH_WINDOW_BYTES
    lengths: list[int] = []
    start = 0
    while len(view) - start >= max_bytes or (final and start < len(view)):
        limit = min(start + max_bytes, len(view))
        after_low, after_high, after_limit = np.searchsorted(
            candidates, [start + low_bytes, min(start + high_bytes, limit), limit], side="right"
        )
        if after_low < after_high:
            ends = candidates[after_low:after_high].tolist()
            end = min(ends, key=lambda end: (rank(bytes(view[end - RANK_WINDOW_BYTES : end])), end))
        elif after_high < after_limit:
            end = int(candidates[after_high])
        else:
            end = limit
        lengths.append(end - start)
        start = end
    return np.array(lengths, dtype=np.uint32)


def cpu_path() -> str:
    """Return `base`: plain Python has one path."""
    return "base"

"""Estimate, compiled. Invariant: equal to `_estimate_reference`, whose checks run first; no read is out of bounds."""

from libc.stdint cimport UINT32_MAX, uint8_t, uint16_t, uint32_t, uint64_t
from libc.string cimport memset

import numpy as np

from nearkin_shared.kernels.reference import size_estimate_reference as reference

cdef extern from *:
    """
    #include <string.h>
    static inline uint64_t little_endian(uint64_t value) {
    #if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
        return value;
    #else
        return __builtin_bswap64(value);
    #endif
    }
    static inline uint64_t eight_bytes(const void *at) {
        uint64_t value;
        memcpy(&value, at, 8);
        return little_endian(value);
    }
    static inline uint32_t bits_of(uint64_t value) { return value ? 64 - (uint32_t)__builtin_clzll(value) : 0; }
    /* How many bytes at `one` and `other` agree; `one` is the later and ends at `end`. Most matches end within the
       first eight, so their length comes from counting zeros: a loop over bytes ends where no predictor expects it. */
    static inline size_t agreeing(const uint8_t *one, const uint8_t *other, const uint8_t *end) {
        const uint8_t *at = one;
        for (; end - at >= 8; at += 8, other += 8) {
            uint64_t differing = eight_bytes(at) ^ eight_bytes(other);
            if (differing) return (size_t)(at - one) + ((unsigned)__builtin_ctzll(differing) >> 3);
        }
        while (at < end && *at == *other) at++, other++;
        return (size_t)(at - one);
    }
    #define HELD_BYTES 4096
    /* Literals wait here, run after run, to be counted in one long loop: counted run by run, every run's end was a
       mispredicted branch. */
    typedef struct {
        uint32_t counts[4][256]; /* four in turn: equal neighbours would wait for their own counter */
        uint32_t held;
        uint8_t bytes[HELD_BYTES + 16];
    } literals;
    static inline void count_bytes(literals *seen, const uint8_t *at, const uint8_t *end) {
        for (; end - at >= 4; at += 4) {
            seen->counts[0][at[0]]++;
            seen->counts[1][at[1]]++;
            seen->counts[2][at[2]]++;
            seen->counts[3][at[3]]++;
        }
        for (; at < end; at++) seen->counts[0][*at]++;
    }
    /* Take the run from `at` to `to`, of a chunk that ends at `end`. */
    static inline void add_literals(literals *seen, const uint8_t *at, const uint8_t *to, const uint8_t *end) {
        size_t run = (size_t)(to - at);
        if (run <= 16 && end - at >= 16) {
            if (seen->held + run > HELD_BYTES) {
                count_bytes(seen, seen->bytes, seen->bytes + seen->held);
                seen->held = 0;
            }
            memcpy(seen->bytes + seen->held, at, 16); /* whatever the run: no loop; the next one overwrites the rest */
            seen->held += (uint32_t)run;
        } else {
            count_bytes(seen, at, to);
        }
    }
    """
    uint64_t little_endian(uint64_t value) noexcept nogil
    uint64_t eight_bytes(const void *at) noexcept nogil
    int __builtin_ctzll(uint64_t value) noexcept nogil
    uint32_t bits_of(uint64_t value) noexcept nogil
    size_t agreeing(const uint8_t *one, const uint8_t *other, const uint8_t *end) noexcept nogil

    ctypedef struct literals:
        uint32_t counts[4][256]
        uint32_t held
        uint8_t *bytes

    void count_bytes(literals *seen, const uint8_t *at, const uint8_t *end) noexcept nogil
    void add_literals(literals *seen, const uint8_t *at, const uint8_t *to, const uint8_t *end) noexcept nogil

cdef enum:
    HASH_BITS = 12
    MATCH_MIN = 5
    TAIL_BYTES = 10
    SECTION_BITS = 64
    MATCH_BITS = 3
    NEW_OFFSET_BITS = 7
    SYMBOL_BITS = 3
    LONG_MATCH_LOG2 = 5
    LONG_LITERALS_LOG2 = 4
    FRAME_BYTES = 10
    BLOCK_POSITIONS = 4096  # searched before they are parsed
    BLOCK_CANDIDATES = 2048  # 8 KiB, for the even positions alone
    BLOCK_WORDS = 65  # of the map, and one more: eight bytes are read from the last byte on

# The loops need these as compile-time constants; the reference stays the one that decides them.
assert (HASH_BITS, MATCH_MIN, TAIL_BYTES, FRAME_BYTES) == (
    reference.HASH_BITS,
    reference.MATCH_MIN,
    reference.TAIL_BYTES,
    reference.FRAME_BYTES,
)
assert (SECTION_BITS, MATCH_BITS, NEW_OFFSET_BITS, SYMBOL_BITS, LONG_MATCH_LOG2, LONG_LITERALS_LOG2) == (
    reference.SECTION_BITS,
    reference.MATCH_BITS,
    reference.NEW_OFFSET_BITS,
    reference.SYMBOL_BITS,
    reference.LONG_MATCH_LOG2,
    reference.LONG_LITERALS_LOG2,
)

cdef uint64_t hash_multiplier = reference.HASH_MULTIPLIER
cdef uint16_t[256] log2_fractions = reference.LOG2_FRACTIONS


cdef inline uint64_t log2_of(uint32_t value) noexcept nogil:
    """log2 in units of 2^-16 of value >= 1."""
    cdef uint32_t exponent = bits_of(value) - 1
    return (<uint64_t>exponent << 16) | log2_fractions[((<uint64_t>value << 8) >> exponent) & 255]


cdef inline uint64_t match_bits(uint64_t run, uint64_t length, uint64_t offset, uint64_t last_offset) noexcept nogil:
    cdef uint64_t bits = MATCH_BITS
    if offset != last_offset:
        bits += NEW_OFFSET_BITS + bits_of(offset) - 1
    if bits_of(length) > LONG_MATCH_LOG2:
        bits += bits_of(length) - LONG_MATCH_LOG2
    if bits_of(run) > LONG_LITERALS_LOG2:
        bits += bits_of(run) - LONG_LITERALS_LOG2
    return bits


cdef uint64_t literal_bits(literals *taken) noexcept nogil:
    cdef uint64_t total = 0, spent = 0, whole, priced
    cdef uint32_t count, symbols = 0
    cdef int i
    for i in range(256):
        count = taken.counts[0][i] + taken.counts[1][i] + taken.counts[2][i] + taken.counts[3][i]
        if count:
            total += count
            symbols += 1
            spent += count * log2_of(count)
    if total == 0:
        return 0
    # No sum overflows: total < 2^32, log2 in these units < 2^21.
    whole = total * log2_of(<uint32_t>total)
    # The rounding of the logarithms may take the entropy of nearly one symbol below nothing.
    priced = ((whole - spent if whole > spent else 0) >> 16) + SYMBOL_BITS * symbols
    return priced if priced < 8 * total else 8 * total


cdef void find_candidates(
    const uint8_t *chunk, uint64_t first, uint64_t count, uint32_t *last, uint32_t *candidates, uint64_t *found
) noexcept nogil:
    """For even positions from `first` on: an earlier position into `candidates`, and into bit `position` of the map
    `found` whether five bytes agree there. No branch depends on the data. Reads seven bytes past the last position."""
    cdef uint64_t start = 0, here, word, many, at, multiplier = hash_multiplier
    cdef uint32_t key, candidate
    while start < count:
        many = count - start if count - start < 64 else 64
        word = 0
        here = 0
        while here < many:
            at = first + start + here
            word >>= 2
            # The five bytes at `at` are the top of one product, those at the next position the top of another.
            key = <uint32_t>(((eight_bytes(chunk + at) << 24) * multiplier) >> (64 - HASH_BITS))
            candidate = last[key]
            last[key] = <uint32_t>at
            key = <uint32_t>((((eight_bytes(chunk + at) >> 8) << 24) * multiplier) >> (64 - HASH_BITS))
            last[key] = <uint32_t>at + 1
            candidates[(start + here) >> 1] = candidate
            word |= <uint64_t>(((eight_bytes(chunk + at) ^ eight_bytes(chunk + candidate)) << 24) == 0) << 62
            here += 2
        word >>= (64 - many) & ~<uint64_t>1
        found[start >> 6] = little_endian(word)
        start += 64


cdef uint64_t estimate(const uint8_t *chunk, uint32_t chunk_bytes) noexcept nogil:
    cdef uint32_t[1 << HASH_BITS] last  # by hash; 0 where never written: position 0 is compared like any other
    cdef uint32_t[BLOCK_CANDIDATES] candidates
    cdef uint64_t[BLOCK_WORDS] found
    cdef literals taken
    cdef uint64_t bits = 0, at = 0, anchor = 0, last_offset = 0, start, source, length, back, word
    cdef uint64_t block = 0, block_end, searched = chunk_bytes - TAIL_BYTES if chunk_bytes > TAIL_BYTES else 0
    cdef const uint8_t *end = chunk + chunk_bytes
    memset(last, 0, sizeof(last))
    memset(taken.counts, 0, sizeof(taken.counts))
    taken.held = 0
    while block < searched:
        block_end = block + BLOCK_POSITIONS if searched - block > BLOCK_POSITIONS else searched
        memset(found, 0, sizeof(found))
        find_candidates(chunk, block, block_end - block, last, candidates, found)
        if block == 0:
            found[0] &= ~little_endian(1)  # position 0 is its own candidate
        while at < block_end:
            word = eight_bytes(<const uint8_t *>found + ((at - block) >> 3)) >> ((at - block) & 7)
            if word == 0:
                at += 57  # the bits that were surely in the word
                continue
            at += __builtin_ctzll(word)
            source = candidates[(at - block) >> 1]
            if last_offset and ((eight_bytes(chunk + at) ^ eight_bytes(chunk + at - last_offset)) << 24) == 0:
                source = at - last_offset
            back = (at > anchor) & (source > 0)
            back &= chunk[at - back] == chunk[source - back]
            start = at - back
            source -= back
            length = MATCH_MIN + agreeing(chunk + start + MATCH_MIN, chunk + source + MATCH_MIN, end)
            add_literals(&taken, chunk + anchor, chunk + start, end)
            bits += match_bits(start - anchor, length, start - source, last_offset)
            last_offset = start - source
            at = start + length
            anchor = at
        # The search may have run past the block; bytes that it skipped there may match. A match that ended there is kept.
        at = block_end if anchor < block_end else anchor
        block = block_end
    count_bytes(&taken, chunk + anchor, end)
    count_bytes(&taken, taken.bytes, taken.bytes + taken.held)
    bits = (bits + literal_bits(&taken) + SECTION_BITS + 7) >> 3
    return (bits if bits < chunk_bytes else chunk_bytes) + FRAME_BYTES


def compressed_bytes_estimate(payload, offsets, lengths):
    data, offsets, lengths = reference.check_chunks(payload, offsets, lengths)
    answer = np.empty(len(offsets), np.uint32)
    cdef const uint8_t[::1] bytes_view = data
    cdef const uint64_t[::1] offsets_view = offsets
    cdef const uint32_t[::1] lengths_view = lengths
    cdef uint32_t[::1] answer_view = answer
    cdef uint64_t found
    cdef Py_ssize_t i, chunks = offsets_view.shape[0]
    cdef const uint8_t *first = NULL
    if bytes_view.shape[0]:
        first = &bytes_view[0]
    with nogil:
        for i in range(chunks):
            found = FRAME_BYTES
            if lengths_view[i]:
                found = estimate(first + offsets_view[i], lengths_view[i])
            answer_view[i] = <uint32_t>(found if found < UINT32_MAX else UINT32_MAX)
    return answer

/* The chunker `leastcdc`, finding candidates. Invariant: every path writes the same bits.
 *
 * A window of 32 bytes is sixteen little-endian words; its 16-bit hash is built by doubling, for 32 windows at a time:
 *
 *   h4(e)  = w(e - 2) * a + w(e)         w: the word that ends at e
 *   h8(e)  = h4(e - 4) * b + h4(e)       windows at even and at odd ends are two separate runs of 16-bit lanes,
 *   h16(e) = h8(e - 8) * c + h8(e)       so that a step back by 2k bytes is a step by k lanes
 *   h32(e) = h16(e - 16) * d + h16(e)
 *
 * Hashes are only compared with a bound; what passes is a bit.
 *
 * Bitmaps: word k of a scan has the ends from + 64 k + 1 + i for i below 64: bit i / 2 if i is even, else 32 + i / 2.
 */
#ifndef NEARKIN_LEASTCDC_SCAN_H
#define NEARKIN_LEASTCDC_SCAN_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#define HAVE_X86 1
#endif

#if defined(__GNUC__) || defined(__clang__)
#define INLINE static inline __attribute__((always_inline))
#else
#define INLINE static inline
#endif

#define HASH_WINDOW_BYTES 32
#define SCAN_WORDS 64           /* 4096 ends a scan: their bitmap and lanes stay in L1 beside the bytes */
#define LEAD_BYTES 64           /* before the first end; every scan starts at least so far into its chunk */
#define LANES (32 * SCAN_WORDS) /* of one parity */
#define WINDOW_LANES (HASH_WINDOW_BYTES / 2)
#define AHEAD_BYTES 6144 /* prefetched: 6.5 GB/s without, 7.2 at 512, 8.5 at 4096 to 6144 bytes */

/* Writes the bitmap of the ends from + 1 to from + 64 * words, 1 <= words <= SCAN_WORDS, and returns which of its words
 * are not zero, a bit each. Reads the LEAD_BYTES before `from` (or fewer) and up to the last end. */
typedef uint64_t scan_ends(const uint8_t *from, size_t words, uint16_t least_hash, const uint16_t *spread,
                           uint64_t *bitmap);

/* ---- any processor ----------------------------------------------------------------------------------------------- */

INLINE void load_words(uint16_t *lanes, const uint8_t *at, size_t count)
{
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
    memcpy(lanes, at, 2 * count);
#else
    for (size_t k = 0; k < count; k++)
        lanes[k] = (uint16_t)(at[2 * k] | at[2 * k + 1] << 8);
#endif
}

/* Four passes over the lanes of one parity, each a loop that compilers turn into vectors. Products are unsigned: those
 * of two uint16_t would be int and overflow. */
static uint64_t scan_base(const uint8_t *from, size_t words, uint16_t least_hash, const uint16_t *spread,
                          uint64_t *bitmap)
{
    uint64_t hits = 0;
    uint16_t h[LANES + WINDOW_LANES];
    const size_t lanes = 32 * words;

    for (unsigned odd = 0; odd < 2; odd++) {
        const uint32_t a = spread[0], b = spread[1], c = spread[2], d = spread[3];

        load_words(h, from + 1 + odd - HASH_WINDOW_BYTES, lanes + 15);
        for (size_t k = 0; k < lanes + 14; k++)
            h[k] = (uint16_t)(h[k] * a + h[k + 1]);
        for (size_t k = 0; k < lanes + 12; k++)
            h[k] = (uint16_t)(h[k] * b + h[k + 2]);
        for (size_t k = 0; k < lanes + 8; k++)
            h[k] = (uint16_t)(h[k] * c + h[k + 4]);
        for (size_t word = 0; word < words; word++) {
            uint16_t *g = h + 32 * word, any = 0;
            uint32_t bits = 0;

            for (size_t k = 0; k < 32; k++) {
                g[k] = (uint16_t)(g[k] * d + g[k + 8]);
                any |= (uint16_t)(g[k] >= least_hash);
            }
            if (any) {
                for (size_t k = 0; k < 32; k++)
                    bits |= (uint32_t)(g[k] >= least_hash) << k;
                hits |= (uint64_t)1 << word;
            }
            bitmap[word] = odd ? bitmap[word] | (uint64_t)bits << 32 : bits;
        }
    }
    return hits;
}

#ifdef HAVE_X86

/* ---- AVX2 -------------------------------------------------------------------------------------------------------- */

#define TARGET_256 __attribute__((target("avx2")))
#define INLINE_256 static inline __attribute__((always_inline, target("avx2")))

typedef struct {
    __m256i h4, h8, h16; /* of the 32 ends before */
} before_256;

INLINE_256 __m256i doubled_256(__m256i older, __m256i by, __m256i newer)
{
    return _mm256_add_epi16(_mm256_mullo_epi16(older, by), newer);
}

/* The upper half of `before`, then the lower half of `now`. */
INLINE_256 __m256i across_256(__m256i before, __m256i now) { return _mm256_permute2x128_si256(before, now, 0x21); }

INLINE_256 __m256i hashes_256(__m256i older_words, __m256i words, const __m256i *by, before_256 *before)
{
    __m256i h4 = doubled_256(older_words, by[0], words);
    __m256i h8 = doubled_256(_mm256_alignr_epi8(h4, across_256(before->h4, h4), 12), by[1], h4);
    __m256i h16 = doubled_256(_mm256_alignr_epi8(h8, across_256(before->h8, h8), 8), by[2], h8);
    __m256i h32 = doubled_256(across_256(before->h16, h16), by[3], h16);

    before->h4 = h4;
    before->h8 = h8;
    before->h16 = h16;
    return h32;
}

INLINE_256 __m256i load_256(const uint8_t *at) { return _mm256_loadu_si256((const __m256i *)(const void *)at); }

/* One bit for each of two times sixteen hashes: at least the bound, or not. */
INLINE_256 uint32_t bits_256(__m256i first, __m256i second, __m256i bound)
{
    const __m256i one = _mm256_cmpeq_epi16(_mm256_max_epu16(first, bound), first);
    const __m256i other = _mm256_cmpeq_epi16(_mm256_max_epu16(second, bound), second);

    return (uint32_t)_mm256_movemask_epi8(_mm256_permute4x64_epi64(_mm256_packs_epi16(one, other), 0xd8));
}

TARGET_256 static uint64_t scan_avx2(const uint8_t *from, size_t words, uint16_t least_hash, const uint16_t *spread,
                                     uint64_t *bitmap)
{
    const __m256i bound = _mm256_set1_epi16((short)least_hash);
    const __m256i by[4] = {_mm256_set1_epi16((short)spread[0]), _mm256_set1_epi16((short)spread[1]),
                           _mm256_set1_epi16((short)spread[2]), _mm256_set1_epi16((short)spread[3])};
    before_256 even, odd;
    const uint8_t *at = from - 32;
    uint64_t hits = 0;

    even.h4 = even.h8 = even.h16 = odd.h4 = odd.h8 = odd.h16 = _mm256_setzero_si256();
    hashes_256(load_256(at - 3), load_256(at - 1), by, &even);
    hashes_256(load_256(at - 2), load_256(at), by, &odd);
    for (size_t word = 0; word < words; word++) {
        __m256i low, high;
        uint64_t bits;

        at += 32;
        low = hashes_256(load_256(at - 3), load_256(at - 1), by, &even);
        high = hashes_256(load_256(at - 2), load_256(at), by, &odd);
        at += 32;
        bits = bits_256(low, hashes_256(load_256(at - 3), load_256(at - 1), by, &even), bound);
        bits |= (uint64_t)bits_256(high, hashes_256(load_256(at - 2), load_256(at), by, &odd), bound) << 32;
        _mm_prefetch((const char *)at + AHEAD_BYTES, _MM_HINT_T0);
        bitmap[word] = bits;
        hits |= (uint64_t)(bits != 0) << word;
    }
    return hits;
}

/* ---- AVX-512 ----------------------------------------------------------------------------------------------------- */

#define TARGET_512 __attribute__((target("avx512f,avx512bw")))
#define INLINE_512 static inline __attribute__((always_inline, target("avx512f,avx512bw")))

typedef struct {
    __m512i h4, h8, h16; /* of the 64 ends before */
} before_512;

/* older * by + newer, lane by lane. */
INLINE_512 __m512i doubled_512(__m512i older, __m512i by, __m512i newer)
{
    return _mm512_add_epi16(_mm512_mullo_epi16(older, by), newer);
}

INLINE_512 __m512i hashes_512(__m512i older_words, __m512i words, const __m512i *by, before_512 *before)
{
    __m512i h4 = doubled_512(older_words, by[0], words);
    __m512i h8 = doubled_512(_mm512_alignr_epi32(h4, before->h4, 15), by[1], h4);
    __m512i h16 = doubled_512(_mm512_alignr_epi32(h8, before->h8, 14), by[2], h8);
    __m512i h32 = doubled_512(_mm512_alignr_epi32(h16, before->h16, 12), by[3], h16);

    before->h4 = h4;
    before->h8 = h8;
    before->h16 = h16;
    return h32;
}

TARGET_512 static uint64_t scan_avx512(const uint8_t *from, size_t words, uint16_t least_hash, const uint16_t *spread,
                                       uint64_t *bitmap)
{
    const __m512i bound = _mm512_set1_epi16((short)least_hash), zero = _mm512_setzero_si512();
    const __m512i by[4] = {_mm512_set1_epi16((short)spread[0]), _mm512_set1_epi16((short)spread[1]),
                           _mm512_set1_epi16((short)spread[2]), _mm512_set1_epi16((short)spread[3])};
    const __mmask64 upper = 0xffffffff00000000u; /* the first windows need 31 bytes before `from`, so no more is read */
    before_512 even = {zero, zero, zero}, odd = even;
    const uint8_t *at = from - 64;
    uint64_t hits = 0;

    hashes_512(_mm512_maskz_loadu_epi8(upper, at - 3), _mm512_maskz_loadu_epi8(upper, at - 1), by, &even);
    hashes_512(_mm512_maskz_loadu_epi8(upper, at - 2), _mm512_maskz_loadu_epi8(upper, at), by, &odd);
    for (size_t word = 0; word < words; word++) {
        __mmask32 low, high;

        at += 64;
        _mm_prefetch((const char *)at + AHEAD_BYTES, _MM_HINT_T0); /* may lie after the payload: it never faults */
        low = _mm512_cmpge_epu16_mask(
            hashes_512(_mm512_loadu_si512(at - 3), _mm512_loadu_si512(at - 1), by, &even), bound);
        high = _mm512_cmpge_epu16_mask(hashes_512(_mm512_loadu_si512(at - 2), _mm512_loadu_si512(at), by, &odd), bound);
        bitmap[word] = _mm512_kunpackd(high, low);
    }
    for (size_t word = 0; word < words; word += 8) {
        const __mmask8 there = words - word < 8 ? (__mmask8)((1u << (words - word)) - 1) : (__mmask8)0xff;
        const __m512i eight = _mm512_maskz_loadu_epi64(there, bitmap + word);
        hits |= (uint64_t)_mm512_test_epi64_mask(eight, eight) << word;
    }
    return hits;
}

#endif

/* ---- choice ------------------------------------------------------------------------------------------------------ */

/* 0: any processor, 1: AVX2, 2: AVX-512 (F and BW). */
static int best_path(void)
{
#ifdef HAVE_X86
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2"))
        return 0;
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") ? 2 : 1;
#else
    return 0;
#endif
}

static scan_ends *scan_of(int path)
{
#ifdef HAVE_X86
    if (path == 1)
        return scan_avx2;
    if (path == 2)
        return scan_avx512;
#else
    (void)path;
#endif
    return scan_base;
}

#endif

/* The chunker `leastcdc`, the loops. Invariant: an answer depends on the bytes alone, not on the machine.
 *
 * A window of 32 bytes is sixteen little-endian words; its 16-bit hash is built by doubling, for 32 windows at a time:
 *
 *   h4(e)  = w(e - 2) * a + w(e)         w: the word that ends at e
 *   h8(e)  = h4(e - 4) * b + h4(e)       windows at even and at odd ends are two separate runs of 16-bit lanes,
 *   h16(e) = h8(e - 8) * c + h8(e)       so that a step back by 2k bytes is a step by k lanes
 *   h32(e) = h16(e - 16) * d + h16(e)
 *
 * Hashes are only compared with a bound; what passes is a bit. 1 end in 512 does, at a target of 8 KiB, and is ranked
 * by six 64-bit words before it, one at a time.
 *
 * Bitmaps: word k of a scan has the ends from + 64 k + 1 + i, 0 <= i < 64: bit i / 2 for even i, bit 32 + i / 2 for odd.
 */
#include "leastcdc_impl.h"

#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#define HAVE_X86 1
#endif

#if defined(__GNUC__) || defined(__clang__)
#define INLINE static inline __attribute__((always_inline))
#define TRAILING_ZEROS(x) ((unsigned)__builtin_ctzll(x))
#else
#define INLINE static inline
INLINE unsigned trailing_zeros(uint64_t x)
{
    unsigned n = 0;
    for (; !(x & 1); x >>= 1)
        n++;
    return n;
}
#define TRAILING_ZEROS(x) trailing_zeros(x)
#endif

#define HASH_WINDOW_BYTES 32
#define RANK_WINDOW_BYTES 48
#define SCAN_WORDS 64                      /* 4096 ends a scan: their bitmap and lanes stay in L1 beside the bytes */
#define LEAD_BYTES 64                      /* before the first end; every scan starts at least so far into its chunk */
#define LANES (32 * SCAN_WORDS)            /* of one parity */
#define WINDOW_LANES (HASH_WINDOW_BYTES / 2)
#define AHEAD_BYTES 6144                   /* prefetched: 6.5 GB/s without, 7.2 at 512, 8.5 at 4096 to 6144 bytes */

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

/* Four passes over the lanes of one parity, each a loop that the compiler turns into vectors of the target's width. */
INLINE uint64_t scan_lanes(const uint8_t *from, size_t words, uint16_t least_hash, const uint16_t *spread,
                           uint64_t *bitmap)
{
    uint64_t hits = 0;
    uint16_t h[LANES + WINDOW_LANES];
    const size_t lanes = 32 * words;

    for (unsigned odd = 0; odd < 2; odd++) {
        const uint16_t a = spread[0], b = spread[1], c = spread[2], d = spread[3];

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

static uint64_t scan_base(const uint8_t *from, size_t words, uint16_t least_hash, const uint16_t *spread,
                          uint64_t *bitmap)
{
    return scan_lanes(from, words, least_hash, spread, bitmap);
}

#ifdef HAVE_X86

/* ---- AVX2 -------------------------------------------------------------------------------------------------------- */

__attribute__((target("avx2"))) static uint64_t scan_avx2(const uint8_t *from, size_t words, uint16_t least_hash,
                                                          const uint16_t *spread, uint64_t *bitmap)
{
    return scan_lanes(from, words, least_hash, spread, bitmap);
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

static scan_ends *scan_best = scan_base;

/* ---- rank -------------------------------------------------------------------------------------------------------- */

INLINE uint64_t load8(const uint8_t *p)
{
    uint64_t w = 0;
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
    memcpy(&w, p, 8);
#else
    for (int k = 7; k >= 0; k--)
        w = w << 8 | p[k];
#endif
    return w;
}

/* The high half of the product, xor the low half. */
INLINE uint64_t folded_product(uint64_t a, uint64_t b)
{
#ifdef __SIZEOF_INT128__
    unsigned __int128 product = (unsigned __int128)a * b;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
#else
    uint64_t a0 = (uint32_t)a, a1 = a >> 32, b0 = (uint32_t)b, b1 = b >> 32;
    uint64_t middle = a1 * b0 + (a0 * b0 >> 32), other = a0 * b1 + (uint32_t)middle;
    return (a * b) ^ (a1 * b1 + (middle >> 32) + (other >> 32));
#endif
}

INLINE uint64_t rank_of(const uint8_t *end, const uint64_t *keys)
{
    const uint8_t *p = end - RANK_WINDOW_BYTES;

    return folded_product(load8(p) ^ keys[0], load8(p + 8) ^ keys[1]) ^
           folded_product(load8(p + 16) ^ keys[2], load8(p + 24) ^ keys[3]) ^
           folded_product(load8(p + 32) ^ keys[4], load8(p + 40) ^ keys[5]);
}

/* ---- walk -------------------------------------------------------------------------------------------------------- */

typedef struct {
    uint64_t bitmap[SCAN_WORDS];
    uint64_t hits; /* words that are not zero */
} scanned;

/* Scans the ends from + 1 to from + count, 1 <= count <= 64 * SCAN_WORDS, `left` bytes being there after `from`. */
INLINE void scan(const uint8_t *from, size_t count, size_t left, const nk_leastcdc_bounds *bounds,
                 const nk_leastcdc_constants *constants, scanned *found)
{
    const size_t words = (count + 63) / 64, rest = count % 64;
    uint64_t *last_word = found->bitmap + words - 1;

    if (64 * words <= left) {
        found->hits = scan_best(from, words, bounds->least_hash, constants->spread, found->bitmap);
    } else { /* the last word's bytes end with the payload: they are scanned in a copy, zeros after them */
        uint8_t last[LEAD_BYTES + 64] = {0};

        found->hits = 0;
        if (words > 1)
            found->hits = scan_best(from, words - 1, bounds->least_hash, constants->spread, found->bitmap);
        memcpy(last, from + 64 * (words - 1) - LEAD_BYTES, LEAD_BYTES + rest);
        found->hits |= scan_best(last + LEAD_BYTES, 1, bounds->least_hash, constants->spread, last_word) << (words - 1);
    }
    if (rest) { /* ends above `count` are none of the caller's; a hit of theirs alone is a word of no bits */
        *last_word &= (((uint64_t)1 << (rest + 1) / 2) - 1) | (((uint64_t)1 << rest / 2) - 1) << 32;
    }
}

INLINE size_t end_of_bit(size_t word, unsigned bit)
{
    return 64 * word + 2 * (bit & 31) + (bit >> 5) + 1;
}

/* Returns the length that ends at the least candidate of (from, to], the first of equals, or 0. */
static size_t least_in(const uint8_t *chunk, size_t from, size_t to, size_t left, const nk_leastcdc_bounds *bounds,
                       const nk_leastcdc_constants *constants)
{
    scanned found;
    uint64_t least = UINT64_MAX, place = UINT64_MAX;

    while (from < to) {
        const size_t count = to - from < 64 * SCAN_WORDS ? to - from : 64 * SCAN_WORDS;

        scan(chunk + from, count, left - from, bounds, constants, &found);
        for (uint64_t hits = found.hits; hits; hits &= hits - 1) {
            const size_t word = TRAILING_ZEROS(hits);

            for (uint64_t bits = found.bitmap[word]; bits; bits &= bits - 1) {
                const uint64_t end = from + end_of_bit(word, TRAILING_ZEROS(bits));
                const uint64_t rank = rank_of(chunk + end, constants->keys);
                /* a mask instead of a branch, which would be guessed wrong three times a chunk */
                const uint64_t better = 0 - (uint64_t)((rank < least) | ((rank == least) & (end < place)));

                least = (rank & better) | (least & ~better);
                place = (end & better) | (place & ~better);
            }
        }
        from += count;
    }
    return place == UINT64_MAX ? 0 : (size_t)place;
}

/* Returns the length that ends at the first candidate of (from, to], or 0. */
static size_t first_in(const uint8_t *chunk, size_t from, size_t to, size_t left, const nk_leastcdc_bounds *bounds,
                       const nk_leastcdc_constants *constants)
{
    scanned found;

    while (from < to) {
        const size_t count = to - from < 64 * SCAN_WORDS ? to - from : 64 * SCAN_WORDS;

        scan(chunk + from, count, left - from, bounds, constants, &found);
        for (uint64_t hits = found.hits; hits; hits &= hits - 1) {
            const size_t word = TRAILING_ZEROS(hits);
            size_t first = SIZE_MAX;

            for (uint64_t bits = found.bitmap[word]; bits; bits &= bits - 1) {
                const size_t end = from + end_of_bit(word, TRAILING_ZEROS(bits));
                first = end < first ? end : first;
            }
            if (first != SIZE_MAX)
                return first;
        }
        from += count;
    }
    return 0;
}

size_t nk_leastcdc_cut(const uint8_t *data, size_t total_bytes, const nk_leastcdc_bounds *bounds,
                       const nk_leastcdc_constants *constants, uint32_t *lengths)
{
    size_t chunks = 0, start = 0;

    while (start < total_bytes && (bounds->final || total_bytes - start >= bounds->max_bytes)) {
        const size_t left = total_bytes - start;
        const size_t limit = left < bounds->max_bytes ? left : bounds->max_bytes;
        const size_t high = limit < bounds->high_bytes ? limit : bounds->high_bytes;
        size_t length = 0;

        if (limit > bounds->low_bytes) {
            length = least_in(data + start, bounds->low_bytes, high, left, bounds, constants);
            if (!length)
                length = first_in(data + start, high, limit, left, bounds, constants);
        }
        if (!length)
            length = limit;
        lengths[chunks++] = (uint32_t)length;
        start += length;
    }
    return chunks;
}

/* ---- start ------------------------------------------------------------------------------------------------------- */

enum nk_leastcdc_cpu nk_leastcdc_cpu_best(void)
{
#ifdef HAVE_X86
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2"))
        return NK_LEASTCDC_BASE;
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw"))
        return NK_LEASTCDC_AVX512;
    return NK_LEASTCDC_AVX2;
#else
    return NK_LEASTCDC_BASE;
#endif
}

void nk_leastcdc_cpu_use(enum nk_leastcdc_cpu path)
{
    scan_best = scan_base;
#ifdef HAVE_X86
    if (path == NK_LEASTCDC_AVX2)
        scan_best = scan_avx2;
    if (path == NK_LEASTCDC_AVX512)
        scan_best = scan_avx512;
#else
    (void)path;
#endif
}

/* The vector code of the features: transforms of buffered words, and what the lanes of features_lanes.h are made of.
   Invariant: every function here gives what its scalar counterpart in features_impl.c gives, which alone includes this
   and chooses by the processor. */

#define AVX2 __attribute__((target("avx2")))
#define AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,gfni")))

AVX2 static inline uint32_t largest_of_8(__m256i lanes) {
    uint32_t each[8], largest = 0;
    _mm256_storeu_si256((__m256i *)each, lanes);
    for (int i = 0; i < 8; i++) largest = each[i] > largest ? each[i] : largest;
    return largest;
}

/* Words in lanes, four transforms a pass: the four accumulators and eight constants fit sixteen registers. */
AVX2 static void transform_maxima_avx2(const features_plan *plan, const uint32_t *words, size_t padded_words,
                                       uint32_t *maxima) {
    uint32_t f = 0;
    for (; f < plan->features; f += 4) {
        uint32_t many = plan->features - f < 4 ? plan->features - f : 4;
        __m256i m[4], a[4], best[4];
        for (uint32_t k = 0; k < 4; k++) { /* past the last one the arrays hold zeros, which are computed and dropped */
            m[k] = _mm256_set1_epi32((int)(k < many ? plan->multipliers[f + k] : 0));
            a[k] = _mm256_set1_epi32((int)(k < many ? plan->addends[f + k] : 0));
            best[k] = _mm256_setzero_si256();
        }
        for (size_t i = 0; i < padded_words; i += 8) {
            __m256i word = _mm256_loadu_si256((const __m256i *)(words + i));
            for (int k = 0; k < 4; k++) {
                best[k] = _mm256_max_epu32(best[k], _mm256_add_epi32(_mm256_mullo_epi32(word, m[k]), a[k]));
            }
        }
        for (uint32_t k = 0; k < many; k++) {
            uint32_t largest = largest_of_8(best[k]);
            if (largest > maxima[f + k]) maxima[f + k] = largest;
        }
    }
}

AVX512 static void transform_maxima_avx512(const features_plan *plan, const uint32_t *words, size_t padded_words,
                                           uint32_t *maxima) {
    for (uint32_t f = 0; f < plan->features; f += 6) {
        uint32_t many = plan->features - f < 6 ? plan->features - f : 6;
        __m512i m[6], a[6], best[6];
        for (uint32_t k = 0; k < 6; k++) {
            m[k] = _mm512_set1_epi32((int)(k < many ? plan->multipliers[f + k] : 0));
            a[k] = _mm512_set1_epi32((int)(k < many ? plan->addends[f + k] : 0));
            best[k] = _mm512_setzero_si512();
        }
        for (size_t i = 0; i < padded_words; i += 16) {
            __m512i word = _mm512_loadu_si512(words + i);
            for (int k = 0; k < 6; k++) {
                best[k] = _mm512_max_epu32(best[k], _mm512_add_epi32(_mm512_mullo_epi32(word, m[k]), a[k]));
            }
        }
        for (uint32_t k = 0; k < many; k++) {
            uint32_t largest = _mm512_reduce_max_epu32(best[k]);
            if (largest > maxima[f + k]) maxima[f + k] = largest;
        }
    }
}

/* ---- lanes ---- */

/* Bytes of each lane that are turned at a time, and rows of bytes that are kept: a window and what was just turned. */
#define TURNED_BYTES 16
#define RING_ROWS_MAX 512

static features_multiplier push_by; /* for what leaves at the top: the table `push` */

static size_t ring_rows(uint32_t window_bytes) {
    size_t rows = 64;
    while (rows < window_bytes + TURNED_BYTES) rows *= 2;
    return rows;
}

/* AVX-512: a product is one instruction a plane. */

#define LANES 64
#define LANED(name) name##_64
#define TARGET AVX512
#define VECTOR __m512i
#define ZEROS _mm512_setzero_si512()
#define LOAD(at) _mm512_load_si512(at)
#define STORE(at, value) _mm512_store_si512(at, value)
#define UNPACK(low_or_high, bits, a, b) _mm512_unpack##low_or_high##_epi##bits(a, b)
#define MAX(a, b) _mm512_max_epu32(a, b)
#define TRANSFORM_MAXIMA transform_maxima_avx512

typedef struct {
    __m512i push[4], pop[4];
} multipliers_64;

AVX512 static inline __attribute__((always_inline)) void load_multipliers_64(multipliers_64 *by, const features_multiplier *pop) {
    for (int to = 0; to < 4; to++) {
        by->push[to] = _mm512_set1_epi64((long long)push_by.matrix[to]);
        by->pop[to] = _mm512_set1_epi64((long long)pop->matrix[to]);
    }
}

/* 16 bytes from each of lanes i, 16 + i, 32 + i and 48 + i. The last three are loaded into a broadcast under a mask,
   which keeps them off the port that turns them. */
AVX512 static inline __attribute__((always_inline)) __m512i load_column_64(const uint8_t *const *at, int i, size_t row) {
    __m512i column = _mm512_castsi128_si512(_mm_loadu_si128((const __m128i *)(at[i] + row)));
    column = _mm512_mask_broadcast_i32x4(column, 0x00f0, _mm_loadu_si128((const __m128i *)(at[16 + i] + row)));
    column = _mm512_mask_broadcast_i32x4(column, 0x0f00, _mm_loadu_si128((const __m128i *)(at[32 + i] + row)));
    return _mm512_mask_broadcast_i32x4(column, 0xf000, _mm_loadu_si128((const __m128i *)(at[48 + i] + row)));
}

AVX512 static inline __attribute__((always_inline)) void roll_64(const multipliers_64 *by, __m512i p[4], __m512i next,
                                                                 __m512i old) {
    const __m512i top = p[3];
    for (int to = 3; to >= 0; to--) {
        p[to] = _mm512_ternarylogic_epi32(_mm512_gf2p8affine_epi64_epi8(top, by->push[to], 0),
                                          _mm512_gf2p8affine_epi64_epi8(old, by->pop[to], 0), to ? p[to - 1] : next,
                                          0x96);
    }
}

AVX512 static inline __attribute__((always_inline)) void push_64(const multipliers_64 *by, __m512i p[4], __m512i next) {
    const __m512i top = p[3];
    for (int to = 3; to >= 0; to--) {
        p[to] = _mm512_xor_si512(_mm512_gf2p8affine_epi64_epi8(top, by->push[to], 0), to ? p[to - 1] : next);
    }
}

#include "features_lanes.h"

/* AVX2: a product is two look-ups of nibbles a plane. The sixteen tables stay in memory. */

#define LANES 32
#define LANED(name) name##_32
#define TARGET AVX2
#define VECTOR __m256i
#define ZEROS _mm256_setzero_si256()
#define LOAD(at) _mm256_load_si256((const __m256i *)(at))
#define STORE(at, value) _mm256_store_si256((__m256i *)(at), value)
#define UNPACK(low_or_high, bits, a, b) _mm256_unpack##low_or_high##_epi##bits(a, b)
#define MAX(a, b) _mm256_max_epu32(a, b)
#define TRANSFORM_MAXIMA transform_maxima_avx2

typedef struct {
    __m256i push_low[4], push_high[4], pop_low[4], pop_high[4];
} multipliers_32;

AVX2 static inline __attribute__((always_inline)) void load_multipliers_32(multipliers_32 *by, const features_multiplier *pop) {
    for (int to = 0; to < 4; to++) {
        by->push_low[to] = _mm256_broadcastsi128_si256(_mm_load_si128((const __m128i *)push_by.low[to]));
        by->push_high[to] = _mm256_broadcastsi128_si256(_mm_load_si128((const __m128i *)push_by.high[to]));
        by->pop_low[to] = _mm256_broadcastsi128_si256(_mm_load_si128((const __m128i *)pop->low[to]));
        by->pop_high[to] = _mm256_broadcastsi128_si256(_mm_load_si128((const __m128i *)pop->high[to]));
    }
}

AVX2 static inline __attribute__((always_inline)) __m256i load_column_32(const uint8_t *const *at, int i, size_t row) {
    return _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_loadu_si128((const __m128i *)(at[i] + row))),
                                   _mm_loadu_si128((const __m128i *)(at[16 + i] + row)), 1);
}

#define NIBBLES(value, low, high)                                            \
    const __m256i low = _mm256_and_si256(value, _mm256_set1_epi8(15));       \
    const __m256i high = _mm256_and_si256(_mm256_srli_epi16(value, 4), _mm256_set1_epi8(15))
#define PRODUCT(tables_low, tables_high, low, high) \
    _mm256_xor_si256(_mm256_shuffle_epi8(tables_low, low), _mm256_shuffle_epi8(tables_high, high))

AVX2 static inline __attribute__((always_inline)) void push_32(const multipliers_32 *by, __m256i p[4], __m256i next) {
    NIBBLES(p[3], low, high);
    for (int to = 3; to >= 0; to--) {
        p[to] = _mm256_xor_si256(PRODUCT(by->push_low[to], by->push_high[to], low, high), to ? p[to - 1] : next);
    }
}

AVX2 static inline __attribute__((always_inline)) void roll_32(const multipliers_32 *by, __m256i p[4], __m256i next,
                                                               __m256i old) {
    NIBBLES(old, low, high);
    push_32(by, p, next);
    for (int to = 0; to < 4; to++) {
        p[to] = _mm256_xor_si256(p[to], PRODUCT(by->pop_low[to], by->pop_high[to], low, high));
    }
}

#include "features_lanes.h"

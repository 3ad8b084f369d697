/* Similarity features of chunks: N-transform, Finesse (FAST '19, Algorithms 1 and 2, Figure 3) and Odess.

   A Rabin fingerprint is the window, read as a polynomial over GF(2), first byte highest, mod P of degree 32.
   Two ways lead to it, and both give the same 32 bits:

     rolling   fp' = fp * x^8 + new - old * x^(8w) mod P, one table look-up each for what leaves at the top and at the
               end of the window. A chain of shift, load and xor a byte, so four independent runs are interleaved.
     doubling  (AVX-512 + GFNI, w = 48) H_2k(j) = H_k(j) * x^(8k) + H_k(j + k), for 64 positions at once. Fingerprints
               are four planes, one a byte; to multiply by a constant is then sixteen 8x8 bit matrices, each a single
               instruction. H_4 is the input at four shifts; H_4 -> H_8 -> H_16 -> H_48 takes 64 of them.
*/

#include "features_impl.h"

#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#define HAVE_X86 1
#endif

/* GCC would turn the scalar loops into something else than what the paper compares. */
#if defined(__GNUC__) && !defined(__clang__)
#define SCALAR __attribute__((noinline, optimize("no-tree-vectorize", "no-tree-slp-vectorize")))
#else
#define SCALAR __attribute__((noinline))
#endif

/* Positions whose fingerprints are buffered between rolling and transforming: 16 KiB, a third of a 48 KiB L1. */
#define ROLL_POSITIONS 4096
/* Positions of one pass of the doubling: two sets of four planes, 9 KiB, stay in L1 beside the input. */
#define PLANE_POSITIONS 1024
/* Sampled Gear words buffered before they are transformed. */
#define SAMPLED_WORDS 256
/* Buffers of fingerprints are padded with copies of their last one to whole vectors; a copy never moves a maximum. */
#define PAD_WORDS 16

static enum features_cpu cpu = FEATURES_CPU_BASE;
static uint32_t poly_low;
static uint32_t push[256]; /* t * x^32 mod P */

typedef void transform_maxima(const features_plan *plan, const uint32_t *words, size_t padded_words, uint32_t *maxima);
static transform_maxima transform_maxima_scalar;
static transform_maxima *transform_maxima_best = transform_maxima_scalar;

/* ---- the polynomial ---- */

static uint32_t times_x(uint32_t value) { return (value << 1) ^ ((value >> 31) ? poly_low : 0); }

static uint32_t x_to_the(uint32_t exponent) {
    uint32_t value = 1;
    while (exponent--) value = times_x(value);
    return value;
}

/* table[b] = b * x^exponent mod P */
static void fill_byte_table(uint32_t *table, uint32_t exponent) {
    uint32_t power = x_to_the(exponent);
    table[0] = 0;
    for (unsigned bit = 1; bit < 256; bit <<= 1) {
        for (unsigned low = 0; low < bit; low++) table[bit + low] = table[low] ^ power;
        power = times_x(power);
    }
}

void features_prepare(features_plan *plan) { fill_byte_table(plan->pop, 8 * plan->window_bytes); }

static inline uint32_t pushed(uint32_t fp, uint8_t byte) { return ((fp << 8) | byte) ^ push[fp >> 24]; }

static uint32_t whole_window(const uint8_t *at, size_t window_bytes) {
    uint32_t fp = 0;
    for (size_t i = 0; i < window_bytes; i++) fp = pushed(fp, at[i]);
    return fp;
}

/* ---- features to super-features ---- */

static uint64_t super_feature(const features_plan *plan, uint32_t rank, const uint32_t *group, uint32_t count) {
    /* Each step is a bijection of the state, so groups that differ in one feature alone never share a value. */
    uint64_t state = (uint64_t)(rank + 1) * plan->mix[0];
    for (uint32_t i = 0; i < count; i++) {
        state = (state ^ group[i]) * plan->mix[1];
        state ^= state >> 32;
    }
    state *= plan->mix[2];
    state ^= state >> 32;
    return state ? state : 1;
}

static void group_in_order(const features_plan *plan, const uint32_t *features, uint64_t *row) {
    uint32_t per_group = plan->features / plan->super_features;
    for (uint32_t x = 0; x < plan->super_features; x++) {
        row[x] = super_feature(plan, x, features + x * per_group, per_group);
    }
}

static void group_by_rank(const features_plan *plan, const uint32_t *features, uint64_t *row) {
    uint32_t ranks = plan->super_features, sets = plan->features / ranks;
    uint32_t by_rank[FEATURES_MAX]; /* [rank][set] */
    for (uint32_t set = 0; set < sets; set++) {
        uint32_t sorted[FEATURES_MAX]; /* largest first */
        for (uint32_t i = 0; i < ranks; i++) {
            uint32_t value = features[set * ranks + i], at = i;
            for (; at > 0 && sorted[at - 1] < value; at--) sorted[at] = sorted[at - 1];
            sorted[at] = value;
        }
        for (uint32_t rank = 0; rank < ranks; rank++) by_rank[rank * sets + set] = sorted[rank];
    }
    for (uint32_t rank = 0; rank < ranks; rank++) row[rank] = super_feature(plan, rank, by_rank + rank * sets, sets);
}

/* A chunk too short for one full window in each of its sub-chunks has no sketch; the row becomes zeros. */
static int too_short(const features_plan *plan, uint32_t length, uint64_t *row) {
    if (length >= plan->features * plan->window_bytes) return 0;
    memset(row, 0, plan->super_features * sizeof *row);
    return 1;
}

/* ---- Finesse, rolling ---- */

static SCALAR uint32_t rolled_maximum(const features_plan *plan, const uint8_t *at, size_t bytes) {
    size_t window = plan->window_bytes;
    uint32_t fp = whole_window(at, window), maximum = fp;
    for (size_t i = window; i < bytes; i++) {
        fp = pushed(fp, at[i]) ^ plan->pop[at[i - window]];
        if (fp > maximum) maximum = fp;
    }
    return maximum;
}

/* Four neighbouring sub-chunks side by side: their chains are independent, which is what sub-chunks are good for.
   Four, for already then the compiler keeps three of the pointers in memory. */
static SCALAR void rolled_maxima_of_4(const features_plan *plan, const uint8_t *at, size_t bytes, uint32_t *maxima) {
    const uint32_t *pop = plan->pop;
    size_t window = plan->window_bytes;
    const uint8_t *a = at, *b = at + bytes, *c = b + bytes, *d = c + bytes;
    uint32_t fa = whole_window(a, window), fb = whole_window(b, window);
    uint32_t fc = whole_window(c, window), fd = whole_window(d, window);
    uint32_t ma = fa, mb = fb, mc = fc, md = fd;
    for (size_t old = 0; old + window < bytes; old++) {
        fa = pushed(fa, a[old + window]) ^ pop[a[old]];
        fb = pushed(fb, b[old + window]) ^ pop[b[old]];
        fc = pushed(fc, c[old + window]) ^ pop[c[old]];
        fd = pushed(fd, d[old + window]) ^ pop[d[old]];
        if (fa > ma) ma = fa;
        if (fb > mb) mb = fb;
        if (fc > mc) mc = fc;
        if (fd > md) md = fd;
    }
    maxima[0] = ma;
    maxima[1] = mb;
    maxima[2] = mc;
    maxima[3] = md;
}

static void finesse_features_rolled(const features_plan *plan, const uint8_t *chunk, size_t sub_bytes,
                                    uint32_t *found) {
    uint32_t f = 0;
    for (; f + 4 <= plan->features; f += 4) rolled_maxima_of_4(plan, chunk + f * sub_bytes, sub_bytes, found + f);
    for (; f < plan->features; f++) found[f] = rolled_maximum(plan, chunk + f * sub_bytes, sub_bytes);
}

void features_finesse_scalar(const features_plan *plan, const uint8_t *payload, const uint64_t *offsets,
                             const uint32_t *lengths, size_t chunks, uint64_t *out) {
    uint32_t found[FEATURES_MAX];
    for (size_t i = 0; i < chunks; i++, out += plan->super_features) {
        if (too_short(plan, lengths[i], out)) continue;
        finesse_features_rolled(plan, payload + offsets[i], lengths[i] / plan->features, found);
        group_by_rank(plan, found, out);
    }
}

/* ---- N-transform, scalar: Algorithm 1 as printed ---- */

static SCALAR void ntransform_features_of_12(const features_plan *plan, const uint8_t *at, size_t bytes,
                                             uint32_t *found) {
    size_t window = plan->window_bytes;
    uint32_t fp = whole_window(at, window);
    const uint32_t *m = plan->multipliers, *a = plan->addends;
    uint32_t maxima[12] = {0};
    for (size_t i = window;; i++) {
        for (unsigned f = 0; f < 12; f++) { /* a constant count, so that it is unrolled */
            uint32_t value = m[f] * fp + a[f];
            if (value > maxima[f]) maxima[f] = value;
        }
        if (i >= bytes) break;
        fp = pushed(fp, at[i]) ^ plan->pop[at[i - window]];
    }
    memcpy(found, maxima, sizeof maxima);
}

static SCALAR void ntransform_features_of_any(const features_plan *plan, const uint8_t *at, size_t bytes,
                                              uint32_t *found) {
    size_t window = plan->window_bytes;
    uint32_t fp = whole_window(at, window), features = plan->features;
    memset(found, 0, features * sizeof *found);
    for (size_t i = window;; i++) {
        for (uint32_t f = 0; f < features; f++) {
            uint32_t value = plan->multipliers[f] * fp + plan->addends[f];
            if (value > found[f]) found[f] = value;
        }
        if (i >= bytes) break;
        fp = pushed(fp, at[i]) ^ plan->pop[at[i - window]];
    }
}

void features_ntransform_scalar(const features_plan *plan, const uint8_t *payload, const uint64_t *offsets,
                                const uint32_t *lengths, size_t chunks, uint64_t *out) {
    uint32_t found[FEATURES_MAX];
    for (size_t i = 0; i < chunks; i++, out += plan->super_features) {
        if (too_short(plan, lengths[i], out)) continue;
        if (plan->features == 12) {
            ntransform_features_of_12(plan, payload + offsets[i], lengths[i], found);
        } else {
            ntransform_features_of_any(plan, payload + offsets[i], lengths[i], found);
        }
        group_in_order(plan, found, out);
    }
}

/* ---- transforms of a buffer of words ---- */

static void transform_maxima_scalar(const features_plan *plan, const uint32_t *words, size_t padded_words,
                                    uint32_t *maxima) {
    for (uint32_t f = 0; f < plan->features; f++) {
        uint32_t maximum = maxima[f], m = plan->multipliers[f], a = plan->addends[f];
        for (size_t i = 0; i < padded_words; i++) {
            uint32_t value = m * words[i] + a;
            if (value > maximum) maximum = value;
        }
        maxima[f] = maximum;
    }
}

static size_t pad(uint32_t *words, size_t count) {
    size_t padded = (count + PAD_WORDS - 1) / PAD_WORDS * PAD_WORDS;
    for (size_t i = count; i < padded; i++) words[i] = words[count - 1];
    return padded;
}

/* The fingerprints of `positions` windows, the first at `at`, in four interleaved runs. */
static SCALAR void rolled_fingerprints(const features_plan *plan, const uint8_t *at, size_t positions, uint32_t *fps) {
    const uint32_t *pop = plan->pop;
    size_t window = plan->window_bytes, run = positions / 4, i = 0;
    const uint8_t *a = at, *b = a + run, *c = b + run, *d = c + run;
    uint32_t fa, fb, fc, fd = whole_window(d, window);
    uint32_t *to_a = fps, *to_b = fps + run, *to_c = to_b + run, *to_d = to_c + run;
    if (run) {
        fa = whole_window(a, window), fb = whole_window(b, window), fc = whole_window(c, window);
        for (; i < run; i++) {
            to_a[i] = fa;
            to_b[i] = fb;
            to_c[i] = fc;
            to_d[i] = fd;
            /* The last run's step may look one window past its end only while positions remain. */
            fa = pushed(fa, a[i + window]) ^ pop[a[i]];
            fb = pushed(fb, b[i + window]) ^ pop[b[i]];
            fc = pushed(fc, c[i + window]) ^ pop[c[i]];
            if (3 * run + i + 1 < positions) fd = pushed(fd, d[i + window]) ^ pop[d[i]];
        }
    }
    for (; 3 * run + i < positions; i++) {
        to_d[i] = fd;
        if (3 * run + i + 1 < positions) fd = pushed(fd, d[i + window]) ^ pop[d[i]];
    }
}

static void ntransform_features_rolled(const features_plan *plan, const uint8_t *chunk, size_t bytes, uint32_t *found) {
    uint32_t fps[ROLL_POSITIONS + PAD_WORDS];
    size_t positions = bytes - plan->window_bytes + 1;
    memset(found, 0, plan->features * sizeof *found);
    for (size_t first = 0; first < positions; first += ROLL_POSITIONS) {
        size_t count = positions - first < ROLL_POSITIONS ? positions - first : ROLL_POSITIONS;
        rolled_fingerprints(plan, chunk + first, count, fps);
        transform_maxima_best(plan, fps, pad(fps, count), found);
    }
}

#ifdef HAVE_X86

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

/* ---- doubling with GFNI: windows of 48 bytes ---- */

#define DOUBLED_WINDOW 48
#define VECTOR 64 /* positions a step */

typedef struct {
    uint64_t by[4][4]; /* [from plane][to plane]; plane 0 is the lowest byte */
} multiplier;

static multiplier by_x32, by_x64, by_x128, by_x256;

static void fill_multiplier(multiplier *table, uint32_t exponent) {
    memset(table, 0, sizeof *table);
    for (unsigned from = 0; from < 4; from++) {
        for (unsigned bit = 0; bit < 8; bit++) {
            uint32_t image = x_to_the(exponent + 8 * from + bit);
            for (unsigned to = 0; to < 4; to++) {
                for (unsigned row = 0; row < 8; row++) {
                    /* The instruction keeps the row of result bit 0 in its highest byte. */
                    if ((image >> (8 * to + row)) & 1) table->by[from][to] |= (uint64_t)1 << (8 * (7 - row) + bit);
                }
            }
        }
    }
}

#define XOR3(a, b, c) _mm512_ternarylogic_epi32(a, b, c, 0x96)
#define TIMES(plane, matrix) _mm512_gf2p8affine_epi64_epi8(plane, matrix, 0)
/* One plane of a * table + tail, where a is four planes and `matrix` holds the table's matrices, broadcast. */
#define PLANE_OF_PRODUCT(a, matrix, to, tail) \
    XOR3(XOR3(TIMES((a)[0], (matrix)[0][to]), TIMES((a)[1], (matrix)[1][to]), TIMES((a)[2], (matrix)[2][to])), \
         TIMES((a)[3], (matrix)[3][to]), tail)

typedef struct {
    _Alignas(64) uint8_t of[4][PLANE_POSITIONS + 128]; /* aligned, for a store across two lines costs double */
} planes;

AVX512 static inline __attribute__((always_inline)) void broadcast(const multiplier *table, __m512i matrix[4][4]) {
    for (int from = 0; from < 4; from++) {
        for (int to = 0; to < 4; to++) matrix[from][to] = _mm512_set1_epi64((long long)table->by[from][to]);
    }
}

/* H_16 of `count` >= 64 positions into `to`; reads count + 15 bytes at `at`. The last step of each pass is moved back
   to end exactly at the end and redoes what it overlaps. */
AVX512 static void doubled_to_16(const uint8_t *at, size_t count, planes *h8, planes *to) {
    size_t many = count + 8;
    __m512i a[4], matrix[4][4];
    broadcast(&by_x32, matrix);
    for (size_t j = 0;; j += VECTOR) {
        if (j + VECTOR > many) j = many - VECTOR;
        for (int p = 0; p < 4; p++) a[p] = _mm512_loadu_si512(at + j + 3 - p);
        for (int p = 0; p < 4; p++) {
            __m512i tail = _mm512_loadu_si512(at + j + 7 - p);
            _mm512_storeu_si512(h8->of[p] + j, PLANE_OF_PRODUCT(a, matrix, p, tail));
        }
        if (j + VECTOR == many) break;
    }
    broadcast(&by_x64, matrix);
    for (size_t j = 0;; j += VECTOR) {
        if (j + VECTOR > count) j = count - VECTOR;
        for (int p = 0; p < 4; p++) a[p] = _mm512_loadu_si512(h8->of[p] + j);
        for (int p = 0; p < 4; p++) {
            __m512i tail = _mm512_loadu_si512(h8->of[p] + j + 8);
            _mm512_storeu_si512(to->of[p] + j, PLANE_OF_PRODUCT(a, matrix, p, tail));
        }
        if (j + VECTOR == count) break;
    }
}

/* H_48 of the 64 positions from j, as words; their order within the 64 is not that of the positions, which no maximum
   notices. */
AVX512 static inline __attribute__((always_inline)) void doubled_to_48(const planes *h16, size_t j,
                                                                       __m512i matrix_128[4][4],
                                                                       __m512i matrix_256[4][4], __m512i words[4]) {
    __m512i a[4], b[4], h48[4];
    for (int p = 0; p < 4; p++) {
        a[p] = _mm512_loadu_si512(h16->of[p] + j);
        b[p] = _mm512_loadu_si512(h16->of[p] + j + 16);
    }
    for (int p = 0; p < 4; p++) {
        __m512i tail = _mm512_loadu_si512(h16->of[p] + j + 32);
        h48[p] = PLANE_OF_PRODUCT(a, matrix_256, p, PLANE_OF_PRODUCT(b, matrix_128, p, tail));
    }
    __m512i low_a = _mm512_unpacklo_epi8(h48[0], h48[1]), low_b = _mm512_unpackhi_epi8(h48[0], h48[1]);
    __m512i high_a = _mm512_unpacklo_epi8(h48[2], h48[3]), high_b = _mm512_unpackhi_epi8(h48[2], h48[3]);
    words[0] = _mm512_unpacklo_epi16(low_a, high_a);
    words[1] = _mm512_unpackhi_epi16(low_a, high_a);
    words[2] = _mm512_unpacklo_epi16(low_b, high_b);
    words[3] = _mm512_unpackhi_epi16(low_b, high_b);
}

/* The largest fingerprint of `positions` >= 64 windows, the first at `at`. */
AVX512 static uint32_t doubled_maximum(const uint8_t *at, size_t positions) {
    planes h8, h16;
    __m512i matrix_128[4][4], matrix_256[4][4], best = _mm512_setzero_si512();
    broadcast(&by_x128, matrix_128);
    broadcast(&by_x256, matrix_256);
    for (size_t first = 0; first < positions; first += PLANE_POSITIONS) {
        size_t count = positions - first < PLANE_POSITIONS ? positions - first : PLANE_POSITIONS;
        if (count < VECTOR) { /* a short last pass is moved back to a whole vector */
            first = positions - VECTOR;
            count = VECTOR;
        }
        doubled_to_16(at + first, count + 32, &h8, &h16);
        for (size_t j = 0;; j += VECTOR) {
            if (j + VECTOR > count) j = count - VECTOR;
            __m512i words[4];
            doubled_to_48(&h16, j, matrix_128, matrix_256, words);
            best = _mm512_max_epu32(best, _mm512_max_epu32(_mm512_max_epu32(words[0], words[1]),
                                                           _mm512_max_epu32(words[2], words[3])));
            if (j + VECTOR == count) break;
        }
    }
    return _mm512_reduce_max_epu32(best);
}

static void finesse_features_doubled(const features_plan *plan, const uint8_t *chunk, size_t sub_bytes,
                                     uint32_t *found) {
    for (uint32_t f = 0; f < plan->features; f++) {
        found[f] = doubled_maximum(chunk + f * sub_bytes, sub_bytes - DOUBLED_WINDOW + 1);
    }
}

AVX512 static void ntransform_features_doubled(const features_plan *plan, const uint8_t *chunk, size_t bytes,
                                               uint32_t *found) {
    planes h8, h16;
    __m512i matrix_128[4][4], matrix_256[4][4];
    uint32_t fps[PLANE_POSITIONS + VECTOR];
    broadcast(&by_x128, matrix_128);
    broadcast(&by_x256, matrix_256);
    size_t positions = bytes - DOUBLED_WINDOW + 1;
    memset(found, 0, plan->features * sizeof *found);
    for (size_t first = 0; first < positions; first += PLANE_POSITIONS) {
        size_t count = positions - first < PLANE_POSITIONS ? positions - first : PLANE_POSITIONS, filled = 0;
        if (count < VECTOR) {
            first = positions - VECTOR;
            count = VECTOR;
        }
        doubled_to_16(chunk + first, count + 32, &h8, &h16);
        for (size_t j = 0;; j += VECTOR) {
            if (j + VECTOR > count) j = count - VECTOR;
            __m512i words[4];
            doubled_to_48(&h16, j, matrix_128, matrix_256, words);
            for (int w = 0; w < 4; w++) _mm512_storeu_si512(fps + filled + 16 * w, words[w]);
            filled += VECTOR;
            if (j + VECTOR == count) break;
        }
        transform_maxima_avx512(plan, fps, filled, found);
    }
}

#endif

/* ---- the dispatched entry points ---- */

/* True where every unit of `bytes` holds at least one vector of full 48-byte windows. */
static int doubles(const features_plan *plan, size_t bytes) {
#ifdef HAVE_X86
    return cpu == FEATURES_CPU_AVX512 && plan->window_bytes == DOUBLED_WINDOW && bytes >= DOUBLED_WINDOW - 1 + VECTOR;
#else
    (void)plan, (void)bytes;
    return 0;
#endif
}

void features_finesse(const features_plan *plan, const uint8_t *payload, const uint64_t *offsets,
                      const uint32_t *lengths, size_t chunks, uint64_t *out) {
    uint32_t found[FEATURES_MAX];
    for (size_t i = 0; i < chunks; i++, out += plan->super_features) {
        if (too_short(plan, lengths[i], out)) continue;
        const uint8_t *chunk = payload + offsets[i];
        size_t sub_bytes = lengths[i] / plan->features;
#ifdef HAVE_X86
        if (doubles(plan, sub_bytes)) {
            finesse_features_doubled(plan, chunk, sub_bytes, found);
        } else
#endif
            finesse_features_rolled(plan, chunk, sub_bytes, found);
        group_by_rank(plan, found, out);
    }
}

void features_ntransform(const features_plan *plan, const uint8_t *payload, const uint64_t *offsets,
                         const uint32_t *lengths, size_t chunks, uint64_t *out) {
    uint32_t found[FEATURES_MAX];
    for (size_t i = 0; i < chunks; i++, out += plan->super_features) {
        if (too_short(plan, lengths[i], out)) continue;
        const uint8_t *chunk = payload + offsets[i];
#ifdef HAVE_X86
        if (doubles(plan, lengths[i])) {
            ntransform_features_doubled(plan, chunk, lengths[i], found);
        } else
#endif
            ntransform_features_rolled(plan, chunk, lengths[i], found);
        group_in_order(plan, found, out);
    }
}

/* Odess. A Gear hash forgets a byte after 64 steps and its bit k sees the last k + 1 bytes alone, so bit window - 1
   sees a whole window. The sampling_bits from that bit down choose the positions; the 32 under them are transformed. */
static int odess_features(const features_plan *plan, const uint8_t *chunk, size_t bytes, uint32_t *found) {
    uint32_t words[SAMPLED_WORDS + PAD_WORDS];
    const uint64_t *gear = plan->gear;
    const uint32_t window = plan->window_bytes, sampling = plan->sampling_bits;
    /* Bits window - sampling .. window - 1; in two shifts, for one of 64 is undefined. */
    const uint64_t mask = (((uint64_t)1 << sampling) - 1) << (window - sampling - 1) << 1;
    const unsigned shift = window - sampling - 32;
    size_t held = 0, i = 0;
    int any = 0;
    uint64_t hash = 0;
    memset(found, 0, plan->features * sizeof *found);
    for (; i < window - 1; i++) hash = (hash << 1) + gear[chunk[i]];
    for (; i < bytes; i++) {
        hash = (hash << 1) + gear[chunk[i]];
        if (__builtin_expect((hash & mask) == 0, 0)) {
            words[held++] = (uint32_t)(hash >> shift);
            if (held == SAMPLED_WORDS) {
                transform_maxima_best(plan, words, held, found);
                held = 0;
                any = 1;
            }
        }
    }
    if (held) transform_maxima_best(plan, words, pad(words, held), found);
    return any || held;
}

void features_odess(const features_plan *plan, const uint8_t *payload, const uint64_t *offsets, const uint32_t *lengths,
                    size_t chunks, uint64_t *out) {
    uint32_t found[FEATURES_MAX];
    for (size_t i = 0; i < chunks; i++, out += plan->super_features) {
        if (too_short(plan, lengths[i], out)) continue;
        if (odess_features(plan, payload + offsets[i], lengths[i], found)) {
            group_in_order(plan, found, out);
        } else { /* nothing was sampled */
            memset(out, 0, plan->super_features * sizeof *out);
        }
    }
}

/* ---- start ---- */

enum features_cpu features_cpu_best(void) {
#ifdef HAVE_X86
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2")) return FEATURES_CPU_BASE;
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("gfni")) {
        return FEATURES_CPU_AVX512;
    }
    return FEATURES_CPU_AVX2;
#else
    return FEATURES_CPU_BASE;
#endif
}

void features_init(uint32_t polynomial_low, enum features_cpu path) {
    poly_low = polynomial_low;
    cpu = path;
    fill_byte_table(push, 32);
#ifdef HAVE_X86
    fill_multiplier(&by_x32, 32);
    fill_multiplier(&by_x64, 64);
    fill_multiplier(&by_x128, 128);
    fill_multiplier(&by_x256, 256);
    if (path == FEATURES_CPU_AVX2) transform_maxima_best = transform_maxima_avx2;
    if (path == FEATURES_CPU_AVX512) transform_maxima_best = transform_maxima_avx512;
#endif
}

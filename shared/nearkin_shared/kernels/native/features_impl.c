/* Similarity features of chunks: N-transform, Finesse (FAST '19, Algorithms 1 and 2, Figure 3) and Odess.

   A Rabin fingerprint is the window, read as a polynomial over GF(2), first byte highest, mod P of degree 32.
   It rolls from position to position:

     fp' = fp * x^8 + new - old * x^(8w) mod P

     scalar  one table look-up each for what leaves at the top and at the end of the window; four runs interleaved,
             because each is a chain of shift, load and xor
     lanes   32 (AVX2) or 64 (AVX-512 with GFNI) runs side by side, a byte each: features_lanes.h
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

static void fill_multiplier(features_multiplier *by, const uint32_t table[256]) {
    for (unsigned to = 0; to < 4; to++) {
        by->matrix[to] = 0;
        for (unsigned bit = 0; bit < 8; bit++) {
            for (unsigned row = 0; row < 8; row++) {
                if ((table[1u << bit] >> (8 * to + row)) & 1) by->matrix[to] |= (uint64_t)1 << (8 * (7 - row) + bit);
            }
        }
        for (unsigned nibble = 0; nibble < 16; nibble++) {
            by->low[to][nibble] = (uint8_t)(table[nibble] >> (8 * to));
            by->high[to][nibble] = (uint8_t)(table[nibble << 4] >> (8 * to));
        }
    }
}

void features_prepare(features_plan *plan) {
    fill_byte_table(plan->pop, 8 * plan->window_bytes);
    fill_multiplier(&plan->pop_by, plan->pop);
}

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
#include "features_x86.h"
#endif

/* ---- the dispatched entry points ---- */

static void finesse_features_best(const features_plan *plan, const uint8_t *chunk, size_t sub_bytes, uint32_t *found) {
#ifdef HAVE_X86
    if (cpu == FEATURES_CPU_AVX512 && finesse_features_64(plan, chunk, sub_bytes, found)) return;
    if (cpu >= FEATURES_CPU_AVX2 && finesse_features_32(plan, chunk, sub_bytes, found)) return;
#endif
    finesse_features_rolled(plan, chunk, sub_bytes, found);
}

static void ntransform_features_best(const features_plan *plan, const uint8_t *chunk, size_t bytes, uint32_t *found) {
#ifdef HAVE_X86
    if (cpu == FEATURES_CPU_AVX512 && ntransform_features_64(plan, chunk, bytes, found)) return;
    if (cpu >= FEATURES_CPU_AVX2 && ntransform_features_32(plan, chunk, bytes, found)) return;
#endif
    ntransform_features_rolled(plan, chunk, bytes, found);
}

void features_finesse(const features_plan *plan, const uint8_t *payload, const uint64_t *offsets,
                      const uint32_t *lengths, size_t chunks, uint64_t *out) {
    uint32_t found[FEATURES_MAX];
    for (size_t i = 0; i < chunks; i++, out += plan->super_features) {
        if (too_short(plan, lengths[i], out)) continue;
        finesse_features_best(plan, payload + offsets[i], lengths[i] / plan->features, found);
        group_by_rank(plan, found, out);
    }
}

void features_ntransform(const features_plan *plan, const uint8_t *payload, const uint64_t *offsets,
                         const uint32_t *lengths, size_t chunks, uint64_t *out) {
    uint32_t found[FEATURES_MAX];
    for (size_t i = 0; i < chunks; i++, out += plan->super_features) {
        if (too_short(plan, lengths[i], out)) continue;
        ntransform_features_best(plan, payload + offsets[i], lengths[i], found);
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
#define ODESS_STEP(at)                                      \
    do {                                                    \
        hash = (hash << 1) + gear[chunk[at]];               \
        if (__builtin_expect((hash & mask) == 0, 0))        \
            words[held++] = (uint32_t)(hash >> shift);      \
    } while (0)
    /* Eight steps without a look at the loop's end or the buffer's: 2.6 GB/s, 1.55 with both in each step. */
    while (i + 8 <= bytes) {
        for (unsigned k = 0; k < 8; k++) ODESS_STEP(i + k);
        i += 8;
        if (__builtin_expect(held > SAMPLED_WORDS - 8, 0)) {
            transform_maxima_best(plan, words, pad(words, held), found);
            held = 0;
            any = 1;
        }
    }
    for (; i < bytes; i++) ODESS_STEP(i);
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
    fill_multiplier(&push_by, push);
    if (path == FEATURES_CPU_AVX2) transform_maxima_best = transform_maxima_avx2;
    if (path == FEATURES_CPU_AVX512) transform_maxima_best = transform_maxima_avx512;
#endif
}

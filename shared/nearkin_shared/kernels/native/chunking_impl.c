/* Chunking, the loops. Invariant: an answer depends on the bytes alone, not on the machine or its byte order.
 *
 * The hash at a position is a function of the window before it, and windows lie inside their chunk. So a scan may
 * start anywhere with one window of warm-up, and Rabin and INC-K scan four stretches side by side:
 *
 *   | lane 0     | lane 1     | lane 2     | lane 3     |   the first match of the lowest lane that has one is the cut
 */
#include "chunking_impl.h"

#if defined(__GNUC__) || defined(__clang__)
#define UNLIKELY(x) __builtin_expect(!!(x), 0)
#define INLINE static inline __attribute__((always_inline))
#else
#define UNLIKELY(x) (x)
#define INLINE static inline
#endif

/* Returns the bytes from the chunk's start to its certain end at most, or 0 when nothing is certain any more. */
INLINE size_t chunk_limit(size_t left_bytes, const nk_cut_bounds *bounds)
{
    if (left_bytes >= bounds->max_bytes)
        return bounds->max_bytes;
    return bounds->final ? left_bytes : 0;
}

/* ---- FastCDC --------------------------------------------------------------------------------------------------- */

#define GEAR_WINDOW_BYTES 64

/* Pushes chunk[from, to) and returns the length that ends at the first match, or 0; *hash is carried over. */
INLINE size_t gear_scan(const uint8_t *chunk, size_t from, size_t to, const nk_gear_tables *gear, uint64_t mask,
                        uint64_t *hash)
{
    const uint64_t *once = gear->once, *doubled = gear->doubled;
    const uint64_t mask_doubled = mask << 1; /* bit 63 of a mask is always clear */
    uint64_t h = *hash;
    size_t at = from;

    /* Two bytes a step share one shift. Each byte is loaded alone: out of one load of eight it took two more operations,
     * and operations are what a core runs out of (9 to 22 % slower; two or four lanes side by side gained nothing). */
#define TWO(k)                                                                                                         \
    h = (h << 2) + doubled[chunk[at + (k)]];                                                                           \
    if (UNLIKELY((h & mask_doubled) == 0))                                                                             \
        return at + (k) + 1;                                                                                           \
    h += once[chunk[at + (k) + 1]];                                                                                    \
    if (UNLIKELY((h & mask) == 0))                                                                                     \
        return at + (k) + 2;

    while (to - at >= 8) {
        TWO(0)
        TWO(2)
        TWO(4)
        TWO(6)
        at += 8;
    }
#undef TWO
    for (; at < to; at++) {
        h = (h << 1) + once[chunk[at]];
        if ((h & mask) == 0)
            return at + 1;
    }
    *hash = h;
    return 0;
}

size_t nk_fastcdc_cut(const uint8_t *data, size_t total_bytes, const nk_cut_bounds *bounds, const nk_gear_tables *gear,
                      uint64_t strict_mask, uint64_t loose_mask, uint32_t *lengths)
{
    size_t chunks = 0, start = 0, limit;

    while ((limit = chunk_limit(total_bytes - start, bounds)) != 0) {
        const uint8_t *chunk = data + start;
        size_t length = limit;

        if (limit > bounds->min_bytes) {
            size_t middle = bounds->target_bytes < limit ? bounds->target_bytes : limit;
            uint64_t hash = 0;
            size_t found;

            /* 63 bytes of warm-up: with the first byte tested the hash covers exactly its window */
            for (size_t k = bounds->min_bytes - (GEAR_WINDOW_BYTES - 1); k < bounds->min_bytes; k++)
                hash = (hash << 1) + gear->once[chunk[k]];
            found = gear_scan(chunk, bounds->min_bytes, middle, gear, strict_mask, &hash);
            if (!found)
                found = gear_scan(chunk, middle, limit, gear, loose_mask, &hash);
            if (found)
                length = found;
        }
        lengths[chunks++] = (uint32_t)length;
        start += length;
    }
    return chunks;
}

/* ---- four lanes ------------------------------------------------------------------------------------------------ */

#define LANE_BYTES 512 /* longer lanes read further past the cut, shorter ones warm up more often */

/* Defines NAME_scan: returns the first end in (from, to] whose window matches, or 0. The lanes hide the latency of one
 * step (a shift, a table load and two exclusive-ors) behind the others' steps. */
#define DEFINE_SCAN(NAME, HASH, TABLES)                                                                                \
    INLINE HASH NAME##_window(const TABLES *t, const uint8_t *first)                                                   \
    {                                                                                                                  \
        HASH h = 0;                                                                                                    \
        for (size_t k = 0; k < t->window_bytes; k++)                                                                   \
            h = NAME##_push(t, h, first[k]);                                                                           \
        return h;                                                                                                      \
    }                                                                                                                  \
    static size_t NAME##_scan(const TABLES *t, const uint8_t *chunk, size_t from, size_t to, HASH mask, HASH pattern)  \
    {                                                                                                                  \
        const size_t window = t->window_bytes;                                                                         \
        HASH h0 = NAME##_window(t, chunk + from - window), h1, h2, h3;                                                 \
                                                                                                                       \
        while (to - from >= 4 * LANE_BYTES) {                                                                          \
            const uint8_t *in = chunk + from, *out = in - window;                                                      \
            size_t found[4] = {0, 0, 0, 0}; /* 0: none, else 1 + place */                                              \
                                                                                                                       \
            h1 = NAME##_window(t, out + 1 * LANE_BYTES);                                                               \
            h2 = NAME##_window(t, out + 2 * LANE_BYTES);                                                               \
            h3 = NAME##_window(t, out + 3 * LANE_BYTES);                                                               \
            for (size_t k = 0; k < LANE_BYTES; k++) {                                                                  \
                h0 = NAME##_roll(t, h0, out[k], in[k]);                                                                \
                h1 = NAME##_roll(t, h1, out[k + 1 * LANE_BYTES], in[k + 1 * LANE_BYTES]);                              \
                h2 = NAME##_roll(t, h2, out[k + 2 * LANE_BYTES], in[k + 2 * LANE_BYTES]);                              \
                h3 = NAME##_roll(t, h3, out[k + 3 * LANE_BYTES], in[k + 3 * LANE_BYTES]);                              \
                if (UNLIKELY((h0 & mask) == pattern))                                                                  \
                    return from + k + 1;                                                                               \
                if (UNLIKELY((h1 & mask) == pattern) && !found[1])                                                     \
                    found[1] = k + 1;                                                                                  \
                if (UNLIKELY((h2 & mask) == pattern) && !found[2])                                                     \
                    found[2] = k + 1;                                                                                  \
                if (UNLIKELY((h3 & mask) == pattern) && !found[3])                                                     \
                    found[3] = k + 1;                                                                                  \
            }                                                                                                          \
            if (found[1])                                                                                              \
                return from + 1 * LANE_BYTES + found[1];                                                               \
            if (found[2])                                                                                              \
                return from + 2 * LANE_BYTES + found[2];                                                               \
            if (found[3])                                                                                              \
                return from + 3 * LANE_BYTES + found[3];                                                               \
            h0 = h3; /* lane 3 ended where the next lane 0 starts */                                                   \
            from += 4 * LANE_BYTES;                                                                                    \
        }                                                                                                              \
        for (; from < to; from++) {                                                                                    \
            h0 = NAME##_roll(t, h0, chunk[from - window], chunk[from]);                                                \
            if ((h0 & mask) == pattern)                                                                                \
                return from + 1;                                                                                       \
        }                                                                                                              \
        return 0;                                                                                                      \
    }                                                                                                                  \
    static size_t NAME##_walk(const TABLES *t, const uint8_t *data, size_t total_bytes, const nk_cut_bounds *bounds,   \
                              HASH mask, HASH pattern, uint32_t *lengths)                                              \
    {                                                                                                                  \
        size_t chunks = 0, start = 0, limit;                                                                           \
                                                                                                                       \
        while ((limit = chunk_limit(total_bytes - start, bounds)) != 0) {                                              \
            size_t length = 0;                                                                                         \
                                                                                                                       \
            if (limit > bounds->min_bytes)                                                                             \
                length = NAME##_scan(t, data + start, bounds->min_bytes, limit, mask, pattern);                        \
            if (length == 0)                                                                                           \
                length = limit;                                                                                        \
            lengths[chunks++] = (uint32_t)length;                                                                      \
            start += length;                                                                                           \
        }                                                                                                              \
        return chunks;                                                                                                 \
    }

/* ---- Rabin ----------------------------------------------------------------------------------------------------- */

#define RABIN_DEGREE 53

typedef struct {
    uint64_t reduce[256]; /* t: t * x^53 mod P, with t itself at bit 53 so that it clears what overflowed */
    uint64_t leave[256];  /* b: b * x^(8 * window) mod P, what a byte is worth one push after it should be gone */
    size_t window_bytes;
} rabin_tables;

INLINE uint64_t rabin_push(const rabin_tables *t, uint64_t h, uint8_t in)
{
    return (h << 8 | in) ^ t->reduce[h >> (RABIN_DEGREE - 8)];
}

INLINE uint64_t rabin_roll(const rabin_tables *t, uint64_t h, uint8_t out, uint8_t in)
{
    return (h << 8) ^ t->reduce[h >> (RABIN_DEGREE - 8)] ^ (t->leave[out] ^ in);
}

DEFINE_SCAN(rabin, uint64_t, rabin_tables)

/* Returns h * x mod P. */
INLINE uint64_t times_x(uint64_t h, uint64_t polynomial)
{
    h <<= 1;
    return h ^ (polynomial & (0 - (h >> RABIN_DEGREE & 1)));
}

static void rabin_fill(rabin_tables *t, uint64_t polynomial, size_t window_bytes)
{
    uint64_t reduce_bit = polynomial & (((uint64_t)1 << RABIN_DEGREE) - 1), leave_bit = 1; /* x^53, x^0 */

    for (size_t k = 0; k < 8 * window_bytes; k++)
        leave_bit = times_x(leave_bit, polynomial);
    t->reduce[0] = t->leave[0] = 0;
    for (size_t bit = 1; bit < 256; bit <<= 1) {
        for (size_t low = 0; low < bit; low++) {
            t->reduce[bit + low] = t->reduce[low] ^ reduce_bit ^ (uint64_t)bit << RABIN_DEGREE;
            t->leave[bit + low] = t->leave[low] ^ leave_bit;
        }
        reduce_bit = times_x(reduce_bit, polynomial);
        leave_bit = times_x(leave_bit, polynomial);
    }
    t->window_bytes = window_bytes;
}

size_t nk_rabin_cut(const uint8_t *data, size_t total_bytes, const nk_cut_bounds *bounds, uint64_t polynomial,
                    size_t window_bytes, uint64_t mask, uint64_t pattern, uint32_t *lengths)
{
    rabin_tables tables;

    rabin_fill(&tables, polynomial, window_bytes);
    return rabin_walk(&tables, data, total_bytes, bounds, mask, pattern, lengths);
}

/* ---- Incremental Modulo-K -------------------------------------------------------------------------------------- */

#define INCK_MODULUS 0x7fffffffu /* 2^31 - 1, so 2^31 = 1 and what lies above bit 31 is added to what lies below */

typedef struct {
    uint32_t leave[256]; /* b: -b * 256^window mod M */
    size_t window_bytes;
} inck_tables;

/* One fold leaves the hash in [0, M + 257], a remainder or M more than one:
 * the sum is at most 256 * (M + 257) + 255 (in) + M - 1 (leave) < 2^31 * 258, so what the shift adds is at most 257. */
#define INCK_EXCESS_MAX 257

INLINE uint64_t inck_push(const inck_tables *t, uint64_t h, uint8_t in)
{
    uint64_t sum = (h << 8) + in;

    (void)t;
    return (sum & INCK_MODULUS) + (sum >> 31);
}

INLINE uint64_t inck_roll(const inck_tables *t, uint64_t h, uint8_t out, uint8_t in)
{
    uint64_t sum = (h << 8) + ((uint64_t)in + t->leave[out]);

    return (sum & INCK_MODULUS) + (sum >> 31);
}

/* The same, but always the remainder itself. */
INLINE uint64_t exact_push(const inck_tables *t, uint64_t h, uint8_t in)
{
    h = inck_push(t, h, in);
    return h >= INCK_MODULUS ? h - INCK_MODULUS : h;
}

INLINE uint64_t exact_roll(const inck_tables *t, uint64_t h, uint8_t out, uint8_t in)
{
    h = inck_roll(t, h, out, in);
    return h >= INCK_MODULUS ? h - INCK_MODULUS : h;
}

DEFINE_SCAN(inck, uint64_t, inck_tables)
DEFINE_SCAN(exact, uint64_t, inck_tables)

size_t nk_inck_cut(const uint8_t *data, size_t total_bytes, const nk_cut_bounds *bounds, size_t window_bytes,
                   uint64_t mask, uint64_t pattern, uint32_t *lengths)
{
    inck_tables tables;
    const unsigned rotation = 8 * window_bytes % 31;

    for (uint32_t b = 0; b < 256; b++) {
        uint32_t worth = (uint32_t)(((uint64_t)b << rotation) % INCK_MODULUS);
        tables.leave[b] = worth ? INCK_MODULUS - worth : 0;
    }
    tables.window_bytes = window_bytes;
    /* A hash h in [M, M + 257] has the low bits all ones, or 0 to 256, and its remainder is 0 to 257. A pattern above
     * 257 that is not all ones matches neither, so the last subtraction can change no answer: true from 9 bits up. */
    if (pattern > INCK_EXCESS_MAX && pattern != mask)
        return inck_walk(&tables, data, total_bytes, bounds, mask, pattern, lengths);
    return exact_walk(&tables, data, total_bytes, bounds, mask, pattern, lengths);
}

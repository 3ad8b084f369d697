/* The chunker `leastcdc`, ranks and cuts. Invariant: an answer depends on the bytes alone, not on the machine.
 *
 * 1 end in 512 (at a target of 8 KiB) is a candidate and ranked by the six 64-bit words before it, one at a time.
 */
#include "leastcdc_impl.h"

#include "leastcdc_scan.h"

#define RANK_WINDOW_BYTES 48

#if defined(__GNUC__) || defined(__clang__)
#define TRAILING_ZEROS(x) ((unsigned)__builtin_ctzll(x))
#else
INLINE unsigned trailing_zeros(uint64_t x)
{
    unsigned n = 0;
    for (; !(x & 1); x >>= 1)
        n++;
    return n;
}
#define TRAILING_ZEROS(x) trailing_zeros(x)
#endif

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
    nk_leastcdc_bounds bounds;
    nk_leastcdc_constants constants;
    scan_ends *scan;
} plan;

typedef struct {
    uint64_t bitmap[SCAN_WORDS];
    uint64_t hits; /* words that are not zero */
} scanned;

/* Scans the ends from + 1 to from + count, 1 <= count <= 64 * SCAN_WORDS, `left` bytes being there after `from`. */
INLINE void scan(const uint8_t *from, size_t count, size_t left, const plan *plan, scanned *found)
{
    const size_t words = (count + 63) / 64, rest = count % 64;
    uint64_t *last_word = found->bitmap + words - 1;

    if (64 * words <= left) {
        found->hits = plan->scan(from, words, plan->bounds.least_hash, plan->constants.spread, found->bitmap);
    } else { /* the last word's bytes end with the payload: they are scanned in a copy, zeros after them */
        uint8_t last[LEAD_BYTES + 64] = {0};

        found->hits = 0;
        if (words > 1)
            found->hits = plan->scan(from, words - 1, plan->bounds.least_hash, plan->constants.spread, found->bitmap);
        memcpy(last, from + 64 * (words - 1) - LEAD_BYTES, LEAD_BYTES + rest);
        found->hits |= plan->scan(last + LEAD_BYTES, 1, plan->bounds.least_hash, plan->constants.spread, last_word)
                       << (words - 1);
    }
    if (rest) { /* ends above `count` are none of the caller's; a hit of theirs alone is a word of no bits */
        *last_word &= (((uint64_t)1 << (rest + 1) / 2) - 1) | (((uint64_t)1 << rest / 2) - 1) << 32;
    }
}

INLINE size_t end_of_bit(size_t word, unsigned bit)
{
    return 64 * word + 2 * (bit & 31) + (bit >> 5) + 1;
}

#define CARRIED_MAX 64 /* four times what a range holds on average; one that holds more is scanned again */

/* The candidates of the last range, which the next one may reach back over: an eighth of the scanning saved. */
typedef struct {
    const uint8_t *ends[CARRIED_MAX];
    uint64_t ranks[CARRIED_MAX];
    size_t count;
    const uint8_t *up_to; /* all candidates from the last range's start to here are among them */
} carried;

typedef struct {
    uint64_t rank, end; /* end: a length, or UINT64_MAX */
} least_end;

/* The lesser of two, by rank, then by place. A mask instead of a branch, which were guessed wrong thrice a chunk. */
INLINE least_end lesser(least_end least, uint64_t rank, uint64_t end)
{
    const uint64_t better = 0 - (uint64_t)((rank < least.rank) | ((rank == least.rank) & (end < least.end)));

    least.rank = (rank & better) | (least.rank & ~better);
    least.end = (end & better) | (least.end & ~better);
    return least;
}

/* Returns the length that ends at the least candidate of (from, to], the first of equals, or 0. */
static size_t least_in(const uint8_t *chunk, size_t from, size_t to, size_t left, const plan *plan, carried *last)
{
    least_end least = {UINT64_MAX, UINT64_MAX};
    size_t count = 0;
    scanned found;

    if (chunk + from < last->up_to) {
        for (size_t k = 0; k < last->count; k++) {
            if (last->ends[k] > chunk + from) {
                least = lesser(least, last->ranks[k], (uint64_t)(last->ends[k] - chunk));
                last->ends[count] = last->ends[k];
                last->ranks[count++] = last->ranks[k];
            }
        }
        from = (size_t)(last->up_to - chunk);
    }
    while (from < to) {
        const size_t ends = to - from < 64 * SCAN_WORDS ? to - from : 64 * SCAN_WORDS;

        scan(chunk + from, ends, left - from, plan, &found);
        for (uint64_t hits = found.hits; hits; hits &= hits - 1) {
            const size_t word = TRAILING_ZEROS(hits);

            for (uint64_t bits = found.bitmap[word]; bits; bits &= bits - 1) {
                const size_t end = from + end_of_bit(word, TRAILING_ZEROS(bits));
                const uint64_t rank = rank_of(chunk + end, plan->constants.keys);

                least = lesser(least, rank, end);
                last->ends[count & (CARRIED_MAX - 1)] = chunk + end;
                last->ranks[count++ & (CARRIED_MAX - 1)] = rank;
            }
        }
        from += ends;
    }
    last->count = count;
    last->up_to = count <= CARRIED_MAX ? chunk + to : chunk;
    return least.end == UINT64_MAX ? 0 : (size_t)least.end;
}

/* Returns the length that ends at the first candidate of (from, to], or 0. */
static size_t first_in(const uint8_t *chunk, size_t from, size_t to, size_t left, const plan *plan)
{
    scanned found;

    while (from < to) {
        const size_t count = to - from < 64 * SCAN_WORDS ? to - from : 64 * SCAN_WORDS;

        scan(chunk + from, count, left - from, plan, &found);
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
                       const nk_leastcdc_constants *constants, int path, uint32_t *lengths)
{
    size_t chunks = 0, start = 0;
    const plan plan = {*bounds, *constants, scan_of(path)};
    carried last;

    last.count = 0;
    last.up_to = data;
    while (start < total_bytes && (bounds->final || total_bytes - start >= bounds->max_bytes)) {
        const size_t left = total_bytes - start;
        const size_t limit = left < bounds->max_bytes ? left : bounds->max_bytes;
        const size_t high = limit < bounds->high_bytes ? limit : bounds->high_bytes;
        size_t length = 0;

        if (limit > bounds->low_bytes) {
            length = least_in(data + start, bounds->low_bytes, high, left, &plan, &last);
            if (!length)
                length = first_in(data + start, high, limit, left, &plan);
        }
        if (!length)
            length = limit;
        lengths[chunks++] = (uint32_t)length;
        start += length;
    }
    return chunks;
}

int nk_leastcdc_best_path(void) { return best_path(); }

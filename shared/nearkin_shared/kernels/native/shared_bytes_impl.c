/* Every eighth position of every base is kept by the hash of eight bytes; targets are searched byte by byte, first on the diagonal of
   the last match, where the next one mostly lies. A match of 15 bytes is never missed for the stride alone.

   entry   tag, more of the hash | place: of all bases of the group, in STRIDE bytes; all ones are no place

   The tag tells without a look at the base that it is another one: that look would miss the cache. */
#include "shared_bytes_impl.h"

#include <stdlib.h>
#include <string.h>

enum { STRIDE = 8, MATCH_MIN = 16, STEP_LOG2 = 6, TAG_SHIFT = 12 };
#define MULTIPLIER UINT64_C(0x9E3779B185EBCA87)
#define NO_ENTRY UINT32_MAX

static inline uint64_t eight(const uint8_t *at) {
    uint64_t value;
    memcpy(&value, at, 8);
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    value = __builtin_bswap64(value);
#endif
    return value;
}

static inline size_t agreeing(const uint8_t *one, const uint8_t *one_end, const uint8_t *other, const uint8_t *other_end) {
    size_t limit = (size_t)(one_end - one), room = (size_t)(other_end - other), at = 0;
    if (room < limit) limit = room;
    for (; at + 8 <= limit; at += 8) {
        uint64_t differing = eight(one + at) ^ eight(other + at);
        if (differing) return at + ((unsigned)__builtin_ctzll(differing) >> 3);
    }
    while (at < limit && one[at] == other[at]) at++;
    return at;
}

static int append(nearkin_shared_list *found, uint32_t target, uint32_t base, uint32_t bytes, uint32_t matches) {
    if (found->count == found->room) {
        size_t room = found->room ? 2 * found->room : 1024;
        nearkin_shared *rows = realloc(found->rows, room * sizeof *rows);
        if (rows == NULL) return -1;
        found->rows = rows;
        found->room = room;
    }
    nearkin_shared *row = &found->rows[found->count++];
    row->target = target;
    row->base = base;
    row->bytes = bytes;
    row->matches = matches;
    return 0;
}

static inline uint32_t places_of(uint32_t length) { return length < 8 ? 0 : (length - 8) / STRIDE + 1; }

/* Which of the bases has a place: the one near at hand mostly, the one behind it often. */
static inline uint32_t base_of(const uint32_t *starts, uint32_t bases, uint32_t near, uint32_t place) {
    if (starts[near] <= place) {
        if (place < starts[near + 1]) return near;
        if (near + 2 <= bases && place < starts[near + 2]) return near + 1;
    }
    uint32_t low = 0, high = bases; /* starts[low] <= place < starts[high] */
    while (high - low > 1) {
        uint32_t middle = low + (high - low) / 2;
        if (starts[middle] <= place)
            low = middle;
        else
            high = middle;
    }
    return low;
}

int nearkin_overlap_group(const uint8_t *targets, const uint64_t *target_offsets, const uint32_t *target_lengths,
                          uint32_t first_target, uint32_t end_target, const uint8_t *const *bases,
                          const uint32_t *base_lengths, uint32_t first_base, uint32_t end_base, uint32_t *table,
                          unsigned table_bits, uint32_t *starts, uint32_t *bytes_by_base, uint32_t *matches_by_base,
                          uint32_t *touched, nearkin_shared_list *found) {
    uint32_t places = 0;
    for (uint32_t base = first_base; base < end_base; base++) {
        starts[base - first_base] = places;
        places += places_of(base_lengths[base]);
    }
    starts[end_base - first_base] = places;
    unsigned place_bits = places ? 32 - (unsigned)__builtin_clz(places) : 1; /* all ones are more than the last place */
    uint32_t place_mask = (UINT32_C(1) << place_bits) - 1, tag_mask = ~place_mask;
    memset(table, 0xFF, sizeof *table << table_bits);
    for (uint32_t base = first_base; base < end_base; base++) {
        const uint8_t *bytes = bases[base];
        uint32_t start = starts[base - first_base], end = starts[base - first_base + 1];
        for (uint32_t place = start; place < end; place++) {
            uint64_t hash = eight(bytes + (size_t)STRIDE * (place - start)) * MULTIPLIER;
            table[hash >> (64 - table_bits)] = ((uint32_t)(hash >> TAG_SHIFT) & tag_mask) | place;
        }
    }
    uint32_t near = 0; /* the base of the last entry */
    for (uint32_t target = first_target; target < end_target; target++) {
        const uint8_t *start = targets + target_offsets[target], *end = start + target_lengths[target];
        const uint8_t *at = start, *anchor = start;
        const uint8_t *diagonal = NULL, *diagonal_end = NULL, *diagonal_start = NULL; /* where the last match would go on for `at` */
        uint32_t diagonal_base = 0, distinct = 0;
        while (end - at >= 8) {
            uint64_t here = eight(at);
            const uint8_t *source = NULL, *source_start = NULL, *source_end = NULL;
            uint32_t base = diagonal_base;
            if (diagonal != NULL && diagonal_end - diagonal >= 8 && eight(diagonal) == here) {
                source = diagonal, source_start = diagonal_start, source_end = diagonal_end;
            } else {
                uint64_t hash = here * MULTIPLIER;
                uint32_t entry = table[hash >> (64 - table_bits)];
                if (((entry ^ (uint32_t)(hash >> TAG_SHIFT)) & tag_mask) == 0 && entry != NO_ENTRY) {
                    uint32_t place = entry & place_mask;
                    near = base_of(starts, end_base - first_base, near, place);
                    base = first_base + near;
                    source_start = bases[base];
                    source_end = source_start + base_lengths[base];
                    source = source_start + (size_t)STRIDE * (place - starts[near]);
                    if (eight(source) != here) source = NULL;
                }
            }
            if (source != NULL) {
                size_t back = 0;
                while (at - back > anchor && source - back > source_start && at[-1 - (ptrdiff_t)back] == source[-1 - (ptrdiff_t)back]) back++;
                size_t length = back + 8 + agreeing(at + 8, end, source + 8, source_end);
                if (length >= MATCH_MIN) {
                    uint32_t row = base - first_base;
                    if (matches_by_base[row] == 0) touched[distinct++] = row;
                    bytes_by_base[row] += (uint32_t)length;
                    matches_by_base[row]++;
                    at = at - back + length;
                    anchor = at;
                    diagonal = source - back + length;
                    diagonal_start = source_start, diagonal_end = source_end, diagonal_base = base;
                    continue;
                }
            }
            size_t step = 1 + ((size_t)(at - anchor) >> STEP_LOG2);
            if ((size_t)(end - at) < step) break;
            at += step;
            if (diagonal != NULL) diagonal = (size_t)(diagonal_end - diagonal) >= step ? diagonal + step : NULL;
        }
        for (uint32_t i = 0; i < distinct; i++) {
            uint32_t row = touched[i];
            if (append(found, target, first_base + row, bytes_by_base[row], matches_by_base[row])) return -1;
            bytes_by_base[row] = matches_by_base[row] = 0;
        }
    }
    return 0;
}

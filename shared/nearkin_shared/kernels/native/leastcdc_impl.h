/* The chunker `leastcdc`. Invariant: no byte outside data[0, total_bytes) is read, no more lengths are written than
 * total_bytes / min_bytes + 1, and every path of the processor gives the same lengths.
 *
 * Bounds are the caller's duty: 64 <= min_bytes <= low_bytes <= high_bytes <= max_bytes <= 921600.
 * See leastcdc_reference.py for what the answers mean. */
#ifndef NEARKIN_LEASTCDC_IMPL_H
#define NEARKIN_LEASTCDC_IMPL_H

#include <stddef.h>
#include <stdint.h>

typedef struct {
    uint16_t spread[4]; /* odd: what the older half of 4, 8, 16 and 32 bytes is multiplied with */
    uint64_t keys[6];   /* what the six words of a window are combined with before they are multiplied in pairs */
} nk_leastcdc_constants;

typedef struct {
    size_t low_bytes;  /* the least candidate of lengths in (low_bytes, high_bytes] is the cut ... */
    size_t high_bytes; /* ... and if there is none, the first one above, or max_bytes */
    size_t max_bytes;
    uint16_t least_hash; /* a hash from here up makes a candidate */
    int final;
} nk_leastcdc_bounds;

/* The widest path this machine has. 0: any processor, 1: AVX2, 2: AVX-512 (F and BW). */
int nk_leastcdc_best_path(void);

/* path: 0 to nk_leastcdc_best_path(). */
size_t nk_leastcdc_cut(const uint8_t *data, size_t total_bytes, const nk_leastcdc_bounds *bounds,
                       const nk_leastcdc_constants *constants, int path, uint32_t *lengths);

#endif

/* Chunking. Invariant: no byte outside data[0, total_bytes) is read, and no more lengths are written than
 * total_bytes / min_bytes + 1.
 *
 * Bounds are the caller's duty: 64 <= min <= target <= max <= 921600 (target: fastcdc only), 16 <= window <= min.
 * See chunking_reference.py for what the answers mean. */
#ifndef NEARKIN_CHUNKING_IMPL_H
#define NEARKIN_CHUNKING_IMPL_H

#include <stddef.h>
#include <stdint.h>

typedef struct {
    uint64_t once[256];    /* what a byte adds to the hash */
    uint64_t doubled[256]; /* the same shifted left by one: what the first byte of two adds to the hash after both */
} nk_gear_tables;

typedef struct {
    size_t min_bytes;
    size_t target_bytes; /* fastcdc: where the looser mask starts; otherwise unused */
    size_t max_bytes;
    int final;
} nk_cut_bounds;

size_t nk_fastcdc_cut(const uint8_t *data, size_t total_bytes, const nk_cut_bounds *bounds, const nk_gear_tables *gear,
                      uint64_t strict_mask, uint64_t loose_mask, uint32_t *lengths);

size_t nk_rabin_cut(const uint8_t *data, size_t total_bytes, const nk_cut_bounds *bounds, uint64_t polynomial,
                    size_t window_bytes, uint64_t mask, uint64_t pattern, uint32_t *lengths);

size_t nk_inck_cut(const uint8_t *data, size_t total_bytes, const nk_cut_bounds *bounds, size_t window_bytes,
                   uint64_t mask, uint64_t pattern, uint32_t *lengths);

#endif

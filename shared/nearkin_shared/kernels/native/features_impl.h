/* Similarity features of chunks. Invariant: every CPU path gives the same 64-bit super-features, bit for bit.

   The caller has checked every argument: offset + length lies inside the payload, features is 1..64 and a multiple of
   super_features, and the window is within the bounds below. Nothing here allocates or fails. */

#ifndef NEARKIN_FEATURES_IMPL_H
#define NEARKIN_FEATURES_IMPL_H

#include <stddef.h>
#include <stdint.h>

#define FEATURES_MAX 64

enum features_cpu { FEATURES_CPU_BASE = 0, FEATURES_CPU_AVX2 = 1, FEATURES_CPU_AVX512 = 2 };

/* Multiplying a byte by a constant, mod P, gives four bytes. Two forms of the same multiplier, a byte at a time. */
typedef struct {
    uint64_t matrix[4]; /* 8x8 bits; the row of result bit 0 is the highest byte, as GF2P8AFFINEQB wants it */
    _Alignas(16) uint8_t low[4][16], high[4][16]; /* of each nibble, where that instruction is missing */
} features_multiplier;

typedef struct {
    uint32_t features;                /* 1..FEATURES_MAX */
    uint32_t super_features;          /* divides features */
    uint32_t window_bytes;            /* Rabin: 4..256; Gear: 32 + sampling_bits .. 64 */
    uint32_t sampling_bits;           /* Gear only, 0..16 */
    uint32_t multipliers[FEATURES_MAX]; /* odd */
    uint32_t addends[FEATURES_MAX];
    uint64_t gear[256];
    uint64_t mix[3];                  /* odd: seed, step and last multiplier of the super-feature hash */
    uint32_t pop[256];                /* byte * x^(8 * window_bytes) mod P; filled by features_prepare */
    features_multiplier pop_by;       /* the same; filled there too */
} features_plan;

/* The best path this machine has. avx512 asks for F, BW, VL and GFNI: Ice Lake, Zen 4 and later. */
enum features_cpu features_cpu_best(void);

/* Build the tables of the polynomial x^32 + polynomial_low and fix the path; once, before anything else. */
void features_init(uint32_t polynomial_low, enum features_cpu path);

/* Fill the plan's pop table from its window_bytes. */
void features_prepare(features_plan *plan);

/* out has room for chunks * super_features values; all of them are written. */
typedef void features_sketch(const features_plan *plan, const uint8_t *payload, const uint64_t *offsets,
                             const uint32_t *lengths, size_t chunks, uint64_t *out);

features_sketch features_ntransform;
features_sketch features_ntransform_scalar;
features_sketch features_finesse;
features_sketch features_finesse_scalar;
features_sketch features_odess;

#endif

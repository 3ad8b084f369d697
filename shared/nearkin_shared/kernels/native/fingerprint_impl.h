/* Fingerprints and check tags. Invariant: every function reads exactly the pieces it is given, which the caller has proved to
 * lie inside the payload, and every CPU path returns the same bytes. Nothing here allocates or touches Python.
 */
#ifndef NEARKIN_FINGERPRINT_IMPL_H
#define NEARKIN_FINGERPRINT_IMPL_H

#include <stddef.h>
#include <stdint.h>

enum { NK_CPU_BASE = 0, NK_CPU_AVX2 = 1, NK_CPU_AVX512 = 2 };

/* One NH block. 4 KiB gave 39 GB/s instead of 35 (fewer blocks to close), but its two keys would take 8 KiB of L1. */
#define NK_NH_BLOCK_BYTES 2048
#define NK_TAG_KEY_BYTES (2 * NK_NH_BLOCK_BYTES + 16 + 16)

typedef struct {
    /* Two independent NH keys, on a cache line of their own: a load that crosses lines costs two. */
    _Alignas(64) uint32_t nh[2][NK_NH_BLOCK_BYTES / 4];
    uint64_t point_low, point_high;        /* where the polynomial is evaluated: below 2^62 and 2^61 */
    uint64_t sip_low, sip_high;
} nk_tag_key;

/* The highest path this machine has. */
int nk_cpu_machine(void);
/* Take `path` (at most the machine's) for every later call, and measure the SHA-1 engines it has (0.2 ms); to be called
 * once, before any other thread runs. */
void nk_cpu_use(int path);

enum { NK_SHA1_PORTABLE = 0, NK_SHA1_NI = 1, NK_SHA1_AVX2 = 2, NK_SHA1_AVX512 = 3, NK_SHA1_ENGINES = 4 };

typedef struct {
    int narrow;           /* engine for few pieces */
    int wide;             /* engine for many; -1: none is faster than `narrow` */
    int narrow_lanes_max; /* busy lanes up to which `narrow` takes over */
    double block_nanoseconds[NK_SHA1_ENGINES]; /* measured, a 64-byte block of one message with all lanes busy; 0: not here */
} nk_sha1_choice;

const char *nk_sha1_engine_name(int engine);
int nk_sha1_engine_here(int engine);
nk_sha1_choice nk_sha1_chosen(void);
/* `engine` for everything, to test and measure it. */
nk_sha1_choice nk_sha1_only(int engine);

/* Write the 20-byte SHA-1 of piece `order[i]` to `digests + 20 * order[i]`, for every i below `pieces`. */
void nk_sha1_many(const nk_sha1_choice *by, const uint8_t *payload, const uint64_t *offsets, const uint32_t *lengths,
                  const int64_t *order, size_t pieces, uint8_t *digests);

/* Unpack `NK_TAG_KEY_BYTES` of derived key material. */
void nk_tag_key_load(nk_tag_key *key, const uint8_t *material);
void nk_check_tags(const uint8_t *payload, const uint64_t *offsets, const uint32_t *lengths, size_t pieces,
                   const nk_tag_key *key, uint64_t *tags);

/* 1 where every byte of the piece is zero (a piece without bytes is), else 0. */
void nk_zero_mask(const uint8_t *payload, const uint64_t *offsets, const uint32_t *lengths, size_t pieces, uint8_t *mask);

#endif

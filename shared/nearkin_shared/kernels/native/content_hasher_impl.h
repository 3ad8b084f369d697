/* BLAKE3 of a stream whose state can be stored. Invariant: the answer depends on the bytes only, not on the pieces they come in. */
#ifndef NEARKIN_CONTENT_HASHER_IMPL_H
#define NEARKIN_CONTENT_HASHER_IMPL_H

#include <stddef.h>
#include <stdint.h>

#define NK_B3_CHUNK_BYTES 1024
#define NK_B3_DEPTH_MAX 54 /* subtrees of 2^64 bytes: one for each bit of the number of chunks */

typedef struct {
    uint64_t chunks;                    /* hashed; the bit i of the number: a subtree of 2^i chunks is in `values` */
    uint32_t values[NK_B3_DEPTH_MAX][8]; /* chaining values of the subtrees, the largest first */
    uint8_t tail[NK_B3_CHUNK_BYTES];    /* the last 1 to 1024 bytes, which may be the end; 0 of an empty stream */
    size_t tail_bytes;
} nk_content_hasher;

/* Subtrees of a state: the bits of its number of chunks. */
size_t nk_content_hasher_depth(uint64_t chunks);
void nk_content_hasher_update(nk_content_hasher *hasher, const uint8_t *data, size_t total_bytes);
/* Write 32 bytes. The state is unchanged. */
void nk_content_hasher_digest(const nk_content_hasher *hasher, uint8_t *digest);
/* Choose the vectors as this processor has them, or narrower ones for tests: 0 portable, 1 AVX2, 2 AVX-512. Returns what is used. */
int nk_content_hasher_use(int widest);

#endif

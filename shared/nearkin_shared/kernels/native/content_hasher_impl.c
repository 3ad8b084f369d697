/* BLAKE3 (O'Connor, Aumasson, Neves, Wilcox-O'Hearn, 2020), unkeyed, with a state that can be stored.
 *
 *     stream -> chunks of 1 KiB -> chaining values -> subtrees of 2^i chunks, merged as soon as two are equal in size
 *
 * The last 1 to 1024 bytes wait: only the end of the stream decides whether they, or a merge, are the root.
 */
#include "content_hasher_impl.h"

#include <string.h>

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "words are read as little-endian"
#endif

#define BLOCK_BYTES 64
#define CHUNK_BLOCKS (NK_B3_CHUNK_BYTES / BLOCK_BYTES)
#define BATCH_CHUNKS 256 /* hashed before any subtree is merged: their values take 8 KiB */
enum { CHUNK_START = 1, CHUNK_END = 2, PARENT = 4, ROOT = 8 };

typedef struct {
    uint32_t every, first, last; /* of every block, of the first one and of the last one */
} input_flags;

static const uint32_t IV[8] = {0x6a09e667u, 0xbb67ae85u, 0x3c6ef372u, 0xa54ff53au, 0x510e527fu, 0x9b05688cu, 0x1f83d9abu, 0x5be0cd19u};
static const uint8_t ORDER[7][16] = {
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}, {2, 6, 3, 10, 7, 0, 4, 13, 1, 11, 12, 5, 9, 14, 15, 8},
    {3, 4, 10, 12, 13, 2, 7, 14, 6, 5, 9, 0, 11, 15, 8, 1}, {10, 7, 12, 9, 14, 3, 13, 15, 4, 0, 11, 2, 5, 8, 1, 6},
    {12, 13, 9, 11, 15, 10, 14, 8, 7, 2, 5, 3, 0, 1, 6, 4}, {9, 14, 11, 5, 8, 12, 15, 1, 13, 3, 0, 10, 2, 6, 4, 7},
    {11, 15, 5, 0, 1, 9, 8, 6, 14, 10, 2, 12, 3, 4, 7, 13}};
static const input_flags OF_CHUNK = {0, CHUNK_START, CHUNK_END}, OF_PARENT = {PARENT, 0, 0};

#define LANES 4
#define LANED(name) name##_4
#define TARGET
#include "blake3_lanes.h"

#if defined(__x86_64__) && defined(__GNUC__)
#define NK_X86 1
#define LANES 8
#define LANED(name) name##_8
#define TARGET __attribute__((target("avx2")))
#include "blake3_lanes.h"
#define LANES 16
#define LANED(name) name##_16
#define TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx2")))
#include "blake3_lanes.h"
#endif

static int vectors = -1;

int nk_content_hasher_use(int widest) {
    int found = 0;
#ifdef NK_X86
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2")) {
        found = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") ? 2 : 1;
    }
#endif
    vectors = found < widest ? found : widest;
    return vectors;
}

static inline uint32_t rotate(uint32_t word, int bits) { return (word >> bits) | (word << (32 - bits)); }

static inline void mix(uint32_t *v, int a, int b, int c, int d, uint32_t x, uint32_t y) {
    v[a] += v[b] + x;
    v[d] = rotate(v[d] ^ v[a], 16);
    v[c] += v[d];
    v[b] = rotate(v[b] ^ v[c], 12);
    v[a] += v[b] + y;
    v[d] = rotate(v[d] ^ v[a], 8);
    v[c] += v[d];
    v[b] = rotate(v[b] ^ v[c], 7);
}

static void compress(uint32_t value[8], const uint8_t block[BLOCK_BYTES], uint32_t bytes, uint64_t counter, uint32_t flags) {
    uint32_t m[16], v[16];
    memcpy(m, block, sizeof m);
    memcpy(v, value, 32);
    memcpy(v + 8, IV, 16);
    v[12] = (uint32_t)counter;
    v[13] = (uint32_t)(counter >> 32);
    v[14] = bytes;
    v[15] = flags;
    for (int round = 0; round < 7; round++) {
        const uint8_t *order = ORDER[round];
        for (int column = 0; column < 4; column++)
            mix(v, column, 4 + column, 8 + column, 12 + column, m[order[2 * column]], m[order[2 * column + 1]]);
        for (int line = 0; line < 4; line++)
            mix(v, line, 4 + (line + 1) % 4, 8 + (line + 2) % 4, 12 + (line + 3) % 4, m[order[8 + 2 * line]],
                m[order[9 + 2 * line]]);
    }
    for (int word = 0; word < 8; word++) value[word] = v[word] ^ v[word + 8];
}

/* Write the chaining values of `count` inputs that follow one another. `values` may be the inputs: those of parents are read first. */
static void hash_many(const uint8_t *data, size_t count, size_t blocks, uint64_t counter, unsigned step, const input_flags *flags,
                      uint32_t *values) {
    size_t stride = blocks * BLOCK_BYTES;
    while (count) {
        size_t done = 1;
#ifdef NK_X86
        if (count >= 16 && vectors == 2) {
            done = 16;
            hash_lanes_16(data, stride, blocks, counter, step, flags, values);
        } else if (count >= 8 && vectors >= 1) {
            done = 8;
            hash_lanes_8(data, stride, blocks, counter, step, flags, values);
        } else
#endif
        if (count >= 4) {
            done = 4;
            hash_lanes_4(data, stride, blocks, counter, step, flags, values);
        } else {
            uint32_t value[8];
            memcpy(value, IV, sizeof value);
            for (size_t block = 0; block < blocks; block++)
                compress(value, data + BLOCK_BYTES * block, BLOCK_BYTES, counter,
                         flags->every | (block == 0 ? flags->first : 0) | (block + 1 == blocks ? flags->last : 0));
            memcpy(values, value, sizeof value);
        }
        data += done * stride;
        counter += done * step;
        values += 8 * done;
        count -= done;
    }
}

size_t nk_content_hasher_depth(uint64_t chunks) { return (size_t)__builtin_popcountll(chunks); }

/* Add a subtree of 2^level chunks; more bytes follow it, so it is not the root. */
static void add_subtree(nk_content_hasher *hasher, const uint32_t value[8], unsigned level) {
    size_t depth = nk_content_hasher_depth(hasher->chunks);
    memcpy(hasher->values[depth], value, 32);
    hasher->chunks += (uint64_t)1 << level;
    for (uint64_t count = hasher->chunks >> level; !(count & 1); count >>= 1, depth--) {
        uint32_t merged[8];
        memcpy(merged, IV, sizeof merged);
        compress(merged, (const uint8_t *)hasher->values[depth - 1], BLOCK_BYTES, 0, PARENT);
        memcpy(hasher->values[depth - 1], merged, sizeof merged);
    }
}

/* Add whole chunks, in the largest subtrees that begin where the stream is. */
static void add_chunks(nk_content_hasher *hasher, const uint8_t *data, size_t chunks) {
    uint32_t values[BATCH_CHUNKS * 8];
    while (chunks) {
        unsigned level = 0;
        while ((size_t)2 << level <= chunks && (size_t)2 << level <= BATCH_CHUNKS && !(hasher->chunks >> level & 1)) level++;
        size_t count = (size_t)1 << level;
        hash_many(data, count, CHUNK_BLOCKS, hasher->chunks, 1, &OF_CHUNK, values);
        for (size_t left = count / 2; left; left /= 2) hash_many((const uint8_t *)values, left, 1, 0, 0, &OF_PARENT, values);
        add_subtree(hasher, values, level);
        data += count * NK_B3_CHUNK_BYTES;
        chunks -= count;
    }
}

void nk_content_hasher_update(nk_content_hasher *hasher, const uint8_t *data, size_t total_bytes) {
    if (vectors < 0) nk_content_hasher_use(2);
    if (hasher->tail_bytes) {
        size_t room = NK_B3_CHUNK_BYTES - hasher->tail_bytes, taken = total_bytes < room ? total_bytes : room;
        memcpy(hasher->tail + hasher->tail_bytes, data, taken);
        hasher->tail_bytes += taken;
        data += taken;
        total_bytes -= taken;
        if (!total_bytes) return;
        add_chunks(hasher, hasher->tail, 1);
    }
    size_t chunks = total_bytes ? (total_bytes - 1) / NK_B3_CHUNK_BYTES : 0;
    add_chunks(hasher, data, chunks);
    hasher->tail_bytes = total_bytes - chunks * NK_B3_CHUNK_BYTES;
    if (hasher->tail_bytes) memcpy(hasher->tail, data + chunks * NK_B3_CHUNK_BYTES, hasher->tail_bytes);
}

void nk_content_hasher_digest(const nk_content_hasher *hasher, uint8_t *digest) {
    size_t depth = nk_content_hasher_depth(hasher->chunks), position = 0;
    uint32_t value[8], words[16];
    memcpy(value, IV, sizeof value);
    do { /* blocks of the last chunk; an empty stream has one of no bytes */
        uint8_t block[BLOCK_BYTES] = {0};
        size_t left = hasher->tail_bytes - position, bytes = left < BLOCK_BYTES ? left : BLOCK_BYTES;
        memcpy(block, hasher->tail + position, bytes);
        int is_last = bytes == left;
        compress(value, block, (uint32_t)bytes, hasher->chunks,
                 (position ? 0 : CHUNK_START) | (is_last ? CHUNK_END | (depth ? 0 : ROOT) : 0));
        position += bytes;
    } while (position < hasher->tail_bytes);
    while (depth--) {
        memcpy(words, hasher->values[depth], 32);
        memcpy(words + 8, value, 32);
        memcpy(value, IV, sizeof value);
        compress(value, (const uint8_t *)words, BLOCK_BYTES, 0, PARENT | (depth ? 0 : ROOT));
    }
    memcpy(digest, value, 32);
}

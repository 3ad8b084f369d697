/* Fingerprints and check tags, in C. Invariant: see fingerprint_impl.h.
 *
 *  SHA-1     FIPS 180-4, section 6.1. One scheduler feeds up to 16 lanes, each hashing its own piece:
 *
 *      queue of pieces -> lane: body blocks -> one or two padding blocks -> digest, next piece
 *
 *            Most lanes busy: all go on side by side (sha1_lanes.h). Few are left: one or two at a time (SHA-NI, or C).
 *            Which engines, and how few is few, is measured once; no answer depends on it.
 *
 *  check tag docs/adr/0002-keyed-check-tag.md: NH over blocks, a polynomial over the blocks, SipHash-2-4 over the result.
 */
#define _POSIX_C_SOURCE 200809L
#include "fingerprint_impl.h"

#include "sha1_engines.h"
#include "siphash.h"

#include <string.h>
#include <time.h>

#if defined(NK_X86)
#include <cpuid.h>
#endif

#if !defined(__SIZEOF_INT128__)
#error "the check tag's polynomial needs unsigned __int128, which every 64-bit gcc and clang has"
#endif

static int cpu_path = NK_CPU_BASE;
static int cpu_has_sha_ni = 0;

int nk_cpu_machine(void) {
#if defined(NK_X86)
    unsigned a, b, c, d;
    __builtin_cpu_init();
    cpu_has_sha_ni = __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b >> 29 & 1) && __builtin_cpu_supports("sse4.1");
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx2"))
        return NK_CPU_AVX512;
    if (__builtin_cpu_supports("avx2"))
        return NK_CPU_AVX2;
#endif
    return NK_CPU_BASE;
}

/* ---------------------------------------------------------------- SHA-1: the engines, and which to take */

/* A lane is idle, or hashes one piece: first the piece's whole blocks where they lie, then `padding`. */
typedef struct {
    const uint8_t *at;    /* next block */
    uint64_t blocks;      /* left at `at` */
    int64_t piece;        /* -1: idle */
    uint32_t piece_bytes;
    int in_padding;
    uint8_t padding[128]; /* last partial block, 0x80, zeros, length in bits */
} lane;

static const char *const engine_names[NK_SHA1_ENGINES] = {"portable", "sha-ni", "avx2", "avx512"};
static const int engine_lanes[NK_SHA1_ENGINES] = {1, 2, 8, 16};
static const uint32_t sha1_start[5] = {0x67452301u, 0xefcdab89u, 0x98badcfeu, 0x10325476u, 0xc3d2e1f0u};
static nk_sha1_choice choice;

const char *nk_sha1_engine_name(int engine) { return engine_names[engine]; }

int nk_sha1_engine_here(int engine) {
    return engine == NK_SHA1_PORTABLE || (engine == NK_SHA1_NI && cpu_path >= NK_CPU_AVX2 && cpu_has_sha_ni) ||
           (engine == NK_SHA1_AVX2 && cpu_path >= NK_CPU_AVX2) || (engine == NK_SHA1_AVX512 && cpu_path >= NK_CPU_AVX512);
}

/* Hash `blocks` blocks from each address with an engine of one lane or two (x == y: one message). */
static void run_narrow(int engine, uint32_t state_x[5], const uint8_t *x, uint32_t state_y[5], const uint8_t *y, uint64_t blocks) {
#if defined(NK_X86)
    if (engine == NK_SHA1_NI) {
        sha1_ni_two(state_x, x, state_y, y, blocks);
        return;
    }
#endif
    (void)engine;
    sha1_portable(state_x, x, blocks);
    if (y != x)
        sha1_portable(state_y, y, blocks);
}

static void run_wide(int engine, uint32_t state[5][SHA1_LANES_MAX], const uint8_t *const at[SHA1_LANES_MAX], uint64_t blocks) {
#if defined(NK_X86)
    if (engine == NK_SHA1_AVX512)
        sha1_in_lanes_16(state, at, blocks);
    else
        sha1_in_lanes_8(state, at, blocks);
#else
    (void)engine, (void)state, (void)at, (void)blocks;
#endif
}

/* The quickest of `MEASURED_RUNS` runs, for other work on the machine only ever adds to one. Some 15 us a run of all engines;
 * the first few also wait until the upper halves of the registers have power. */
#define MEASURED_RUNS 12
#define MEASURED_BLOCKS 16

static double nanoseconds_a_block(int engine) {
    uint8_t data[SHA1_LANES_MAX][64 * MEASURED_BLOCKS + 64]; /* lanes not a whole number of pages apart: they would share sets */
    uint32_t state[5][SHA1_LANES_MAX] = {{0}};
    const uint8_t *at[SHA1_LANES_MAX];
    double best = 0;
    memset(data, 0x5a, sizeof data);
    for (int i = 0; i < SHA1_LANES_MAX; i++)
        at[i] = data[i];
    for (int run = 0; run < MEASURED_RUNS; run++) {
        struct timespec from, to;
        clock_gettime(CLOCK_MONOTONIC, &from);
        if (engine_lanes[engine] > 2)
            run_wide(engine, state, at, MEASURED_BLOCKS);
        else /* rows of `state` serve as two states; the portable engine is paid for both */
            run_narrow(engine, state[0], at[0], state[1], at[1], MEASURED_BLOCKS);
        clock_gettime(CLOCK_MONOTONIC, &to);
        const double taken = (double)(to.tv_sec - from.tv_sec) * 1e9 + (double)(to.tv_nsec - from.tv_nsec);
        if (run == 0 || taken < best)
            best = taken;
    }
    return best / MEASURED_BLOCKS / (engine_lanes[engine] > 2 ? engine_lanes[engine] : 2);
}

void nk_cpu_use(int path) {
    cpu_path = path;
    choice.narrow = nk_sha1_engine_here(NK_SHA1_NI) ? NK_SHA1_NI : NK_SHA1_PORTABLE;
    choice.wide = -1;
    choice.narrow_lanes_max = 0;
    for (int engine = 0; engine < NK_SHA1_ENGINES; engine++) {
        choice.block_nanoseconds[engine] = nk_sha1_engine_here(engine) ? nanoseconds_a_block(engine) : 0;
        if (nk_sha1_engine_here(engine) && choice.block_nanoseconds[engine] < choice.block_nanoseconds[choice.narrow]) {
            if (engine_lanes[engine] <= 2)
                choice.narrow = engine;
            else if (choice.wide < 0 || choice.block_nanoseconds[engine] < choice.block_nanoseconds[choice.wide])
                choice.wide = engine;
        }
    }
    if (choice.wide >= 0) /* a wide step costs the same however few of its lanes are busy */
        choice.narrow_lanes_max = (int)(engine_lanes[choice.wide] * choice.block_nanoseconds[choice.wide] /
                                        choice.block_nanoseconds[choice.narrow]);
}

nk_sha1_choice nk_sha1_chosen(void) { return choice; }

/* ---------------------------------------------------------------- SHA-1: the scheduler */

static void lane_take(lane *l, uint32_t state[5][SHA1_LANES_MAX], int column, const uint8_t *data, uint32_t data_bytes,
                      int64_t piece) {
    for (int i = 0; i < 5; i++)
        state[i][column] = sha1_start[i];
    l->at = data;
    l->blocks = data_bytes / 64;
    l->piece = piece;
    l->piece_bytes = data_bytes;
    l->in_padding = 0;
}

static void lane_pad(lane *l) {
    const uint32_t rest_bytes = l->piece_bytes % 64;
    const uint64_t bits = (uint64_t)l->piece_bytes * 8;
    l->blocks = rest_bytes < 56 ? 1 : 2;
    memset(l->padding, 0, sizeof l->padding);
    if (rest_bytes)
        memcpy(l->padding, l->at, rest_bytes);
    l->padding[rest_bytes] = 0x80;
    store32be(l->padding + 64 * l->blocks - 8, (uint32_t)(bits >> 32));
    store32be(l->padding + 64 * l->blocks - 4, (uint32_t)bits);
    l->at = l->padding;
    l->in_padding = 1;
}

/* Hash `blocks` blocks in columns x and y (x == y: only that one). */
static void run_two(int engine, lane *lanes, uint32_t state[5][SHA1_LANES_MAX], int x, int y, uint64_t blocks) {
    uint32_t state_x[5], state_y[5];
    for (int i = 0; i < 5; i++) {
        state_x[i] = state[i][x];
        state_y[i] = state[i][y];
    }
    run_narrow(engine, state_x, lanes[x].at, state_y, lanes[y].at, blocks);
    for (int i = 0; i < 5; i++) {
        state[i][x] = state_x[i];
        state[i][y] = y == x ? state_x[i] : state_y[i];
    }
    lanes[x].at += 64 * blocks;
    lanes[x].blocks -= blocks;
    if (y != x) {
        lanes[y].at += 64 * blocks;
        lanes[y].blocks -= blocks;
    }
}

static void run_all(int engine, lane *lanes, uint32_t state[5][SHA1_LANES_MAX], int busy_one, uint64_t blocks) {
    const uint8_t *at[SHA1_LANES_MAX];
    for (int i = 0; i < SHA1_LANES_MAX; i++) /* an idle lane repeats a busy one; nobody reads its state */
        at[i] = lanes[i].piece >= 0 ? lanes[i].at : lanes[busy_one].at;
    run_wide(engine, state, at, blocks);
    for (int i = 0; i < SHA1_LANES_MAX; i++)
        if (lanes[i].piece >= 0) {
            lanes[i].at += 64 * blocks;
            lanes[i].blocks -= blocks;
        }
}

nk_sha1_choice nk_sha1_only(int engine) {
    nk_sha1_choice only = choice;
    only.wide = engine_lanes[engine] > 2 ? engine : -1;
    only.narrow = engine_lanes[engine] > 2 ? NK_SHA1_PORTABLE : engine;
    only.narrow_lanes_max = 0;
    return only;
}

void nk_sha1_many(const nk_sha1_choice *by, const uint8_t *payload, const uint64_t *offsets, const uint32_t *lengths,
                  const int64_t *order, size_t pieces, uint8_t *digests) {
    const int lane_count = engine_lanes[by->wide >= 0 ? by->wide : by->narrow];
    lane lanes[SHA1_LANES_MAX];
    uint32_t state[5][SHA1_LANES_MAX];
    size_t next = 0;
    memset(state, 0, sizeof state);
    for (int i = 0; i < SHA1_LANES_MAX; i++) {
        lanes[i].piece = -1;
        lanes[i].blocks = 0;
        lanes[i].at = NULL;
    }
    for (;;) {
        int busy = 0, longest = -1, second = -1;
        uint64_t blocks = UINT64_MAX;
        for (int i = 0; i < lane_count; i++) {
            lane *l = &lanes[i];
            while (!l->blocks) { /* body ends -> padding ends -> next piece */
                if (l->piece >= 0 && !l->in_padding) {
                    lane_pad(l);
                    break;
                }
                if (l->piece >= 0) {
                    for (int j = 0; j < 5; j++)
                        store32be(digests + 20 * l->piece + 4 * j, state[j][i]);
                    l->piece = -1;
                }
                if (next == pieces)
                    break;
                const int64_t piece = order[next++];
                lane_take(l, state, i, payload + offsets[piece], lengths[piece], piece);
            }
            if (l->piece < 0)
                continue;
            busy++;
            blocks = l->blocks < blocks ? l->blocks : blocks;
            if (longest < 0 || l->blocks > lanes[longest].blocks) {
                second = longest;
                longest = i;
            } else if (second < 0 || l->blocks > lanes[second].blocks) {
                second = i;
            }
        }
        if (!busy)
            return;
        if (by->wide >= 0 && busy > by->narrow_lanes_max)
            run_all(by->wide, lanes, state, longest, blocks);
        else if (second < 0)
            run_two(by->narrow, lanes, state, longest, longest, lanes[longest].blocks);
        else
            run_two(by->narrow, lanes, state, longest, second, lanes[second].blocks);
    }
}

/* ---------------------------------------------------------------- check tag: NH */

void nk_tag_key_load(nk_tag_key *key, const uint8_t *material) {
    for (int pass = 0; pass < 2; pass++)
        for (int i = 0; i < NK_NH_BLOCK_BYTES / 4; i++) {
            const uint8_t *at = material + pass * NK_NH_BLOCK_BYTES + 4 * i;
            key->nh[pass][i] = (uint32_t)at[3] << 24 | (uint32_t)at[2] << 16 | (uint32_t)at[1] << 8 | at[0];
        }
    material += 2 * NK_NH_BLOCK_BYTES;
    key->point_low = nk_load64le(material) & (UINT64_MAX >> 2);
    key->point_high = nk_load64le(material + 8) & (UINT64_MAX >> 3);
    key->sip_low = nk_load64le(material + 16);
    key->sip_high = nk_load64le(material + 24);
}

/* Add the NH of `bytes` (a multiple of 64) of a block, from `at`, its keys from `key_words`, to both sums. */
static inline void nh_portable(const uint8_t *at, size_t bytes, const uint32_t *key0, const uint32_t *key1, uint64_t sums[2]) {
    uint64_t sum0 = 0, sum1 = 0;
    for (size_t i = 0; i < bytes / 8; i++) {
        const uint64_t pair = nk_load64le(at + 8 * i);
        const uint32_t low = (uint32_t)pair, high = (uint32_t)(pair >> 32);
        sum0 += (uint64_t)(uint32_t)(low + key0[2 * i]) * (uint32_t)(high + key0[2 * i + 1]);
        sum1 += (uint64_t)(uint32_t)(low + key1[2 * i]) * (uint32_t)(high + key1[2 * i + 1]);
    }
    sums[0] += sum0;
    sums[1] += sum1;
}

static void nh_block_portable(const uint8_t *at, size_t bytes, const nk_tag_key *key, uint64_t sums[2]) {
    const size_t whole = bytes & ~(size_t)63;
    sums[0] = sums[1] = 0;
    nh_portable(at, whole, key->nh[0], key->nh[1], sums);
    if (bytes > whole) {
        uint8_t last[64] = {0};
        memcpy(last, at + whole, bytes - whole);
        nh_portable(last, 64, key->nh[0] + whole / 4, key->nh[1] + whole / 4, sums);
    }
}

#if defined(NK_X86)

NK_AVX2 static inline __attribute__((always_inline)) void nh_avx2(const uint8_t *at, size_t bytes, const uint32_t *key0,
                                                                  const uint32_t *key1, __m256i *sum0, __m256i *sum1) {
    for (size_t i = 0; i < bytes; i += 32) {
        const __m256i m = _mm256_loadu_si256((const __m256i *)(at + i));
        const __m256i x = _mm256_add_epi32(m, _mm256_loadu_si256((const __m256i *)(key0 + i / 4)));
        const __m256i y = _mm256_add_epi32(m, _mm256_loadu_si256((const __m256i *)(key1 + i / 4)));
        *sum0 = _mm256_add_epi64(*sum0, _mm256_mul_epu32(x, _mm256_srli_epi64(x, 32)));
        *sum1 = _mm256_add_epi64(*sum1, _mm256_mul_epu32(y, _mm256_srli_epi64(y, 32)));
    }
}

NK_AVX2 static inline __attribute__((always_inline)) uint64_t sum_avx2(__m256i v) {
    __m128i half = _mm_add_epi64(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
    return (uint64_t)_mm_cvtsi128_si64(half) + (uint64_t)_mm_extract_epi64(half, 1);
}

NK_AVX2 static inline __attribute__((always_inline)) void nh_block_avx2(const uint8_t *at, size_t bytes, const nk_tag_key *key,
                                                                        uint64_t sums[2]) {
    const size_t whole = bytes & ~(size_t)63;
    __m256i sum0 = _mm256_setzero_si256(), sum1 = _mm256_setzero_si256();
    nh_avx2(at, whole, key->nh[0], key->nh[1], &sum0, &sum1);
    if (bytes > whole) {
        uint8_t last[64] = {0};
        memcpy(last, at + whole, bytes - whole);
        nh_avx2(last, 64, key->nh[0] + whole / 4, key->nh[1] + whole / 4, &sum0, &sum1);
    }
    sums[0] = sum_avx2(sum0);
    sums[1] = sum_avx2(sum1);
}

NK_AVX512 static inline __attribute__((always_inline)) void nh_block_avx512(const uint8_t *at, size_t bytes, const nk_tag_key *key,
                                                                            uint64_t sums[2]) {
    __m512i sum0 = _mm512_setzero_si512(), sum1 = _mm512_setzero_si512();
#define NH_64(m, i)                                                                                                              \
    do {                                                                                                                         \
        const __m512i x = _mm512_add_epi32(m, _mm512_loadu_si512(key->nh[0] + (i) / 4));                                         \
        const __m512i y = _mm512_add_epi32(m, _mm512_loadu_si512(key->nh[1] + (i) / 4));                                         \
        sum0 = _mm512_add_epi64(sum0, _mm512_mul_epu32(x, _mm512_srli_epi64(x, 32)));                                            \
        sum1 = _mm512_add_epi64(sum1, _mm512_mul_epu32(y, _mm512_shuffle_epi32(y, _MM_PERM_DDBB)));                              \
    } while (0) /* one pass shifts (port 0), the other shuffles (port 5) */
    size_t i = 0;
#pragma GCC unroll 4
    for (; i + 64 <= bytes; i += 64) {
        const __m512i m = _mm512_loadu_si512(at + i);
        NH_64(m, i);
    }
    if (i < bytes) {
        const __m512i m = _mm512_maskz_loadu_epi8(~UINT64_C(0) >> (64 - (bytes - i)), at + i);
        NH_64(m, i);
    }
    sums[0] = sum_avx2(_mm256_add_epi64(_mm512_castsi512_si256(sum0), _mm512_extracti64x4_epi64(sum0, 1)));
    sums[1] = sum_avx2(_mm256_add_epi64(_mm512_castsi512_si256(sum1), _mm512_extracti64x4_epi64(sum1, 1)));
}

#endif

/* ---------------------------------------------------------------- check tag: polynomial, SipHash */

typedef unsigned __int128 u128;

#define P127 (((u128)1 << 127) - 1)

/* hash * point + word modulo 2^127 - 1, where 2^127 = 1. hash is below 2^127 and so is the result (2^127 - 1 may stand for 0).
 * The point's five missing bits keep every sum below 2^128, so that one fold is enough (35 GB/s at 8 KiB; 32 with five). */
static inline u128 poly_step(u128 hash, uint64_t point_low, uint64_t point_high, uint64_t word) {
    const uint64_t low = (uint64_t)hash, high = (uint64_t)(hash >> 64);
    const u128 middle = (u128)low * point_high + (u128)high * point_low; /* times 2^64; each product below 2^125 */
    const u128 sum = (u128)low * point_low                               /* below 2^126 */
                     + 2 * ((u128)high * point_high)                     /* times 2^128; below 2^125 */
                     + (middle << 65 >> 1) + (middle >> 63)              /* below 2^127, below 2^63 */
                     + word;
    return (sum & P127) + (sum >> 127);
}

#define TAG_LOOP(nh_block)                                                                                                       \
    for (size_t piece = 0; piece < pieces; piece++) {                                                                            \
        const uint8_t *at = payload + offsets[piece];                                                                            \
        size_t left_bytes = lengths[piece];                                                                                      \
        u128 hash = 0;                                                                                                           \
        while (left_bytes) {                                                                                                     \
            const size_t block_bytes = left_bytes < NK_NH_BLOCK_BYTES ? left_bytes : NK_NH_BLOCK_BYTES;                          \
            uint64_t sums[2];                                                                                                    \
            nh_block(at, block_bytes, key, sums);                                                                                \
            hash = poly_step(hash, key->point_low, key->point_high, sums[0]);                                                    \
            hash = poly_step(hash, key->point_low, key->point_high, sums[1]);                                                    \
            at += block_bytes;                                                                                                   \
            left_bytes -= block_bytes;                                                                                           \
        }                                                                                                                        \
        hash = hash == P127 ? 0 : hash;                                                                                          \
        uint64_t v[4];                                                                                                           \
        nk_sip_start(v, key->sip_low, key->sip_high);                                                                            \
        nk_sip_word(v, (uint64_t)hash, 2);                                                                                       \
        nk_sip_word(v, (uint64_t)(hash >> 64), 2);                                                                               \
        nk_sip_word(v, lengths[piece], 2);                                                                                       \
        tags[piece] = nk_sip_finish(v, (uint64_t)24 << 56, 2, 4);                                                                \
    }

#define TAG_PARAMETERS                                                                                                           \
    const uint8_t *payload, const uint64_t *offsets, const uint32_t *lengths, size_t pieces, const nk_tag_key *key, uint64_t *tags

static void check_tags_portable(TAG_PARAMETERS) { TAG_LOOP(nh_block_portable) }
#if defined(NK_X86)
NK_AVX2 static void check_tags_avx2(TAG_PARAMETERS) { TAG_LOOP(nh_block_avx2) }
NK_AVX512 static void check_tags_avx512(TAG_PARAMETERS) { TAG_LOOP(nh_block_avx512) }
#endif

void nk_check_tags(TAG_PARAMETERS) {
#if defined(NK_X86)
    if (cpu_path == NK_CPU_AVX512) {
        check_tags_avx512(payload, offsets, lengths, pieces, key, tags);
        return;
    }
    if (cpu_path == NK_CPU_AVX2) {
        check_tags_avx2(payload, offsets, lengths, pieces, key, tags);
        return;
    }
#endif
    check_tags_portable(payload, offsets, lengths, pieces, key, tags);
}

/* ---------------------------------------------------------------- zero pieces */

void nk_zero_mask(const uint8_t *payload, const uint64_t *offsets, const uint32_t *lengths, size_t pieces, uint8_t *mask) {
    for (size_t i = 0; i < pieces; i++) {
        const uint8_t *at = payload + offsets[i];
        /* The first byte is zero and each byte equals the one before it: libc's memcmp stops at the first difference. */
        mask[i] = lengths[i] == 0 || (at[0] == 0 && memcmp(at, at + 1, lengths[i] - 1) == 0);
    }
}

/* SHA-1 of blocks (FIPS 180-4, section 6.1), one to sixteen messages at a time. Invariant: every engine turns a state and
 * whole blocks into the same state. fingerprint_impl.c shares out the pieces.
 *
 *     sha1_portable       1 message   C
 *     sha1_ni_two         2 messages  SHA-NI, two streams side by side: one alone waits on the latency of its own rounds
 *     sha1_in_lanes_8     8 messages  AVX2
 *     sha1_in_lanes_16   16 messages  AVX-512
 */
#ifndef NEARKIN_SHA1_ENGINES_H
#define NEARKIN_SHA1_ENGINES_H

#include <stddef.h>
#include <stdint.h>

#define SHA1_LANES_MAX 16

#if defined(__x86_64__) && defined(__GNUC__)
#define NK_X86 1
#include <immintrin.h>
#define NK_AVX2 __attribute__((target("avx2")))
#define NK_AVX512 __attribute__((target("avx512f,avx512bw,avx2")))
#endif

/* ---------------------------------------------------------------- SHA-1: one block at a time, portable */

static inline uint32_t load32be(const uint8_t *at) {
    return (uint32_t)at[0] << 24 | (uint32_t)at[1] << 16 | (uint32_t)at[2] << 8 | at[3];
}

static inline void store32be(uint8_t *at, uint32_t word) {
    at[0] = (uint8_t)(word >> 24);
    at[1] = (uint8_t)(word >> 16);
    at[2] = (uint8_t)(word >> 8);
    at[3] = (uint8_t)word;
}

static inline uint32_t rotl32(uint32_t word, int bits) { return (word << bits) | (word >> (32 - bits)); }

#define SHA1_K0 0x5a827999u
#define SHA1_K1 0x6ed9eba1u
#define SHA1_K2 0x8f1bbcdcu
#define SHA1_K3 0xca62c1d6u

#define CHOOSE(x, y, z) ((z) ^ ((x) & ((y) ^ (z))))
#define PARITY(x, y, z) ((x) ^ (y) ^ (z))
#define MAJORITY(x, y, z) (((x) & (y)) | ((z) & ((x) | (y))))

/* Round t leaves its five words in place: the roles of a..e turn instead, so nothing is moved. */
#define SCHEDULED(w, t)                                                                                                          \
    (w[(t) & 15] = (t) < 16 ? w[(t) & 15] : rotl32(w[((t) + 13) & 15] ^ w[((t) + 8) & 15] ^ w[((t) + 2) & 15] ^ w[(t) & 15], 1))
#define ROUND(f, k, a, b, c, d, e, t)                                                                                            \
    do {                                                                                                                         \
        e += SCHEDULED(w, t) + k + f(b, c, d) + rotl32(a, 5);                                                                    \
        b = rotl32(b, 30);                                                                                                       \
    } while (0)
#define FIVE_ROUNDS(f, k, t)                                                                                                     \
    ROUND(f, k, a, b, c, d, e, (t));                                                                                             \
    ROUND(f, k, e, a, b, c, d, (t) + 1);                                                                                         \
    ROUND(f, k, d, e, a, b, c, (t) + 2);                                                                                         \
    ROUND(f, k, c, d, e, a, b, (t) + 3);                                                                                         \
    ROUND(f, k, b, c, d, e, a, (t) + 4)
#define TWENTY_ROUNDS(f, k, t)                                                                                                   \
    FIVE_ROUNDS(f, k, (t));                                                                                                      \
    FIVE_ROUNDS(f, k, (t) + 5);                                                                                                  \
    FIVE_ROUNDS(f, k, (t) + 10);                                                                                                 \
    FIVE_ROUNDS(f, k, (t) + 15)

/* gcc 12 gathers the schedule into vectors and spills them: 0.68 GB/s without, 0.50 with. */
#if defined(__GNUC__) && !defined(__clang__)
__attribute__((optimize("no-tree-slp-vectorize", "no-tree-vectorize")))
#endif
static void sha1_portable(uint32_t state[5], const uint8_t *at, size_t blocks) {
    for (; blocks; blocks--, at += 64) {
        uint32_t w[16];
        uint32_t a = state[0], b = state[1], c = state[2], d = state[3], e = state[4];
        for (int i = 0; i < 16; i++)
            w[i] = load32be(at + 4 * i);
        TWENTY_ROUNDS(CHOOSE, SHA1_K0, 0);
        TWENTY_ROUNDS(PARITY, SHA1_K1, 20);
        TWENTY_ROUNDS(MAJORITY, SHA1_K2, 40);
        TWENTY_ROUNDS(PARITY, SHA1_K3, 60);
        state[0] += a;
        state[1] += b;
        state[2] += c;
        state[3] += d;
        state[4] += e;
    }
}

#if defined(NK_X86)

/* ---------------------------------------------------------------- SHA-1: two streams of SHA-NI */

/* Four rounds of both streams, quad q of the message (q below 20). The instruction wants the round function q/5 as an
 * immediate, hence macros. `old` is abcd before the previous four rounds: its a, rotated, is the next e. */
#define NI_SCHEDULE(w, q)                                                                                                        \
    w[(q) & 3] = _mm_sha1msg2_epu32(                                                                                             \
        _mm_xor_si128(_mm_sha1msg1_epu32(w[(q) & 3], w[((q) + 1) & 3]), w[((q) + 2) & 3]), w[((q) + 3) & 3])
#define NI_QUAD(abcd, old, w, q)                                                                                                 \
    do {                                                                                                                         \
        if ((q) >= 4)                                                                                                            \
            NI_SCHEDULE(w, q);                                                                                                   \
        __m128i e_plus_w = _mm_sha1nexte_epu32(old, w[(q) & 3]);                                                                 \
        old = abcd;                                                                                                              \
        abcd = _mm_sha1rnds4_epu32(abcd, e_plus_w, (q) / 5);                                                                     \
    } while (0)
#define NI_QUAD_2(q)                                                                                                             \
    NI_QUAD(abcd0, old0, w0, q);                                                                                                 \
    NI_QUAD(abcd1, old1, w1, q)
#define NI_FIVE_QUADS_2(q)                                                                                                       \
    NI_QUAD_2(q);                                                                                                                \
    NI_QUAD_2((q) + 1);                                                                                                          \
    NI_QUAD_2((q) + 2);                                                                                                          \
    NI_QUAD_2((q) + 3);                                                                                                          \
    NI_QUAD_2((q) + 4)

__attribute__((target("sha,sse4.1,ssse3"))) static void sha1_ni_two(uint32_t state0[5], const uint8_t *at0, uint32_t state1[5],
                                                                     const uint8_t *at1, size_t blocks) {
    const __m128i reverse = _mm_set_epi64x(0x0001020304050607LL, 0x08090a0b0c0d0e0fLL);
    __m128i abcd0 = _mm_shuffle_epi32(_mm_loadu_si128((const __m128i *)state0), 0x1b);
    __m128i abcd1 = _mm_shuffle_epi32(_mm_loadu_si128((const __m128i *)state1), 0x1b);
    __m128i e0 = _mm_set_epi32((int)state0[4], 0, 0, 0);
    __m128i e1 = _mm_set_epi32((int)state1[4], 0, 0, 0);
    for (; blocks; blocks--, at0 += 64, at1 += 64) {
        const __m128i abcd0_before = abcd0, abcd1_before = abcd1;
        const __m128i e0_before = e0, e1_before = e1;
        __m128i w0[4], w1[4], old0, old1;
        for (int i = 0; i < 4; i++) {
            w0[i] = _mm_shuffle_epi8(_mm_loadu_si128((const __m128i *)(at0 + 16 * i)), reverse);
            w1[i] = _mm_shuffle_epi8(_mm_loadu_si128((const __m128i *)(at1 + 16 * i)), reverse);
        }
        old0 = abcd0;
        old1 = abcd1;
        abcd0 = _mm_sha1rnds4_epu32(abcd0, _mm_add_epi32(e0, w0[0]), 0); /* e is whole here, not an a to rotate */
        abcd1 = _mm_sha1rnds4_epu32(abcd1, _mm_add_epi32(e1, w1[0]), 0);
        NI_QUAD_2(1);
        NI_QUAD_2(2);
        NI_QUAD_2(3);
        NI_QUAD_2(4);
        NI_FIVE_QUADS_2(5);
        NI_FIVE_QUADS_2(10);
        NI_FIVE_QUADS_2(15);
        e0 = _mm_sha1nexte_epu32(old0, e0_before);
        e1 = _mm_sha1nexte_epu32(old1, e1_before);
        abcd0 = _mm_add_epi32(abcd0, abcd0_before);
        abcd1 = _mm_add_epi32(abcd1, abcd1_before);
    }
    _mm_storeu_si128((__m128i *)state0, _mm_shuffle_epi32(abcd0, 0x1b));
    _mm_storeu_si128((__m128i *)state1, _mm_shuffle_epi32(abcd1, 0x1b));
    state0[4] = (uint32_t)_mm_extract_epi32(e0, 3);
    state1[4] = (uint32_t)_mm_extract_epi32(e1, 3);
}

/* ---------------------------------------------------------------- SHA-1: lanes, eight of AVX2 */

#define LANES 8
#define LANED(name) name##_8
#define TARGET NK_AVX2
#define VECTOR __m256i
#define LOAD(at) _mm256_loadu_si256((const __m256i *)(at))
#define STORE(at, value) _mm256_storeu_si256((__m256i *)(at), value)
#define ALL(word) _mm256_set1_epi32((int)(word))
#define ADD(x, y) _mm256_add_epi32(x, y)
#define ROTATED(x, bits) _mm256_or_si256(_mm256_slli_epi32(x, bits), _mm256_srli_epi32(x, 32 - (bits)))
#define XOR4(x, y, z, u) _mm256_xor_si256(_mm256_xor_si256(x, y), _mm256_xor_si256(z, u))
#define V_CHOOSE(x, y, z) _mm256_xor_si256(z, _mm256_and_si256(x, _mm256_xor_si256(y, z)))
#define V_PARITY(x, y, z) _mm256_xor_si256(x, _mm256_xor_si256(y, z))
#define V_MAJORITY(x, y, z) _mm256_or_si256(_mm256_and_si256(x, y), _mm256_and_si256(z, _mm256_or_si256(x, y)))

/* 64 bytes of each lane from offset_bytes, turned, so that w[t] holds word t of all eight lanes. */
NK_AVX2 static inline __attribute__((always_inline)) void load_turned_8(__m256i w[16], const uint8_t *const at[8],
                                                                        size_t offset_bytes) {
    const __m256i swap = _mm256_broadcastsi128_si256(_mm_set_epi64x(0x0c0d0e0f08090a0bLL, 0x0405060700010203LL));
    for (int half = 0; half < 16; half += 8) {
        __m256i u[8];
        for (int g = 0; g < 8; g += 4) {
            const __m256i r0 = LOAD(at[g] + offset_bytes + 4 * half), r1 = LOAD(at[g + 1] + offset_bytes + 4 * half);
            const __m256i r2 = LOAD(at[g + 2] + offset_bytes + 4 * half), r3 = LOAD(at[g + 3] + offset_bytes + 4 * half);
            const __m256i low01 = _mm256_unpacklo_epi32(r0, r1), high01 = _mm256_unpackhi_epi32(r0, r1);
            const __m256i low23 = _mm256_unpacklo_epi32(r2, r3), high23 = _mm256_unpackhi_epi32(r2, r3);
            u[g] = _mm256_unpacklo_epi64(low01, low23);
            u[g + 1] = _mm256_unpackhi_epi64(low01, low23);
            u[g + 2] = _mm256_unpacklo_epi64(high01, high23);
            u[g + 3] = _mm256_unpackhi_epi64(high01, high23);
        }
        for (int j = 0; j < 4; j++) { /* half q of u[g + j] is word 4q + j of lanes g..g+3 */
            w[half + j] = _mm256_shuffle_epi8(_mm256_permute2x128_si256(u[j], u[4 + j], 0x20), swap);
            w[half + 4 + j] = _mm256_shuffle_epi8(_mm256_permute2x128_si256(u[j], u[4 + j], 0x31), swap);
        }
    }
}

#include "sha1_lanes.h"

/* ---------------------------------------------------------------- SHA-1: lanes, sixteen of AVX-512 */

#define LANES 16
#define LANED(name) name##_16
#define TARGET NK_AVX512
#define VECTOR __m512i
#define LOAD(at) _mm512_loadu_si512(at)
#define STORE(at, value) _mm512_storeu_si512(at, value)
#define ALL(word) _mm512_set1_epi32((int)(word))
#define ADD(x, y) _mm512_add_epi32(x, y)
#define ROTATED(x, bits) _mm512_rol_epi32(x, bits)
#define XOR4(x, y, z, u) _mm512_xor_si512(_mm512_ternarylogic_epi32(x, y, z, 0x96), u)
#define V_CHOOSE(x, y, z) _mm512_ternarylogic_epi32(x, y, z, 0xca)
#define V_PARITY(x, y, z) _mm512_ternarylogic_epi32(x, y, z, 0x96)
#define V_MAJORITY(x, y, z) _mm512_ternarylogic_epi32(x, y, z, 0xe8)

/* 64 bytes of each lane from offset_bytes, turned, so that w[t] holds word t of all sixteen lanes. */
NK_AVX512 static inline __attribute__((always_inline)) void load_turned_16(__m512i w[16], const uint8_t *const at[16],
                                                                           size_t offset_bytes) {
    const __m512i swap = _mm512_broadcast_i32x4(_mm_set_epi64x(0x0c0d0e0f08090a0bLL, 0x0405060700010203LL));
    __m512i u[16];
    for (int g = 0; g < 16; g += 4) {
        const __m512i r0 = _mm512_loadu_si512(at[g] + offset_bytes), r1 = _mm512_loadu_si512(at[g + 1] + offset_bytes);
        const __m512i r2 = _mm512_loadu_si512(at[g + 2] + offset_bytes), r3 = _mm512_loadu_si512(at[g + 3] + offset_bytes);
        const __m512i low01 = _mm512_unpacklo_epi32(r0, r1), high01 = _mm512_unpackhi_epi32(r0, r1);
        const __m512i low23 = _mm512_unpacklo_epi32(r2, r3), high23 = _mm512_unpackhi_epi32(r2, r3);
        u[g] = _mm512_unpacklo_epi64(low01, low23);
        u[g + 1] = _mm512_unpackhi_epi64(low01, low23);
        u[g + 2] = _mm512_unpacklo_epi64(high01, high23);
        u[g + 3] = _mm512_unpackhi_epi64(high01, high23);
    }
    for (int j = 0; j < 4; j++) { /* quarter q of u[g + j] is word 4q + j of lanes g..g+3 */
        const __m512i near0 = _mm512_shuffle_i32x4(u[j], u[4 + j], 0x44), far0 = _mm512_shuffle_i32x4(u[j], u[4 + j], 0xee);
        const __m512i near8 = _mm512_shuffle_i32x4(u[8 + j], u[12 + j], 0x44);
        const __m512i far8 = _mm512_shuffle_i32x4(u[8 + j], u[12 + j], 0xee);
        w[j] = _mm512_shuffle_epi8(_mm512_shuffle_i32x4(near0, near8, 0x88), swap);
        w[4 + j] = _mm512_shuffle_epi8(_mm512_shuffle_i32x4(near0, near8, 0xdd), swap);
        w[8 + j] = _mm512_shuffle_epi8(_mm512_shuffle_i32x4(far0, far8, 0x88), swap);
        w[12 + j] = _mm512_shuffle_epi8(_mm512_shuffle_i32x4(far0, far8, 0xdd), swap);
    }
}

#include "sha1_lanes.h"

#endif

#endif

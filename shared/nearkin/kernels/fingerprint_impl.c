/* Fingerprints and check tags, in C. Invariant: see fingerprint_impl.h.
 *
 *  SHA-1     FIPS 180-4, section 6.1. One scheduler feeds up to 16 lanes, each hashing its own piece:
 *
 *      queue of pieces -> lane: body blocks -> one or two padding blocks -> digest, next piece
 *
 *            base     1 lane, portable C
 *            avx2     2 lanes of SHA-NI side by side (one alone waits on the latency of its own rounds), else portable C
 *            avx512   16 lanes, one in each 32-bit column of the registers (Gueron and Krasnov, "Simultaneous hashing of
 *                     multiple messages", 2012); the last few pieces go to SHA-NI
 *
 *  check tag docs/decisions/0002-check-tag.md: NH over blocks, a polynomial over the blocks, SipHash-2-4 over the result.
 */
#include "fingerprint_impl.h"

#include "siphash.h"

#include <string.h>

#if defined(__x86_64__) && defined(__GNUC__)
#define NK_X86 1
#include <cpuid.h>
#include <immintrin.h>
#endif

#if !defined(__SIZEOF_INT128__)
#error "the check tag's polynomial needs unsigned __int128, which every 64-bit gcc and clang has"
#endif

#define NK_LANES_MAX 16

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

void nk_cpu_use(int path) { cpu_path = path; }

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

/* ---------------------------------------------------------------- SHA-1: sixteen lanes of AVX-512 */

#define V_CHOOSE(x, y, z) _mm512_ternarylogic_epi32(x, y, z, 0xca)
#define V_PARITY(x, y, z) _mm512_ternarylogic_epi32(x, y, z, 0x96)
#define V_MAJORITY(x, y, z) _mm512_ternarylogic_epi32(x, y, z, 0xe8)
#define V_SCHEDULE(t)                                                                                                            \
    w[(t) & 15] = _mm512_rol_epi32(                                                                                              \
        _mm512_xor_si512(V_PARITY(w[((t) + 13) & 15], w[((t) + 8) & 15], w[((t) + 2) & 15]), w[(t) & 15]), 1)
#define V_ROUND(f, a, b, c, d, e, t)                                                                                             \
    do {                                                                                                                         \
        if ((t) >= 16)                                                                                                           \
            V_SCHEDULE(t);                                                                                                       \
        e = _mm512_add_epi32(_mm512_add_epi32(e, _mm512_add_epi32(w[(t) & 15], k)),                                              \
                             _mm512_add_epi32(f(b, c, d), _mm512_rol_epi32(a, 5)));                                              \
        b = _mm512_rol_epi32(b, 30);                                                                                             \
    } while (0)
#define V_FIVE_ROUNDS(f, t)                                                                                                      \
    V_ROUND(f, a, b, c, d, e, (t));                                                                                              \
    V_ROUND(f, e, a, b, c, d, (t) + 1);                                                                                          \
    V_ROUND(f, d, e, a, b, c, (t) + 2);                                                                                          \
    V_ROUND(f, c, d, e, a, b, (t) + 3);                                                                                          \
    V_ROUND(f, b, c, d, e, a, (t) + 4)
#define V_TWENTY_ROUNDS(f, t)                                                                                                    \
    V_FIVE_ROUNDS(f, (t));                                                                                                       \
    V_FIVE_ROUNDS(f, (t) + 5);                                                                                                   \
    V_FIVE_ROUNDS(f, (t) + 10);                                                                                                  \
    V_FIVE_ROUNDS(f, (t) + 15)

#define NK_AVX512 __attribute__((target("avx512f,avx512bw,avx2")))

/* Load 64 bytes of each lane and turn them, so that w[t] holds word t of all sixteen lanes. */
NK_AVX512 static inline __attribute__((always_inline)) void load_turned(__m512i w[16], const uint8_t *const at[16],
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

/* `state[i][lane]` is word i of that lane's state; every lane takes `blocks` blocks from its own address. */
NK_AVX512 static void sha1_sixteen(uint32_t state[5][NK_LANES_MAX], const uint8_t *const at[NK_LANES_MAX], size_t blocks) {
    __m512i s0 = _mm512_loadu_si512(state[0]), s1 = _mm512_loadu_si512(state[1]), s2 = _mm512_loadu_si512(state[2]);
    __m512i s3 = _mm512_loadu_si512(state[3]), s4 = _mm512_loadu_si512(state[4]);
    for (size_t block = 0; block < blocks; block++) {
        __m512i w[16], k;
        __m512i a = s0, b = s1, c = s2, d = s3, e = s4;
        load_turned(w, at, 64 * block);
        k = _mm512_set1_epi32((int)SHA1_K0);
        V_TWENTY_ROUNDS(V_CHOOSE, 0);
        k = _mm512_set1_epi32((int)SHA1_K1);
        V_TWENTY_ROUNDS(V_PARITY, 20);
        k = _mm512_set1_epi32((int)SHA1_K2);
        V_TWENTY_ROUNDS(V_MAJORITY, 40);
        k = _mm512_set1_epi32((int)SHA1_K3);
        V_TWENTY_ROUNDS(V_PARITY, 60);
        s0 = _mm512_add_epi32(s0, a);
        s1 = _mm512_add_epi32(s1, b);
        s2 = _mm512_add_epi32(s2, c);
        s3 = _mm512_add_epi32(s3, d);
        s4 = _mm512_add_epi32(s4, e);
    }
    _mm512_storeu_si512(state[0], s0);
    _mm512_storeu_si512(state[1], s1);
    _mm512_storeu_si512(state[2], s2);
    _mm512_storeu_si512(state[3], s3);
    _mm512_storeu_si512(state[4], s4);
}

#endif

/* ---------------------------------------------------------------- SHA-1: the scheduler */

/* A lane is idle, or hashes one piece: first the piece's whole blocks where they lie, then `padding`. */
typedef struct {
    const uint8_t *at;    /* next block */
    uint64_t blocks;      /* left at `at` */
    int64_t piece;        /* -1: idle */
    uint32_t piece_bytes;
    int in_padding;
    uint8_t padding[128]; /* last partial block, 0x80, zeros, length in bits */
} lane;

static const uint32_t sha1_start[5] = {0x67452301u, 0xefcdab89u, 0x98badcfeu, 0x10325476u, 0xc3d2e1f0u};

static void lane_take(lane *l, uint32_t state[5][NK_LANES_MAX], int column, const uint8_t *data, uint32_t data_bytes,
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
static void run_two(lane *lanes, uint32_t state[5][NK_LANES_MAX], int x, int y, uint64_t blocks) {
    uint32_t state_x[5], state_y[5];
    for (int i = 0; i < 5; i++) {
        state_x[i] = state[i][x];
        state_y[i] = state[i][y];
    }
#if defined(NK_X86)
    if (cpu_path >= NK_CPU_AVX2 && cpu_has_sha_ni)
        sha1_ni_two(state_x, lanes[x].at, state_y, lanes[y].at, blocks);
    else
#endif
    {
        sha1_portable(state_x, lanes[x].at, blocks);
        if (y != x)
            sha1_portable(state_y, lanes[y].at, blocks);
    }
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

static void run_all(lane *lanes, uint32_t state[5][NK_LANES_MAX], int busy_one, uint64_t blocks) {
#if defined(NK_X86)
    const uint8_t *at[NK_LANES_MAX];
    for (int i = 0; i < NK_LANES_MAX; i++) /* an idle lane repeats a busy one; nobody reads its state */
        at[i] = lanes[i].piece >= 0 ? lanes[i].at : lanes[busy_one].at;
    sha1_sixteen(state, at, blocks);
    for (int i = 0; i < NK_LANES_MAX; i++)
        if (lanes[i].piece >= 0) {
            lanes[i].at += 64 * blocks;
            lanes[i].blocks -= blocks;
        }
#else
    (void)lanes, (void)state, (void)busy_one, (void)blocks;
#endif
}

void nk_sha1_many(const uint8_t *payload, const uint64_t *offsets, const uint32_t *lengths, const int64_t *order,
                  size_t pieces, uint8_t *digests) {
    const int lane_count = cpu_path == NK_CPU_AVX512 ? NK_LANES_MAX : cpu_path == NK_CPU_AVX2 && cpu_has_sha_ni ? 2 : 1;
    /* With this many lanes busy or fewer, narrow code is faster: a busy lane of 16 brings 0.41 GB/s, a pair of
     * SHA-NI streams 1.9 GB/s, one portable stream 0.68 GB/s. */
    const int narrow_max = cpu_has_sha_ni ? 5 : 2;
    lane lanes[NK_LANES_MAX];
    uint32_t state[5][NK_LANES_MAX];
    size_t next = 0;
    memset(state, 0, sizeof state);
    for (int i = 0; i < NK_LANES_MAX; i++) {
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
        if (lane_count == NK_LANES_MAX && busy > narrow_max)
            run_all(lanes, state, longest, blocks);
        else if (second < 0)
            run_two(lanes, state, longest, longest, lanes[longest].blocks);
        else
            run_two(lanes, state, longest, second, lanes[second].blocks);
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

#define NK_AVX2 __attribute__((target("avx2")))

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

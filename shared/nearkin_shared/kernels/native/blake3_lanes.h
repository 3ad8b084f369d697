/* BLAKE3 compression in the 32-bit columns of a vector, one input a column (O'Connor et al., "BLAKE3", 2020, section 5.3).
 * Invariant: a column's answer depends on its own input alone.
 *
 * content_hasher_impl.c includes this once for each width, after defining LANES, LANED and TARGET.
 */

typedef uint32_t LANED(words) __attribute__((vector_size(4 * LANES)));

#define V_MIX(a, b, c, d, x, y)                                                                                                  \
    do {                                                                                                                         \
        a = a + b + x;                                                                                                           \
        d = V_ROTATE(d ^ a, 16);                                                                                                 \
        c = c + d;                                                                                                               \
        b = V_ROTATE(b ^ c, 12);                                                                                                 \
        a = a + b + y;                                                                                                           \
        d = V_ROTATE(d ^ a, 8);                                                                                                  \
        c = c + d;                                                                                                               \
        b = V_ROTATE(b ^ c, 7);                                                                                                  \
    } while (0)
#define V_ROTATE(x, bits) (((x) >> (bits)) | ((x) << (32 - (bits))))
#define V_ROUND(r)                                                                                                               \
    do {                                                                                                                         \
        V_MIX(v0, v4, v8, v12, m[ORDER[r][0]], m[ORDER[r][1]]);                                                                  \
        V_MIX(v1, v5, v9, v13, m[ORDER[r][2]], m[ORDER[r][3]]);                                                                  \
        V_MIX(v2, v6, v10, v14, m[ORDER[r][4]], m[ORDER[r][5]]);                                                                 \
        V_MIX(v3, v7, v11, v15, m[ORDER[r][6]], m[ORDER[r][7]]);                                                                 \
        V_MIX(v0, v5, v10, v15, m[ORDER[r][8]], m[ORDER[r][9]]);                                                                 \
        V_MIX(v1, v6, v11, v12, m[ORDER[r][10]], m[ORDER[r][11]]);                                                               \
        V_MIX(v2, v7, v8, v13, m[ORDER[r][12]], m[ORDER[r][13]]);                                                                \
        V_MIX(v3, v4, v9, v14, m[ORDER[r][14]], m[ORDER[r][15]]);                                                                \
    } while (0)

/* Turn LANES inputs of `blocks` blocks, `stride` bytes apart, into their chaining values. Input i has the counter counter + i * step. */
TARGET static void LANED(hash_lanes)(const uint8_t *data, size_t stride, size_t blocks, uint64_t counter, unsigned step,
                                     const input_flags *flags, uint32_t *values) {
    LANED(words) h[8], low, high;
    for (int word = 0; word < 8; word++)
        for (int lane = 0; lane < LANES; lane++) h[word][lane] = IV[word];
    for (int lane = 0; lane < LANES; lane++) {
        low[lane] = (uint32_t)(counter + (uint64_t)lane * step);
        high[lane] = (uint32_t)((counter + (uint64_t)lane * step) >> 32);
    }
    for (size_t block = 0; block < blocks; block++) {
        uint32_t turned[16][LANES];
        LANED(words) m[16];
        for (int lane = 0; lane < LANES; lane++) {
            const uint8_t *at = data + (size_t)lane * stride + BLOCK_BYTES * block;
            for (int word = 0; word < 16; word++) memcpy(&turned[word][lane], at + 4 * word, 4);
        }
        memcpy(m, turned, sizeof m);
        uint32_t flag = flags->every | (block == 0 ? flags->first : 0) | (block + 1 == blocks ? flags->last : 0);
        LANED(words) zero = low ^ low;
        LANED(words) v0 = h[0], v1 = h[1], v2 = h[2], v3 = h[3], v4 = h[4], v5 = h[5], v6 = h[6], v7 = h[7];
        LANED(words) v8 = zero + IV[0], v9 = zero + IV[1], v10 = zero + IV[2], v11 = zero + IV[3];
        LANED(words) v12 = low, v13 = high, v14 = zero + BLOCK_BYTES, v15 = zero + flag;
        V_ROUND(0);
        V_ROUND(1);
        V_ROUND(2);
        V_ROUND(3);
        V_ROUND(4);
        V_ROUND(5);
        V_ROUND(6);
        h[0] = v0 ^ v8;
        h[1] = v1 ^ v9;
        h[2] = v2 ^ v10;
        h[3] = v3 ^ v11;
        h[4] = v4 ^ v12;
        h[5] = v5 ^ v13;
        h[6] = v6 ^ v14;
        h[7] = v7 ^ v15;
    }
    for (int word = 0; word < 8; word++)
        for (int lane = 0; lane < LANES; lane++) values[8 * lane + word] = h[word][lane];
}

#undef V_MIX
#undef V_ROTATE
#undef V_ROUND
#undef LANES
#undef LANED
#undef TARGET

/* SHA-1 in the 32-bit columns of vector registers, one message a column (Gueron and Krasnov, "Simultaneous hashing of
 * multiple messages", 2012). Invariant: a column's answer depends on its own message alone.
 *
 * sha1_engines.h includes this once for each width, after defining LANES, LANED, TARGET, VECTOR, LOAD, STORE, ALL, ADD, ROTATED,
 * XOR4, V_CHOOSE, V_PARITY, V_MAJORITY and the function load_turned.
 */

/* As in the portable code the roles of a..e turn, so nothing is moved. All but `a` was there two rounds ago: it comes last, and a
 * round waits for a turn and one addition. gcc would add up in an order of its own, with one more to wait for. */
#define V_ROUND(f, a, b, c, d, e, t)                                                                                             \
    do {                                                                                                                         \
        if ((t) >= 16)                                                                                                           \
            w[(t) & 15] = ROTATED(XOR4(w[((t) + 13) & 15], w[((t) + 8) & 15], w[((t) + 2) & 15], w[(t) & 15]), 1);               \
        e = ADD(ADD(ADD(e, ADD(w[(t) & 15], k)), f(b, c, d)), ROTATED(a, 5));                                                    \
        b = ROTATED(b, 30);                                                                                                      \
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

/* `state[i][lane]` is word i of that lane's state; every lane takes `blocks` blocks from its own address. */
#if !defined(__clang__)
__attribute__((optimize("no-tree-reassoc")))
#endif
TARGET static void LANED(sha1_in_lanes)(uint32_t state[5][SHA1_LANES_MAX], const uint8_t *const at[SHA1_LANES_MAX], size_t blocks) {
    VECTOR s0 = LOAD(state[0]), s1 = LOAD(state[1]), s2 = LOAD(state[2]), s3 = LOAD(state[3]), s4 = LOAD(state[4]);
    for (size_t block = 0; block < blocks; block++) {
        VECTOR w[16], k;
        VECTOR a = s0, b = s1, c = s2, d = s3, e = s4;
        LANED(load_turned)(w, at, 64 * block);
        k = ALL(SHA1_K0);
        V_TWENTY_ROUNDS(V_CHOOSE, 0);
        k = ALL(SHA1_K1);
        V_TWENTY_ROUNDS(V_PARITY, 20);
        k = ALL(SHA1_K2);
        V_TWENTY_ROUNDS(V_MAJORITY, 40);
        k = ALL(SHA1_K3);
        V_TWENTY_ROUNDS(V_PARITY, 60);
        s0 = ADD(s0, a);
        s1 = ADD(s1, b);
        s2 = ADD(s2, c);
        s3 = ADD(s3, d);
        s4 = ADD(s4, e);
    }
    STORE(state[0], s0);
    STORE(state[1], s1);
    STORE(state[2], s2);
    STORE(state[3], s3);
    STORE(state[4], s4);
}

#undef V_ROUND
#undef V_FIVE_ROUNDS
#undef V_TWENTY_ROUNDS
#undef LANES
#undef LANED
#undef TARGET
#undef VECTOR
#undef LOAD
#undef STORE
#undef ALL
#undef ADD
#undef ROTATED
#undef XOR4
#undef V_CHOOSE
#undef V_PARITY
#undef V_MAJORITY

/* Rabin fingerprints, many runs side by side. Invariant: a lane reads exactly its run; the answers are the scalar ones.

   features_x86.h includes this once for each width, after defining LANES (bytes of a VECTOR), LANED, TARGET, LOAD,
   STORE, UNPACK, MAX, TRANSFORM_MAXIMA, ZEROS and the functions load_multipliers, load_column, push and roll.

     runs     lane 0  |--------------|               every run has as many windows as the others; where they do not
              lane 1           |--------------|      divide evenly the last runs overlap more, and no maximum notices
     turned   row r of the ring: byte r of every run. 16 rows at a time, four rounds of one interleaving
     planes   p[0..3]: byte 0 (lowest) to 3 of every lane's fingerprint. Times x^8 renames the planes; what leaves at
              the top and at the end of the window are two products of a byte and a constant

   So a step costs 8 products for LANES positions. Combining neighbours instead (windows of 8, 16, 48 bytes from halves)
   needs no turning but 64 products, and ran at 2.35 GB/s where this runs at 6.0 (docs/adr/0013).
*/

/* Rows first to first + 15 of all lanes into the ring. */
TARGET static inline __attribute__((always_inline)) void LANED(turn)(const uint8_t *const at[LANES], size_t first,
                                                                      uint8_t *ring, size_t mask) {
    VECTOR a[16], b[16];
    for (int i = 0; i < 16; i++) a[i] = LANED(load_column)(at, i, first);
    for (int round = 0; round < 2; round++) { /* each turns two bits of a byte's place from row to column */
        for (int i = 0; i < 8; i++) {
            b[2 * i] = UNPACK(lo, 8, a[i], a[8 + i]);
            b[2 * i + 1] = UNPACK(hi, 8, a[i], a[8 + i]);
        }
        for (int i = 0; i < 8; i++) {
            a[2 * i] = UNPACK(lo, 8, b[i], b[8 + i]);
            a[2 * i + 1] = UNPACK(hi, 8, b[i], b[8 + i]);
        }
    }
    for (int i = 0; i < 16; i++) STORE(ring + ((first + (size_t)i) & mask) * LANES, a[i]);
}

/* The fingerprints as words. Word e of 128-bit part q of words[v] is lane 16q + 4v + e. */
TARGET static inline __attribute__((always_inline)) void LANED(as_words)(const VECTOR p[4], VECTOR words[4]) {
    const VECTOR low_a = UNPACK(lo, 8, p[0], p[1]), low_b = UNPACK(hi, 8, p[0], p[1]);
    const VECTOR high_a = UNPACK(lo, 8, p[2], p[3]), high_b = UNPACK(hi, 8, p[2], p[3]);
    words[0] = UNPACK(lo, 16, low_a, high_a);
    words[1] = UNPACK(hi, 16, low_a, high_a);
    words[2] = UNPACK(lo, 16, low_b, high_b);
    words[3] = UNPACK(hi, 16, low_b, high_b);
}

/* Roll every lane over `rows` >= 16 bytes from its address. With `lane_maxima`: the largest fingerprint of each lane.
   With `transformed`: the maxima of the plan's transforms over all lanes. One of the two is NULL, known when inlined. */
TARGET static inline __attribute__((always_inline)) void LANED(run)(const features_plan *plan,
                                                                     const uint8_t *const at[LANES], size_t rows,
                                                                     uint32_t *lane_maxima, uint32_t *transformed) {
    _Alignas(64) uint8_t ring[RING_ROWS_MAX * LANES];
    _Alignas(64) uint32_t words[ROLL_POSITIONS];
    const size_t window = plan->window_bytes, mask = ring_rows(plan->window_bytes) - 1;
    size_t row = 0, held = 0;
    LANED(multipliers) by;
    VECTOR p[4], best[4], now[4];
    LANED(load_multipliers)(&by, &plan->pop_by);
    for (int i = 0; i < 4; i++) p[i] = best[i] = ZEROS;
    if (transformed) memset(transformed, 0, plan->features * sizeof *transformed);
    while (row < rows) {
        /* The last turn ends at the end of the runs: what it repeats is written as it was, and not rolled again. */
        const size_t first = row + TURNED_BYTES <= rows ? row : rows - TURNED_BYTES, end = first + TURNED_BYTES;
        LANED(turn)(at, first, ring, mask);
        for (; row < end; row++) {
            const VECTOR next = LOAD(ring + (row & mask) * LANES);
            if (row < window) {
                LANED(push)(&by, p, next);
                if (row + 1 < window) continue;
            } else {
                LANED(roll)(&by, p, next, LOAD(ring + ((row - window) & mask) * LANES));
            }
            LANED(as_words)(p, now);
            if (lane_maxima) {
                for (int v = 0; v < 4; v++) best[v] = MAX(best[v], now[v]);
            } else {
                for (int v = 0; v < 4; v++) STORE(words + held + LANES / 4 * v, now[v]);
                held += LANES;
                if (held == ROLL_POSITIONS) {
                    TRANSFORM_MAXIMA(plan, words, held, transformed);
                    held = 0;
                }
            }
        }
    }
    if (lane_maxima) {
        for (int v = 0; v < 4; v++) STORE(words + LANES / 4 * v, best[v]);
        for (int lane = 0; lane < LANES; lane++)
            lane_maxima[lane] = words[LANES / 4 * (lane / 4 % 4) + lane / 16 * 4 + lane % 4];
    } else if (held) {
        TRANSFORM_MAXIMA(plan, words, held, transformed);
    }
}

/* False where a run would be shorter than one turn. */
TARGET static int LANED(finesse_features)(const features_plan *plan, const uint8_t *chunk, size_t sub_bytes,
                                          uint32_t *found) {
    const size_t positions = sub_bytes - plan->window_bytes + 1;
    for (uint32_t f = 0; f < plan->features; f += LANES) {
        const uint32_t many = plan->features - f < LANES ? plan->features - f : LANES, runs = LANES / many;
        const size_t step = (positions + runs - 1) / runs, rows = step + plan->window_bytes - 1;
        const uint8_t *at[LANES];
        uint32_t maxima[LANES];
        if (rows < TURNED_BYTES) return 0;
        for (uint32_t lane = 0; lane < LANES; lane++) { /* lanes left over repeat the last feature's */
            const uint32_t which = lane < many * runs ? lane : many * runs - 1;
            const size_t start = which % runs * step;
            at[lane] = chunk + (f + which / runs) * sub_bytes + (start < positions - step ? start : positions - step);
        }
        LANED(run)(plan, at, rows, maxima, NULL);
        for (uint32_t i = 0; i < many; i++) {
            uint32_t largest = 0;
            for (uint32_t j = i * runs; j < (i + 1) * runs; j++) largest = maxima[j] > largest ? maxima[j] : largest;
            found[f + i] = largest;
        }
    }
    return 1;
}

TARGET static int LANED(ntransform_features)(const features_plan *plan, const uint8_t *chunk, size_t bytes,
                                             uint32_t *found) {
    const size_t positions = bytes - plan->window_bytes + 1, step = (positions + LANES - 1) / LANES;
    const size_t rows = step + plan->window_bytes - 1;
    const uint8_t *at[LANES];
    if (rows < TURNED_BYTES) return 0;
    for (size_t lane = 0; lane < LANES; lane++) {
        at[lane] = chunk + (lane * step < positions - step ? lane * step : positions - step);
    }
    LANED(run)(plan, at, rows, NULL, found);
    return 1;
}

#undef LANES
#undef LANED
#undef TARGET
#undef VECTOR
#undef ZEROS
#undef LOAD
#undef STORE
#undef UNPACK
#undef MAX
#undef TRANSFORM_MAXIMA

/* SipHash-c-d. Invariant: bytes in, 64 bits out, the same on every machine; both round counts are compile-time constants.
 *
 * Source: Aumasson and Bernstein, "SipHash: a fast short-input PRF", INDOCRYPT 2012, section 2. 2-4 closes the check tag
 * (fingerprint_impl.c), 1-3 places keys in the name table (_fingerprint_table.pyx), where only flooding has to be stopped.
 */
#ifndef NEARKIN_SIPHASH_H
#define NEARKIN_SIPHASH_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

static inline uint64_t nk_load64le(const void *at) {
    uint64_t word;
    memcpy(&word, at, 8);
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    word = __builtin_bswap64(word);
#endif
    return word;
}

static inline uint64_t nk_rotl64(uint64_t word, int bits) { return (word << bits) | (word >> (64 - bits)); }

static inline void nk_sip_rounds(uint64_t v[4], int rounds) {
    for (int i = 0; i < rounds; i++) {
        v[0] += v[1];
        v[2] += v[3];
        v[1] = nk_rotl64(v[1], 13) ^ v[0];
        v[3] = nk_rotl64(v[3], 16) ^ v[2];
        v[0] = nk_rotl64(v[0], 32);
        v[2] += v[1];
        v[0] += v[3];
        v[1] = nk_rotl64(v[1], 17) ^ v[2];
        v[3] = nk_rotl64(v[3], 21) ^ v[0];
        v[2] = nk_rotl64(v[2], 32);
    }
}

static inline void nk_sip_word(uint64_t v[4], uint64_t word, int c_rounds) {
    v[3] ^= word;
    nk_sip_rounds(v, c_rounds);
    v[0] ^= word;
}

static inline void nk_sip_start(uint64_t v[4], uint64_t key_low, uint64_t key_high) {
    v[0] = key_low ^ UINT64_C(0x736f6d6570736575);
    v[1] = key_high ^ UINT64_C(0x646f72616e646f6d);
    v[2] = key_low ^ UINT64_C(0x6c7967656e657261);
    v[3] = key_high ^ UINT64_C(0x7465646279746573);
}

/* `last` is the final word: the total length in its top byte, the bytes after the last full word below it. */
static inline uint64_t nk_sip_finish(uint64_t v[4], uint64_t last, int c_rounds, int d_rounds) {
    nk_sip_word(v, last, c_rounds);
    v[2] ^= 0xff;
    nk_sip_rounds(v, d_rounds);
    return v[0] ^ v[1] ^ v[2] ^ v[3];
}

static inline uint64_t nk_siphash(const unsigned char *text, size_t text_bytes, uint64_t key_low, uint64_t key_high,
                                  int c_rounds, int d_rounds) {
    uint64_t v[4];
    uint64_t last = (uint64_t)text_bytes << 56;
    size_t at = 0;
    nk_sip_start(v, key_low, key_high);
    for (; at + 8 <= text_bytes; at += 8)
        nk_sip_word(v, nk_load64le(text + at), c_rounds);
    for (size_t i = 0; at + i < text_bytes; i++)
        last |= (uint64_t)text[at + i] << (8 * i);
    return nk_sip_finish(v, last, c_rounds, d_rounds);
}

static inline uint64_t nk_siphash13(const unsigned char *text, size_t text_bytes, uint64_t key_low, uint64_t key_high) {
    return nk_siphash(text, text_bytes, key_low, key_high, 1, 3);
}

static inline uint64_t nk_siphash24(const unsigned char *text, size_t text_bytes, uint64_t key_low, uint64_t key_high) {
    return nk_siphash(text, text_bytes, key_low, key_high, 2, 4);
}

#endif

/* Adler-32 (RFC 1950, section 8.2). Invariant: with and without SSE2 it is the same number. */

#ifndef NEARKIN_ADLER32_H
#define NEARKIN_ADLER32_H

#include <stddef.h>
#include <stdint.h>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#define ADLER_PRIME 65521U
/* Both sums stay below 2^32 for 5552 bytes; a multiple of 16 so that only the last block has a scalar tail. */
#define ADLER_BLOCK_BYTES 5552U

static uint32_t adler32_of(const uint8_t *bytes, size_t length) {
  uint32_t sum = 1;
  uint32_t sum_of_sums = 0;
  while (length > 0) {
    size_t block = length < ADLER_BLOCK_BYTES ? length : ADLER_BLOCK_BYTES;
    length -= block;
#if defined(__SSE2__)
    size_t steps = block / 16;
    if (steps > 0) {
      const __m128i zero = _mm_setzero_si128();
      const __m128i weights_low = _mm_set_epi16(9, 10, 11, 12, 13, 14, 15, 16);
      const __m128i weights_high = _mm_set_epi16(1, 2, 3, 4, 5, 6, 7, 8);
      __m128i sums = zero;     /* bytes so far */
      __m128i earlier = zero;  /* `sums` before each step, added up: each counts 16 times */
      __m128i weighted = zero; /* bytes within their step, weighted 16 down to 1 */
      block -= steps * 16;
      sum_of_sums = (uint32_t)((sum_of_sums + (uint64_t)sum * 16 * steps) % ADLER_PRIME);
      for (; steps > 0; steps--, bytes += 16) {
        const __m128i step = _mm_loadu_si128((const __m128i *)(const void *)bytes);
        earlier = _mm_add_epi32(earlier, sums);
        sums = _mm_add_epi32(sums, _mm_sad_epu8(step, zero));
        weighted = _mm_add_epi32(weighted, _mm_madd_epi16(_mm_unpacklo_epi8(step, zero), weights_low));
        weighted = _mm_add_epi32(weighted, _mm_madd_epi16(_mm_unpackhi_epi8(step, zero), weights_high));
      }
      uint32_t lanes[4];
      _mm_storeu_si128((__m128i *)(void *)lanes, sums);
      sum = (sum + lanes[0] + lanes[2]) % ADLER_PRIME;
      _mm_storeu_si128((__m128i *)(void *)lanes, earlier);
      uint64_t total = ((uint64_t)lanes[0] + lanes[2]) * 16;
      _mm_storeu_si128((__m128i *)(void *)lanes, weighted);
      total += (uint64_t)lanes[0] + lanes[1] + lanes[2] + lanes[3];
      sum_of_sums = (uint32_t)((sum_of_sums + total) % ADLER_PRIME);
    }
#endif
    for (; block > 0; block--) {
      sum += *bytes++;
      sum_of_sums += sum;
    }
    sum %= ADLER_PRIME;
    sum_of_sums %= ADLER_PRIME;
  }
  return (sum_of_sums << 16) | sum;
}

#endif

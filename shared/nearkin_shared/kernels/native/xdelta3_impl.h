/* xdelta3 kernel. Invariant: encoding is the xdelta3 library's; decoding is ours, allocates nothing and never leaves
   its three buffers, whatever the delta says. */

#ifndef NEARKIN_XDELTA3_IMPL_H
#define NEARKIN_XDELTA3_IMPL_H

#include <stddef.h>
#include <stdint.h>

/* What one call found. Every value above NK_XD3_NO_MEMORY is a reason to call a delta corrupt. */
typedef enum {
  NK_XD3_OK = 0,
  NK_XD3_OVER_LIMIT, /* encode: the delta would be longer than its limit */
  NK_XD3_LIBRARY,    /* encode: the library gave up; see nk_xd3_encoder_message */
  NK_XD3_NO_MEMORY,
  NK_XD3_HEADER_CUT,
  NK_XD3_NOT_VCDIFF,
  NK_XD3_HEADER_BITS,
  NK_XD3_SECONDARY,
  NK_XD3_CODE_TABLE,
  NK_XD3_APP_HEADER_CUT,
  NK_XD3_WINDOW_BITS,
  NK_XD3_TWO_SEGMENTS,
  NK_XD3_SEGMENT_RANGE,
  NK_XD3_WINDOW_CUT,
  NK_XD3_WINDOW_LONG,
  NK_XD3_SECTIONS,
  NK_XD3_NUMBER_CUT,
  NK_XD3_NUMBER_BIG,
  NK_XD3_WRITES_PAST,
  NK_XD3_DATA_CUT,
  NK_XD3_ADDRESS_CUT,
  NK_XD3_ADDRESS_RANGE,
  NK_XD3_WINDOW_SHORT,
  NK_XD3_UNUSED_BYTES,
  NK_XD3_CHECKSUM,
  NK_XD3_TARGET_SHORT,
  NK_XD3_RESULTS /* how many results there are */
} nk_xd3_result;

typedef struct nk_xd3_encoder nk_xd3_encoder;

/* Fill the code tables. Call once, before any other call and before any other thread may call. */
void nk_xd3_init(void);

/* Return why a delta is corrupt, as the end of "the delta of pair 3: ...". */
const char *nk_xd3_reason(int result);

nk_xd3_encoder *nk_xd3_encoder_new(void);
void nk_xd3_encoder_free(nk_xd3_encoder *encoder);

/* Append the delta that turns base into target to the encoder's output and set *delta_bytes; on NK_XD3_OVER_LIMIT
   nothing is appended. level is 1 to 9. */
int nk_xd3_encode(nk_xd3_encoder *encoder, const uint8_t *target, uint32_t target_bytes, const uint8_t *base,
                  uint32_t base_bytes, int level, uint32_t limit_bytes, uint32_t *delta_bytes);

/* Return all deltas appended so far; valid until the next encode. */
const uint8_t *nk_xd3_encoder_output(const nk_xd3_encoder *encoder, size_t *output_bytes);
const char *nk_xd3_encoder_message(const nk_xd3_encoder *encoder);

/* Decode one delta into exactly target_bytes bytes of target, which overlaps neither delta nor base. */
int nk_xd3_decode(const uint8_t *delta, size_t delta_bytes, const uint8_t *base, size_t base_bytes, uint8_t *target,
                  size_t target_bytes);

#endif

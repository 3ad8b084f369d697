/* VCDIFF decoding (RFC 3284). Invariant: it allocates nothing and never leaves its three buffers, whatever the delta
   says. Included by xdelta3_impl.c alone.

   Why the library does not decode here: it sizes its buffers from numbers in the delta (up to 64 MiB a window), refuses
   VCD_TARGET, checks `position + size` in arithmetic that wraps, and copies every target once more. RFC 3284 without
   secondary compression is short enough to check line by line, and it decodes straight into the caller's array. */

#ifndef NEARKIN_VCDIFF_DECODING_H
#define NEARKIN_VCDIFF_DECODING_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "adler32.h"
#include "xdelta3_impl.h"

enum { OP_NONE = 0, OP_ADD, OP_RUN, OP_COPY };

typedef struct {
  uint8_t kind;
  uint8_t bytes; /* 0: a number in the instruction section tells */
  uint8_t mode;  /* of a copy's address */
} half;

typedef struct {
  half halves[2];
} operation;

static operation code_table[256]; /* the default one, section 5.6; filled by nk_xd3_init, then only read */

#define NEAR_SLOTS 4
#define SAME_SLOTS (3 * 256)
#define MODE_HERE 1
#define MODE_NEAR 2
#define MODE_SAME (MODE_NEAR + NEAR_SLOTS)
#define MODES (MODE_SAME + 3)

static void set_operation(int *code, half first, half second) {
  code_table[*code].halves[0] = first;
  code_table[*code].halves[1] = second;
  *code += 1;
}

static half make_half(int kind, int bytes, int mode) {
  half made = {(uint8_t)kind, (uint8_t)bytes, (uint8_t)mode};
  return made;
}

void nk_xd3_init(void) {
  const half none = make_half(OP_NONE, 0, 0);
  int code = 0;
  set_operation(&code, make_half(OP_RUN, 0, 0), none);
  for (int bytes = 0; bytes <= 17; bytes++) {
    set_operation(&code, make_half(OP_ADD, bytes, 0), none);
  }
  for (int mode = 0; mode < MODES; mode++) {
    set_operation(&code, make_half(OP_COPY, 0, mode), none);
    for (int bytes = 4; bytes <= 18; bytes++) {
      set_operation(&code, make_half(OP_COPY, bytes, mode), none);
    }
  }
  for (int mode = 0; mode < MODES; mode++) {
    for (int added = 1; added <= 4; added++) {
      for (int copied = 4; copied <= (mode < MODE_SAME ? 6 : 4); copied++) {
        set_operation(&code, make_half(OP_ADD, added, 0), make_half(OP_COPY, copied, mode));
      }
    }
  }
  for (int mode = 0; mode < MODES; mode++) {
    set_operation(&code, make_half(OP_COPY, 4, mode), make_half(OP_ADD, 1, 0));
  }
  (void)xd3_rfc3284_code_table(); /* the library fills its own on first use, without a lock */
}

const char *nk_xd3_reason(int result) {
  static const char *const reasons[NK_XD3_RESULTS] = {
      [NK_XD3_HEADER_CUT] = "header is cut short",
      [NK_XD3_NOT_VCDIFF] = "not VCDIFF version 0",
      [NK_XD3_HEADER_BITS] = "unknown header bits",
      [NK_XD3_SECONDARY] = "secondary compression is not supported",
      [NK_XD3_CODE_TABLE] = "an own code table is not supported",
      [NK_XD3_APP_HEADER_CUT] = "application header is cut short",
      [NK_XD3_WINDOW_BITS] = "unknown window bits",
      [NK_XD3_TWO_SEGMENTS] = "a window names two source segments",
      [NK_XD3_SEGMENT_RANGE] = "source segment is outside its source",
      [NK_XD3_WINDOW_CUT] = "window is cut short",
      [NK_XD3_WINDOW_LONG] = "decodes to more than the target's length",
      [NK_XD3_SECTIONS] = "section lengths do not add up to the window's",
      [NK_XD3_NUMBER_CUT] = "number is cut short",
      [NK_XD3_NUMBER_BIG] = "number exceeds 32 bits",
      [NK_XD3_WRITES_PAST] = "instruction writes past its window",
      [NK_XD3_DATA_CUT] = "data section is too short",
      [NK_XD3_ADDRESS_CUT] = "address section is too short",
      [NK_XD3_ADDRESS_RANGE] = "copy address is at or after its own position",
      [NK_XD3_WINDOW_SHORT] = "instructions end before the window is full",
      [NK_XD3_UNUSED_BYTES] = "a section has bytes left over",
      [NK_XD3_CHECKSUM] = "checksum does not agree (wrong base, or damaged)",
      [NK_XD3_TARGET_SHORT] = "decodes to less than the target's length",
  };
  const char *reason = result >= 0 && result < NK_XD3_RESULTS ? reasons[result] : NULL;
  return reason != NULL ? reason : "unknown result";
}

typedef struct {
  const uint8_t *at;
  const uint8_t *end;
} span;

static size_t left(const span *from) { return (size_t)(from->end - from->at); }

/* Read a base-128 number, most significant digits first (section 2). Leading zero digits are legal. */
static inline int read_number(span *from, uint32_t *number) {
  uint64_t value = 0;
  for (;;) {
    if (from->at == from->end) {
      return NK_XD3_NUMBER_CUT;
    }
    const uint8_t digit = *from->at++;
    value = (value << 7) | (digit & 127U);
    if (value > UINT32_MAX) {
      return NK_XD3_NUMBER_BIG;
    }
    if ((digit & 128U) == 0) {
      *number = (uint32_t)value;
      return NK_XD3_OK;
    }
  }
}

#define READ(from, number)                           \
  do {                                               \
    const int read_result = read_number(from, number); \
    if (read_result != NK_XD3_OK) {                  \
      return read_result;                            \
    }                                                \
  } while (0)

/* Copy within one buffer, where the copy may read what it has just written (section 3); each round doubles the run. */
static inline void copy_forward(uint8_t *to, const uint8_t *from, size_t length) {
  while (length > 0) {
    const size_t ready = (size_t)(to - from);
    const size_t round = length < ready ? length : ready;
    memcpy(to, from, round);
    to += round;
    length -= round;
  }
}

typedef struct {
  uint32_t nears[NEAR_SLOTS];
  uint32_t sames[SAME_SLOTS];
  unsigned next_near;
} address_cache;

/* Read a copy's address (section 5.3); `here` counts the source segment and what the window holds so far. */
static inline int read_address(span *addresses, address_cache *cache, unsigned mode, uint64_t here, uint64_t *address) {
  uint64_t found;
  if (mode < MODE_SAME) {
    uint32_t number;
    if (addresses->at == addresses->end) {
      return NK_XD3_ADDRESS_CUT;
    }
    READ(addresses, &number);
    if (mode >= MODE_NEAR) {
      found = (uint64_t)cache->nears[mode - MODE_NEAR] + number;
    } else if (mode == MODE_HERE) {
      if (number > here) {
        return NK_XD3_ADDRESS_RANGE;
      }
      found = here - number;
    } else {
      found = number;
    }
  } else {
    if (addresses->at == addresses->end) {
      return NK_XD3_ADDRESS_CUT;
    }
    found = cache->sames[(mode - MODE_SAME) * 256U + *addresses->at++];
  }
  if (found >= here) {
    return NK_XD3_ADDRESS_RANGE;
  }
  cache->nears[cache->next_near] = (uint32_t)found; /* here, and so found, is below 2^32: both lengths are */
  cache->next_near = (cache->next_near + 1) % NEAR_SLOTS;
  cache->sames[found % SAME_SLOTS] = (uint32_t)found;
  *address = found;
  return NK_XD3_OK;
}

/* Fill one window from its three sections. The segment never overlaps the window. */
static int run_window(span data, span codes, span addresses, const uint8_t *segment, size_t segment_bytes,
                      uint8_t *window, size_t window_bytes) {
  address_cache cache;
  memset(&cache, 0, sizeof cache);
  size_t written = 0;
  while (codes.at != codes.end) {
    const operation *const both = &code_table[*codes.at++];
    for (int part = 0; part < 2; part++) {
      const half *const one = &both->halves[part];
      if (one->kind == OP_NONE) {
        break; /* only second halves are empty in the default table */
      }
      uint32_t length = one->bytes;
      if (length == 0) {
        READ(&codes, &length);
      }
      if (length > window_bytes - written) {
        return NK_XD3_WRITES_PAST;
      }
      if (one->kind == OP_COPY) {
        uint64_t address;
        const int result = read_address(&addresses, &cache, one->mode, (uint64_t)segment_bytes + written, &address);
        if (result != NK_XD3_OK) {
          return result;
        }
        if (address >= segment_bytes) {
          copy_forward(window + written, window + (address - segment_bytes), length);
        } else {
          const size_t in_segment = segment_bytes - (size_t)address;
          const size_t first = length < in_segment ? length : in_segment;
          memcpy(window + written, segment + address, first);
          copy_forward(window + written + first, window, length - first); /* segment and window are one string */
        }
      } else if (one->kind == OP_ADD) {
        if (length > left(&data)) {
          return NK_XD3_DATA_CUT;
        }
        if (length > 0) {
          memcpy(window + written, data.at, length);
        }
        data.at += length;
      } else {
        if (data.at == data.end) {
          return NK_XD3_DATA_CUT;
        }
        if (length > 0) {
          memset(window + written, *data.at, length);
        }
        data.at += 1;
      }
      written += length;
    }
  }
  if (written != window_bytes) {
    return NK_XD3_WINDOW_SHORT;
  }
  return data.at == data.end && addresses.at == addresses.end ? NK_XD3_OK : NK_XD3_UNUSED_BYTES;
}

/* Decode the next window of `rest` (section 4.2) to target + *decoded and add its length to *decoded. */
static int decode_window(span *rest, const uint8_t *base, size_t base_bytes, uint8_t *target, size_t target_bytes,
                         size_t *decoded) {
  const uint8_t *segment = base;
  uint32_t segment_bytes = 0;
  const uint8_t bits = *rest->at++;
  if ((bits & ~(VCD_SOURCE | VCD_TARGET | VCD_ADLER32)) != 0) {
    return NK_XD3_WINDOW_BITS;
  }
  if ((bits & VCD_SRCORTGT) == VCD_SRCORTGT) {
    return NK_XD3_TWO_SEGMENTS;
  }
  if ((bits & VCD_SRCORTGT) != 0) {
    const size_t whole_bytes = (bits & VCD_SOURCE) != 0 ? base_bytes : *decoded;
    uint32_t segment_offset;
    READ(rest, &segment_bytes);
    READ(rest, &segment_offset);
    if (segment_bytes > whole_bytes || segment_offset > whole_bytes - segment_bytes) {
      return NK_XD3_SEGMENT_RANGE;
    }
    segment = ((bits & VCD_SOURCE) != 0 ? base : target) + segment_offset;
  }

  uint32_t encoding_bytes;
  READ(rest, &encoding_bytes);
  if (encoding_bytes > left(rest)) {
    return NK_XD3_WINDOW_CUT;
  }
  span body = {rest->at, rest->at + encoding_bytes};
  rest->at = body.end;

  uint32_t window_bytes, data_bytes, codes_bytes, addresses_bytes;
  READ(&body, &window_bytes);
  if (window_bytes > target_bytes - *decoded) {
    return NK_XD3_WINDOW_LONG;
  }
  if (body.at == body.end) {
    return NK_XD3_WINDOW_CUT;
  }
  if (*body.at++ != 0) {
    return NK_XD3_SECONDARY;
  }
  READ(&body, &data_bytes);
  READ(&body, &codes_bytes);
  READ(&body, &addresses_bytes);
  uint32_t checksum = 0;
  if ((bits & VCD_ADLER32) != 0) {
    if (left(&body) < 4) {
      return NK_XD3_WINDOW_CUT;
    }
    checksum = (uint32_t)body.at[0] << 24 | (uint32_t)body.at[1] << 16 | (uint32_t)body.at[2] << 8 | body.at[3];
    body.at += 4;
  }
  if ((uint64_t)data_bytes + codes_bytes + addresses_bytes != left(&body)) {
    return NK_XD3_SECTIONS;
  }
  const span data = {body.at, body.at + data_bytes};
  const span codes = {data.end, data.end + codes_bytes};
  const span addresses = {codes.end, body.end};

  uint8_t *const window = target + *decoded;
  const int result = run_window(data, codes, addresses, segment, segment_bytes, window, window_bytes);
  if (result != NK_XD3_OK) {
    return result;
  }
  if ((bits & VCD_ADLER32) != 0 && adler32_of(window, window_bytes) != checksum) {
    return NK_XD3_CHECKSUM;
  }
  *decoded += window_bytes;
  return NK_XD3_OK;
}

int nk_xd3_decode(const uint8_t *delta, size_t delta_bytes, const uint8_t *base, size_t base_bytes, uint8_t *target,
                  size_t target_bytes) {
  static const uint8_t magic[4] = {0xD6, 0xC3, 0xC4, 0x00};
  if (delta_bytes < 5) {
    return NK_XD3_HEADER_CUT;
  }
  if (memcmp(delta, magic, sizeof magic) != 0) {
    return NK_XD3_NOT_VCDIFF;
  }
  const uint8_t bits = delta[4];
  if ((bits & ~(VCD_SECONDARY | VCD_CODETABLE | VCD_APPHEADER)) != 0) {
    return NK_XD3_HEADER_BITS;
  }
  if ((bits & VCD_SECONDARY) != 0) {
    return NK_XD3_SECONDARY;
  }
  if ((bits & VCD_CODETABLE) != 0) {
    return NK_XD3_CODE_TABLE;
  }
  span rest = {delta + 5, delta + delta_bytes};
  if ((bits & VCD_APPHEADER) != 0) {
    uint32_t app_header_bytes;
    READ(&rest, &app_header_bytes);
    if (app_header_bytes > left(&rest)) {
      return NK_XD3_APP_HEADER_CUT;
    }
    rest.at += app_header_bytes;
  }
  size_t decoded = 0;
  while (rest.at != rest.end) {
    const int result = decode_window(&rest, base, base_bytes, target, target_bytes, &decoded);
    if (result != NK_XD3_OK) {
      return result;
    }
  }
  return decoded == target_bytes ? NK_XD3_OK : NK_XD3_TARGET_SHORT;
}

#endif

/* xdelta3 kernel. Invariant: encoding is the xdelta3 library's; decoding is ours, allocates nothing and never leaves
   its three buffers, whatever the delta says.

   Why the library does not decode here: it sizes its buffers from numbers in the delta (up to 64 MiB a window), refuses
   VCD_TARGET, checks `position + size` in arithmetic that wraps, and copies every target once more. RFC 3284 without
   secondary compression is short enough to check line by line, and it decodes straight into the caller's array. */

#include "xdelta3_impl.h"

#include <errno.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

/* ---- the library ------------------------------------------------------------------------------------------------ */

#define SIZEOF_SIZE_T __SIZEOF_SIZE_T__
#define SIZEOF_UNSIGNED_INT __SIZEOF_INT__
#define SIZEOF_UNSIGNED_LONG __SIZEOF_LONG__
#define SIZEOF_UNSIGNED_LONG_LONG __SIZEOF_LONG_LONG__

/* 32-bit sizes and offsets: pairs are at most 16 MiB, and the two hash tables, cleared for every pair, are half as
   large as with 64 bits. */
#define XD3_USE_LARGEFILE64 0
#define XD3_USE_LARGESIZET 0
/* 4 KiB pages instead of 16: a pair of chunks needs five, and the arena then stays in the first-level cache's reach. */
#define XD3_ALLOCSIZE (1U << 12)
#define XD3_ENCODER 1
#define XD3_MAIN 0
#define XD3_DEBUG 0
#define XD3_BUILD_SOFT 0
#define SECONDARY_DJW 0
#define SECONDARY_FGK 0
#define SECONDARY_LZMA 0
#define VCDIFF_TOOLS 0
#define REGRESSION_TEST 0
#define NOT_MAIN 0
/* The library then reads words where they lie, which C leaves undefined and x86 does: 103,000 encodes of 8 KiB a second
   in place of 82,000. Sanitizers see it read bytes. */
#if (!defined(__x86_64__) && !defined(__i386__)) || defined(__SANITIZE_ADDRESS__)
#define UNALIGNED_OK 0
#endif

#if defined(__GNUC__)
#pragma GCC visibility push(hidden)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-function"
#pragma GCC diagnostic ignored "-Wunused-parameter"
#pragma GCC diagnostic ignored "-Wunused-variable"
#pragma GCC diagnostic ignored "-Wunused-but-set-variable"
#pragma GCC diagnostic ignored "-Wsign-compare"
#pragma GCC diagnostic ignored "-Wimplicit-fallthrough"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#undef _POSIX_SOURCE /* the library defines its own; every system header it needs is above, outside `hidden` */
#include "xdelta3.c"
#if defined(__GNUC__)
#pragma GCC diagnostic pop
#endif

/* ---- Adler-32 (RFC 1950, section 8.2) --------------------------------------------------------------------------- */

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

/* ---- encoding --------------------------------------------------------------------------------------------------- */

/* The library allocates a dozen blocks a pair. They come from one arena that is rewound, not freed, between pairs; what
   does not fit is taken from malloc, and the arena is made that much larger before the next pair. */
typedef struct spill {
  struct spill *next;
} spill;

#define SPILL_HEADER_BYTES 64 /* keeps what follows on its own cache line */

struct nk_xd3_encoder {
  uint8_t *arena;
  size_t arena_bytes;
  size_t arena_used;
  size_t spilled_bytes;
  spill *spills;
  uint8_t *output;
  size_t output_capacity;
  size_t output_used;
  const char *message;
};

/* Fits two 8 KiB chunks at level 1: 32 KiB small table, 5 output pages, tables and lists. */
#define ARENA_FIRST_BYTES ((size_t)128 << 10)
#define OUTPUT_FIRST_BYTES ((size_t)64 << 10)
/* Above it the queue of instructions gets the command's fixed 32768 entries in place of one that grows: a growing one
   may take 12 bytes for each target byte, 12 MiB here. */
#define UNLIMITED_QUEUE_TARGET_BYTES (1U << 20)

static void *arena_alloc(void *opaque, size_t items, usize_t item_bytes) {
  nk_xd3_encoder *encoder = opaque;
  size_t wanted = (items * (size_t)item_bytes + 63) & ~(size_t)63;
  if (wanted <= encoder->arena_bytes - encoder->arena_used) {
    void *block = encoder->arena + encoder->arena_used;
    encoder->arena_used += wanted;
    return block;
  }
  spill *extra = malloc(SPILL_HEADER_BYTES + wanted);
  if (extra == NULL) {
    return NULL;
  }
  extra->next = encoder->spills;
  encoder->spills = extra;
  encoder->spilled_bytes += wanted;
  return (uint8_t *)extra + SPILL_HEADER_BYTES;
}

static void arena_keep(void *opaque, void *address) {
  (void)opaque;
  (void)address;
}

static void arena_rewind(nk_xd3_encoder *encoder) {
  encoder->arena_used = 0;
  if (encoder->spills == NULL) {
    return;
  }
  while (encoder->spills != NULL) {
    spill *next = encoder->spills->next;
    free(encoder->spills);
    encoder->spills = next;
  }
  size_t larger_bytes = encoder->arena_bytes + encoder->spilled_bytes;
  encoder->spilled_bytes = 0;
  uint8_t *larger = malloc(larger_bytes);
  if (larger != NULL) { /* else go on with the smaller one: spills still work */
    free(encoder->arena);
    encoder->arena = larger;
    encoder->arena_bytes = larger_bytes;
  }
}

nk_xd3_encoder *nk_xd3_encoder_new(void) {
  nk_xd3_encoder *encoder = calloc(1, sizeof *encoder);
  if (encoder == NULL) {
    return NULL;
  }
  encoder->arena_bytes = ARENA_FIRST_BYTES;
  encoder->output_capacity = OUTPUT_FIRST_BYTES;
  encoder->arena = malloc(encoder->arena_bytes);
  encoder->output = malloc(encoder->output_capacity);
  if (encoder->arena == NULL || encoder->output == NULL) {
    nk_xd3_encoder_free(encoder);
    return NULL;
  }
  return encoder;
}

void nk_xd3_encoder_free(nk_xd3_encoder *encoder) {
  if (encoder == NULL) {
    return;
  }
  while (encoder->spills != NULL) {
    spill *next = encoder->spills->next;
    free(encoder->spills);
    encoder->spills = next;
  }
  free(encoder->arena);
  free(encoder->output);
  free(encoder);
}

const uint8_t *nk_xd3_encoder_output(const nk_xd3_encoder *encoder, size_t *output_bytes) {
  *output_bytes = encoder->output_used;
  return encoder->output;
}

const char *nk_xd3_encoder_message(const nk_xd3_encoder *encoder) {
  return encoder->message != NULL ? encoder->message : "no message";
}

static int output_append(nk_xd3_encoder *encoder, const uint8_t *bytes, size_t length) {
  if (length > encoder->output_capacity - encoder->output_used) {
    size_t capacity = encoder->output_capacity * 2;
    while (capacity - encoder->output_used < length) {
      capacity *= 2;
    }
    uint8_t *output = realloc(encoder->output, capacity);
    if (output == NULL) {
      return NK_XD3_NO_MEMORY;
    }
    encoder->output = output;
    encoder->output_capacity = capacity;
  }
  memcpy(encoder->output + encoder->output_used, bytes, length);
  encoder->output_used += length;
  return NK_XD3_OK;
}

static int encode_into_arena(nk_xd3_encoder *encoder, const uint8_t *target, uint32_t target_bytes, const uint8_t *base,
                             uint32_t base_bytes, int level, uint32_t limit_bytes) {
  static const uint8_t nothing[1] = {0};
  xd3_stream stream;
  xd3_source source;
  xd3_config config;
  const size_t output_before = encoder->output_used;

  memset(&config, 0, sizeof config);
  /* RECODE makes the library write the checksum it is given, so that ours, which is several times as fast, is used.
     One window holds the whole target, hence one checksum is enough. */
  config.flags = XD3_FLUSH | XD3_ADLER32_RECODE | ((uint32_t)level << XD3_COMPLEVEL_SHIFT);
  config.winsize = target_bytes > 0 ? target_bytes : 1; /* 0 would stand for the library's 8 MiB */
  config.sprevsz = xd3_pow2_roundup(config.winsize);    /* a chain table that never wraps never shows stale entries */
  config.iopt_size = target_bytes <= UNLIMITED_QUEUE_TARGET_BYTES ? 0 : XD3_DEFAULT_IOPT_SIZE;
  config.alloc = arena_alloc;
  config.freef = arena_keep;
  config.opaque = encoder;
  int found = xd3_config_stream(&stream, &config);
  if (found != 0) {
    encoder->message = stream.msg;
    return NK_XD3_LIBRARY;
  }
  stream.recode_adler32 = adler32_of(target, target_bytes);

  if (base_bytes > 0) {
    memset(&source, 0, sizeof source);
    /* One block, strictly larger than the base: at exactly a power of two the library would place the base's end in a
       second block and ask for it. */
    source.blksize = xd3_pow2_roundup(base_bytes + 1);
    source.onblk = base_bytes;
    source.curblk = base;
    /* Only sizes the base's hash table. At level 1, four times the base gives 100,000 pairs a second and 222.3 bytes a
       delta, once the base 70,000 and 225.3, eight times 44,000 and 221.8 (9 KiB pairs, 10 edits). Above level 3, where
       up to every second position enters, clearing more than twice costs more than it finds. */
    source.max_winsize = (xoff_t)source.blksize * (level <= 3 ? 4 : 2);
    found = xd3_set_source_and_size(&stream, &source, base_bytes);
    if (found != 0) {
      encoder->message = stream.msg;
      return NK_XD3_LIBRARY;
    }
  }

  xd3_avail_input(&stream, target_bytes > 0 ? target : nothing, target_bytes);
  for (;;) {
    found = xd3_encode_input(&stream);
    if (found == XD3_WINSTART) {
      continue;
    }
    if (found == XD3_WINFINISH) {
      return NK_XD3_OK;
    }
    if (found != XD3_OUTPUT) {
      encoder->message = stream.msg;
      return found == ENOMEM ? NK_XD3_NO_MEMORY : NK_XD3_LIBRARY;
    }
    if (encoder->output_used - output_before + stream.avail_out > limit_bytes) {
      return NK_XD3_OVER_LIMIT;
    }
    found = output_append(encoder, stream.next_out, stream.avail_out);
    if (found != NK_XD3_OK) {
      return found;
    }
    xd3_consume_output(&stream);
  }
}

int nk_xd3_encode(nk_xd3_encoder *encoder, const uint8_t *target, uint32_t target_bytes, const uint8_t *base,
                  uint32_t base_bytes, int level, uint32_t limit_bytes, uint32_t *delta_bytes) {
  const size_t output_before = encoder->output_used;
  int result = encode_into_arena(encoder, target, target_bytes, base, base_bytes, level, limit_bytes);
  arena_rewind(encoder);
  if (result != NK_XD3_OK) {
    encoder->output_used = output_before;
  }
  *delta_bytes = (uint32_t)(encoder->output_used - output_before);
  return result;
}

/* ---- decoding (RFC 3284) ---------------------------------------------------------------------------------------- */

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
      [NK_XD3_SEGMENT_RANGE] = "source segment lies outside what it copies from",
      [NK_XD3_WINDOW_CUT] = "window is cut short",
      [NK_XD3_WINDOW_LONG] = "decodes to more than the target's length",
      [NK_XD3_SECTIONS] = "section lengths do not add up to the window's",
      [NK_XD3_NUMBER_CUT] = "number is cut short",
      [NK_XD3_NUMBER_BIG] = "number exceeds 32 bits",
      [NK_XD3_WRITES_PAST] = "instruction writes past its window",
      [NK_XD3_DATA_CUT] = "data section is too short",
      [NK_XD3_ADDRESS_CUT] = "address section is too short",
      [NK_XD3_ADDRESS_RANGE] = "copy address lies at or after its own position",
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

#if defined(__GNUC__)
#pragma GCC visibility pop
#endif

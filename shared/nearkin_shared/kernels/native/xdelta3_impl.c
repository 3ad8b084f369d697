/* xdelta3 kernel: encoding. Invariant: what a pair allocates is rewound before the next one, whatever becomes of it.

   Encoding is the xdelta3 library's, compiled in here; decoding is ours: vcdiff_decoding.h. */

#include "xdelta3_impl.h"

#include "adler32.h"

#include <errno.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>

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

#include "vcdiff_decoding.h"

#if defined(__GNUC__)
#pragma GCC visibility pop
#endif

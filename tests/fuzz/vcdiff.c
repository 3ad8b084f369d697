/* Fuzzing of the VCDIFF decoder: whatever a delta says, decoding stays inside its three buffers.

   With clang:  clang -fsanitize=fuzzer,address,undefined ...  (libFuzzer has the main function)
   With gcc:    gcc -fsanitize=address,undefined -DNK_DRIVER ... (the one at the end changes seeds by lot)

   The first three bytes say how long base and target are. All buffers are of their exact size on the heap. */

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "xdelta3_impl.h"

enum { BASE_BYTES_MAX = 255 * 16, INPUT_BYTES_MAX = 4096 };

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  static int ready;
  static uint8_t noise[BASE_BYTES_MAX];
  if (!ready) {
    uint32_t state = 1;
    for (size_t i = 0; i < sizeof noise; i++) {
      state = state * 1664525u + 1013904223u;
      noise[i] = (uint8_t)(state >> 24);
    }
    nk_xd3_init();
    ready = 1;
  }
  if (size < 3)
    return 0;
  const size_t base_bytes = (size_t)data[0] * 16, target_bytes = (size_t)data[1] << 8 | data[2];
  uint8_t *base = malloc(base_bytes + !base_bytes), *target = malloc(target_bytes + !target_bytes);
  uint8_t *delta = malloc(size - 3 + (size == 3));
  if (base == NULL || target == NULL || delta == NULL)
    abort();
  memcpy(base, noise, base_bytes);
  memcpy(delta, data + 3, size - 3);
  const int result = nk_xd3_decode(delta, size - 3, base, base_bytes, target, target_bytes);
  if (result < 0 || result >= NK_XD3_RESULTS)
    abort();
  free(delta);
  free(target);
  free(base);
  return 0;
}

#ifdef NK_DRIVER
static uint64_t draw_state;

static uint32_t draw(uint32_t below) {
  draw_state ^= draw_state << 13;
  draw_state ^= draw_state >> 7;
  draw_state ^= draw_state << 17;
  return (uint32_t)((draw_state >> 16) % below);
}

/* vcdiff INPUTS SEED FILE...: change the files' bytes, INPUTS times; what is given is written to `last` if it dies. */
int main(int count, char **words) {
  static uint8_t seeds[64][INPUT_BYTES_MAX], input[INPUT_BYTES_MAX];
  size_t sizes[64];
  int files = 0;
  if (count < 4) {
    fprintf(stderr, "vcdiff INPUTS SEED FILE...\n");
    return 2;
  }
  const unsigned long long inputs = strtoull(words[1], NULL, 10);
  draw_state = strtoull(words[2], NULL, 10) * 2 + 1;
  for (int i = 3; i < count && files < 64; i++) {
    FILE *file = fopen(words[i], "rb");
    if (file == NULL) {
      perror(words[i]);
      return 2;
    }
    sizes[files] = fread(seeds[files], 1, INPUT_BYTES_MAX, file);
    fclose(file);
    LLVMFuzzerTestOneInput(seeds[files], sizes[files]);
    files++;
  }
  const clock_t started = clock();
  for (unsigned long long number = 0; number < inputs; number++) {
    const uint32_t which = draw((uint32_t)files);
    size_t size = sizes[which];
    memcpy(input, seeds[which], size);
    for (uint32_t change = 1 + draw(6); change > 0 && size > 0; change--) {
      const size_t at = draw((uint32_t)size);
      switch (draw(5)) {
      case 0:
        input[at] ^= (uint8_t)(1u << draw(8));
        break;
      case 1:
        input[at] = (uint8_t)draw(256);
        break;
      case 2:
        input[at] = draw(2) ? 0xff : 0x80;
        break;
      case 3:
        size = at + 1;
        break;
      default: {
        const size_t from = draw((uint32_t)size), room = size - (at > from ? at : from);
        memmove(input + at, input + from, room < 32 ? room : 32);
      }
      }
    }
    LLVMFuzzerTestOneInput(input, size);
  }
  printf("%llu inputs, %.0f s\n", inputs, (double)(clock() - started) / CLOCKS_PER_SEC);
  return 0;
}
#endif

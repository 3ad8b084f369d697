/* What targets share with bases. Invariant: equal to `_overlap_reference`; no read leaves the chunks it is given. */
#ifndef NEARKIN_OVERLAP_IMPL_H
#define NEARKIN_OVERLAP_IMPL_H

#include <stddef.h>
#include <stdint.h>

typedef struct {
    uint32_t target;
    uint32_t base;
    uint32_t bytes;
    uint32_t matches;
} nearkin_shared;

typedef struct {
    nearkin_shared *rows;
    size_t count;
    size_t room;
} nearkin_shared_list;

/* One group: append to `found` what targets [first_target, end_target) share with bases [first_base, end_base).
   Base b is base_lengths[b] bytes from bases[b] on; those of a group have 8 GiB at most. `table` has 1 << table_bits entries, `starts`
   room for one more than the group has bases; `bytes_by_base` and `matches_by_base` have one zero for each of these, and are zeros again
   afterwards; `touched` has room for as many.
   Returns 0, or -1 where memory ran out. */
int nearkin_overlap_group(const uint8_t *targets, const uint64_t *target_offsets, const uint32_t *target_lengths,
                          uint32_t first_target, uint32_t end_target, const uint8_t *const *bases,
                          const uint32_t *base_lengths, uint32_t first_base, uint32_t end_base, uint32_t *table,
                          unsigned table_bits, uint32_t *starts, uint32_t *bytes_by_base, uint32_t *matches_by_base,
                          uint32_t *touched, nearkin_shared_list *found);

#endif

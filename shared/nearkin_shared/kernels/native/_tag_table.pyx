"""Tags to containers. Invariant: an entry names its hash's first bits exactly; no entry is lost but those counted in `dropped`.

    partition       first 8 bits of a tag; each grows by a sixteenth of its buckets, on its own
    bucket          4 entries of 5 bytes, 0: free        the next bits, h: bucket h * buckets >> hash_bits
    entry           rest of h | in its second bucket 1 | container number + 1, number_bits

A bucket and the rest of h give h back, so a partition grows from its own entries. The second bucket is
spread(rest) - first, modulo the buckets, so either gives the other (cuckoo filter, Fan et al. 2014).

A tag's level is the number of zeros that a mix of its first 28 bits begins with: a table keeps tags of one rate by level.
"""

from threading import Lock

import numpy as np

from nearkin_shared.errors import BadInput, RetryableError

from libc.stddef cimport size_t
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy

cdef extern from * nogil:
    """
    #if defined(__GNUC__)
    #define nk_prefetch(at) __builtin_prefetch(at)
    #else
    #define nk_prefetch(at) ((void)(at))
    #endif
    """
    void nk_prefetch(const void *at)

cdef enum:
    PARTITION_COUNT = 256
    ENTRY_BYTES = 5
    ENTRY_BITS = 40
    BUCKET_ENTRIES = 4
    BUCKET_BYTES = 20
    CANDIDATES = 8  # two full buckets
    BUCKETS_MIN = 4
    HASH_BITS = 36  # with BUCKETS_MAX the product of both fits 64 bits
    REST_BITS_MIN = 6  # below it second buckets are too few for a full table
    KICKS_MAX = 500
    BUCKETS_TRIED = 64  # of fewer a tag's two are often one, so that chance fills them
    AHEAD = 16
    LEVEL_BITS = 28
    LEVEL_HASH_BITS = 20  # LEVEL_BITS without those of the partition
    PAD_BYTES = 3  # an entry is read as 8 bytes

PARTITIONS = PARTITION_COUNT
BUCKETS_MAX = 1 << 27
NUMBER_MAX = (1 << 30) - 2
FILTER_BITS_MIN, FILTER_BITS_MAX = 8, 24
LEVEL_MAX = 15
HEADER = np.dtype([("buckets", "<u4"), ("hash_bits", "u1"), ("number_bits", "u1"), ("zero", "<u2"), ("entries", "<u8")])
cdef uint32_t MOST_BUCKETS = 1 << 27
cdef uint64_t ENTRY_MASK = (<uint64_t>1 << ENTRY_BITS) - 1


cdef struct Partition:
    uint32_t buckets
    uint32_t bucket_bits  # floor of the logarithm of `buckets`
    uint32_t hash_bits
    uint32_t number_bits
    uint64_t entries
    uint64_t random
    uint8_t *slots


cdef inline uint32_t bits_of(uint64_t value) noexcept nogil:
    cdef uint32_t bits = 0
    while value:
        bits += 1
        value >>= 1
    return bits


cdef inline uint32_t rest_bits(const Partition *p) noexcept nogil:
    return p.hash_bits - p.bucket_bits


cdef inline uint64_t hash_of(const Partition *p, uint64_t tag) noexcept nogil:
    return (tag << 8) >> (64 - p.hash_bits)


cdef inline uint32_t mix_of(uint32_t start) noexcept nogil:
    """The first LEVEL_BITS of a tag, mixed (the last steps of MurmurHash3)."""
    start ^= start >> 16
    start *= <uint32_t>0x85EBCA6B
    start ^= start >> 13
    start *= <uint32_t>0xC2B2AE35
    return start ^ (start >> 16)


cdef inline void place_of(const Partition *p, uint64_t hashed, uint32_t *bucket, uint64_t *rest) noexcept nogil:
    cdef uint64_t product = hashed * p.buckets
    bucket[0] = <uint32_t>(product >> p.hash_bits)
    rest[0] = (product & ((<uint64_t>1 << p.hash_bits) - 1)) >> p.bucket_bits


cdef inline uint32_t other_bucket(const Partition *p, uint32_t bucket, uint64_t rest) noexcept nogil:
    cdef uint64_t mixed = (rest * <uint64_t>0x9E3779B97F4A7C15) >> 32
    cdef uint64_t spread = (mixed * p.buckets) >> 32
    return <uint32_t>(spread - bucket if spread >= bucket else spread + p.buckets - bucket)


cdef inline uint64_t read_entry(const Partition *p, uint32_t bucket, uint32_t slot) noexcept nogil:
    cdef uint64_t entry
    memcpy(&entry, p.slots + <size_t>bucket * BUCKET_BYTES + slot * ENTRY_BYTES, 8)  # little-endian, PAD_BYTES beyond the last
    return entry & ENTRY_MASK


cdef inline void write_entry(Partition *p, uint32_t bucket, uint32_t slot, uint64_t entry) noexcept nogil:
    memcpy(p.slots + <size_t>bucket * BUCKET_BYTES + slot * ENTRY_BYTES, &entry, ENTRY_BYTES)


cdef inline uint64_t entry_of(const Partition *p, uint64_t rest, uint64_t second, uint64_t stored) noexcept nogil:
    return (rest << (p.number_bits + 1)) | (second << p.number_bits) | stored


cdef inline bint put_free(Partition *p, uint32_t bucket, uint64_t entry) noexcept nogil:
    cdef uint32_t slot
    for slot in range(BUCKET_ENTRIES):
        if read_entry(p, bucket, slot) == 0:
            write_entry(p, bucket, slot, entry)
            p.entries += 1
            return True
    return False


cdef inline bint has_entry(const Partition *p, uint32_t bucket, uint64_t entry) noexcept nogil:
    cdef uint32_t slot
    for slot in range(BUCKET_ENTRIES):
        if read_entry(p, bucket, slot) == entry:
            return True
    return False


cdef uint64_t insert(Partition *p, uint64_t hashed, uint64_t stored, bint is_new, uint64_t *homeless_hash) noexcept nogil:
    """Insert one entry, which may be there already unless `is_new`; 0 if it has a slot, else the stored number of the entry that is left without one, and its hash."""
    cdef uint32_t bucket, other, slot, kick
    cdef uint64_t rest, entry, victim, side = <uint64_t>1 << p.number_bits
    place_of(p, hashed, &bucket, &rest)
    other = other_bucket(p, bucket, rest)
    entry = entry_of(p, rest, 0, stored)
    if not is_new and (has_entry(p, bucket, entry) or has_entry(p, other, entry | side)):
        return 0
    if put_free(p, bucket, entry) or put_free(p, other, entry | side):
        return 0
    entry, bucket = entry | side, other
    for kick in range(KICKS_MAX):
        p.random = p.random * <uint64_t>6364136223846793005 + <uint64_t>1442695040888963407
        slot = <uint32_t>(p.random >> 62)
        victim = read_entry(p, bucket, slot)
        write_entry(p, bucket, slot, entry)
        entry = victim ^ side
        bucket = other_bucket(p, bucket, entry >> (p.number_bits + 1))
        if put_free(p, bucket, entry):
            return 0
    homeless_hash[0] = hash_back(p, bucket, entry)
    return entry & (side - 1)


cdef inline uint64_t hash_back(const Partition *p, uint32_t bucket, uint64_t entry) noexcept nogil:
    """The hash of an entry in this bucket."""
    cdef uint64_t rest = entry >> (p.number_bits + 1), start
    if (entry >> p.number_bits) & 1:
        bucket = other_bucket(p, bucket, rest)
    start = (<uint64_t>bucket << p.hash_bits) + (rest << p.bucket_bits)
    return (start + p.buckets - 1) // p.buckets


cdef inline uint32_t larger(uint32_t buckets) noexcept nogil:
    return buckets + (buckets // 16 if buckets // 16 > 4 else 4)


cdef int rebuild(Partition *p, uint32_t buckets, uint32_t number_bits, uint64_t left_hash, uint64_t left, uint64_t *dropped) noexcept nogil:
    """Move all entries, and the one left without a slot, into so many buckets or more. 0: done, 1: memory is short, `p` is unchanged."""
    cdef Partition fresh
    cdef uint32_t bucket, slot, shift, rest
    cdef uint64_t entry, hashed, homeless_hash = 0, failed
    cdef bint is_complete
    while True:
        if buckets > MOST_BUCKETS:
            buckets = MOST_BUCKETS
        fresh.buckets = buckets
        fresh.bucket_bits = bits_of(buckets) - 1
        fresh.number_bits = number_bits
        rest = ENTRY_BITS - 1 - number_bits
        fresh.hash_bits = rest + fresh.bucket_bits if rest + fresh.bucket_bits < HASH_BITS else HASH_BITS
        if p.entries + (left != 0) and p.hash_bits < fresh.hash_bits:
            fresh.hash_bits = p.hash_bits
        fresh.entries = 0
        fresh.random = p.random
        fresh.slots = <uint8_t *>calloc(<size_t>buckets * BUCKET_BYTES + PAD_BYTES, 1)
        if fresh.slots == NULL:
            return 1
        shift = p.hash_bits - fresh.hash_bits if p.hash_bits > fresh.hash_bits else 0
        is_complete = True
        for bucket in range(p.buckets):
            for slot in range(BUCKET_ENTRIES):
                entry = read_entry(p, bucket, slot)
                if entry == 0:
                    continue
                hashed = hash_back(p, bucket, entry) >> shift
                failed = insert(&fresh, hashed, entry & ((<uint64_t>1 << p.number_bits) - 1), True, &homeless_hash)
                if failed:
                    is_complete = False
                    if is_last(&fresh, p.entries):
                        dropped[0] += 1
                    else:
                        break
            if not is_complete and not is_last(&fresh, p.entries):
                break
        if left and (is_complete or is_last(&fresh, p.entries)):
            failed = insert(&fresh, left_hash >> shift, left, True, &homeless_hash)
            if failed:
                is_complete = False
                if is_last(&fresh, p.entries):
                    dropped[0] += 1
        if is_complete or is_last(&fresh, p.entries):
            free(p.slots)
            p[0] = fresh
            return 0
        buckets = larger(buckets)
        free(fresh.slots)


cdef inline bint is_last(const Partition *fresh, uint64_t entries) noexcept nogil:
    """Whether more buckets would not help: half the slots of many are free, or there are no more buckets."""
    return (fresh.buckets >= BUCKETS_TRIED and entries * 2 < <uint64_t>fresh.buckets * BUCKET_ENTRIES) or fresh.buckets == MOST_BUCKETS or rest_bits(fresh) <= REST_BITS_MIN


cdef int put(Partition *p, uint64_t tag, uint64_t number, uint64_t *dropped) noexcept nogil:
    """Insert a tag. 0: done, 1: memory is short."""
    cdef uint64_t stored = number + 1, left, left_hash = 0
    cdef uint32_t number_bits = bits_of(stored + (stored >> 2) + 16)
    if number_bits > 30:
        number_bits = 30
    if p.slots == NULL:
        if rebuild(p, BUCKETS_MIN, number_bits, 0, 0, dropped):
            return 1
    elif bits_of(stored) > p.number_bits:
        if rebuild(p, p.buckets, number_bits, 0, 0, dropped):
            return 1
    if (p.entries + 1) * 20 > <uint64_t>p.buckets * BUCKET_ENTRIES * 19 and can_grow(p):
        if rebuild(p, larger(p.buckets), number_bits if number_bits > p.number_bits else p.number_bits, 0, 0, dropped):
            return 1
    left = insert(p, hash_of(p, tag), stored, False, &left_hash)
    if left:
        if is_last(p, p.entries):
            dropped[0] += 1
        elif rebuild(p, larger(p.buckets), p.number_bits, left_hash, left, dropped):
            dropped[0] += 1
            return 1
    return 0


cdef inline bint can_grow(const Partition *p) noexcept nogil:
    return p.buckets < MOST_BUCKETS and rest_bits(p) > REST_BITS_MIN


cdef inline uint32_t scan(const Partition *p, uint32_t bucket, uint64_t wanted, uint32_t skip, uint32_t *found, uint32_t count) noexcept nogil:
    """Add the numbers of entries of a bucket that equal `wanted` above their `skip` lowest bits and its own second bit."""
    cdef uint32_t slot, at
    cdef uint64_t entry, difference, side = <uint64_t>1 << p.number_bits
    cdef uint32_t number
    for slot in range(BUCKET_ENTRIES):
        entry = read_entry(p, bucket, slot)
        difference = entry ^ wanted
        if difference >> skip or difference & side or (entry & (side - 1)) == 0:
            continue
        number = <uint32_t>(entry & (side - 1)) - 1
        at = count
        while at and found[at - 1] > number:
            at -= 1
        if at and found[at - 1] == number:
            continue
        move_up(found, at, count)
        found[at] = number
        count += 1
    return count


cdef inline void move_up(uint32_t *found, uint32_t at, uint32_t count) noexcept nogil:
    while count > at:
        found[count] = found[count - 1]
        count -= 1


cdef object _found(object array):
    return f"{array.dtype} {array.shape}" if isinstance(array, np.ndarray) else type(array).__name__


cdef object _vector(str what, object array, object dtype):
    if not isinstance(array, np.ndarray) or array.dtype != dtype or array.ndim != 1:
        raise BadInput(f"{what} {_found(array)}: needs a {np.dtype(dtype).name} array of shape (n,)")
    return np.array(array, order="C")


cdef object _bounded(str what, object value, object lowest, object highest):
    if not isinstance(value, int) or isinstance(value, bool) or not lowest <= value <= highest:
        raise BadInput(f"{what} {value!r}: needs a whole number from {lowest} to {highest}")
    return value


def tag_mixes(tags):
    cdef const uint64_t[::1] tag_view = _vector("tags", tags, np.uint64)
    cdef size_t n = <size_t>tag_view.shape[0], i
    mixes = np.empty(n, np.uint32)
    cdef uint32_t[::1] mix_view = mixes
    with nogil:
        for i in range(n):
            mix_view[i] = mix_of(<uint32_t>(tag_view[i] >> (64 - LEVEL_BITS)))
    return mixes


cdef class TagTable:
    cdef Partition partitions[PARTITION_COUNT]
    cdef object lock
    cdef readonly object filter_bits
    cdef uint64_t lost

    def __cinit__(self, filter_bits=FILTER_BITS_MAX):
        cdef size_t i
        self.filter_bits = _bounded("filter_bits", filter_bits, FILTER_BITS_MIN, FILTER_BITS_MAX)
        self.lock = Lock()
        for i in range(PARTITION_COUNT):
            self.partitions[i].slots = NULL
        self._reset()

    cdef void _reset(self) noexcept:
        cdef size_t i
        for i in range(PARTITION_COUNT):
            free(self.partitions[i].slots)
            self.partitions[i] = empty()
        self.lost = 0

    def __dealloc__(self):
        self._reset()

    def __reduce__(self):
        raise TypeError("a TagTable is not pickled: save its partitions")

    def __len__(self):
        cdef size_t i
        cdef uint64_t entries = 0
        for i in range(PARTITION_COUNT):
            entries += self.partitions[i].entries
        return entries

    @property
    def nbytes(self):
        return sum([self.partitions[i].buckets * BUCKET_BYTES for i in range(PARTITION_COUNT)])

    @property
    def dropped(self):
        return self.lost

    @property
    def tag_bits(self):
        return min([rest_bits(&self.partitions[i]) if self.partitions[i].slots != NULL else HASH_BITS for i in range(PARTITION_COUNT)])

    def put_many(self, tags, number):
        cdef const uint64_t[::1] tag_view = _vector("tags", tags, np.uint64)
        cdef uint64_t own_number = _bounded("number", number, 0, NUMBER_MAX)
        cdef size_t n = <size_t>tag_view.shape[0], i
        cdef int failed = 0
        with self.lock:
            with nogil:
                for i in range(n):
                    if i + AHEAD < n:
                        look_ahead(&self.partitions[0], tag_view[i + AHEAD])
                    failed = put(&self.partitions[tag_view[i] >> 56], tag_view[i], own_number, &self.lost)
                    if failed:
                        break
        if failed:
            raise RetryableError(f"tag table: no memory to grow from {self.nbytes} bytes")

    def candidates(self, tags):
        cdef const uint64_t[::1] tag_view = _vector("tags", tags, np.uint64)
        cdef size_t n = <size_t>tag_view.shape[0], i, total = 0
        cdef uint32_t count, at, skip, bucket, cap = self.filter_bits
        cdef uint32_t found[CANDIDATES]
        cdef uint64_t rest
        cdef const Partition *p
        rows, numbers = np.empty(n * CANDIDATES, np.int64), np.empty(n * CANDIDATES, np.uint32)
        cdef int64_t[::1] row_view = rows
        cdef uint32_t[::1] number_view = numbers
        with self.lock:
            with nogil:
                for i in range(n):
                    if i + AHEAD < n:
                        look_ahead(&self.partitions[0], tag_view[i + AHEAD])
                    p = &self.partitions[tag_view[i] >> 56]
                    if p.entries == 0:
                        continue
                    place_of(p, hash_of(p, tag_view[i]), &bucket, &rest)
                    skip = p.number_bits + 1 + (rest_bits(p) - cap if rest_bits(p) > cap else 0)
                    count = scan(p, bucket, entry_of(p, rest, 0, 0), skip, found, 0)
                    count = scan(p, other_bucket(p, bucket, rest), entry_of(p, rest, 1, 0), skip, found, count)
                    for at in range(count):
                        row_view[total] = <int64_t>i
                        number_view[total] = found[at]
                        total += 1
        return rows[:total].copy(), numbers[:total].copy()

    def remove_many(self, tags, number):
        cdef const uint64_t[::1] tag_view = _vector("tags", tags, np.uint64)
        cdef uint64_t stored = _bounded("number", number, 0, NUMBER_MAX) + 1
        cdef size_t n = <size_t>tag_view.shape[0], i, removed = 0
        cdef uint32_t bucket
        cdef uint64_t rest
        cdef Partition *p
        with self.lock:
            with nogil:
                for i in range(n):
                    p = &self.partitions[tag_view[i] >> 56]
                    if p.entries == 0 or bits_of(stored) > p.number_bits:
                        continue
                    place_of(p, hash_of(p, tag_view[i]), &bucket, &rest)
                    removed += clear_entry(p, bucket, entry_of(p, rest, 0, stored))
                    removed += clear_entry(p, other_bucket(p, bucket, rest), entry_of(p, rest, 1, stored))
        return removed

    def remove_containers(self, numbers):
        cdef const uint32_t[::1] gone = np.sort(_vector("numbers", numbers, np.uint32))
        cdef size_t count = <size_t>gone.shape[0], i, removed = 0
        cdef uint32_t bucket, slot
        cdef uint64_t entry
        cdef Partition *p
        with self.lock:
            if count:
                with nogil:
                    for i in range(PARTITION_COUNT):
                        p = &self.partitions[i]
                        for bucket in range(p.buckets):
                            for slot in range(BUCKET_ENTRIES):
                                entry = read_entry(p, bucket, slot)
                                if entry and contains(&gone[0], count, (entry & ((<uint64_t>1 << p.number_bits) - 1)) - 1):
                                    write_entry(p, bucket, slot, 0)
                                    p.entries -= 1
                                    removed += 1
        return removed

    def keep_levels(self, levels):
        cdef const uint8_t[::1] level_view = _vector("levels", levels, np.uint8)
        if len(levels) and levels.max() > LEVEL_MAX:
            raise BadInput(f"levels up to {levels.max()}: the highest is {LEVEL_MAX}")
        cdef size_t count = <size_t>level_view.shape[0], i, removed = 0
        cdef uint32_t buckets
        cdef bint is_short = False
        cdef Partition *p
        with self.lock:
            with nogil:
                for i in range(PARTITION_COUNT):
                    p = &self.partitions[i]
                    if p.hash_bits < LEVEL_HASH_BITS or p.entries == 0:
                        continue
                    removed += keep(p, <uint32_t>i, &level_view[0] if count else NULL, count)
                    buckets = <uint32_t>(p.entries * 20 // (BUCKET_ENTRIES * 18)) + BUCKETS_TRIED
                    if buckets < p.buckets - p.buckets // 4:  # less than three quarters are needed
                        is_short |= rebuild(p, buckets, p.number_bits, 0, 0, &self.lost)
        if is_short:
            raise RetryableError(f"tag table: no memory to shrink from {self.nbytes} bytes")
        return removed

    def save_partition(self, partition):
        cdef size_t i = _bounded("partition", partition, 0, PARTITION_COUNT - 1)
        cdef Partition *p = &self.partitions[i]
        with self.lock:
            header = np.array([(p.buckets, p.hash_bits, p.number_bits, 0, p.entries)], HEADER).tobytes()
            return header + (p.slots[:<size_t>p.buckets * BUCKET_BYTES] if p.slots != NULL else b"")

    def load_partition(self, partition, data):
        cdef size_t i = _bounded("partition", partition, 0, PARTITION_COUNT - 1)
        cdef Partition fresh = empty()
        cdef const uint8_t[::1] view
        cdef size_t size_bytes
        header = _checked_header(partition, data)
        if header["buckets"]:
            view = np.frombuffer(data, np.uint8, offset=HEADER.itemsize)
            size_bytes = <size_t>view.shape[0]
            fresh.buckets, fresh.hash_bits = header["buckets"], header["hash_bits"]
            fresh.number_bits, fresh.entries = header["number_bits"], header["entries"]
            fresh.bucket_bits = bits_of(fresh.buckets) - 1
            fresh.slots = <uint8_t *>calloc(size_bytes + PAD_BYTES, 1)
            if fresh.slots == NULL:
                raise RetryableError(f"tag table: no memory for {size_bytes} bytes")
            memcpy(fresh.slots, &view[0], size_bytes)
            if not is_sound(&fresh):
                free(fresh.slots)
                raise BadInput(f"partition {partition}: its entries differ from their count, or one has no number or no hash")
        with self.lock:
            free(self.partitions[i].slots)
            self.partitions[i] = fresh


cdef Partition empty() noexcept nogil:
    cdef Partition p
    p.buckets = p.bucket_bits = p.number_bits = 0
    p.hash_bits = HASH_BITS
    p.entries = 0
    p.random = 1
    p.slots = NULL
    return p


cdef object _checked_header(object partition, object data):
    if not isinstance(data, bytes | bytearray | memoryview) or len(data) < HEADER.itemsize:
        raise BadInput(f"partition {partition}: {type(data).__name__}: needs at least {HEADER.itemsize} bytes")
    header = np.frombuffer(data, HEADER, 1)[0]
    buckets, hash_bits, number_bits = (int(header[name]) for name in ("buckets", "hash_bits", "number_bits"))
    rest = hash_bits - (buckets.bit_length() - 1)
    fits = not header["zero"] and len(data) == HEADER.itemsize + buckets * BUCKET_BYTES
    if buckets:
        fits = fits and BUCKETS_MIN <= buckets <= BUCKETS_MAX and hash_bits <= HASH_BITS and 1 <= number_bits <= 30
        fits = fits and 1 <= rest <= ENTRY_BITS - 1 - number_bits
    else:
        fits = fits and not header["entries"]
    if not fits:
        raise BadInput(f"partition {partition}: {buckets} buckets, {hash_bits} and {number_bits} bits in {len(data)} bytes: not a saved one")
    return header


cdef bint is_sound(const Partition *p) noexcept nogil:
    cdef uint32_t bucket, slot
    cdef uint64_t entry, entries = 0
    for bucket in range(p.buckets):
        for slot in range(BUCKET_ENTRIES):
            entry = read_entry(p, bucket, slot)
            if entry:
                entries += 1
                if entry & ((<uint64_t>1 << p.number_bits) - 1) == 0 or entry >> (p.number_bits + 1 + rest_bits(p)):
                    return False
                if hash_back(p, bucket, entry) >> p.hash_bits:  # no tag's: its bucket in a larger table would be beyond the last
                    return False
    return entries == p.entries


cdef inline void look_ahead(const Partition *partitions, uint64_t tag) noexcept nogil:
    cdef const Partition *p = partitions + (tag >> 56)
    cdef uint32_t bucket
    cdef uint64_t rest
    if p.slots != NULL:
        place_of(p, hash_of(p, tag), &bucket, &rest)
        nk_prefetch(p.slots + <size_t>bucket * BUCKET_BYTES)
        nk_prefetch(p.slots + <size_t>other_bucket(p, bucket, rest) * BUCKET_BYTES)


cdef inline size_t clear_entry(Partition *p, uint32_t bucket, uint64_t entry) noexcept nogil:
    cdef uint32_t slot
    for slot in range(BUCKET_ENTRIES):
        if read_entry(p, bucket, slot) == entry:
            write_entry(p, bucket, slot, 0)
            p.entries -= 1
            return 1
    return 0


cdef size_t keep(Partition *p, uint32_t partition, const uint8_t *levels, size_t count) noexcept nogil:
    """Clear the entries whose tag has a lower level than their container."""
    cdef uint32_t bucket, slot, start
    cdef uint64_t entry, number
    cdef size_t removed = 0
    for bucket in range(p.buckets):
        for slot in range(BUCKET_ENTRIES):
            entry = read_entry(p, bucket, slot)
            number = (entry & ((<uint64_t>1 << p.number_bits) - 1)) - 1
            if entry == 0 or number >= count or levels[number] == 0:
                continue
            start = (partition << LEVEL_HASH_BITS) | <uint32_t>(hash_back(p, bucket, entry) >> (p.hash_bits - LEVEL_HASH_BITS))
            if mix_of(start) >> (32 - levels[number]):
                write_entry(p, bucket, slot, 0)
                p.entries -= 1
                removed += 1
    return removed


cdef bint contains(const uint32_t *ids, size_t count, uint64_t wanted) noexcept nogil:
    cdef size_t low = 0, high = count, middle
    while low < high:
        middle = (low + high) // 2
        if ids[middle] < wanted:
            low = middle + 1
        else:
            high = middle
    return low < count and ids[low] == wanted

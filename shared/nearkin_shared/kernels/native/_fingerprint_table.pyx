"""Fingerprints to locations. Invariant: a slot is used exactly if its mark is not 0, and no probe meets a free slot before its key.

    marks   | 0 | m | m | 0 | ...      one byte a slot: 0 free, else 128 + seven bits of the key's hash
    slots   | key, container (8), ordinal (4) | ...     packed: a lookup touches one mark line and one or two slot lines
"""

import os
from threading import Lock

import numpy as np

from nearkin_shared.errors import BadInput, RetryableError

from libc.stddef cimport size_t
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcmp, memcpy

cdef extern from "siphash.h" nogil:
    uint64_t nk_siphash13(const unsigned char *text, size_t text_bytes, uint64_t key_low, uint64_t key_high)

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
    KEY_BYTES_MIN = 8
    KEY_BYTES_MAX = 40
    PLACE_BYTES = 12  # container, ordinal
    SLOTS_MIN = 16
    AHEAD = 16  # hashed and prefetched together: as many cache misses wait side by side as a core has line buffers

ENTRIES_MAX = 1 << 40


cdef struct Table:
    size_t slots  # a power of two, or 0 before the first entry
    size_t entries
    size_t key_bytes
    uint64_t seed_low
    uint64_t seed_high
    uint8_t *marks
    uint8_t *places


cdef inline size_t room(size_t slots) noexcept nogil:
    """Entries that may be in so many slots: three quarters; above it linear probes grow long (8.5 tries for a miss there)."""
    return slots - slots // 4


cdef inline uint8_t mark_of(uint64_t hashed) noexcept nogil:
    return <uint8_t>(0x80 | (hashed >> 57))


cdef inline uint8_t *place_at(const Table *t, size_t slot) noexcept nogil:
    return t.places + slot * (t.key_bytes + PLACE_BYTES)


cdef inline uint64_t hash_of(const Table *t, const uint8_t *key) noexcept nogil:
    return nk_siphash13(key, t.key_bytes, t.seed_low, t.seed_high)


cdef inline size_t find(const Table *t, const uint8_t *key, uint64_t hashed) noexcept nogil:
    """The slot of the key, or the free one where it would go. Ends: a quarter of the slots is free."""
    cdef size_t mask = t.slots - 1, slot = <size_t>hashed & mask
    cdef uint8_t mark = mark_of(hashed)
    while t.marks[slot] != 0:
        if t.marks[slot] == mark and memcmp(place_at(t, slot), key, t.key_bytes) == 0:
            return slot
        slot = (slot + 1) & mask
    return slot


cdef bint allocate(Table *t, size_t slots) noexcept nogil:
    """Give `t` so many free slots. False: memory is short, and `t` holds nothing."""
    t.entries = 0
    t.slots = slots
    t.marks = <uint8_t *>calloc(slots, 1)
    t.places = <uint8_t *>malloc(slots * (t.key_bytes + PLACE_BYTES))
    if t.marks == NULL or t.places == NULL:
        release(t)
        return False
    return True


cdef void release(Table *t) noexcept nogil:
    free(t.marks)
    free(t.places)
    t.marks = t.places = NULL
    t.slots = t.entries = 0


cdef bint contains(const uint64_t *ids, size_t count, uint64_t wanted) noexcept nogil:
    cdef size_t low = 0, high = count, middle
    while low < high:
        middle = (low + high) // 2
        if ids[middle] < wanted:
            low = middle + 1
        else:
            high = middle
    return low < count and ids[low] == wanted


cdef inline uint64_t container_of(const Table *t, size_t slot) noexcept nogil:
    cdef uint64_t container
    memcpy(&container, place_at(t, slot) + t.key_bytes, 8)
    return container


cdef bint rebuild(Table *t, size_t slots, const uint64_t *gone, size_t gone_count) noexcept nogil:
    """Move every entry whose container is not among the sorted `gone` into new slots. False: memory is short, `t` is unchanged."""
    cdef Table fresh = t[0]
    cdef size_t slot, to
    cdef uint64_t hashed
    if not allocate(&fresh, slots):
        return False
    for slot in range(t.slots):
        if t.marks[slot] == 0 or (gone_count and contains(gone, gone_count, container_of(t, slot))):
            continue
        hashed = hash_of(t, place_at(t, slot))
        to = find(&fresh, place_at(t, slot), hashed)
        fresh.marks[to] = mark_of(hashed)
        memcpy(place_at(&fresh, to), place_at(t, slot), t.key_bytes + PLACE_BYTES)
        fresh.entries += 1
    release(t)
    t[0] = fresh
    return True


cdef size_t slots_for(size_t entries) noexcept nogil:
    cdef size_t slots = SLOTS_MIN
    while room(slots) < entries:
        slots *= 2
    return slots


cdef inline void look_ahead(const Table *t, const uint8_t *keys, size_t at, size_t count, uint64_t *hashes) noexcept nogil:
    """Hash the next `count` keys, then fetch their marks and slots, so that the misses overlap."""
    cdef size_t i, slot
    for i in range(count):
        hashes[i] = hash_of(t, keys + (at + i) * t.key_bytes)
        slot = <size_t>hashes[i] & (t.slots - 1)
        nk_prefetch(t.marks + slot)
        nk_prefetch(place_at(t, slot))


cdef object _found(object array):
    return f"{array.dtype} {array.shape}" if isinstance(array, np.ndarray) else type(array).__name__


cdef object _keys(object keys, Py_ssize_t key_bytes):
    """The keys as a C-contiguous array of their own, so that no other thread changes them between check and use."""
    cdef bint fits = isinstance(keys, np.ndarray) and keys.dtype == np.uint8 and keys.ndim == 2
    if fits:
        fits = keys.shape[1] == key_bytes if key_bytes else 1 <= keys.shape[1] <= KEY_BYTES_MAX
    if not fits:
        raise BadInput(f"keys {_found(keys)}: needs a uint8 array of shape (n, {key_bytes or f'1 to {KEY_BYTES_MAX}'})")
    return np.array(keys, order="C")


cdef object _vector(str what, object array, object dtype):
    if not isinstance(array, np.ndarray) or array.dtype != dtype or array.ndim != 1:
        raise BadInput(f"{what} {_found(array)}: needs a {np.dtype(dtype).name} array of shape (n,)")
    return np.ascontiguousarray(array)


cdef object _bounded(str what, object value, object lowest, object highest):
    if not isinstance(value, int) or isinstance(value, bool) or not lowest <= value <= highest:
        raise BadInput(f"{what} {value!r}: needs a whole number from {lowest} to {highest}")
    return value


cdef void seed(Table *t):
    """A random hash key: without it an uploader could choose chunks whose names all probe one run of slots."""
    cdef bytes random = os.urandom(16)
    cdef const unsigned char *at = random
    memcpy(&t.seed_low, at, 8)
    memcpy(&t.seed_high, at + 8, 8)


cdef class NameTable:
    cdef Table table
    cdef object lock
    cdef readonly object key_bytes
    cdef readonly object max_entries

    def __cinit__(self, key_bytes, max_entries):
        self.key_bytes = _bounded("key_bytes", key_bytes, KEY_BYTES_MIN, KEY_BYTES_MAX)
        self.max_entries = _bounded("max_entries", max_entries, 1, ENTRIES_MAX)
        self.table.key_bytes = key_bytes
        self.lock = Lock()
        seed(&self.table)

    def __dealloc__(self):
        release(&self.table)

    def __reduce__(self):
        raise TypeError("a NameTable is not pickled: it is a cache, fill another")

    def __len__(self):
        return self.table.entries

    @property
    def nbytes(self):
        return self.table.slots * (self.table.key_bytes + PLACE_BYTES + 1)

    def clear(self):
        with self.lock:
            release(&self.table)

    def get_many(self, keys):
        cdef const uint8_t[:, ::1] key_view = _keys(keys, self.table.key_bytes)
        cdef size_t n = <size_t>key_view.shape[0], at = 0, count, i, slot
        cdef uint64_t hashes[AHEAD]
        cdef const Table *t = &self.table
        cdef const uint8_t *key
        containers, ordinals, found = np.zeros(n, np.uint64), np.zeros(n, np.uint32), np.zeros(n, np.uint8)
        cdef uint64_t[::1] container_view = containers
        cdef uint32_t[::1] ordinal_view = ordinals
        cdef uint8_t[::1] found_view = found
        with self.lock:
            if n and t.entries:
                with nogil:
                    key = &key_view[0, 0]
                    while at < n:
                        count = n - at if n - at < AHEAD else AHEAD
                        look_ahead(t, key, at, count, hashes)
                        for i in range(count):
                            slot = find(t, key + (at + i) * t.key_bytes, hashes[i])
                            if t.marks[slot]:
                                memcpy(&container_view[at + i], place_at(t, slot) + t.key_bytes, 8)
                                memcpy(&ordinal_view[at + i], place_at(t, slot) + t.key_bytes + 8, 4)
                                found_view[at + i] = 1
                        at += count
        return containers, ordinals, found.view(np.bool_)

    def put_first_many(self, keys, containers, ordinals):
        own_keys = _keys(keys, self.table.key_bytes)
        cdef const uint8_t[:, ::1] key_view = own_keys
        cdef const uint64_t[::1] container_view = _vector("containers", containers, np.uint64)
        cdef const uint32_t[::1] ordinal_view = _vector("ordinals", ordinals, np.uint32)
        cdef size_t n = <size_t>key_view.shape[0], at = 0, count, i, slot, needed
        cdef uint64_t hashes[AHEAD]
        cdef Table *t = &self.table
        cdef const uint8_t *key
        cdef uint8_t *place
        cdef bint grown = True
        if not n == <size_t>container_view.shape[0] == <size_t>ordinal_view.shape[0]:
            raise BadInput(
                f"{n} keys, {len(containers)} containers, {len(ordinals)} ordinals: needs as many of each"
            )
        inserted = np.zeros(n, np.uint8)
        cdef uint8_t[::1] inserted_view = inserted
        if n == 0:
            return inserted.view(np.bool_)
        with self.lock:
            needed = t.entries + n
            if needed > room(t.slots) or needed > self.max_entries:
                # Near a doubling or the bound count exactly, so that repeats cost no room; then nothing below can fail.
                needed = t.entries + <size_t>self._count_new(own_keys)
                if needed > self.max_entries:
                    raise RetryableError(f"name table full: {needed} entries would exceed max_entries {self.max_entries}")
                if needed > room(t.slots):
                    with nogil:
                        grown = rebuild(t, slots_for(needed), NULL, 0)
                    if not grown:
                        raise RetryableError(f"name table: no memory for {needed} entries of {self.key_bytes}-byte keys")
            with nogil:
                key = &key_view[0, 0]
                while at < n:
                    count = n - at if n - at < AHEAD else AHEAD
                    look_ahead(t, key, at, count, hashes)
                    for i in range(count):
                        slot = find(t, key + (at + i) * t.key_bytes, hashes[i])
                        if t.marks[slot]:
                            continue
                        t.marks[slot] = mark_of(hashes[i])
                        place = place_at(t, slot)
                        memcpy(place, key + (at + i) * t.key_bytes, t.key_bytes)
                        memcpy(place + t.key_bytes, &container_view[at + i], 8)
                        memcpy(place + t.key_bytes + 8, &ordinal_view[at + i], 4)
                        t.entries += 1
                        inserted_view[at + i] = 1
                    at += count
        return inserted.view(np.bool_)

    cdef object _count_new(self, own_keys):
        """How many different keys are not in the table; the lock is held."""
        cdef const uint8_t[:, ::1] key_view = own_keys
        cdef const int64_t[::1] first_view = first_occurrence(own_keys)
        cdef const Table *t = &self.table
        cdef const uint8_t *key
        cdef size_t i, new = 0
        with nogil:
            for i in range(<size_t>key_view.shape[0]):
                key = &key_view[i, 0]
                if first_view[i] == <int64_t>i and (t.slots == 0 or t.marks[find(t, key, hash_of(t, key))] == 0):
                    new += 1
        return new

    def discard_containers(self, ids):
        cdef const uint64_t[::1] gone = np.sort(_vector("ids", ids, np.uint64))  # np.unique imports numpy.ma, 9 ms
        cdef size_t gone_count = <size_t>gone.shape[0], slot, dropped = 0
        cdef Table *t = &self.table
        cdef bint done = True
        with self.lock:
            if gone_count and t.entries:
                with nogil:
                    for slot in range(t.slots):
                        if t.marks[slot] and contains(&gone[0], gone_count, container_of(t, slot)):
                            dropped += 1
                    if dropped:
                        done = rebuild(t, slots_for(t.entries - dropped), &gone[0], gone_count)
                if not done:
                    raise RetryableError(f"name table: no memory to move {len(self) - dropped} entries")
        return dropped


def first_occurrence(keys):
    cdef const uint8_t[:, ::1] key_view = _keys(keys, 0)
    cdef size_t n = <size_t>key_view.shape[0], i, slot, slots, mask
    cdef size_t key_bytes = <size_t>key_view.shape[1]
    cdef Table hashing
    cdef int64_t *rows
    cdef const uint8_t *key
    first = np.empty(n, np.int64)
    cdef int64_t[::1] first_view = first
    if n == 0:
        return first
    hashing.key_bytes = key_bytes
    seed(&hashing)
    slots = slots_for(n)
    mask = slots - 1
    rows = <int64_t *>calloc(slots, sizeof(int64_t))  # index of the first row + 1; 0: free
    if rows == NULL:
        raise RetryableError(f"first_occurrence: no memory for {n} keys")
    with nogil:
        for i in range(n):
            key = &key_view[i, 0]
            slot = <size_t>hash_of(&hashing, key) & mask
            while rows[slot] != 0 and memcmp(&key_view[rows[slot] - 1, 0], key, key_bytes) != 0:
                slot = (slot + 1) & mask
            if rows[slot] == 0:
                rows[slot] = <int64_t>i + 1
            first_view[i] = rows[slot] - 1
        free(rows)
    return first

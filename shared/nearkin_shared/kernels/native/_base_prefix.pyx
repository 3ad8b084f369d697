"""Prefixes, compiled. Invariant: equal to `base_prefix_reference`, whose checks run first; a partial addition is undone.

content   | base 0 | base 1 | ...           starts[i] is where base i begins
slots     | 0 | 3 | 0 | 1 | ...             1 + a base's number by hash of (container, ordinal), linear probing
"""

from cpython.buffer cimport PyBUF_WRITABLE
from libc.stddef cimport size_t
from libc.stdint cimport int32_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free, realloc
from libc.string cimport memcpy, memset

import numpy as np

from nearkin_shared.kernels.reference import base_prefix_reference as reference
from nearkin_shared.kernels.native._scatter_copy cimport Sources

cdef enum:
    SLOTS_MIN = 1024


cdef inline size_t slot_of(uint64_t container, uint32_t ordinal) noexcept nogil:
    # A caller that chooses the content cannot choose these: ids have random bits, and a prefix has some thousand at most.
    cdef uint64_t mixed = (container ^ (<uint64_t>ordinal * <uint64_t>0x9E3779B97F4A7C15)) * <uint64_t>0xD6E8FEB86659FD93
    return <size_t>(mixed ^ (mixed >> 32))


cdef class BaseRows:
    cdef Sources sources
    cdef const uint32_t[::1] bound, ordinal, length
    cdef const uint64_t[::1] container, offset
    cdef const int32_t[::1] buffer_of
    cdef Py_ssize_t chunks

    def __cinit__(self, bounds, containers, ordinals, buffers, which, offsets, lengths):
        reference.check_bases(bounds, containers, ordinals, which, offsets, lengths)
        self.sources = Sources(buffers)
        self.bound, self.ordinal, self.length = (
            np.ascontiguousarray(bounds),
            np.ascontiguousarray(ordinals),
            np.ascontiguousarray(lengths),
        )
        self.container, self.offset = np.ascontiguousarray(containers), np.ascontiguousarray(offsets)
        self.buffer_of = np.ascontiguousarray(which)
        self.sources.check(self.buffer_of, self.offset, self.length)
        self.chunks = max(0, self.bound.shape[0] - 1)

    def __len__(self):
        return self.chunks


cdef class BasePrefix:
    cdef uint64_t bytes_max, used, room
    cdef size_t bases_max, count, entries, slots
    cdef uint8_t *bytes_at
    cdef uint64_t *containers
    cdef uint32_t *ordinals
    cdef uint64_t *starts
    cdef uint32_t *table
    cdef Py_ssize_t seen  # views that look at the bytes: these must not move meanwhile
    cdef Py_ssize_t shape
    cdef Py_ssize_t stride

    def __cinit__(self, bytes_max, bases_max):
        reference.check_bounds(bytes_max, bases_max)
        self.bytes_max = bytes_max
        self.bases_max = bases_max
        self.slots = SLOTS_MIN
        self.table = <uint32_t *>calloc(self.slots, sizeof(uint32_t))
        if self.table is NULL:
            raise MemoryError("no memory for a prefix")

    def __dealloc__(self):
        free(self.bytes_at)
        free(self.containers)
        free(self.ordinals)
        free(self.starts)
        free(self.table)

    def __len__(self):
        return self.count

    @property
    def content(self):
        return memoryview(self) if self.used else memoryview(b"")

    @property
    def room_bytes(self):
        return self.room

    def __getbuffer__(self, Py_buffer *buffer, int flags):
        if flags & PyBUF_WRITABLE:
            raise BufferError("a prefix is read-only")
        self.shape = <Py_ssize_t>self.used
        self.stride = 1
        buffer.buf = self.bytes_at
        buffer.format = b"B"
        buffer.internal = NULL
        buffer.itemsize = 1
        buffer.len = self.shape
        buffer.ndim = 1
        buffer.obj = self
        buffer.readonly = 1
        buffer.shape = &self.shape
        buffer.strides = &self.stride
        buffer.suboffsets = NULL
        self.seen += 1

    def __releasebuffer__(self, Py_buffer *buffer):
        self.seen -= 1

    cdef int check_unseen(self) except -1:
        if self.seen:
            raise BufferError(f"{self.seen} views look at this prefix: release them first")
        return 0

    cdef bint grow_bytes(self, uint64_t wanted) noexcept nogil:
        cdef uint64_t room = self.room if self.room else <uint64_t>(1 << 16)
        cdef void *moved
        while room < wanted:
            room *= 2
        if room == self.room:
            return True
        moved = realloc(self.bytes_at, <size_t>room)
        if moved is NULL:
            return False
        self.bytes_at = <uint8_t *>moved
        self.room = room
        return True

    cdef bint grow_entries(self, size_t wanted) noexcept nogil:
        """Make room for so many bases, and for twice as many slots."""
        cdef size_t entries = self.entries if self.entries else SLOTS_MIN // 2
        cdef size_t slots, slot, i
        cdef void *moved
        cdef uint32_t *table
        if wanted <= self.entries:
            return True
        while entries < wanted:
            entries *= 2
        moved = realloc(self.containers, entries * sizeof(uint64_t))
        if moved is NULL:
            return False
        self.containers = <uint64_t *>moved
        moved = realloc(self.ordinals, entries * sizeof(uint32_t))
        if moved is NULL:
            return False
        self.ordinals = <uint32_t *>moved
        moved = realloc(self.starts, entries * sizeof(uint64_t))
        if moved is NULL:
            return False
        self.starts = <uint64_t *>moved
        slots = entries * 2
        if slots > self.slots:
            table = <uint32_t *>calloc(slots, sizeof(uint32_t))
            if table is NULL:
                return False
            free(self.table)
            self.table = table
            self.slots = slots
            for i in range(self.count):
                slot = slot_of(self.containers[i], self.ordinals[i]) & (slots - 1)
                while self.table[slot] != 0:
                    slot = (slot + 1) & (slots - 1)
                self.table[slot] = <uint32_t>(i + 1)
        self.entries = entries
        return True

    cdef void undo(self, size_t count, uint64_t used) noexcept nogil:
        """Take off the last bases: linear probing lets the last entries go in the reverse order of their coming."""
        cdef size_t slot
        while self.count > count:
            self.count -= 1
            slot = slot_of(self.containers[self.count], self.ordinals[self.count]) & (self.slots - 1)
            while self.table[slot] != <uint32_t>(self.count + 1):
                slot = (slot + 1) & (self.slots - 1)
            self.table[slot] = 0
        self.used = used

    cdef int take(
        self, uint64_t container, uint32_t ordinal, const uint8_t *base, uint32_t length
    ) noexcept nogil:
        """Return 1 for a base that is new, 0 for one that is there, -1 where memory is short."""
        cdef size_t slot
        if not self.grow_entries(self.count + 1):
            return -1
        slot = slot_of(container, ordinal) & (self.slots - 1)
        while self.table[slot] != 0:
            if self.containers[self.table[slot] - 1] == container and self.ordinals[self.table[slot] - 1] == ordinal:
                return 0
            slot = (slot + 1) & (self.slots - 1)
        if not self.grow_bytes(self.used + length):
            return -1
        memcpy(self.bytes_at + self.used, base, length)
        self.containers[self.count] = container
        self.ordinals[self.count] = ordinal
        self.starts[self.count] = self.used
        self.used += length
        self.count += 1
        self.table[slot] = <uint32_t>self.count
        return 1

    def add(self, rows, BaseRows bases not None):
        cdef Py_ssize_t taken = 0, i, number, row
        cdef size_t count_before = self.count
        cdef uint64_t used_before = self.used
        cdef size_t count
        cdef uint64_t used
        cdef bint short_of_memory = False
        cdef const Py_ssize_t[::1] row_of
        cdef const uint8_t *base
        self.check_unseen()
        reference.check_array("rows", rows, np.intp)
        row_of = np.ascontiguousarray(rows)
        number = row_of.shape[0]
        for i in range(number):
            if row_of[i] < 0 or row_of[i] >= bases.chunks:
                reference.check_rows(rows, bases.chunks)
        with nogil:
            while taken < number:
                row = row_of[taken]
                count, used = self.count, self.used
                for i in range(bases.bound[row], bases.bound[row + 1]):
                    base = bases.sources.table[bases.buffer_of[i]].at + bases.offset[i]
                    if self.take(bases.container[i], bases.ordinal[i], base, bases.length[i]) < 0:
                        short_of_memory = True
                        break
                if short_of_memory:
                    self.undo(count_before, used_before)
                    break
                if count and (self.used > self.bytes_max or self.count > self.bases_max):
                    self.undo(count, used)
                    break
                taken += 1
        if short_of_memory:
            raise MemoryError("no memory for a prefix")
        return taken

    def bases(self):
        containers = np.empty(self.count, np.uint64)
        ordinals = np.empty(self.count, np.uint32)
        starts = np.empty(self.count, np.uint64)
        cdef uint64_t[::1] container = containers, start = starts
        cdef uint32_t[::1] ordinal = ordinals
        if self.count:
            memcpy(&container[0], self.containers, self.count * sizeof(uint64_t))
            memcpy(&ordinal[0], self.ordinals, self.count * sizeof(uint32_t))
            memcpy(&start[0], self.starts, self.count * sizeof(uint64_t))
        return containers, ordinals, starts

    def clear(self):
        self.check_unseen()
        self.count = 0
        self.used = 0
        memset(self.table, 0, self.slots * sizeof(uint32_t))

"""What kernels that take slices of many buffers share with gather. Invariant: nothing is read before `check` passed."""

from libc.stdint cimport int32_t, uint8_t, uint32_t, uint64_t


cdef struct source:
    const uint8_t *at
    uint64_t length


cdef class Sources:
    cdef list payloads
    cdef source *table
    cdef Py_ssize_t count

    cdef int check(self, const int32_t[::1] which, const uint64_t[::1] offsets, const uint32_t[::1] lengths) except -1


cdef object array_of(str name, object values, object dtype)

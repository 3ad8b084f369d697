"""What kernels that look rows of tables up share. Invariant: where a key falls is not for who wrote a container to say."""

from cpython.buffer cimport Py_buffer
from libc.stddef cimport size_t
from libc.stdint cimport uint8_t, uint64_t


cdef uint64_t SEED


cdef inline size_t mixed(uint64_t value) noexcept nogil:
    """Return where a value falls, modulo whatever power of two a table of slots has."""
    cdef uint64_t result = (value ^ SEED) * <uint64_t>0x9E3779B97F4A7C15
    result = (result ^ (result >> 32)) * SEED
    return <size_t>(result ^ (result >> 29))


cdef struct table_rows:
    const uint8_t *at
    uint64_t count


cdef class Tables:
    """Tables' bytes, held from construction to destruction, as a C table. One that is None has as many rows as there
    are numbers, and they are nowhere.
    """

    cdef Py_buffer *views
    cdef table_rows *rows
    cdef Py_ssize_t held

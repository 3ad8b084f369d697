"""Gather kernel. Invariant: every slice is checked against its buffer and its target before one byte moves."""

from cpython.buffer cimport PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from libc.stdint cimport int32_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memmove

import numpy as np

from nearkin_shared.errors import BadInput


cdef class _Payload:
    """A caller's bytes, held from construction to destruction."""

    cdef Py_buffer view
    cdef bint held

    def __cinit__(self, str name, payload, bint writable, Py_ssize_t place=-1):
        try:
            PyObject_GetBuffer(payload, &self.view, PyBUF_WRITABLE if writable else PyBUF_SIMPLE)
        except (TypeError, ValueError, BufferError) as err:
            name = name if place < 0 else f"{name}[{place}]"
            wanted = "writable C-contiguous bytes" if writable else "C-contiguous bytes"
            raise BadInput(f"{name} {type(payload).__name__}: pass {wanted}") from err
        self.held = True

    def __dealloc__(self):
        if self.held:
            PyBuffer_Release(&self.view)


cdef class Sources:
    """Buffers as a C table, for this kernel and others that take slices of many; it keeps them alive."""

    def __cinit__(self, buffers):
        cdef _Payload payload
        self.payloads = [_Payload("buffers", buffer, False, i) for i, buffer in enumerate(buffers)]
        self.count = len(self.payloads)
        self.table = <source *>malloc((self.count + 1) * sizeof(source))
        if self.table is NULL:
            raise MemoryError("no memory to list the buffers")
        for i in range(self.count):
            payload = self.payloads[i]
            self.table[i].at = <const uint8_t *>payload.view.buf
            self.table[i].length = <uint64_t>payload.view.len

    def __dealloc__(self):
        free(self.table)

    cdef int check(self, const int32_t[::1] which, const uint64_t[::1] offsets, const uint32_t[::1] lengths) except -1:
        """Refuse slices that leave their buffers."""
        cdef Py_ssize_t i
        cdef uint64_t buffer_bytes
        _check_entries("offsets", offsets.shape[0], which.shape[0])
        _check_entries("lengths", lengths.shape[0], which.shape[0])
        for i in range(which.shape[0]):
            if which[i] < 0 or which[i] >= self.count:
                raise BadInput(f"slice {i} names buffer {which[i]}: there are {self.count}")
            buffer_bytes = self.table[which[i]].length
            if offsets[i] > buffer_bytes or lengths[i] > buffer_bytes - offsets[i]:
                raise BadInput(
                    f"slice {i} at offset {offsets[i]}, {lengths[i]} bytes: "
                    f"leaves buffer {which[i]} of {buffer_bytes} bytes"
                )
        return 0


cdef int _check_entries(str name, Py_ssize_t found, Py_ssize_t slices) except -1:
    if found != slices:
        raise BadInput(f"{name} has {found} entries: which has {slices}")
    return 0


cdef object array_of(str name, object values, object dtype):
    """Return a copy of `values`, C-contiguous: checked values must not change, even if they are in the memory written to.

    Refuses another dtype and more than one dimension.
    """
    if not isinstance(values, np.ndarray) or values.dtype != dtype or values.ndim != 1:
        found = f"{values.dtype}{list(values.shape)}" if isinstance(values, np.ndarray) else type(values).__name__
        raise BadInput(f"{name} {found}: pass a one-dimensional numpy array of {dtype}")
    return np.array(values, order="C")


cdef int _copy(
    Sources sources,
    const int32_t[::1] which,
    const uint64_t[::1] offsets,
    const uint32_t[::1] lengths,
    _Payload out,
    const uint64_t[::1] out_offsets,
) except -1:
    """Copy checked slices to places that are checked here."""
    cdef Py_ssize_t i
    cdef uint64_t out_bytes = <uint64_t>out.view.len
    cdef uint8_t *out_at = <uint8_t *>out.view.buf
    _check_entries("out_offsets", out_offsets.shape[0], which.shape[0])
    for i in range(which.shape[0]):
        if out_offsets[i] > out_bytes or lengths[i] > out_bytes - out_offsets[i]:
            raise BadInput(
                f"slice {i} goes to offset {out_offsets[i]}, {lengths[i]} bytes: leaves out of {out_bytes} bytes"
            )
    with nogil:
        for i in range(which.shape[0]):
            if lengths[i] > 0:
                # Not memcpy: `out` may share bytes with a buffer, and both take the same time at chunk sizes.
                memmove(out_at + out_offsets[i], sources.table[which[i]].at + offsets[i], lengths[i])
    return 0


def gather(buffers, which, offsets, lengths, out, out_offsets):
    cdef Sources sources = Sources(buffers)
    cdef const int32_t[::1] buffer_of = array_of("which", which, np.dtype(np.int32))
    cdef const uint64_t[::1] at = array_of("offsets", offsets, np.dtype(np.uint64))
    cdef const uint32_t[::1] length = array_of("lengths", lengths, np.dtype(np.uint32))
    cdef const uint64_t[::1] out_at = array_of("out_offsets", out_offsets, np.dtype(np.uint64))
    sources.check(buffer_of, at, length)
    _copy(sources, buffer_of, at, length, _Payload("out", out, True), out_at)


def gather_new(buffers, which, offsets, lengths):
    cdef Sources sources = Sources(buffers)
    cdef const int32_t[::1] buffer_of = array_of("which", which, np.dtype(np.int32))
    cdef const uint64_t[::1] at = array_of("offsets", offsets, np.dtype(np.uint64))
    lengths = array_of("lengths", lengths, np.dtype(np.uint32))
    cdef const uint32_t[::1] length = lengths
    sources.check(buffer_of, at, length)  # before the allocation: no array on the word of lengths that nothing backs
    cdef const uint64_t[::1] out_at = np.cumsum(lengths, dtype=np.uint64) - lengths
    out = np.empty(int(lengths.sum(dtype=np.uint64)), dtype=np.uint8)
    _copy(sources, buffer_of, at, length, _Payload("out", out, True), out_at)
    return out

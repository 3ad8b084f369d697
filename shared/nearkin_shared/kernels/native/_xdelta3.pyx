"""xdelta3 kernel. Invariant: ranges are checked before the loop, and a delta decodes exactly or is Corrupt."""

from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_FromString
from libc.stddef cimport size_t
from libc.stdint cimport uint8_t, uint32_t, uint64_t
from libc.string cimport memcpy

import numpy as np

from nearkin_shared.errors import BadInput, Corrupt, PermanentError
from nearkin_shared.kernels.reference.xdelta3_reference import DELTA_BYTES_MAX, LEVEL_MAX, PAIR_BYTES_MAX

cdef extern from "xdelta3_impl.h" nogil:
    enum:
        NK_XD3_OK
        NK_XD3_OVER_LIMIT
        NK_XD3_NO_MEMORY
    ctypedef struct nk_xd3_encoder:
        pass
    void nk_xd3_init()
    const char *nk_xd3_reason(int result)
    nk_xd3_encoder *nk_xd3_encoder_new()
    void nk_xd3_encoder_free(nk_xd3_encoder *encoder)
    int nk_xd3_encode(nk_xd3_encoder *encoder, const uint8_t *target, uint32_t target_bytes, const uint8_t *base,
                      uint32_t base_bytes, int level, uint32_t limit_bytes, uint32_t *delta_bytes)
    const uint8_t *nk_xd3_encoder_output(const nk_xd3_encoder *encoder, size_t *output_bytes)
    const char *nk_xd3_encoder_message(const nk_xd3_encoder *encoder)
    int nk_xd3_decode(const uint8_t *delta, size_t delta_bytes, const uint8_t *base, size_t base_bytes,
                      uint8_t *target, size_t target_bytes)

nk_xd3_init()


cdef class _Payload:
    """A caller's bytes, held from construction to destruction."""

    cdef Py_buffer view
    cdef bint held
    cdef const uint8_t *at
    cdef uint64_t length

    def __cinit__(self, str name, payload):
        try:
            PyObject_GetBuffer(payload, &self.view, PyBUF_SIMPLE)
        except (TypeError, ValueError, BufferError) as err:
            raise BadInput(f"{name} {type(payload).__name__}: pass C-contiguous bytes") from err
        self.held = True
        self.at = <const uint8_t *>self.view.buf
        self.length = <uint64_t>self.view.len

    def __dealloc__(self):
        if self.held:
            PyBuffer_Release(&self.view)


cdef object _array(str name, object values, object dtype):
    """Return a copy of `values`, C-contiguous: checked values must not change while the GIL is released.

    Refuses another dtype and more than one dimension.
    """
    if not isinstance(values, np.ndarray) or values.dtype != dtype or values.ndim != 1:
        found = f"{values.dtype}{list(values.shape)}" if isinstance(values, np.ndarray) else type(values).__name__
        raise BadInput(f"{name} {found}: pass a one-dimensional numpy array of {dtype}")
    return np.array(values, order="C")


cdef int _check_ranges(
    str name, uint64_t payload_bytes, const uint64_t[::1] offsets, const uint32_t[::1] lengths, uint32_t bytes_max
) except -1:
    """Refuse a range that leaves its payload or is longer than `bytes_max`."""
    cdef Py_ssize_t i
    if offsets.shape[0] != lengths.shape[0]:
        raise BadInput(f"{name}_lengths has {lengths.shape[0]} entries: {name}_offsets has {offsets.shape[0]}")
    for i in range(offsets.shape[0]):
        if offsets[i] > payload_bytes or lengths[i] > payload_bytes - offsets[i]:
            raise BadInput(
                f"{name} {i} at offset {offsets[i]}, {lengths[i]} bytes: leaves its payload of {payload_bytes} bytes"
            )
        if lengths[i] > bytes_max:
            raise BadInput(f"{name} {i} of {lengths[i]} bytes: at most {bytes_max}")
    return 0


cdef int _check_pairs(str name, Py_ssize_t found, Py_ssize_t pairs) except -1:
    if found != pairs:
        raise BadInput(f"{name} has {found} entries: there are {pairs} pairs")
    return 0


def encode_many(
    targets, target_offsets, target_lengths, bases, base_offsets, base_lengths, *, int level=1, limit_bytes=None
):
    cdef _Payload target_payload = _Payload("targets", targets)
    cdef _Payload base_payload = _Payload("bases", bases)
    cdef const uint64_t[::1] target_at = _array("target_offsets", target_offsets, np.dtype(np.uint64))
    cdef const uint32_t[::1] target_length = _array("target_lengths", target_lengths, np.dtype(np.uint32))
    cdef const uint64_t[::1] base_at = _array("base_offsets", base_offsets, np.dtype(np.uint64))
    cdef const uint32_t[::1] base_length = _array("base_lengths", base_lengths, np.dtype(np.uint32))
    cdef const uint32_t[::1] limit = (
        target_length if limit_bytes is None else _array("limit_bytes", limit_bytes, np.dtype(np.uint32))
    )
    _check_ranges("target", target_payload.length, target_at, target_length, PAIR_BYTES_MAX)
    _check_ranges("base", base_payload.length, base_at, base_length, PAIR_BYTES_MAX)
    cdef Py_ssize_t pairs = target_at.shape[0]
    _check_pairs("base_offsets", base_at.shape[0], pairs)
    _check_pairs("limit_bytes", limit.shape[0], pairs)
    if not 1 <= level <= LEVEL_MAX:
        raise BadInput(f"level {level}: choose 1 to {LEVEL_MAX}")

    delta_lengths = np.zeros(pairs, dtype=np.uint32)
    if pairs == 0:
        return np.empty(0, dtype=np.uint8), delta_lengths
    cdef uint32_t[::1] delta_length = delta_lengths
    cdef Py_ssize_t i = 0
    cdef int result = NK_XD3_OK
    cdef size_t output_bytes = 0
    cdef const uint8_t *output
    cdef uint8_t[::1] delta
    cdef nk_xd3_encoder *encoder = nk_xd3_encoder_new()
    if encoder is NULL:
        raise MemoryError("no memory for the xdelta3 encoder")
    try:
        with nogil:
            for i in range(pairs):
                result = nk_xd3_encode(
                    encoder,
                    target_payload.at + target_at[i], target_length[i],
                    base_payload.at + base_at[i], base_length[i],
                    level, limit[i], &delta_length[i],
                )
                if result != NK_XD3_OK and result != NK_XD3_OVER_LIMIT:
                    break
        if result == NK_XD3_NO_MEMORY:
            raise MemoryError(f"no memory to encode pair {i}")
        if result != NK_XD3_OK and result != NK_XD3_OVER_LIMIT:
            message = PyBytes_FromString(nk_xd3_encoder_message(encoder)).decode("ascii", "replace")
            raise PermanentError(f"xdelta3 cannot encode pair {i}: {message}")
        output = nk_xd3_encoder_output(encoder, &output_bytes)
        deltas = np.empty(output_bytes, dtype=np.uint8)
        if output_bytes > 0:
            delta = deltas
            memcpy(&delta[0], output, output_bytes)
    finally:
        nk_xd3_encoder_free(encoder)
    return deltas, delta_lengths


def decode_many(deltas, delta_offsets, delta_lengths, bases, base_offsets, base_lengths, target_lengths):
    cdef _Payload delta_payload = _Payload("deltas", deltas)
    cdef _Payload base_payload = _Payload("bases", bases)
    cdef const uint64_t[::1] delta_at = _array("delta_offsets", delta_offsets, np.dtype(np.uint64))
    cdef const uint32_t[::1] delta_length = _array("delta_lengths", delta_lengths, np.dtype(np.uint32))
    cdef const uint64_t[::1] base_at = _array("base_offsets", base_offsets, np.dtype(np.uint64))
    cdef const uint32_t[::1] base_length = _array("base_lengths", base_lengths, np.dtype(np.uint32))
    cdef const uint32_t[::1] target_length = _array("target_lengths", target_lengths, np.dtype(np.uint32))
    _check_ranges("delta", delta_payload.length, delta_at, delta_length, DELTA_BYTES_MAX)
    _check_ranges("base", base_payload.length, base_at, base_length, PAIR_BYTES_MAX)
    cdef Py_ssize_t pairs = delta_at.shape[0]
    _check_pairs("base_offsets", base_at.shape[0], pairs)
    _check_pairs("target_lengths", target_length.shape[0], pairs)

    cdef Py_ssize_t i
    cdef uint64_t targets_bytes = 0
    cdef uint32_t pair_bytes_max = PAIR_BYTES_MAX
    for i in range(pairs):
        if target_length[i] > pair_bytes_max:
            raise BadInput(f"target {i} of {target_length[i]} bytes: at most {pair_bytes_max}")
        targets_bytes += target_length[i]

    targets = np.empty(targets_bytes, dtype=np.uint8)
    cdef uint8_t nothing[1]
    cdef uint8_t *at = nothing
    cdef uint8_t[::1] target
    if targets_bytes > 0:
        target = targets
        at = &target[0]
    cdef int result = NK_XD3_OK
    i = 0
    with nogil:
        for i in range(pairs):
            result = nk_xd3_decode(
                delta_payload.at + delta_at[i], delta_length[i],
                base_payload.at + base_at[i], base_length[i],
                at, target_length[i],
            )
            if result != NK_XD3_OK:
                break
            at += target_length[i]
    if result != NK_XD3_OK:
        raise Corrupt(f"delta of pair {i}: {PyBytes_FromString(nk_xd3_reason(result)).decode('ascii')}")
    return targets

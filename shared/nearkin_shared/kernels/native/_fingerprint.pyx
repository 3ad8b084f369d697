"""Fingerprints, check tags and names. Invariant: every argument is checked before a byte is read; see the .pyi.

`offsets` and `lengths` are copied first: another thread that writes to them while the GIL is released cannot undo the check.
"""

import os

import numpy as np

from nearkin_shared.errors import BadInput, choose
from nearkin_shared.kernels.reference.fingerprint_reference import KEY_BYTES, TagKey

from libc.stddef cimport size_t
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memcpy

cdef extern from "fingerprint_impl.h" nogil:
    int NK_TAG_KEY_BYTES
    ctypedef struct nk_tag_key:
        pass
    int nk_cpu_machine()
    void nk_cpu_use(int path)
    int NK_SHA1_ENGINES
    ctypedef struct nk_sha1_choice:
        int narrow
        int wide
        int narrow_lanes_max
        double block_nanoseconds[4]
    const char *nk_sha1_engine_name(int engine)
    int nk_sha1_engine_here(int engine)
    nk_sha1_choice nk_sha1_chosen()
    nk_sha1_choice nk_sha1_only(int engine)
    void nk_sha1_many(const nk_sha1_choice *by, const uint8_t *payload, const uint64_t *offsets, const uint32_t *lengths,
                      const int64_t *order, size_t pieces, uint8_t *digests)
    void nk_tag_key_load(nk_tag_key *key, const uint8_t *material)
    void nk_check_tags(const uint8_t *payload, const uint64_t *offsets, const uint32_t *lengths, size_t pieces,
                       const nk_tag_key *key, uint64_t *tags)
    void nk_zero_mask(const uint8_t *payload, const uint64_t *offsets, const uint32_t *lengths, size_t pieces, uint8_t *mask)

assert NK_TAG_KEY_BYTES == KEY_BYTES  # the reference derives it, C unpacks it

# Above this many chunks the order does not matter: the last sixteen are a small part of the work.
cdef enum:
    SORTED_PIECES_MAX = 8192

_PATHS = ("base", "avx2", "avx512")


def _choose_path():
    paths = _PATHS[: nk_cpu_machine() + 1]
    wanted = os.environ.get("NEARKIN_CPU", paths[len(paths) - 1])  # no negative index: wraparound is off
    if wanted not in paths:
        raise choose("NEARKIN_CPU", wanted, paths)
    nk_cpu_use(_PATHS.index(wanted))
    return wanted


_path = _choose_path()


def cpu_path():
    return _path


cdef object _array(str what, object array, object dtype, int dimensions):
    if not isinstance(array, np.ndarray) or array.dtype != dtype or array.ndim != dimensions:
        found = f"{array.dtype} {array.shape}" if isinstance(array, np.ndarray) else type(array).__name__
        raise BadInput(f"{what} {found}: needs a {np.dtype(dtype).name} array of {dimensions} dimension(s)")
    return array


cdef uint8_t _nothing = 0


cdef class _Pieces:
    """A payload and chunks proved to lie within it; keeps the buffer and its own copy of the two arrays."""

    cdef const unsigned char[::1] view
    cdef uint64_t[::1] offset_view
    cdef uint32_t[::1] length_view
    cdef object lengths
    cdef const uint8_t *payload
    cdef const uint64_t *offsets
    cdef const uint32_t *lengths_at
    cdef size_t n

    def __cinit__(self, payload, offsets, lengths):
        cdef size_t i
        cdef uint64_t total_bytes
        cdef bint inside = True
        try:
            given = memoryview(payload)
            if given.format != "B" or given.ndim != 1 or not given.c_contiguous:
                raise TypeError("no bytes")  # and Cython's own reading of a struct's format may end in a null pointer
            self.view = given
        except (TypeError, ValueError, BufferError) as err:
            raise BadInput(f"payload {type(payload).__name__}: needs a C-contiguous buffer of bytes") from err
        _array("offsets", offsets, np.uint64, 1)
        _array("lengths", lengths, np.uint32, 1)
        if len(offsets) != len(lengths):
            raise BadInput(f"{len(offsets)} offsets, {len(lengths)} lengths: needs as many of each")
        self.lengths = np.array(lengths, dtype=np.uint32, order="C")
        self.offset_view = np.array(offsets, dtype=np.uint64, order="C")
        self.length_view = self.lengths
        self.n = <size_t>self.length_view.shape[0]
        total_bytes = <uint64_t>self.view.shape[0]
        self.payload = &self.view[0] if total_bytes else &_nothing
        self.offsets = &self.offset_view[0] if self.n else NULL
        self.lengths_at = &self.length_view[0] if self.n else NULL
        for i in range(self.n):
            inside = self.lengths_at[i] <= total_bytes and self.offsets[i] <= total_bytes - self.lengths_at[i]
            if not inside:
                raise BadInput(
                    f"chunk {i}: offset {self.offsets[i]} + length {self.lengths_at[i]} bytes is past the payload's {total_bytes}"
                )


def sha1_engines():
    return {
        nk_sha1_engine_name(engine).decode(): nk_sha1_chosen().block_nanoseconds[engine]
        for engine in range(NK_SHA1_ENGINES)
        if nk_sha1_engine_here(engine)
    }


def sha1_choice():
    cdef nk_sha1_choice chosen = nk_sha1_chosen()
    wide = nk_sha1_engine_name(chosen.wide).decode() if chosen.wide >= 0 else None
    return nk_sha1_engine_name(chosen.narrow).decode(), wide, chosen.narrow_lanes_max


def sha1_many(payload, offsets, lengths, *, engine=None):
    cdef _Pieces pieces = _Pieces(payload, offsets, lengths)
    cdef nk_sha1_choice by = nk_sha1_chosen()
    if engine is not None:
        known = list(sha1_engines())
        if engine not in known:
            raise BadInput(f"SHA-1 engine {engine!r}: this processor and NEARKIN_CPU leave {', '.join(known)}")
        by = nk_sha1_only([nk_sha1_engine_name(i).decode() for i in range(NK_SHA1_ENGINES)].index(engine))
    digests = np.empty((pieces.n, 20), dtype=np.uint8)
    if pieces.n == 0:
        return digests
    # Longest first, so that the lanes run out of work together.
    if pieces.n <= SORTED_PIECES_MAX:
        order = np.argsort(~pieces.lengths).astype(np.int64, copy=False)
    else:
        order = np.arange(pieces.n, dtype=np.int64)
    cdef const int64_t[::1] order_view = order
    cdef uint8_t[:, ::1] digest_view = digests
    with nogil:
        nk_sha1_many(&by, pieces.payload, pieces.offsets, pieces.lengths_at, &order_view[0], pieces.n, &digest_view[0, 0])
    return digests


def check_tags(payload, offsets, lengths, key):
    cdef _Pieces pieces = _Pieces(payload, offsets, lengths)
    cdef nk_tag_key unpacked
    if not isinstance(key, TagKey):
        raise BadInput(f"key {type(key).__name__}: needs a TagKey")
    cdef const unsigned char[::1] material = key.material
    tags = np.empty(pieces.n, dtype=np.uint64)
    if pieces.n == 0:
        return tags
    cdef uint64_t[::1] tag_view = tags
    with nogil:
        nk_tag_key_load(&unpacked, &material[0])
        nk_check_tags(pieces.payload, pieces.offsets, pieces.lengths_at, pieces.n, &unpacked, &tag_view[0])
    return tags


def zero_mask(payload, offsets, lengths):
    cdef _Pieces pieces = _Pieces(payload, offsets, lengths)
    mask = np.empty(pieces.n, dtype=np.uint8)
    if pieces.n == 0:
        return mask.view(np.bool_)
    cdef uint8_t[::1] mask_view = mask
    with nogil:
        nk_zero_mask(pieces.payload, pieces.offsets, pieces.lengths_at, pieces.n, &mask_view[0])
    return mask.view(np.bool_)


def names(fingerprints, tags, lengths):
    _array("fingerprints", fingerprints, np.uint8, 2)
    _array("tags", tags, np.uint64, 1)
    _array("lengths", lengths, np.uint32, 1)
    if fingerprints.shape[1] != 20:
        raise BadInput(f"fingerprints shape {fingerprints.shape}: needs (n, 20)")
    if not len(fingerprints) == len(tags) == len(lengths):
        raise BadInput(
            f"{len(fingerprints)} fingerprints, {len(tags)} tags, {len(lengths)} lengths: needs as many of each"
        )
    cdef const uint8_t[:, ::1] fingerprint_view = np.ascontiguousarray(fingerprints)
    cdef const uint64_t[::1] tag_view = np.ascontiguousarray(tags)
    cdef const uint32_t[::1] length_view = np.ascontiguousarray(lengths)
    cdef size_t i, j, n = <size_t>tag_view.shape[0]
    out = np.empty((n, 32), dtype=np.uint8)
    if n == 0:
        return out
    cdef uint8_t[:, ::1] out_view = out
    cdef uint8_t *row
    with nogil:
        for i in range(n):
            row = &out_view[i, 0]
            memcpy(row, &fingerprint_view[i, 0], 20)
            for j in range(8):
                row[20 + j] = <uint8_t>(tag_view[i] >> (8 * j))
            for j in range(4):
                row[28 + j] = <uint8_t>(length_view[i] >> (8 * j))
    return out

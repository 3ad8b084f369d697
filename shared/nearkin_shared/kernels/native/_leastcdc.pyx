"""The chunker `leastcdc`, compiled. Invariant: it answers exactly as its namesake in `_leastcdc_reference`.

Checks of the input and constants come from the reference, so that each is written once; the loops are in
leastcdc_impl.c.
"""

from libc.stddef cimport size_t
from libc.stdint cimport uint8_t, uint16_t, uint32_t, uint64_t

import os

import numpy as np

from nearkin_shared.errors import choose
from nearkin_shared.kernels.reference import leastcdc_reference as reference
from nearkin_shared.kernels.reference.chunking_reference import check_bounds, payload_view


cdef extern from "leastcdc_impl.h":
    ctypedef struct nk_leastcdc_constants:
        uint16_t spread[4]
        uint64_t keys[6]

    ctypedef struct nk_leastcdc_bounds:
        size_t low_bytes
        size_t high_bytes
        size_t max_bytes
        uint16_t least_hash
        int final

    int nk_leastcdc_best_path() noexcept nogil
    size_t nk_leastcdc_cut(
        const uint8_t *data, size_t total_bytes, const nk_leastcdc_bounds *bounds,
        const nk_leastcdc_constants *constants, int path, uint32_t *lengths) noexcept nogil


_PATHS = ("base", "avx2", "avx512")
_reachable = _PATHS[: nk_leastcdc_best_path() + 1]


def _choose_path():
    """Return the path's name: NEARKIN_CPU if it is set, else the best this machine has. Raises ConfigError."""
    demand = os.environ.get("NEARKIN_CPU", _reachable[len(_reachable) - 1])  # no negative index: wraparound is off
    if demand not in _reachable:
        raise choose("NEARKIN_CPU", demand, _reachable)
    return demand


_path = _choose_path()

cdef nk_leastcdc_constants _constants  # written here at import, only read afterwards
_constants.spread = reference.SPREAD
_constants.keys = reference.KEYS


def leastcdc_cut(data, min_bytes, target_bytes, max_bytes, bint final, *, path=None):
    """See `_leastcdc.pyi`."""
    cdef const uint8_t[::1] payload = payload_view(data)
    min_bytes, target_bytes, max_bytes = check_bounds(min_bytes, target_bytes, max_bytes)
    low_bytes, high_bytes = reference.cut_range(min_bytes, target_bytes, max_bytes)
    if path is not None and path not in _reachable:
        raise choose("path", path, _reachable)
    cdef int which = _PATHS.index(path or _path)
    cdef nk_leastcdc_bounds bounds
    bounds.low_bytes = low_bytes
    bounds.high_bytes = high_bytes
    bounds.max_bytes = max_bytes
    bounds.least_hash = reference.least_hash(target_bytes)
    bounds.final = final
    cdef size_t total_bytes = payload.shape[0]
    cdef size_t chunks
    # every chunk but the last is above low_bytes or equal to max_bytes
    lengths = np.empty(total_bytes // bounds.low_bytes + 1, dtype=np.uint32)
    cdef uint32_t[::1] room = lengths
    with nogil:
        chunks = nk_leastcdc_cut(&payload[0], total_bytes, &bounds, &_constants, which, &room[0])
    return lengths[:chunks].copy()


def cpu_path():
    return _path


def cpu_paths():
    return _reachable

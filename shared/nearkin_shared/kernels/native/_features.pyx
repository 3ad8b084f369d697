"""Features, compiled. Invariant: equal to `_features_reference`, whose checks run first; no read is out of bounds."""

from libc.stdint cimport uint8_t, uint32_t, uint64_t

import os

import numpy as np

from nearkin_shared.errors import choose
from nearkin_shared.kernels.reference import features_reference as reference

cdef extern from "features_impl.h":
    enum features_cpu:
        pass

    ctypedef struct features_plan:
        uint32_t features
        uint32_t super_features
        uint32_t window_bytes
        uint32_t sampling_bits
        uint32_t multipliers[64]
        uint32_t addends[64]
        uint64_t gear[256]
        uint64_t mix[3]

    ctypedef void features_sketch(
        const features_plan *plan,
        const uint8_t *payload,
        const uint64_t *offsets,
        const uint32_t *lengths,
        size_t chunks,
        uint64_t *out,
    ) noexcept nogil

    features_cpu features_cpu_best() noexcept nogil
    void features_init(uint32_t polynomial_low, features_cpu path) noexcept nogil
    void features_prepare(features_plan *plan) noexcept nogil
    features_sketch features_ntransform, features_ntransform_scalar
    features_sketch features_finesse, features_finesse_scalar
    features_sketch features_odess


def _chosen_path():
    """Return the path's name: NEARKIN_CPU if it is set, else the best this machine has. Raises ConfigError."""
    best = <int>features_cpu_best()
    reachable = ("base", "avx2", "avx512")[: best + 1]
    demand = os.environ.get("NEARKIN_CPU", reachable[best])
    if demand not in reachable:
        raise choose("NEARKIN_CPU", demand, reachable)
    return demand


_path = _chosen_path()
features_init(reference.POLYNOMIAL & 0xFFFFFFFF, <features_cpu><int>("base", "avx2", "avx512").index(_path))

# Everything of a plan that does not depend on the call's parameters.
cdef features_plan _constants
_constants.multipliers = reference.MULTIPLIERS
_constants.addends = reference.ADDENDS
_constants.gear = reference.GEAR
_constants.mix = reference.MIX


cdef _sketch(features_sketch *kernel, parameters, payload, offsets, lengths):
    cdef features_plan plan = _constants
    plan.features, plan.super_features, plan.window_bytes, plan.sampling_bits = parameters
    data, offsets, lengths = reference.check_chunks(payload, offsets, lengths)
    rows = np.zeros((len(offsets), plan.super_features), np.uint64)
    cdef const uint8_t[::1] bytes_view = data
    cdef const uint64_t[::1] offsets_view = offsets
    cdef const uint32_t[::1] lengths_view = lengths
    cdef uint64_t[:, ::1] rows_view = rows
    cdef size_t chunks = offsets_view.shape[0]
    # An empty payload has only empty chunks, whose rows are zeros already; it also has no first byte to point at.
    if chunks and bytes_view.shape[0]:
        with nogil:
            features_prepare(&plan)
            kernel(&plan, &bytes_view[0], &offsets_view[0], &lengths_view[0], chunks, &rows_view[0, 0])
    return rows


def ntransform(payload, offsets, lengths, *, features=12, super_features=3, window_bytes=48):
    plan = reference.check_plan(features, super_features, window_bytes)
    return _sketch(features_ntransform, plan, payload, offsets, lengths)


def ntransform_scalar(payload, offsets, lengths, *, features=12, super_features=3, window_bytes=48):
    plan = reference.check_plan(features, super_features, window_bytes)
    return _sketch(features_ntransform_scalar, plan, payload, offsets, lengths)


def finesse(payload, offsets, lengths, *, features=12, super_features=3, window_bytes=48):
    plan = reference.check_plan(features, super_features, window_bytes)
    return _sketch(features_finesse, plan, payload, offsets, lengths)


def finesse_scalar(payload, offsets, lengths, *, features=12, super_features=3, window_bytes=48):
    plan = reference.check_plan(features, super_features, window_bytes)
    return _sketch(features_finesse_scalar, plan, payload, offsets, lengths)


def odess(payload, offsets, lengths, *, features=12, super_features=3, window_bytes=48, sampling_bits=7):
    plan = reference.check_plan(features, super_features, window_bytes, sampling_bits)
    return _sketch(features_odess, plan, payload, offsets, lengths)


def cpu_path():
    return _path

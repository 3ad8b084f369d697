"""Define super-features in plain Python.

Invariant: the compiled kernel equals this definition.

Every answer is a function of the chunk's bytes and the parameters alone. A fingerprint is taken only of whole windows,
never of a window that reaches before the first byte of its chunk (N-transform, Odess) or sub-chunk (Finesse), so that
what a window contributes does not depend on its offset in the chunk.

    chunk:      |--------------------------------------------|   L bytes
    N-transform [window]                                         L - w + 1 fingerprints; 12 transforms of each; maxima
                 [window] ...                          [window]
    Finesse     |--------|--------|--------|  12 x floor(L/12)   largest fingerprint of each sub-chunk
                [window]..         rest of L mod 12 bytes unused
    Odess       as N-transform, but Gear hashes, and only where 7 bits are zero (1 position of 128)

Changing any constant here silently ends all matches with stored chunks: the golden digests detect it.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from nearkin_shared.errors import BadInput

if TYPE_CHECKING:
    from typing_extensions import Buffer

    Payload: TypeAlias = Buffer | NDArray[Any]  # before Python 3.12 type checkers do not see that an array is a buffer

FEATURES_MAX: Final = 64
WINDOW_BYTES_MIN: Final = 4  # below it a window is shorter than the fingerprint and nothing is ever reduced
WINDOW_BYTES_MAX: Final = 256
SAMPLING_BITS_MAX: Final = 16
GEAR_WINDOW_BYTES_MAX: Final = 64  # a 64-bit Gear hash has forgotten every byte before these

POLYNOMIAL: Final = 0x1B0073BB9
"""P, of degree 32: the first irreducible polynomial x^32 + s, s from SHAKE-256("nearkin features: rabin polynomial"),
little-endian 32-bit words in turn. Degree 32 because Algorithm 1 transforms modulo 2^32: a fingerprint fills the
word."""


def _words(name: str, count: int, word: str) -> list[int]:
    stream = hashlib.shake_256(f"nearkin features: {name}".encode()).digest(count * np.dtype(word).itemsize)
    return [int(value) for value in np.frombuffer(stream, word)]


MULTIPLIERS: Final = tuple(value | 1 for value in _words("multipliers", FEATURES_MAX, "<u4"))
"""m_i, odd so that each transform is a permutation of the 32-bit fingerprints and ties are as rare as can be."""
ADDENDS: Final = tuple(_words("addends", FEATURES_MAX, "<u4"))
"""a_i"""
GEAR: Final = tuple(_words("gear", 256, "<u8"))
"""What each byte adds to the Gear hash."""
MIX: Final = tuple(value | 1 for value in _words("mix", 3, "<u8"))
"""Multipliers of the super-feature hash: seed, step, last; odd, so that each is a bijection of 64 bits."""

_MASK64 = (1 << 64) - 1


class FeaturePlan(NamedTuple):
    """Validated parameters.

    `features` is 1..64 and a multiple of `super_features`; the window is within its bounds.
    """

    features: int
    super_features: int
    window_bytes: int
    sampling_bits: int


def _whole_number(name: str, value: object, least: int, most: int) -> int:
    try:
        number = operator.index(value)  # type: ignore[arg-type]  # anything else raises TypeError
    except TypeError as err:
        raise BadInput(f"{name} {value!r} is not a whole number: give {least} to {most}") from err
    if not least <= number <= most:
        raise BadInput(f"{name} {number} is out of range: give {least} to {most}")
    return number


def check_plan(features: int, super_features: int, window_bytes: int, sampling_bits: int | None = None) -> FeaturePlan:
    """Validate the parameters; `sampling_bits` is for Odess only. Raises BadInput."""
    features = _whole_number("features", features, 1, FEATURES_MAX)
    super_features = _whole_number("super_features", super_features, 1, features)
    if features % super_features:
        raise BadInput(f"features {features} is not a multiple of super_features {super_features}")
    if sampling_bits is None:
        window_bytes = _whole_number("window_bytes", window_bytes, WINDOW_BYTES_MIN, WINDOW_BYTES_MAX)
        return FeaturePlan(features, super_features, window_bytes, 0)
    sampling_bits = _whole_number("sampling_bits", sampling_bits, 0, SAMPLING_BITS_MAX)
    window_bytes = _whole_number("window_bytes", window_bytes, 32 + sampling_bits, GEAR_WINDOW_BYTES_MAX)
    return FeaturePlan(features, super_features, window_bytes, sampling_bits)


def check_chunks(
    payload: Payload, offsets: NDArray[np.uint64], lengths: NDArray[np.uint32]
) -> tuple[NDArray[np.uint8], NDArray[np.uint64], NDArray[np.uint32]]:
    """Return the payload as bytes, and the arrays, after a bounds check. Raises BadInput."""
    try:
        view = memoryview(payload)
    except TypeError as err:
        raise BadInput(f"payload is a {type(payload).__name__}: give a bytes-like object") from err
    if not view.c_contiguous:
        raise BadInput("payload is not C-contiguous: copy it first")
    data = np.frombuffer(view.cast("B"), np.uint8) if view.nbytes else np.empty(0, np.uint8)
    for name, array, dtype in (("offsets", offsets, np.uint64), ("lengths", lengths, np.uint32)):
        if not isinstance(array, np.ndarray) or array.dtype != dtype or array.ndim != 1 or not array.flags.c_contiguous:
            found = f"{array.dtype}{list(array.shape)}" if isinstance(array, np.ndarray) else type(array).__name__
            raise BadInput(f"{name} is {found}: give a contiguous one-dimensional array of {np.dtype(dtype)}")
    if len(offsets) != len(lengths):
        raise BadInput(
            f"offsets has {len(offsets)} entries and lengths {len(lengths)}: give one of each for every chunk"
        )
    payload_bytes = np.uint64(len(data))
    outside = (offsets > payload_bytes) | (lengths > payload_bytes - np.minimum(offsets, payload_bytes))
    if outside.any():
        at = int(outside.argmax())
        raise BadInput(
            f"chunk {at} at offset {int(offsets[at])} with length {int(lengths[at])} reaches past "
            f"the payload's {len(data)} bytes"
        )
    return data, offsets, lengths


def remainder(value: int) -> int:
    """Return the polynomial `value` modulo P; bit i is the coefficient of x^i."""
    while value.bit_length() > 32:
        value ^= POLYNOMIAL << (value.bit_length() - 33)
    return value


_PUSH = np.array([remainder(byte << 32) for byte in range(256)], np.uint32)


def rabin_fingerprints(data: NDArray[np.uint8], window_bytes: int) -> NDArray[np.uint32]:
    """Return the fingerprint of each window: uint32[len(data) - window_bytes + 1].

    A window is the polynomial over GF(2) whose coefficients are its bits, first byte highest; its fingerprint is the
    remainder modulo P. Computed here a byte of all windows at a time (Horner's rule), without rolling.
    """
    positions = len(data) - window_bytes + 1
    fingerprints = np.zeros(positions, np.uint32)
    for at in range(window_bytes):
        fingerprints = ((fingerprints << np.uint32(8)) | data[at : at + positions]) ^ _PUSH[
            fingerprints >> np.uint32(24)
        ]
    return fingerprints


def gear_hashes(data: NDArray[np.uint8], window_bytes: int) -> NDArray[np.uint64]:
    """Return each window's Gear hash: the low window_bytes bits of sum GEAR[byte] << age."""
    positions = len(data) - window_bytes + 1
    gear = np.array(GEAR, np.uint64)[data]
    hashes = np.zeros(positions, np.uint64)
    for at in range(window_bytes):
        hashes = (hashes << np.uint64(1)) + gear[at : at + positions]
    return hashes & np.uint64((1 << window_bytes) - 1)


def super_feature(rank: int, features: list[int]) -> int:
    """Return SF_rank: a 64-bit hash of the rank and the features in order, never 0.

    A hash of 0 becomes 1. Each step is a bijection of the 64-bit state: rows that differ in one feature of a group
    never share that group's super-feature, and the rank in the seed keeps SF_0 and SF_1 of equal features apart.
    """
    state = (rank + 1) * MIX[0] & _MASK64
    for feature in features:
        state = (state ^ feature) * MIX[1] & _MASK64
        state ^= state >> 32
    state = state * MIX[2] & _MASK64
    state ^= state >> 32
    return state or 1


def _transformed_maxima(words: NDArray[np.uint32], features: int) -> list[int]:
    return [int((words * np.uint32(MULTIPLIERS[i]) + np.uint32(ADDENDS[i])).max()) for i in range(features)]


def _group_in_order(features: list[int], super_features: int) -> list[int]:
    per_group = len(features) // super_features
    return [super_feature(x, features[x * per_group : (x + 1) * per_group]) for x in range(super_features)]


def _group_by_rank(features: list[int], super_features: int) -> list[int]:
    sets = [sorted(features[at : at + super_features], reverse=True) for at in range(0, len(features), super_features)]
    return [super_feature(rank, [ordered[rank] for ordered in sets]) for rank in range(super_features)]


def _ntransform_row(chunk: NDArray[np.uint8], plan: FeaturePlan) -> list[int]:
    maxima = _transformed_maxima(rabin_fingerprints(chunk, plan.window_bytes), plan.features)
    return _group_in_order(maxima, plan.super_features)


def _finesse_row(chunk: NDArray[np.uint8], plan: FeaturePlan) -> list[int]:
    sub_bytes = len(chunk) // plan.features
    sub_chunks = [chunk[i * sub_bytes : (i + 1) * sub_bytes] for i in range(plan.features)]
    maxima = [int(rabin_fingerprints(sub_chunk, plan.window_bytes).max()) for sub_chunk in sub_chunks]
    return _group_by_rank(maxima, plan.super_features)


def _odess_row(chunk: NDArray[np.uint8], plan: FeaturePlan) -> list[int]:
    hashes = gear_hashes(chunk, plan.window_bytes)
    below_mask = plan.window_bytes - plan.sampling_bits
    sampled = hashes[hashes < np.uint64(1 << below_mask)] if plan.sampling_bits else hashes
    if not len(sampled):
        return [0] * plan.super_features
    words = (sampled >> np.uint64(below_mask - 32)).astype(np.uint32)
    return _group_in_order(_transformed_maxima(words, plan.features), plan.super_features)


def _sketched(
    row: Callable[[NDArray[np.uint8], FeaturePlan], list[int]],
    payload: Payload,
    offsets: NDArray[np.uint64],
    lengths: NDArray[np.uint32],
    plan: FeaturePlan,
) -> NDArray[np.uint64]:
    """Return uint64[n, k] super-features by `row`; zeros for a chunk shorter than its windows."""
    data, offsets, lengths = check_chunks(payload, offsets, lengths)
    rows = np.zeros((len(offsets), plan.super_features), np.uint64)
    for i, (offset, length) in enumerate(zip(offsets.tolist(), lengths.tolist(), strict=True)):
        if length >= plan.features * plan.window_bytes:
            rows[i] = np.array(row(data[offset : offset + length], plan), np.uint64)
    return rows


def ntransform(
    payload: Payload,
    offsets: NDArray[np.uint64],
    lengths: NDArray[np.uint32],
    *,
    features: int = 12,
    super_features: int = 3,
    window_bytes: int = 48,
) -> NDArray[np.uint64]:
    """N-transform super-features; see the compiled kernel's stub for the contract."""
    return _sketched(_ntransform_row, payload, offsets, lengths, check_plan(features, super_features, window_bytes))


def finesse(
    payload: Payload,
    offsets: NDArray[np.uint64],
    lengths: NDArray[np.uint32],
    *,
    features: int = 12,
    super_features: int = 3,
    window_bytes: int = 48,
) -> NDArray[np.uint64]:
    """Finesse super-features; see the compiled kernel's stub for the contract."""
    return _sketched(_finesse_row, payload, offsets, lengths, check_plan(features, super_features, window_bytes))


def odess(
    payload: Payload,
    offsets: NDArray[np.uint64],
    lengths: NDArray[np.uint32],
    *,
    features: int = 12,
    super_features: int = 3,
    window_bytes: int = 48,
    sampling_bits: int = 7,
) -> NDArray[np.uint64]:
    """Odess super-features; see the compiled kernel's stub for the contract."""
    plan = check_plan(features, super_features, window_bytes, sampling_bits)
    return _sketched(_odess_row, payload, offsets, lengths, plan)


ntransform_scalar = ntransform
finesse_scalar = finesse


def cpu_path() -> str:
    """Return "python": the reference has no other path."""
    return "python"

"""Compute Reed-Solomon parity over shards.

Byte t of parity shard i is the sum over j of c(i, j) times byte t of data shard j, in GF(256) modulo
x^8 + x^4 + x^3 + x^2 + 1, where c(i, j) = 1 / ((data + i) xor j): a Cauchy matrix, as in ISA-L. pyeclib computes it;
its
fragment headers are not stored.

Invariant: any `data` of the `data + parity` shards determine all others, byte for byte.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from nearkin_shared.config.validators import PARITY_SHARDS_MAX
from nearkin_shared.errors import BadInput, ConfigError
from nearkin_shared.types import U8

if TYPE_CHECKING:
    from collections.abc import Sequence

SHARDS_MAX = PARITY_SHARDS_MAX
"""Data and parity together: the limit of liberasurecode."""
_CODE = "isa_l_rs_cauchy"


def parity_of(data: U8, parity: int) -> U8:
    """Return uint8[parity, n] for data shards uint8[k, n].

    Raises BadInput, ConfigError (pyeclib is missing).
    """
    shards, _ = _check_shards(data, len(data), parity)
    encoded = _driver(shards, parity).encode(np.ascontiguousarray(data).tobytes())
    return _strip_headers(encoded[shards:], data.shape[1])


def rebuild_shards(shards: U8, data: int, lost: Sequence[int]) -> U8:
    """Return uint8[k + m, n] with the rows `lost` computed from the others.

    The bytes in lost rows are ignored. Raises BadInput for more lost shards than parity, ConfigError if pyeclib is
    missing.
    """
    _, parity = _check_shards(shards, data, len(shards) - data)
    if len(lost) > parity:
        raise BadInput(f"{len(lost)} of {len(shards)} shards lost: {parity} can be computed")
    if not lost:
        return shards
    missing = sorted(set(lost))
    driver = _driver(data, parity)
    # A fragment's header has its number and sizes and does not depend on its bytes, so headers of zeros serve.
    heads = [fragment[: len(fragment) - shards.shape[1]] for fragment in driver.encode(bytes(data * shards.shape[1]))]
    available = [heads[row] + shards[row].tobytes() for row in range(len(shards)) if row not in missing]
    found = shards.copy()
    found[missing] = _strip_headers(driver.reconstruct(available, missing), shards.shape[1])
    return found


def check(data: int, parity: int) -> None:
    """Raise ConfigError if the scheme is unavailable here, BadInput if it is invalid."""
    _check_shards(np.zeros((data, 1), np.uint8), data, parity)
    _driver(data, parity)


def _strip_headers(fragments: Sequence[bytes], shard_bytes: int) -> U8:
    rows: list[NDArray[Any]] = [np.frombuffer(fragment, np.uint8)[-shard_bytes:] for fragment in fragments]
    return np.stack(rows)


def _check_shards(shards: U8, data: int, parity: int) -> tuple[int, int]:
    if shards.ndim != 2 or shards.dtype != np.uint8 or not shards.shape[1]:
        raise BadInput(f"shards {shards.dtype}{shards.shape}: want uint8[shards, bytes above 0]")
    if data < 1 or parity < 1 or data + parity > SHARDS_MAX:
        raise BadInput(f"{data} data and {parity} parity shards: want one of each, and {SHARDS_MAX} together at most")
    return data, parity


@lru_cache(SHARDS_MAX)
def _driver(data: int, parity: int) -> Any:
    try:
        from pyeclib.ec_iface import ECDriver, ECDriverError
    except ImportError as err:
        raise ConfigError("parity: pyeclib is not installed; pip install 'nearkin[parity]'") from err
    try:
        return ECDriver(k=data, m=parity, ec_type=_CODE)
    except ECDriverError as err:
        raise ConfigError(f"parity: this pyeclib has no {_CODE} ({err}): install its wheel, or ISA-L with it") from err

"""Sketches by name. Invariant: one sketch name, one function of the bytes; its SFs never meet another's.

A sketch is named by its algorithm and all its parameters, `finesse/12/3/48`: that name is the namespace of its index,
is written beside each segment, and is enough to compute the same SFs again when the index is rebuilt.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from nearkin_shared.config.reduction import FeatureSettings
from nearkin_shared.errors import Corrupt, choose
from nearkin_shared.kernels import features
from nearkin_shared.types import U8, U32, U64
from nearkin_shared.utils.frozen import frozen

NONE = "none"
"""The name written for segments that were not sketched."""

_Kernel = Callable[[U8, U64, U32, list[int]], U64]


def _ntransform(payload: U8, offsets: U64, lengths: U32, parameters: list[int]) -> U64:
    count, groups, window = parameters
    return features.ntransform(payload, offsets, lengths, features=count, super_features=groups, window_bytes=window)


def _finesse(payload: U8, offsets: U64, lengths: U32, parameters: list[int]) -> U64:
    count, groups, window = parameters
    return features.finesse(payload, offsets, lengths, features=count, super_features=groups, window_bytes=window)


def _odess(payload: U8, offsets: U64, lengths: U32, parameters: list[int]) -> U64:
    count, groups, window, bits = parameters
    return features.odess(
        payload, offsets, lengths, features=count, super_features=groups, window_bytes=window, sampling_bits=bits
    )


ALGORITHMS: Mapping[str, _Kernel] = {"finesse": _finesse, "ntransform": _ntransform, "odess": _odess}
NAMES = (*ALGORITHMS, NONE)
_PARAMETERS = {"finesse": 3, "ntransform": 3, "odess": 4, NONE: 0}


@frozen
class Sketch:
    """One algorithm with its parameters: (features, super-features, window bytes, and for odess sampling bits)."""

    algorithm: str
    parameters: tuple[int, ...]

    @property
    def name(self) -> str:
        """Return the name that segments and indexes carry."""
        return "/".join([self.algorithm, *map(str, self.parameters)])

    def super_features(self, payload: U8, offsets: U64, lengths: U32) -> U64:
        """Return uint64[n, k]; 0 where a chunk has none. One kernel call for the batch."""
        if self.algorithm == NONE:
            return np.zeros((len(lengths), 1), np.uint64)
        return ALGORITHMS[self.algorithm](payload, offsets, lengths, list(self.parameters))

    @staticmethod
    def parse(name: str) -> Sketch:
        """Return the sketch of that name. Raises Corrupt: it comes from a container."""
        algorithm, *parameters = name.split("/")
        try:
            sketch = Sketch(algorithm, tuple(int(p) for p in parameters))
            known = algorithm in NAMES and len(parameters) == _PARAMETERS[algorithm]
        except ValueError as err:
            raise Corrupt(f"sketch {name!r}: does not parse") from err
        if not known:
            raise Corrupt(f"sketch {name!r}: unknown to this Nearkin; upgrade")
        return sketch


def sketcher(settings: FeatureSettings) -> Sketch:
    """Return the sketch that the settings name. Raises ConfigError listing the known names."""
    if settings.algorithm == NONE:
        return Sketch(NONE, ())
    if settings.algorithm not in ALGORITHMS:
        raise choose("features.algorithm", settings.algorithm, NAMES)
    shape = settings.count, settings.super_features, settings.window_bytes
    return Sketch(settings.algorithm, (*shape, settings.sampling_bits) if settings.algorithm == "odess" else shape)

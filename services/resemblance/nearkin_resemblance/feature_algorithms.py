"""Select the feature algorithm by name.

A sketch is named by its algorithm and all its parameters, `finesse/12/3/48`. The name is the namespace of its index, is
stored with each segment, and suffices to compute the same super-features again for an index rebuild.

Invariant: a sketch name is one function of the bytes; only super-features of equal sketches are compared.
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
"""Sketch name of segments without super-features."""

WINDOW_BYTES = 48
"""Window of the rolling hash. Finesse and N-transform use 48; Odess needs 32 more than its sampling bits at least."""
ODESS_SAMPLING_BITS = 7
"""Odess samples one position in 2 to this power, as in its paper."""

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
    """One algorithm and its parameters.

    These are (features, super-features, window bytes), and for odess sampling bits.
    """

    algorithm: str
    parameters: tuple[int, ...]

    @property
    def name(self) -> str:
        """Return the name stored with segments and in the index."""
        return "/".join([self.algorithm, *map(str, self.parameters)])

    def super_features(self, payload: U8, offsets: U64, lengths: U32) -> U64:
        """Return uint64[n, k]; 0 for none. One kernel call per batch."""
        if self.algorithm == NONE:
            return np.zeros((len(lengths), 1), np.uint64)
        return ALGORITHMS[self.algorithm](payload, offsets, lengths, list(self.parameters))

    @staticmethod
    def parse(name: str) -> Sketch:
        """Return the sketch of a name, which comes from a container. Raises Corrupt."""
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
    """Return the sketch that the settings name. Raises ConfigError with the known names."""
    if settings.algorithm == NONE:
        return Sketch(NONE, ())
    if settings.algorithm not in ALGORITHMS:
        raise choose("features.algorithm", settings.algorithm, NAMES)
    shape = settings.count, settings.super_features, WINDOW_BYTES
    return Sketch(settings.algorithm, (*shape, ODESS_SAMPLING_BITS) if settings.algorithm == "odess" else shape)

"""Select the chunking algorithm by name.

Invariant: the same bytes give the same chunks, in whatever pieces they arrive.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from nearkin_shared.config.reduction import ChunkerSettings
from nearkin_shared.errors import choose
from nearkin_shared.kernels import chunking
from nearkin_shared.types import U8, U32

Cut = Callable[[U8, bool], U32]
"""(bytes from a chunk's start, whether the blob ends with them) -> lengths of the final chunks."""


def _fastcdc(settings: ChunkerSettings) -> Cut:
    bounds = int(settings.min_bytes), int(settings.target_bytes), int(settings.max_bytes)
    return lambda data, final: chunking.fastcdc_cut(data, *bounds, final=final)


def _leastcdc(settings: ChunkerSettings) -> Cut:
    bounds = int(settings.min_bytes), int(settings.target_bytes), int(settings.max_bytes)
    return lambda data, final: chunking.leastcdc_cut(data, *bounds, final=final)


def _rabin(settings: ChunkerSettings) -> Cut:
    bounds = int(settings.min_bytes), int(settings.target_bytes), int(settings.max_bytes)
    return lambda data, final: chunking.rabin_cut(data, *bounds, final=final)


def _inck(settings: ChunkerSettings) -> Cut:
    bounds = int(settings.min_bytes), int(settings.target_bytes), int(settings.max_bytes)
    return lambda data, final: chunking.inck_cut(data, *bounds, final=final)


def _fixed_chunker(settings: ChunkerSettings) -> Cut:
    chunk_bytes = int(settings.target_bytes)
    return lambda data, final: chunking.fixed_cut(data, chunk_bytes, final=final)


def _whole_chunker(settings: ChunkerSettings, segment_bytes_max: int) -> Cut:
    return lambda data, final: chunking.whole_cut(data, segment_bytes_max, final=final)


ALGORITHMS: Mapping[str, Callable[[ChunkerSettings], Cut]] = {
    "fastcdc": _fastcdc,
    "leastcdc": _leastcdc,
    "rabin": _rabin,
    "inck": _inck,
    "fixed": _fixed_chunker,
}
NAMES = (*ALGORITHMS, "whole")


def chunker(settings: ChunkerSettings, segment_bytes_max: int) -> Cut:
    """Return the chunker named by `settings.algorithm`.

    Raises: ConfigError with the known names.
    """
    if settings.algorithm == "whole":
        return _whole_chunker(settings, segment_bytes_max)
    if settings.algorithm not in ALGORITHMS:
        raise choose("chunker.algorithm", settings.algorithm, NAMES)
    return ALGORITHMS[settings.algorithm](settings)

"""Compare the kernels of another build with those of this one.

Invariant: both give the same answers, else they are not compared.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from nearkin.lab.similar_chunks import CHUNK_BYTES_MAX, CHUNK_BYTES_MIN, CHUNK_BYTES_TARGET
from nearkin.lab.suites.kernel_cases import (
    CHUNKING,
    FEATURES,
    HASHES,
    Kernel,
    Material,
    PreparedRow,
    over_segments,
    timed_row,
)
from nearkin_shared.errors import BadInput
from nearkin_shared.kernels import chunking, features, fingerprint

_OF_SEGMENTS: tuple[tuple[str, str, str, Callable[..., Any]], ...] = (
    ("sha1", "_fingerprint", HASHES, fingerprint.sha1_many),
    ("finesse", "_features", FEATURES, features.finesse),
    ("odess", "_features", FEATURES, features.odess),
    ("ntransform", "_features", FEATURES, features.ntransform),
)
_CHUNKERS = ("fastcdc", "rabin", "inck")


def kernels_against(folder: Path) -> list[Kernel]:
    """Return rows for the kernels in `folder`, built (`_*.so`) from another source.

    Raises BadInput if a kernel is missing, and, when a row is prepared, if it gives other answers.
    """
    rows = []
    for name, module, group, ours in _OF_SEGMENTS:
        theirs = getattr(_load(folder, module), ours.__name__)
        rows.append(_row(name, group, folder, partial(_prepare_segments, folder, name, ours, theirs)))
    built = _load(folder, "_chunking")
    for name in _CHUNKERS:
        ours, theirs = (getattr(one, f"{name}_cut") for one in (chunking, built))
        rows.append(_row(name, CHUNKING, folder, partial(_prepare_chunker, folder, name, ours, theirs)))
    return rows


def _row(name: str, group: str, folder: Path, prepare: Callable[[Material], PreparedRow]) -> Kernel:
    return Kernel(f"{name} (against)", group, f"built in {folder}", prepare, ours=False, install="", aim=None)


def _load(folder: Path, name: str) -> ModuleType:
    built = sorted(folder.glob(f"{name}.*.so"))
    if len(built) != 1:
        raise BadInput(f"--against {folder}: holds {len(built)} built files of {name}, needs one")
    spec = importlib.util.spec_from_file_location(f"against.{name}", built[0])
    if spec is None or spec.loader is None:
        raise BadInput(f"--against {built[0]}: is no extension module")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except ImportError as error:
        raise BadInput(f"--against {built[0]}: {error}") from error
    return module


def _differs(folder: Path, name: str) -> BadInput:
    return BadInput(f"--against {folder}: {name} gives other answers than this build's: their speeds do not compare")


def _prepare_segments(
    folder: Path, name: str, ours: Callable[..., Any], theirs: Callable[..., Any], material: Material
) -> PreparedRow:
    for segment in material.segments:
        places = (segment.payload, segment.offsets, segment.lengths)
        if not np.array_equal(ours(*places), theirs(*places)):
            raise _differs(folder, name)
    return over_segments(material, theirs)


def _prepare_chunker(
    folder: Path, name: str, ours: Callable[..., Any], theirs: Callable[..., Any], material: Material
) -> PreparedRow:
    sizes = (CHUNK_BYTES_MIN, CHUNK_BYTES_TARGET, CHUNK_BYTES_MAX, True)
    if not np.array_equal(ours(material.data, *sizes), theirs(material.data, *sizes)):
        raise _differs(folder, name)
    return timed_row(lambda: theirs(material.data, *sizes), len(material.data))

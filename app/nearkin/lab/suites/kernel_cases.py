"""Define the measured kernels.

Data have the form that they have in a store: segments of up to 900 KiB, a call each. A new row is one function:

    @kernel("crc32", group="hashes", settings="zlib")
    def _crc32(material: Material) -> Prepared:
        return timed(lambda: zlib.crc32(material.data), len(material.data))

It runs once, outside the clock. `PreparedRow.once` is one pass and returns its seconds of processor time, so that a
program with a clock of its own can be a row as well. A peer that is not installed raises MissingPeer.

Invariant: a row has a unique name, and reports how many bytes one pass handles.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path

import numpy as np
from backports.zstd import ZstdDict, compress

from nearkin.lab.measure import CommandFailed, first_line, run_short
from nearkin.lab.measurement_record import Corpus
from nearkin.lab.similar_chunks import (
    CHUNK_BYTES_MAX,
    CHUNK_BYTES_MIN,
    CHUNK_BYTES_TARGET,
    Bytes,
    ChunkPairs,
    Chunks,
    Cut,
    Lengths,
    Offsets,
    Sketch,
    find_pairs,
    fresh_chunks,
    starts_of,
)
from nearkin.lab.tools.base_tool import MissingPeer
from nearkin_shared.errors import BadInput
from nearkin_shared.kernels import chunking, features, fingerprint, shared_bytes, size_estimate, xdelta3
from nearkin_shared.kernels.selection import USE_CYTHON
from nearkin_shared.utils.frozen import frozen

SEGMENT_BYTES_MAX = 900 << 10
SAMPLE_BYTES_MAX = 16 << 20
"""The size of a sample, taken evenly from the versions of a corpus: one pass of most kernels."""
PAIRED_BYTES_MAX = 256 << 20
"""Of a corpus, whole versions: where similar chunks are looked for."""
REDUCTION_BYTES_MAX = 2 << 30
"""The bytes of a corpus over which chunkers are compared by the reduction of dedup."""

_MEAN_TOLERANCE = 0.004
IN_THIS_PROCESS = "in this process"

CHUNKING, HASHES, FEATURES, DELTAS = "chunking", "hashes", "features", "deltas"


class Material:
    """The inputs of the rows, made from one corpus."""

    def __init__(self, corpus: Corpus) -> None:
        self.corpus = corpus
        self.data: Bytes = _sample(corpus.paths)

    @cached_property
    def segments(self) -> list[Chunks]:
        """Cut the sample into segments, each a buffer, with fastcdc: 2 to 64 KiB, 8 KiB target."""
        found = []
        for start in range(0, len(self.data), SEGMENT_BYTES_MAX):
            payload = self.data[start : start + SEGMENT_BYTES_MAX].copy()
            lengths = chunking.fastcdc_cut(payload, CHUNK_BYTES_MIN, CHUNK_BYTES_TARGET, CHUNK_BYTES_MAX, True)
            found.append(Chunks(payload, starts_of(lengths), lengths))
        return found

    @cached_property
    def pairs(self) -> ChunkPairs:
        """Find similar chunks with `finesse` among the fresh chunks.

        These are taken from up to `PAIRED_BYTES_MAX`; the pairs have 16 MiB at most. Raises BadInput if there are
        none.
        """
        sizes = np.cumsum([path.stat().st_size for path in self.corpus.paths])
        taken = max(2, int(np.searchsorted(sizes, PAIRED_BYTES_MAX)))  # similar chunks lie in different versions
        pairs = find_pairs(fresh_chunks(self.corpus.paths[:taken], chunking.fastcdc_cut), "finesse")
        if not len(pairs):
            raise BadInput("no two similar chunks in it; take more versions")
        few = np.flatnonzero(np.cumsum(pairs.targets.lengths, dtype=np.int64) <= SAMPLE_BYTES_MAX)
        return ChunkPairs(pairs.targets.take(few), pairs.bases.take(few))

    def mean_chunk_bytes(self, cut: Cut) -> float:
        """Return the mean chunk as `cut` cuts the corpus."""
        total_bytes = count = 0
        for data in _map_files(self.corpus.paths):
            total_bytes += len(data)
            count += len(cut(data, CHUNK_BYTES_MIN, CHUNK_BYTES_TARGET, CHUNK_BYTES_MAX, True))
        return total_bytes / count

    def dedup(self, cut: Cut) -> tuple[float, float]:
        """Return the reduction of dedup and the mean chunk length, bytes, with the chunker `cut`."""
        seen: set[bytes] = set()
        fresh_bytes = total_bytes = count = 0
        for data in _map_files(self.corpus.paths):
            lengths = cut(data, CHUNK_BYTES_MIN, CHUNK_BYTES_TARGET, CHUNK_BYTES_MAX, True)
            names = fingerprint.sha1_many(data, starts_of(lengths), lengths).tobytes()
            total_bytes += len(data)
            count += len(lengths)
            for number, length in enumerate(lengths.tolist()):
                name = names[20 * number : 20 * number + 20]
                if name not in seen:
                    seen.add(name)
                    fresh_bytes += length
        return total_bytes / fresh_bytes, total_bytes / count


def _map_files(paths: Sequence[Path]) -> Iterator[Bytes]:
    """Yield the files, one after another, up to `REDUCTION_BYTES_MAX`."""
    left_bytes = REDUCTION_BYTES_MAX
    for path in paths:
        if left_bytes:
            data: Bytes = np.memmap(path, np.uint8, "r")[:left_bytes]
            left_bytes -= len(data)
            yield data


def _sample(paths: Sequence[Path]) -> Bytes:
    each = max(1, SAMPLE_BYTES_MAX // len(paths))
    parts = []
    for path in paths:
        with path.open("rb") as file:
            parts.append(np.frombuffer(file.read(each), dtype=np.uint8))
    return np.concatenate(parts)


@frozen
class PreparedRow:
    """A prepared row: `once()` is one pass over `bytes_handled` bytes.

    It returns seconds of processor time.
    """

    once: Callable[[], float]
    bytes_handled: int
    reduction: float | None = None
    """The reduction that dedup reaches with a chunker over the corpus."""
    mean_chunk_bytes: float | None = None
    version: str = IN_THIS_PROCESS
    repeats: bool = True
    """Whether a measurement has several passes; else one, which is long enough."""


def timed_row(call: Callable[[], object], bytes_handled: int) -> PreparedRow:
    """Return a row whose pass is `call()`, all of it in this thread."""

    def once() -> float:
        started = time.thread_time()  # other load on the machine takes wall time, and hardly any processor time
        call()
        return time.thread_time() - started

    return PreparedRow(once, bytes_handled)


def over_segments(material: Material, call: Callable[[Bytes, Offsets, Lengths], object]) -> PreparedRow:
    """Return a row whose pass calls a function for every segment.

    The function receives payload, offsets and lengths of the segment's chunks.
    """
    segments = material.segments

    def all_of_them() -> None:
        for segment in segments:
            call(segment.payload, segment.offsets, segment.lengths)

    return timed_row(all_of_them, sum(segment.total_bytes for segment in segments))


@frozen
class Kernel:
    """One row, before it is prepared."""

    name: str
    group: str
    settings: str
    prepare: Callable[[Material], PreparedRow]
    ours: bool
    install: str
    aim: float | None
    """By OpenSSL's SHA-1, with AVX-512."""


KERNELS: dict[str, Kernel] = {}
"""Every row by name, in the order of the table."""


def kernel(
    name: str, *, group: str, settings: str = "", ours: bool = True, install: str = "", aim: float | None = None
) -> Callable[[Callable[[Material], PreparedRow]], Callable[[Material], PreparedRow]]:
    """Register a row.

    A peer (`ours` False) runs when it is named; `install` describes how to get it.
    """

    def register(prepare: Callable[[Material], PreparedRow]) -> Callable[[Material], PreparedRow]:
        assert name not in KERNELS, name
        KERNELS[name] = Kernel(name, group, settings, prepare, ours, install, aim)
        return prepare

    return register


# ------------------------------------------------------------------ chunking


def chunker_row(material: Material, cut: Cut, note: str = IN_THIS_PROCESS) -> PreparedRow:
    """Return a chunker's row: its speed over the sample, and the corpus's reduction by dedup."""
    ratio, mean_bytes = material.dedup(cut)

    def call() -> None:
        cut(material.data, CHUNK_BYTES_MIN, CHUNK_BYTES_TARGET, CHUNK_BYTES_MAX, True)

    return replace(timed_row(call, len(material.data)), reduction=ratio, mean_chunk_bytes=mean_bytes, version=note)


def _add_chunker(name: str, cut: Cut, settings: str = "2, 8, 64 KiB; the whole sample in one call") -> None:
    kernel(name, group=CHUNKING, settings=settings)(partial(chunker_row, cut=cut))


_add_chunker("fastcdc", chunking.fastcdc_cut)
_add_chunker("leastcdc", chunking.leastcdc_cut)
if USE_CYTHON:
    from nearkin_shared.kernels.native import _leastcdc

    _paths = _leastcdc.cpu_paths()
    for _path in _paths[: _paths.index(_leastcdc.cpu_path()) + 1]:  # those that NEARKIN_CPU leaves
        _add_chunker(f"leastcdc, {_path} alone", partial(_leastcdc.leastcdc_cut, path=_path), "this path")
_add_chunker("rabin", chunking.rabin_cut)
_add_chunker("inck", chunking.inck_cut)


@kernel("leastcdc, fastcdc's mean", group=CHUNKING, settings="with the target that gives the mean chunk of fastcdc")
def _leastcdc_same_mean(material: Material) -> PreparedRow:
    wanted_bytes = material.mean_chunk_bytes(chunking.fastcdc_cut)
    low, high = CHUNK_BYTES_TARGET // 2, CHUNK_BYTES_TARGET * 2
    while True:  # halving 12,288 targets: 14 steps at most
        target_bytes = (low + high) // 2
        cut = _with_target(target_bytes)
        mean_bytes = material.mean_chunk_bytes(cut)
        if abs(mean_bytes / wanted_bytes - 1) < _MEAN_TOLERANCE or high - low <= 1:
            return chunker_row(material, cut, f"target {target_bytes} bytes")
        low, high = (low, target_bytes) if mean_bytes > wanted_bytes else (target_bytes, high)


def _with_target(target_bytes: int) -> Cut:
    def cut(data: Bytes, min_bytes: int, _target_bytes: int, max_bytes: int, final: bool) -> Lengths:
        return chunking.leastcdc_cut(data, min_bytes, target_bytes, max_bytes, final)

    return cut


# ------------------------------------------------------------------ hashes


@kernel("sha1", group=HASHES, settings="all chunks of a segment in one call", aim=2.5)
def _sha1(material: Material) -> PreparedRow:
    return over_segments(material, fingerprint.sha1_many)


def _add_engine(name: str) -> None:
    def prepare(material: Material) -> PreparedRow:
        return over_segments(material, partial(_fingerprint.sha1_many, engine=name))

    kernel(f"sha1, {name} alone", group=HASHES, settings="this engine for all chunks")(prepare)


if USE_CYTHON:
    from nearkin_shared.kernels.native import _fingerprint

    for _engine in _fingerprint.sha1_engines():
        _add_engine(_engine)


@kernel("check tags", group=HASHES)
def _check_tags(material: Material) -> PreparedRow:
    key = fingerprint.TagKey(bytes(range(fingerprint.SECRET_BYTES)), b"bench")
    return over_segments(material, partial(fingerprint.check_tags, key=key))


@kernel("sha1 + tags", group=HASHES, settings="fingerprints, check tags and names: all that dedup needs")
def _sha1_tags(material: Material) -> PreparedRow:
    key = fingerprint.TagKey(bytes(range(fingerprint.SECRET_BYTES)), b"bench")

    def call(payload: Bytes, offsets: Offsets, lengths: Lengths) -> None:
        fingerprints = fingerprint.sha1_many(payload, offsets, lengths)
        fingerprint.names(fingerprints, fingerprint.check_tags(payload, offsets, lengths, key), lengths)

    return over_segments(material, call)


@kernel("hashlib", group=HASHES, settings="OpenSSL's SHA-1, a call a chunk", ours=False, install="it comes with Python")
def _sha1_hashlib(material: Material) -> PreparedRow:
    places = [
        memoryview(segment.payload)[start : start + length]
        for segment in material.segments
        for start, length in zip(segment.offsets.tolist(), segment.lengths.tolist(), strict=True)
    ]

    def call() -> None:
        for place in places:
            hashlib.sha1(place, usedforsecurity=False).digest()

    return timed_row(call, sum(map(len, places)))


_OPENSSL_SECONDS = 1


@kernel(
    "openssl",
    group=HASHES,
    settings="openssl speed -evp sha1, blocks of 8 KiB",
    ours=False,
    install="Debian and Ubuntu: apt install openssl; macOS: brew install openssl",
)
def _openssl(material: Material) -> PreparedRow:
    program = shutil.which("openssl")
    if program is None:
        raise MissingPeer("openssl is not installed")
    words = ("speed", "-seconds", str(_OPENSSL_SECONDS), "-bytes", "8192", "-evp", "sha1")
    handled = len(material.data)

    def once() -> float:
        done = run_short([program, *words])
        match = re.search(r"^sha1\s+([0-9.]+)k", done.stdout, re.MULTILINE | re.IGNORECASE)
        if done.returncode != 0 or match is None:
            raise CommandFailed(f"openssl {' '.join(words)}: exit {done.returncode}, no speed in its answer")
        return handled / (float(match[1]) * 1000)  # it prints thousands of bytes a second

    version = first_line(run_short([program, "version"]))
    return PreparedRow(once, handled, version=version, repeats=False)


# ------------------------------------------------------------------ features


def _add_features(name: str, sketch: Sketch, aim: float | None = None) -> None:
    def prepare(material: Material) -> PreparedRow:
        return over_segments(material, sketch)

    kernel(name, group=FEATURES, settings="12 features, 3 super-features", aim=aim)(prepare)


_add_features("finesse", features.finesse, 1.2)
_add_features("odess", features.odess, 0.8)
_add_features("ntransform", features.ntransform, 0.4)
_add_features("finesse, scalar", features.finesse_scalar)
_add_features("ntransform, scalar", features.ntransform_scalar)


@kernel("size estimate", group=FEATURES, settings="how far a chunk will compress, guessed")
def _estimate(material: Material) -> PreparedRow:
    return over_segments(material, size_estimate.compressed_bytes_estimate)


# ------------------------------------------------------------------ delta codecs


@kernel("xdelta3 encode", group=DELTAS, settings="level 1, all pairs in one call")
def _xdelta3_encode(material: Material) -> PreparedRow:
    targets, bases = material.pairs.targets, material.pairs.bases
    places = (targets.payload, targets.offsets, targets.lengths, bases.payload, bases.offsets, bases.lengths)
    return timed_row(lambda: xdelta3.encode_many(*places, level=1), targets.total_bytes)


@kernel("xdelta3 decode", group=DELTAS, settings="all pairs in one call")
def _xdelta3_decode(material: Material) -> PreparedRow:
    targets, bases = material.pairs.targets, material.pairs.bases
    places = (targets.payload, targets.offsets, targets.lengths, bases.payload, bases.offsets, bases.lengths)
    deltas, lengths = xdelta3.encode_many(*places, level=1)
    kept = np.flatnonzero(lengths)
    some, theirs, sizes = targets.take(kept), bases.take(kept), lengths[kept]
    offsets = starts_of(sizes)
    return timed_row(
        lambda: xdelta3.decode_many(
            deltas, offsets, sizes, theirs.payload, theirs.offsets, theirs.lengths, some.lengths
        ),
        some.total_bytes,
    )


@kernel("overlap", group=DELTAS, settings="how much of each target its base holds, a group a pair")
def _overlap(material: Material) -> PreparedRow:
    targets, bases = material.pairs.targets, material.pairs.bases
    bounds = np.arange(len(targets) + 1, dtype=np.uint32)
    which = np.zeros(len(bases), np.int32)

    def call() -> None:
        shared_bytes.shared_bytes(
            targets.payload,
            targets.offsets,
            targets.lengths,
            bounds,
            (bases.payload,),
            which,
            bases.offsets,
            bases.lengths,
            bounds,
        )

    return timed_row(call, targets.total_bytes)


@kernel("zstd-prefix", group=DELTAS, settings="level 3, the base as prefix, a call a pair", ours=False)
def _zstd_prefix(material: Material) -> PreparedRow:
    places = list(zip(material.pairs.targets.slices(), material.pairs.bases.slices(), strict=True))

    def call() -> None:
        for target, base in places:
            compress(target, level=3, zstd_dict=ZstdDict(base, is_raw=True).as_prefix)

    return timed_row(call, material.pairs.targets.total_bytes)

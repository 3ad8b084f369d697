"""Cache the segments that manifests name.

    manifest's name -> digest 16 of its bytes, 1 if services committed it, check 8 of the row
                       by container: id 8, length 4, a bit for each segment

Invariant: a row is used only if its digest is that of the stored manifest. Every GC run still lists, reads and hashes
every manifest, which takes a fifth of the time to decode it. A row with another digest or check is replaced, once a
week all are, and rows of deleted manifests are removed. docs/adr/0025-gc-pause-and-schedule.md.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from struct import Struct
from typing import Protocol

import numpy as np
from blake3 import blake3

from nearkin_shared.errors import NotFound, PermanentError
from nearkin_shared.formats.manifest import Manifest
from nearkin_shared.types import Bools, group_by_container
from nearkin_shared.utils.frozen import frozen

ORDINAL_MAX = 1 << 20
"""Highest ordinal in a row, 128 KiB of bits. Manifests that name a higher one are not cached; a container of 4 MiB has
some thousand segments.
"""
BATCH = 256
"""Manifests whose rows are read, and written back, together."""
_DIGEST_BYTES, _CHECK_BYTES = 16, 8
_HEAD = Struct("<16sB")
_ENTRY = Struct("<QI")
assert (_HEAD.size, _ENTRY.size) == (17, 12)
_log = logging.getLogger("nearkin")

Bits = dict[int, int]
"""By container: a number whose bit n is set if segment n is named."""


@frozen
class ManifestRefs:
    """Segments that one manifest names."""

    by_services: bool
    segments: Bits


class ManifestRefsTable(Protocol):
    """Storage of rows by manifest name.

    Raises: StoreUnavailable, from all methods.
    """

    def get_many(self, names: Sequence[str]) -> dict[str, bytes]:
        """Return the rows that exist."""

    def put_many(self, rows: Mapping[str, bytes]) -> None:
        """Write rows, replacing those that exist."""

    def keep_only(self, names: Collection[str]) -> None:
        """Delete the rows of all other manifests."""


class ManifestRefsCache:
    """References of manifests; decodes a manifest whose row is missing or outdated."""

    def __init__(self, rows: ManifestRefsTable, *, rebuild: bool) -> None:
        """`rebuild`: every manifest is decoded and its row replaced."""
        self._rows, self.rebuild = rows, rebuild
        self.decoded = 0
        """Number of manifests that were decoded."""

    def of(
        self, names: Iterable[str], read_stored: Callable[[str], bytes], read: Callable[[str], Manifest]
    ) -> Iterator[tuple[str, ManifestRefs | Manifest]]:
        """Yield the name and the references of each manifest.

        The manifest itself in place of references that are not cached. `read_stored` returns an object's bytes, `read`
        the manifest.

        Raises: the errors of `read`.
        """
        remaining = iter(names)
        while batch := list(islice(remaining, BATCH)):
            rows, new = self._rows.get_many(batch), {}
            for name in batch:
                digest = _digest(read_stored, name)
                cached = None if digest is None else _decode(name, rows.get(name), digest)
                if cached is not None and not self.rebuild:
                    yield name, cached
                    continue
                manifest = read(name)
                self.decoded += 1
                decoded = _collect_refs(manifest)
                if cached is not None and cached != decoded:
                    _log.error("%s: wrong references in index/gc; replaced, as all are once a week", name)
                yield name, manifest if decoded is None else decoded
                if decoded is not None and digest is not None:
                    new[name] = _encode(name, decoded, digest)
            self._rows.put_many(new)

    def keep_only(self, names: Collection[str]) -> None:
        """Delete the rows of all other manifests. Raises StoreUnavailable."""
        self._rows.keep_only(names)


def masks_of(bits: Bits) -> dict[int, Bools]:
    """Return bool[n] by container; n is the highest named segment + 1."""
    found = {}
    for container, number in bits.items():
        packed = np.frombuffer(number.to_bytes((number.bit_length() + 7) // 8, "little"), np.uint8)
        found[container] = np.unpackbits(packed, count=number.bit_length(), bitorder="little").astype(np.bool_)
    return found


def _collect_refs(manifest: Manifest) -> ManifestRefs | None:
    segments: Bits = {}
    for container, rows in group_by_container(manifest.segments.containers):
        ordinals = manifest.segments.ordinals[rows]
        if int(ordinals.max()) > ORDINAL_MAX:
            return None
        mask = np.zeros(int(ordinals.max()) + 1, np.bool_)
        mask[ordinals] = True
        segments[int(container)] = int.from_bytes(np.packbits(mask, bitorder="little").tobytes(), "little")
    return ManifestRefs(manifest.is_by_services, segments)


def _digest(read_stored: Callable[[str], bytes], name: str) -> bytes | None:
    try:
        return blake3(read_stored(name)).digest(_DIGEST_BYTES)
    except (PermanentError, NotFound):
        return None  # reading the manifest raises the reason, or repairs it


def _encode(name: str, summary: ManifestRefs, digest: bytes) -> bytes:
    pieces = [_HEAD.pack(digest, summary.by_services)]
    for container, number in summary.segments.items():
        bits = number.to_bytes((number.bit_length() + 7) // 8, "little")
        pieces += [_ENTRY.pack(container, len(bits)), bits]
    row = b"".join(pieces)
    return row + _check(name, row)


def _decode(name: str, row: bytes | None, digest: bytes) -> ManifestRefs | None:
    """Return the content of a row; None if it is missing, damaged, or of other manifest bytes."""
    if row is None or len(row) < _HEAD.size + _CHECK_BYTES or row[:_DIGEST_BYTES] != digest:
        return None
    end = len(row) - _CHECK_BYTES
    if row[end:] != _check(name, row[:end]):
        return None
    segments, offset = Bits(), _HEAD.size
    while offset < end:
        container, length = _ENTRY.unpack_from(row, offset)
        offset += _ENTRY.size + length
        segments[container] = int.from_bytes(row[offset - length : offset], "little")
    return ManifestRefs(bool(row[_DIGEST_BYTES]), segments)


def _check(name: str, row: bytes) -> bytes:
    return blake3(name.encode() + b"\0" + row).digest(_CHECK_BYTES)

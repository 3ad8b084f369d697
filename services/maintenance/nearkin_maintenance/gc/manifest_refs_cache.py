"""What manifests name, remembered. Invariant: a summary is of the very bytes that lie in the store, or it is not used.

manifest's name -> digest 16 of its bytes, 1 if services committed it, check 8 of the row
                   by container: id 8, length 4, a bit for each segment

Every manifest is still listed, read and hashed, in every round: a fifth of what it takes to decode it. A row whose
digest or check is another is made anew, once a week all are, and rows of manifests that are gone go with them.
docs/adr/0025-gc-pause-and-schedule.md.
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
from nearkin_shared.formats.manifest import NO_ORIGIN, Manifest
from nearkin_shared.types import Bools, group_by_container
from nearkin_shared.utils.frozen import frozen

ORDINAL_MAX = 1 << 20
"""A manifest that names a higher one is not summarised: 128 KiB of bits. A container of 4 MiB has some thousands."""
BATCH = 256
"""Manifests that are looked up, and written back, together."""
_DIGEST_BYTES, _CHECK_BYTES = 16, 8
_HEAD = Struct("<16sB")
_ENTRY = Struct("<QI")
assert (_HEAD.size, _ENTRY.size) == (17, 12)
_log = logging.getLogger("nearkin")

Bits = dict[int, int]
"""By container: a number whose bit n stands for segment n."""


@frozen
class ManifestRefs:
    """What one manifest names."""

    by_services: bool
    segments: Bits


class ManifestRefsTable(Protocol):
    """Where rows are kept, by manifests' names. All calls raise StoreUnavailable."""

    def get_many(self, names: Sequence[str]) -> dict[str, bytes]:
        """Return the rows that are there."""

    def put_many(self, rows: Mapping[str, bytes]) -> None:
        """Write rows, over those that are there."""

    def keep_only(self, names: Collection[str]) -> None:
        """Remove all others."""


class ManifestRefsCache:
    """What manifests name, by their names; made where it is missing or of other bytes."""

    def __init__(self, rows: ManifestRefsTable, *, anew: bool) -> None:
        """`anew`: no row is believed, all are made again."""
        self._rows, self.anew = rows, anew
        self.made = 0
        """How many manifests were decoded."""

    def of(
        self, names: Iterable[str], stored: Callable[[str], bytes], read: Callable[[str], Manifest]
    ) -> Iterator[tuple[str, ManifestRefs | Manifest]]:
        """Yield of each manifest its name and what it names; the manifest itself where that is not summarised.

        `stored` returns an object's bytes, `read` the manifest. Raises what `read` does.
        """
        remaining = iter(names)
        while batch := list(islice(remaining, BATCH)):
            known, new = self._rows.get_many(batch), {}
            for name in batch:
                digest = _digest(stored, name)
                kept = None if digest is None else _decode(name, known.get(name), digest)
                if kept is not None and not self.anew:
                    yield name, kept
                    continue
                manifest = read(name)
                self.made += 1
                made = _summary(manifest)
                if kept is not None and kept != made:
                    _log.error("%s: its summary in index/gc was another; it is made anew, as all are once a week", name)
                yield name, manifest if made is None else made
                if made is not None and digest is not None:
                    new[name] = _encode(name, made, digest)
            self._rows.put_many(new)

    def keep_only(self, names: Collection[str]) -> None:
        """Forget all but `names`. Raises StoreUnavailable."""
        self._rows.keep_only(names)


def masks_of(bits: Bits) -> dict[int, Bools]:
    """Return bool[n] by container, n being one more than the highest segment named."""
    found = {}
    for container, number in bits.items():
        packed = np.frombuffer(number.to_bytes((number.bit_length() + 7) // 8, "little"), np.uint8)
        found[container] = np.unpackbits(packed, count=number.bit_length(), bitorder="little").astype(np.bool_)
    return found


def _summary(manifest: Manifest) -> ManifestRefs | None:
    segments: Bits = {}
    for container, rows in group_by_container(manifest.segments.containers):
        ordinals = manifest.segments.ordinals[rows]
        if int(ordinals.max()) > ORDINAL_MAX:
            return None
        mask = np.zeros(int(ordinals.max()) + 1, np.bool_)
        mask[ordinals] = True
        segments[int(container)] = int.from_bytes(np.packbits(mask, bitorder="little").tobytes(), "little")
    return ManifestRefs(manifest.origin != NO_ORIGIN, segments)


def _digest(stored: Callable[[str], bytes], name: str) -> bytes | None:
    try:
        return blake3(stored(name)).digest(_DIGEST_BYTES)
    except (PermanentError, NotFound):
        return None  # reading it says why, or mends it


def _encode(name: str, summary: ManifestRefs, digest: bytes) -> bytes:
    pieces = [_HEAD.pack(digest, summary.by_services)]
    for container, number in summary.segments.items():
        bits = number.to_bytes((number.bit_length() + 7) // 8, "little")
        pieces += [_ENTRY.pack(container, len(bits)), bits]
    row = b"".join(pieces)
    return row + _check(name, row)


def _decode(name: str, row: bytes | None, digest: bytes) -> ManifestRefs | None:
    """Return what a row says; None where there is none, or it is broken, or of other bytes."""
    if row is None or len(row) < _HEAD.size + _CHECK_BYTES or row[:_DIGEST_BYTES] != digest:
        return None
    end = len(row) - _CHECK_BYTES
    if row[end:] != _check(name, row[:end]):
        return None
    segments, at = Bits(), _HEAD.size
    while at < end:
        container, length = _ENTRY.unpack_from(row, at)
        at += _ENTRY.size + length
        segments[container] = int.from_bytes(row[at - length : at], "little")
    return ManifestRefs(bool(row[_DIGEST_BYTES]), segments)


def _check(name: str, row: bytes) -> bytes:
    return blake3(name.encode() + b"\0" + row).digest(_CHECK_BYTES)

"""Find the similar chunks of a corpus, as in the Finesse paper.

As in its section 5.1 (FAST '19): Rabin chunking at 8 KiB, SHA-1 dedup, 3 super-features of 4 features, FirstFit. A
chunk that found a base is not offered as a base itself, so every delta has depth 1.

Invariant: every feature algorithm sees the same fresh chunks.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from nearkin_shared.errors import BadInput
from nearkin_shared.kernels import features
from nearkin_shared.kernels.chunking import rabin_cut
from nearkin_shared.kernels.fingerprint import sha1_many
from nearkin_shared.utils.frozen import frozen

CHUNK_BYTES_MIN, CHUNK_BYTES_TARGET, CHUNK_BYTES_MAX = 2048, 8192, 65536
FRESH_BYTES_MAX = 2 << 30
"""Fresh chunks are held in memory."""

Bytes = NDArray[np.uint8]
Offsets = NDArray[np.uint64]
Lengths = NDArray[np.uint32]
Cut = Callable[[Bytes, int, int, int, bool], Lengths]
Sketch = Callable[[Bytes, Offsets, Lengths], NDArray[np.uint64]]

APPROACHES: Mapping[str, Sketch] = {
    "ntransform": features.ntransform,
    "finesse": features.finesse,
    "odess": features.odess,
}
SPEEDS: Mapping[str, Sketch] = {
    "ntransform, scalar": features.ntransform_scalar,
    "finesse, scalar": features.finesse_scalar,
    "ntransform, vector": features.ntransform,
    "finesse, vector": features.finesse,
    "odess, vector": features.odess,
}
"""The paper's Figure 4 is scalar code; "vector" is what Nearkin runs."""


@frozen
class Chunks:
    """Chunks as slices of one buffer: uint8[bytes], uint64[n] and uint32[n], bytes."""

    payload: Bytes
    offsets: Offsets
    lengths: Lengths

    def take(self, numbers: NDArray[np.int64]) -> Chunks:
        """Return these chunks; they stay where they are."""
        return Chunks(self.payload, self.offsets[numbers], self.lengths[numbers])

    def up_to(self, bytes_max: int) -> Chunks:
        """Return those of the first `bytes_max` bytes of the buffer, at least one if there is one."""
        count = int(np.searchsorted(self.offsets + self.lengths, bytes_max, side="right")) or 1
        return Chunks(self.payload, self.offsets[:count], self.lengths[:count])

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def total_bytes(self) -> int:
        """The lengths, summed."""
        return int(self.lengths.sum(dtype=np.int64))

    def slices(self) -> list[bytes]:
        """Return every chunk as bytes of its own."""
        places = zip(self.offsets.tolist(), self.lengths.tolist(), strict=True)
        return [self.payload[offset : offset + length].tobytes() for offset, length in places]


def starts_of(lengths: Lengths) -> Offsets:
    """Return where chunks start that lie one after another."""
    starts = np.zeros(len(lengths), dtype=np.uint64)
    np.cumsum(lengths[:-1], out=starts[1:])
    return starts


def fresh_chunks(paths: Sequence[Path], cut: Cut = rabin_cut) -> Chunks:
    """Cut every file, and keep the first of equal chunks, in the order of the files.

    Raises BadInput when they take more than `FRESH_BYTES_MAX`.
    """
    room_bytes = min(sum(path.stat().st_size for path in paths), FRESH_BYTES_MAX)
    payload = np.empty(room_bytes, dtype=np.uint8)  # only the pages that chunks are copied to take memory
    seen: set[bytes] = set()
    kept_lengths: list[int] = []
    used_bytes = 0
    for path in paths:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            data = np.frombuffer(mapped, dtype=np.uint8)
            lengths = cut(data, CHUNK_BYTES_MIN, CHUNK_BYTES_TARGET, CHUNK_BYTES_MAX, True)
            offsets = starts_of(lengths)
            names = sha1_many(data, offsets, lengths).tobytes()
            places = zip(offsets.tolist(), lengths.tolist(), strict=True)
            for number, (offset, length) in enumerate(places):
                name = names[20 * number : 20 * number + 20]
                if name in seen:
                    continue
                if used_bytes + length > room_bytes:
                    del data
                    raise BadInput(
                        f"{path.parent}: over {FRESH_BYTES_MAX >> 30} GiB of fresh chunks; take fewer versions"
                    )
                seen.add(name)
                payload[used_bytes : used_bytes + length] = data[offset : offset + length]
                kept_lengths.append(length)
                used_bytes += length
            del data  # a mapping with a view on it does not close
    kept = np.array(kept_lengths, dtype=np.uint32)
    return Chunks(payload[:used_bytes], starts_of(kept), kept)


def first_fit(sketches: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Return every chunk's base: the first earlier chunk that shares a super-feature, or -1.

    A chunk with a base is no base itself. sketches: uint64[n, super_features]; a row of zeros shares nothing.
    Super-features are tried in order.
    """
    bases = np.full(len(sketches), -1, dtype=np.int64)
    owners: list[dict[int, int]] = [{} for _ in range(sketches.shape[1])]
    for number, row in enumerate(sketches.tolist()):
        if not any(row):
            continue
        for owner, super_feature in zip(owners, row, strict=True):
            base = owner.get(super_feature)
            if base is not None:
                bases[number] = base
                break
        else:
            for owner, super_feature in zip(owners, row, strict=True):
                owner.setdefault(super_feature, number)
    return bases


@frozen
class ChunkPairs:
    """Targets and their bases, one for one."""

    targets: Chunks
    bases: Chunks

    def __len__(self) -> int:
        return len(self.targets)


def find_pairs(fresh: Chunks, approach: str) -> ChunkPairs:
    """Return the pairs that one feature algorithm finds among fresh chunks."""
    bases = first_fit(APPROACHES[approach](fresh.payload, fresh.offsets, fresh.lengths))
    targets = np.flatnonzero(bases >= 0)
    return ChunkPairs(fresh.take(targets), fresh.take(bases[targets]))

"""Define BLAKE3 with a state that can be stored, in plain Python.

    0             8                      8 + 32 n
    | bytes, u64  | n chaining values    | the last 1 to 1024 bytes |

A stream is hashed in chunks of 1 KiB, whose values are merged into subtrees of 2^i chunks. The state has a value for
each bit of the number of chunks, the largest subtree first. The last bytes wait: only the end of the stream decides
whether they, or a merge, are the root of the tree. The library `blake3` computes the same digests and does not store
its state.

Invariant: the digest is the BLAKE3 of the bytes (O'Connor, Aumasson, Neves, Wilcox-O'Hearn, 2020, unkeyed).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from nearkin_shared.errors import BadInput

if TYPE_CHECKING:
    from typing_extensions import Buffer

CHUNK_BYTES, BLOCK_BYTES, VALUE_BYTES = 1024, 64, 32
DIGEST_BYTES_MAX = 32
_COUNT_BYTES = 8
_SIZE_BYTES_MAX = (1 << 63) - 1
"""Larger than any file."""
_CHUNK_START, _CHUNK_END, _PARENT, _ROOT = 1, 2, 4, 8
_IV = np.array(
    [0x6A09E667, 0xBB67AE85, 0x3C6EF372, 0xA54FF53A, 0x510E527F, 0x9B05688C, 0x1F83D9AB, 0x5BE0CD19], np.uint32
)
_PERMUTATION = [2, 6, 3, 10, 7, 0, 4, 13, 1, 11, 12, 5, 9, 14, 15, 8]
_MIXED = (
    *((i, i + 4, i + 8, i + 12) for i in range(4)),
    *((i, (i + 1) % 4 + 4, (i + 2) % 4 + 8, (i + 3) % 4 + 12) for i in range(4)),
)

Words = NDArray[np.uint32]


def check_digest_bytes(length: int) -> None:
    """Raise BadInput for a digest of no, or of too many bytes."""
    if not 0 < length <= DIGEST_BYTES_MAX:
        raise BadInput(f"a digest of {length} bytes: choose 1 to {DIGEST_BYTES_MAX}")


def parse_state(state: bytes) -> tuple[int, bytes, bytes]:
    """Return (chunks, chaining values, last bytes) of a state. Raises BadInput."""
    size_bytes = int.from_bytes(state[:_COUNT_BYTES], "little")
    chunks = max(0, size_bytes - 1) // CHUNK_BYTES
    values_end = _COUNT_BYTES + VALUE_BYTES * chunks.bit_count()
    if size_bytes > _SIZE_BYTES_MAX or len(state) != values_end + size_bytes - chunks * CHUNK_BYTES:
        raise BadInput(f"{len(state)} bytes are not the state of a hasher of {size_bytes} bytes")
    return chunks, state[_COUNT_BYTES:values_end], state[values_end:]


def use_vectors(widest: int) -> int:
    """Return 0: numpy chooses its own."""
    return 0


class ContentHasher:
    """BLAKE3 of a stream of bytes, with a state that can be stored.

    Not to be shared between threads.
    """

    def __init__(self, state: bytes | None = None) -> None:
        """Begin, or continue from a stored state. Raises BadInput for bytes that are no state."""
        self._chunks, values, self._tail = (0, b"", b"") if state is None else parse_state(state)
        self._values: list[Words] = list(np.frombuffer(values, "<u4").reshape(-1, 8))

    @property
    def size_bytes(self) -> int:
        """Return the bytes so far."""
        return self._chunks * CHUNK_BYTES + len(self._tail)

    def update(self, data: Buffer) -> None:
        """Add bytes. Raises BadInput."""
        try:
            added = bytes(memoryview(data).cast("B"))
        except (TypeError, ValueError, BufferError) as err:
            raise BadInput(f"data of type {type(data).__name__}: want contiguous bytes") from err
        waiting = self._tail + added
        count = max(0, len(waiting) - 1) // CHUNK_BYTES
        for value in _chunk_values(waiting[: count * CHUNK_BYTES], self._chunks):
            self._add(value)
        self._tail = waiting[count * CHUNK_BYTES :]

    def digest(self, length: int = DIGEST_BYTES_MAX) -> bytes:
        """Return the first `length` bytes of the BLAKE3 of the bytes so far. Raises BadInput."""
        check_digest_bytes(length)
        value = _IV
        last = max(0, len(self._tail) - 1) // BLOCK_BYTES
        for number in range(last + 1):
            block = self._tail[number * BLOCK_BYTES : (number + 1) * BLOCK_BYTES]
            flags = (0 if number else _CHUNK_START) | (_CHUNK_END if number == last else 0)
            if number == last and not self._values:
                flags |= _ROOT
            value = _compress(value, _words(block.ljust(BLOCK_BYTES, b"\0")), self._chunks, len(block), flags)
        for depth in range(len(self._values) - 1, -1, -1):
            value = _merged(self._values[depth], value, 0 if depth else _ROOT)
        return value.astype("<u4").tobytes()[:length]

    def state(self) -> bytes:
        """Return the state, at most 2,760 bytes."""
        values = b"".join(value.astype("<u4").tobytes() for value in self._values)
        return self.size_bytes.to_bytes(_COUNT_BYTES, "little") + values + self._tail

    def _add(self, value: Words) -> None:
        self._chunks += 1
        count = self._chunks
        while not count & 1:
            value = _merged(self._values.pop(), value, 0)
            count >>= 1
        self._values.append(value)


def _words(data: bytes) -> Words:
    return np.frombuffer(data, "<u4").astype(np.uint32)


def _merged(left: Words, right: Words, flags: int) -> Words:
    return _compress(_IV, np.concatenate([left, right]), 0, BLOCK_BYTES, _PARENT | flags)


def _chunk_values(data: bytes, first: int) -> Words:
    """Return the chaining values, uint32[n, 8], of n whole chunks.

    `first`: the number of the first one in the stream.
    """
    count = len(data) // CHUNK_BYTES
    blocks = _words(data).reshape(count, CHUNK_BYTES // BLOCK_BYTES, 16).transpose(1, 2, 0)
    numbers = np.arange(first, first + count, dtype=np.uint64)
    values = np.repeat(_IV[:, None], count, axis=1)
    for number, block in enumerate(blocks):
        flags = (0 if number else _CHUNK_START) | (_CHUNK_END if number == len(blocks) - 1 else 0)
        values = _compress(values, block, numbers, BLOCK_BYTES, flags)
    return values.T


def _compress(value: Words, block: Words, counter: int | NDArray[np.uint64], size: int, flags: int) -> Words:
    """Return the chaining values after a block.

    uint32[8] for a block uint32[16], uint32[8, n] for uint32[16, n].
    """
    numbers = np.asarray(counter, np.uint64)
    v = np.zeros(block.shape, np.uint32)
    v[:8], v[8:12] = value, _IV[:4].reshape(4, *[1] * (block.ndim - 1))
    v[12], v[13] = numbers & np.uint64(0xFFFFFFFF), numbers >> np.uint64(32)
    v[14], v[15] = size, flags
    for _ in range(7):
        for number, rows in enumerate(_MIXED):
            _mix(v, rows, block[2 * number], block[2 * number + 1])
        block = block[_PERMUTATION]
    return v[:8] ^ v[8:]


def _mix(v: Words, rows: tuple[int, int, int, int], x: Words, y: Words) -> None:
    a, b, c, d = rows
    with np.errstate(over="ignore"):  # of single words; sums are modulo 2^32
        for word, turn_d, turn_b in ((x, 16, 12), (y, 8, 7)):
            v[a] = v[a] + v[b] + word
            v[d] = _rotate(v[d] ^ v[a], turn_d)
            v[c] = v[c] + v[d]
            v[b] = _rotate(v[b] ^ v[c], turn_b)


def _rotate(words: Words, bits: int) -> Words:
    return words >> np.uint32(bits) | words << np.uint32(32 - bits)

"""Define the VCDIFF codec in plain Python.

Invariant: a delta decodes exactly, or raises Corrupt with the same text as the compiled kernel.

The decoder is the definition (RFC 3284, default code table, xdelta3's Adler-32 and application header). There is no
plain-Python xdelta3 encoder: which matches are found is the C library's own affair. `encode_many` here writes valid but
crude VCDIFF, the common prefix and suffix as copies and the rest as one addition, so that the store works without
Cython.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from nearkin_shared.errors import BadInput, Corrupt
from nearkin_shared.utils.frozen import frozen

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from typing_extensions import Buffer

PAIR_BYTES_MAX = 16 << 20
"""Most bytes of a target and of a base: the command's own window bound, 18 times a segment (900 KiB)."""

DELTA_BYTES_MAX = 32 << 20
"""Most bytes of a delta: the worst encoding of the largest target is below 1.3 times it."""

LEVEL_MAX = 9

MAGIC = b"\xd6\xc3\xc4\x00"
SECONDARY, CODE_TABLE, APP_HEADER = 1, 2, 4  # header indicator
SOURCE, TARGET, ADLER32 = 1, 2, 4  # window indicator

NEAR_SLOTS = 4
SAME_SLOTS = 3 * 256
HERE = 1
FIRST_NEAR = 2
FIRST_SAME = FIRST_NEAR + NEAR_SLOTS
MODES = FIRST_SAME + 3


@frozen
class Half:
    """Half an instruction; `length` 0 means that the instruction section states the length."""

    kind: str
    length: int
    mode: int = 0


def default_code_table() -> list[tuple[Half, ...]]:
    """Return the 256 instructions of RFC 3284, section 5.6."""
    table: list[tuple[Half, ...]] = [(Half("run", 0),)]
    table += [(Half("add", length),) for length in range(18)]
    for mode in range(MODES):
        table += [(Half("copy", length, mode),) for length in (0, *range(4, 19))]
    for mode in range(MODES):
        longest = 6 if mode < FIRST_SAME else 4
        table += [
            (Half("add", added), Half("copy", copied, mode))
            for added in range(1, 5)
            for copied in range(4, longest + 1)
        ]
    table += [(Half("copy", 4, mode), Half("add", 1)) for mode in range(MODES)]
    assert len(table) == 256
    return table


CODE_TABLE_DEFAULT = default_code_table()


@dataclass(slots=True)
class Reader:
    """A part of a delta, read from its front."""

    left: memoryview

    def byte(self, missing: str) -> int:
        if not self.left:
            raise Corrupt(missing)
        value = self.left[0]
        self.left = self.left[1:]
        return value

    def take(self, length: int, missing: str) -> memoryview:
        if length > len(self.left):
            raise Corrupt(missing)
        taken, self.left = self.left[:length], self.left[length:]
        return taken

    def number(self) -> int:
        """Read a base-128 number, most significant digits first (section 2)."""
        value = 0
        while True:
            digit = self.byte("number is cut short")
            value = value << 7 | digit & 127
            if value > 0xFFFF_FFFF:
                raise Corrupt("number exceeds 32 bits")
            if digit < 128:
                return value


@dataclass(slots=True)
class AddressCache:
    """Addresses of recent copies (section 5.1), empty at each window's start."""

    nears: list[int] = field(default_factory=lambda: [0] * NEAR_SLOTS)
    sames: list[int] = field(default_factory=lambda: [0] * SAME_SLOTS)
    next_near: int = 0

    def read(self, addresses: Reader, mode: int, here: int) -> int:
        """Read a copy's address (section 5.3); it must lie before `here`, the copy's own position."""
        if not addresses.left:
            raise Corrupt("address section is too short")
        if mode >= FIRST_SAME:
            address = self.sames[(mode - FIRST_SAME) * 256 + addresses.byte("")]
        else:
            address = addresses.number()
            if mode == HERE:
                address = here - address
            elif mode >= FIRST_NEAR:
                address += self.nears[mode - FIRST_NEAR]
        if not 0 <= address < here:
            raise Corrupt("copy address is at or after its own position")
        self.nears[self.next_near] = address
        self.next_near = (self.next_near + 1) % NEAR_SLOTS
        self.sames[address % SAME_SLOTS] = address
        return address


def run_window(data: Reader, codes: Reader, addresses: Reader, segment: bytes, window_bytes: int) -> bytes:
    """Decode the window of the three sections; segment and window are one string (section 3)."""
    text = bytearray(segment)
    end = len(segment) + window_bytes
    cache = AddressCache()
    while codes.left:
        for half in CODE_TABLE_DEFAULT[codes.byte("")]:
            length = half.length or codes.number()
            if length > end - len(text):
                raise Corrupt("instruction writes past its window")
            if half.kind == "copy":
                address = cache.read(addresses, half.mode, len(text))
                while length > 0:  # a copy may read what it has just written
                    piece = text[address : address + length]
                    text += piece
                    address += len(piece)
                    length -= len(piece)
            elif half.kind == "add":
                text += data.take(length, "data section is too short")
            else:
                text += bytes([data.byte("data section is too short")]) * length
    if len(text) != end:
        raise Corrupt("instructions end before the window is full")
    if data.left or addresses.left:
        raise Corrupt("a section has bytes left over")
    return bytes(text[len(segment) :])


def decode_window(rest: Reader, base: bytes, so_far: bytes, target_bytes: int) -> bytes:
    """Decode the next window (section 4.2), which may copy from the base or earlier target."""
    bits = rest.byte("")
    if bits & ~(SOURCE | TARGET | ADLER32):
        raise Corrupt("unknown window bits")
    if bits & SOURCE and bits & TARGET:
        raise Corrupt("a window names two source segments")
    segment = b""
    if bits & (SOURCE | TARGET):
        whole = base if bits & SOURCE else so_far
        segment_bytes = rest.number()
        segment_offset = rest.number()
        if segment_offset + segment_bytes > len(whole):
            raise Corrupt("source segment is outside its source")
        segment = whole[segment_offset : segment_offset + segment_bytes]

    body = Reader(rest.take(rest.number(), "window is cut short"))
    window_bytes = body.number()
    if window_bytes > target_bytes - len(so_far):
        raise Corrupt("decodes to more than the target's length")
    if body.byte("window is cut short") != 0:
        raise Corrupt("secondary compression is not supported")
    section_bytes = [body.number(), body.number(), body.number()]
    checksum = int.from_bytes(body.take(4, "window is cut short")) if bits & ADLER32 else None
    if sum(section_bytes) != len(body.left):
        raise Corrupt("section lengths do not add up to the window's")
    data, codes, addresses = (Reader(body.take(length, "")) for length in section_bytes)
    window = run_window(data, codes, addresses, segment, window_bytes)
    if checksum is not None and zlib.adler32(window) != checksum:
        raise Corrupt("checksum does not agree (wrong base, or damaged)")
    return window


def decode(delta: bytes, base: bytes, target_bytes: int) -> bytes:
    """Return the target of exactly `target_bytes` bytes. Raises Corrupt."""
    rest = Reader(memoryview(delta))
    if len(delta) < 5:
        raise Corrupt("header is cut short")
    if rest.take(4, "") != MAGIC:
        raise Corrupt("not VCDIFF version 0")
    bits = rest.byte("")
    if bits & ~(SECONDARY | CODE_TABLE | APP_HEADER):
        raise Corrupt("unknown header bits")
    if bits & SECONDARY:
        raise Corrupt("secondary compression is not supported")
    if bits & CODE_TABLE:
        raise Corrupt("an own code table is not supported")
    if bits & APP_HEADER:
        rest.take(rest.number(), "application header is cut short")
    target = b""
    while rest.left:
        target += decode_window(rest, base, target, target_bytes)
    if len(target) != target_bytes:
        raise Corrupt("decodes to less than the target's length")
    return target


def number(value: int) -> bytes:
    """Return `value` in base 128, most significant digits first."""
    digits = [value & 127]
    while value := value >> 7:
        digits.append(value & 127 | 128)
    return bytes(reversed(digits))


def common_prefix(one: bytes, other: bytes) -> int:
    """Return how many leading bytes agree."""
    shorter = min(len(one), len(other))
    differ = np.frombuffer(one[:shorter], np.uint8) != np.frombuffer(other[:shorter], np.uint8) if shorter else None
    return int(differ.argmax()) if differ is not None and differ.any() else shorter


def encode(target: bytes, base: bytes) -> bytes:
    """Return a valid delta: the common prefix and suffix are copied, all between is added."""
    prefix_bytes = common_prefix(target, base)
    suffix_bytes = common_prefix(target[prefix_bytes:][::-1], base[prefix_bytes:][::-1])
    added = target[prefix_bytes : len(target) - suffix_bytes]
    codes = addresses = b""
    if prefix_bytes:
        codes += bytes([CODE_TABLE_DEFAULT.index((Half("copy", 0),))]) + number(prefix_bytes)
        addresses += number(0)
    if added:
        codes += bytes([CODE_TABLE_DEFAULT.index((Half("add", 0),))]) + number(len(added))
    if suffix_bytes:
        codes += bytes([CODE_TABLE_DEFAULT.index((Half("copy", 0),))]) + number(suffix_bytes)
        addresses += number(len(base) - suffix_bytes)
    body = number(len(target)) + b"\x00" + number(len(added)) + number(len(codes)) + number(len(addresses))
    body += zlib.adler32(target).to_bytes(4) + added + codes + addresses
    segment = number(len(base)) + number(0) if base else b""
    bits = (SOURCE if base else 0) | ADLER32
    return MAGIC + b"\x00" + bytes([bits]) + segment + number(len(body)) + body


def payload_of(name: str, payload: Buffer) -> memoryview:
    """Return the bytes of a C-contiguous buffer."""
    try:
        view = memoryview(payload)
    except TypeError as err:
        raise BadInput(f"{name} {type(payload).__name__}: pass C-contiguous bytes") from err
    if not view.c_contiguous:
        raise BadInput(f"{name} {type(payload).__name__}: pass C-contiguous bytes")
    return view.cast("B") if view.nbytes else memoryview(b"")


def check_array(name: str, values: object, dtype: type[np.uint64 | np.uint32]) -> None:
    """Refuse another dtype or more than one dimension."""
    if not isinstance(values, np.ndarray) or values.dtype != dtype or values.ndim != 1:
        found = f"{values.dtype}{list(values.shape)}" if isinstance(values, np.ndarray) else type(values).__name__
        raise BadInput(f"{name} {found}: pass a one-dimensional numpy array of {np.dtype(dtype)}")


def slices(
    name: str, payload: memoryview, offsets: NDArray[np.uint64], lengths: NDArray[np.uint32], bytes_max: int
) -> list[bytes]:
    """Return the pieces that offsets and lengths cut out of the payload."""
    if len(offsets) != len(lengths):
        raise BadInput(f"{name}_lengths has {len(lengths)} entries: {name}_offsets has {len(offsets)}")
    pieces = []
    for i, (offset, length) in enumerate(zip(offsets.tolist(), lengths.tolist(), strict=True)):
        if offset + length > len(payload):
            raise BadInput(f"{name} {i} at offset {offset}, {length} bytes: leaves its payload of {len(payload)} bytes")
        if length > bytes_max:
            raise BadInput(f"{name} {i} of {length} bytes: at most {bytes_max}")
        pieces.append(bytes(payload[offset : offset + length]))
    return pieces


def check_pairs(name: str, found: int, pairs: int) -> None:
    """Refuse an array with another number of entries than there are pairs."""
    if found != pairs:
        raise BadInput(f"{name} has {found} entries: there are {pairs} pairs")


def encode_many(
    targets: Buffer,
    target_offsets: NDArray[np.uint64],
    target_lengths: NDArray[np.uint32],
    bases: Buffer,
    base_offsets: NDArray[np.uint64],
    base_lengths: NDArray[np.uint32],
    *,
    level: int = 1,
    limit_bytes: NDArray[np.uint32] | None = None,
) -> tuple[NDArray[np.uint8], NDArray[np.uint32]]:
    """Return (deltas, delta_lengths) as in `_xdelta3.pyi`; the level has no effect."""
    target_payload, base_payload = payload_of("targets", targets), payload_of("bases", bases)
    check_array("target_offsets", target_offsets, np.uint64)
    check_array("target_lengths", target_lengths, np.uint32)
    check_array("base_offsets", base_offsets, np.uint64)
    check_array("base_lengths", base_lengths, np.uint32)
    limits = target_lengths if limit_bytes is None else limit_bytes
    check_array("limit_bytes", limits, np.uint32)
    target_pieces = slices("target", target_payload, target_offsets, target_lengths, PAIR_BYTES_MAX)
    base_pieces = slices("base", base_payload, base_offsets, base_lengths, PAIR_BYTES_MAX)
    check_pairs("base_offsets", len(base_pieces), len(target_pieces))
    check_pairs("limit_bytes", len(limits), len(target_pieces))
    if not 1 <= level <= LEVEL_MAX:
        raise BadInput(f"level {level}: choose 1 to {LEVEL_MAX}")
    deltas = [encode(target, base) for target, base in zip(target_pieces, base_pieces, strict=True)]
    kept = [delta if len(delta) <= limit else b"" for delta, limit in zip(deltas, limits.tolist(), strict=True)]
    joined = np.frombuffer(bytearray(b"".join(kept)), dtype=np.uint8)
    return joined, np.array([len(delta) for delta in kept], dtype=np.uint32)


def decode_many(
    deltas: Buffer,
    delta_offsets: NDArray[np.uint64],
    delta_lengths: NDArray[np.uint32],
    bases: Buffer,
    base_offsets: NDArray[np.uint64],
    base_lengths: NDArray[np.uint32],
    target_lengths: NDArray[np.uint32],
) -> NDArray[np.uint8]:
    """Return all targets, joined; shapes, bounds and errors as in `_xdelta3.pyi`."""
    delta_payload, base_payload = payload_of("deltas", deltas), payload_of("bases", bases)
    check_array("delta_offsets", delta_offsets, np.uint64)
    check_array("delta_lengths", delta_lengths, np.uint32)
    check_array("base_offsets", base_offsets, np.uint64)
    check_array("base_lengths", base_lengths, np.uint32)
    check_array("target_lengths", target_lengths, np.uint32)
    delta_pieces = slices("delta", delta_payload, delta_offsets, delta_lengths, DELTA_BYTES_MAX)
    base_pieces = slices("base", base_payload, base_offsets, base_lengths, PAIR_BYTES_MAX)
    check_pairs("base_offsets", len(base_pieces), len(delta_pieces))
    check_pairs("target_lengths", len(target_lengths), len(delta_pieces))
    for i, target_bytes in enumerate(target_lengths.tolist()):
        if target_bytes > PAIR_BYTES_MAX:
            raise BadInput(f"target {i} of {target_bytes} bytes: at most {PAIR_BYTES_MAX}")
    targets = bytearray()
    for i, (delta, base) in enumerate(zip(delta_pieces, base_pieces, strict=True)):
        try:
            targets += decode(delta, base, int(target_lengths[i]))
        except Corrupt as err:
            raise Corrupt(f"delta of pair {i}: {err}") from err
    return np.frombuffer(targets, dtype=np.uint8)

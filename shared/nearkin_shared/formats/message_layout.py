"""Define the layout of messages, and read headers.

    0     4      5     6       8         24         32         40        44         46       48
    | NKS1 | ver | kind | fresh | blob id | position | sequence | payload | segments | chunks | SFs, name sizes, 0
    64
    | tenant | key | sketch | columns | payload |

Format: docs/internals/formats/message.md. Only the header is read here: columns are validated when they are decoded,
for one message or for many at once.

Invariant: an undecoded message has a header within its bounds and all bytes that the header announces.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from itertools import accumulate
from struct import Struct
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearkin_shared.errors import Corrupt, FormatTooNew
from nearkin_shared.limits import KEY_BYTES_MAX, KIB, METADATA_BYTES_MAX, SEGMENT_BYTES_MAX, TENANT_BYTES_MAX
from nearkin_shared.types import NAME_BYTES, SEGMENT_ID_BYTES, U8, Bools
from nearkin_shared.utils.frozen import frozen

MAGIC = b"NKS1"
VERSION = 1
STAGED_VERSION = 3
"""Format of a reference to a pack: a reader without staging must refuse it by its version."""
STAGED = Struct("<QQQ16s32s")
"""Payload of a reference: bytes and time of the pack, start and origin of the upload, BLAKE3 of the pack."""
VERSIONS_READ = (1, 2, 3, 4, 5, 6)
SPARSE_VERSION = 4
"""Format of segments without the bytes of known chunks, and of references to packs of them."""
BATCH_VERSION = 5
"""Format of messages about a batch of blobs: an older reader would take the batch for one blob."""
REFERENCED_VERSION = 6
"""Format of segments whose bytes are in packs: an older reader would take the references for bytes."""
CONDITIONAL_VERSION = 2
"""Format of an end with a precondition: a reader without preconditions must refuse it, not commit regardless."""
BLOB_BYTES = 16
MESSAGE_BYTES_MAX = 1_048_576 - 16 * 1024
"""Kafka's default limit, less the overhead of a record batch and of headers."""
CHUNKS_MAX = 4096
"""Chunks of a message: with SEGMENT_BYTES_MAX of payload and 24 bytes of super-features it stays below the limit."""
SEGMENTS_MAX = CHUNKS_MAX
END_BYTES_MAX = 2 * METADATA_BYTES_MAX
BLOBS_MAX = 1024
"""Blobs of a batch that a reader accepts."""
TABLE_BYTES_MAX = 192 * KIB
"""Bytes of the table of a batch; with it a batch of SEGMENT_BYTES_MAX would not fit a message, so it has fewer."""
TABLE_BYTES = Struct("<I")
SKETCH_BYTES_MAX = 255
SUPER_FEATURES_MAX = 16

HEADER = Struct("<4sBBH16sQQIHHBBBxHH8x")
assert HEADER.size == 64  # docs/internals/formats/message.md
LEDGER = Struct("<12Q")

Column = NDArray[Any]


@frozen
class MessageParts:
    """An encoded message with its payload in a buffer that stages of one process share."""

    head: bytes
    """All before the payload."""
    payload: U8

    def __len__(self) -> int:
        return len(self.head) + len(self.payload)

    def join(self) -> bytes:
        """Return the message as it is sent."""
        return b"".join((self.head, self.payload.data))


Encoded = bytes | MessageParts


def head_of(value: Encoded) -> bytes:
    """Return the bytes in front of the payload, and the payload unless it is apart."""
    return value if isinstance(value, bytes) else value.head


def joined(value: Encoded) -> bytes:
    """Return a message as it is sent."""
    return value if isinstance(value, bytes) else value.join()


class MessageKind(IntEnum):
    """The kind of a message."""

    FRAME = 1
    SEGMENTS = 2
    FRESH = 3
    PAIRED = 4
    PLACED = 5
    END = 6
    STAGED = 7
    SPARSE = 8
    STAGED_SPARSE = 9
    BATCH = 10
    BATCH_END = 11


ENDS = frozenset((MessageKind.END, MessageKind.BATCH_END))
_END_KINDS = bytes([MessageKind.END]), bytes([MessageKind.BATCH_END])
_STAGED_KINDS = (bytes([MessageKind.STAGED]), bytes([MessageKind.STAGED_SPARSE]))
_BATCH_KIND = bytes([MessageKind.BATCH])
_REFERENCED = frozenset((MessageKind.SEGMENTS, MessageKind.FRESH, MessageKind.PAIRED))
_OF_ONE_BLOB = frozenset((MessageKind.FRAME, MessageKind.STAGED, MessageKind.SPARSE, MessageKind.STAGED_SPARSE))


@frozen
class Envelope:
    """The blob and the position that a message belongs to. `blob` 16 bytes: one attempt."""

    blob: bytes
    tenant: str
    key: str
    position: int = 0
    sequence: int = 0
    blobs: int = 0
    """Number of blobs if the message is about a batch, whose first key is `key`; 0: about one blob."""


@frozen
class Pack:
    """A slice of a blob in the object store: `nearkin_shared.storage.staged_packs`."""

    blob: bytes
    position: int
    size_bytes: int
    staged_ms: int
    """Milliseconds since 1970 when it was stored: a part of its object's name."""
    blake3: bytes

    @property
    def end(self) -> int:
        """Return the position in the blob at which the pack ends."""
        return self.position + self.size_bytes


@frozen
class Counts:
    """Rows of a message's columns."""

    segments: int = 0
    chunks: int = 0
    fresh: int = 0
    super_features: int = 0


# Columns of each kind in the order they are written: (name, dtype, items as one of _ITEMS).
_SEGMENT_COLUMNS = (
    ("chunk_bounds", "<u4", "segments+1"),
    ("segment_ids", "u1", "segments*20"),
    ("names", "u1", "chunks*32"),
    ("zero", "u1", "chunks"),
)
_FRESH_COLUMNS = (
    ("segment_containers", "<u8", "segments"),
    ("chunk_containers", "<u8", "chunks"),
    ("segment_ordinals", "<u4", "segments"),
    ("chunk_ordinals", "<u4", "chunks"),
    *_SEGMENT_COLUMNS[:1],
    ("first", "<u2", "chunks"),
    ("segment_known", "u1", "segments"),
    ("chunk_known", "u1", "chunks"),
    *_SEGMENT_COLUMNS[1:],
)
_PAIRED_COLUMNS = (
    ("super_features", "<u8", "fresh*super_features"),
    ("base_containers", "<u8", "fresh"),
    *_FRESH_COLUMNS[:2],
    ("base_ordinals", "<u4", "fresh"),
    *_FRESH_COLUMNS[2:],
    ("base_found", "u1", "fresh"),
    ("base_rank", "u1", "fresh"),
)
_PLACED_COLUMNS = (
    ("containers", "<u8", "segments"),
    ("ordinals", "<u4", "segments"),
    ("lengths", "<u4", "segments"),
    ("known", "u1", "segments"),
)
COLUMNS: dict[MessageKind, tuple[tuple[str, str, str], ...]] = {
    MessageKind.FRAME: (),
    MessageKind.SEGMENTS: _SEGMENT_COLUMNS,
    MessageKind.FRESH: _FRESH_COLUMNS,
    MessageKind.PAIRED: _PAIRED_COLUMNS,
    MessageKind.PLACED: _PLACED_COLUMNS,
    MessageKind.END: (),
    MessageKind.STAGED: (),
    MessageKind.SPARSE: _FRESH_COLUMNS,
    MessageKind.STAGED_SPARSE: (),
    MessageKind.BATCH: (),
    MessageKind.BATCH_END: (),
}
_ITEMS = ("segments", "segments+1", "segments*20", "chunks", "chunks*32", "fresh", "fresh*super_features")
_KINDS: dict[int, MessageKind] = {int(kind): kind for kind in MessageKind}
_AT = {kind: {name: at for at, (name, _, _) in enumerate(columns)} for kind, columns in COLUMNS.items()}
_DTYPES = {kind: [np.dtype(dtype) for _, dtype, _ in columns] for kind, columns in COLUMNS.items()}
_WIDTHS = {
    kind: [(_ITEMS.index(items), np.dtype(dtype).itemsize) for _, dtype, items in columns]
    for kind, columns in COLUMNS.items()
}
_PAYLOAD_MAX = dict.fromkeys(MessageKind, SEGMENT_BYTES_MAX) | {
    MessageKind.END: END_BYTES_MAX,
    MessageKind.PLACED: LEDGER.size,
    MessageKind.STAGED: STAGED.size,
    MessageKind.STAGED_SPARSE: STAGED.size,
    MessageKind.BATCH_END: TABLE_BYTES_MAX,
}


@frozen
class UndecodedMessage:
    """A message with a validated header and undecoded columns. `what` names it in errors."""

    kind: MessageKind
    envelope: Envelope
    counts: Counts
    sketch: str
    head: bytes
    """All before the payload, and the payload unless it is in a buffer of its own."""
    starts: Sequence[int]
    """Start of each column, and of the payload after the last one."""
    payload: U8
    """A view of the message."""
    what: str
    is_referenced: bool = False
    """The payload is a table of packs that have the bytes: `nearkin_shared.formats.payload_references`."""

    def column(self, name: str) -> Column:
        """Return a column, a view of the message."""
        at = _AT[self.kind][name]
        dtype, start = _DTYPES[self.kind][at], self.starts[at]
        return np.frombuffer(self.head, dtype, (self.starts[at + 1] - start) // dtype.itemsize, start)

    def columns(self, first: str, last: str) -> memoryview:
        """Return the bytes of neighbouring columns."""
        at = _AT[self.kind]
        return memoryview(self.head)[self.starts[at[first]] : self.starts[at[last] + 1]]

    @property
    def parts(self) -> MessageParts:
        """The message as it is passed on in memory."""
        return MessageParts(self.head[: self.starts[-1]], self.payload)

    @property
    def payload_bytes(self) -> int:
        """The payload's size."""
        return len(self.payload)


def join_column(messages: Sequence[UndecodedMessage], name: str) -> Column:
    """Concatenate a column of messages of one kind; a view for one message."""
    if len(messages) == 1:
        return messages[0].column(name)
    kind = messages[0].kind
    at = _AT[kind][name]
    parts = [memoryview(message.head)[message.starts[at] : message.starts[at + 1]] for message in messages]
    return np.frombuffer(b"".join(parts), _DTYPES[kind][at])


def join_flags(messages: Sequence[UndecodedMessage], name: str) -> Bools:
    """Concatenate a column of flags of messages of one kind. Raises Corrupt."""
    column = join_column(messages, name)
    if len(column) and int(column.max()) > 1:
        raise Corrupt(f"{describe_messages(messages)}: {name} has a flag of {int(column.max())}: want 0 or 1")
    return column.view(np.bool_)


def describe_messages(messages: Sequence[UndecodedMessage]) -> str:
    """Return the name of messages in an error."""
    more = f" and {len(messages) - 1} more" if len(messages) > 1 else ""
    return f"{messages[0].what}{more}"


def read_header(value: Encoded, what: str) -> UndecodedMessage:
    """Parse a message's header. Raises Corrupt, or FormatTooNew, with the name `what`."""
    data = head_of(value)
    if len(value) > MESSAGE_BYTES_MAX:
        raise Corrupt(f"{what}: {len(value)} bytes are too many for a message, want at most {MESSAGE_BYTES_MAX}")
    if len(data) < HEADER.size or data[:4] != MAGIC:
        raise Corrupt(f"{what}: not a Nearkin message ({len(data)} bytes, starts with {data[:4]!r})")
    if data[4] not in VERSIONS_READ:
        raise FormatTooNew(
            f"{what}: message format {data[4]}; this Nearkin reads {VERSIONS_READ[0]} to {VERSIONS_READ[-1]}: "
            "upgrade the workers together"
        )
    fields = HEADER.unpack_from(data)
    _, _, code, fresh, blob, position, sequence, payload_bytes, segments, chunks, ranks = fields[:11]
    tenant_bytes, sketch_bytes, key_bytes, blobs = fields[11:]
    kind, counts = _KINDS.get(code), Counts(segments, chunks, fresh, ranks)
    if kind is None:
        raise Corrupt(f"{what}: message kind {code} is not known")
    problem = problem_of(tenant_bytes, key_bytes, sketch_bytes, counts, payload_bytes, kind)
    problem = problem or batch_problem(kind, blobs, is_batch=data[4] == BATCH_VERSION)
    is_referenced = data[4] == REFERENCED_VERSION
    if is_referenced and kind not in _REFERENCED:
        problem = problem or f"a {kind.name.lower()} in format {REFERENCED_VERSION}, which only segments have"
    if problem is not None:
        raise Corrupt(f"{what}: {problem}")
    key_at = HEADER.size + tenant_bytes
    sketch_at = key_at + key_bytes
    at = sketch_at + sketch_bytes
    try:
        tenant, key = data[HEADER.size : key_at].decode(), data[key_at:sketch_at].decode()
        sketch = data[sketch_at:at].decode()
    except UnicodeDecodeError as err:
        raise Corrupt(f"{what}: names are not UTF-8") from err
    items = _items(counts)
    starts = list(accumulate([items[which] * width for which, width in _WIDTHS[kind]], initial=at))
    if starts[-1] + payload_bytes != len(value):
        raise Corrupt(f"{what}: {len(value) - starts[-1]} bytes of payload, {payload_bytes} announced: truncated?")
    payload = np.frombuffer(value, np.uint8, -1, starts[-1]) if isinstance(value, bytes) else value.payload
    envelope = Envelope(blob, tenant, key, position, sequence, blobs)
    return UndecodedMessage(kind, envelope, counts, sketch, data, starts, payload, what, is_referenced)


def is_end(value: Encoded) -> bool:
    """Return whether the data begin as an end does: a hint, because nothing else is checked."""
    data = head_of(value)
    return data[:4] == MAGIC and data[5:6] in _END_KINDS


def is_staged(value: Encoded) -> bool:
    """Return whether the data begin as a reference to a pack does: a hint, as `is_end`."""
    data = head_of(value)
    return data[:4] == MAGIC and data[5:6] in _STAGED_KINDS


def staged_bytes(value: Encoded) -> int:
    """Return the bytes of the pack that the data refer to, else 0: a hint, as `is_end`."""
    data = head_of(value)
    return (
        int(STAGED.unpack_from(data, len(data) - STAGED.size)[0]) if is_staged(data) and len(data) > STAGED.size else 0
    )


def is_batch(value: Encoded) -> bool:
    """Return whether the data begin as a batch of blobs does: a hint, as `is_end`."""
    data = head_of(value)
    return data[:4] == MAGIC and data[5:6] == _BATCH_KIND


def batch_problem(kind: MessageKind, blobs: int, *, is_batch: bool) -> str | None:
    """Return what is wrong with the number of blobs of a message, if anything.

    `is_batch`: whether its format is that of batches.
    """
    if is_batch != (blobs > 0) or blobs > BLOBS_MAX:
        return f"{blobs} blobs in a {kind.name.lower()}: want 1 to {BLOBS_MAX} in format {BATCH_VERSION}, else none"
    if kind in (MessageKind.BATCH, MessageKind.BATCH_END) and not blobs:
        return f"a {kind.name.lower()} of no blobs"
    if kind in _OF_ONE_BLOB and blobs:
        return f"a {kind.name.lower()} of a batch"
    return None


def split_messages(data: memoryview, what: str) -> list[bytes]:
    """Return the messages that a pack has one after another. Raises Corrupt."""
    found, start = [], 0
    while start < len(data):
        size_bytes = _announced_bytes(data[start:], what)
        if not 0 < size_bytes <= min(len(data) - start, MESSAGE_BYTES_MAX):
            raise Corrupt(f"{what}: a message of {size_bytes} bytes at {start} of {len(data)}: truncated?")
        found.append(bytes(data[start : start + size_bytes]))
        start += size_bytes
    return found


def _announced_bytes(data: memoryview, what: str) -> int:
    """Return the size of the message at the start of `data`. Raises Corrupt."""
    if len(data) < HEADER.size or data[:4] != MAGIC:
        raise Corrupt(f"{what}: not a Nearkin message ({len(data)} bytes, starts with {bytes(data[:4])!r})")
    _, _, code, fresh, _, _, _, payload_bytes, segments, chunks, ranks, *names_bytes, _ = HEADER.unpack_from(data)
    kind = _KINDS.get(code)
    if kind is None:
        raise Corrupt(f"{what}: message kind {code} is not known")
    items = _items(Counts(segments, chunks, fresh, ranks))
    return int(HEADER.size + sum(names_bytes) + sum(items[at] * width for at, width in _WIDTHS[kind]) + payload_bytes)


def _items(counts: Counts) -> tuple[int, ...]:
    """Return the number of items for each of _ITEMS."""
    segments, chunks, fresh = counts.segments, counts.chunks, counts.fresh
    return (
        *(segments, segments + 1, segments * SEGMENT_ID_BYTES, chunks, chunks * NAME_BYTES),
        *(fresh, fresh * counts.super_features),
    )


def problem_of(
    tenant_bytes: int, key_bytes: int, sketch_bytes: int, counts: Counts, payload_bytes: int, kind: MessageKind
) -> str | None:
    """Return which value is out of bounds, if any; used before writing and after reading."""
    if (
        tenant_bytes <= TENANT_BYTES_MAX
        and key_bytes <= KEY_BYTES_MAX
        and sketch_bytes <= SKETCH_BYTES_MAX
        and payload_bytes <= _PAYLOAD_MAX[kind]
        and counts.segments <= SEGMENTS_MAX
        and counts.fresh <= counts.chunks <= CHUNKS_MAX
        and counts.super_features <= SUPER_FEATURES_MAX
    ):
        return None
    for name, found, most in (
        ("tenant bytes", tenant_bytes, TENANT_BYTES_MAX),
        ("key bytes", key_bytes, KEY_BYTES_MAX),
        ("sketch name bytes", sketch_bytes, SKETCH_BYTES_MAX),
        ("payload bytes", payload_bytes, _PAYLOAD_MAX[kind]),
        ("chunks", counts.chunks, CHUNKS_MAX),
        ("segments", counts.segments, SEGMENTS_MAX),
        ("fresh chunks", counts.fresh, counts.chunks),
        ("super-features", counts.super_features, SUPER_FEATURES_MAX),
    ):
        if found > most:
            return f"{found} {name}: want at most {most}"
    raise AssertionError("the two lists of bounds differ")

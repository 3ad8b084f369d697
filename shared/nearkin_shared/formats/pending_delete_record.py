"""Encode and decode records of pending deletes and of quarantine.

    0      4     6       8          16        20
    | NKG1 | ver | flags | sequence | entries | times ... | entries' table | runs' table | check 8 |

In an unencrypted store a record has a MAC of 16 bytes before the check. Times are not compressed, so that a record's
size does not depend on the clock (docs/internals/formats/pending-deletes.md).

Invariant: nothing is freed that no record named.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from struct import Struct

import numpy as np

from nearkin_shared.errors import BadInput, Corrupt, FormatTooNew
from nearkin_shared.formats import columns
from nearkin_shared.formats.container_layout import ROWS_MAX
from nearkin_shared.formats.manifest import CREATED_US_MAX
from nearkin_shared.formats.record_authentication import mac_of, not_authentic, split_mac
from nearkin_shared.types import CONTAINER_ID_MIN, U32
from nearkin_shared.utils.frozen import frozen

VERSION = 2
"""2 has a MAC before the check; 1, which is encrypted or from an older release, has none."""
MAGIC, QUARANTINED = b"NKG1", b"NKQ1"
_CONTENT_NAMES = {MAGIC: "condemned", QUARANTINED: "quarantined"}
FIXED = Struct("<4sHHQI")
assert FIXED.size == 20  # docs/internals/formats/pending-deletes.md
ENTRIES_MAX = 1 << 22
"""Containers in one record: 16 TiB of containers of 4 MiB. Further ones wait for a later run."""
RUNS_MAX = 1 << 24
ORDINALS_MAX = 1 << 27
"""In all runs together: a terabyte of chunks of 8 KiB, 512 MiB in memory. A run of any length takes 8 bytes."""
_ENTRY_COLUMNS = [np.dtype(t) for t in ("<u8", "u1", "<u4", "<u4")]
_RUN_COLUMNS = [np.dtype(t) for t in ("<u4", "<u4")]


@frozen
class PendingDelete:
    """The part of one container that is pending deletion, and since when.

    `chunks` and `segments` are ascending ordinals. `whole`: all of the container, whatever its directory contains: it
    may
    be unreadable.
    """

    at_us: int
    chunks: U32
    segments: U32
    whole: bool = False


Record = Mapping[int, PendingDelete]
"""Entries by container id."""


def encode_record(sequence: int, record: Record, magic: bytes = MAGIC, key: bytes | None = None) -> bytes:
    """Encode a record.

    Raises BadInput for more than ENTRIES_MAX containers, RUNS_MAX runs or ORDINALS_MAX ordinals.
    """
    ids = sorted(record)
    parts = [_runs(rows) for container in ids for rows in (record[container].chunks, record[container].segments)]
    starts = np.concatenate([np.zeros(0, np.uint32), *(start for start, _ in parts)])
    counts = np.concatenate([np.zeros(0, np.uint32), *(count for _, count in parts)])
    if len(ids) > ENTRIES_MAX or len(starts) > RUNS_MAX:
        raise BadInput(f"{len(ids)} pending containers in {len(starts)} runs: want {ENTRIES_MAX} and {RUNS_MAX}")
    if (ordinals := _total(counts)) > ORDINALS_MAX:
        raise BadInput(f"{ordinals} pending chunks and segments: want at most {ORDINALS_MAX}")
    of_each = np.array([len(start) for start, _ in parts], "<u4").reshape(-1, 2)
    body = FIXED.pack(magic, 1 if key is None else VERSION, 0, sequence, len(ids))
    body += np.array([record[container].at_us for container in ids], "<i8").tobytes()
    body += columns.pack(
        [
            np.array(ids, "<u8"),
            np.array([record[container].whole for container in ids], "u1"),
            np.ascontiguousarray(of_each[:, 0]),
            np.ascontiguousarray(of_each[:, 1]),
        ]
    )
    body += columns.pack([starts.astype("<u4"), counts.astype("<u4")])
    body += b"" if key is None else mac_of(body, key)
    return body + columns.check_bytes(body)


def select_fitting(record: Record) -> dict[int, PendingDelete]:
    """Return the entries that fit into one record, the oldest first; the others wait.

    2^24 runs are 16,000 containers with 1,000 runs of pending chunks each.
    """
    found: dict[int, PendingDelete] = {}
    runs = ordinals = 0
    for container in sorted(record, key=lambda container: (record[container].at_us, container)):
        entry = record[container]
        runs += len(_runs(entry.chunks)[0]) + len(_runs(entry.segments)[0])
        ordinals += len(entry.chunks) + len(entry.segments)
        if runs > RUNS_MAX or ordinals > ORDINALS_MAX or len(found) >= ENTRIES_MAX:
            break
        found[container] = entry
    return found


def decode_record(
    data: bytes, what: str, magic: bytes = MAGIC, key: bytes | None = None
) -> tuple[int, dict[int, PendingDelete]]:
    """Return (sequence, record), with its MAC verified if `key` is given.

    Pending deletes then require a MAC. Quarantine is accepted without one, because it deletes nothing. Raises Corrupt,
    or
    FormatTooNew with both versions.
    """
    whole = memoryview(data)
    if len(whole) < FIXED.size + columns.CHECK_BYTES:
        raise Corrupt(f"{what}: {len(whole)} bytes are too few for a record of {_CONTENT_NAMES[magic]}")
    if bytes(whole[:4]) != magic:
        raise Corrupt(f"{what}: not a record of {_CONTENT_NAMES[magic]} (starts with {bytes(whole[:4])!r})")
    view = whole[: -columns.CHECK_BYTES]
    if columns.check_bytes(view) != bytes(whole[-columns.CHECK_BYTES :]):
        raise Corrupt(f"{what}: checksum does not agree")
    _, version, flags, sequence, entries = FIXED.unpack_from(view)
    if version > VERSION or flags:
        raise FormatTooNew(f"{what}: format {version}, flags {flags}; this Nearkin reads up to {VERSION}: upgrade")
    if version < 1 or entries > ENTRIES_MAX:
        raise Corrupt(f"{what}: format {version} with {entries} entries, which no release of Nearkin wrote")
    if version == VERSION:
        view = split_mac(view, key, what)
    elif key is not None and magic == MAGIC:
        raise not_authentic(what)
    try:
        return sequence, _decode(view, entries, what)
    except (struct.error, ValueError, IndexError) as err:
        raise Corrupt(f"{what}: does not parse: {err}") from err


def _decode(view: memoryview, entries: int, what: str) -> dict[int, PendingDelete]:
    position = FIXED.size + 8 * entries
    at_us = np.frombuffer(view[FIXED.size : position], "<i8")
    (ids, wholes, of_chunks, of_segments), used = columns.unpack(view[position:], _ENTRY_COLUMNS, ENTRIES_MAX, what)
    position += used
    (starts, counts), used = columns.unpack(view[position:], _RUN_COLUMNS, RUNS_MAX, what)
    if position + used != len(view) or len(ids) != entries:
        raise Corrupt(f"{what}: {len(ids)} entries of {entries}, {len(view) - position - used} bytes left over")
    if entries and (int(ids[0]) < CONTAINER_ID_MIN or np.any(ids[1:] <= ids[:-1])):
        raise Corrupt(f"{what}: its containers are not in order")
    if entries and (int(wholes.max()) > 1 or int(at_us.min()) < 0 or int(at_us.max()) > CREATED_US_MAX):
        raise Corrupt(f"{what}: an entry without meaning")
    of_each = np.stack([of_chunks, of_segments], axis=1).ravel().astype(np.int64)
    if int(of_each.sum()) != len(starts) or (len(counts) and not counts.min()):
        raise Corrupt(f"{what}: its runs do not add up")
    if (ordinals := _total(counts)) > ORDINALS_MAX:
        raise Corrupt(f"{what}: {ordinals} chunks and segments, at most {ORDINALS_MAX} are allowed in one")
    bounds = np.concatenate([np.zeros(1, np.int64), np.cumsum(of_each)])
    found = {}
    for row, container in enumerate(ids.tolist()):
        chunks, segments = (
            _expand(starts[bounds[at] : bounds[at + 1]], counts[bounds[at] : bounds[at + 1]], what)
            for at in (2 * row, 2 * row + 1)
        )
        found[container] = PendingDelete(int(at_us[row]), chunks, segments, bool(wholes[row]))
    return found


def _total(counts: U32) -> int:
    return int(counts.sum(dtype=np.uint64))


def _runs(ordinals: U32) -> tuple[U32, U32]:
    """Return (start, count) of the runs in ascending ordinals."""
    breaks = np.flatnonzero(np.diff(ordinals) != 1) + 1
    firsts = np.concatenate([np.zeros(min(1, len(ordinals)), np.intp), breaks])
    return ordinals[firsts], np.diff(np.append(firsts, len(ordinals))).astype(np.uint32)


def _expand(starts: U32, counts: U32, what: str) -> U32:
    if not len(starts):
        return np.zeros(0, np.uint32)
    ends = starts.astype(np.int64) + counts
    if int(ends[-1]) > ROWS_MAX or np.any(starts[1:] <= ends[:-1]):
        raise Corrupt(f"{what}: its runs are not in order, or above {ROWS_MAX}")
    before = np.cumsum(counts, dtype=np.int64) - counts
    return (np.repeat(starts - before, counts) + np.arange(int(counts.sum()))).astype(np.uint32)

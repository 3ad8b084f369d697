"""Convert results to JSON and back.

    info_json  <-> info_from        put_json      <-> put_from
    stats_json <-> stats_from       explain_json  <-> explanation_from
    deletion_json <-> deletion_from

Scripts use the names, so a name is never removed; a reader ignores unknown names. Invalid values raise ValueError; the
caller adds the source.

Invariant: each result has one JSON form, in commands, gateway and clients.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:  # `nearkin ls` must not wait for numpy
    from nearkin_shared.results import (
        ChunkExplained,
        Damage,
        Deletion,
        Explanation,
        GcReport,
        GcState,
        IndexReport,
        Ledger,
        PutResult,
        RemainingCopy,
        SegmentExplained,
        Stats,
        VersionInfo,
    )

_LEDGER_COUNTS = (
    *("logical_bytes", "stored_bytes", "chunks", "duplicate_chunks", "zero_chunks", "delta_chunks", "raw_chunks"),
    *("unique_bytes", "delta_chunk_bytes", "delta_bytes", "block_bytes", "raw_block_bytes"),
)
"""The counted fields; the other fields of a ledger are derived."""

_T = TypeVar("_T")


def info_json(info: VersionInfo) -> dict[str, object]:
    """Convert a version to JSON; `created` is ISO 8601 in UTC."""
    return {
        "key": info.key,
        "version": info.version,
        "size_bytes": info.size_bytes,
        "created": _timestamp(info.created),
        "digest": info.digest,
        "sha256": info.sha256,
        "segments": info.segments,
        "chunks": info.chunks,
        "metadata": dict(info.metadata),
        "retain_until": None if info.retain_until is None else _timestamp(info.retain_until),
        "source_changed": info.source_changed,
    }


def info_from(value: object) -> VersionInfo:
    """Parse the output of `info_json`. Raises ValueError."""
    from nearkin_shared.results import VersionInfo

    fields = _object(value, "a version")
    sha256 = fields.get("sha256")
    return VersionInfo(
        key=_get(fields, "key", str),
        version=_count(fields, "version"),
        size_bytes=_count(fields, "size_bytes"),
        created=_moment(fields, "created"),
        digest=_get(fields, "digest", str),
        sha256=None if sha256 is None else _get(fields, "sha256", str),
        segments=_count(fields, "segments"),
        chunks=_count(fields, "chunks"),
        metadata=_texts(fields, "metadata"),
        retain_until=None if fields.get("retain_until") is None else _moment(fields, "retain_until"),
        source_changed=_get(fields, "source_changed", bool) if "source_changed" in fields else False,
    )


def deletion_json(deletion: Deletion) -> dict[str, object]:
    """Convert a deleted version to JSON."""
    return {
        "key": deletion.key,
        "version": deletion.version,
        "deleted": _timestamp(deletion.deleted),
        "until": _timestamp(deletion.until),
        "who": deletion.who,
        "reason": deletion.reason,
        "created": None if deletion.created is None else _timestamp(deletion.created),
    }


def deletion_from(value: object) -> Deletion:
    """Parse the output of `deletion_json`. Raises ValueError."""
    from nearkin_shared.results import Deletion

    fields = _object(value, "a deleted version")
    return Deletion(
        key=_get(fields, "key", str),
        version=_count(fields, "version"),
        deleted=_moment(fields, "deleted"),
        until=_moment(fields, "until"),
        who=_get(fields, "who", str),
        reason=_get(fields, "reason", str),
        created=None if fields.get("created") is None else _moment(fields, "created"),
    )


def damage_from(value: object) -> Damage:
    """Parse the damage of one version in a listing of the gateway. Raises ValueError."""
    from nearkin_shared.results import Damage

    fields = _object(value, "a damaged version")
    return Damage(
        _get(fields, "object_name", str),
        _get(fields, "problem", str),
        ((_get(fields, "key", str), _count(fields, "version")),),
    )


def ledger_json(ledger: Ledger, seconds: float) -> dict[str, object]:
    """Convert a ledger to JSON: bytes and counts as integers, ratios and seconds as floats."""
    return {
        "logical_bytes": ledger.logical_bytes,
        "stored_bytes": ledger.stored_bytes,
        "reduction_ratio": ledger.reduction_ratio,
        "chunks": ledger.chunks,
        "duplicate_chunks": ledger.duplicate_chunks,
        "zero_chunks": ledger.zero_chunks,
        "delta_chunks": ledger.delta_chunks,
        "raw_chunks": ledger.raw_chunks,
        "unique_bytes": ledger.unique_bytes,
        "delta_chunk_bytes": ledger.delta_chunk_bytes,
        "delta_bytes": ledger.delta_bytes,
        "block_bytes": ledger.block_bytes,
        "raw_block_bytes": ledger.raw_block_bytes,
        "dedup_saved_bytes": ledger.dedup_saved_bytes,
        "delta_saved_bytes": ledger.delta_saved_bytes,
        "compression_saved_bytes": ledger.compression_saved_bytes,
        "dcr": ledger.dcr,
        "dce": ledger.dce,
        "seconds": seconds,
    }


def ledger_from(value: object) -> Ledger:
    """Parse the output of `ledger_json`. Raises ValueError."""
    from nearkin_shared.results import Ledger

    fields = _object(value, "a ledger")
    return Ledger(**{name: _count(fields, name) for name in _LEDGER_COUNTS})


def put_json(result: PutResult) -> dict[str, object]:
    """Convert the result of a put to JSON: the version and its ledger in one object."""
    return {**info_json(result.info), **ledger_json(result.ledger, result.seconds)}


def put_from(value: object) -> PutResult:
    """Parse the output of `put_json`, or an event of the topic `committed`.

    Raises ValueError.
    """
    from nearkin_shared.results import PutResult

    fields = _object(value, "a put")
    # an event has the ledger as a field of its own, the result of a put has its fields inline
    ledger = fields.get("ledger", fields)
    return PutResult(info_from(fields), ledger_from(ledger), _number(fields, "seconds"))


def stats_json(stats: Stats) -> dict[str, object]:
    """Convert the sums of a store to JSON."""
    return {
        **ledger_json(stats.ledger, stats.seconds),
        "versions": stats.versions,
        "deleted_versions": stats.deleted_versions,
        "deleted_bytes": stats.deleted_bytes,
        "checkpoints": stats.checkpoints,
        "checkpoint_bytes": stats.checkpoint_bytes,
        "keys": stats.keys,
        "containers": stats.containers,
        "segments": stats.segments,
        "index_bytes": stats.index_bytes,
        "index": None if stats.index is None else _index_json(stats.index),
        "parts": dict(stats.parts),
        "depths": {str(depth): chunks for depth, chunks in sorted(stats.depths.items())},
        "sketches": dict(stats.sketches),
        "found_by": dict(stats.found_by),
        "policies": _policies_json(stats.found_by),
        "metadata_bytes": stats.metadata_bytes,
        "metadata_bytes_per_chunk": stats.metadata_bytes_per_chunk,
        "metadata_bytes_per_fresh_chunk": stats.metadata_bytes_per_fresh_chunk,
        "base_cache_hits": stats.base_cache_hits,
        "base_cache_misses": stats.base_cache_misses,
    }


def stats_from(value: object) -> Stats:
    """Parse the output of `stats_json`. Raises ValueError."""
    from nearkin_shared.results import Stats

    fields = _object(value, "stats")
    return Stats(
        ledger=ledger_from(fields),
        versions=_count(fields, "versions"),
        keys=_count(fields, "keys"),
        containers=_count(fields, "containers"),
        segments=_count(fields, "segments"),
        parts=_counts(fields, "parts"),
        index_bytes=_count(fields, "index_bytes"),
        depths={int(depth): chunks for depth, chunks in _counts(fields, "depths").items()},
        sketches=_counts(fields, "sketches"),
        base_cache_hits=_count(fields, "base_cache_hits"),
        base_cache_misses=_count(fields, "base_cache_misses"),
        seconds=_number(fields, "seconds"),
        deleted_versions=_count(fields, "deleted_versions"),
        deleted_bytes=_count(fields, "deleted_bytes"),
        checkpoints=_count(fields, "checkpoints") if "checkpoints" in fields else 0,  # of an earlier release
        checkpoint_bytes=_count(fields, "checkpoint_bytes") if "checkpoint_bytes" in fields else 0,
        found_by=_counts(fields, "found_by"),
        index=None if fields.get("index") is None else _index_from(fields["index"]),
    )


def _index_json(report: IndexReport) -> dict[str, object]:
    return {"kind": report.kind, "memory_bytes": report.memory_bytes, "missed_share": report.missed_share}


def _index_from(value: object) -> IndexReport:
    from nearkin_shared.results import IndexReport

    fields = _object(value, "index")
    memory_bytes = None if fields.get("memory_bytes") is None else _count(fields, "memory_bytes")
    return IndexReport(_get(fields, "kind", str), memory_bytes, _number(fields, "missed_share"))


def gc_json(report: GcReport) -> dict[str, object]:
    """Convert the report of a GC run to JSON."""
    return {
        "dry_run": report.dry_run,
        "versions": report.versions,
        "containers_deleted": report.containers_deleted,
        "containers_rewritten": report.containers_rewritten,
        "freed_bytes": report.freed_bytes,
        "pending_delete_containers": report.pending_delete_containers,
        "pending_delete_bytes": report.pending_delete_bytes,
        "due": None if report.due is None else report.due.astimezone(UTC).isoformat(),
        "forgotten": report.forgotten,
        "pending_erasures": report.pending_erasures,
        "finished_erasures": report.finished_erasures,
        "remaining": remaining_json(report.remaining),
        "refused_records": report.refused_records,
        "rolled_back_keys": report.rolled_back_keys,
        "undeletable_versions": report.undeletable_versions,
        "recent_containers": report.recent_containers,
        "held": dict(report.held) if report.dry_run else None,
        "seconds": report.seconds,
    }


def remaining_json(copies: Iterable[RemainingCopy]) -> list[dict[str, object]]:
    """Convert the copies that an erasure cannot reach to JSON."""
    return [
        {
            "place": copy.place,
            "holds": copy.holds,
            "until": None if copy.until is None else copy.until.astimezone(UTC).isoformat(timespec="seconds"),
            "remedy": copy.remedy,
        }
        for copy in copies
    ]


def gc_state_json(state: GcState) -> dict[str, Any]:
    """Convert the state of garbage collection to JSON."""
    paused = state.paused_since
    return {
        "paused": None if paused is None else {"since": paused.astimezone(UTC).isoformat(), "by": state.paused_by},
        "pending_delete_containers": state.pending_delete_containers,
        "due": None if state.due is None else state.due.astimezone(UTC).isoformat(),
    }


def explain_json(explanation: Explanation, *, segments: bool) -> dict[str, object]:
    """Convert an explanation to JSON; with `segments` include every segment and chunk."""
    known = sum(segment.known for segment in explanation.segments)
    sketches = Counter(segment.sketch for segment in explanation.segments if segment.sketch)
    value: dict[str, object] = {
        "key": explanation.info.key,
        "version": explanation.info.version,
        "size_bytes": explanation.info.size_bytes,
        "digest": explanation.info.digest,
        "segment_count": len(explanation.segments),
        "known_segments": known,
        "sketches": dict(sorted(sketches.items())),
        "duplicate_chunks": explanation.duplicate_chunks,
        "zero_chunks": explanation.zero_chunks,
        "delta_chunks": explanation.delta_chunks,
        "raw_chunks": explanation.raw_chunks,
        "found_by": dict(explanation.found_by),
        "policies": _policies_json(explanation.found_by),
        "kinds": {
            kind: {"chunks": n, "bytes": b, "stored_estimate_bytes": s} for kind, (n, b, s) in kinds(explanation)
        },
    }
    if segments:
        value["segments"] = [_segment_json(segment) for segment in explanation.segments]
    return value


def explanation_from(value: object, info: VersionInfo) -> Explanation:
    """Parse the output of `explain_json` with segments for the version `info`.

    Raises ValueError.
    """
    from nearkin_shared.results import Explanation

    fields = _object(value, "an explanation")
    return Explanation(
        info=info,
        segments=tuple(_segment_from(segment) for segment in _get(fields, "segments", list)),
        duplicate_chunks=_count(fields, "duplicate_chunks"),
        zero_chunks=_count(fields, "zero_chunks"),
        delta_chunks=_count(fields, "delta_chunks"),
        raw_chunks=_count(fields, "raw_chunks"),
        found_by=_counts(fields, "found_by"),
    )


def kinds(explanation: Explanation) -> list[tuple[str, tuple[int, int, int]]]:
    """Return (kind, (chunks, bytes, stored bytes)); stored bytes are 0 for duplicates."""
    sums = {kind: [0, 0, 0] for kind in ("duplicate", "zero", "delta", "raw")}
    for segment in explanation.segments:
        for chunk in segment.chunks:
            row = sums.setdefault(chunk.kind, [0, 0, 0])
            row[0] += 1
            row[1] += chunk.length_bytes
            row[2] += chunk.stored_estimate_bytes if chunk.kind in ("delta", "raw") else 0
    return [(kind, (row[0], row[1], row[2])) for kind, row in sums.items()]


def _segment_json(segment: SegmentExplained) -> dict[str, object]:
    return {
        "sequence": segment.sequence,
        "offset": segment.offset,
        "length_bytes": segment.length_bytes,
        "known": segment.known,
        "sketch": segment.sketch,
        "chunks": [_chunk_json(chunk) for chunk in segment.chunks],
    }


def _segment_from(value: object) -> SegmentExplained:
    from nearkin_shared.results import SegmentExplained

    fields = _object(value, "a segment")
    return SegmentExplained(
        sequence=_count(fields, "sequence"),
        offset=_count(fields, "offset"),
        length_bytes=_count(fields, "length_bytes"),
        known=_get(fields, "known", bool),
        chunks=tuple(_chunk_from(chunk) for chunk in _get(fields, "chunks", list)),
        sketch=_get(fields, "sketch", str) if "sketch" in fields else "",
    )


def _policies_json(found_by: Mapping[str, int]) -> dict[str, dict[str, float]]:
    from nearkin_shared.results import by_policy

    found = sum(found_by.values())
    return {name: {"chunks": chunks, "share": chunks / found} for name, chunks in by_policy(found_by).items()}


def _chunk_json(chunk: ChunkExplained) -> dict[str, object]:
    from nearkin_shared.results import policy_of

    return {
        "offset": chunk.offset,
        "length_bytes": chunk.length_bytes,
        "kind": chunk.kind,
        "fingerprint": chunk.fingerprint,
        "depth": chunk.depth,
        "stored_estimate_bytes": chunk.stored_estimate_bytes,
        "base_fingerprint": chunk.base_fingerprint,
        "found_by": chunk.found_by,
        "policy": None if chunk.found_by is None else policy_of(chunk.found_by),
    }


def _chunk_from(value: object) -> ChunkExplained:
    from nearkin_shared.results import ChunkExplained

    fields = _object(value, "a chunk")
    base, finder = fields.get("base_fingerprint"), fields.get("found_by")
    return ChunkExplained(
        offset=_count(fields, "offset"),
        length_bytes=_count(fields, "length_bytes"),
        kind=_get(fields, "kind", str),
        fingerprint=_get(fields, "fingerprint", str),
        depth=_count(fields, "depth"),
        stored_estimate_bytes=_count(fields, "stored_estimate_bytes"),
        base_fingerprint=None if base is None else _get(fields, "base_fingerprint", str),
        found_by=None if finder is None else _get(fields, "found_by", str),
    )


# --- reading ---------------------------------------------------------------------------------------------------------


def _object(value: object, name: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        # the text is invalid, not the type of an argument
        raise ValueError(f"{name} is {type(value).__name__}, want an object")  # noqa: TRY004
    return value


def _get(fields: Mapping[str, Any], name: str, kind: type[_T]) -> _T:
    value = fields.get(name)
    if not isinstance(value, kind):
        raise ValueError(f"{name} {value!r:.40}: want {kind.__name__}")  # noqa: TRY004
    return value


def _count(fields: Mapping[str, Any], name: str) -> int:
    value = _get(fields, name, int)
    if isinstance(value, bool) or not 0 <= value < 1 << 64:
        raise ValueError(f"{name} {value!r}: want a number from 0 to 2^64 - 1")
    return value


def _timestamp(moment: datetime) -> str:
    return moment.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _moment(fields: Mapping[str, Any], name: str) -> datetime:
    moment = datetime.fromisoformat(_get(fields, name, str))
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)


def _number(fields: Mapping[str, Any], name: str) -> float:
    value = fields.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= sys.float_info.max:
        raise ValueError(f"{name} {value!r:.40}: want a number, 0 or more")
    return float(value)


def _counts(fields: Mapping[str, Any], name: str) -> dict[str, int]:
    entries = _object(fields.get(name), name)
    return {str(part): _count(entries, part) for part in entries}


def _texts(fields: Mapping[str, Any], name: str) -> dict[str, str]:
    entries = _object(fields.get(name), name)
    return {str(part): _get(entries, part, str) for part in entries}

"""Records as JSON, both ways. Invariant: one JSON form a record, whoever says it: a command, the gateway, a client.

    info_json  <-> info_from        put_json      <-> put_from
    stats_json <-> stats_from       explain_json  <-> explanation_from
                                    deletion_json <-> deletion_from

Scripts rely on the names, so a name is never taken away; a reader passes over names it does not know. What does not
parse raises ValueError: who reads knows where it came from.
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
"""What is counted; all else of a ledger follows from it."""

_T = TypeVar("_T")


def info_json(info: VersionInfo) -> dict[str, object]:
    """Return a version as JSON has it; `created` is ISO 8601 in UTC."""
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
    """Return the version that `info_json` said. Raises ValueError."""
    from nearkin_shared.results import VersionInfo

    told = _object(value, "a version")
    sha256 = told.get("sha256")
    return VersionInfo(
        key=_get(told, "key", str),
        version=_count(told, "version"),
        size_bytes=_count(told, "size_bytes"),
        created=_moment(told, "created"),
        digest=_get(told, "digest", str),
        sha256=None if sha256 is None else _get(told, "sha256", str),
        segments=_count(told, "segments"),
        chunks=_count(told, "chunks"),
        metadata=_texts(told, "metadata"),
        retain_until=None if told.get("retain_until") is None else _moment(told, "retain_until"),
        source_changed=_get(told, "source_changed", bool) if "source_changed" in told else False,
    )


def deletion_json(deletion: Deletion) -> dict[str, object]:
    """Return a deleted version as JSON has it."""
    return {
        "key": deletion.key,
        "version": deletion.version,
        "deleted": _timestamp(deletion.deleted),
        "until": _timestamp(deletion.until),
        "who": deletion.who,
        "reason": deletion.reason,
    }


def deletion_from(value: object) -> Deletion:
    """Return the deleted version that `deletion_json` said. Raises ValueError."""
    from nearkin_shared.results import Deletion

    told = _object(value, "a deleted version")
    return Deletion(
        key=_get(told, "key", str),
        version=_count(told, "version"),
        deleted=_moment(told, "deleted"),
        until=_moment(told, "until"),
        who=_get(told, "who", str),
        reason=_get(told, "reason", str),
    )


def damage_from(value: object) -> Damage:
    """Return the damage of one version that a listing of the gateway names. Raises ValueError."""
    from nearkin_shared.results import Damage

    told = _object(value, "a damaged version")
    return Damage(
        _get(told, "object_name", str), _get(told, "problem", str), ((_get(told, "key", str), _count(told, "version")),)
    )


def ledger_json(ledger: Ledger, seconds: float) -> dict[str, object]:
    """Return the ledger as JSON has it: bytes and counts as integers, ratios and seconds as floats."""
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
    """Return the ledger that `ledger_json` said. Raises ValueError."""
    from nearkin_shared.results import Ledger

    told = _object(value, "a ledger")
    return Ledger(**{name: _count(told, name) for name in _LEDGER_COUNTS})


def put_json(result: PutResult) -> dict[str, object]:
    """Return one put as JSON has it: the version and its ledger."""
    return {**info_json(result.info), **ledger_json(result.ledger, result.seconds)}


def put_from(value: object) -> PutResult:
    """Return the put that `put_json` said, or an event of the topic `committed`. Raises ValueError."""
    from nearkin_shared.results import PutResult

    told = _object(value, "a put")
    ledger = told.get("ledger", told)  # the event keeps it apart, a put's answer beside the rest
    return PutResult(info_from(told), ledger_from(ledger), _number(told, "seconds"))


def stats_json(stats: Stats) -> dict[str, object]:
    """Return a store's sums as JSON has them."""
    return {
        **ledger_json(stats.ledger, stats.seconds),
        "versions": stats.versions,
        "deleted_versions": stats.deleted_versions,
        "deleted_bytes": stats.deleted_bytes,
        "keys": stats.keys,
        "containers": stats.containers,
        "segments": stats.segments,
        "index_bytes": stats.index_bytes,
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
    """Return the sums that `stats_json` said. Raises ValueError."""
    from nearkin_shared.results import Stats

    told = _object(value, "stats")
    return Stats(
        ledger=ledger_from(told),
        versions=_count(told, "versions"),
        keys=_count(told, "keys"),
        containers=_count(told, "containers"),
        segments=_count(told, "segments"),
        parts=_counts(told, "parts"),
        index_bytes=_count(told, "index_bytes"),
        depths={int(depth): chunks for depth, chunks in _counts(told, "depths").items()},
        sketches=_counts(told, "sketches"),
        base_cache_hits=_count(told, "base_cache_hits"),
        base_cache_misses=_count(told, "base_cache_misses"),
        seconds=_number(told, "seconds"),
        deleted_versions=_count(told, "deleted_versions"),
        deleted_bytes=_count(told, "deleted_bytes"),
        found_by=_counts(told, "found_by"),
    )


def gc_json(report: GcReport) -> dict[str, object]:
    """Return a round as JSON has it."""
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
        "held": dict(report.held) if report.dry_run else None,
        "seconds": report.seconds,
    }


def remaining_json(copies: Iterable[RemainingCopy]) -> list[dict[str, object]]:
    """Return the copies that an erasure does not reach as JSON has them."""
    return [
        {
            "place": one.place,
            "holds": one.holds,
            "until": None if one.until is None else one.until.astimezone(UTC).isoformat(timespec="seconds"),
            "remedy": one.remedy,
        }
        for one in copies
    ]


def gc_state_json(state: GcState) -> dict[str, Any]:
    """Return how garbage collection stands as JSON has it."""
    paused = state.paused_since
    return {
        "paused": None if paused is None else {"since": paused.astimezone(UTC).isoformat(), "by": state.paused_by},
        "pending_delete_containers": state.pending_delete_containers,
        "due": None if state.due is None else state.due.astimezone(UTC).isoformat(),
    }


def explain_json(explanation: Explanation, *, segments: bool) -> dict[str, object]:
    """Return how a version is kept as JSON has it; with `segments` every segment and chunk of it."""
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
    """Return what `explain_json` said with its segments about the version `info`. Raises ValueError."""
    from nearkin_shared.results import Explanation

    told = _object(value, "an explanation")
    return Explanation(
        info=info,
        segments=tuple(_segment_from(segment) for segment in _get(told, "segments", list)),
        duplicate_chunks=_count(told, "duplicate_chunks"),
        zero_chunks=_count(told, "zero_chunks"),
        delta_chunks=_count(told, "delta_chunks"),
        raw_chunks=_count(told, "raw_chunks"),
        found_by=_counts(told, "found_by"),
    )


def kinds(explanation: Explanation) -> list[tuple[str, tuple[int, int, int]]]:
    """Return by kind: chunks, their bytes, and the bytes they take (0 for what was stored before)."""
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

    told = _object(value, "a segment")
    return SegmentExplained(
        sequence=_count(told, "sequence"),
        offset=_count(told, "offset"),
        length_bytes=_count(told, "length_bytes"),
        known=_get(told, "known", bool),
        chunks=tuple(_chunk_from(chunk) for chunk in _get(told, "chunks", list)),
        sketch=_get(told, "sketch", str) if "sketch" in told else "",
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

    told = _object(value, "a chunk")
    base, finder = told.get("base_fingerprint"), told.get("found_by")
    return ChunkExplained(
        offset=_count(told, "offset"),
        length_bytes=_count(told, "length_bytes"),
        kind=_get(told, "kind", str),
        fingerprint=_get(told, "fingerprint", str),
        depth=_count(told, "depth"),
        stored_estimate_bytes=_count(told, "stored_estimate_bytes"),
        base_fingerprint=None if base is None else _get(told, "base_fingerprint", str),
        found_by=None if finder is None else _get(told, "found_by", str),
    )


# --- reading ---------------------------------------------------------------------------------------------------------


def _object(value: object, what: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{what} is {type(value).__name__}, want an object")  # noqa: TRY004 - it is the text that is wrong
    return value


def _get(told: Mapping[str, Any], name: str, kind: type[_T]) -> _T:
    value = told.get(name)
    if not isinstance(value, kind):
        raise ValueError(f"{name} {value!r:.40}: want {kind.__name__}")  # noqa: TRY004
    return value


def _count(told: Mapping[str, Any], name: str) -> int:
    value = _get(told, name, int)
    if isinstance(value, bool) or not 0 <= value < 1 << 64:
        raise ValueError(f"{name} {value!r}: want a number from 0 to 2^64 - 1")
    return value


def _timestamp(moment: datetime) -> str:
    return moment.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _moment(told: Mapping[str, Any], name: str) -> datetime:
    moment = datetime.fromisoformat(_get(told, name, str))
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)


def _number(told: Mapping[str, Any], name: str) -> float:
    value = told.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= sys.float_info.max:
        raise ValueError(f"{name} {value!r:.40}: want a number, 0 or more")
    return float(value)


def _counts(told: Mapping[str, Any], name: str) -> dict[str, int]:
    below = _object(told.get(name), name)
    return {str(part): _count(below, part) for part in below}


def _texts(told: Mapping[str, Any], name: str) -> dict[str, str]:
    below = _object(told.get(name), name)
    return {str(part): _get(below, part, str) for part in below}

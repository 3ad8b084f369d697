"""Response models for OpenAPI. Invariant: names are those of nearkin_shared.results_json."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class BlobVersion(BaseModel):
    """A committed version."""

    key: str
    version: int = Field(ge=1)
    size_bytes: int = Field(ge=0)
    created: datetime
    digest: str = Field(description="`blake3:` and 64 hex digits.")
    sha256: str | None
    segments: int
    chunks: int
    metadata: dict[str, str]
    retain_until: datetime | None = Field(default=None, description="It cannot be deleted before; null: no retention.")
    source_changed: bool = Field(default=False, description="Whether the source changed while it was read.")


class Outcome(BaseModel):
    """The outcome of an upload, with the fields of the version if it is committed."""

    model_config = ConfigDict(extra="allow")

    id: str
    state: Literal["pending", "committed", "failed", "unknown"] = Field(
        description="`unknown`: this gateway no longer has the outcome; list the key's versions."
    )
    status: str = Field(description="Where to ask again.")
    key: str | None = None
    failure: str | None = None
    reason: str | None = Field(
        default=None, description="Of a failure: `precondition-failed` where a condition refused it at the commit."
    )
    version: int | None = None
    size_bytes: int | None = None
    created: datetime | None = None
    digest: str | None = None
    sha256: str | None = None
    segments: int | None = None
    chunks: int | None = None
    metadata: dict[str, str] | None = None
    seconds: float | None = None
    ledger: dict[str, Any] | None = Field(default=None, description="The savings of each step.")


class DamagedVersion(BaseModel):
    """A version whose manifest is lost or broken."""

    key: str
    version: int
    object_name: str
    problem: str


class Page(BaseModel):
    """Some keys, each with its newest version."""

    blobs: list[BlobVersion]
    next: str | None = Field(description="`after` for the next page; null: there is none.")
    damaged: list[DamagedVersion] = Field(description="Versions that belong here and cannot be read.")


class VersionPage(BaseModel):
    """Some versions of a key, oldest first."""

    versions: list[BlobVersion]
    next: int | None = Field(description="`after` for the next page; null: there is none.")
    damaged: list[DamagedVersion] = Field(description="Versions that belong here and cannot be read.")


class DeletedVersion(BaseModel):
    """A deleted version whose bytes are still there."""

    key: str
    version: int
    deleted: datetime
    until: datetime = Field(description="Up to then it can be undeleted.")
    who: str = Field(description="The token's id, or the address.")
    reason: str
    created: datetime | None = Field(description="When it was committed; null: its manifest cannot be read.")


class DeletedPage(BaseModel):
    """Some deleted versions, by key."""

    deleted: list[DeletedVersion]
    next: str | None = Field(description="`after` for the next page; null: there is none.")
    damaged: list[DamagedVersion] = Field(description="Versions whose deletion cannot be read; they stay deleted.")


class QuotaUse(BaseModel):
    """The bytes that count against a quota, also those of uncommitted uploads; its limit."""

    value: int | None = Field(description="Null while the index is rebuilt and this gateway has not read them before.")
    limit: int


class TenantStats(BaseModel):
    """Sums over what is stored; further fields as `nearkin stats --json` has them."""

    model_config = ConfigDict(extra="allow")

    logical_bytes: int
    stored_bytes: int
    reduction_ratio: float
    versions: int
    keys: int
    deleted_versions: int = Field(description="Deleted, their bytes not yet freed.")
    deleted_bytes: int = Field(description="Logical bytes of these, part of `logical_bytes`.")
    checkpoints: int = Field(description="Checkpoints of unfinished backups, which are no versions.")
    checkpoint_bytes: int = Field(description="Logical bytes of these, not part of `logical_bytes`.")
    whole: bool = Field(description="False while the index is rebuilt: then the sums are partial.")
    quotas: dict[str, QuotaUse] = Field(
        description="`logical_bytes`, `stored_bytes`, `upload_bytes_per_second`: those that the tenant has."
    )


class BlobExplanation(BaseModel):
    """How a version is kept; further fields as `nearkin explain --json` has them."""

    model_config = ConfigDict(extra="allow")

    key: str
    version: int
    size_bytes: int
    duplicate_chunks: int
    delta_chunks: int
    raw_chunks: int
    segments: list[dict[str, Any]] | None = None


class WorkerList(BaseModel):
    """The newest word of each worker."""

    workers: list[dict[str, Any]]


class ScrubPass(BaseModel):
    """The result of a pass of the scrub over all stored data."""

    begun: datetime | None = None
    ended: datetime | None = None
    read_bytes: int
    objects: int
    damaged: int


class QuarantinedContainer(BaseModel):
    """A container that is broken, in part or (chunks null) wholly."""

    object_name: str
    since: datetime
    chunks: int | None


class Scrub(BaseModel):
    """How far scrubbing has come, and what is broken."""

    every_days: int = Field(description="0: it never scrubs.")
    rate_bytes: int = Field(description="Bytes a second, at most.")
    running: ScrubPass | None
    last: ScrubPass | None = Field(description="The last whole pass.")
    quarantined: list[QuarantinedContainer] = Field(description="The first 100 of them.")
    quarantined_containers: int


class Config(BaseModel):
    """The settings as they are now."""

    revision: str = Field(description="Stands for the hot values: equal on every worker that runs the same.")
    changes: dict[str, dict[str, Any]] = Field(description="Changes over the file.")
    hot: list[str] = Field(description="Settings that PATCH may change.")
    settings: dict[str, Any]


class PrefixShare(BaseModel):
    """The logical and stored bytes of the keys with a prefix."""

    prefix: str | None = Field(description='Up to the first slash; "" for keys without one; null: all further ones.')
    versions: int
    deleted_versions: int
    logical_bytes: int
    stored_bytes: int = Field(description="Its share of the stored bytes, by what dedup and delta left of it.")
    reduction_ratio: float


class TenantShare(BaseModel):
    """A tenant by prefix."""

    tenant: str
    versions: int
    logical_bytes: int
    stored_bytes: int
    reduction_ratio: float
    whole: bool = Field(description="False: there are more versions than were looked at.")
    prefixes: list[PrefixShare]


class ReductionReport(BaseModel):
    """Shares by prefix, which add up to the stored bytes."""

    tenants: list[TenantShare]


class GrowthPoint(BaseModel):
    """The sums of the current data that existed at a time."""

    time: datetime
    logical_bytes: int
    stored_bytes: int


class GrowthReport(BaseModel):
    """The growth of the current data over time."""

    points: list[GrowthPoint]
    versions: int
    read: int = Field(description="Versions that are in it; fewer than `versions`: ask again for more.")
    too_many: bool = Field(description="More versions than a curve is drawn of.")


class StageLag(BaseModel):
    """How far one consumer group is."""

    group: str
    lag_records: int
    old_records: int = Field(description="Of these, those older than half of kafka.retention_hours.")
    records_per_second: float | None = Field(description="Rate over the last minute; null: not known yet.")


class MinuteSums(BaseModel):
    """The outcomes of one minute."""

    minute: datetime
    committed: int
    failed: int
    logical_bytes: int
    stored_bytes: int


class FailedUpload(BaseModel):
    """An upload that failed."""

    time: datetime
    tenant: str
    key: str
    failure: str


class Pipeline(BaseModel):
    """Throughput and lag of the pipeline. `stages` is empty for an embedded gateway."""

    embedded: bool
    stages: list[StageLag]
    minutes: list[MinuteSums] = Field(description="The last hour, oldest first.")
    failures: list[FailedUpload] = Field(description="The last ones of the last hour, newest first.")


class StoredLetter(BaseModel):
    """A record that could not be processed."""

    letter: str = Field(description="PARTITION:OFFSET in the topic of dead letters.")
    time: datetime
    topic: str | None
    partition: int | None
    offset: int | None
    stage: str
    error: str
    message: str
    value_bytes: int
    is_untruncated: bool
    replayed: bool
    dropped: bool


class LetterBytes(BaseModel):
    """The beginning of a key, header or value."""

    encoding: Literal["utf-8", "base64"] = Field(description="`base64` where the bytes are not UTF-8.")
    data: str
    cut: bool = Field(description="Whether there are more bytes.")


class LetterHeader(BaseModel):
    """A header of a Kafka record."""

    name: str
    value: LetterBytes | None


class LetterContent(StoredLetter):
    """A dead letter with the beginning of what it holds."""

    key: LetterBytes | None
    headers: list[LetterHeader]
    value: LetterBytes | None = Field(description="Null where the record had none, or was too large to be kept.")


class Letters(BaseModel):
    """The newest kept dead letters, newest first; empty for an embedded gateway."""

    embedded: bool
    letters: list[StoredLetter]


class ReplayedLetters(BaseModel):
    """The replayed letters."""

    replayed: list[str]


class DroppedLetters(BaseModel):
    """The letters that were dropped."""

    dropped: list[str]


class AuditEntry(BaseModel):
    """One change of hot settings."""

    at: str
    by: str = Field(description="The token's id, or the address.")
    changes: dict[str, dict[str, Any]] = Field(description="All that was changed over the file from then on.")
    revision: str


class Audit(BaseModel):
    """Changes of settings at run time, newest first: at most 100 that this gateway has read."""

    changes: list[AuditEntry]


class GcStatus(BaseModel):
    """The state of GC, by an embedded gateway itself or by the maintenance services."""

    model_config = ConfigDict(extra="allow")

    embedded: bool
    interval_seconds: int = Field(description="0: never by itself.")
    grace_seconds: int
    paused: dict[str, Any] | None = Field(description="Since when and by whom; null where it is not.")
    last: dict[str, Any] | None = Field(
        description="The result of the last GC run; an embedded gateway remembers those since its start."
    )


class ResumableUpload(BaseModel):
    """How far a resumable upload is."""

    id: str
    key: str = Field(description="Empty where a partial upload names none.")
    offset_bytes: int
    length_bytes: int
    expires: datetime
    state: Literal["receiving", "staged", "handed-over", "failed"] = Field(
        description="`staged`: whole; a partial upload stays so until its final upload is handed over."
    )
    failure: str | None = Field(description="Why it is not stored; with the state `staged` it may be stored later.")
    reason: str | None = Field(
        description="Of a failure: `precondition-failed` where a condition refused it, `quota-exceeded` with `staged`."
    )
    status: str | None = Field(description="URL of the outcome, once the upload is complete.")


class Health(BaseModel):
    """That it is well."""

    status: Literal["ok"]

"""What answers look like, for OpenAPI. Invariant: names are those of nearkin.formats.answers; none is taken away."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class Version(BaseModel):
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


class Outcome(BaseModel):
    """What became of an upload; the fields of a version where it is committed."""

    model_config = ConfigDict(extra="allow")

    id: str
    state: Literal["pending", "committed", "failed", "unknown"] = Field(
        description="`unknown`: so long ago that this gateway may have forgotten; the key's versions tell."
    )
    status: str = Field(description="Where to ask again.")
    key: str | None = None
    failure: str | None = None
    version: int | None = None
    size_bytes: int | None = None
    created: datetime | None = None
    digest: str | None = None
    sha256: str | None = None
    segments: int | None = None
    chunks: int | None = None
    metadata: dict[str, str] | None = None
    seconds: float | None = None
    ledger: dict[str, Any] | None = Field(default=None, description="What was saved, and by which step.")


class Damaged(BaseModel):
    """A version whose manifest is lost or broken."""

    key: str
    version: int
    object_name: str
    problem: str


class Page(BaseModel):
    """Some keys, each with its newest version."""

    blobs: list[Version]
    next: str | None = Field(description="`after` for the next page; null: there is none.")
    damaged: list[Damaged] = Field(description="Versions that belong here and cannot be read.")


class VersionPage(BaseModel):
    """Some versions of a key, oldest first."""

    versions: list[Version]
    next: int | None = Field(description="`after` for the next page; null: there is none.")
    damaged: list[Damaged] = Field(description="Versions that belong here and cannot be read.")


class Deleted(BaseModel):
    """A deleted version whose bytes are still there."""

    key: str
    version: int
    deleted: datetime
    until: datetime = Field(description="Up to then it can be undeleted.")
    who: str = Field(description="The token's id, or the address.")
    reason: str


class DeletedPage(BaseModel):
    """Some deleted versions, by key."""

    deleted: list[Deleted]
    next: str | None = Field(description="`after` for the next page; null: there is none.")
    damaged: list[Damaged] = Field(description="Versions whose deletion cannot be read; they stay deleted.")


class Stats(BaseModel):
    """Sums over what is stored; further fields as `nearkin stats --json` has them."""

    model_config = ConfigDict(extra="allow")

    logical_bytes: int
    stored_bytes: int
    reduction_ratio: float
    versions: int
    keys: int
    deleted_versions: int = Field(description="Deleted, their bytes not yet freed.")
    deleted_bytes: int = Field(description="Logical bytes of these, part of `logical_bytes`.")
    whole: bool = Field(description="False while the index is made anew: then the sums are of a part.")


class Explanation(BaseModel):
    """How a version is kept; further fields as `nearkin explain --json` has them."""

    model_config = ConfigDict(extra="allow")

    key: str
    version: int
    size_bytes: int
    duplicate_chunks: int
    delta_chunks: int
    raw_chunks: int
    segments: list[dict[str, Any]] | None = None


class Workers(BaseModel):
    """The newest word of each worker."""

    workers: list[dict[str, Any]]


class Config(BaseModel):
    """The settings as they are now."""

    revision: str = Field(description="Stands for the hot values: equal on every worker that runs the same.")
    changes: dict[str, dict[str, Any]] = Field(description="What is changed over the file.")
    hot: list[str] = Field(description="What PATCH may change.")
    settings: dict[str, Any]


class ResumableUpload(BaseModel):
    """How far a resumable upload is."""

    id: str
    key: str
    offset_bytes: int
    length_bytes: int
    expires: datetime
    state: Literal["receiving", "staged", "handed-over", "failed"]
    failure: str | None
    status: str | None = Field(description="Where its outcome is told, once it is handed over.")


class Health(BaseModel):
    """That it is well."""

    status: Literal["ok"]

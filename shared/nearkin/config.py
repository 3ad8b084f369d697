"""Settings. Invariant: a value that is refused names its field, itself and what would be right, before anything runs.

Lowest to highest: built-in defaults, the profile, the TOML file, `NEARKIN_*` variables, explicit overrides.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Self, cast

from pydantic import AfterValidator, BaseModel, ByteSize, ConfigDict, Field, ValidationError, model_validator

from nearkin.errors import BadInput, ConfigError, choose

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB

FRAME_BYTES_MAX = 900 * KIB
"""Frames and segments stay below Kafka's default message limit of 1 MiB, headers included."""
SEGMENT_BYTES_MAX = FRAME_BYTES_MAX
KEY_BYTES_MAX = 1024
"""UTF-8 bytes of a key: S3's own limit, so that any object name is a key."""
METADATA_BYTES_MAX = 64 * KIB
TENANT_BYTES_MAX = 128
DEPTH_MAX = 16

ENVIRONMENT_PREFIX = "NEARKIN_"

CHUNKERS = ("fastcdc", "rabin", "inck", "fixed", "whole")
FEATURES = ("finesse", "ntransform", "odess", "none")
BASE_POLICIES = ("first-fit",)
DELTA_CODECS = ("xdelta3", "none")
INDEXES = ("lmdb",)


class _Choice(ValueError):
    """An unknown name; carries the known ones to the one-line error."""

    def __init__(self, known: tuple[str, ...]) -> None:
        super().__init__(f"choose one of {', '.join(known)}")
        self.known = known


def _one_of(known: tuple[str, ...]) -> AfterValidator:
    def check(name: str) -> str:
        if name not in known:
            raise _Choice(known)
        return name

    return AfterValidator(check)


def _bytes(least: int, most: int) -> Any:  # noqa: ANN401 - pydantic's Field is typed Any
    return Field(ge=least, le=most)


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ChunkerSettings(_Section):
    """How a blob is cut into chunks; changing any of it stops new data from matching old chunks."""

    algorithm: Annotated[str, _one_of(CHUNKERS)] = "fastcdc"
    min_bytes: Annotated[ByteSize, _bytes(64, SEGMENT_BYTES_MAX)] = ByteSize(2 * KIB)
    target_bytes: Annotated[ByteSize, _bytes(64, SEGMENT_BYTES_MAX)] = ByteSize(8 * KIB)
    max_bytes: Annotated[ByteSize, _bytes(64, SEGMENT_BYTES_MAX)] = ByteSize(64 * KIB)

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if not self.min_bytes <= self.target_bytes <= self.max_bytes:
            raise ValueError(
                f"min_bytes {int(self.min_bytes)}, target_bytes {int(self.target_bytes)}, max_bytes "
                f"{int(self.max_bytes)}: want min <= target <= max"
            )
        if self.target_bytes & (self.target_bytes - 1):
            raise ValueError(f"target_bytes {int(self.target_bytes)}: want a power of two, such as 8KiB")
        return self


class SegmentSettings(_Section):
    """How chunks are grouped into segments."""

    target_chunks: Annotated[int, Field(ge=1, le=1024)] = 16
    max_bytes: Annotated[ByteSize, _bytes(64 * KIB, SEGMENT_BYTES_MAX)] = ByteSize(SEGMENT_BYTES_MAX)

    @model_validator(mode="after")
    def _power(self) -> Self:
        if self.target_chunks & (self.target_chunks - 1):
            raise ValueError(f"target_chunks {self.target_chunks}: want a power of two, such as 16")
        return self


class FeatureSettings(_Section):
    """How resemblance is detected. Hot: toggling it never harms stored data."""

    algorithm: Annotated[str, _one_of(FEATURES)] = "finesse"
    count: Annotated[int, Field(ge=1, le=64)] = 12
    super_features: Annotated[int, Field(ge=1, le=16)] = 3
    window_bytes: Annotated[int, Field(ge=16, le=256)] = 48
    sampling_bits: Annotated[int, Field(ge=0, le=16)] = 7

    @model_validator(mode="after")
    def _divides(self) -> Self:
        if self.count % self.super_features:
            raise ValueError(f"count {self.count}: want a multiple of super_features ({self.super_features})")
        return self


class BaseChoiceSettings(_Section):
    """Which similar chunk becomes the base, and how many base bytes stay in memory."""

    policy: Annotated[str, _one_of(BASE_POLICIES)] = "first-fit"
    cache_bytes: Annotated[ByteSize, _bytes(MIB, 64 * GIB)] = ByteSize(128 * MIB)


class DeltaSettings(_Section):
    """How a chunk is written as a difference. Hot."""

    codec: Annotated[str, _one_of(DELTA_CODECS)] = "xdelta3"
    level: Annotated[int, Field(ge=1, le=9)] = 1
    max_depth: Annotated[int, Field(ge=1, le=DEPTH_MAX)] = 2


class BlockSettings(_Section):
    """How fresh chunks are gathered and compressed. Hot."""

    raw_bytes: Annotated[ByteSize, _bytes(64 * KIB, 16 * MIB)] = ByteSize(4 * MIB)
    delta_bytes: Annotated[ByteSize, _bytes(4 * KIB, 16 * MIB)] = ByteSize(512 * KIB)
    level: Annotated[int, Field(ge=1, le=22)] = 3


class ContainerSettings(_Section):
    """How large a container grows before it is sealed."""

    target_bytes: Annotated[ByteSize, _bytes(256 * KIB, 256 * MIB)] = ByteSize(4 * MIB)


class IndexSettings(_Section):
    """The rebuildable index."""

    backend: Annotated[str, _one_of(INDEXES)] = "lmdb"
    map_bytes: Annotated[ByteSize, _bytes(16 * MIB, 16 * 1024 * GIB)] = ByteSize(64 * GIB)


class RestoreSettings(_Section):
    """Bounds of a restore."""

    cache_bytes: Annotated[ByteSize, _bytes(8 * MIB, 64 * GIB)] = ByteSize(96 * MIB)


class RunnerSettings(_Section):
    """Bounds of the embedded runner."""

    batch_bytes: Annotated[ByteSize, _bytes(2 * MIB, 64 * MIB)] = ByteSize(4 * MIB)
    queue_batches: Annotated[int, Field(ge=1, le=16)] = 1


PROFILES: Mapping[str, Mapping[str, Mapping[str, object]]] = {
    "default": {},
    # Finesse, FAST '19, section 5.1: Rabin chunks of 8 KiB, 3 SFs of 4 features, FirstFit, 400 MB LRU base cache, Xdelta.
    "finesse-paper": {
        "chunker": {"algorithm": "rabin", "min_bytes": 2 * KIB, "target_bytes": 8 * KIB, "max_bytes": 64 * KIB},
        "features": {"algorithm": "finesse", "count": 12, "super_features": 3, "window_bytes": 48},
        "base": {"policy": "first-fit", "cache_bytes": 400_000_000},
        "delta": {"codec": "xdelta3", "max_depth": 1},
    },
}


class Settings(_Section):
    """Every setting of a store and its runners."""

    profile: Annotated[str, _one_of(tuple(PROFILES))] = "default"
    store: str | None = Field(default=None, description="folder of the local store")
    tenant: Annotated[str, Field(min_length=1, max_length=TENANT_BYTES_MAX)] = "default"
    chunker: ChunkerSettings = ChunkerSettings()
    segment: SegmentSettings = SegmentSettings()
    features: FeatureSettings = FeatureSettings()
    base: BaseChoiceSettings = BaseChoiceSettings()
    delta: DeltaSettings = DeltaSettings()
    block: BlockSettings = BlockSettings()
    container: ContainerSettings = ContainerSettings()
    index: IndexSettings = IndexSettings()
    restore: RestoreSettings = RestoreSettings()
    runner: RunnerSettings = RunnerSettings()

    @model_validator(mode="after")
    def _parts_fit(self) -> Self:
        if self.chunker.max_bytes > self.segment.max_bytes:
            raise ValueError(
                f"chunker.max_bytes {int(self.chunker.max_bytes)}: want at most segment.max_bytes "
                f"({int(self.segment.max_bytes)}): a chunk never spans segments"
            )
        if self.chunker.algorithm in ("rabin", "inck") and self.chunker.min_bytes < 256:
            raise ValueError(f"chunker.min_bytes {int(self.chunker.min_bytes)}: {self.chunker.algorithm} wants >= 256")
        return self


class Origin(BaseModel):
    """Where one setting came from: `default`, `profile NAME`, `file PATH`, `environment NAME` or `argument`."""

    value: object
    source: str


def load(
    config_file: str | Path | None = None, overrides: Mapping[str, object] | None = None
) -> tuple[Settings, dict[str, Origin]]:
    """Return the settings and, by dotted name, where each came from.

    `overrides` is nested as the settings are. Raises ConfigError, one line, for anything that does not fit.
    """
    layers: list[tuple[str, dict[str, Any]]] = []
    if config_file is not None:
        layers.append((f"file {config_file}", _read_toml(Path(config_file))))
    layers.append(("environment", _read_environment()))
    if overrides:
        layers.append(("argument", {name: value for name, value in overrides.items() if value is not None}))
    profile = next((layer["profile"] for _, layer in reversed(layers) if "profile" in layer), "default")
    if profile not in PROFILES:
        raise choose("profile", profile, PROFILES)
    layers.insert(0, (f"profile {profile}", {name: dict(values) for name, values in PROFILES[profile].items()}))
    merged: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for source, layer in layers:
        _merge(merged, layer, source, sources, "")
    try:
        settings = Settings(**merged)
    except ValidationError as err:
        raise _one_line(err, sources) from err
    return settings, {
        name: Origin(value=value, source=_named(sources.get(name, "default"), name))
        for name, value in _flatten(settings.model_dump(mode="json"))
    }


def with_changes(settings: Settings, changes: Mapping[str, object]) -> Settings:
    """Return `settings` with nested `changes` merged in (RFC 7396 without deletion), validated again."""
    merged = settings.model_dump()
    _merge(merged, dict(changes), "argument", {}, "")
    try:
        return Settings(**merged)
    except ValidationError as err:
        raise _one_line(err, {}) from err


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            return tomllib.load(file)
    except FileNotFoundError as err:
        raise ConfigError(f'config file "{path}": no such file') from err
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as err:
        raise ConfigError(f'config file "{path}": {err}') from err


def _read_environment() -> dict[str, Any]:
    if not any(name.upper().startswith(ENVIRONMENT_PREFIX) for name in os.environ):
        return {}
    # pydantic-settings takes 130 ms to import: a third of a small put, and most calls set no variable.
    from pydantic_settings import EnvSettingsSource

    try:
        source = EnvSettingsSource(cast("Any", Settings), env_prefix=ENVIRONMENT_PREFIX, env_nested_delimiter="__")
        return source()
    except Exception as err:  # pydantic-settings raises its own type for a section given as broken JSON
        raise ConfigError(f"NEARKIN_* variables: {err}") from err


def _merge(into: dict[str, Any], layer: Mapping[str, Any], source: str, sources: dict[str, str], prefix: str) -> None:
    for name, value in layer.items():
        if isinstance(value, Mapping):
            below = into.setdefault(name, {})
            if not isinstance(below, dict):
                raise BadInput(f"{prefix}{name}: {below!r} is not a section")
            _merge(below, value, source, sources, f"{prefix}{name}.")
        else:
            into[name] = value
            sources[f"{prefix}{name}"] = source


def _flatten(tree: Mapping[str, Any], prefix: str = "") -> list[tuple[str, object]]:
    flat: list[tuple[str, object]] = []
    for name, value in tree.items():
        if isinstance(value, Mapping):
            flat += _flatten(value, f"{prefix}{name}.")
        else:
            flat.append((f"{prefix}{name}", value))
    return flat


def _named(source: str, name: str) -> str:
    return f"environment NEARKIN_{name.replace('.', '__').upper()}" if source == "environment" else source


def _one_line(err: ValidationError, sources: Mapping[str, str]) -> ConfigError:
    """Say the first thing that is wrong: the field, its value, the remedy, and who set it."""
    first = err.errors()[0]
    field = ".".join(str(part) for part in first["loc"])
    source = f" (set by {_named(sources[field], field)})" if field in sources else ""
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, _Choice):
        return ConfigError(f"{choose(field, first['input'], cause.known)}{source}")
    if first["type"] == "extra_forbidden":
        return ConfigError(f'{field} "{first["input"]}": no such setting; `nearkin config` lists them all{source}')
    if cause is not None:  # our own validators name the field and the value themselves
        return ConfigError(f"{field}: {cause}{source}" if field else f"{cause}{source}")
    return ConfigError(f'{field} "{first["input"]}": {first["msg"][0].lower()}{first["msg"][1:]}{source}')

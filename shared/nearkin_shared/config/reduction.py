"""Settings of reduction: how a blob is cut, what counts as similar, how the difference is written.

Invariant: none of them makes what is stored unreadable; those that are hot may change from one blob to the next.
"""

from __future__ import annotations

from typing import Annotated

from nearkin_shared.config.validators import FORBID_OTHERS, Between, OneOf, Size
from nearkin_shared.limits import DEPTH_MAX, GIB, KIB, MIB, SEGMENT_BYTES_MAX
from nearkin_shared.utils.frozen import held

CHUNKERS = ("fastcdc", "leastcdc", "rabin", "inck", "fixed", "whole")
FEATURES = ("finesse", "ntransform", "odess", "none")
BASE_POLICIES = ("first-fit", "locality", "locality+first-fit")
DELTA_CODECS = ("xdelta3", "patch", "none")


@held
class ChunkerSettings:
    """How a blob is cut into chunks; changing any of it stops new data from matching old chunks."""

    __pydantic_config__ = FORBID_OTHERS

    algorithm: Annotated[str, OneOf(CHUNKERS)] = "leastcdc"
    """`leastcdc` (SIMD, the fastest), `fastcdc`, `rabin`, `inck`; `fixed` and `whole` look at no content."""
    min_bytes: Annotated[int, Size(64, SEGMENT_BYTES_MAX)] = 2 * KIB
    """No chunk is smaller, but for the last of a blob."""
    target_bytes: Annotated[int, Size(64, SEGMENT_BYTES_MAX)] = 8 * KIB
    """About the mean of what lies between the two bounds: smaller finds more, and names more."""
    max_bytes: Annotated[int, Size(64, SEGMENT_BYTES_MAX)] = 64 * KIB
    """No chunk is larger."""

    def __post_init__(self) -> None:
        """Refuse bounds that are out of order."""
        if not self.min_bytes <= self.target_bytes <= self.max_bytes:
            raise ValueError(
                f"min_bytes {self.min_bytes}, target_bytes {self.target_bytes}, max_bytes {self.max_bytes}: "
                "want min <= target <= max"
            )
        if self.algorithm in ("rabin", "inck") and self.min_bytes < 256:
            raise ValueError(f"min_bytes {self.min_bytes}: {self.algorithm} wants >= 256")
        if self.algorithm in ("rabin", "inck") and self.target_bytes & (self.target_bytes - 1):
            raise ValueError(f"target_bytes {self.target_bytes}: {self.algorithm} wants a power of two")


@held
class SegmentSettings:
    """How chunks are grouped into segments."""

    __pydantic_config__ = FORBID_OTHERS

    target_chunks: Annotated[int, Between(1, 1024, power_of_two=True)] = 16
    """Chunks of a segment on average: runs that are known are found a segment at a time."""
    max_bytes: Annotated[int, Size(64 * KIB, SEGMENT_BYTES_MAX)] = SEGMENT_BYTES_MAX
    """No segment is larger."""


@held
class FeatureSettings:
    """How resemblance is detected. Hot: toggling it never harms stored data."""

    __pydantic_config__ = FORBID_OTHERS

    algorithm: Annotated[str, OneOf(FEATURES)] = "finesse"
    """`finesse`, `ntransform` or `odess` super-features; `none`: bases by locality alone."""
    count: Annotated[int, Between(1, 64)] = 12
    """Features of a chunk, a multiple of `super_features`."""
    super_features: Annotated[int, Between(1, 16)] = 3
    """Groups of features; two chunks are similar where one of these is equal."""
    window_bytes: Annotated[int, Between(48, 64)] = 48
    """Of the rolling hash."""
    sampling_bits: Annotated[int, Between(0, 16)] = 7
    """`odess` alone: one position in 2 to this power counts."""

    def __post_init__(self) -> None:
        """Refuse groups of unequal size, and an odess window that cannot hold its hash."""
        if self.count % self.super_features:
            raise ValueError(f"count {self.count}: want a multiple of super_features ({self.super_features})")
        if self.algorithm == "odess" and 32 + self.sampling_bits > self.window_bytes:
            raise ValueError(f"sampling_bits {self.sampling_bits}: want at most window_bytes - 32")


@held
class BaseSettings:
    """Which similar chunk becomes the base, and how many bytes of decoded base blocks stay in memory."""

    __pydantic_config__ = FORBID_OTHERS

    policy: Annotated[str, OneOf(BASE_POLICIES)] = "locality+first-fit"
    """`first-fit`: by super-features; `locality`: what lay between the same neighbours in an older version."""
    cache_bytes: Annotated[int, Size(MIB, 64 * GIB)] = 200 * MIB
    """Of decoded blocks, in a put."""
    try_all_candidates: bool = False
    """Try old neighbours also in blobs where few of them turn out to be bases: docs/adr/0023."""


@held
class DeltaSettings:
    """How a chunk is written as a difference. Hot."""

    __pydantic_config__ = FORBID_OTHERS

    codec: Annotated[str, OneOf(DELTA_CODECS)] = "patch"
    """`xdelta3`: chunk by chunk, VCDIFF; `patch`: whole blocks, zstd with the bases as prefix."""
    level: Annotated[int, Between(1, 9)] = 1
    """Of xdelta3; blocks are compressed at `block.level`."""
    max_depth: Annotated[int, Between(1, DEPTH_MAX - 1)] = 4
    """Deltas to decode at most before bytes appear: deeper stores less and restores slower."""


@held
class BlockSettings:
    """How fresh chunks are gathered and compressed. Hot, but for `far_matches`."""

    __pydantic_config__ = FORBID_OTHERS

    raw_bytes: Annotated[int, Size(64 * KIB, 30 * MIB)] = 4 * MIB
    """Of decoded bytes: what one read of a chunk may cost. A chunk more must stay below 32 MiB."""
    delta_bytes: Annotated[int, Size(4 * KIB, 16 * MIB)] = 256 * KIB
    """Of decoded bytes of a block of deltas or patches."""
    level: Annotated[int, Between(1, 22)] = 3
    """Of zstd. At 3, the default, raw blocks that compress badly are written at 2: docs/adr/0023."""
    far_matches: bool = False
    """Look for repeats in the whole of a raw block, and at level 9 deeper in all: docs/adr/0019."""


@held
class ContainerSettings:
    """How large a container grows before it is sealed."""

    __pydantic_config__ = FORBID_OTHERS

    target_bytes: Annotated[int, Size(256 * KIB, 256 * MIB)] = 4 * MIB
    """A container is sealed once it holds so much: looked at after each batch (`runner.batch_bytes`, 16 MiB), which
    goes into it whole. One of a first version may so hold four times the usual 4 MiB."""

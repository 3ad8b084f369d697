"""Define the settings of data reduction: chunking, resemblance, delta encoding, blocks.

Invariant: no setting here makes stored data unreadable; hot ones may change from one blob to the next.
"""

from __future__ import annotations

from typing import Annotated

from nearkin_shared.config.validators import FORBID_OTHERS, NameChoice, NameList, NumberRange, SizeRange
from nearkin_shared.limits import DEPTH_MAX, GIB, KIB, MIB, SEGMENT_BYTES_MAX
from nearkin_shared.utils.frozen import held

CHUNKERS = ("fastcdc", "leastcdc", "rabin", "inck", "fixed", "whole")
FEATURES = ("finesse", "ntransform", "odess", "none")
BASE_POLICIES = ("first-fit", "locality", "locality+first-fit")
OTHER = "other"
KINDS = (OTHER, "media", "compressed", "encrypted", "database", "tar", "safetensors")
"""Kinds of content; `other`: everything without a rule. States of the chunker service name a kind by its position."""
RULED_KINDS = KINDS[1:]
NO_RULES = "none"
"""`chunker.rules` without a rule for any kind of content."""
DELTA_CODECS = ("xdelta3", "patch", "none")


@held
class ChunkerSettings:
    """How a blob is cut into chunks. After a change new data no longer match stored chunks."""

    __pydantic_config__ = FORBID_OTHERS

    algorithm: Annotated[str, NameChoice(CHUNKERS)] = "leastcdc"
    """`leastcdc` (SIMD, the fastest), `fastcdc`, `rabin`, `inck`; `fixed` and `whole` ignore the content."""
    min_bytes: Annotated[int, SizeRange(64, SEGMENT_BYTES_MAX)] = 2 * KIB
    """Minimum size of a chunk; the last chunk of a blob may be smaller."""
    target_bytes: Annotated[int, SizeRange(64, SEGMENT_BYTES_MAX)] = 8 * KIB
    """Approximate mean size of a chunk. Smaller chunks find more duplicates and need more metadata."""
    max_bytes: Annotated[int, SizeRange(64, SEGMENT_BYTES_MAX)] = 64 * KIB
    """Maximum size of a chunk."""
    rules: Annotated[str, NameList(RULED_KINDS)] = NO_RULES
    """Kinds of content, found by the bytes alone, that are chunked by rules of their own: `none`, `all`, or a list."""

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
class FeatureSettings:
    """How resemblance is detected. Hot: a change never harms stored data."""

    __pydantic_config__ = FORBID_OTHERS

    algorithm: Annotated[str, NameChoice(FEATURES)] = "finesse"
    """`finesse`, `ntransform` or `odess` super-features; `none`: bases by locality alone."""
    count: int = 12
    """Features of a chunk, a multiple of `super_features`; 12 in 3 groups, as in Finesse (docs/adr/0067)."""
    super_features: int = 3
    """Groups of features; two chunks are similar if one super-feature is equal."""

    def __post_init__(self) -> None:
        """Refuse groups of unequal size."""
        if self.count % self.super_features:
            raise ValueError(f"count {self.count}: want a multiple of super_features ({self.super_features})")


@held
class BaseSettings:
    """How a base is selected among similar chunks, and the memory for decoded base blocks."""

    __pydantic_config__ = FORBID_OTHERS

    policy: Annotated[str, NameChoice(BASE_POLICIES)] = "locality+first-fit"
    """`first-fit`: by super-features; `locality`: the chunk between the same neighbours in an older version."""
    cache_bytes: Annotated[int, SizeRange(MIB, 64 * GIB)] = 200 * MIB
    """Memory for decoded blocks during a put."""


@held
class DeltaSettings:
    """How a chunk is encoded as a delta. Hot."""

    __pydantic_config__ = FORBID_OTHERS

    codec: Annotated[str, NameChoice(DELTA_CODECS)] = "patch"
    """`xdelta3`: chunk by chunk, VCDIFF; `patch`: whole blocks, zstd with the bases as prefix."""
    max_depth: Annotated[int, NumberRange(1, DEPTH_MAX - 1)] = 4
    """Maximum depth: the number of deltas to decode for one chunk. A greater depth stores less and restores slower."""


@held
class BlockSettings:
    """How fresh chunks are grouped into blocks and compressed. Hot."""

    __pydantic_config__ = FORBID_OTHERS

    raw_bytes: Annotated[int, SizeRange(64 * KIB, 30 * MIB)] = 4 * MIB
    """Decoded bytes of a raw block: the cost of reading one chunk. The block and one more chunk must be below 32 MiB.
    """
    delta_bytes: Annotated[int, SizeRange(4 * KIB, 16 * MIB)] = 256 * KIB
    """Decoded bytes of a block of deltas or of a patch block."""
    level: Annotated[int, NumberRange(1, 22)] = 3
    """Level of zstd. At 3, the default, raw blocks that compress badly are written at 2 (docs/adr/0023)."""
    thorough: bool = False
    """Search the whole raw block for repeats, at level 9 search harder in all blocks (docs/adr/0019), and try all
    locality candidates, also in blobs where few of them become bases (docs/adr/0023).
    """


@held
class ContainerSettings:
    """The size at which a container is finished."""

    __pydantic_config__ = FORBID_OTHERS

    target_bytes: Annotated[int, SizeRange(256 * KIB, 256 * MIB)] = 4 * MIB
    """A container that holds this many bytes is finished. The size is compared after each batch (`runner.batch_bytes`,
    16 MiB), which is stored whole, so a container of a first version may be four times as large as 4 MiB.
    """

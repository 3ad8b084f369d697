"""Limits. Invariant: every bound that two modules share is written here, once (I10)."""

from __future__ import annotations

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB

FRAME_BYTES_MAX = 900 * KIB
"""Frames and segments stay below Kafka's default message limit of 1 MiB, headers included."""
SEGMENT_BYTES_MAX = FRAME_BYTES_MAX
OBJECT_BYTES_MAX = 2 * GIB
"""A container has half of it at most, and may be sealed; what is larger nobody wrote."""
MANIFEST_BYTES_MAX = 512 * MIB
"""2^24 runs of 13 bytes, and as many containers, with nothing saved by compression."""
KEY_BYTES_MAX = 1024
"""UTF-8 bytes of a key: S3's own limit, so that any object name is a key."""
METADATA_BYTES_MAX = 64 * KIB
TENANT_BYTES_MAX = 128
DEPTH_MAX = 64
"""Deltas to decode before a chunk's bytes appear, whatever the settings say; a builder holds a block open for each."""
PREFIX_BYTES_MIN = 8
"""zstd takes no shorter prefix."""
CLOCK_SKEW_SECONDS_MAX = 300
"""How far the clocks of two machines may differ."""

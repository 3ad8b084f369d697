# size: shared bounds are defined in one module that imports nothing
"""Define the bounds, and the one name, that several modules share.

Invariant (I10): a bound that two modules use is defined here, once.
"""

from __future__ import annotations

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB

DESCRIPTOR = "nearkin.json"
"""The object that every store has, and that is read before any other."""
FRAME_BYTES_MAX = 900 * KIB
"""Frames and segments are below Kafka's default message limit of 1 MiB, headers included."""
SEGMENT_BYTES_MAX = FRAME_BYTES_MAX
OBJECT_BYTES_MAX = 2 * GIB
"""A container has at most half of it, and encryption adds to it; a larger object is not one of Nearkin's."""
MANIFEST_BYTES_MAX = 512 * MIB
"""2^24 runs of 13 bytes, and as many containers, without any effect of compression."""
KEY_BYTES_MAX = 1024
"""UTF-8 bytes of a key: S3's own limit, so that any object name is a valid key."""
METADATA_BYTES_MAX = 64 * KIB
TENANT_BYTES_MAX = 128
DEPTH_MAX = 64
"""Maximum depth of a chunk, whatever the settings; a container builder keeps one open block for each depth."""
PREFIX_BYTES_MIN = 8
"""Shortest prefix that zstd accepts, in bytes."""
ERASE_GRACE_SECONDS = 86_400
"""How long an erasure can be cancelled before a tenant's keys are removed: mistakes are noticed within a day."""
RESUMABLE_HOURS = 24
"""A resumable upload must be complete this long after its creation: a client without a network is back in a day."""
CLOCK_SKEW_SECONDS_MAX = 300
"""Largest accepted difference between the clocks of two machines."""

# size: constants of one format page, imported by its encoder, decoder and readers
"""Define the layout of a container (docs/internals/formats/container.md)."""

from __future__ import annotations

from struct import Struct

VERSION = 5
"""5: a rewritten container, with the role of each block. 4 is one without roles, 3 has patch blocks, 2 has none: all
are still read.
"""
VERSION_WHOLE = 3
"""Version written for a container with all its chunks in ordinary blocks, so that an older Nearkin reads it."""
VERSION_MIN = 2
DOMAIN_BYTES = 16
CONTAINER_BYTES_MAX = 1 << 30
BLOCK_RAW_BYTES_MAX = 32 * 1024 * 1024
SKETCHES_MAX = 256
BLOCKS_MAX = 1 << 16
ROWS_MAX = 1 << 23
"""Chunks, segments, and rows of recipes: bounds the memory of a decoded directory. Writers stay far below."""

HEADER = Struct("<4sHHQ16s")
assert HEADER.size == 32  # docs/internals/formats/container.md
BLOCK = Struct("<4sBBBBII8s")
assert BLOCK.size == 24  # docs/internals/formats/container.md
DIRECTORY = Struct("<4sIIIHH")
assert DIRECTORY.size == 20  # docs/internals/formats/container.md
FOOTER = Struct("<QI8s8s4s")
assert FOOTER.size == 32  # docs/internals/formats/container.md

STORED, ZSTD = 0, 1
"""Compression of a block."""
RAW, XDELTA3, PATCH = 0, 1, 2
"""Content of a block: raw chunks; consecutive VCDIFF deltas; chunks in a frame with the bytes of their bases as prefix.
"""
KINDS = ("raw", "xdelta3", "patch")
ORDINARY, MERGED, REFERENCE = 0, 1, 2
"""Role of a block: chunks as a put or a rewrite grouped them; chunks to which a GC run added some of other versions;
slices of a chunk in a merged block.
"""
ROLES = ("ordinary", "merged", "reference")
PREFIX_BYTES_MAX = 32 * 1024 * 1024
"""Bases of one patch block, together."""
PREFIX_BASES_MAX = 1 << 16
"""Number of these bases: a reader allocates 70 bytes for each before it validates them. Writers stop at 4,096."""
LOST = b"NKBL"
"""Magic of a block whose bytes are lost."""
MERGED_RANK = 253
"""Rank of a chunk that a GC run merged from others and appended after all chunks of the container."""
REFERENCE_RANK = 254
"""Rank of a chunk whose base is a merged chunk that contains its bytes."""
LOCALITY_RANK = 255
"""Rank of a delta whose base was found by position, not by a super-feature."""

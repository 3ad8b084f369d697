"""Layout of a container: its records, as structs, what their bytes mean, and bounds.
docs/internals/formats/container.md.
"""

from __future__ import annotations

from struct import Struct

VERSION = 4
"""4 is rewritten: of what it had some is gone. 3 has patch blocks. 2, which had none, is still read."""
VERSION_WHOLE = 3
"""What a container is written as whose chunks are all there, so that an older Nearkin reads it."""
VERSION_MIN = 2
DOMAIN_BYTES = 16
CONTAINER_BYTES_MAX = 1 << 30
BLOCK_RAW_BYTES_MAX = 32 * 1024 * 1024
SKETCHES_MAX = 256
BLOCKS_MAX = 1 << 16
ROWS_MAX = 1 << 23
"""Chunks, segments, and chunks named by recipes: bounds what a directory decodes to. Builders seal far below."""

HEADER = Struct("<4sHHQ16s")
assert HEADER.size == 32  # docs/internals/formats/container.md
BLOCK = Struct("<4sBBBBII8s")
assert BLOCK.size == 24  # docs/internals/formats/container.md
DIRECTORY = Struct("<4sIIIHH")
assert DIRECTORY.size == 20  # docs/internals/formats/container.md
FOOTER = Struct("<QI8s8s4s")
assert FOOTER.size == 32  # docs/internals/formats/container.md

STORED, ZSTD = 0, 1
"""How a block's bytes are compressed."""
RAW, XDELTA3, PATCH = 0, 1, 2
"""What a block's bytes are: chunks as they came; VCDIFF deltas, one after another; chunks as they came, in a frame that
refers to the bytes of bases, which are its prefix."""
KINDS = ("raw", "xdelta3", "patch")
PREFIX_BYTES_MAX = 32 * 1024 * 1024
"""Bases of one patch block, together."""
PREFIX_BASES_MAX = 1 << 16
"""And how many: a reader has 70 bytes for each before it knows what they are. Writers close at 4,096."""
LOST = b"NKBL"
"""Begins a block whose bytes are lost."""
MERGED_RANK = 253
"""Of a chunk that a round of garbage collection made of others, and put behind all that there was."""
REFERENCE_RANK = 254
"""Of a chunk whose base is such a chunk, and holds its bytes."""
LOCALITY_RANK = 255
"""Of a delta whose base no super-feature found: it lay beside the chunks around it when those were stored."""

"""Delta: fresh chunks become raw bytes or a difference to their base, gathered in blocks, sealed in containers."""

from nearkin_delta.blocks import SparePrefixes
from nearkin_delta.stage import ChunkCounts, DeltaOutcome, DeltaStage

__all__ = ["ChunkCounts", "DeltaOutcome", "DeltaStage", "SparePrefixes"]

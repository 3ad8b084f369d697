"""Delta: fresh chunks become raw bytes or a difference to their base, gathered in blocks, collected in containers."""

from nearkin_delta.block_encoder import SparePrefixes, encoders_max
from nearkin_delta.finished_container import FinishedContainer
from nearkin_delta.stage import ChunkCounts, DeltaOutcome, DeltaStage

__all__ = ["ChunkCounts", "DeltaOutcome", "DeltaStage", "FinishedContainer", "SparePrefixes", "encoders_max"]

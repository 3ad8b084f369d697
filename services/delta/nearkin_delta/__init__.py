"""Delta stage: encode fresh chunks raw or as deltas, in blocks, in containers."""

from nearkin_delta.block_encoder import SparePrefixes, encoders_max
from nearkin_delta.finished_container import FinishedContainer
from nearkin_delta.stage import ChunkCounts, DeltaOutcome, DeltaStage, StageResources

__all__ = [
    "ChunkCounts",
    "DeltaOutcome",
    "DeltaStage",
    "FinishedContainer",
    "SparePrefixes",
    "StageResources",
    "encoders_max",
]

"""The chunker: frames in, segments of fingerprinted chunks out."""

from nearkin_chunker.stage import STEP_BYTES, BlobRun, ChunkedRuns, ChunkerStage, Cutting, FrameRuns

__all__ = ["STEP_BYTES", "BlobRun", "ChunkedRuns", "ChunkerStage", "Cutting", "FrameRuns"]

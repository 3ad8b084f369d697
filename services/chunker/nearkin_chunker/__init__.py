"""The chunker: frames in, segments of fingerprinted chunks out."""

from nearkin_chunker.stage import STEP_BYTES, BlobRun, ChunkedRuns, ChunkerStage, FrameRuns, SegmentCutter

__all__ = ["STEP_BYTES", "BlobRun", "ChunkedRuns", "ChunkerStage", "FrameRuns", "SegmentCutter"]

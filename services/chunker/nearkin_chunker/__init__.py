"""The chunker: frames in, segments of fingerprinted chunks out."""

from nearkin_chunker.stage import BlobRun, ChunkedRuns, ChunkerStage, FrameRuns

__all__ = ["BlobRun", "ChunkedRuns", "ChunkerStage", "FrameRuns"]

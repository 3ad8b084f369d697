"""Chunker stage: cut frames into fingerprinted chunks and segments."""

from nearkin_chunker.cut_state import CutState
from nearkin_chunker.stage import STEP_BYTES, BlobRun, ChunkedRuns, ChunkerStage, FrameRuns, SegmentCutter

__all__ = ["STEP_BYTES", "BlobRun", "ChunkedRuns", "ChunkerStage", "CutState", "FrameRuns", "SegmentCutter"]

"""Dedup stage: find the fresh chunks of a batch."""

from nearkin_dedup.stage import DedupStage

__all__ = ["DedupStage"]

"""Dedup: known segments cost one lookup, the chunks of unknown ones another; what is left is fresh."""

from nearkin_dedup.stage import DedupStage

__all__ = ["DedupStage"]

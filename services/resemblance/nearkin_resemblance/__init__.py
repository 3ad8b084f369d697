"""Resemblance: super-features of fresh chunks, and the base that each would be a small difference to."""

from nearkin_resemblance.feature_algorithms import NAMES, Sketch, sketcher
from nearkin_resemblance.stage import ResemblanceStage

__all__ = ["NAMES", "ResemblanceStage", "Sketch", "sketcher"]

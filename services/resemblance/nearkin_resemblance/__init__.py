"""Resemblance stage: compute super-features of fresh chunks and find base candidates."""

from nearkin_resemblance.feature_algorithms import NAMES, Sketch, sketcher
from nearkin_resemblance.stage import ResemblanceStage

__all__ = ["NAMES", "ResemblanceStage", "Sketch", "sketcher"]

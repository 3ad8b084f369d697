"""Tests. A package, so that no other `tests` that is installed takes its name."""

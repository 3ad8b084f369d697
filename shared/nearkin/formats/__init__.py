"""Formats: bytes <-> records, no input or output. Invariant: a parser refuses what it does not fully understand."""

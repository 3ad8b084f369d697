"""Formats: bytes to records and back, without input or output. Invariant: a parser refuses what it does not know."""

"""Encode and decode stored records, without input or output.

Invariant: a parser refuses unknown formats.
"""

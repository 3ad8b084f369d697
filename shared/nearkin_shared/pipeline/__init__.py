"""Stage protocol, lookups and batched execution of stages.

Invariant: a stage does no input or output.
"""

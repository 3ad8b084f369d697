"""Stage protocol, lookups and batched execution. Invariant: a stage does no input or output."""

"""Index of one machine, in LMDB."""

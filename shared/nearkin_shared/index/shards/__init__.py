"""Index of a fleet in shards: each process has the entries of a range of names."""

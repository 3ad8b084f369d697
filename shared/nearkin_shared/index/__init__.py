"""Indexes. Invariant: rebuildable from containers and manifests; losing one costs time and some dedup, never data."""

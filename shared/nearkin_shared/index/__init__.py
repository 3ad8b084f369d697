"""Indexes of chunks, segments, super-features and versions.

Invariant: rebuildable from containers and manifests; losing an index costs time and some dedup, never data.
"""

"""Shared state of a fleet: lease, key locks, GC status and the owner of the index."""

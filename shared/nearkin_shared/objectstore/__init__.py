"""Store objects in folders and buckets, and wrap object stores.

Invariant: an object that `put_new` returned for survives a crash.
"""

"""Stores: containers and manifests over an object store. Invariant: what `put_new` has answered survives a crash."""

"""Containers, manifests and records in an object store."""

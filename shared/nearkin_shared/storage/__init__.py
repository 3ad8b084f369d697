"""Containers, manifests and records over an object store."""

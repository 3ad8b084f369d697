"""Read path: plans, block decoding, caches and restore."""

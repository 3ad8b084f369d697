"""Optimization of stored containers: compact, merge, rebase, recompress."""

"""Compiled kernels (Cython and C)."""

"""Plain-Python definitions of the kernels."""

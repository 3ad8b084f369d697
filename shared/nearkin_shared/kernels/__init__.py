"""Kernels: the hot loops. Invariant: a segment or more a call, no GIL, and a plain-Python reference that agrees.

Each kernel `name` is three files: `_name.pyx` (Cython), `_name_reference.py` (the definition, in plain Python) and
`name.py`, which offers whichever `NEARKIN_KERNELS` demands. Chunks travel as one payload buffer with `offsets`
(uint64, bytes) and `lengths` (uint32, bytes) beside it.
"""

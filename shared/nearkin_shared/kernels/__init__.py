"""Run the hot loops as compiled kernels.

Invariant: a call processes a segment or more without the GIL, and equals a plain-Python reference.

Each kernel `name` is three files: `_name.pyx` (Cython), `_name_reference.py` (the definition, in plain Python) and
`name.py`, which offers whichever `NEARKIN_KERNELS` demands. Chunks travel as one payload buffer with `offsets`
(uint64, bytes) and `lengths` (uint32, bytes) with it.
"""

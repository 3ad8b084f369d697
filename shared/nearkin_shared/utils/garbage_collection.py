# size: one decision, of every service
"""Keep Python's garbage collection off the objects that a service never releases.

A full collection visits every object: modules, classes and schemas are some 200,000. With batches of small records it
took 5 % of the worker's CPU time, with restores up to a sixth of the gateway's.
"""

from __future__ import annotations

import gc

YOUNG_OBJECTS_MAX = 10_000
"""New objects before those are collected that only refer to each other; 700 by default. Buffers of several MiB are
released by reference count, so that they do not wait for it."""


def exempt_started_objects() -> None:
    """Exempt all objects that exist now. To be called once, when a service has started."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS_MAX, *gc.get_threshold()[1:])

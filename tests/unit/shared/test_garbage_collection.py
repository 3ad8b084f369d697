"""Test what a service exempts from garbage collection."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import gc
from nearkin_shared.utils.garbage_collection import exempt_started_objects
cycle = []
cycle.append(cycle)
exempt_started_objects()
later = []
later.append(later)
found = {id(one) for one in gc.get_objects()}
print(gc.get_freeze_count() > 1000, id(cycle) in found, id(later) in found)
del later
print(gc.collect())
"""


def test_exempt_later_cycle_is_collected() -> None:
    """Objects that exist at the call are exempt, and a cycle made later is collected."""
    run = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["True", "False", "True", "1"]

"""Support of the tests: engines, fakes, servers, data, fuzzing, checks. Never installed.

Processes that tests start import it too: the work tree is put on their path.
"""

import os
from pathlib import Path

_ROOT = str(Path(__file__).resolve().parents[2])
_PATH = os.environ.get("PYTHONPATH", "")
if _ROOT not in _PATH.split(os.pathsep):
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (_ROOT, _PATH)))

"""Test that no server of a test or benchmark is left running when SIGTERM ends its process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.support.servers.termination import EXIT_CODE

SCRIPT = """
import sys, time
from pathlib import Path
from tests.support.servers import gateways
folder = Path(sys.argv[1])
environment = {"NEARKIN_STORE": str(folder / "s"), "NEARKIN_GATEWAY__INGEST": "embedded"}
with gateways.process(environment, folder) as (child, _):
    print(child.pid, flush=True)
    time.sleep(60)
"""


def test_sigterm_ends_the_servers_of_a_benchmark(tmp_path: Path) -> None:
    """A process ended by SIGTERM ends the gateway that it started first."""
    with subprocess.Popen([sys.executable, "-c", SCRIPT, str(tmp_path)], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        gateway = os.pidfd_open(int(owner.stdout.readline()))
        owner.send_signal(signal.SIGTERM)
        assert owner.wait(60) == EXIT_CODE
    try:
        signal.pidfd_send_signal(gateway, signal.SIGCONT)
    except ProcessLookupError:
        return
    finally:
        os.close(gateway)
    raise AssertionError("the gateway was left running")

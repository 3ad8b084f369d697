# size: an entry point
"""Run Nearkin in one process, as a service embeds it.

`nearkin.lab.tools.nearkin_tool` starts this process and names one version after another.

arguments: STORE [CONFIG]. stdin, a line each: ["put", PATH] | ["get", VERSION, TARGET] | ["gc"]. stdout, when done:
{"peak_bytes": of this process so far, "cpu_seconds": of this command, and with the first one of the process's start}
"""

from __future__ import annotations

import json
import resource
import sys
import time
from pathlib import Path

import nearkin
from nearkin_shared.errors import NearkinError


def main() -> None:
    """Serve until stdin ends."""
    folder, *config = sys.argv[1:]
    settings, _ = nearkin.load(config[0] if config else None)
    with nearkin.open_store(Path(folder), settings=settings, create=True) as store:
        started = 0.0  # peers' starts are counted as well
        for line in sys.stdin:
            word, *rest = json.loads(line)
            if word == "put":
                store.put("blob", Path(rest[0]))
            elif word == "gc":
                store.gc()
            else:
                with open(rest[1], "wb") as target:
                    store.get("blob", int(rest[0])).write_to(target)
            peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            ended = time.process_time()
            print(json.dumps({"peak_bytes": peak_bytes, "cpu_seconds": ended - started}), flush=True)
            started = ended


def run() -> None:
    """Run as a command. Raises SystemExit instead of errors that need no traceback."""
    try:
        main()
    except KeyboardInterrupt:  # reported by the parent process
        raise SystemExit(130) from None
    except (NearkinError, OSError) as err:  # a full disk, say
        raise SystemExit(f"nearkin: {err}") from err


if __name__ == "__main__":
    run()

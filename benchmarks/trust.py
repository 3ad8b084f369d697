"""Measure the cost of parity, verify, scrub and repair.

Invariant: the compared variants alternate in one run, on one core.

    taskset -c 1 python -m benchmarks.trust [--megabytes 64] [--rounds 5] [--parity rs-28-4]

Puts fresh data without and with parity; then measures verify, a scrub pass, gets over a flipped bit, and repair. MB/s
are of CPU time without waits for the disk.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from nearkin import Store, open_store
from nearkin.lab.generated_data import random_bytes, text_like
from nearkin_shared.config.loader import with_changes
from nearkin_shared.config.settings import Settings
from tests.support.data.stores import containers, flip, objects

MB = 1_000_000


def timed(work: Callable[[], object]) -> float:
    """Return the CPU seconds of a call, over all threads of this process."""
    started = time.process_time()
    work()
    return time.process_time() - started


def put_seconds(root: Path, chosen: Settings, content: bytes) -> float:
    """Return the seconds of a put into a new store."""
    with open_store(root, settings=chosen, create=True) as store:
        return timed(lambda: store.put("k", content))


def scrub_pass(store: Store) -> None:
    """Do all steps of a scrub pass."""
    scrubber = store.scrubber()
    while not scrubber.step().ended:
        pass


def main() -> None:
    """Measure, and print a line for each."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--megabytes", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--parity", default="rs-28-4")
    chosen = parser.parse_args()
    plain = Settings()
    covered = with_changes(plain, {"storage": {"parity": chosen.parity}, "scrub": {"rate_bytes": "1TiB"}})
    size = chosen.megabytes * MB
    for kind, make in (("random", random_bytes), ("text", text_like)):
        with tempfile.TemporaryDirectory() as folder:
            times: dict[str, list[float]] = {"none": [], chosen.parity: []}
            for number in range(chosen.rounds):
                content = make(size, number)
                for name, settings in (("none", plain), (chosen.parity, covered)):
                    times[name].append(put_seconds(Path(folder) / f"{name}-{number}", settings, content))
            without, with_it = (statistics.median(found) for found in times.values())
            print(f"{kind}: put {size / without / MB:.0f} MB/s, with {chosen.parity} {size / with_it / MB:.0f} MB/s")
            root = Path(folder) / f"{chosen.parity}-0"
            stored = sum(len(data) for name, data in objects(root).items() if not name.startswith("parity/"))
            parity = sum(len(data) for name, data in objects(root).items() if name.startswith("parity/"))
            print(f"  stored {stored / MB:.1f} MB, parity {parity / stored:.1%} more")
            with open_store(root, settings=covered, create=True) as store:
                print(f"  verify, parity too: {stored / timed(store.verify) / MB:.0f} MB/s of stored bytes")
                print(f"  a pass of scrubbing: {stored / timed(lambda: scrub_pass(store)) / MB:.0f} MB/s")
            with open_store(Path(folder) / "none-0", settings=plain, create=True) as store:
                print(f"  verify without parity: {stored / timed(store.verify) / MB:.0f} MB/s")
            sound, broken = list[float](), list[float]()
            path = containers(root)[0]
            for _ in range(chosen.rounds):
                for found in (sound, broken):
                    with open_store(root, settings=covered, create=True) as store:
                        found.append(timed(lambda: store.get("k").read()))
                    flip(path, 5000)
            one, other = statistics.median(sound), statistics.median(broken)
            print(f"  get {size / one / MB:.0f} MB/s, over a flipped bit {other - one:+.3f} s")
            flip(path, 5000)
            with open_store(root, settings=covered, create=True) as store:
                print(f"  repair of it, all verified before and after: {timed(store.repair):.2f} s")


if __name__ == "__main__":
    main()

"""Keep the newest versions by a policy, and free the space of the others with two GC runs.

python examples/gc_and_retention.py FOLDER

The graces are 0 here, so that the example ends in a second. Keep the defaults for data that matter: a week in which
`undelete` brings a version back, and `gc.grace_seconds` between the run that finds unreachable data and their deletion.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path

import nearkin
from nearkin_shared.config.storage import RetentionPolicy

VERSIONS = 6
SETTINGS = {"deletion": {"undelete_seconds": 0}, "gc": {"grace_seconds": 0}}


def main() -> None:
    """Put, forget, collect and verify."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder of the store; created if it does not exist")
    folder: Path = parser.parse_args().folder

    draw = random.Random(1)  # noqa: S311 (not a secret)
    policy = RetentionPolicy(keep_last=2)
    with nearkin.open_store(folder, settings=nearkin.load(None, SETTINGS)[0], create=True) as store:
        for _ in range(VERSIONS):
            store.put("log", draw.randbytes(1_000_000))
        print(f"stored: {store.stats().ledger.stored_bytes:,} bytes")

        for decision in store.forget("log", policy, dry_run=True):
            print(f"version {decision.info.version}: {'kept' if decision.kept else 'would be deleted'}")
        store.forget("log", policy)

        # 1 finds unreachable data and records them as pending delete  2 deletes those still unreachable
        for run in (1, 2):
            report = store.gc()
            print(f"gc run {run}: {report.containers_deleted} containers deleted, {report.freed_bytes:,} bytes freed")

        print(f"stored: {store.stats().ledger.stored_bytes:,} bytes")
        print(f"versions left: {[info.version for info in store.versions(all_versions=True)]}")
        print(f"damaged objects: {len(store.verify().damage)}")


if __name__ == "__main__":
    main()

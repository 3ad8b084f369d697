"""Plant mistakes and check that a test engine detects each.

Invariant: each is one mistake that the product does not make, planted in a child process only, and each is detected:
an engine that misses these would miss ours.

    python -m tests.support.engines.mutation_engine            every mistake: its engine, and the violation
    python -m tests.support.engines.mutation_engine NAME ...

Some invariants have two mechanisms: a duplicate of a chunk that is pending delete, for example, is still kept by the
marking of the next GC run. The first mechanism is then checked by itself: in the index and the record as stored on
the disk.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import click

from nearkin_shared.errors import NotFound
from nearkin_shared.utils.frozen import frozen
from tests.support.engines import detectors, gc_during_put, mutants, races
from tests.support.engines.detectors import Hunt
from tests.support.engines.model import Violation

CAUGHT, MISSED = "caught", "missed"


@frozen
class Bug:
    """One planted mistake.

    `hunt` raises Violation if an engine detects it; `breaks` names the broken invariant.
    """

    mistake: str
    breaks: str
    engine: str
    plant: Callable[[], None]
    hunt: Hunt


BUGS: Mapping[str, Bug] = {
    "bytes-not-synced": Bug("an object's fsync is dropped", "I1, I2", "power",
        mutants.bytes_not_synced, detectors.power("put")),
    "name-not-synced": Bug(
        "a manifest's folder is not synced after it", "I2", "power",
        mutants.name_not_synced, detectors.power("put + put"),
    ),
    "folder-not-synced": Bug(
        "a new folder is not synced into the one above", "I2", "power",
        mutants.folder_not_synced, detectors.power("put"),
    ),
    "create-overwrites": Bug(
        "an object is looked for, then renamed over what is there", "I2", "races", mutants.create_overwrites,
        detectors.hunt_races(races.commit_while_committing),
    ),
    "published-before-durable": Bug(
        "a container is published in the index before its object is put", "I1", "power",
        mutants.published_before_durable, detectors.power("put")
    ),
    "manifest-before-container": Bug(
        "a manifest is put before the containers that it names", "I2", "power", mutants.manifest_before_container,
        detectors.power("put"),
    ),
    "newest-deleted-first": Bug(
        "of a key's marks that of the newest version comes first", "deletion", "crash", mutants.newest_deleted_first,
        detectors.hunt_crashes("delete.marked", "delete.noted"),
    ),
    "undelete-unchecked": Bug(
        "an undeletion does not look whether its version is there still", "deletion", "races",
        mutants.undelete_unchecked,
        detectors.hunt_races(races.collect_while_undeleting),
    ),
    "not-caught-up": Bug(
        "an index that a dead writer left behind is taken as it is", "local index", "crash", mutants.not_caught_up,
        detectors.hunt_crashes("object.durable"),
    ),
    "container-before-index": Bug(
        "a container is deleted before the index forgets it", "deletion order", "crash", mutants.container_before_index,
        detectors.hunt_crashes("gc.container", "object.removed"),
    ),
    "bases-not-counted": Bug(
        "marking leaves out the bases of deltas and blocks", "I7", "crash", mutants.bases_not_counted,
        detectors.hunt_crashes("gc.container"),
    ),
    "recheck-skipped": Bug(
        "due data are deleted without another check", "I6", "races", mutants.recheck_skipped,
        detectors.hunt_races(races.lose_manifest),
    ),
    "pending-delete-still-found": Bug(
        "the index keeps entries pending delete", "I6", "crash", mutants.pending_delete_still_found,
        detectors.hunt_crashes("gc.done", "gc.recorded"),
    ),
    "same-run": Bug(
        "a GC run frees data that it marked itself", "I6", "crash",
        mutants.deletes_in_same_run, detectors.hunt_crashes("gc.done", "gc.begun")
    ),
    "grace-ignored": Bug(
        "the next GC run frees, whatever the grace", "I6", "crash",
        mutants.grace_ignored, detectors.hunt_crashes("gc.done", "gc.begun")
    ),
    "older-generation-first": Bug(
        "compaction removes a container before its next generation is there", "I1", "power",
        mutants.older_generation_first,
        detectors.power("put + compaction"),
    ),
    "number-given-again": Bug(
        "the last mark of a key's highest version is deleted too", "versions", "crash", mutants.number_given_again,
        detectors.hunt_crashes("gc.marks", "gc.done"),
    ),
    "lock-not-taken": Bug(
        "the store's lock, its lease, is not taken", "I6", "races", mutants.lock_not_taken,
        detectors.hunt_races(races.collect_while_putting),
    ),
    "concurrent-writes-ignored": Bug(
        "a GC run ignores data put while it marked and planned", "I6", "races",
        mutants.concurrent_writes_ignored, detectors.hunt_races(gc_during_put.put_during_gc),
    ),
    "retained-bases-not-kept": Bug(
        "data retained for a put keep none of their bases", "I7", "races",
        mutants.retained_bases_not_kept, detectors.hunt_races(gc_during_put.put_during_gc),
    ),
    "read-is-kept": Bug(
        "puts of a process keep cached blocks of a container that its GC run removes", "I7", "races",
        mutants.read_is_kept, detectors.hunt_races(gc_during_put.put_during_gc),
    ),
    "section-without-lock": Bug(
        "a step of a GC run takes no lock", "I6", "races", mutants.exclusive_section_without_lock,
        detectors.hunt_races(races.collect_while_putting),
    ),
    "delta-not-verified": Bug(
        "an encoding is kept without being decoded, and the encoder errs", "I7", "crash", mutants.delta_not_verified,
        detectors.hunt_crashes("put.settled", "index.written", codec="xdelta3"),
    ),
    "block-number-given-again": Bug(
        "compaction reuses the number of a deleted block", "I8", "readers",
        mutants.block_number_given_again, detectors.read_on,
    ),
    "scrub-skips": Bug(
        "a scrub goes on two containers after the one that it has read", "trust", "damage",
        mutants.scrub_skips_a_container, detectors.hunt_by_scrub,
    ),
    "repair-deletes-first": Bug(
        "repair removes the broken generation before the repaired one is durable", "I1", "crash",
        mutants.repair_deletes_first, detectors.hunt_crashes("repair.put"),
    ),
    "repair-not-published": Bug(
        "a repaired container is not published in the index", "local index", "repair",
        mutants.repair_not_published, detectors.hunt_repair,
    ),
    "fence-not-checked": Bug(
        "who removes an object does not ask whether the lease is held still", "I6", "fence",
        mutants.fence_not_checked, detectors.hunt_fence,
    ),
    "counted-twice": Bug(
        "the ledger counts a segment twice for a new version, and once for a deleted one", "gc.mode", "orphans",
        mutants.counted_twice, detectors.hunt_reference_counts,
    ),
    "summary-lies": Bug(
        "the summary of a container leaves out what a second key names of it", "I6", "readers",
        mutants.summary_lies, detectors.hunt_lying_summary,
    ),
    "directory-unchecked": Bug(
        "a directory's checksum is not compared", "I8", "damage", mutants.directory_unchecked, detectors.hunt_bitflips
    ),
}  # fmt: skip


# --- the hunt --------------------------------------------------------------------------------------------------------


def hunt(name: str, bug: Bug, folder: Path) -> tuple[str, str]:
    """Return ("caught" or "missed", the violation), from a child of this process, which has not opened a store yet."""
    message = folder / f"{name}.json"
    child = os.fork()
    if not child:
        outcome = MISSED, "nothing"
        try:
            bug.hunt(folder / name, bug.plant)
        except Violation as err:
            outcome = CAUGHT, str(err)
        except NotFound as err:
            outcome = CAUGHT, f"NotFound: {err}"
        except BaseException as err:
            outcome = MISSED, f"the engine broke: {type(err).__name__}: {err}"
        finally:
            message.write_text(json.dumps(outcome))
            os._exit(0)
    os.waitpid(child, 0)
    found: tuple[str, str] = tuple(json.loads(message.read_text()))
    return found


def hunt_all(names: Sequence[str], folder: Path) -> Iterator[tuple[str, str, str, float]]:
    """Yield (name, "caught" or "missed", the violation, seconds) for each of the named mistakes."""
    for name in names:
        started = time.perf_counter()
        outcome, message = hunt(name, BUGS[name], folder)
        yield name, outcome, message, time.perf_counter() - started


@click.command()
@click.argument("names", nargs=-1)
@click.option("--folder", type=click.Path(path_type=Path), help="where stores are made; a temporary folder")
def main(names: tuple[str, ...], folder: Path | None) -> None:
    """Plant each named mistake, or all, and print the engine that detected it."""
    logging.getLogger("nearkin").setLevel(logging.CRITICAL)
    unknown = set(names) - BUGS.keys()
    if unknown:
        raise click.UsageError(f"no such bug: {', '.join(sorted(unknown))}; choose of {', '.join(BUGS)}")
    missed = []
    with tempfile.TemporaryDirectory(prefix="nearkin-planted-", dir=folder) as work_folder:
        for name, outcome, message, seconds in hunt_all(names or tuple(BUGS), Path(work_folder)):
            click.echo(f"{name}\t{BUGS[name].engine}\t{outcome}\t{seconds:.1f} s\t{' '.join(message.split())[:300]}")
            if outcome != CAUGHT:
                missed.append(name)
    if missed:
        click.echo(f"not caught: {', '.join(missed)}", err=True)
        sys.exit(1)


if __name__ == "__main__":
    main()

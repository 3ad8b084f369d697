"""Run the calls of a process that will be killed.

Invariant: it checks everything acknowledged so far before its first call.

open -> repair planted damage -> compare the answers with the oracle -> calls, up to the failpoint that kills it

The next process to open a store repairs planted damage: if it is killed during the repair, its successor continues.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np

from nearkin.lab.generated_data import mutate, random_bytes, text_like
from nearkin.store import Store, open_store
from nearkin_shared.config.settings import Settings
from nearkin_shared.errors import NearkinError
from nearkin_shared.formats.container import decode_container
from nearkin_shared.formats.encrypted_object import HEAD, PAGE_BYTES, STRIDE_BYTES
from nearkin_shared.utils import failpoints
from tests.support.checks import inspection
from tests.support.data.stores import SMALL, flip, manifests, settings
from tests.support.engines.model import (
    DAY,
    Break,
    Call,
    Delete,
    Forget,
    Gc,
    Oracle,
    Put,
    Rebuild,
    Repair,
    Undelete,
    Violation,
    check_bytes,
)

START = 1_764_000_000.0
FAMILIES = 3
COLLECTIONS_MAX = 12
RECOVERING = ("rebuild.", "repair.", "quarantine.")
"""Failpoints that are armed before a store is opened, so that a process may die during recovery."""
CHOSEN = settings(
    SMALL,
    {
        "deletion": {"undelete_seconds": DAY},
        "gc": {"grace_seconds": DAY, "compact_below": 0.9, "bytes_per_second": 1 << 30},
        "features": {"algorithm": "odess"},
    },
)

GATHERING: Mapping[str, Mapping[str, object]] = {
    "block": {"delta_bytes": "64KiB"},
    "delta": {"codec": "patch", "max_depth": 1},
    "gc": {"merge_block_bytes": "1MiB", "merge_versions_min": 2},
}
"""Base chains are short, so that GC runs gather the changes of a few versions."""


@lru_cache(128)
def content(number: int) -> bytes:
    """Return the bytes that a number denotes: those of the family's previous number after some edits.

    Changes accumulate, as in a history: otherwise no merged block would save bytes, and GC runs would never merge.
    """
    family, generation = number % FAMILIES, number // FAMILIES
    if generation:
        return mutate(content(number - FAMILIES), number, edits=8 + generation % 40)
    sizes = (180_000, 90_000, 4_000)
    return (text_like, random_bytes, text_like)[family](sizes[family], family)


def work(
    root: Path,
    oracle: Oracle,
    calls: Sequence[Call] | None,
    armed: failpoints.ArmedFailpoint | None,
    chosen: Settings,
    report_line: Callable[..., None],
) -> None:
    """Check a store, and do calls; if None: collect all garbage instead, and check that nothing is left.

    `say` receives each settled, begun and completed call. Raises: Violation.
    """
    recovering = armed is not None and armed.name.startswith(RECOVERING)
    if armed is not None and recovering:
        failpoints.arm([armed])
    if root.is_dir() and not (oracle.broken is not None and _is_encrypted(chosen)):  # a page may hold a whole container
        inspection.check_index_names_existing_data(root, chosen)
    with open_store(root, settings=chosen, clock=lambda: oracle.now, create=True) as store:
        if oracle.broken is not None:
            repair_damage(store, oracle.broken)
            oracle.broken = None
        oracle.settle(inspection.inspect(store))
        check_bytes(_restore(store, oracle), {version: content(oracle.contents[version]) for version in oracle.live})
        report_line("settled", oracle)
        if calls is None:
            _end(store, oracle)
            return
        if armed is not None and not recovering:
            failpoints.arm([armed])
        for call in calls:
            if not possible(oracle, call):
                continue
            now_us = (oracle.now + (call.days * DAY if isinstance(call, Gc) else 0)) * 1e6
            due = {
                container
                for container, entry in store._condemned.read().items()
                if entry.at_us + chosen.gc.grace_seconds * 1_000_000 <= now_us
            }
            begun = call, inspection.containers(root), frozenset(due)
            report_line("begin", *begun)
            oracle.begin(*begun)
            perform(store, call)
            oracle.check_containers(inspection.containers(root))
            oracle.acknowledge()
            report_line("done")
        report_line("passings", failpoints.disarm())


def possible(oracle: Oracle, call: Call) -> bool:
    """Return whether a call has an effect: the calls of a killed process may have ended otherwise than planned."""
    match call:
        case Delete():
            return bool(oracle.hidden_versions(call))
        case Undelete():
            return bool(oracle.list_restorable(call))
        case Repair():
            return oracle.broken is not None
    return True


def perform(store: Store, call: Call) -> None:
    """Do a call."""
    match call:
        case Put(items):
            for _ in store.put_many((key, content(number)) for key, number in items):
                pass
        case Delete(key, version):
            store.delete(key, version, who="crash")
        case Undelete(key, version):
            store.undelete(key, version, who="crash")
        case Forget(keep):
            from nearkin_shared.config.storage import RetentionPolicy

            store.forget("", RetentionPolicy(keep_last=keep))
        case Gc():
            store.gc()
        case Rebuild(lost):
            if lost:
                store.close()
                shutil.rmtree(store.root / "index", ignore_errors=True)
                store.versions()
            else:
                store.rebuild_index()
        case Break():
            _break(store, call)
        case Repair(broken):
            repair_damage(store, broken)


# --- damage ----------------------------------------------------------------------------------------------------------


def _is_encrypted(chosen: Settings) -> bool:
    return chosen.storage.encryption != "none"


def copies_of(root: Path) -> Path:
    """Return the folder with copies of the damaged objects of a store."""
    return root.parent / f"{root.name}-copies"


def _break(store: Store, call: Break) -> None:
    """Flip a bit of a manifest, or of a container's block, and let verify find it; keep a copy next to the store."""
    draw, root = random.Random(call.draw), store.root
    paths = manifests(root) if call.manifest else sorted((root / "containers").rglob("*.nkc"))
    if not paths:
        return
    path = draw.choice(paths)
    data = path.read_bytes()
    at = draw.randrange(len(data))
    if path in inspection.newest(root).values():  # of an older generation any bit: it may be damaged already
        blocks = decode_container(inspection.copy_opener(store.root, store.settings)(path), path.name).blocks
        raw_blocks = np.flatnonzero(blocks.raw).tolist()
        if not raw_blocks:
            return
        block = draw.choice(raw_blocks)
        at = int(blocks.offsets[block]) + draw.randrange(int(blocks.stored[block]))
        if _is_encrypted(store.settings):
            at = HEAD.size + at // PAGE_BYTES * STRIDE_BYTES + at % PAGE_BYTES
    copies = copies_of(root)
    shutil.rmtree(copies, ignore_errors=True)
    copy = copies / path.parent.name / path.name  # an encrypted object opens only under its folder's name
    copy.parent.mkdir(parents=True)
    copy.write_bytes(data)
    flip(path, at, draw.randrange(8))
    if call.verify:
        store.verify()


def repair_damage(store: Store, broken: Break) -> None:
    """Repair from the copy, or from all content ever put; then require that nothing is damaged.

    A copy of a container that was rewritten since is of no use. Content repairs no manifest, nor a container whose
    directory was on the lost page.
    """
    copies = copies_of(store.root)
    if not copies.is_dir():  # there was no object to damage
        return
    copies_given = sorted(copies.glob("*/*.nk?"))
    report = store.repair(copies_given) if broken.by_copy or broken.manifest else store.repair()
    if report.damage and not broken.manifest:
        files = [copies / f"content-{number}" for number in range(broken.contents)]
        for number, file in enumerate(files):
            file.write_bytes(content(number))
        report = store.repair(files)
        if report.damage and _is_encrypted(store.settings):
            report = store.repair(copies_given)
    if report.damage or report.quarantined_chunks:
        raise Violation(f"{broken}: all that is needed was given, and this is left: {report}")
    shutil.rmtree(copies)


# --- checks ----------------------------------------------------------------------------------------------------------


def _restore(store: Store, oracle: Oracle) -> dict[tuple[str, int], bytes]:
    found = {}
    for key, version in sorted(oracle.live):
        try:
            found[key, version] = store.get(key, version).read()
        except NearkinError as err:
            raise Violation(f"{(key, version)}: cannot be restored: {type(err).__name__}: {err}") from err
    return found


def _end(store: Store, oracle: Oracle) -> None:
    """Collect until nothing is left to free; then delete all, and collect again: no object may remain."""
    report = store.repair()  # makes the parity that a killed process did not write
    if report.damage or report.repaired:
        raise Violation(f"repair names {report.damage[:3]}, repaired {report.repaired[:3]}")
    _collect(store, oracle)
    check_bytes(_restore(store, oracle), {version: content(oracle.contents[version]) for version in oracle.live})
    inspection.check_no_orphans(store)
    inspection.check_parity_has_objects(store)
    inspection.check_index_equals_a_rebuilt_one(store)
    for key in sorted({key for key, _ in oracle.live}):
        call = Delete(key, None)
        oracle.begin(call)
        perform(store, call)
        oracle.acknowledge()
    _collect(store, oracle)
    oracle.settle(inspection.inspect(store))
    left = inspection.containers(store.root)
    if left:
        raise Violation(f"all was deleted and collected, and {len(left)} containers are left")
    inspection.check_parity_has_objects(store)


def _collect(store: Store, oracle: Oracle) -> None:
    for _ in range(COLLECTIONS_MAX):
        oracle.begin(Gc(2))
        report = store.gc()
        oracle.acknowledge()
        if not report.freed_bytes and not report.pending_delete_containers:
            return
    raise Violation(f"{COLLECTIONS_MAX} GC runs, and the last still freed {report.freed_bytes} bytes: {report}")

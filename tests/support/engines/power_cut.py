"""Explore power cuts.

Invariant: after every prefix of a workload's disk operations, whichever of them are durable, the store opens and
answers all acknowledged calls byte for byte, with its index as of that moment and without one.

    setup, durable -> calls, recorded -> every prefix -> every world of it -> open, compare, verify, put the same again
                                      -> the n-th call fails, for all n    -> compare, the same again, compare
"""

from __future__ import annotations

import copy
import errno
import hashlib
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from nearkin.local.process_lock import NAMES as LOCKS
from nearkin.store import Store, open_store
from nearkin_shared.config.settings import Settings
from nearkin_shared.errors import NearkinError, RetryableError
from nearkin_shared.utils import failpoints
from nearkin_shared.utils.frozen import frozen
from nearkin_shared.utils.private_files import FILE_MODE
from tests.support.checks import inspection
from tests.support.data.stores import ENCRYPTED, settings
from tests.support.engines.crash_child import (
    CHOSEN,
    GATHERING,
    START,
    content,
    copies_of,
    perform,
    possible,
    repair_damage,
)
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
from tests.support.fakes.power_loss_disk import SCRATCH, Disk, RecordingOs, Step, recording

UNTRACED = ("index", "index.new", *LOCKS, SCRATCH)
"""Files that are no objects: LMDB syncs its file itself, and locks need not be durable."""


KEPT = "kept-copies"
"""Folder with copies of the objects that the preparation damaged."""


@frozen
class Workload:
    """Calls that are recorded, after unrecorded ones."""

    setup: tuple[Call, ...]
    calls: tuple[Call, ...]
    changes: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    """Changes to the settings."""
    passes: tuple[str, ...] = ()
    """Failpoints that the recorded calls must pass, so that the workload tests its subject."""


PARITY: Mapping[str, Mapping[str, object]] = {"storage": {"parity": "rs-4-2"}}
_SEALED_WITH_PARITY = {"storage": {**ENCRYPTED["storage"], **PARITY["storage"]}}
_STEPS = (Put((("a", 0),)), Put((("a", 3),)))
_BROKEN = Break(1, manifest=False, verify=True, by_copy=False, contents=4)


def _repaired(broken: Break, point: str, changes: Mapping[str, Mapping[str, object]] | None = None) -> Workload:
    return Workload((*_STEPS, broken), (Repair(broken),), changes or {}, (point,))


_TWO = Put((("a", 0), ("b", 1)))
_DYING = (Put((("a", 0), ("a", 3))), Put((("a", 6), ("b", 1))), Delete("a", 1), Delete("b", None), Gc(2))
WORKLOADS: Mapping[str, Workload] = {
    "put": Workload((), (Put((("a", 2),)),)),
    "put + put": Workload((), (Put((("a", 2),)), Put((("a", 5),)))),
    "put of a group": Workload((), (_TWO,)),
    "put + delete": Workload((), (Put((("a", 2),)), Delete("a", None))),
    "put + delete + undelete": Workload((), (Put((("a", 2),)), Delete("a", 1), Undelete("a", 1))),
    "put + gc": Workload((*_DYING,), (Put((("a", 9),)), Gc(2))),
    "delete + gc": Workload((_TWO,), (Delete("b", None), Gc(2), Gc(2))),
    "gc + put": Workload((*_DYING,), (Gc(2), Put((("b", 1),)))),
    "put + compaction": Workload(
        (Put((("a", 0), ("b", 1))), Put((("a", 3),)), Delete("b", None), Delete("a", 1), Gc(2)),
        (Put((("a", 6),)), Gc(2)),
    ),
    "forget + put + gc": Workload((Put((("a", 2), ("a", 5))),), (Forget(1), Put((("a", 8),)), Gc(2))),
    "put + rebuild": Workload((), (Put((("a", 2),)), Rebuild(lost=False))),
    "parity": Workload((_TWO,), (Put((("a", 3),)), Delete("b", None), Gc(2), Gc(2)), PARITY, ("parity.put", "gc.done")),
    "encryption": Workload((_TWO,), (Put((("a", 3),)), Delete("b", None), Gc(2), Gc(2)), ENCRYPTED, ("gc.done",)),
    "encryption with parity": Workload((), (Put((("a", 2),)),), _SEALED_WITH_PARITY, ("parity.put", "key.made")),
    "repair from content": _repaired(_BROKEN, "repair.put"),
    "repair from a copy": _repaired(replace(_BROKEN, by_copy=True), "repair.replaced"),
    "repair from parity": _repaired(_BROKEN, "repair.replaced", PARITY),
    "repair of a manifest": _repaired(replace(_BROKEN, manifest=True), "repair.replaced"),
    "put that repairs": Workload(
        (*_STEPS, _BROKEN), (Put((("b", 0), ("b", 3))), Repair(_BROKEN)), passes=("repair.put",)
    ),
    "gathering": Workload((*_STEPS, Put((("a", 6),))), (Gc(2),), GATHERING, ("merge.container",)),
    "recompression": Workload(_STEPS, (Gc(2),), passes=("recompress.container",)),
    "rebase": Workload(
        (*(Put((("a", number),)) for number in (16, 33, 52)), Delete("a", 1), Gc(2)),
        (Gc(2),),
        {"gc": {"recompress_level": 0}},
        ("rebase.done",),
    ),
}


@dataclass(slots=True)
class ExplorationResult:
    """Figures of an exploration."""

    prefixes: int = 0
    worlds: int = 0
    """Distinct combinations of tree, index and acknowledged calls."""
    failures: int = 0
    """Number of calls that were made to fail."""
    steps: dict[str, int] = field(default_factory=dict)


# --- running a workload ----------------------------------------------------------------------------------------------


def _begin(store: Store, oracle: Oracle, call: Call) -> tuple[Call, frozenset[int], frozenset[int]]:
    now_us = (oracle.now + (call.days * DAY if isinstance(call, Gc) else 0)) * 1e6
    grace_us = store.settings.gc.grace_seconds * 1_000_000
    due = {c for c, entry in store._condemned.read().items() if entry.at_us + grace_us <= now_us}
    return call, inspection.containers(store.root), frozenset(due)


def _prepare(root: Path, chosen: Settings, calls: Sequence[Call]) -> Oracle:
    oracle = Oracle(START)
    if calls:
        with open_store(root, settings=chosen, clock=lambda: oracle.now, create=True) as store:
            for call in calls:
                oracle.begin(*_begin(store, oracle, call))
                perform(store, call)
                oracle.acknowledge()
    else:
        root.mkdir(parents=True)
    return oracle


def _index(root: Path) -> bytes | None:
    path = root / "index" / "data.mdb"
    return path.read_bytes() if path.is_file() else None


def _record(
    root: Path, chosen: Settings, oracle: Oracle, calls: Sequence[Call]
) -> tuple[list[Step], Mapping[str, int]]:
    """Do the calls; return each step, with notes of begun and acknowledged calls and each state of the index.

    The second value counts how often each failpoint was passed.
    """
    passed: dict[str, int] = {}
    with recording(root) as layer:

        def watch(name: str) -> None:
            if name in ("index.written", "rebuild.removed", "rebuild.renamed"):
                layer.note(("index", _index(root)))

        failpoints.arm((), watch)
        try:
            with open_store(root, settings=chosen, clock=lambda: oracle.now, create=True) as store:
                for call in calls:
                    begun = _begin(store, oracle, call)
                    layer.note(("begin", begun))
                    oracle.begin(*begun)
                    perform(store, call)
                    oracle.acknowledge()
                    layer.note(("done", call))
        finally:
            passed = failpoints.disarm()
        return layer.steps, passed


def read_tree(root: Path) -> dict[str, bytes | None]:
    """Return the objects of a folder by name; None stands for a folder."""
    found: dict[str, bytes | None] = {}
    for path in sorted(root.rglob("*")):
        name = str(path.relative_to(root))
        if name.split("/", maxsplit=1)[0] not in UNTRACED:
            found[name] = path.read_bytes() if path.is_file() else None
    return found


# --- power cuts ------------------------------------------------------------------------------------------------------


def explore(folder: Path, workload: Workload, *, chosen: Settings = CHOSEN) -> ExplorationResult:
    """Try every world of every prefix. Raises Violation naming the prefix and the world."""
    root, explored = folder / "recorded", ExplorationResult()
    chosen = settings(chosen, workload.changes)
    oracle = _prepare(root, chosen, workload.setup)
    if copies_of(root).is_dir():  # the recorded repair removes them
        shutil.copytree(copies_of(root), folder / KEPT)
    index, disk = _index(root), Disk(read_tree(root))
    before = copy.deepcopy(oracle)
    steps, passed = _record(root, chosen, oracle, workload.calls)
    missing = [point for point in workload.passes if point not in passed]
    if missing:
        raise AssertionError(f"the workload passes no {', '.join(missing)}: it tests less than it is for")
    seen: set[bytes] = set()
    state = 0
    for number, step in enumerate([Step("note"), *steps]):
        explored.steps[step.what] = explored.steps.get(step.what, 0) + 1
        if step.what == "note":
            match step.event:
                case ("begin", begun):
                    before.begin(*begun)
                    state += 1
                case ("done", _):
                    before.acknowledge()
                    state += 1
                case ("index", found):
                    index = found
                case _:
                    pass
        disk.apply(step)
        explored.prefixes += 1
        for tree in disk.worlds():
            for survivor in (index, None) if index is not None else (None,):
                key = world_key(tree, survivor, state)
                if key in seen:
                    continue
                seen.add(key)
                explored.worlds += 1
                try:
                    _try_world(folder, tree, survivor, copy.deepcopy(before), chosen, workload)
                except Violation as err:
                    raise Violation(
                        f"power cut after step {number} ({step.what} {step.path or step.file or ''}), with "
                        f"{'its' if survivor else 'no'} index and {describe_tree(tree)}: {err}"
                    ) from err
    return explored


def _try_world(
    folder: Path,
    tree: Mapping[str, bytes | None],
    index: bytes | None,
    oracle: Oracle,
    chosen: Settings,
    workload: Workload,
) -> None:
    """Make a store of the files after a power cut, and check it. Raises Violation."""
    place = folder / "world"
    for left in (place, copies_of(place)):
        shutil.rmtree(left, ignore_errors=True)
    write_tree(place, tree, index)
    if (folder / KEPT).is_dir():
        shutil.copytree(folder / KEPT, copies_of(place))
    _check(place, oracle, chosen, workload)


def world_key(tree: Mapping[str, bytes | None], index: bytes | None, state: int) -> bytes:
    """Return a value that is equal for two worlds only if their files, index and acknowledged calls are equal."""
    digest = hashlib.sha256(f"{state} {index is not None}".encode() + (index or b""))
    for path, data in sorted(tree.items()):
        if data is not None:
            digest.update(path.encode() + b"\0" + hashlib.sha256(data).digest())
    return digest.digest()


def describe_tree(tree: Mapping[str, bytes | None]) -> str:
    """Return a description of the files of a tree."""
    return (
        ", ".join(f"{path} {len(data)} bytes" for path, data in sorted(tree.items()) if data is not None) or "nothing"
    )


def write_tree(place: Path, tree: Mapping[str, bytes | None], index: bytes | None = None) -> None:
    """Make a folder with the files of a tree, and with its index, if any."""
    place.mkdir(parents=True)
    for path, data in sorted(tree.items()):
        if data is None:
            (place / path).mkdir(parents=True, exist_ok=True)
        else:
            (place / path).parent.mkdir(parents=True, exist_ok=True)
            (place / path).write_bytes(data)
            (place / path).chmod(FILE_MODE)
    if index is not None:
        (place / "index").mkdir()
        (place / "index" / "data.mdb").write_bytes(index)


def _check(place: Path, oracle: Oracle, chosen: Settings, workload: Workload) -> None:
    if not (oracle.broken is not None and chosen.storage.encryption != "none"):  # a page may hold a whole container
        inspection.check_index_names_existing_data(place, chosen)
    if not (place / "nearkin.json").is_file() and oracle.contents:
        raise Violation("the store's descriptor is missing")
    try:
        with open_store(place, settings=chosen, clock=lambda: oracle.now, create=True) as store:
            again = oracle.in_flight
            if oracle.broken is not None:
                repair_damage(store, oracle.broken)
                oracle.broken = None
            _compare(store, oracle)
            for call in (again, *workload.calls[-1:]):  # the interrupted call, or the last, can be repeated
                if call is not None and possible(oracle, call):
                    oracle.begin(*_begin(store, oracle, call))
                    perform(store, call)
                    oracle.acknowledge()
                    _compare(store, oracle)
                    break
            damage = store.verify().damage
            if damage:
                raise Violation(f"verify names {damage[0]}")
    except NearkinError as err:
        raise Violation(f"{type(err).__name__}: {err}") from err


def _compare(store: Store, oracle: Oracle) -> None:
    broken = oracle.broken  # not repaired yet
    if broken is None or not broken.manifest:
        oracle.settle(inspection.inspect(store))
    if broken is not None:
        return
    found = {(key, version): store.get(key, version).read() for key, version in oracle.live}
    check_bytes(found, {version: content(oracle.contents[version]) for version in oracle.live})


# --- calls that fail -------------------------------------------------------------------------------------------------


def fail_each(
    folder: Path, workload: Workload, *, error: int = errno.ENOSPC, every: int = 1, chosen: Settings = CHOSEN
) -> ExplorationResult:
    """Let the n-th mutating disk call fail, for every n (or each `every`-th).

    Raises Violation naming n.
    """
    explored = ExplorationResult()
    base = folder / "base"
    chosen = settings(chosen, workload.changes)
    oracle = _prepare(base, chosen, workload.setup)
    for number in _counting(every):
        place = folder / f"failed-{number}"
        shutil.copytree(base, place)
        if copies_of(base).is_dir():
            shutil.copytree(copies_of(base), copies_of(place))
        try:
            failed = _failing(place, copy.deepcopy(oracle), chosen, workload, number, error)
        except Violation as err:
            raise Violation(f"call {number} to the disk failed with {errno.errorcode[error]}: {err}") from err
        shutil.rmtree(place)
        shutil.rmtree(copies_of(place), ignore_errors=True)
        if not failed:
            return explored
        explored.failures += 1
    raise AssertionError("counting has no end")


def _counting(every: int) -> Iterator[int]:
    number = 1
    while True:
        yield number
        number += every


def _failing(place: Path, oracle: Oracle, chosen: Settings, workload: Workload, number: int, error: int) -> bool:
    """Do the calls, the failing one once more; return whether any failed."""
    with recording(place, number, error) as layer:
        try:
            with open_store(place, settings=chosen, clock=lambda: oracle.now, create=True) as store:
                _carried_on(store, oracle, workload, layer)
        except RetryableError:
            if not layer.has_failed:
                raise
            oracle.in_flight = None
            with open_store(place, settings=chosen, clock=lambda: oracle.now, create=True) as store:
                _carried_on(store, oracle, workload, layer)
    with open_store(place, settings=chosen, clock=lambda: oracle.now, create=True) as store:
        _compare(store, oracle)
        damage = store.verify().damage
        if damage:
            raise Violation(f"verify names {damage[0]}")
        left = [path.name for path in (place / SCRATCH).glob("*")]
        if left and layer.has_failed:  # its removal may have failed: the next writer deletes it
            store.close()
            store.put("sweeps", b"")
            left = [path.name for path in (place / SCRATCH).glob("*")]
        if left:
            raise Violation(f"half-written: {left}")
    return layer.has_failed


def _carried_on(store: Store, oracle: Oracle, workload: Workload, layer: RecordingOs) -> None:
    for call in workload.calls:
        if not possible(oracle, call):
            continue
        oracle.begin(*_begin(store, oracle, call))
        failed_before = layer.has_failed
        try:
            perform(store, call)
        except Violation:
            if not isinstance(call, Repair) or failed_before or not layer.has_failed:
                raise
            perform(
                store, call
            )  # the release of repaired chunks failed: the report says so, and another run repeats it
            oracle.acknowledge()
        except RetryableError as err:
            if failed_before or not layer.has_failed:
                raise Violation(f"{call}: {err}, and nothing had failed since") from err
            _compare(store, oracle)  # through the same handle
            if possible(oracle, call):
                begun = _begin(store, oracle, call)
                oracle.begin(*((Gc(0), *begun[1:]) if isinstance(call, Gc) else begun))
                perform(store, call)
                oracle.acknowledge()
        else:
            oracle.acknowledge()
        _compare(store, oracle)

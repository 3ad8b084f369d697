"""Race two calls.

Invariant: one call is held at a step, by name and number, while another is done: every step in order, none at random.

put at each step of gc          done, and restores whatever this GC run and the next ones free
gc at each step of put          refused (StoreLocked), by this Store and by another
undelete at each step of gc     before the deletion: the version stays; after it: the version is deleted gc at each
step of undelete     the same commit at each step of commit   two that choose the same number: each becomes a version
of its own a manifest that was missing     pending delete meanwhile, retained when it is back (marking confirms
nominations) a writer that sleeps            SIGSTOP: no other process takes its store, however late it is
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from nearkin.store import Store, open_store
from nearkin_shared.errors import NearkinError, NotFound, StoreLocked
from nearkin_shared.objectstore.base import AlreadyExists
from nearkin_shared.objectstore.local import LocalObjectStore
from nearkin_shared.storage.manifests import ManifestStore
from nearkin_shared.utils import failpoints
from tests.support.checks.inspection import check_index_equals_a_rebuilt_one
from tests.support.data.samples import small_manifest
from tests.support.data.stores import stored_bytes
from tests.support.engines.crash_child import CHOSEN, START, content
from tests.support.engines.model import DAY, Violation

HELD_SECONDS_MAX = 2.0
"""Time after which a call that waits for the held one continues after it."""
EXCLUSIVE_SECONDS = 0.2
"""Within an exclusive section of a GC run writers wait for its end; readers and deletions do not."""
UNRACED_STEPS = frozenset({"index.writing", "object.folder-made"})
"""Steps at which LMDB's only writer is held, or the lock of a folder that is being made: the other call would wait."""
STEPS_MAX = 500
GC_RUNS_AFTER = 4


@dataclass(slots=True)
class Scene:
    """A store with data pending delete and due, a deleted version, and versions that must restore."""

    root: Path
    now: float = START
    expected: dict[tuple[str, int], bytes] = field(default_factory=dict)

    def open(self) -> Store:
        """Open the store with the scene's clock."""
        return open_store(self.root, settings=CHOSEN, clock=lambda: self.now, create=True)

    def check(self, store: Store) -> None:
        """Raise Violation if an expected version does not restore, now or after later GC runs, or sums drift."""
        for number in range(GC_RUNS_AFTER):
            for (key, version), data in self.expected.items():
                try:
                    if store.get(key, version).read() != data:
                        raise Violation(f"{(key, version)}: other bytes, {number} GC runs later")
                except NearkinError as err:
                    raise Violation(f"{(key, version)}, {number} GC runs later: {type(err).__name__}: {err}") from err
            damage = store.verify().damage
            if damage:
                raise Violation(f"{number} GC runs later verify names {damage[0]}")
            counted, stored = store.stats().ledger.stored_bytes, stored_bytes(self.root)
            if counted != stored:
                raise Violation(f"{number} GC runs later {counted} bytes are counted, and {stored} are stored")
            self.now += 2 * DAY
            store.gc()
        check_index_equals_a_rebuilt_one(store)


def scene(folder: Path) -> Scene:
    """Make a store: `b` and the first of `a` are pending delete and due; the first of `u` was just deleted."""
    made = Scene(folder / "s")
    with made.open() as store:
        list(store.put_many([("a", content(0)), ("b", content(1)), ("u", content(1) + content(0)), ("u", content(2))]))
        store.put("a", content(3))
        store.delete("b")
        store.delete("a", 1)
        made.now += 2 * DAY
        store.delete("u", 1)
        store.gc()
        made.now += 2 * DAY
    made.expected = {("a", 2): content(3), ("u", 2): content(2)}
    return made


def at_each_step(
    folder: Path,
    held: Callable[[Scene, Store], object],
    other: Callable[[Scene, Store], object],
    *,
    every: int = 1,
    make: Callable[[Path], Scene] = scene,
    first: Callable[[Scene, Store], object] = lambda *_: None,
) -> int:
    """Hold `held` at its n-th failpoint while `other` is done, for each n; return the number of failpoints.

    `first` is done before, each time, by the Store of both.
    """
    step = 1
    while step < STEPS_MAX:
        step_folder = folder / f"step-{step}"
        made = make(step_folder)
        if not _held_at(made, step, held, other, first):
            return step - 1
        shutil.rmtree(step_folder)
        step += every
    raise AssertionError(f"more than {STEPS_MAX} steps")


def _held_at(
    made: Scene,
    step: int,
    held: Callable[[Scene, Store], object],
    other: Callable[[Scene, Store], object],
    first: Callable[[Scene, Store], object],
) -> bool:
    names: list[str] = []
    failures: list[BaseException] = []
    threads: list[threading.Thread] = []
    main = threading.Lock()

    def run(store: Store) -> None:
        try:
            other(made, store)
        except BaseException as err:
            failures.append(err)

    def watch(name: str) -> None:
        with main:
            if threads or name in UNRACED_STEPS:
                return
            names.append(name)
            if len(names) != step:
                return
            threads.append(thread := threading.Thread(target=run, args=(store,)))
        thread.start()
        thread.join(EXCLUSIVE_SECONDS if store._index.crossing.is_exclusive_here else HELD_SECONDS_MAX)

    with made.open() as store:
        first(made, store)
        failpoints.arm((), watch)
        try:
            held(made, store)
        finally:
            failpoints.disarm()
            for thread in threads:
                thread.join()
        if len(names) < step:
            return False
        where = names[step - 1]
        if failures:
            raise Violation(f"held at step {step}, {where}: {failures[0]!r}") from failures[0]
        try:
            made.check(store)
        except Violation as err:
            raise Violation(f"held at step {step}, {where}: {err}") from err
    return True


# --- who meets whom --------------------------------------------------------------------------------------------------


def put_while_collecting(folder: Path, every: int = 1) -> int:
    """Put dead data at each step of a GC run: duplicates and bases during marking, a commit during the sweep."""

    def other(made: Scene, store: Store) -> None:
        data = content(1) + content(6)
        made.expected["new", store.put("new", data).info.version] = data

    return at_each_step(folder, lambda _, store: store.gc(), other, every=every)


def collect_while_putting(folder: Path, every: int = 1) -> int:
    """Do two GC runs, a grace apart, at each step of a put that depends on the data they would free."""
    data = content(1) + content(6)

    def held(_: Scene, store: Store) -> None:
        store.put("new", data)

    def other(made: Scene, store: Store) -> None:
        made.expected["new", 1] = data
        for _ in range(3):
            made.now += 2 * DAY
            for collecting in (store, made.open()):
                try:
                    collecting.gc()
                except StoreLocked:
                    continue
                finally:
                    if collecting is not store:
                        collecting.close()
                if store._puts.at_work:
                    raise Violation("a GC run ended while a put was active")

    return at_each_step(folder, held, other, every=every)


def _undeleted_late(made: Scene, store: Store) -> None:
    """Undelete a version whose window is over, by a clock that was set back."""
    offset = 2 * DAY - 3600
    made.now -= offset
    try:
        store.undelete("u", 1)
    except NotFound:
        pass
    else:
        made.expected["u", 1] = content(1) + content(0)
    finally:
        made.now += offset


def undelete_while_collecting(folder: Path, every: int = 1) -> int:
    """Undelete at each step of a GC run."""
    return at_each_step(folder, lambda _, store: store.gc(), _undeleted_late, every=every)


def collect_while_undeleting(folder: Path, every: int = 1) -> int:
    """Do a GC run at each step of an undeletion."""

    def other(made: Scene, store: Store) -> None:
        made.now += 2 * DAY
        store.gc()
        made.now -= 2 * DAY

    return at_each_step(folder, _undeleted_late, other, every=every)


def delete_while_putting(folder: Path, every: int = 1) -> int:
    """Delete all versions of a key at each step of its put: the new version stays if it was committed later."""
    data = content(9)

    def held(_: Scene, store: Store) -> None:
        version = store.put("a", data).info.version
        if version != 3:
            raise Violation(f"the put took number {version}, 3 was next")

    def other(made: Scene, store: Store) -> None:
        store.delete("a")
        made.expected.pop(("a", 2))
        if all((entry.key, entry.version) != ("a", 3) for entry in store.list_deleted()):
            made.expected["a", 3] = data

    return at_each_step(folder, held, other, every=every)


def commit_while_committing(folder: Path) -> int:
    """Commit a key twice without a lock, as services do: the second committer takes the next number."""
    step = 1
    while step < STEPS_MAX:
        root = folder / f"step-{step}"
        root.mkdir(parents=True)
        names: list[str] = []
        threads: list[threading.Thread] = []

        def watch(
            name: str,
            root: Path = root,
            names: list[str] = names,
            threads: list[threading.Thread] = threads,
            at: int = step,
        ) -> None:
            if not threads:
                names.append(name)
                if len(names) == at:
                    threads.append(thread := threading.Thread(target=_commit, args=(root, 2)))
                    thread.start()
                    thread.join(HELD_SECONDS_MAX)

        failpoints.arm((), watch)
        try:
            _commit(root, 1)
        finally:
            failpoints.disarm()
            for thread in threads:
                thread.join()
        if not threads:
            return step - 1
        manifests = ManifestStore(LocalObjectStore(root))
        found = {made.version: made.size_bytes for made in (manifests.read(name) for name, _ in manifests.names())}
        if found.keys() != {1, 2} or set(found.values()) != {1, 2}:
            raise Violation(f"held at step {step}, {names[-1]}: two commits, and left are versions and sizes {found}")
        step += 1
    raise AssertionError(f"more than {STEPS_MAX} steps")


def _commit(root: Path, size_bytes: int) -> None:
    """Commit a version of one key under the next free number."""
    manifests = ManifestStore(LocalObjectStore(root))  # its own, as in another process
    for version in range(1, 10):
        try:
            manifests.put(replace(small_manifest(), version=version, size_bytes=size_bytes))
        except AlreadyExists:
            continue
        return


def lose_manifest(folder: Path) -> int:
    """Lose a manifest and the index, let a GC run mark its data, restore it: the next run retains the data."""
    made = scene(folder)
    with made.open() as store:
        data = content(4) + content(7)
        made.expected["k", store.put("k", data).info.version] = data
        (path,) = [made.root / name for name, _ in store._manifests.names() if store._manifests.read(name).key == "k"]
        hidden = folder / "away"
        path.rename(hidden)
        store.rebuild_index()  # else the index lists the version, and each GC run refuses to start
        made.now += 2 * DAY
        pending = store.gc().pending_delete_containers
        if not pending:
            raise Violation("nothing is pending delete: the scene tests nothing")
        hidden.rename(path)
        made.now += 2 * DAY
        store.gc()
        store.rebuild_index()
        made.check(store)
    return pending


SLEEPER = """
import sys
from nearkin_shared.utils import failpoints
from nearkin import open_store
from tests.support.engines.crash_child import CHOSEN, START, DAY, content
with open_store(sys.argv[1], settings=CHOSEN, clock=lambda: START + 4 * DAY, create=True) as store:
    failpoints.arm(sys.argv[2])
    print(store.put("new", content(1) + content(6)).info.version, flush=True)
"""


def stopped_writer(folder: Path, point: str = "object.synced", count: int = 2) -> None:
    """Stop a writer during a put for ten days by the clock: other writers are refused; then it continues."""
    made = scene(folder)
    words = [sys.executable, "-c", SLEEPER, str(made.root), f"{point}:{count}:stop"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment) as writer:
        try:
            _, status = os.waitpid(writer.pid, os.WUNTRACED)
            if not os.WIFSTOPPED(status):
                raise Violation(f"the writer did not come to {point}: {status}")
            made.now += 10 * DAY
            with made.open() as store:
                for call in (store.gc, lambda: store.put("a", b"mine"), store.rebuild_index):
                    try:
                        call()
                    except StoreLocked:
                        continue
                    raise Violation("another writer took the store of a writer that sleeps")
                for (key, version), data in made.expected.items():
                    if store.get(key, version).read() != data:
                        raise Violation(f"{(key, version)}: other bytes while a writer sleeps")
            os.kill(writer.pid, signal.SIGCONT)
            output, _ = writer.communicate(timeout=60)
        finally:
            writer.kill()
    made.expected["new", int(output)] = content(1) + content(6)
    with made.open() as store:
        made.check(store)

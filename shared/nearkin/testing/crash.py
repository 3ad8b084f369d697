"""Killed stores. Invariant: the same seed makes the same calls, contents and kills; what a store answers is checked in
a process of its own before the next is killed.

    this process: imports all, opens nothing (obstore must not be used before a fork)
      fork -> open, check against the oracle, calls, SIGKILL at the n-th passing of a failpoint    | some twenty times
      fork -> open, check, collect until nothing is left to free: no orphans, index = a rebuilt one | once a store
"""

from __future__ import annotations

import os
import pickle
import random
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import nearkin.index.lmdb
import nearkin.local_gc
import nearkin.runners.embedded
import nearkin.sums
from nearkin import failpoints
from nearkin.api import Store, open_store
from nearkin.config import Settings
from nearkin.errors import NearkinError
from nearkin.testing import inspection
from nearkin.testing.generated import mutated, random_bytes, text_like
from nearkin.testing.oracle import (
    DAY,
    Call,
    Delete,
    Forget,
    Gc,
    Oracle,
    Put,
    Rebuild,
    Undelete,
    Violation,
    check_bytes,
)
from nearkin.testing.stores import SMALL, settings

START = 1_764_000_000.0
KEYS = ("a", "b", "ключ/🔑")
FAMILIES = 3
LIVE_VERSIONS_MAX = 14
"""Above it versions are forgotten, so that a check stays at some 20 ms."""
KILLS_A_STORE = 24
CHILD_SECONDS_MAX = 120
COLLECTIONS_MAX = 12
CHOSEN = settings(
    SMALL,
    {
        "deletion": {"undelete_seconds": DAY},
        "gc": {"grace_seconds": DAY, "compact_below": 0.9, "bytes_per_second": 1 << 30},
        "features": {"algorithm": "odess"},
    },
)
GROUPS: Mapping[str, str] = {"compact": "gc", "commit": "put", "index": "any", "object": "any"}
"""Which calls pass a group of points, where it is not the group's own name."""


@lru_cache(64)
def content(number: int) -> bytes:
    """Return the bytes that a number stands for: a family's first content after `number // FAMILIES` edits."""
    family, edits = number % FAMILIES, number // FAMILIES
    sizes = (180_000, 90_000, 4_000)
    first = (text_like, random_bytes, text_like)[family](sizes[family], family)
    return mutated(first, number, edits=1 + edits % 40) if edits else first


@dataclass(frozen=True, slots=True)
class Chosen:
    """One child: what it does and where it dies."""

    calls: tuple[Call, ...]
    armed: failpoints.Armed | None


@dataclass(slots=True)
class Outcome:
    """What became of a run."""

    seed: int
    kills: int = 0
    children: int = 0
    stores: int = 0
    calls: int = 0
    by_point: dict[str, int] = field(default_factory=dict)
    violations: list[str] = field(default_factory=list)
    seconds: float = 0.0


class Campaign:
    """Stores that are killed again and again. `plant` is called in each child before it opens anything."""

    def __init__(
        self,
        folder: Path,
        seed: int,
        *,
        chosen: Settings = CHOSEN,
        points: Sequence[str] = tuple(failpoints.POINTS),
        plant: Callable[[], None] | None = None,
    ) -> None:
        self._folder = folder
        self._draw = random.Random(seed)
        self._chosen = chosen
        self._points = tuple(points)
        self._plant = plant
        self._last = ""
        self._typical = dict.fromkeys(points, 2)
        self.outcome = Outcome(seed)

    def run(self, kills: int, progress: Callable[[Outcome], None] | None = None) -> Outcome:
        """Go on until so many children were killed, or something is wrong."""
        started = time.perf_counter()
        while self.outcome.kills < kills and not self.outcome.violations:
            self._store(min(KILLS_A_STORE, kills - self.outcome.kills))
            self.outcome.seconds = time.perf_counter() - started
            if progress is not None:
                progress(self.outcome)
        return self.outcome

    # --- one store ---------------------------------------------------------------------------------------------------

    def _store(self, kills: int) -> None:
        root = self._folder / f"store-{self.outcome.stores}"
        oracle, before = Oracle(START), self.outcome.kills
        number = 0
        for _ in range(8 * kills):  # a count that is never reached kills nobody
            if self.outcome.kills - before >= kills or self.outcome.violations:
                break
            plan, number = self._plan(oracle, number)
            self._child(root, oracle, plan)
        if not self.outcome.violations:
            self._child(root, oracle, None)
        self.outcome.stores += 1
        if not self.outcome.violations:
            shutil.rmtree(root, ignore_errors=True)

    def _plan(self, oracle: Oracle, number: int) -> tuple[Chosen, int]:
        """Choose calls, and a point on their way."""
        point = self._point()
        group = point.partition(".")[0]
        group = GROUPS.get(group, group)
        if group == "any":
            group = self._draw.choice(("put", "delete", "gc", "rebuild"))
        calls, shadow = [], _shadow(oracle)

        def add(call: Call | None) -> None:
            if call is not None:
                calls.append(call)
                shadow.begin(call)
                shadow.done()

        def put(count: int) -> Put:
            nonlocal number
            items = []
            for _ in range(count):
                # mostly the next of its family, some anew: so there are duplicates, deltas and garbage
                again = self._draw.random() < 0.2 and number > 0
                items.append((self._draw.choice(KEYS), self._draw.randrange(number) if again else number))
                number += not again
            return Put(tuple(items))

        if not shadow.contents or self._draw.random() < 0.3:
            add(put(self._draw.choice((1, 1, 3))))
        if len(shadow.live) > LIVE_VERSIONS_MAX:
            add(Forget(2))
        match group:
            case "put":
                add(put(self._draw.choice((1, 1, 4))))
            case "delete":
                add(put(2))
                add(self._deletion(shadow))
                if self._draw.random() < 0.5:
                    add(self._undeletion(shadow))
            case "gc":
                add(self._deletion(shadow))
                for _ in range(self._draw.choice((2, 3, 4))):
                    add(Gc(self._draw.choice((0, 2, 2, 2))))
            case _:
                add(Rebuild(lost=self._draw.random() < 0.5))
                add(put(1))
        count = self._draw.randint(1, max(1, self._typical[point]))
        return Chosen(tuple(calls), failpoints.Armed(point, count, "kill")), number

    def _point(self) -> str:
        """Choose a point: half of the times among those that were met least, which some are hard to meet."""
        beside_older = [point for point in ("gc.renewed", "gc.replaced") if point in self._points]
        if self._last in ("compact.put", "compact.renewed") and beside_older and self._draw.random() < 0.8:
            return self._draw.choice(beside_older)  # only where a round died between two generations
        least = min(self.outcome.by_point.get(point, 0) for point in self._points)
        rare = [point for point in self._points if self.outcome.by_point.get(point, 0) <= least + 1]
        return self._draw.choice(rare if self._draw.random() < 0.5 else self._points)

    def _deletion(self, oracle: Oracle) -> Call | None:
        keys = sorted({key for key, _ in oracle.live})
        if not keys:
            return None
        if self._draw.random() < 0.3:
            return Forget(self._draw.choice((1, 2)))
        key = self._draw.choice(keys)
        versions = oracle.versions(key)
        return Delete(key, None if self._draw.random() < 0.5 else self._draw.choice(versions)[1])

    def _undeletion(self, oracle: Oracle) -> Call | None:
        found = sorted(version for version, until in oracle.until.items() if until >= oracle.now)
        return Undelete(*self._draw.choice(found)) if found else None

    # --- one child ---------------------------------------------------------------------------------------------------

    def _child(self, root: Path, oracle: Oracle, plan: Chosen | None) -> None:
        for call in plan.calls if plan else ():  # made here, so that every child has them at hand
            for _, number in call.items if isinstance(call, Put) else ():
                content(number)
        sys.stdout.flush()
        read, write = os.pipe()
        child = os.fork()
        if not child:
            os.close(read)
            self._in_child(root, oracle, plan, write)
        os.close(write)
        said = _read(read, child)
        _, status = os.waitpid(child, 0)
        self._follow(oracle, said, status, root, plan)

    def _in_child(self, root: Path, oracle: Oracle, plan: Chosen | None, write: int) -> None:
        code = 1
        try:
            if self._plant is not None:
                self._plant()
            _work(root, oracle, plan, self._chosen, lambda *said: _say(write, said))
            code = 0
        except Violation as err:
            _say(write, ("violation", str(err)))
        except BaseException as err:
            _say(write, ("violation", f"{type(err).__name__}: {err}\n{traceback.format_exc()}"))
        finally:
            os._exit(code)

    def _follow(
        self, oracle: Oracle, said: list[tuple[object, ...]], status: int, root: Path, plan: Chosen | None
    ) -> None:
        outcome = self.outcome
        outcome.children += 1
        for what, *more in said:
            match what:
                case "settled":
                    settled = more[0]
                    assert isinstance(settled, Oracle)
                    for name in Oracle.__slots__:
                        setattr(oracle, name, getattr(settled, name))
                case "begin":
                    oracle.begin(*more)  # type: ignore[arg-type]
                case "done":
                    oracle.done()
                    outcome.calls += 1
                case "passings":
                    assert isinstance(more[0], dict)
                    self._typical.update(more[0])
                case _:
                    outcome.violations.append(f"{root}, {plan}: {more[0]}")
        if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL and plan is not None and plan.armed:
            outcome.kills += 1
            point = self._last = plan.armed.name
            outcome.by_point[point] = outcome.by_point.get(point, 0) + 1
        elif (not os.WIFEXITED(status) or os.WEXITSTATUS(status)) and not outcome.violations:
            outcome.violations.append(f"{root}, {plan}: the child ended with status {status}")


def _shadow(oracle: Oracle) -> Oracle:
    """Return a copy that calls may be tried on; one in flight is taken for done."""
    copy = Oracle(oracle.now, oracle.undelete_seconds, dict(oracle.contents), dict(oracle.until), set(oracle.gone))
    if oracle.in_flight is not None and not isinstance(oracle.in_flight, Undelete | Delete | Forget):
        copy.in_flight = oracle.in_flight
        copy.done()
    return copy


def _say(write: int, said: tuple[object, ...]) -> None:
    data = pickle.dumps(said)
    os.write(write, len(data).to_bytes(4, "little") + data)


def _read(read: int, child: int) -> list[tuple[object, ...]]:
    """Return what a child said until it ended; one that hangs is ended."""
    import select

    deadline, data = time.monotonic() + CHILD_SECONDS_MAX, bytearray()
    said: list[tuple[object, ...]] = []
    while True:
        if not select.select([read], [], [], max(0.0, deadline - time.monotonic()))[0]:
            os.kill(child, signal.SIGABRT)
            said.append(("violation", f"hung for {CHILD_SECONDS_MAX} s"))
            break
        piece = os.read(read, 1 << 16)
        if not piece:
            break
        data += piece
    os.close(read)
    at = 0
    while at + 4 <= len(data) and at + 4 + (length := int.from_bytes(data[at : at + 4], "little")) <= len(data):
        said.append(pickle.loads(data[at + 4 : at + 4 + length]))
        at += 4 + length
    return said


# --- what a child does -----------------------------------------------------------------------------------------------


def _work(root: Path, oracle: Oracle, plan: Chosen | None, chosen: Settings, say: Callable[..., None]) -> None:
    if plan is not None and plan.armed is not None and plan.armed.name.startswith("rebuild."):
        failpoints.arm([plan.armed])  # recovery is part of what may die
    if root.is_dir():
        inspection.check_index_names_only_what_is_there(root, chosen)
    with open_store(root, settings=chosen, clock=lambda: oracle.now) as store:
        oracle.settle(inspection.seen(store))
        check_bytes(_restored(store, oracle), {version: content(oracle.contents[version]) for version in oracle.live})
        say("settled", oracle)
        if plan is None:
            _end(store, oracle, chosen)
            return
        if plan.armed is not None and not plan.armed.name.startswith("rebuild."):
            failpoints.arm([plan.armed])
        for call in plan.calls:
            if not possible(oracle, call):
                continue
            now_us = (oracle.now + (call.days * DAY if isinstance(call, Gc) else 0)) * 1e6
            due = {
                container
                for container, entry in store._condemned.read().items()
                if entry.at_us + chosen.gc.grace_seconds * 1_000_000 <= now_us
            }
            begun = call, inspection.containers(root), frozenset(due)
            say("begin", *begun)
            oracle.begin(*begun)
            perform(store, call)
            oracle.check_containers(inspection.containers(root))
            oracle.done()
            say("done")
        say("passings", failpoints.disarm())


def possible(oracle: Oracle, call: Call) -> bool:
    """Return whether a call has anything to do: what died before may have ended otherwise than was planned."""
    if isinstance(call, Delete):
        return bool(oracle.going(call))
    return not isinstance(call, Undelete) or oracle.until.get((call.key, call.version), 0.0) >= oracle.now


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
            from nearkin.config import RetentionPolicy

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


def _restored(store: Store, oracle: Oracle) -> dict[tuple[str, int], bytes]:
    found = {}
    for key, version in sorted(oracle.live):
        try:
            found[key, version] = store.get(key, version).read()
        except NearkinError as err:
            raise Violation(f"{(key, version)}: cannot be restored: {type(err).__name__}: {err}") from err
    return found


def _end(store: Store, oracle: Oracle, chosen: Settings) -> None:
    """Collect until nothing is left to free; then delete all, and collect again: nothing may be left over."""
    damage = store.verify().damage
    if damage:
        raise Violation(f"verify names {damage[:3]}")
    _collect(store, oracle)
    check_bytes(_restored(store, oracle), {version: content(oracle.contents[version]) for version in oracle.live})
    inspection.check_no_orphans(store)
    inspection.check_index_is_the_one_a_rebuild_makes(store)
    for key in sorted({key for key, _ in oracle.live}):
        call = Delete(key, None)
        oracle.begin(call)
        perform(store, call)
        oracle.done()
    _collect(store, oracle)
    oracle.settle(inspection.seen(store))
    left = inspection.containers(store.root)
    if left:
        raise Violation(f"all was deleted and collected, and {len(left)} containers are left")


def _collect(store: Store, oracle: Oracle) -> None:
    for _ in range(COLLECTIONS_MAX):
        oracle.begin(Gc(2))
        report = store.gc()
        oracle.done()
        if not report.freed_bytes and not report.condemned_containers:
            return
    raise Violation(f"{COLLECTIONS_MAX} rounds, and the last still freed {report.freed_bytes} bytes: {report}")


_IMPORTED_BEFORE_FORKS = (nearkin.index.lmdb, nearkin.local_gc, nearkin.runners.embedded, nearkin.sums)

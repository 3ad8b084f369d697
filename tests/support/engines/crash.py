"""Kill stores at failpoints.

Invariant: the same seed makes the same calls, contents and kills; a separate process checks the store's answers
before the next one is killed.

    this process: imports all, opens nothing (obstore must not be used before a fork)
      fork -> open, check against the oracle, calls, SIGKILL at the n-th passing of a failpoint    | some twenty times
      fork -> open, check, collect until nothing is left to free: no orphans, index = a rebuilt one | once a store
"""

from __future__ import annotations

import faulthandler
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
from pathlib import Path

import cryptography.hazmat.primitives.ciphers.aead

import nearkin.embedded.runner
import nearkin.local.local_gc
import nearkin.local.local_repair
import nearkin_shared.index.lmdb.lmdb_index
import nearkin_shared.stats
from nearkin_shared.config.settings import Settings
from nearkin_shared.utils import failpoints
from nearkin_shared.utils.frozen import frozen
from tests.support.data.stores import ENCRYPTED, settings
from tests.support.engines.crash_child import CHOSEN, GATHERING, START, content, work
from tests.support.engines.model import (
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
)

KEYS = ("a", "b", "ключ/🔑")
LIVE_VERSIONS_MAX = 14
"""Above this number versions are forgotten, so that a check stays at some 20 ms."""
KILLS_A_STORE = 24
CHILD_SECONDS_MAX = 600
"""A child that takes longer hangs: one works for about a second on an idle machine, for a minute on a loaded one."""
VARIANTS: Sequence[Mapping[str, Mapping[str, object]]] = (
    {},
    {"gc": {"mode": "hybrid"}},
    {"gc": {"mode": "hybrid"}, "storage": {"parity": "rs-4-2"}},
    ENCRYPTED,
    {"gc": {"mode": "hybrid"}, "storage": {**ENCRYPTED["storage"], "parity": "rs-4-2"}},
    GATHERING,
    {**GATHERING, **ENCRYPTED},
)
"""Changes of the settings: each store uses a random one."""
GROUPS: Mapping[str, str] = {
    "compact": "gc",
    "rebase": "gc",
    "merge": "gc",
    "recompress": "gc",
    "ledger": "gc",
    "commit": "put",
    "undelete": "delete",
    "quarantine": "repair",
    "index": "any",
    "object": "any",
    "parity": "any",
}
"""Calls that pass a group of failpoints, unless they have the group's own name."""
CHUNK_REPAIR_POINTS = ("repair.put", "repair.renewed", "repair.removed", "repair.released")
"""Failpoints of a repair from copies of chunks, which parity makes unnecessary."""


@frozen
class Chosen:
    """Plan of one child: its calls and the failpoint that kills it."""

    calls: tuple[Call, ...]
    armed: failpoints.ArmedFailpoint | None


@dataclass(slots=True)
class Outcome:
    """Result of a run."""

    seed: int
    kills: int = 0
    children: int = 0
    stores: int = 0
    calls: int = 0
    by_point: dict[str, int] = field(default_factory=dict)
    violations: list[str] = field(default_factory=list)
    seconds: float = 0.0


class Campaign:
    """Stores that are killed repeatedly.

    `plant` is called in each child before it opens anything.
    """

    def __init__(
        self,
        folder: Path,
        seed: int,
        *,
        chosen: Settings = CHOSEN,
        variants: Sequence[Mapping[str, Mapping[str, object]]] = ({},),
        points: Sequence[str] = tuple(failpoints.STORE_POINTS),
        plant: Callable[[], None] | None = None,
        journal: Callable[[Mapping[str, object]], None] | None = None,
    ) -> None:
        """`journal` receives the plan of each child before it starts, and its end."""
        self._folder = folder
        self._journal = journal or (lambda _: None)
        self._draw = random.Random(seed)
        self._chosen = chosen
        self._variants = tuple(variants)
        self._settings = chosen
        self._all_points = self._points = tuple(points)
        self._plant = plant
        self._last = ""
        self._passings = dict.fromkeys(points, 2)
        self.outcome = Outcome(seed)

    def run(self, kills: int, progress: Callable[[Outcome], None] | None = None) -> Outcome:
        """Continue until `kills` children were killed, or a violation is found."""
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
        variant = self._variant()
        self._settings = settings(self._chosen, variant)
        self._points = tuple(point for point in self._all_points if _is_passed(point, self._settings))
        self._journal({"store": root.name, "settings": repr(variant)})
        number = 0
        for _ in range(8 * kills):  # a count that is never reached kills no child
            if self.outcome.kills - before >= kills or self.outcome.violations:
                break
            plan, number = self._plan(oracle, number)
            self._journal({"store": root.name, "child": self.outcome.children, "plan": repr(plan)})
            self._child(root, oracle, plan)
        if not self.outcome.violations:
            self._child(root, oracle, None)
        self.outcome.stores += 1
        if not self.outcome.violations:
            shutil.rmtree(root, ignore_errors=True)

    def _variant(self) -> Mapping[str, Mapping[str, object]]:
        """Choose the settings of a store, mostly such that they reach the failpoints met least often."""
        if len(self._variants) == 1:
            return self._variants[0]
        least = min(self._all_points, key=lambda point: self.outcome.by_point.get(point, 0))
        fitting = [one for one in self._variants if _is_passed(least, settings(self._chosen, one))]
        return self._draw.choice(fitting if fitting and self._draw.random() < 0.5 else self._variants)

    def _plan(self, oracle: Oracle, number: int) -> tuple[Chosen, int]:
        """Choose calls, and a failpoint among their steps."""
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
                shadow.acknowledge()

        def put(count: int) -> Put:
            nonlocal number
            items = []
            for _ in range(count):
                # mostly the next content of its family, some unrelated: so there are duplicates, deltas and garbage
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
                if point.startswith("undelete.") or self._draw.random() < 0.5:
                    add(self._undeletion(shadow))
            case "gc":
                add(self._deletion(shadow))
                for _ in range(self._draw.choice((2, 3, 4))):
                    add(Gc(self._draw.choice((0, 2, 2, 2))))
            case "repair":
                broken = Break(
                    self._draw.randrange(1 << 30),
                    manifest=self._draw.random() < 0.2,
                    verify=self._draw.random() < 0.7,
                    by_copy=self._draw.random() < 0.3,
                    contents=number,
                )
                add(broken)
                if self._draw.random() < 0.5 and shadow.live:  # repairs the content that it stores again
                    again = shadow.contents[self._draw.choice(sorted(shadow.live))]
                    add(Put(((self._draw.choice(KEYS), again),)))
                add(Repair(broken))
            case _:
                add(Rebuild(lost=self._draw.random() < 0.5))
                add(put(1))
        count = self._draw.randint(1, max(1, self._passings[point]))
        return Chosen(tuple(calls), failpoints.ArmedFailpoint(point, count, "kill")), number

    def _point(self) -> str:
        """Choose a failpoint: half of the time among those met least often, as some are hard to reach."""
        older_exists = [point for point in ("gc.renewed", "gc.replaced") if point in self._points]
        if self._last in ("compact.put", "compact.renewed") and older_exists and self._draw.random() < 0.8:
            return self._draw.choice(older_exists)  # only where a GC run died between two generations
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
        if not found:
            return None
        key, version = self._draw.choice(found)
        return Undelete(key, None if self._draw.random() < 0.5 else version)

    # --- one child ---------------------------------------------------------------------------------------------------

    def _child(self, root: Path, oracle: Oracle, plan: Chosen | None) -> None:
        for call in plan.calls if plan else ():  # made here, so that every child has the contents in memory
            for _, number in call.items if isinstance(call, Put) else ():
                content(number)
        sys.stdout.flush()
        read, write = os.pipe()
        child = os.fork()
        if not child:
            os.close(read)
            self._in_child(root, oracle, plan, write)
        os.close(write)
        messages = _read(read, child)
        _, status = os.waitpid(child, 0)
        self._follow(oracle, messages, status, root, plan)

    def _in_child(self, root: Path, oracle: Oracle, plan: Chosen | None, write: int) -> None:
        code = 1
        faulthandler.enable()  # a child that hangs is aborted, and prints where each of its threads waits
        try:
            if self._plant is not None:
                self._plant()
            calls, armed = (None, None) if plan is None else (plan.calls, plan.armed)
            work(root, oracle, calls, armed, self._settings, lambda *messages: _send(write, messages))
            code = 0
        except Violation as err:
            _send(write, ("violation", str(err)))
        except BaseException as err:
            _send(write, ("violation", f"{type(err).__name__}: {err}\n{traceback.format_exc()}"))
        finally:
            os._exit(code)

    def _follow(
        self, oracle: Oracle, messages: list[tuple[object, ...]], status: int, root: Path, plan: Chosen | None
    ) -> None:
        outcome = self.outcome
        begun = [repr(more[0]) for what, *more in messages if what == "begin"]
        self._journal({"child": outcome.children, "begun": begun, "status": status})
        outcome.children += 1
        for what, *more in messages:
            match what:
                case "settled":
                    settled = more[0]
                    assert isinstance(settled, Oracle)
                    for name in Oracle.__slots__:
                        setattr(oracle, name, getattr(settled, name))
                case "begin":
                    oracle.begin(*more)  # type: ignore[arg-type]
                case "done":
                    oracle.acknowledge()
                    outcome.calls += 1
                case "passings":
                    assert isinstance(more[0], dict)
                    self._passings.update(more[0])
                case _:
                    outcome.violations.append(f"{root}, {plan}: {more[0]}")
        if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL and plan is not None and plan.armed:
            outcome.kills += 1
            point = self._last = plan.armed.name
            outcome.by_point[point] = outcome.by_point.get(point, 0) + 1
        elif (not os.WIFEXITED(status) or os.WEXITSTATUS(status)) and not outcome.violations:
            outcome.violations.append(f"{root}, {plan}: the child ended with status {status}")


def _shadow(oracle: Oracle) -> Oracle:
    """Return a copy on which calls may be tried; a call in flight counts as done."""
    copy = Oracle(
        oracle.now,
        oracle.undelete_seconds,
        dict(oracle.contents),
        dict(oracle.until),
        set(oracle.collected),
        dict(oracle.deleted_by),
        calls=oracle.calls,
    )
    if oracle.in_flight is not None and not isinstance(oracle.in_flight, Undelete | Delete | Forget):
        copy.in_flight = oracle.in_flight
        copy.acknowledge()
    return copy


def _is_passed(point: str, chosen: Settings) -> bool:
    """Return whether these settings reach a failpoint: for example, parity repairs before a chunk copy can."""
    group, has_parity = point.partition(".")[0], chosen.storage.parity != "none"
    if point in CHUNK_REPAIR_POINTS:
        return not has_parity
    has_ledger, merges = chosen.gc.mode != "mark-sweep", int(chosen.gc.merge_block_bytes) > 0
    return {"ledger": has_ledger, "merge": merges, "parity": has_parity}.get(group, True)


def _send(write: int, messages: tuple[object, ...]) -> None:
    data = pickle.dumps(messages)
    os.write(write, len(data).to_bytes(4, "little") + data)


def _read(read: int, child: int) -> list[tuple[object, ...]]:
    """Return the messages of a child until it ended; end one that hangs."""
    import select

    deadline, data = time.monotonic() + CHILD_SECONDS_MAX, bytearray()
    messages: list[tuple[object, ...]] = []
    while True:
        if not select.select([read], [], [], max(0.0, deadline - time.monotonic()))[0]:
            os.kill(child, signal.SIGABRT)
            messages.append(("violation", f"hung for {CHILD_SECONDS_MAX} s"))
            break
        piece = os.read(read, 1 << 16)
        if not piece:
            break
        data += piece
    os.close(read)
    at = 0
    while at + 4 <= len(data) and at + 4 + (length := int.from_bytes(data[at : at + 4], "little")) <= len(data):
        messages.append(pickle.loads(data[at + 4 : at + 4 + length]))
        at += 4 + length
    return messages


_IMPORTED_BEFORE_FORKS = (
    cryptography.hazmat.primitives.ciphers.aead,
    nearkin_shared.index.lmdb.lmdb_index,
    nearkin.local.local_gc,
    nearkin.local.local_repair,
    nearkin.embedded.runner,
    nearkin_shared.stats,
)

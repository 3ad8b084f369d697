"""Explore power cuts of records that no put writes: keys, pauses, progress, tokens, key files, staged uploads.

    prepare, durable -> actions, recorded -> every prefix -> every world -> check -> the interrupted again -> check

Invariant: an action is acknowledged once it has returned; `check` receives the acknowledged and the interrupted ones.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from nearkin_shared.errors import NearkinError
from nearkin_shared.utils.frozen import frozen
from tests.support.engines.model import Violation
from tests.support.engines.power_cut import ExplorationResult, describe_tree, read_tree, world_key, write_tree
from tests.support.fakes.power_loss_disk import Disk, Step, recording

Results = Mapping[str, object]
"""Result of each acknowledged action by name."""
Action = Callable[[Path, Results], object]
"""Step in a folder, as in a process of its own; it receives the results of the actions before."""


@frozen
class RecordWorkload:
    """Actions on records.

    Each opens the folder again, as a separate process that knows nothing of the others.
    """

    actions: Mapping[str, Action]
    check: Callable[[Path, Results, str | None], None]
    """Check of the folder, given the acknowledged results and the interrupted action. Raises Violation."""
    prepare: Callable[[Path], None] = lambda _: None


def explore_records(folder: Path, workload: RecordWorkload) -> ExplorationResult:
    """Try every world of every prefix. Raises Violation naming the prefix and the world."""
    root, explored = folder / "recorded", ExplorationResult()
    root.mkdir(parents=True)
    workload.prepare(root)
    disk = Disk(read_tree(root))
    steps = _record(root, workload)
    done: dict[str, object] = {}
    begun: str | None = None
    seen: set[bytes] = set()
    for number, step in enumerate([Step("note"), *steps]):
        explored.steps[step.what] = explored.steps.get(step.what, 0) + 1
        match step.event:
            case ("begin", str(name)):
                begun = name
            case ("done", str(name), result):
                done, begun = {**done, name: result}, None
            case _:
                disk.apply(step)
        explored.prefixes += 1
        for tree in disk.worlds():
            key = world_key(tree, None, 2 * len(done) + (begun is not None))
            if key in seen:
                continue
            seen.add(key)
            explored.worlds += 1
            world = folder / "world"
            shutil.rmtree(world, ignore_errors=True)
            write_tree(world, tree)
            try:
                _check(world, workload, done, begun)
            except (AssertionError, NearkinError) as err:
                raise Violation(
                    f"power cut after step {number} ({step.what} {step.path or step.file or ''}), {begun or 'nothing'} "
                    f"interrupted, {', '.join(done) or 'nothing'} acknowledged, with {describe_tree(tree)}: "
                    f"{type(err).__name__}: {err}"
                ) from err
    return explored


def _record(root: Path, workload: RecordWorkload) -> list[Step]:
    with recording(root) as layer:
        done: dict[str, object] = {}
        for name, action in workload.actions.items():
            layer.note(("begin", name))
            done[name] = action(root, done)
            layer.note(("done", name, done[name]))
        return layer.steps


def _check(world: Path, workload: RecordWorkload, done: Results, begun: str | None) -> None:
    workload.check(world, done, begun)
    if begun is not None:
        again = {**done, begun: workload.actions[begun](world, done)}
        workload.check(world, again, None)

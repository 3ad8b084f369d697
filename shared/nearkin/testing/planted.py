"""Planted bugs. Invariant: each is one mistake that the product does not make, put into a child process alone, and each
is caught: an engine that finds none of these would find none of ours.

    python -m nearkin.testing.planted            every bug: what caught it, and what was said
    python -m nearkin.testing.planted NAME ...

What two mechanisms guard (a hit on what is condemned, say, is still spared by the next round's marking) is looked for
where the first of them is broken: in the index and the record as they lie on the disk.
"""

from __future__ import annotations

import json
import logging
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
import numpy as np

import nearkin.local_gc
import nearkin_delta.codecs
import nearkin_janitor.collect
import nearkin_janitor.plan
import nearkin_janitor.reach
import nearkin_janitor.roots
from nearkin.api import open_store
from nearkin.claims import SealedContainer
from nearkin.errors import NotFound
from nearkin.failpoints import failpoint
from nearkin.formats import columns
from nearkin.formats import container as container_format
from nearkin.formats.condemned import Condemned
from nearkin.index.lmdb import LmdbIndex
from nearkin.kernels import xdelta3
from nearkin.local_index import LocalIndex
from nearkin.runners.embedded import EmbeddedWriter
from nearkin.store import deletion, objects
from nearkin.store.containers import ContainerStore
from nearkin.store.lock import WriterLock
from nearkin.store.manifests import ManifestStore
from nearkin.testing import crash, races, torn
from nearkin.testing.oracle import Violation
from nearkin.testing.stores import containers, flip, settings

KILLS_MAX = 60
SEEDS = (6, 2, 1)
"""In the order of how soon they find what is hardest to find."""
CAUGHT, MISSED = "caught", "missed"


@dataclass(frozen=True, slots=True)
class Bug:
    """One mistake. `hunt` raises Violation where an engine catches it; `breaks` names what it is against."""

    mistake: str
    breaks: str
    engine: str
    plant: Callable[[], None]
    hunt: Callable[[Path, Callable[[], None]], None]


# --- hunts -----------------------------------------------------------------------------------------------------------


def _power(name: str) -> Callable[[Path, Callable[[], None]], None]:
    def hunt(folder: Path, plant: Callable[[], None]) -> None:
        plant()
        torn.explore(folder, torn.WORKLOADS[name])

    return hunt


def _killed(*points: str, codec: str = "patch") -> Callable[[Path, Callable[[], None]], None]:
    chosen = settings(crash.CHOSEN, {"delta": {"codec": codec}})

    def hunt(folder: Path, plant: Callable[[], None]) -> None:
        for seed in SEEDS:  # each child of the campaign plants it: this process forks, and opens nothing
            campaign = crash.Campaign(folder / str(seed), seed, chosen=chosen, points=points, plant=plant)
            for violation in campaign.run(KILLS_MAX).violations:
                raise Violation(violation)

    return hunt


def _raced(race: Callable[[Path], object]) -> Callable[[Path, Callable[[], None]], None]:
    def hunt(folder: Path, plant: Callable[[], None]) -> None:
        plant()
        race(folder)

    return hunt


def _flipped(folder: Path, plant: Callable[[], None]) -> None:
    """Flip bits of a container, one at a time: `verify` names each."""
    plant()
    with open_store(folder / "s", settings=crash.CHOSEN) as store:
        store.put("a", crash.content(2))
        store.put("a", crash.content(5))
    draw = random.Random(3)
    for path in containers(folder / "s"):
        size_bytes = path.stat().st_size
        for _ in range(60):
            at, bit = draw.randrange(size_bytes), draw.randrange(8)
            flip(path, at, bit)
            with open_store(folder / "s", settings=crash.CHOSEN) as store:
                damage = store.verify().damage
            flip(path, at, bit)
            if not damage:
                raise Violation(f"bit {bit} of byte {at} of {size_bytes} is another, and verify names nothing")


# --- mistakes --------------------------------------------------------------------------------------------------------


def _bytes_not_synced() -> None:
    def write(path: Path, data: objects.Payload) -> None:
        layer = vars(objects)["os"]
        descriptor = layer.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        layer.write(descriptor, memoryview(data).cast("B"))
        layer.close(descriptor)

    vars(objects)["_write_durably"] = write


def _name_not_synced() -> None:
    real = objects.sync_folder

    def sync(folder: Path) -> None:
        if not any(folder.glob("*.nkm")):
            real(folder)

    vars(objects)["sync_folder"] = sync


def _folder_not_synced() -> None:
    def make(self: objects.LocalObjects, folder: Path) -> None:
        for above in reversed([folder, *folder.parents]):
            if not above.exists():
                vars(objects)["os"].mkdir(above)

    _patch(objects.LocalObjects, "_make_folder", make)


def _create_overwrites() -> None:
    def put_new(self: objects.LocalObjects, name: str, data: objects.Payload) -> None:
        final = self._root / name
        if final.exists():
            raise objects.AlreadyExists(name)
        self._make_folder(final.parent)
        self._scratch.mkdir(exist_ok=True)
        temporary = self._scratch / f"{os.urandom(8).hex()}.part"
        objects._write_durably(temporary, data)
        failpoint("object.synced")
        os.replace(temporary, final)
        objects.sync_folder(final.parent)

    _patch(objects.LocalObjects, "put_new", put_new)


def _published_before_durable() -> None:
    real = EmbeddedWriter._commit

    def commit(self: EmbeddedWriter, item: Any) -> None:
        if isinstance(item, SealedContainer):
            self._index.publish(item.claims)
        real(self, item)

    _patch(EmbeddedWriter, "_commit", commit)


def _manifest_before_container() -> None:
    real_put, real_commit = ContainerStore.put, ManifestStore.put
    late: list[Callable[[], object]] = []

    def put(self: ContainerStore, container: Any, data: bytes, generation: int = 0) -> Any:
        late.append(lambda: real_put(self, container, data, generation))

    def commit(self: ManifestStore, manifest: Any) -> int:
        manifest_bytes = real_commit(self, manifest)
        while late:
            late.pop(0)()
        return manifest_bytes

    _patch(ContainerStore, "put", put)
    _patch(ManifestStore, "put", commit)


def _newest_deleted_first() -> None:
    real = deletion.Deletions._write

    def write(self: deletion.Deletions, before: Sequence[Any], marks: Sequence[Any]) -> int:
        if len(marks) < 2:
            return real(self, before, marks)
        return real(self, before[-1:], marks[-1:]) + real(self, before[:-1], marks[:-1])

    _patch(deletion.Deletions, "_write", write)


def _undelete_unchecked() -> None:
    _patch(ManifestStore, "is_committed", lambda *_: True)


def _not_caught_up() -> None:
    _patch(LocalIndex, "_catch_up", lambda *_: None)


def _container_before_index() -> None:
    real = nearkin_janitor.collect.Collector._sweep

    class Late:
        def __init__(self, index: Any) -> None:
            self._index, self.said = index, ()

        def __getattr__(self, name: str) -> Any:
            return getattr(self._index, name)

        def forget(self, *said: Any) -> None:
            self.said = said

    def sweep(self: Any, plan: Any, ids: Any, index: Any, sums: Any, *more: Any) -> None:
        late = Late(index)
        real(self, plan, ids, late, sums, *more)
        if late.said:
            index.forget(*late.said)

    _patch(nearkin_janitor.collect.Collector, "_sweep", sweep)


def _bases_not_counted() -> None:
    def closed(self: Any, chunks: Mapping[int, Any], whole: Any = (), giving_up: Any = None) -> Any:
        return {container: mask.copy() for container, mask in chunks.items()}

    _patch(nearkin_janitor.reach.Reach, "closed", closed)


def _recheck_skipped() -> None:
    def sweep(reach: Any, ids: Any, due: Mapping[int, Condemned]) -> Any:
        drops = {
            container: nearkin_janitor.plan.Drop(entry.chunks, entry.segments, everything=entry.whole)
            for container, entry in due.items()
            if container in ids
        }
        return nearkin_janitor.plan.Plan(drops)

    vars(nearkin_janitor.collect)["to_sweep"] = sweep


def _condemned_still_a_hit() -> None:
    real: Any = nearkin_janitor.collect.Collector._condemn

    class Keeps:
        def __init__(self, index: Any) -> None:
            self._index = index

        def __getattr__(self, name: str) -> Any:
            return (lambda *_: None) if name == "forget" else getattr(self._index, name)

    def condemn(self: Any, *arguments: Any, **more: Any) -> Any:
        wrapped = [Keeps(value) if isinstance(value, LmdbIndex) else value for value in arguments]
        return real(self, *wrapped, **more)

    _patch(nearkin_janitor.collect.Collector, "_condemn", condemn)


def _same_round() -> None:
    real = nearkin.local_gc.LocalGc.run

    def run(self: Any) -> Any:
        real(self)
        return real(replace(self, settings=settings(self.settings, {"gc": {"grace_seconds": 0}})))

    _patch(nearkin.local_gc.LocalGc, "run", run)


def _grace_ignored() -> None:
    _patch(nearkin_janitor.collect.Collector, "_is_due", lambda *_: True)


def _older_generation_first() -> None:
    def anew(
        self: Any, container: Any, drop: Any, ids: dict[int, int], index: Any, sums: Any, rebasing: Any = None
    ) -> None:
        data, before_bytes = self._rewriter.rewritten(container, drop, rebasing), ids[container]
        generation = self._containers.generation(container)
        self._containers.delete(container, generation)
        self._containers.put(container, data, generation + 1)
        self._renew(index, container)
        ids[container] = len(data)
        sums.rewritten += 1
        sums.freed_bytes += before_bytes - len(data)

    _patch(nearkin_janitor.collect.Collector, "_anew", anew)


def _number_given_again() -> None:
    real = nearkin_janitor.roots.find_roots

    def roots(manifests: Any, now_us: int) -> Any:
        return replace(real(manifests, now_us), highest=frozenset())

    vars(nearkin_janitor.collect)["find_roots"] = roots


def _lock_not_taken() -> None:
    def acquire(self: WriterLock) -> None:
        self._descriptor = None

    _patch(WriterLock, "acquire", acquire)


def _delta_not_verified() -> None:
    """The encoder fails now and then, as broken memory would; what it gives is kept unread."""
    real = xdelta3.encode_many

    def encode(*arguments: Any, **more: Any) -> Any:
        payload, *rest = real(*arguments, **more)
        payload = np.array(payload)
        payload[-1:] ^= 1
        return (payload, *rest)

    vars(xdelta3)["encode_many"] = encode
    vars(nearkin_delta.codecs)["check_round_trip"] = lambda *_: None


def _directory_unchecked() -> None:
    real = container_format.decode_directory

    def decode(data: Any, container: Any, domain: Any, container_bytes: int, check: bytes, what: str) -> Any:
        return real(data, container, domain, container_bytes, columns.check_bytes(memoryview(data)), what)

    vars(container_format)["decode_directory"] = decode


def _patch(kind: type, name: str, value: Any) -> None:
    setattr(kind, name, value)


BUGS: Mapping[str, Bug] = {
    "bytes-not-synced": Bug("an object's fsync is dropped", "I1, I2", "power", _bytes_not_synced, _power("put")),
    "name-not-synced": Bug(
        "a manifest's folder is not synced after it", "I2", "power", _name_not_synced, _power("put + put")
    ),
    "folder-not-synced": Bug(
        "a new folder is not synced into the one above", "I2", "power", _folder_not_synced, _power("put")
    ),
    "create-overwrites": Bug(
        "an object is looked for, then renamed over what is there", "I2", "races", _create_overwrites,
        _raced(races.commit_while_committing),
    ),
    "published-before-durable": Bug(
        "the index is told of a container before it is put", "I1", "power", _published_before_durable, _power("put")
    ),
    "manifest-before-container": Bug(
        "a manifest is put before the containers that it names", "I2", "power", _manifest_before_container,
        _power("put"),
    ),
    "newest-deleted-first": Bug(
        "of a key's marks that of the newest version comes first", "deletion", "crash", _newest_deleted_first,
        _killed("delete.marked", "delete.noted"),
    ),
    "undelete-unchecked": Bug(
        "an undeletion does not look whether its version is there still", "deletion", "races", _undelete_unchecked,
        _raced(races.collect_while_undeleting),
    ),
    "not-caught-up": Bug(
        "an index that a dead writer left behind is taken as it is", "local index", "crash", _not_caught_up,
        _killed("object.durable"),
    ),
    "container-before-index": Bug(
        "a container goes before the index forgets it", "deletion order", "crash", _container_before_index,
        _killed("gc.container", "object.removed"),
    ),
    "bases-not-counted": Bug(
        "marking leaves out what deltas and blocks lean on", "I7", "crash", _bases_not_counted,
        _killed("gc.container"),
    ),
    "recheck-skipped": Bug(
        "what is due goes without being looked at again", "I6", "races", _recheck_skipped,
        _raced(races.manifest_away),
    ),
    "condemned-still-a-hit": Bug(
        "the index does not forget what is condemned", "I6", "crash", _condemned_still_a_hit,
        _killed("gc.done", "gc.recorded"),
    ),
    "same-round": Bug(
        "a round frees what it condemned itself", "I6", "crash", _same_round, _killed("gc.done", "gc.begun")
    ),
    "grace-ignored": Bug(
        "the next round frees, however soon it comes", "I6", "crash", _grace_ignored, _killed("gc.done", "gc.begun")
    ),
    "older-generation-first": Bug(
        "compaction removes a container before its next generation is there", "I1", "power", _older_generation_first,
        _power("put + compaction"),
    ),
    "number-given-again": Bug(
        "the last mark of a key's highest version goes too", "versions", "crash", _number_given_again,
        _killed("gc.marks", "gc.done"),
    ),
    "lock-not-taken": Bug(
        "the store's lock, its lease, is not taken", "I6", "races", _lock_not_taken,
        _raced(races.collect_while_putting),
    ),
    "delta-not-verified": Bug(
        "an encoding is kept without being decoded, and the encoder errs", "I7", "crash", _delta_not_verified,
        _killed("put.settled", "index.written", codec="xdelta3"),
    ),
    "directory-unchecked": Bug(
        "a directory's checksum is not compared", "I8", "damage", _directory_unchecked, _flipped
    ),
}  # fmt: skip


# --- the hunt --------------------------------------------------------------------------------------------------------


def hunted(name: str, bug: Bug, folder: Path) -> tuple[str, str]:
    """Return (caught or missed, what was said), from a child of this process, which has opened nothing yet."""
    said = folder / f"{name}.json"
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
            said.write_text(json.dumps(outcome))
            os._exit(0)
    os.waitpid(child, 0)
    found: tuple[str, str] = tuple(json.loads(said.read_text()))
    return found


def hunt_all(names: Sequence[str], folder: Path) -> Iterator[tuple[str, str, str, float]]:
    """Yield (name, caught or missed, what was said, seconds) of each bug named."""
    for name in names:
        started = time.perf_counter()
        outcome, said = hunted(name, BUGS[name], folder)
        yield name, outcome, said, time.perf_counter() - started


@click.command()
@click.argument("names", nargs=-1)
@click.option("--folder", type=click.Path(path_type=Path), help="where stores are made; a temporary folder")
def main(names: tuple[str, ...], folder: Path | None) -> None:
    """Plant each bug named, or all, and say what caught it."""
    logging.getLogger("nearkin").setLevel(logging.CRITICAL)
    unknown = set(names) - BUGS.keys()
    if unknown:
        raise click.UsageError(f"no such bug: {', '.join(sorted(unknown))}; choose of {', '.join(BUGS)}")
    missed = []
    with tempfile.TemporaryDirectory(prefix="nearkin-planted-", dir=folder) as place:
        for name, outcome, said, seconds in hunt_all(names or tuple(BUGS), Path(place)):
            click.echo(f"{name}\t{BUGS[name].engine}\t{outcome}\t{seconds:.1f} s\t{' '.join(said.split())[:300]}")
            if outcome != CAUGHT:
                missed.append(name)
    if missed:
        click.echo(f"not caught: {', '.join(missed)}", err=True)
        sys.exit(1)


if __name__ == "__main__":
    main()

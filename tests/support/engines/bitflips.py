"""Flip single bits all over a store.

Invariant: each flip is detected and named; with parity no read is affected.

    python -m tests.support.engines.bitflips --flips 10000 --seed 1 [--parity rs-8-2] [--encrypted]

Every kind of object is hit equally often, at bits drawn from the seed; a flip is undone, or repaired, before the next
one.
"""

from __future__ import annotations

import logging
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import NamedTuple

import click

from nearkin.block_recoder import BlockRecoder
from nearkin.lab.generated_data import mutate, random_bytes, text_like
from nearkin.store import open_store
from nearkin_shared.config.settings import Settings
from nearkin_shared.errors import Corrupt, FormatTooNew, NearkinError
from nearkin_shared.fingerprints import Fingerprinter
from nearkin_shared.objectstore.factory import as_set
from nearkin_shared.objectstore.local import LocalObjectStore
from nearkin_shared.objectstore.parity import ParityObjectStore
from nearkin_shared.storage import descriptor
from nearkin_shared.storage.containers import ContainerStore
from nearkin_shared.storage.manifests import ManifestStore
from nearkin_shared.storage.pending_deletes import PendingDeleteStore
from nearkin_shared.storage.quarantine import Quarantine
from tests.support.data.stores import ENCRYPTED, SMALL, find_broken, objects, settings

CACHE_BYTES = 1 << 24
CHOSEN = {"delta": {"max_depth": 3}, "deletion": {"undelete_seconds": 0}}


@dataclass(slots=True)
class Result:
    """Results of the flips; `missed` should be empty."""

    seed: int
    parity: str
    flips: int = 0
    by_kind: Counter[str] = field(default_factory=Counter)
    missed: list[str] = field(default_factory=list)
    repaired: int = 0
    seconds: float = 0.0

    def __str__(self) -> str:
        kinds = ", ".join(f"{kind} {count:,}" for kind, count in sorted(self.by_kind.items()))
        summary = f"{self.flips - len(self.missed):,} of {self.flips:,} flips detected and named ({kinds})"
        if self.parity != "none":
            summary += f"; {self.repaired:,} read through and repaired by {self.parity}"
        return f"{summary}; seed {self.seed}, {self.seconds:.0f} s"


def kind_of(name: str) -> str:
    """Return the kind of object that a name belongs to."""
    if name.startswith("parity/"):
        return "parity"
    suffix = name.rpartition(".")[2]
    return {
        "nkc": "container",
        "nkm": "manifest",
        "nkt": "mark",
        "nkr": "retention record",
        "json": "descriptor",
        "nkg": "pending delete",
        "nkk": "key",
    }.get(suffix, suffix)


def contents() -> dict[tuple[str, int], bytes]:
    """Return versions that are deltas of one another, that share nothing, and an empty one."""
    first = text_like(60_000, 1)
    second = mutate(first, 2, edits=12, edit_bytes_max=60)
    return {
        ("history", 1): first,
        ("history", 2): second,
        ("history", 3): mutate(second, 3, edits=12, edit_bytes_max=60),
        ("alone", 1): random_bytes(30_000, 7),
        ("empty", 1): b"",
    }


def make_store(root: Path, chosen: Settings) -> None:
    """Make a store with every kind of object: one version is deleted, and some data are pending delete."""
    with open_store(root, settings=chosen, create=True) as store:
        for (key, _), content in contents().items():
            store.put(key, content)
        store.put("gone", random_bytes(20_000, 9))
        store.delete("gone")
        store.gc()
        store.put("deleted", b"soon")
        store.delete("deleted")
        store.retain("alone", datetime.now(UTC) + timedelta(days=1))


class _Parts(NamedTuple):
    raw: LocalObjectStore
    covered: ParityObjectStore
    fingerprinter: Callable[[str], Fingerprinter]
    containers: ContainerStore
    manifests: ManifestStore


class _Bench:
    """One store and its readers, opened again for each flip so that nothing is cached."""

    def __init__(self, root: Path, chosen: Settings) -> None:
        self._root = root
        self._settings = chosen
        self._contents = contents()

    def _parts(self) -> _Parts:
        raw = LocalObjectStore(self._root)
        covered = as_set(raw, self._settings)
        found = descriptor.read(covered)
        secret = bytes.fromhex(found.secret)

        def fingerprinter(tenant: str) -> Fingerprinter:
            return Fingerprinter(secret, tenant, found.fingerprint_bits)

        containers = ContainerStore(covered, fingerprinter(self._settings.tenant).domain, CACHE_BYTES)
        return _Parts(raw, covered, fingerprinter, containers, ManifestStore(covered))

    def damaged_names(self) -> set[str]:
        """Return the damaged objects that verify names; the descriptor if the store cannot be opened."""
        from nearkin_maintenance import IndexedVersions, Verifier

        try:
            parts = self._parts()
        except (Corrupt, FormatTooNew):
            return {descriptor.NAME}
        verifier = Verifier(
            parts.containers,
            parts.manifests,
            parts.fingerprinter,
            self._settings.tenant,
            IndexedVersions(),
            PendingDeleteStore(parts.covered),
            Quarantine(parts.covered, time.time),
            parts.covered,
        )
        return {damage.object_name for damage in verifier.run().damage}

    def wrong(self) -> set[tuple[str, int]]:
        """Return the versions that cannot be read. Raises AssertionError for a wrong byte."""
        try:
            with open_store(self._root, settings=self._settings, read_only=True) as store:
                return find_broken(store, self._contents)
        except (Corrupt, FormatTooNew):
            return set(self._contents)

    def repair(self, name: str) -> None:
        """Repair the damage."""
        from nearkin_maintenance import ContainerRepairer, Repairer

        parts = self._parts()
        healer = ContainerRepairer(parts.containers, BlockRecoder(self._settings))
        Repairer(parts.covered, parts.containers, healer, lambda _: None).repair([name])  # parity: no generation is new


def run(flips: int, seed: int, parity: str = "none", root: Path | None = None, *, encrypted: bool = False) -> Result:
    """Flip `flips` bits, one at a time, of a store in the folder `root` (default: a temporary one).

    Key records of an encrypted store without parity are left out: a broken one damages all objects under its key.
    """
    if root is None:
        with tempfile.TemporaryDirectory(prefix="nearkin-bitflips-") as folder:
            return run(flips, seed, parity, Path(folder) / "store", encrypted=encrypted)
    started, chosen = time.perf_counter(), settings(SMALL, CHOSEN, {"storage": {"parity": parity}})
    if encrypted:
        chosen = settings(chosen, ENCRYPTED)
    make_store(root, chosen)
    before = objects(root)
    result, draw, bench = Result(seed, parity), random.Random(seed), _Bench(root, chosen)
    kinds: dict[str, list[str]] = {}
    for name in sorted(before):
        if kind_of(name) == "key" and parity == "none":
            continue
        kinds.setdefault(kind_of(name), []).append(name)
    try:
        for _ in range(flips):
            kind = draw.choice(sorted(kinds))
            name = draw.choice(kinds[kind])
            at, bit = draw.randrange(len(before[name])), draw.randrange(8)
            _one(root, before, name, at, bit, bench, result)
            result.flips += 1
            result.by_kind[kind] += 1
    except KeyboardInterrupt:  # the flips until then count
        pass
    result.seconds = time.perf_counter() - started
    return result


def _one(root: Path, before: Mapping[str, bytes], name: str, at: int, bit: int, bench: _Bench, result: Result) -> None:
    data = bytearray(before[name])
    data[at] ^= 1 << bit
    (root / name).write_bytes(data)
    what, is_repaired = f"{name} byte {at} bit {bit}", result.parity != "none" and kind_of(name) != "pending delete"
    try:
        named, wrong = bench.damaged_names(), bench.wrong()
        if named != {name}:
            result.missed.append(f"{what}: verify names {sorted(named)}")
        elif is_repaired:
            bench.repair(name)
            if wrong:
                result.missed.append(f"{what}: not read: {sorted(wrong)}")
            elif (root / name).read_bytes() != before[name]:
                result.missed.append(f"{what}: not repaired")
            else:
                result.repaired += 1
    except (AssertionError, NearkinError) as err:
        result.missed.append(f"{what}: {type(err).__name__}: {err}")
    (root / name).write_bytes(before[name])


@click.command(help="Flip bits of a store, one at a time; each must be detected, and repaired where there is parity.")
@click.option("--flips", default=10_000, show_default=True)
@click.option("--seed", default=1, show_default=True)
@click.option("--parity", default="none", show_default=True)
@click.option("--encrypted", is_flag=True, help="Of a store that is sealed, its keys too where there is parity.")
def main(flips: int, seed: int, parity: str, encrypted: bool) -> None:
    """Run, print the result, and fail if a flip was missed."""
    logging.getLogger("nearkin").setLevel(logging.ERROR)  # each read through parity would be logged
    result = run(flips, seed, parity, encrypted=encrypted)
    for missed in result.missed:
        click.echo(missed)
    click.echo(str(result))
    raise SystemExit(1 if result.missed else 0)


if __name__ == "__main__":
    main()

"""Compare the store with a dictionary.

After any operations in any order, every version restores.

A deleted version is unreadable until it is undeleted; two tenants share the store and are isolated. Two writers
alternate. A flipped bit breaks exactly the versions that need it, by name, until the container is restored.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from io import BytesIO
from pathlib import Path

import pytest
from hypothesis import HealthCheck
from hypothesis import settings as runs
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, MultipleResults, RuleBasedStateMachine, initialize, invariant, multiple, rule

from nearkin import Store, open_store
from nearkin.lab.generated_data import mutate, random_bytes, records_like, text_like
from nearkin_shared.config.loader import with_changes
from nearkin_shared.config.reduction import BASE_POLICIES, CHUNKERS, FEATURES
from nearkin_shared.config.storage import INDEX_KINDS, RetentionPolicy
from nearkin_shared.errors import BadInput, ClockSkew, NotFound, StoreLocked
from nearkin_shared.index.tablets import hook_levels
from nearkin_shared.limits import CLOCK_SKEW_SECONDS_MAX
from tests.support.data.stores import SMALL, containers, find_broken, flip, objects, settings, stored_bytes

WEEK = 604_800
KEYS = ("a", "b", "ключ/🔑")
MAKERS = (random_bytes, text_like, records_like, lambda count, seed: bytes(count))
LEVELS = st.sampled_from([0, 6])
"""Of the hooks of a sampled index: all tags, or one in 64."""
SIZES = st.sampled_from([0, 1, 100, 8191, 8192, 30_000, 65_537, 200_000, 921_600, 2_200_000])


class StoreAgainstDictionary(RuleBasedStateMachine):
    contents = Bundle("contents")

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="nearkin-model-"))
        self.model: dict[str, list[bytes]] = {}
        self.deleted: dict[tuple[str, int], int] = {}
        """Version -> number of the call that deleted it."""
        self.until: dict[int, float] = {}
        """Call -> time until which its deletions can be undone."""
        self.erased: set[tuple[str, int]] = set()
        """Versions that cannot be undeleted any more."""
        self.now = 1_764_000_000.0
        self.gc_runs = 0
        self.calls = self.others = 0
        self.changes: dict[str, dict[str, object]] = {"gc": {"compact_below": 0.8, "trust_clock": True}}
        self.store = self._open()

    def _open(self) -> Store:
        return open_store(
            self.folder / "s", settings=settings(SMALL, self.changes), clock=lambda: self.now, create=True, force=True
        )

    def open(self) -> None:
        self.store.close()
        self.store = self._open()

    def teardown(self) -> None:
        hook_levels.LEVEL_FIRST = 0
        assert self.store.verify().damage == ()
        for key, number, content in self.live():
            assert self.store.get(key, number).read() == content
        for key in {key for key, _ in self.deleted}:
            self.undelete(key, None)
        for key, number, content in self.live():
            assert self.store.get(key, number).read() == content
        self.store.close()
        shutil.rmtree(self.folder)

    def live(self, key: str | None = None) -> list[tuple[str, int, bytes]]:
        return [
            (name, number, content)
            for name in sorted(self.model, key=str.encode)
            for number, content in enumerate(self.model[name], 1)
            if key in (None, name) and (name, number) not in self.deleted.keys() | self.erased
        ]

    # --- contents: generated, edited, joined

    @initialize(target=contents, kind=st.sampled_from(INDEX_KINDS), level=LEVELS)
    def first(self, kind: str, level: int) -> bytes:
        self.switch_index(kind, level)
        return text_like(300_000, 1)

    @rule(kind=st.sampled_from(INDEX_KINDS), level=LEVELS)
    def switch_index(self, kind: str, level: int) -> None:
        hook_levels.LEVEL_FIRST = level
        self.changes["index"] = {"kind": kind}
        self.open()

    @rule(target=contents, maker=st.sampled_from(MAKERS), size=SIZES, seed=st.integers(0, 5))
    def fresh(self, maker: Callable[[int, int], bytes], size: int, seed: int) -> bytes:
        return maker(size, seed)

    @rule(target=contents, content=contents, seed=st.integers(0, 50), edits=st.sampled_from([1, 8, 80]))
    def changed(self, content: bytes, seed: int, edits: int) -> bytes:
        return mutate(content, seed, edits)

    @rule(target=contents, one=contents, other=contents, cut=st.integers(0, 300_000))
    def joined(self, one: bytes, other: bytes, cut: int) -> bytes | MultipleResults[bytes]:
        joined = one[:cut] + other + one[cut:]
        return joined if len(joined) < 3_000_000 else multiple()

    # --- operations of callers

    @rule(key=st.sampled_from(KEYS), content=contents, as_file=st.booleans())
    def put(self, key: str, content: bytes, as_file: bool) -> None:
        result = self.store.put(key, BytesIO(content) if as_file else content)
        versions = self.model.setdefault(key, [])
        versions.append(content)
        assert (result.info.key, result.info.version, result.info.size_bytes) == (key, len(versions), len(content))
        ledger = result.ledger
        assert ledger.chunks == ledger.duplicate_chunks + ledger.delta_chunks + ledger.raw_chunks
        assert ledger.unique_bytes <= ledger.logical_bytes == len(content)

    @rule(items=st.lists(st.tuples(st.sampled_from(KEYS), contents), max_size=4))
    def put_many(self, items: list[tuple[str, bytes]]) -> None:
        results = list(self.store.put_many(items))
        for (key, content), result in zip(items, results, strict=True):
            versions = self.model.setdefault(key, [])
            versions.append(content)
            assert (result.info.key, result.info.version) == (key, len(versions))

    @rule(key=st.sampled_from(KEYS), content=contents)
    def refused(self, key: str, content: bytes) -> None:
        try:
            self.store.put(key, content, sha256=bytes(32))
        except BadInput:
            return
        raise AssertionError("a wrong SHA-256 was accepted")

    @rule(
        key=st.sampled_from(KEYS),
        which=st.integers(0, 20),
        start=st.integers(0, 1 << 22),
        length=st.integers(0, 1 << 21),
    )
    def read(self, key: str, which: int, start: int, length: int) -> None:
        versions = self.live(key)
        if not versions:
            with pytest.raises(NotFound):
                self.store.get(key)
            return
        _, number, content = versions[which % len(versions)]
        start %= len(content) + 1
        assert self.store.get(key, number, start=start, stop=start + length).read() == content[start : start + length]
        assert self.store.get(key).read() == versions[-1][2]

    @rule(key=st.sampled_from(KEYS), which=st.one_of(st.none(), st.integers(1, 8)))
    def delete(self, key: str, which: int | None) -> None:
        targets = [(name, number) for name, number, _ in self.live(key) if which in (None, number)]
        if not targets:
            with pytest.raises(NotFound):
                self.store.delete(key, which)
            return
        assert self.store.delete(key, which, reason="model") == len(targets)
        self.calls += 1
        self.now += 1
        self.until[self.calls] = self.now - 1 + WEEK
        self.deleted |= dict.fromkeys(targets, self.calls)
        for name, number in targets:
            with pytest.raises(NotFound):
                self.store.get(name, number)

    @rule(key=st.sampled_from(KEYS), keep=st.integers(1, 3), dry_run=st.booleans())
    def forget(self, key: str, keep: int, dry_run: bool) -> None:
        found = [info for info in self.store.versions(key, all_versions=True) if info.key == key]
        if any(info.created.timestamp() > self.now + CLOCK_SKEW_SECONDS_MAX for info in found):
            with pytest.raises(ClockSkew):  # the clock jumped back, so `forget` deletes nothing
                self.store.forget(key, RetentionPolicy(keep_last=keep), dry_run=dry_run)
            return
        expected = {(name, number) for name, number, _ in self.live(key)[:-keep] if name == key}
        decided = self.store.forget(key, RetentionPolicy(keep_last=keep), dry_run=dry_run)
        assert {(decision.info.key, decision.info.version) for decision in decided if not decision.kept} == expected
        if not dry_run:
            for entry in sorted(expected):  # one call for each
                self.calls += 1
                self.until[self.calls] = self.now + WEEK
                self.deleted[entry] = self.calls
            self.now += 1

    @rule(key=st.sampled_from(KEYS), which=st.one_of(st.none(), st.integers(1, 8)))
    def undelete(self, key: str, which: int | None) -> None:
        hidden = {entry: call for entry, call in self.deleted.items() if entry[0] == key and which in (None, entry[1])}
        if not hidden:
            with pytest.raises(NotFound):
                self.store.undelete(key, which)
            return
        latest = max(hidden.values(), key=self.until.__getitem__)  # by the clock, which may have jumped
        back = [entry for entry, call in hidden.items() if call == latest]
        if self.now > self.until[latest]:
            with pytest.raises(NotFound):
                self.store.undelete(key, which)
            return
        assert self.store.undelete(key, which) == len(back)
        for entry in back:
            del self.deleted[entry]

    @rule(content=contents, delete=st.booleans())
    def another_tenant(self, content: bytes, delete: bool) -> None:
        self.store.close()
        other = with_changes(settings(SMALL, self.changes), {"tenant": "other"})
        with open_store(self.folder / "s", settings=other, clock=lambda: self.now, create=True, force=True) as store:
            assert store.put("a", content).info.version == self.others + 1
            self.others += 1
            assert store.get("a").read() == content
            if delete:
                assert store.delete("a", self.others) == 1
        self.open()

    @rule(key=st.sampled_from(KEYS), content=contents)
    def another_writer(self, key: str, content: bytes) -> None:
        """A writer is refused while another writes, and then sees all that it wrote."""
        self.put(key, content, as_file=False)
        with open_store(
            self.folder / "s", settings=settings(SMALL, self.changes), clock=lambda: self.now, create=True, force=True
        ) as other:
            for call in (lambda: other.put(key, content), other.gc, other.rebuild_index):
                with pytest.raises(StoreLocked):
                    call()
            self.store.close()
            assert other.get(key).read() == content
            version = other.put(key, content[::-1]).info.version
            self.model[key].append(content[::-1])
            assert version == len(self.model[key])
            with pytest.raises(StoreLocked):
                self.store.put(key, content)
        assert self.store.get(key).read() == content[::-1]

    # --- operations of operators, and faults

    @rule(which=st.integers(0, 50), at=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
    def a_bit_flips(self, which: int, at: float, bit: int) -> None:
        """`verify` names the damage, and no wrong byte is returned.

        With the container restored all versions read.
        """
        found = containers(self.folder / "s")
        if not found:
            return
        path = found[which % len(found)]
        self.store.close()
        before = objects(self.folder / "s")
        flip(path, int(at * path.stat().st_size), bit)
        self.open()
        newest = {(key, number): content for key, number, content in self.live()}
        damage = self.store.verify().damage
        assert damage, "a flipped bit was not covered by any checksum"
        named = {version for found in damage for version in found.versions}
        assert find_broken(self.store, newest) <= named
        self.store.close()
        path.write_bytes(before[str(path.relative_to(self.folder / "s"))])
        self.open()
        assert find_broken(self.store, newest) == set()
        self.store.verify()  # removes the container from quarantine
        assert self.store.verify().damage == ()
        self.store.rebuild_index()  # the damaged container's entries were withdrawn

    @rule(
        algorithm=st.sampled_from(FEATURES),
        chunker=st.sampled_from(CHUNKERS),
        depth=st.integers(1, 4),
        codec=st.sampled_from(["xdelta3", "patch", "patch", "none"]),
        policy=st.sampled_from(BASE_POLICIES),
        share=st.sampled_from([0.0, 0.5, 0.95]),
    )
    def toggle(self, algorithm: str, chunker: str, depth: int, codec: str, policy: str, share: float) -> None:
        self.changes = {
            "gc": {"compact_below": share, "grace_seconds": 86_400, "trust_clock": True},
            "features": {"algorithm": algorithm},
            "chunker": {"algorithm": chunker},
            "base": {"policy": policy},
            "delta": {"max_depth": depth, "codec": codec},
        }
        self.open()

    @rule()
    def reopen(self) -> None:
        self.open()

    @rule()
    def lose_the_index(self) -> None:
        self.store.close()
        shutil.rmtree(self.folder / "s" / "index", ignore_errors=True)
        self.open()

    @rule()
    def rebuild(self) -> None:
        self.store.versions()
        live = self.store._index.writable().entries()
        assert self.store.rebuild_index().skipped == ()
        rebuilt = self.store._index.writable().entries()
        if self.gc_runs:  # a second copy, stored later, is indexed after the first one is deleted
            for table in ("chunks", "segments"):
                assert live.pop(table).keys() <= rebuilt.pop(table).keys()
            del live["features"], rebuilt["features"]  # the rebuilt index has none for chunks of deleted segments
        assert rebuilt == live

    @rule(days=st.sampled_from([0, 1, 2, 8, 3650]))
    def collect(self, days: int) -> None:
        self.now += days * 86_400
        ended = {entry for entry, call in self.deleted.items() if self.now > self.until[call]}
        foreseen, before = self.store.gc(dry_run=True), stored_bytes(self.folder / "s")
        done = self.store.gc()
        assert before - stored_bytes(self.folder / "s") == done.freed_bytes == foreseen.freed_bytes
        assert self.others or done.versions == len(ended)
        self.erased |= ended
        for entry in ended:
            del self.deleted[entry]
        self.gc_runs += 1

    @rule(years=st.sampled_from([-10, 10]))
    def clock_jumps(self, years: int) -> None:
        self.now += years * 31_557_600

    @rule()
    def verify(self) -> None:
        report = self.store.verify()
        assert report.damage == ()
        if not self.others:  # some of these may have been deleted
            assert report.versions == sum(map(len, self.model.values())) - len(self.erased)

    @invariant()
    def listing_equals_the_model(self) -> None:
        listed = [(info.key, info.version, info.size_bytes) for info in self.store.versions(all_versions=True)]
        assert listed == [(key, number, len(content)) for key, number, content in self.live()]
        assert [(entry.key, entry.version) for entry in self.store.list_deleted()] == sorted(
            self.deleted, key=lambda entry: (entry[0].encode(), entry[1])
        )
        newest = {key: number for key, number, _ in self.live()}
        assert {info.key: info.version for info in self.store.versions()} == newest
        stats = self.store.stats()
        if not self.others:
            every = [
                len(content)
                for key, versions in self.model.items()
                for number, content in enumerate(versions, 1)
                if (key, number) not in self.erased
            ]
            assert stats.ledger.logical_bytes == sum(every)
            assert (stats.versions, stats.keys) == (len(listed), len(newest))
            assert stats.deleted_versions == len(self.deleted)
            assert stats.deleted_bytes == sum(len(self.model[key][n - 1]) for key, n in self.deleted)
            assert stats.ledger.stored_bytes == stored_bytes(self.folder / "s")
        assert sum(stats.parts.values()) == stats.ledger.stored_bytes
        assert min(stats.parts.values()) >= 0
        assert max(stats.depths, default=0) <= 4


TestStoreBesideADictionary = StoreAgainstDictionary.TestCase
TestStoreBesideADictionary.settings = runs(
    max_examples=200 if "SOAK" in os.environ else int(os.environ.get("MODEL_EXAMPLES", "4")),
    stateful_step_count=25,
    deadline=None,
    derandomize=True,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)

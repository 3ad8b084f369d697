"""The store beside a dictionary: whatever is done to it in whatever order, every version answers with its bytes."""

from __future__ import annotations

import shutil
import tempfile
from io import BytesIO
from pathlib import Path

from hypothesis import HealthCheck
from hypothesis import settings as runs
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, multiple, rule

from nearkin import open_store
from nearkin.config import CHUNKERS, FEATURES
from nearkin.errors import BadInput
from nearkin.testing.generated import mutated, random_bytes, records_like, text_like
from nearkin.testing.stores import SMALL, settings

KEYS = ("a", "b", "ключ/🔑")
MAKERS = (random_bytes, text_like, records_like, lambda count, seed: bytes(count))
SIZES = st.sampled_from([0, 1, 100, 8191, 8192, 30_000, 65_537, 200_000, 921_600, 2_200_000])


class StoreBesideADictionary(RuleBasedStateMachine):
    contents = Bundle("contents")

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="nearkin-model-"))
        self.model: dict[str, list[bytes]] = {}
        self.changes: dict[str, dict[str, object]] = {}
        self.store = None
        self.open()

    def open(self) -> None:
        if self.store is not None:
            self.store.close()
        self.store = open_store(self.folder / "s", settings=settings(SMALL, self.changes))

    def teardown(self) -> None:
        assert self.store.verify().damage == ()
        for key, versions in self.model.items():
            for number, content in enumerate(versions, 1):
                assert self.store.get(key, number).read() == content
        self.store.close()
        shutil.rmtree(self.folder)

    # --- contents: made, changed a little, joined

    @initialize(target=contents)
    def first(self):
        return text_like(300_000, 1)

    @rule(target=contents, maker=st.sampled_from(MAKERS), size=SIZES, seed=st.integers(0, 5))
    def fresh(self, maker, size, seed):
        return maker(size, seed)

    @rule(target=contents, content=contents, seed=st.integers(0, 50), edits=st.sampled_from([1, 8, 80]))
    def changed(self, content, seed, edits):
        return mutated(content, seed, edits)

    @rule(target=contents, one=contents, other=contents, cut=st.integers(0, 300_000))
    def joined(self, one, other, cut):
        joined = one[:cut] + other + one[cut:]
        return joined if len(joined) < 3_000_000 else multiple()

    # --- what callers do

    @rule(key=st.sampled_from(KEYS), content=contents, as_file=st.booleans())
    def put(self, key, content, as_file):
        result = self.store.put(key, BytesIO(content) if as_file else content)
        versions = self.model.setdefault(key, [])
        versions.append(content)
        assert (result.info.key, result.info.version, result.info.size_bytes) == (key, len(versions), len(content))
        ledger = result.ledger
        assert ledger.chunks == ledger.duplicate_chunks + ledger.delta_chunks + ledger.raw_chunks
        assert ledger.unique_bytes <= ledger.logical_bytes == len(content)

    @rule(items=st.lists(st.tuples(st.sampled_from(KEYS), contents), max_size=4))
    def put_many(self, items):
        results = list(self.store.put_many(items))
        for (key, content), result in zip(items, results, strict=True):
            versions = self.model.setdefault(key, [])
            versions.append(content)
            assert (result.info.key, result.info.version) == (key, len(versions))

    @rule(key=st.sampled_from(KEYS), content=contents)
    def refused(self, key, content):
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
    def read(self, key, which, start, length):
        versions = self.model.get(key, [])
        if versions:
            number = which % len(versions)
            content = versions[number]
            start %= len(content) + 1
            assert (
                self.store.get(key, number + 1, start=start, stop=start + length).read()
                == content[start : start + length]
            )
            assert self.store.get(key).read() == versions[-1]

    # --- what operators do, and what happens to them

    @rule(
        algorithm=st.sampled_from(FEATURES),
        chunker=st.sampled_from(CHUNKERS),
        depth=st.integers(1, 4),
        codec=st.sampled_from(["xdelta3", "xdelta3", "none"]),
    )
    def toggle(self, algorithm, chunker, depth, codec):
        self.changes = {
            "features": {"algorithm": algorithm},
            "chunker": {"algorithm": chunker},
            "delta": {"max_depth": depth, "codec": codec},
        }
        self.open()

    @rule()
    def reopen(self):
        self.open()

    @rule()
    def lose_the_index(self):
        self.store.close()
        shutil.rmtree(self.folder / "s" / "index", ignore_errors=True)
        self.open()

    @rule()
    def rebuild(self):
        self.store.versions()
        live = self.store._index.writable().entries()
        assert self.store.rebuild_index().skipped == ()
        assert self.store._index.writable().entries() == live

    @rule()
    def verify(self):
        report = self.store.verify()
        assert report.damage == ()
        assert report.versions == sum(map(len, self.model.values()))

    @invariant()
    def lists_what_there_is(self):
        if self.store is not None:
            listed = [(info.key, info.version, info.size_bytes) for info in self.store.versions(all_versions=True)]
            assert listed == [
                (key, number, len(content))
                for key in sorted(self.model, key=str.encode)
                for number, content in enumerate(self.model[key], 1)
            ]
            stats = self.store.stats()
            assert stats.ledger.logical_bytes == sum(
                len(content) for versions in self.model.values() for content in versions
            )
            assert sum(stats.parts.values()) == stats.ledger.stored_bytes
            assert min(stats.parts.values()) >= 0
            assert max(stats.depths, default=0) <= 4


TestStoreBesideADictionary = StoreBesideADictionary.TestCase
TestStoreBesideADictionary.settings = runs(
    max_examples=20,
    stateful_step_count=25,
    deadline=None,
    derandomize=True,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)

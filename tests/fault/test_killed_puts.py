"""Interrupted, killed, locked: a put is stored whole or not at all, and the next process continues at once."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import lmdb
import pytest

from nearkin import open_store
from nearkin.lab.generated_data import mutate, random_bytes, text_like
from nearkin.store import Store
from nearkin_shared.config.storage import INDEX_KINDS
from nearkin_shared.errors import NotFound, StoreLocked
from nearkin_shared.types import ContainerId
from tests.support.data.stores import SMALL, process, settings

CHOSEN = settings(SMALL, {"features": {"algorithm": "odess"}})
KINDS = {kind: settings(CHOSEN, {"index": {"kind": kind}}) for kind in INDEX_KINDS}
MOMENTS = 15

WRITER = """
import random, sys
from pathlib import Path
from nearkin import open_store
from nearkin.lab.generated_data import mutate
from tests.support.data.stores import SMALL, settings

first = Path(sys.argv[2]).read_bytes()
mutate(first, 0, edits=1)  # imports numpy.random, and what interrupts the import of a compiled module is lost
with open_store(sys.argv[1], settings=settings(SMALL, {"features": {"algorithm": "odess"}}), create=True) as store:
    print("ready", flush=True)
    sys.stdin.readline()
    for number in range(int(sys.argv[3]), int(sys.argv[3]) + 1000):
        result = store.put("k", mutate(first, number, edits=400))
        print(number, result.info.version, flush=True)
"""


@pytest.fixture
def first(tmp_path: Path) -> Path:
    path = tmp_path / "first"
    path.write_bytes(text_like(1_500_000, 3) + random_bytes(1_500_000, 4) + bytes(300_000))
    return path


def with_kind(script: str, kind: str) -> str:
    """Return a script that chooses an index kind."""
    assert '"odess"}' in script
    return script.replace('"odess"}', f'"odess"}}, "index": {{"kind": "{kind}"}}')


def run_until_killed(
    root: Path, first: Path, number: int, delay_seconds: float, how: signal.Signals, kind: str
) -> tuple[dict[int, int], str]:
    """Run the writer, end it after a while; return its acknowledged numbers by version, and its error output."""
    writer = process(with_kind(WRITER, kind), root, first, str(number))
    assert writer.stdin is not None
    assert writer.stdout is not None
    try:
        assert writer.stdout.readline() == "ready\n"
        writer.stdin.write("\n")
        writer.stdin.flush()
        time.sleep(delay_seconds)
        writer.send_signal(how)
        output, error_output = writer.communicate(timeout=30)
    finally:
        writer.kill()
        writer.wait()
    acknowledged = [line.split() for line in output.splitlines() if line.count(" ") == 1]
    return {int(version): int(n) for n, version in acknowledged}, error_output


@pytest.fixture
def on_one_core() -> Iterator[None]:
    """Let this process, and those that it starts, run on one core, which the threads of a put share."""
    if not hasattr(os, "sched_setaffinity"):
        pytest.skip("cores are not given to a process here")
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    yield
    os.sched_setaffinity(0, allowed)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT], ids=["SIGKILL", "Ctrl-C"])
@pytest.mark.parametrize("cores", ["all", pytest.param("one", marks=pytest.mark.soak)])
@pytest.mark.parametrize("kind", INDEX_KINDS[1:])
def test_put_killed_at_any_moment_is_whole_or_absent(
    how: signal.Signals, cores: str, kind: str, first: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Killed at any moment, a put leaves no partial version and loses no acknowledged one."""
    if cores == "one":
        request.getfixturevalue("on_one_core")
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")  # pytest shows it where the test fails
    draw = random.Random(seed)
    root, content = tmp_path / "store", first.read_bytes()
    known: dict[int, int] = {}
    for iteration in range(MOMENTS if how == signal.SIGKILL else MOMENTS // 4):
        number = 1000 * iteration
        acknowledged, error_output = run_until_killed(root, first, number, draw.uniform(0.0, 0.35), how, kind)
        if how == signal.SIGINT:
            assert error_output.rstrip().endswith("KeyboardInterrupt")
        known |= acknowledged
        with open_store(root, settings=KINDS[kind], create=True) as store:  # the lock is free at once
            listed = [info.version for info in store.versions(all_versions=True)]
            assert listed == stored_versions(store)
            assert set(known) <= set(listed)
            for version in listed:
                # An unacknowledged version may still have been committed: by this iteration's next put, and whole.
                if version not in known:
                    known[version] = number + len(acknowledged)
                if version in acknowledged or version == listed[-1]:
                    assert store.get("k", version).read() == mutate(content, known[version], edits=400)
            assert len(set(listed) - set(acknowledged)) == len(listed) - len(acknowledged)
            again = store.put("k", mutate(content, number + len(acknowledged), edits=400))  # the same content again
            known[again.info.version] = number + len(acknowledged)
            assert store.get("k").read() == mutate(content, known[again.info.version], edits=400)
            assert not list((root / "tmp").iterdir())
    with open_store(root, settings=KINDS[kind], create=True) as store:
        assert store.verify().damage == ()
        for version, number in known.items():
            assert store.get("k", version).read() == mutate(content, number, edits=400)
        stats = store.stats()
        assert stats.versions == len(known)
        assert sum(stats.parts.values()) == stats.ledger.stored_bytes
    assert_index_is_the_one_a_rebuild_makes(root, kind)


def stored_versions(store: Store) -> list[int]:
    """Return the versions in the stored manifests, without the index."""
    found: list[int] = []
    while True:
        try:
            found.append(store.info("k", len(found) + 1).version)
        except NotFound:
            return found


def assert_index_is_the_one_a_rebuild_makes(root: Path, kind: str) -> None:
    def entries() -> dict[str, dict[bytes, bytes]]:
        with open_store(root, settings=KINDS[kind], create=True) as store:
            index = store._index._files.open(read_only=True)
            try:
                return index.entries()
            finally:
                index.close()

    live = entries()
    with open_store(root, settings=KINDS[kind], create=True) as store:
        store.rebuild_index()
    rebuilt = entries()
    for table in rebuilt:
        assert len(live[table]) == len(rebuilt[table]), table
        assert live[table] == rebuilt[table], table


@pytest.mark.parametrize("kind", INDEX_KINDS[1:])
@pytest.mark.parametrize("step", ["put", "publish", "manifest"])
def test_put_killed_between_steps_is_recovered(step: str, kind: str, first: Path, tmp_path: Path) -> None:
    """A put killed between two steps is recovered by the next writer."""
    root = tmp_path / "store"
    died = process(with_kind(DIES, kind), root, first, step)
    died.communicate(timeout=30)
    assert died.returncode == 9
    with open_store(root, settings=KINDS[kind], create=True) as store:
        committed = step == "manifest"
        store.put("other", b"content")
        assert [info.key for info in store.versions()] == (["k", "other"] if committed else ["other"])
        stats = store.stats()
        assert stats.versions == 1 + committed
        assert sum(stats.parts.values()) == stats.ledger.stored_bytes
        assert min(stats.parts.values()) >= 0
        again = store.put("k", first)
        if step != "put":  # all durable data serve the retry
            assert again.ledger.duplicate_chunks > 0
        assert store.get("k").read() == first.read_bytes()
        assert store.verify().damage == ()
    assert_index_is_the_one_a_rebuild_makes(root, kind)


@pytest.mark.parametrize("made", [[], ["chunks"]], ids=["no database", "one database"])
def test_index_whose_maker_died_is_completed_by_a_reader(tmp_path: Path, made: list[str]) -> None:
    """An index whose maker was killed is completed by a reader."""
    with open_store(tmp_path / "store", settings=CHOSEN, create=True) as store:
        store.put("k", random_bytes(100_000, 1))
    shutil.rmtree(tmp_path / "store" / "index")
    with lmdb.open(str(tmp_path / "store" / "index"), map_size=1 << 28, max_dbs=8) as env:
        for name in made:
            env.open_db(name.encode())
    with open_store(tmp_path / "store", settings=CHOSEN, create=True) as store:
        assert [info.version for info in store.versions(all_versions=True)] == [1]


DIES = """
import os, sys
from pathlib import Path
from nearkin import open_store
from nearkin_shared.index.lmdb.lmdb_index import LmdbIndex
from nearkin_shared.storage.containers import ContainerStore
from nearkin_shared.storage.manifests import ManifestStore
from tests.support.data.stores import SMALL, settings

def after(kind, name, times):
    real, done = getattr(kind, name), []
    def dying(self, *arguments):
        result = real(self, *arguments)
        done.append(1)
        if len(done) == times:
            os._exit(9)
        return result
    setattr(kind, name, dying)

match sys.argv[3]:
    case "put": after(ContainerStore, "put", 2)
    case "publish": after(LmdbIndex, "publish_many", 1)
    case "manifest": after(ManifestStore, "put", 1)
with open_store(sys.argv[1], settings=settings(SMALL, {"features": {"algorithm": "odess"}}), create=True) as store:
    store.put("k", Path(sys.argv[2]))
"""

HOLDER = """
import sys
from io import BytesIO
from nearkin import open_store
from tests.support.data.stores import SMALL, settings

class Waiting(BytesIO):
    asked = 0
    def readinto(self, window):
        self.asked += 1
        if self.asked == 8:
            print("half", flush=True)
            sys.stdin.readline()
        return super().readinto(memoryview(window)[:500_000])

with open_store(sys.argv[1], settings=settings(SMALL), create=True) as store:
    store.put("k", Waiting(open(sys.argv[2], "rb").read() * 2))
    print("done", flush=True)
"""


def test_second_writer_during_a_put_learns_the_lock_holder(first: Path, tmp_path: Path) -> None:
    """During a put readers work, and a second writer learns which process holds the lock."""
    root, content = tmp_path / "store", first.read_bytes()
    with open_store(root, settings=CHOSEN, create=True) as store:
        store.put("k", first)
    writer = process(HOLDER, root, first)
    assert writer.stdin is not None
    assert writer.stdout is not None
    try:
        assert writer.stdout.readline() == "half\n"
        with open_store(root, settings=CHOSEN, create=True) as store:
            with pytest.raises(StoreLocked, match=str(writer.pid)):
                store.put("k", b"mine")
            with pytest.raises(StoreLocked, match=str(writer.pid)):
                store.rebuild_index()
            assert store.get("k").read() == content
            assert store.get("k", start=1_000_000, stop=1_000_100).read() == content[1_000_000:1_000_100]
            assert [info.version for info in store.versions(all_versions=True)] == [1]
            assert store.stats().versions == 1
            assert store.verify().damage == ()
            assert store.explain("k").raw_chunks > 0
            writer.stdin.write("\n")
            writer.stdin.flush()
            assert writer.stdout.readline() == "done\n"
            assert writer.wait(30) == 0
            # the same reader sees versions committed meanwhile, and may write now
            assert store.get("k").read() == content * 2
            assert [info.version for info in store.versions(all_versions=True)] == [1, 2]
            assert store.put("k", b"mine").info.version == 3
    finally:
        writer.kill()
        writer.communicate()


def test_two_stores_in_one_process_exclude_each_other(tmp_path: Path) -> None:
    """Two stores in one process exclude each other like two processes."""
    with (
        open_store(tmp_path / "s", settings=CHOSEN, create=True) as one,
        open_store(tmp_path / "s", settings=CHOSEN, create=True) as other,
    ):
        one.put("k", b"one")
        with pytest.raises(StoreLocked, match=str(os.getpid())):
            other.put("k", b"other")
        assert other.get("k").read() == b"one"
        one.close()  # the index too: LMDB lets a process open it once
        assert [info.key for info in other.versions()] == ["k"]
        assert other.put("k", b"other").info.version == 2


def test_put_that_commits_during_verify_is_no_damage(
    first: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A put that commits while verify runs is not reported as damage."""
    from nearkin_shared.storage.containers import ContainerStore

    with open_store(tmp_path / "s", settings=CHOSEN, create=True) as store:
        store.put("k", b"earlier")
        real, late = ContainerStore.generations, [b"late" * 1000]

        def generations(self: ContainerStore) -> dict[ContainerId, dict[int, int]]:
            found = real(self)
            if late:
                store.put("late", late.pop())
            return found

        monkeypatch.setattr(store._containers, "generations", generations.__get__(store._containers))
        assert store.verify().damage == ()
        assert store.get("late").read() == b"late" * 1000

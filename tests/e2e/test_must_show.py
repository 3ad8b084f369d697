"""Test the store on real data.

Every byte is restored, with, without and after rebuild of the index.
"""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from nearkin import open_store
from nearkin.lab import corpus_cache
from nearkin.store import Store
from nearkin_shared.errors import NearkinError
from nearkin_shared.index.lmdb.lmdb_index import LmdbIndex
from nearkin_shared.results import VersionInfo
from tests.support.data.stores import process, settings

MIB = 1 << 20
ALGORITHMS = ("finesse", "ntransform", "odess")


def sources(corpus: str) -> list[Path]:
    try:
        match corpus:
            case "botocore":
                return corpus_cache.botocore(3)
            case "redis":
                return corpus_cache.redis_dumps(5)
            case _:
                return corpus_cache.vm_images(1, mebibytes=300)
    except NearkinError as err:  # no network or no Redis server: the text names it
        pytest.skip(f"{corpus}: {err}")


def assert_same(store: Store, info: VersionInfo, source: Path) -> None:
    """Compare piece by piece: two copies of 300 MB would count as the test's memory."""
    with source.open("rb") as original:
        for piece in store.get(info.key, info.version).pieces():
            assert original.read(len(piece)) == bytes(piece)
        assert original.read(1) == b""


def assert_ranges(store: Store, info: VersionInfo, source: Path, seed: int) -> None:
    """Ranges at edges, empty ones, and random ones equal the file's slices."""
    size, draw = info.size_bytes, random.Random(seed)
    wanted = [
        (0, 0),
        (0, 1),
        (size - 1, size),
        (size, size),
        (size // 2, size // 2),
        (0, 70_000),
        (size - 70_000, size),
    ]
    for length in (1, 4096, 100_000, 1_000_000, 5 * MIB):
        for _ in range(4):
            start = draw.randrange(size - length)
            wanted.append((start, start + length))
    with source.open("rb") as original:
        for start, stop in wanted:
            original.seek(start)
            blob = store.get(info.key, info.version, start=start, stop=stop)
            assert blob.size_bytes == stop - start
            assert blob.read() == original.read(stop - start), (info.key, info.version, start, stop)
    assert store.get(info.key, info.version, start=size - 10, stop=size + 10).size_bytes == 10


def entries(root: Path, store: Store) -> dict[str, dict[bytes, bytes]]:
    """Read the index of a closed store; summaries and catalog entries as they lie there."""
    index = LmdbIndex(root / "index", store._fingerprinter.domain, 1 << 30, read_only=True)
    try:
        return index.entries()
    finally:
        index.close()


@pytest.mark.parametrize(
    ("corpus", "ratio_least"),
    [
        ("botocore", 20.0),
        pytest.param("redis", 2.5, marks=pytest.mark.soak),
        pytest.param("vm", 2.5, marks=pytest.mark.soak),
    ],
)
def test_real_data_restore_after_index_loss(corpus: str, ratio_least: float, tmp_path: Path) -> None:
    """Restore real data identically, also after the index was lost."""
    paths = sources(corpus)
    root = tmp_path / "store"
    put = []
    for number, path in enumerate(paths):  # the algorithm is toggled between puts of one store
        with open_store(
            root, settings=settings({"features": {"algorithm": ALGORITHMS[number % 3]}}), create=True
        ) as store:
            put.append(store.put(corpus, path).info)
    with open_store(root, settings=settings(), create=True) as store:
        for info, path in zip(put, paths, strict=True):
            assert_same(store, info, path)
            assert_ranges(store, info, path, seed=info.version)
        stats = store.stats()
        assert sum(stats.parts.values()) == stats.ledger.stored_bytes
        # Three quarters of what was measured: a loss of dedup or of deltas fails here, some percent do not.
        assert stats.ledger.reduction_ratio > ratio_least
        assert set(stats.sketches) == {
            name for name in stats.sketches if name.partition("/")[0] in ALGORITHMS[: len(paths)]
        }
        assert len(stats.sketches) == min(len(paths), 3)
        assert store.verify().damage == ()
    live = entries(root, store)
    assert len(live["chunks"]) > 1000
    assert len(live["features"]) > 1000

    shutil.rmtree(root / "index")
    with open_store(root, settings=settings(), create=True) as store:  # made again by who first needs it
        assert [info.version for info in store.versions(all_versions=True)] == [info.version for info in put]
        assert_same(store, put[-1], paths[-1])
    assert_equal_entries(live, entries(root, store))
    with open_store(root, settings=settings(), create=True) as store:  # made again because someone asked
        report = store.rebuild_index()
        assert (report.versions, report.skipped) == (len(put), ())
        for info, path in zip(put, paths, strict=True):
            assert_same(store, info, path)
        again = store.put(corpus, paths[0])
        assert again.ledger.raw_chunks + again.ledger.delta_chunks == 0  # and it knows every chunk
    with_one_more = entries(root, store)
    assert live["chunks"] == with_one_more["chunks"]


def assert_equal_entries(one: dict[str, dict[bytes, bytes]], other: dict[str, dict[bytes, bytes]]) -> None:
    """Compare table by table: a failure that printed two whole indexes would be of no use."""
    assert one.keys() == other.keys()
    for table, rows in one.items():
        assert len(rows) == len(other[table]), table
        different = [key for key, row in rows.items() if row != other[table].get(key)]
        assert not different, (table, len(different), rows[different[0]], other[table].get(different[0]))


ZERO_GIB = 10  # 27 s in and out on one core of two

ZEROS = f"""
import io, resource, sys, time
from nearkin import open_store
from tests.support.data.stores import settings

SIZE = {ZERO_GIB} << 30
zeros = memoryview(bytes(1 << 20))

class Zeros(io.RawIOBase):
    left = SIZE
    def readable(self):
        return True
    def readinto(self, window):
        count = min(len(window), len(zeros), self.left)
        window[:count] = zeros[:count]
        self.left -= count
        return count

with open_store(sys.argv[1], settings=settings(), create=True) as store:
    result = store.put("zeros", Zeros())
    assert result.info.size_bytes == SIZE
    assert result.ledger.zero_chunks == result.ledger.chunks
    assert store.stats().ledger.stored_bytes < 64 * 1024, store.stats()
    middle = store.get("zeros", start=SIZE // 2 - 12345, stop=SIZE // 2 + 5_000_000)
    assert middle.read() == bytes(5_012_345)
    restored = 0
    for piece in store.get("zeros").pieces():
        for at in range(0, len(piece), len(zeros)):
            part = piece[at : at + len(zeros)]
            assert part.tobytes() == zeros[: len(part)].tobytes()
        restored += len(piece)
    assert restored == SIZE
if sys.platform == "linux":  # where ru_maxrss of a child starts at what its parent had
    (peak,) = (line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM"))
    print(int(peak) * 1024)
else:
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


@pytest.mark.soak
def test_gigabytes_of_zeros_need_little_space(tmp_path: Path) -> None:
    """Store gigabytes of zeros in bounded memory and almost no space."""
    process_of_its_own = process(ZEROS, tmp_path / "store")
    output, complained = process_of_its_own.communicate(timeout=600)
    assert (process_of_its_own.returncode, complained) == (0, "")
    assert int(output) < 400 * MIB

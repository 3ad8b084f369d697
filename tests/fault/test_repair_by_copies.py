"""Repair by copies of lost containers, of any generation."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from nearkin import open_store
from nearkin.lab.generated_data import mutate, random_bytes, text_like
from nearkin.store import Store
from tests.support.checks.gc_checks import COLLECTED
from tests.support.data.stores import SMALL, containers, find_broken, settings
from tests.support.fakes.clock import DAY, Clock

Contents = dict[tuple[str, int], bytes]
REWRITING = settings(
    SMALL,
    {
        "block": {"raw_bytes": 160_000},
        "container": {"target_bytes": 4 << 20},
        "deletion": {"undelete_seconds": 0},
        "gc": {"grace_seconds": 0, "compact_below": 0.95, "bytes_per_second": 1 << 30},
    },
)


def collect(store: Store, clock: Clock, contents: Contents, versions: int, gc_runs: int) -> None:
    """Delete the first versions, and do `gc_runs` GC runs, each long enough after the last."""
    for number in range(1, versions + 1):
        store.delete("k", number)
        del contents["k", number]
    for _ in range(gc_runs):
        clock.now += 8 * DAY
        store.gc()


def put_rebased(store: Store, clock: Clock) -> Contents:
    """Put versions that depend on one another, and collect all but the last two; return these."""
    content, contents = text_like(400_000, 1), Contents()
    for number in range(1, 15):
        content = mutate(content, number, edits=60)
        store.put("k", content)
        contents["k", number] = content
    before = len(containers(store.root))
    collect(store, clock, contents, versions=12, gc_runs=4)
    assert len(containers(store.root)) < before
    assert find_broken(store, contents) == set()
    return contents


def test_copy_of_any_generation_repairs_a_lost_container(tmp_path: Path) -> None:
    """A copy of any generation is used if the container is lost."""
    clock = Clock()
    with open_store(tmp_path / "s", settings=COLLECTED, clock=clock, create=True) as store:
        contents = put_rebased(store, clock)
        path = max(containers(store.root))
        assert "." in path.stem
        path.rename(copy := tmp_path / "copy")
        store._containers.evict()
        assert find_broken(store, contents)
        report = store.repair([copy])
        assert report.damage == ()
        assert find_broken(store, contents) == set()


def test_reader_of_later_generation_continues_after_repair(tmp_path: Path) -> None:
    """A reader of a later generation continues after its block numbers were reused."""
    contents = {f"v{number}": random.Random(number).randbytes(100_000) for number in range(1, 7)}
    clock = Clock()
    root, copy = tmp_path / "s", tmp_path / "copy"

    def collected(*keys: str) -> None:
        for key in keys:
            store.delete(key)
            del contents[key]
        for _ in range(3):
            clock.now += DAY
            store.gc()

    with open_store(root, settings=REWRITING, clock=clock, create=True) as store:
        list(store.put_many(contents.items()))
        copy.write_bytes(containers(root)[0].read_bytes())
        collected("v1", "v3")
        with open_store(root, settings=REWRITING, clock=clock, create=True) as reader:
            assert reader.get("v2").read() == contents["v2"]  # block 4, of the rest of 0 and 1
            containers(root)[0].write_bytes(random_bytes(100_000, 9))  # unreadable as a whole, so the copy is used
            assert store.repair([copy]).damage == ()
            collected("v2")  # block 4 again
            for key in sorted(contents, reverse=True):
                assert reader.get(key).read() == contents[key]


@pytest.mark.parametrize("is_deleted", [False, True])
@pytest.mark.parametrize("codec", ["patch", "xdelta3"])
def test_versions_put_after_the_copy_read_after_repair(codec: str, is_deleted: bool, tmp_path: Path) -> None:
    """Versions put since the copy was made read once the older generation replaces the lost one."""
    clock, content, contents = Clock(), text_like(300_000, 1), Contents()
    small = settings(REWRITING, {"block": {"raw_bytes": 65_536}, "delta": {"codec": codec, "max_depth": 4}})
    with open_store(tmp_path / "s", settings=small, clock=clock, create=True) as store:

        def put(number: int) -> None:
            nonlocal content
            content = mutate(content, number, edits=30)
            store.put("k", content)
            contents["k", number] = content

        for number in range(1, 7):
            put(number)
        copies = []
        for path in containers(store.root):
            copies.append(tmp_path / f"copy-{path.name}")
            copies[-1].write_bytes(path.read_bytes())
        collect(store, clock, contents, versions=4, gc_runs=3)
        put(7)
        put(8)
        rewritten = [path for path in containers(store.root) if "." in path.stem]
        assert rewritten
        for path in rewritten:
            path.unlink() if is_deleted else path.write_bytes(b"lost")
    with open_store(tmp_path / "s", settings=small, clock=clock, create=True) as store:
        assert find_broken(store, contents)
        store.repair(copies)
        assert find_broken(store, contents) == set()

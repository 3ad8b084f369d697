"""Power cuts and failing disks: after any prefix of a workload, torn and out of order, the store is whole."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.data.stores import objects
from tests.support.engines.power_cut import WORKLOADS, explore, fail_each
from tests.support.fakes.power_loss_disk import PENDING_NAMES_MAX, Disk, Step

ALL = "SOAK" in os.environ
"""Every workload, every call: two and a half minutes. Else all worlds of nine workloads, each fifth call of three."""
SPECIAL = tuple(name for name, workload in WORKLOADS.items() if workload.passes)
"""Workloads of parity, encryption, repair and GC rewrites: each passes the failpoints that it tests."""
PLAIN = tuple(name for name in WORKLOADS if name not in SPECIAL)
EXPLORED = PLAIN if ALL else ("put", "put of a group", "put + delete", "gc + put", "put + compaction")
SAMPLE = ("encryption with parity", "repair from a copy", "repair of a manifest", "recompression")
FAILED = PLAIN if ALL else ("put", "put + compaction", "put + rebuild", "gathering")


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Yield a folder in memory if possible: the disk is simulated, and LMDB's syncs to a busy real one took 40 s."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(prefix="nearkin-", dir=memory if memory.is_dir() else tmp_path) as made:
        yield Path(made)


@pytest.mark.parametrize("name", EXPLORED)
def test_power_cut_loses_nothing_acknowledged(folder: Path, name: str) -> None:
    """No power cut loses acknowledged effects."""
    explored = explore(folder, WORKLOADS[name])
    assert explored.prefixes > 30
    assert explored.worlds > 14
    assert explored.steps["sync"] == explored.steps["create"]
    names = set(objects(folder / "recorded"))
    if name == "put + compaction":
        # recompressed by the first GC run, and rewritten without the dead chunks by the second
        assert any(part.endswith(".0002.nkc") for part in names), "nothing was compacted: the workload tests less"
    if name == "gc + put":
        assert explored.steps["unlink"] > explored.steps["create"], "nothing was freed: the workload tests less"


@pytest.mark.parametrize("name", SPECIAL if ALL else SAMPLE)
def test_power_cut_of_more_workloads_keeps_effects(folder: Path, name: str) -> None:
    """No power cut of a soak workload loses acknowledged effects.

    F.32: This includes parity, an encrypted store, and containers during repair and rewriting.
    """
    explored = explore(folder, WORKLOADS[name])
    assert explored.prefixes >= 16
    assert explored.worlds >= 8


def test_workload_that_passes_no_failpoint_of_its_own_fails(folder: Path) -> None:
    """F.32: A workload that does not reach its failpoints is reported."""
    with pytest.raises(AssertionError, match=r"passes no rebase\.done"):
        explore(folder, replace(WORKLOADS["put"], passes=("put.container", "rebase.done")))


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO], ids=["full", "error"])
@pytest.mark.parametrize("name", FAILED)
def test_failed_disk_call_is_followed_by_a_successful_retry(folder: Path, name: str, error: int) -> None:
    """Whichever disk call fails, the same workload succeeds again."""
    assert fail_each(folder, WORKLOADS[name], error=error, every=1 if ALL else 5).failures > (20 if ALL else 4)


# --- the disk itself --------------------------------------------------------------------------------------------------


def worlds(*steps: Step) -> list[dict[str, bytes | None]]:
    disk = Disk({"a": None})
    for step in steps:
        disk.apply(step)
    return list(disk.worlds())


CREATE, WRITE = Step("create", "a/x", 1), Step("write", file=1, data=b"n" * 5000)
SYNC, SYNC_FOLDER = Step("sync", file=1), Step("sync-folder", "a")


def test_disk_name_not_durable_may_exist_or_not() -> None:
    """A name that is not durable may exist after the power cut or not."""
    assert worlds(CREATE, WRITE, SYNC) == [{"a": None}, {"a": None, "a/x": b"n" * 5000}]
    assert worlds(CREATE, WRITE, SYNC, SYNC_FOLDER) == [{"a": None, "a/x": b"n" * 5000}]


def test_disk_bytes_not_durable_are_partial_torn_or_zeros() -> None:
    """Bytes that are not durable are present in part, torn, or as zeros."""
    found = {world["a/x"] for world in worlds(CREATE, WRITE, SYNC_FOLDER)}
    assert found == {b"", b"n" * 512, b"n" * 2048, b"n" * 4096, b"n" * 5000, bytes(5000)}


def test_disk_synced_bytes_stay_when_more_are_written() -> None:
    """Synced bytes stay when more are written."""
    more = Step("write", file=1, data=b"m" * 100)
    assert all(
        (world["a/x"] or b"").startswith(b"n" * 5000) for world in worlds(CREATE, WRITE, SYNC, SYNC_FOLDER, more)
    )


def test_disk_names_of_a_folder_change_in_any_order() -> None:
    """Changed names of one folder may become durable in any order."""
    found = worlds(Step("mkdir", "a/one"), Step("mkdir", "a/two"))
    assert [sorted(world) for world in found] == [["a"], ["a", "a/one"], ["a", "a/two"], ["a", "a/one", "a/two"]]


def test_disk_lost_folder_contains_nothing() -> None:
    """A lost folder contains nothing."""
    inside = Step("create", "a/new/x", 1), SYNC, Step("sync-folder", "a/new")
    assert worlds(Step("mkdir", "a/new"), *inside) == [{"a": None}, {"a": None, "a/new": None, "a/new/x": b""}]


def test_disk_removal_not_durable_may_be_undone() -> None:
    """A removal that is not durable may be undone."""
    removal = Step("unlink", "a/x")
    assert worlds(CREATE, SYNC, SYNC_FOLDER, removal) == [{"a": None, "a/x": b""}, {"a": None}]
    assert worlds(CREATE, SYNC, SYNC_FOLDER, removal, SYNC_FOLDER) == [{"a": None}]


def test_disk_with_many_names_tries_some_subsets() -> None:
    """With many names not every subset is tried."""
    made = [Step("mkdir", f"a/{number}") for number in range(PENDING_NAMES_MAX + 1)]
    assert len(worlds(*made)) == 2 + 2 * len(made)

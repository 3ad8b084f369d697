"""Test the bounds of the search for exclude patterns that matched nothing."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from nearkin.trees import unmatched_patterns
from nearkin.trees.backup_plan import BackupPlan, PlannedCounts
from nearkin.trees.backup_walk import BackupOptions
from nearkin.trees.exclusions import ExclusionOptions, Exclusions, PathPatterns
from nearkin.trees.unmatched_patterns import PatternSource

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root mounts")


def unmatched(root: Path, *patterns: str) -> list[str]:
    """Return the patterns that a walk of `root` names."""
    counts = PlannedCounts()
    options = BackupOptions(exclusions=ExclusionOptions(patterns=patterns))
    BackupPlan([root], options, [], counts).run(None)
    return [source.text for source in counts.unmatched_patterns]


@contextmanager
def mounted(kind: str, point: Path) -> Iterator[None]:
    """Mount a file system of the kernel."""
    point.mkdir(parents=True, exist_ok=True)
    if subprocess.run(["mount", "-t", kind, "none", point], check=False, capture_output=True).returncode:
        pytest.skip("this machine allows no mounts")
    try:
        yield
    finally:
        subprocess.run(["umount", point], check=True)


def test_names_of_all_pruned_folders_share_one_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in range(10):
        (tmp_path / f"{folder}" / "build").mkdir(parents=True)
        for name in range(10):
            (tmp_path / f"{folder}" / "build" / f"{name}").touch()
    monkeypatch.setattr(unmatched_patterns, "NAMES_MAX", 100)
    assert unmatched(tmp_path, "build", "*.tpm") == ["*.tpm"]
    monkeypatch.setattr(unmatched_patterns, "NAMES_MAX", 99)
    assert unmatched(tmp_path, "build", "*.tpm") == []


def test_comparisons_of_names_with_patterns_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "build").mkdir()
    for name in range(10):
        (tmp_path / "build" / f"{name}").touch()
    patterns = [f"*.{number}" for number in range(20)]
    monkeypatch.setattr(unmatched_patterns, "COMPARISONS_MAX", 200)
    assert unmatched(tmp_path, "build", *patterns) == patterns
    monkeypatch.setattr(unmatched_patterns, "COMPARISONS_MAX", 199)
    assert unmatched(tmp_path, "build", *patterns) == []


def test_comparisons_of_mounts_with_patterns_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that is not looked at is compared with each pattern as well."""
    monkeypatch.setattr(unmatched_patterns, "COMPARISONS_MAX", 99)
    for folders, expected in ((9, 10), (10, 0)):
        use = PathPatterns([PatternSource(f"/x/{number}") for number in range(10)]).use
        for folder in range(folders):
            use.note_pruned(f"mount{folder}")
        assert len(use.unmatched()) == expected


@needs_root
@pytest.mark.parametrize("kind", ["tmpfs", "proc"])
def test_mount_below_a_pruned_folder_is_not_entered(kind: str, tmp_path: Path) -> None:
    """A pattern may match in what is mounted there: none is named."""
    with mounted(kind, tmp_path / "build" / "deep" / "mount"):
        (tmp_path / "build" / "deep" / "mount" / "x.tpm").touch() if kind == "tmpfs" else None
        assert unmatched(tmp_path, "build", "version", "*.tpm", "*.none") == []


@needs_root
@pytest.mark.parametrize("kind", ["tmpfs", "proc"])
def test_pruned_mount_is_not_entered(kind: str, tmp_path: Path) -> None:
    """An excluded mount point is like one that is left out: patterns that are bound to a path in it are not named."""
    with mounted(kind, tmp_path / "mount"):
        (tmp_path / "mount" / "x.tpm").touch() if kind == "tmpfs" else None
        assert unmatched(tmp_path, "/mount", "/mount/*.none", "x.tpm", "version") == ["x.tpm", "version"]


def test_folder_that_cannot_be_listed_leaves_all_unknown(tmp_path: Path) -> None:
    """The names below a path longer than the kernel takes are not known."""
    descriptor = os.open(tmp_path, os.O_RDONLY)
    for name in ("build", *["n" * 250] * 20):
        os.mkdir(name, dir_fd=descriptor)
        below = os.open(name, os.O_RDONLY, dir_fd=descriptor)
        os.close(descriptor)
        descriptor = below
    os.close(descriptor)
    try:
        assert unmatched(tmp_path, "build", "*.tpm") == []
    finally:
        subprocess.run(["rm", "-rf", tmp_path / "build"], check=True)


def test_pruned_folder_that_is_gone_has_no_names(tmp_path: Path) -> None:
    exclusions = Exclusions(ExclusionOptions(patterns=["*.tpm"]))
    exclusions.note_pruned(b"gone", os.fsencode(tmp_path / "gone"))
    assert [source.text for source in exclusions.unmatched()] == ["*.tpm"]

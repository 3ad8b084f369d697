"""Test a version's own retention, versions displaced by puts, and clocks ahead."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nearkin.store import open_store
from nearkin_shared.config.loader import with_changes
from nearkin_shared.config.settings import Settings
from nearkin_shared.config.storage import RetentionPolicy
from nearkin_shared.errors import ClockSkew, RetentionActive

YEAR_SECONDS = 31_536_000
NOW = time.time()


def settings(retention: dict[str, Any]) -> Settings:
    """Return settings under which GC frees at once what may be freed."""
    changes = {"gc": {"grace_seconds": 0}, "deletion": {"undelete_seconds": 0}, "retention": retention}
    return with_changes(Settings(), changes)


def at(seconds: float) -> Callable[[], float]:
    """Return a clock that is stopped so many seconds from now."""
    return lambda: NOW + seconds


def test_retention_holds_under_settings_without_any(tmp_path: Path) -> None:
    """Honour a year's retention in a process whose `retention.min_age_seconds` is 0."""
    path = tmp_path / "s"
    with open_store(path, settings=settings({"min_age_seconds": YEAR_SECONDS}), clock=at(0), create=True) as store:
        info = store.put("backup", b"content").info
        assert info.retain_until is not None
        assert info.retain_until.timestamp() == pytest.approx(NOW + YEAR_SECONDS, abs=1)
    with open_store(path, settings=settings({}), clock=at(10), create=True) as store:
        for version in (None, 1):
            with pytest.raises(RetentionActive, match="by its manifest"):
                store.delete("backup", version)
        store.put("backup", b"newer")
        decisions = store.forget("", RetentionPolicy(keep_last=1))
        assert [decision.reasons for decision in decisions if decision.info.version == 1] == [("retained",)]
        assert store.get("backup", 1).read() == b"content"
    with open_store(path, settings=settings({}), clock=at(YEAR_SECONDS + 20), create=True) as store:
        assert store.delete("backup", 1) == 1


def test_retention_by_policies_of_gc_is_honoured(tmp_path: Path) -> None:
    """GC under a policy that keeps one version leaves those that their manifests retain."""
    path = tmp_path / "s"
    with open_store(path, settings=settings({"min_age_seconds": YEAR_SECONDS}), clock=at(0), create=True) as store:
        for number in range(3):
            store.put("k", b"%d" % number)
    policy = {"policies": [{"prefix": "", "keep_last": 1}], "superseded_seconds": 0}
    with open_store(path, settings=settings(policy), clock=at(10), create=True) as store:
        assert store.gc().forgotten == 0
        assert [info.version for info in store.versions(all_versions=True)] == [1, 2, 3]


def test_many_puts_displace_no_good_version(tmp_path: Path) -> None:
    """Keep the good backup under `keep_last = 7` after seven puts of a write-only token."""
    path, policy = tmp_path / "s", {"policies": [{"prefix": "", "keep_last": 7}]}
    with open_store(path, settings=settings(policy), clock=at(-YEAR_SECONDS), create=True) as store:
        store.put("db.dump", b"the good backup")
    with open_store(path, settings=settings(policy), clock=at(0), create=True) as store:
        for number in range(9):
            store.put("db.dump", b"encrypted by an attacker %d" % number)
        assert store.gc().forgotten == 0
        assert store.get("db.dump", 1).read() == b"the good backup"
    with open_store(path, settings=settings(policy), clock=at(2 * 86_400), create=True) as store:
        assert store.gc().forgotten == 3


def test_forget_refuses_when_a_version_is_from_the_future(tmp_path: Path) -> None:
    """A clock that is wrong is noticed before anything is forgotten by it."""
    path, policy = tmp_path / "s", {"policies": [{"prefix": "", "keep_last": 1}], "superseded_seconds": 0}
    with open_store(path, settings=settings(policy), clock=at(3600), create=True) as store:
        store.put("k", b"one")
        store.put("k", b"two")
    with open_store(path, settings=settings(policy), clock=at(0), create=True) as store:
        with pytest.raises(ClockSkew, match="correct the clock"):
            store.forget()
        with pytest.raises(ClockSkew, match="'k' version 1"):
            store.gc()
        assert len(store.versions(all_versions=True)) == 2
    with open_store(path, settings=settings(policy), clock=at(3600 - 299), create=True) as store:
        assert store.gc().forgotten == 1

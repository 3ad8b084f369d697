"""Test the report of `verify` as text: one line per version, and one for the checkpoints of a backup."""

from __future__ import annotations

from pathlib import Path

from nearkin import open_store
from nearkin.cli.verify import damage_json, damage_lines, verify_lines
from nearkin.lab.generated_data import random_bytes
from nearkin_shared.results import Damage
from nearkin_shared.validation import checkpoint_key_of
from tests.support.data.stores import SMALL, containers, flip, settings


def test_damage_lines_count_checkpoints_after_versions() -> None:
    """Print versions, those of other tenants too, then how many checkpoints of each backup are touched."""
    first, second = sorted(checkpoint_key_of(key) for key in ("home", "etc"))
    names = [*((first, number) for number in range(1, 41)), (second, 7), ("home", 1), ("home", 2)]
    others = (("other", checkpoint_key_of("home"), 1), ("other", "home", 3))
    damage = Damage("containers/a.nkc", "block 1: broken", tuple(names), others, deleted=(("home", 2),))
    assert list(damage_lines([damage])) == [
        "damaged: containers/a.nkc: block 1: broken",
        "  touches home version 1",
        "  touches home version 2 (deleted)",
        "  touches home version 3 of tenant other",
        "  touches 40 checkpoints of an unfinished backup, which the next backup of its key leaves out",
        "  touches 1 checkpoint of an unfinished backup, which the next backup of its key leaves out",
        "  touches 1 checkpoint of an unfinished backup of tenant other, which the next backup of its key leaves out",
    ]


def test_verify_says_which_versions_are_deleted(tmp_path: Path) -> None:
    """Count deleted versions apart, and mark those that damage touches; an undeleted one is like any other."""
    with open_store(tmp_path / "s", settings=settings(SMALL), create=True) as store:
        for _ in range(3):
            store.put("k", random_bytes(100_000, 1))
        store.delete("k", 2)
        store.delete("k", 3)
        store.undelete("k", 2)
        report = store.verify()
        assert (report.versions, report.deleted_versions) == (3, 1)
        assert ", 3 versions (1 deleted), " in list(verify_lines(report))[-1]
        flip(containers(tmp_path / "s")[0], 5000)
        (damage,) = store.verify().damage
    assert damage.deleted == (("k", 3),)
    assert "  touches k version 3 (deleted)" in list(damage_lines([damage]))
    assert [one["deleted"] for one in damage_json([damage])[0]["versions"]] == [False, False, True]  # type: ignore[attr-defined]

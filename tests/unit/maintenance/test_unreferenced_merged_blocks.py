"""Test when merged blocks are dropped.

By their bytes, and by the expected bytes of a new root.
"""

from __future__ import annotations

import pytest

from nearkin_maintenance.optimize.rebase.unreferenced_merged_blocks import Chain

KIB = 1024
TEXT = Chain(
    root_bytes=220 * KIB, root_raw_bytes=4096 * KIB, own_bytes=512 * KIB, live_bytes=150 * KIB, dead_bytes=220 * KIB,
    dependent_bytes=150 * KIB, dependent_raw_bytes=3584 * KIB, roots=1,
)  # fmt: skip
"""A dead root of eight versions, and a live block of seven that depends on it."""


def changed(**fields: int) -> Chain:
    return Chain(**{name: fields.get(name, getattr(TEXT, name)) for name in Chain.__slots__})


def test_dead_root_needed_in_part_is_dropped() -> None:
    assert TEXT.new_root_bytes() == pytest.approx(0.35 * 512 * KIB)
    assert TEXT.should_drop(0.05)
    assert not TEXT.should_drop(0.2)


def test_dead_root_needed_almost_whole_is_kept() -> None:
    noise = changed(root_bytes=530 * KIB, dead_bytes=530 * KIB, dependent_bytes=20 * KIB, live_bytes=20 * KIB)
    assert 500 * KIB < noise.new_root_bytes() < 530 * KIB
    assert not noise.should_drop(0.05)


def test_new_root_is_never_estimated_above_the_old_one() -> None:
    assert changed(own_bytes=4096 * KIB).new_root_bytes() == 220 * KIB


def test_each_new_root_adds_its_bytes() -> None:
    assert not changed(roots=2).should_drop(0.05)


def test_live_or_unused_root_is_not_dropped() -> None:
    assert not changed(root_lives=True).should_drop(0.0)
    assert not changed(roots=0).should_drop(0.0)

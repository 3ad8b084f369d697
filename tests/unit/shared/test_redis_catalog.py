"""Test container summaries in Redis: they round trip, with sketch names of any length."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nearkin_shared.formats.container import decode_container
from nearkin_shared.index.catalog import summarise_directory
from nearkin_shared.index.redis.catalog_encoding import NAME_BYTES_MAX, pack_summary, parse_summary
from tests.support.data import samples


@pytest.mark.parametrize("make", [samples.small_container, samples.patch_container, samples.empty_container])
def test_summary_round_trips(make: object) -> None:
    assert callable(make)
    summary = summarise_directory(decode_container(make(), "sample"))
    assert parse_summary(summary.container, pack_summary(summary)) == summary


@pytest.mark.parametrize("name", ["x" * 256, "x" * 65_535, "\u00e4" * 200, "x" + "\u00e4" * 200])
def test_sketch_name_beyond_the_limit_is_truncated(name: str) -> None:
    """A container may name a sketch with 65,535 bytes, which must not end an index rebuild."""
    summary = summarise_directory(decode_container(samples.small_container(), "sample"))
    found = parse_summary(summary.container, pack_summary(replace(summary, sketches={name: 3, name + "y": 4, "n": 1})))
    (cut,) = found.sketches.keys() - {"n"}
    assert name.startswith(cut)
    assert NAME_BYTES_MAX - 1 <= len(cut.encode()) <= NAME_BYTES_MAX
    assert found.sketches == {cut: 7, "n": 1}
    assert found.found_by == summary.found_by

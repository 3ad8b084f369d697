"""Test the savings table: its lines add up, and no step shows negative savings."""

from __future__ import annotations

from nearkin_shared.results import Ledger


def test_deltas_save_only_what_is_not_stored() -> None:
    """The size of a put's patches is estimated: 430 kB, while 485 kB are stored."""
    put = Ledger(
        logical_bytes=1000, unique_bytes=800, delta_chunk_bytes=790, delta_bytes=30, block_bytes=55, stored_bytes=60
    )
    assert (put.delta_saved_bytes, put.compression_saved_bytes) == (745, 0)
    assert put.unique_bytes - put.delta_saved_bytes - put.compression_saved_bytes == put.block_bytes


def test_compression_saves_the_rest_of_an_estimate() -> None:
    put = Ledger(unique_bytes=800, delta_chunk_bytes=500, delta_bytes=30, block_bytes=200)
    assert (put.delta_saved_bytes, put.compression_saved_bytes) == (470, 130)


def test_incompressible_raw_chunks_are_no_delta_savings() -> None:
    put = Ledger(unique_bytes=800, block_bytes=820)
    assert (put.delta_saved_bytes, put.compression_saved_bytes) == (0, -20)


def test_table_of_chunks_alone_uses_delta_bytes() -> None:
    """The table of a manifest has no blocks."""
    assert Ledger(unique_bytes=800, delta_chunk_bytes=790, delta_bytes=30).delta_saved_bytes == 760

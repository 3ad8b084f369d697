"""The ledger: its lines add up, and no step is told to have saved less than nothing of what another did."""

from __future__ import annotations

from nearkin_shared.results import Ledger


def test_deltas_have_not_saved_what_is_stored() -> None:
    """Of a put what patches come to is estimated: 430 kB, and 485 are stored."""
    put = Ledger(
        logical_bytes=1000, unique_bytes=800, delta_chunk_bytes=790, delta_bytes=30, block_bytes=55, stored_bytes=60
    )
    assert (put.delta_saved_bytes, put.compression_saved_bytes) == (745, 0)
    assert put.unique_bytes - put.delta_saved_bytes - put.compression_saved_bytes == put.block_bytes


def test_what_an_estimate_leaves_compression_saved() -> None:
    put = Ledger(unique_bytes=800, delta_chunk_bytes=500, delta_bytes=30, block_bytes=200)
    assert (put.delta_saved_bytes, put.compression_saved_bytes) == (470, 130)


def test_what_does_not_compress_is_no_delta() -> None:
    put = Ledger(unique_bytes=800, block_bytes=820)
    assert (put.delta_saved_bytes, put.compression_saved_bytes) == (0, -20)


def test_a_ledger_of_chunks_alone_goes_by_what_deltas_came_to() -> None:
    """A manifest's knows no blocks."""
    assert Ledger(unique_bytes=800, delta_chunk_bytes=790, delta_bytes=30).delta_saved_bytes == 760

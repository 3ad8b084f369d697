"""Format the ledger of bytes saved as a table.

    logical -> after dedup -> after delta -> after compression -> stored, total

Invariant: the rows add up; each shows the bytes left after one step and the bytes that the step saved.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

    from nearkin_shared.results import Ledger


def ledger_table(ledger: Ledger, seconds: float) -> Table:
    """Return the ledger as a table.

    One row per step: ratio to the logical bytes, counts of chunks, format_speed.
    """
    from rich.box import SIMPLE
    from rich.table import Table

    table = Table(box=SIMPLE, show_footer=True, pad_edge=False)
    table.add_column("step", footer=f"{seconds:.2f} s, {format_speed(ledger.logical_bytes, seconds)}")
    table.add_column("left", justify="right")
    table.add_column("saved", justify="right")
    table.add_column("ratio", justify="right", footer=f"{ledger.reduction_ratio:.2f}")
    table.add_column("chunks", footer=f"DCR {ledger.dcr:.2f}, DCE {ledger.dce:.3f}")
    unique_bytes = ledger.unique_bytes
    after_delta_bytes = unique_bytes - ledger.delta_saved_bytes
    overhead_bytes = ledger.stored_bytes - ledger.block_bytes
    duplicates = f"{ledger.duplicate_chunks:,} duplicate, {ledger.zero_chunks:,} of them zero"
    steps = (
        ("logical", ledger.logical_bytes, None, f"{ledger.chunks:,}"),
        ("after dedup", unique_bytes, ledger.dedup_saved_bytes, duplicates),
        ("after delta", after_delta_bytes, ledger.delta_saved_bytes, f"{ledger.delta_chunks:,} delta"),
        ("after compression", ledger.block_bytes, ledger.compression_saved_bytes, f"{ledger.raw_chunks:,} raw"),
        ("stored, with everything", ledger.stored_bytes, -overhead_bytes, "directories, manifests, parity"),
    )
    for name, left_bytes, saved_bytes, chunks in steps:
        saved = "" if saved_bytes is None else human_bytes(saved_bytes)
        table.add_row(name, human_bytes(left_bytes), saved, _ratio(ledger.logical_bytes, left_bytes), chunks)
    return table


def plural(count: int, noun: str, many: str | None = None) -> str:
    """Format a count with its noun: `1 key`, `2 keys`; `many`: an irregular plural."""
    return f"{count:,} {noun if count == 1 else many or f'{noun}s'}"


def human_bytes(count_bytes: int) -> str:
    """Format bytes in decimal units with three significant digits: `146 MB`, `9,999 B`.

    Below 10 kB the number is exact.
    """
    if abs(count_bytes) < 10_000:
        return f"{count_bytes:,} B"
    value, unit = count_bytes / 1000, "kB"
    for larger in ("MB", "GB", "TB", "PB"):
        if abs(value) < 999.5:
            break
        value, unit = value / 1000, larger
    digits = 2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0
    return f"{value:.{digits}f} {unit}"


def format_speed(count_bytes: int, seconds: float) -> str:
    """Format bytes a second in MB/s."""
    return f"{count_bytes / seconds / 1e6:,.0f} MB/s" if seconds > 0 else "- MB/s"


def _ratio(logical_bytes: int, left_bytes: int) -> str:
    return f"{logical_bytes / left_bytes:.2f}" if left_bytes else "-"

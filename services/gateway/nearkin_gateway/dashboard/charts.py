"""Compute the geometry of the charts, which templates draw as SVG. Functions are pure.

SVG uses classes, no style attribute and no script: the Content-Security-Policy of the pages forbids both.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import UTC, datetime

from nearkin_shared.results import Explanation, Ledger
from nearkin_shared.savings_table import human_bytes
from nearkin_shared.utils.frozen import frozen

WIDTH, HEIGHT = 720, 240
LEFT, RIGHT, TOP, BOTTOM = 104, 12, 12, 34
TICKS_MAX = 5
STRIP_WIDTH, STRIP_BINS_MAX = 960, 240
"""4 px a bin: thinner columns cannot be distinguished or pointed at."""
KINDS = ("zero", "duplicate", "delta", "raw")


@frozen
class Tick:
    """A grid line."""

    at: float
    label: str


@frozen
class Curve:
    """Two lines over time on a logarithmic scale.

    At a ratio of 20 to 1 a linear scale would draw the lower line at zero.
    """

    logical: str
    stored: str
    between: str
    across: list[Tick]
    upwards: list[Tick]


@frozen
class WaterfallBar:
    """A bar of the waterfall: bytes after a step, and bytes it removed (negative: added)."""

    name: str
    left_bytes: int
    saved_bytes: int
    width: float
    """Of 1000."""
    saved_width: float


@frozen
class Bar:
    """A minute."""

    at: float
    width: float
    top: float
    height: float
    label: str


@frozen
class Piece:
    """A part of one column of the strip."""

    kind: str
    at: float
    width: float
    top: float
    height: float


@frozen
class Column:
    """One column of the strip, with its tooltip."""

    label: str
    pieces: list[Piece]


@frozen
class Strip:
    """A blob from its first byte to its last, by how its chunks are kept."""

    columns: list[Column]
    totals: list[tuple[str, int, int, float]]
    """(kind, chunks, bytes, share) in the order of KINDS."""


def curve(points: Sequence[tuple[float, int, int]]) -> Curve | None:
    """Return step lines of (seconds since 1970, logical, stored); None without points."""
    seen = [point for point in points if point[1] > 0]
    if not seen:
        return None
    first, last = seen[0][0], max(seen[-1][0], seen[0][0] + 1)
    values = [max(1, value) for point in seen for value in point[1:]]
    ticks = _ticks(min(values), max(values))
    low, high = math.log10(min(*values, *ticks)) - 0.02, math.log10(max(*values, *ticks)) + 0.02

    def x(seconds: float) -> float:
        return round(LEFT + (seconds - first) / (last - first) * (WIDTH - LEFT - RIGHT), 1)

    def y(value: float) -> float:
        return round(TOP + (high - math.log10(max(1, value))) / (high - low) * (HEIGHT - TOP - BOTTOM), 1)

    def steps(which: int) -> list[tuple[float, float]]:
        corners: list[tuple[float, float]] = []
        for point in seen:
            if corners:
                corners.append((x(point[0]), corners[-1][1]))
            corners.append((x(point[0]), y(point[which])))
        return [*corners, (x(last), corners[-1][1])]

    logical, stored = steps(1), steps(2)
    upwards = [Tick(y(value), _round_bytes(value)) for value in ticks]
    across = [
        Tick(x(first + (last - first) * part / 2), _when(first + (last - first) * part / 2, last - first))
        for part in range(3)
    ]
    return Curve(_path(logical), _path(stored), _path([*logical, *reversed(stored)]) + " Z", across, upwards)


def waterfall(ledger: Ledger) -> list[WaterfallBar]:
    """Return what each step left: dedup, delta, compression, and what metadata add."""
    left = [
        ("Logical", ledger.logical_bytes),
        ("After dedup", ledger.unique_bytes),
        ("After delta", ledger.unique_bytes - ledger.delta_saved_bytes),
        ("After compression", ledger.block_bytes),
        ("Stored, with metadata", ledger.stored_bytes),
    ]
    whole = max(1, *(size for _, size in left))
    steps, before = [], left[0][1]
    for name, size in left:
        saved = before - size
        steps.append(WaterfallBar(name, size, saved, _width(size, whole), _width(max(0, saved), whole)))
        before = size
    return steps


def bars(minutes: Sequence[tuple[str, int]]) -> tuple[list[Bar], list[Tick]]:
    """Return a bar a minute for (label, bytes), and the grid."""
    high = max((size for _, size in minutes), default=0) or 1
    step = (WIDTH - LEFT - RIGHT) / max(1, len(minutes))
    room = HEIGHT - TOP - BOTTOM
    drawn = [
        Bar(
            at=round(LEFT + step * number, 1),
            width=round(step * 0.8, 1),
            top=round(TOP + room * (1 - size / high), 1),
            height=round(room * size / high, 1),
            label=f"{label}: {human_bytes(size)}",
        )
        for number, (label, size) in enumerate(minutes)
        if size
    ]
    return drawn, [Tick(round(TOP + room * (1 - part), 1), human_bytes(int(high * part))) for part in (0, 0.5, 1)]


def strip(explanation: Explanation) -> Strip:
    """Return columns for equal ranges of a blob, each divided by the kind of its bytes."""
    size_bytes = explanation.info.size_bytes
    chunks = [chunk for segment in explanation.segments for chunk in segment.chunks]
    bins = max(1, min(STRIP_BINS_MAX, len(chunks)))
    filled = [dict.fromkeys(KINDS, 0) for _ in range(bins)]
    counts, sums = dict.fromkeys(KINDS, 0), dict.fromkeys(KINDS, 0)
    for chunk in chunks:
        counts[chunk.kind] += 1
        sums[chunk.kind] += chunk.length_bytes
        start, stop = chunk.offset, chunk.offset + chunk.length_bytes
        number = start * bins // size_bytes
        while start < stop:
            end = min(stop, -(-(number + 1) * size_bytes // bins))
            filled[min(number, bins - 1)][chunk.kind] += end - start
            start, number = end, number + 1
    width = STRIP_WIDTH / bins
    columns = [_column(number, width, shares, size_bytes, bins) for number, shares in enumerate(filled)]
    return Strip(columns, [(kind, counts[kind], sums[kind], sums[kind] / max(1, size_bytes)) for kind in KINDS])


def _column(number: int, width: float, shares: dict[str, int], size_bytes: int, bins: int) -> Column:
    whole, top, pieces = sum(shares.values()) or 1, 0.0, []
    for kind in KINDS:
        if shares[kind]:
            height = shares[kind] / whole * 100
            pieces.append(Piece(kind, round(number * width, 2), round(width, 2), round(top, 2), round(height, 2)))
            top += height
    begins, ends = number * size_bytes // bins, (number + 1) * size_bytes // bins
    summary = ", ".join(f"{shares[kind] / whole:.0%} {kind}" for kind in KINDS if shares[kind])
    return Column(f"{human_bytes(begins)} to {human_bytes(ends)}: {summary}", pieces)


def _ticks(least: int, most: int) -> list[int]:
    """Return tick values that cover `least` to `most`.

    Steps are 1, 2, 5, or powers of ten, or larger powers.
    """
    rounds = [digit * 10**power for power in range(19) for digit in (1, 2, 5)]
    start = max(number for number, value in enumerate(rounds) if value <= max(1, least))
    stop = min((number for number, value in enumerate(rounds) if value >= most), default=len(rounds) - 1)
    if stop - start < TICKS_MAX:
        return rounds[start : max(stop, start + 1) + 1]
    decades = rounds[start - start % 3 : stop + 3 : 3]
    return decades[:: -(-len(decades) // (TICKS_MAX + 1))]


def _round_bytes(value: int) -> str:
    """Return a tick's value, whose digits are one and zeros: `20 MB`."""
    power = min(6, (len(str(value)) - 1) // 3)
    return f"{value // 1000**power} {('B', 'kB', 'MB', 'GB', 'TB', 'PB', 'EB')[power]}"


def _path(corners: Sequence[tuple[float, float]]) -> str:
    return "M " + " L ".join(f"{x} {y}" for x, y in corners)


def _width(part: int, whole: int) -> float:
    return round(max(2.0 if part else 0.0, part / whole * 1000), 1)


def _when(seconds: float, span_seconds: float) -> str:
    moment = datetime.fromtimestamp(seconds, UTC)
    if span_seconds < 600:
        return f"{moment:%H:%M:%S}"
    return f"{moment:%H:%M}" if span_seconds < 86_400 else f"{moment:%Y-%m-%d}"

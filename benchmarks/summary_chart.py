"""Draw reduction against put speed from the first table of docs/benchmarks/summary.md.

    python -m benchmarks.summary_chart      writes docs/benchmarks/reduction-speed.svg

x: MB/s of `put all`, linear    y: reduction, logarithmic    up and to the right is better
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
SUMMARY = ROOT / "docs" / "benchmarks" / "summary.md"
CHART = ROOT / "docs" / "benchmarks" / "reduction-speed.svg"
TITLE = "Ten botocore releases (1.15 GB): reduction against put speed, one core"
SECTION = "## Ten releases of botocore"
WIDTH, HEIGHT = 760, 400
LEFT, TOP, RIGHT, BOTTOM = 64, 40, 20, 52
SPEED_MAX, SPEED_STEP = 700, 100
REDUCTIONS = (1, 2, 5, 10, 20, 50, 100)
OURS, THEIRS, GREY = "#b3261e", "#33658a", "#5f6368"


class Tool(NamedTuple):
    """One row of the table."""

    name: str
    put_speed: float
    reduction: float


def read_tools(text: str) -> list[Tool]:
    """Return the rows of the first table of the section. Raises ValueError if there is none."""
    table = re.search(r"(?m)^\| tool \|.*\n\|[-|]+\n((?:\|.*\n)+)", text[text.index(SECTION) :])
    if table is None:
        raise ValueError(f"{SUMMARY.name}: section {SECTION!r} has no table of tools")
    rows = [[cell.strip() for cell in line.strip("|\n").split("|")] for line in table[1].splitlines()]
    return [Tool(row[0], float(row[1]), float(row[-1])) for row in rows]


def x_of(speed: float) -> float:
    """Return the horizontal position of a speed."""
    return LEFT + speed / SPEED_MAX * (WIDTH - LEFT - RIGHT)


def y_of(reduction: float) -> float:
    """Return the vertical position of a reduction."""
    share = math.log(reduction) / math.log(REDUCTIONS[-1])
    return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)


def elements(tools: list[Tool]) -> Iterator[str]:
    """Yield the lines of the SVG."""
    box = f"0 0 {WIDTH} {HEIGHT}"
    yield f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{box}" font-family="sans-serif" font-size="13">'
    yield f"<title>{TITLE}</title>"
    yield f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>'
    yield f'<text x="{LEFT}" y="22" font-size="15">{TITLE}</text>'
    for speed in range(0, SPEED_MAX + 1, SPEED_STEP):
        x = x_of(speed)
        yield f'<line x1="{x:.1f}" y1="{TOP}" x2="{x:.1f}" y2="{HEIGHT - BOTTOM}" stroke="#e4e6e8"/>'
        yield f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle" fill="{GREY}">{speed}</text>'
    for reduction in REDUCTIONS:
        y = y_of(reduction)
        yield f'<line x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}" stroke="#e4e6e8"/>'
        yield f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end" fill="{GREY}">{reduction}</text>'
    x_middle, y_middle = (LEFT + WIDTH - RIGHT) / 2, (TOP + HEIGHT - BOTTOM) / 2
    yield f'<text x="{x_middle:.1f}" y="{HEIGHT - 12}" text-anchor="middle">put, MB/s of logical data</text>'
    rotated = f"translate(18 {y_middle:.1f}) rotate(-90)"
    yield f'<text transform="{rotated}" text-anchor="middle">reduction: logical / stored bytes</text>'
    for tool in tools:
        x, y = x_of(tool.put_speed), y_of(tool.reduction)
        colour = OURS if tool.name.startswith("nearkin") else THEIRS
        is_right = x > WIDTH * 0.7
        label_x, anchor = (x - 10, "end") if is_right else (x + 10, "start")
        yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{colour}"/>'
        position = f'x="{label_x:.1f}" y="{y + 4:.1f}" text-anchor="{anchor}"'
        yield f'<text {position} fill="{colour}">{escape(tool.name)}</text>'
    yield "</svg>"


def draw(text: str) -> str:
    """Return the chart of the table in `text`, the same bytes for the same table."""
    return "\n".join(elements(read_tools(text))) + "\n"


if __name__ == "__main__":
    CHART.write_text(draw(SUMMARY.read_text()), encoding="utf-8")
    sys.stdout.write(f"written: {CHART.relative_to(ROOT)}\n")

"""Draw the charts of a record.

Store and pairs: reduction against speed, a panel per corpus. Kernels: dedup against speed for the chunkers, and a bar
for every kernel, its speed relative to OpenSSL's SHA-1. Drawn without a display, the same bytes for the same record.

Invariant: a dot is a tool, with the spread of its speed; up and to the right is better.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from nearkin.lab.measurement_record import MeasurementRecord, Row, Spread

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis

_OURS, _THEIRS, _GREY = "#b3261e", "#33658a", "#5f6368"
_PANEL_INCHES = (5.4, 4.2)
_PNG_DPI = 144
_LABEL_POINTS = 8
_LABEL_OFFSET_POINTS = 7
_LABEL_GAP_PIXELS = 13.0  # between the baselines of two labels of 8 points at 100 dots an inch, with some air
_LABEL_CHARACTER_PIXELS = 6.5
_LABEL_TOP_PIXELS = 15.0  # from a dot's middle to its label's upper edge
_LEADER = {"arrowstyle": "-", "alpha": 0.35, "linewidth": 0.6, "shrinkA": 0, "shrinkB": 3}
_LOG_FROM = 3  # a range of heights by which a linear axis would press the small ones together
_LOG_FROM_SPEEDS = 30
_PANELS_MAX = 16


class _Dot(NamedTuple):
    label: str
    speed: Spread
    height: float
    ours: bool


class _Panel(NamedTuple):
    title: str
    speed: str
    height: str
    dots: list[_Dot]


def draw(record: MeasurementRecord, kinds: Sequence[str]) -> dict[str, bytes]:
    """Return the chart in each of `kinds`, `svg` or `png`.

    It has at most 16 panels: the first corpora.
    """
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # text as text: a reader can search it; a fixed salt: the same record gives the same bytes
    looks = rc_context({"svg.fonttype": "none", "svg.hashsalt": "nearkin", "font.size": 9})
    with looks, warnings.catch_warnings():
        # a folder's name in letters that the font lacks: the SVG has them as text, so that the warnings are useless
        warnings.filterwarnings("ignore", message=r"Glyph \d+ .*missing from", category=UserWarning)
        panels = _panels(record)[:_PANELS_MAX]
        bars = [row for row in record.rows if record.room == "kernels"]
        columns = 2 if len(panels) + bool(bars) > 1 else 1
        rows = -(-len(panels) // columns) if not bars else len(record.corpora[:_PANELS_MAX])
        figure = Figure(figsize=(_PANEL_INCHES[0] * columns, _PANEL_INCHES[1] * rows + 0.5), layout="constrained")
        FigureCanvasAgg(figure)  # labels are placed by pixels
        grid: Any = figure.subplots(rows, columns, squeeze=False)
        places: list[Axes] = list(grid.flat)
        if bars:
            _kernel_panels(record, panels, places)
        else:
            for place, panel in zip(places, panels, strict=False):
                _dots(place, panel)
            for place in places[len(panels) :]:
                place.set_axis_off()
        core = "not pinned" if record.core is None else "one core"
        figure.suptitle(
            f"nearkin bench {record.room}: {core}, median of {record.runs}; red: Nearkin's own", fontsize=11
        )
        figure.draw_without_rendering()
        for place in places:
            _spread_labels(place)
        return {kind: _save(figure, kind) for kind in kinds}


def _save(figure: Any, kind: str) -> bytes:
    written = io.BytesIO()
    figure.savefig(written, format=kind, dpi=_PNG_DPI, metadata={"Date": None} if kind == "svg" else {})
    return written.getvalue()


_STORE = (
    ("put_mbps", "put, MB/s of logical data"),
    ("get_newest_mbps", "get newest, MB/s of logical data"),
)
_PAIRS = (("encode_mbps", "encode, MB/s of targets"), ("decode_mbps", "decode, MB/s of targets"))


def _panels(record: MeasurementRecord) -> list[_Panel]:
    if record.room == "kernels":
        return [
            _panel(record, corpus.name, "chunking", "mbps", "cut, MB/s", "reduction by dedup alone")
            for corpus in record.corpora
        ]
    group, axes, height = (
        ("store", _STORE, "reduction, everything stored counted")
        if record.room == "store"
        else ("codecs", _PAIRS, "reduction of similar chunks")
    )
    found = [
        _panel(record, corpus.name, group, name, title, height) for corpus in record.corpora for name, title in axes
    ]
    return [panel for panel in found if panel.dots] or found[:1]


def _panel(record: MeasurementRecord, corpus: str, group: str, name: str, speed: str, height: str) -> _Panel:
    rows = [row for row in record.rows if (row.corpus, row.group) == (corpus, group)]
    dots = [
        _Dot(row.tool, figure, reduction.median, row.ours)
        for row in rows
        if (figure := row.figures.get(name)) and (reduction := row.figures.get("reduction"))
    ]
    return _Panel(corpus, speed, height, dots)


def _dots(place: Axes, panel: _Panel) -> None:
    for dot in panel.dots:
        colour = _OURS if dot.ours else _THEIRS
        median = dot.speed.median
        ends = [[median - dot.speed.low], [dot.speed.high - median]]
        place.errorbar(median, dot.height, xerr=ends, fmt="o", color=colour, markersize=6, elinewidth=1, capsize=2)
        place.annotate(
            dot.label,
            (median, dot.height),
            xytext=(_LABEL_OFFSET_POINTS, 3),
            textcoords="offset points",
            fontsize=_LABEL_POINTS,
            color=colour,
            arrowprops={**_LEADER, "color": colour},
        )
    heights = [dot.height for dot in panel.dots]
    if heights and max(heights) > _LOG_FROM * min(heights) > 0:
        place.set_yscale("log")
        _plain_ticks(place.yaxis)
    speeds = [dot.speed.median for dot in panel.dots]
    if speeds and max(speeds) > _LOG_FROM_SPEEDS * min(speeds):
        place.set_xscale("log")
        _plain_ticks(place.xaxis)
        place.set_xlim(min(speeds) / 2, 4 * max(speeds))
    elif speeds:
        place.set_xlim(0, 1.3 * max(dot.speed.high for dot in panel.dots))  # room for the last label
    place.margins(y=0.15)
    place.set_title(panel.title, fontsize=10, parse_math=False)
    place.set_xlabel(panel.speed)
    place.set_ylabel(panel.height)
    place.grid(visible=True, alpha=0.3)


def _plain_ticks(axis: Axis) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter

    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter(NullFormatter())


def _spread_labels(place: Axes) -> None:
    """Move overlapping labels apart, upwards, the lowest first; none leaves its panel.

    A label without room above is drawn below the others.
    """
    panel = place.get_window_extent()
    edge, highest = panel.x1, panel.y1 - _LABEL_TOP_PIXELS
    taken: list[tuple[float, float, float]] = []
    for text in sorted(place.texts, key=lambda one: float(place.transData.transform(one.xy)[1])):  # type: ignore[attr-defined]  # annotations
        left, height = place.transData.transform(text.xy)  # type: ignore[attr-defined]
        right = left + _LABEL_CHARACTER_PIXELS * len(text.get_text())
        before = right + _LABEL_OFFSET_POINTS > edge
        if before:  # written on the dot's other side
            left, right = 2 * left - right, left
            text.set_horizontalalignment("right")
        others = sorted(other for other_left, other_right, other in taken if left < other_right and other_left < right)
        wanted = _free_height(height, others, _LABEL_GAP_PIXELS)
        if wanted > highest:
            wanted = _free_height(height, others[::-1], -_LABEL_GAP_PIXELS)
        taken.append((left, right, wanted))
        points = 72 / place.figure.dpi
        beside = -_LABEL_OFFSET_POINTS if before else _LABEL_OFFSET_POINTS
        text.set_position((beside, 3 + (wanted - height) * points))


def _free_height(height: float, others: Sequence[float], step: float) -> float:
    """Return where a label is clear of `others`, which come in the direction of `step`."""
    for other in others:
        if abs(height - other) < _LABEL_GAP_PIXELS:
            height = other + step
    return height


def _kernel_panels(record: MeasurementRecord, panels: Sequence[_Panel], places: Sequence[Axes]) -> None:
    for number, (corpus, panel) in enumerate(zip(record.corpora, panels, strict=False)):
        _dots(places[2 * number], panel)
        _bars(places[2 * number + 1], corpus.name, [row for row in record.rows if row.corpus == corpus.name])


def _bars(place: Axes, title: str, rows: Sequence[Row]) -> None:
    found = [(row, figure) for row in rows if (figure := row.figures["by_sha1"]) is not None]
    for height, (row, figure) in enumerate(reversed(found)):
        median = figure.median
        ends = [[median - figure.low], [figure.high - median]]
        place.barh(height, median, color=_OURS if row.ours else _THEIRS, height=0.7, xerr=ends, ecolor=_GREY, capsize=2)
    place.set_yticks(range(len(found)), [row.tool for row, _ in reversed(found)], fontsize=_LABEL_POINTS)
    place.axvline(1, color=_GREY, linewidth=1, linestyle="--")
    place.set_xscale("log")
    _plain_ticks(place.xaxis)
    place.set_title(title, fontsize=10, parse_math=False)
    place.set_xlabel("speed by one stream of OpenSSL's SHA-1 at 8 KiB")
    place.grid(visible=True, axis="x", alpha=0.3)

# size: read by the gateway and by the embedded writer, with tests of its own
"""Read ranges of several versions, which are numbered as if they were end to end.

    position -> source and position in it -> the window of the source

Invariant: at most WINDOWS_MAX segments are held, however many sources there are.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

from nearkin_shared.reading.segment_window import SegmentWindow

if TYPE_CHECKING:
    from nearkin_shared.formats.manifest import Manifest
    from nearkin_shared.reading.chunk_ranges import PlacedChunks

WINDOWS_MAX = 4
"""A tree alternates between its base and the checkpoints of one run or two."""


class SourceVersion(NamedTuple):
    """Name of a version that ranges are copied of."""

    key: str
    version: int


class CopySources:
    """The versions that ranges are copied of. Not to be shared between threads."""

    def __init__(
        self,
        manifests: Sequence[Manifest],
        read: Callable[[Manifest, int, int], bytes],
        find: Callable[[Manifest, int, int], Iterator[PlacedChunks]] | None = None,
    ) -> None:
        """`read`: returns bytes [start, stop) of a version, verified; `find`: its chunks."""
        self.manifests = manifests
        self._read = read
        self._find = find
        self._starts = [0, *accumulate(manifest.size_bytes for manifest in manifests)]
        self._windows: OrderedDict[int, SegmentWindow] = OrderedDict()

    def locate(self, position: int) -> tuple[Manifest, SegmentWindow, int]:
        """Return the source of a byte, its window, and where the source starts."""
        number = bisect_right(self._starts, position) - 1
        manifest = self.manifests[number]
        window = self._windows.pop(number, None)
        if window is None:
            if len(self._windows) >= WINDOWS_MAX:
                self._windows.popitem(last=False)
            find = None if self._find is None else partial(self._find, manifest)
            window = SegmentWindow(manifest, partial(self._read, manifest), find)
        self._windows[number] = window
        return manifest, window, self._starts[number]

"""Test histories that change some regions for a while, then others, with GC runs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from nearkin import open_store
from nearkin.lab.generated_data import random_bytes, records_like, text_like
from nearkin_shared.config.settings import Settings
from tests.support.checks.gc_checks import COLLECTED
from tests.support.data.stores import settings
from tests.support.fakes.clock import DAY, Clock

KEYS = ("a", "b")
HOUR = 3600


class Lot:
    """The random choices of one history."""

    def __init__(self, seed: int) -> None:
        self._lot = np.random.default_rng(seed)

    def number(self, least: int, most: int) -> int:
        return int(self._lot.integers(least, most + 1))

    def one_of(self, *choices: object) -> object:
        return choices[self.number(0, len(choices) - 1)]

    def happens(self, share: float) -> bool:
        return bool(self._lot.random() < share)

    def settings(self) -> Settings:
        return settings(
            COLLECTED,
            {
                "block": {
                    "raw_bytes": self.one_of("64KiB", "256KiB", "1MiB"),
                    "delta_bytes": self.one_of("16KiB", "64KiB"),
                },
                "delta": {
                    "codec": self.one_of("patch", "patch", "patch", "xdelta3"),
                    "max_depth": self.number(1, 4),
                },
                "gc": {
                    "merge_block_bytes": self.one_of("256KiB", "512KiB", "1MiB", "4MiB"),
                    "merge_versions_min": self.number(2, 4),
                    "compact_below": self.one_of(0.3, 0.8, 0.95),
                    "recompress_level": self.one_of(0, 9),
                },
                "container": {"target_bytes": self.one_of("256KiB", "1MiB", "4MiB")},
            },
        )

    def content(self) -> bytes:
        kind = (text_like, random_bytes, records_like)[self.number(0, 2)]
        return kind(self.number(300_000, 1_000_000), self.number(0, 1000))

    def stretches(self, size_bytes: int) -> list[slice]:
        starts = [self.number(0, size_bytes - 60_000) for _ in range(self.number(1, 3))]
        return [slice(start, start + self.number(20_000, 250_000)) for start in starts]

    def changed(self, content: bytes, stretches: list[slice]) -> bytes:
        """Return the next version.

        Some bytes of most chunks in the stretches, sometimes more behind.
        """
        found = np.frombuffer(content, np.uint8).copy()
        for stretch in stretches:
            for at in range(stretch.start, min(stretch.stop, len(found) - 1000), self.number(800, 4000)):
                place = slice(at + self.number(0, 700), None)
                count = min(self.number(3, 40), len(found[place]))
                found[place][:count] = self._lot.integers(0, 256, count)
        cut = self.number(0, len(found))
        more = self._lot.integers(0, 256, self.number(1, 3000) if self.happens(0.2) else 0, np.uint8)
        return found[:cut].tobytes() + more.tobytes() + found[cut:].tobytes()


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(2, 12))])
def test_histories_restore_after_gc_runs(tmp_path: Path, seed: int) -> None:
    lot, clock = Lot(seed), Clock()
    newest = {key: lot.content() for key in KEYS[: lot.number(1, 2)]}
    live: dict[tuple[str, int], bytes] = {}
    with open_store(tmp_path / "s", settings=lot.settings(), clock=clock, create=True) as store:

        def put(key: str) -> None:
            live[key, store.put(key, newest[key]).info.version] = newest[key]
            clock.now += HOUR

        for key in newest:
            put(key)
        for _ in range(lot.number(2, 4)):
            key = KEYS[lot.number(0, len(newest) - 1)]
            stretches = lot.stretches(len(newest[key]))
            for _ in range(lot.number(3, 16)):
                newest[key] = lot.changed(newest[key], stretches)
                put(key)
            if lot.happens(0.4):
                for version in [version for version in live if lot.happens(0.3)]:
                    store.delete(*version)
                    del live[version]
            for _ in range(lot.number(1, 2)):
                clock.now += 8 * DAY
                store.gc()
            assert store.verify().damage == ()
            assert [store.get(*version).read() == content for version, content in live.items()] == [True] * len(live)

"""Run the index shards of a chaos run: they are killed, stopped for a while, and lose their index.

Invariant: a shard's port and folder stay; the file of the shared state is never lost.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Self

from nearkin_shared.limits import MIB
from tests.support.servers.shard_process import ShardProcess

NAME = "shard-"
DOWN, PAUSED, LOST = "shard-down", "shard-paused", "shard-lost"
OUTAGES = (DOWN, PAUSED, LOST)
DOWN_SECONDS = 5.0
PAUSED_SECONDS = 8.0
"""Longer than the timeout of a call to the shared state, in which a lease is renewed."""
NO_REDIS = "redis://127.0.0.1:1/0"
"""No server: a process that connects to it fails."""
NO_CONFIG: Mapping[str, dict[str, object]] = MappingProxyType({})


class ShardFleet:
    """The index shards of one store, none if `count` is 0."""

    def __init__(self, folder: Path, count: int, config_file: Path) -> None:
        """`config_file` is read by each shard when it starts."""
        self._shards = {
            f"{NAME}{number}": ShardProcess(folder / f"{NAME}{number}", number, count, config=config_file)
            for number in range(count)
        }
        self._stack = ExitStack()

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the shards, in order."""
        return tuple(self._shards)

    def config(self) -> Mapping[str, dict[str, object]]:
        """Return the settings that name the shards in place of Redis."""
        if not self._shards:
            return NO_CONFIG
        urls = [shard.url for shard in self._shards.values()]
        return {
            "redis": {"url": NO_REDIS},
            "index": {"backend": "shards", "shards": urls, "map_bytes": 64 * MIB},
        }

    def __enter__(self) -> Self:
        for number, shard in enumerate(self._shards.values()):
            if number == 0:
                shard.give_new_lease()
            self._stack.enter_context(shard)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, err: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def kill(self, name: str, away_seconds: float) -> None:
        """Kill a shard, and start it again after `away_seconds`; return when its index is complete."""
        self._shards[name].kill()
        time.sleep(away_seconds)
        self._shards[name].start()

    def fail(self, name: str, outage: str) -> None:
        """Make a shard unreachable for a while: DOWN refuses, PAUSED does not answer, LOST rebuilds its index."""
        shard = self._shards[name]
        if outage == PAUSED:
            shard.pause()
            time.sleep(PAUSED_SECONDS)
            shard.resume()
            return
        shard.kill()
        if outage == LOST:
            for folder in shard.index_folder.glob("*-of-*"):
                shutil.rmtree(folder)
        else:
            time.sleep(DOWN_SECONDS)
        shard.start()

    def restart_ended(self) -> list[str]:
        """Start shards that ended by themselves; return their names."""
        found = [name for name, shard in self._shards.items() if not shard.running]
        for name in found:
            self._shards[name].start()
        return found

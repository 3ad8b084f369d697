"""Index shards on loopback, in threads of this process, whose containers are on a shelf."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from nearkin_index.shard_index import ShardIndex
from nearkin_index.shard_server import ShardOptions, ShardServer, ShardStore
from nearkin_index.state_file import StateFile
from nearkin_shared.errors import Corrupt
from nearkin_shared.formats.directory import Directory
from nearkin_shared.index.container_entries import ContainerEntries
from nearkin_shared.index.shards.key_ranges import part_of
from nearkin_shared.index.shards.sharded_index import ShardedIndex
from nearkin_shared.limits import MIB
from nearkin_shared.types import ContainerId
from tests.support.data import samples
from tests.support.servers.server import free_port

STORE_ID = "00112233445566778899aabbccddeeff"
TOKEN = "a token of shards"
START_SECONDS = 20.0


class ContainerShelf:
    """Entries of durable containers, from which a lost index is made again."""

    def __init__(self) -> None:
        self.stored: dict[int, ContainerEntries] = {}
        self.generation = 0

    def directory(self, container: ContainerId) -> Directory:
        """Return a container's directory. Raises Corrupt."""
        if container not in self.stored:
            raise Corrupt(f"container {container:016x}: missing")
        return self.stored[container].directory

    def store_of(self, number: int, count: int) -> ShardStore:
        """Return what a shard needs of the store."""

        def complete(index: ShardIndex, known: Any) -> None:
            missing = [one for container, one in sorted(self.stored.items()) if container not in known]
            index.add_parts([part_of(one, number, count) for one in missing])

        return ShardStore(STORE_ID, self, lambda: list(self.stored), lambda: self.generation, complete)


class ShelvedShards(ShardedIndex):
    """Index whose containers are on the shelf before they are published, as a writer does it."""

    def __init__(self, shelf: ContainerShelf, servers: Sequence[ShardServer], urls: Sequence[str]) -> None:
        self.shelf, self.servers, self.urls = shelf, servers, urls
        super().__init__(urls, STORE_ID, samples.DOMAIN, TOKEN, retries=2)

    def publish_many(self, many: Sequence[ContainerEntries]) -> None:
        """Put containers on the shelf, then publish them."""
        self.shelf.stored.update({int(one.directory.container): one for one in many})
        super().publish_many(many)

    def entries(self) -> dict[str, dict[bytes, bytes]]:
        """Return all entries of all shards; the first has the catalog and the containers."""
        found = [server.index.entries() for server in self.servers if server.index is not None]
        lookups = {table: {} for table in ("chunks", "segments", "features")}  # type: dict[str, dict[bytes, bytes]]
        for one in found:
            for table, rows in lookups.items():
                assert not rows.keys() & one[table].keys(), f"{table}: an entry is in two shards"
                rows.update(one[table])
        return {**found[0], **lookups}


@contextmanager
def shard_server(folder: Path, shelf: ContainerShelf, number: int, count: int) -> Iterator[tuple[ShardServer, str]]:
    """Run a shard in a thread; yield it and its URL."""
    options = ShardOptions(number, count, folder, port=free_port(), token=TOKEN, map_bytes=64 * MIB)
    state = StateFile(folder, lease_wait_seconds=0) if number == 0 else None
    server = ShardServer(options, shelf.store_of(number, count), state)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        deadline = time.monotonic() + START_SECONDS
        while not (server.shard.calls and server.is_listening):
            assert time.monotonic() < deadline, "the shard did not start"
            time.sleep(0.01)
        yield server, f"http://127.0.0.1:{options.port}"
    finally:
        server.stop()
        thread.join(START_SECONDS)


@contextmanager
def shards(folder: Path, count: int, shelf: ContainerShelf | None = None) -> Iterator[ShelvedShards]:
    """Run some shards; yield their client."""
    shelf = shelf or ContainerShelf()
    with ExitStack() as stack:
        started = [stack.enter_context(shard_server(folder, shelf, number, count)) for number in range(count)]
        index = ShelvedShards(shelf, [server for server, _ in started], [url for _, url in started])
        stack.callback(index.close)
        yield index

"""Run one index shard: complete its index, then answer.

    folder/NUMBER-of-COUNT/   LMDB and the snapshot of the tags; may be deleted: the next start makes it again
    folder/shared-state.db    of the first shard: the lease and other values that the fleet shares (`state_file`)

At the start the index is rebuilt if it is damaged, of an older format, or may have entries of deleted data. Then
entries that the store has and the index lacks are added.

Invariant: without a token it listens on loopback only.
"""

from __future__ import annotations

import ipaddress
import logging
import shutil
import threading
from collections.abc import Callable, Collection
from dataclasses import field
from pathlib import Path

import uvicorn

from nearkin_index.shard_app import ShardApp, ShardCalls
from nearkin_index.shard_index import ShardIndex
from nearkin_index.snapshot_keeper import SnapshotKeeper
from nearkin_index.state_file import StateFile
from nearkin_shared.errors import ConfigError, IndexDamaged, NearkinError, NotFound, StoreUnavailable
from nearkin_shared.index.shards.key_ranges import SHARDS_MAX
from nearkin_shared.index.tablets.tablet_tables import Directories, TabletOptions
from nearkin_shared.limits import GIB
from nearkin_shared.utils.frozen import frozen

KEEP_ALIVE_SECONDS = 300
CONCURRENCY_MAX = 256
RETRY_SECONDS = 5.0
_log = logging.getLogger("nearkin.index")


@frozen
class ShardOptions:
    """Address and bounds of one shard."""

    number: int
    count: int
    folder: Path
    host: str = "127.0.0.1"
    port: int = 7420
    token: str = field(default="", repr=False)
    map_bytes: int = 64 * GIB
    tablets: TabletOptions = TabletOptions()

    def __post_init__(self) -> None:
        """Raise ConfigError for a number outside of the count, or an open address without a token."""
        if not 1 <= self.count <= SHARDS_MAX:
            raise ConfigError(f"--of {self.count}: give 1 to {SHARDS_MAX} shards")
        if not 0 <= self.number < self.count:
            raise ConfigError(f"--shard {self.number}: of {self.count} shards, give 0 to {self.count - 1}")
        if not self.token and not _is_loopback(self.host):
            raise ConfigError(f'--host "{self.host}": without a token only loopback is served')


@frozen
class ShardStore:
    """The store as a shard reads it."""

    store_id: str
    directories: Directories
    container_ids: Callable[[], Collection[int]]
    generation: Callable[[], int]
    """GC generation of the store."""
    complete: Callable[[ShardIndex, Collection[int]], object]
    """Adds to an index what it lacks; the given containers are known."""


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def open_complete(options: ShardOptions, store: ShardStore) -> ShardIndex:
    """Return the index of a shard with all entries that the store has. Raises NearkinError."""
    folder = options.folder / f"{options.number}-of-{options.count}"
    for is_new in (False, True):
        if is_new:
            shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True, exist_ok=True)
        try:
            index = ShardIndex(
                folder, options.map_bytes, store.directories, options.tablets, options.number, options.count
            )
        except IndexDamaged as err:
            if is_new:
                raise
            _log.warning("%s: it is rebuilt", err)
            continue
        try:
            if _completed(index, store, is_new=is_new):
                return index
        except IndexDamaged as err:
            index.close()
            if is_new:
                raise
            _log.warning("%s: it is rebuilt", err)
            continue
        except BaseException:
            index.close()
            raise
        index.close()
    raise IndexDamaged(f"{folder}: its new index has entries of deleted data; was another store put there?")


def _completed(index: ShardIndex, store: ShardStore, *, is_new: bool) -> bool:
    """Complete an index; return False if it must be rebuilt."""
    generation = store.generation()
    has_entries = len(index.container_ids()) > 0
    if not is_new and (index.is_outdated or (not index.complete and has_entries)):
        return False
    if has_entries and index.lacks_withdrawals(store.container_ids(), generation):
        return False
    store.complete(index, index.container_ids().tolist())
    index.record_generation(generation)
    index.mark_complete()
    index.load_tags()
    return True


class _CallServer(uvicorn.Server):
    """HTTP server that reports its loop's steps."""

    on_alive: Callable[[], None] | None = None

    async def on_tick(self, counter: int) -> bool:
        """Report a step; there are ten a second."""
        if self.on_alive is not None:
            self.on_alive()
        return await super().on_tick(counter)


class ShardServer:
    """One shard: its HTTP server, and the thread that completes its index."""

    def __init__(self, options: ShardOptions, store: ShardStore, state: StateFile | None = None) -> None:
        """`state`: the fleet's shared state, of the first shard; `run` closes it."""
        self._options, self._store, self._state = options, store, state
        position = f"{options.number}/{options.count}/{store.store_id}"
        self._stopping = threading.Event()
        self.shard: ShardApp = ShardApp(position, options.token, self.stop, state)
        self._server = _CallServer(
            uvicorn.Config(
                self.shard,
                host=options.host,
                port=options.port,
                loop="uvloop",
                http="httptools",
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                date_header=False,
                proxy_headers=False,
                limit_concurrency=CONCURRENCY_MAX,
                timeout_keep_alive=KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=10,
            )
        )
        self._thread = threading.Thread(target=self._open, name="nearkin-index", daemon=True)
        self.index: ShardIndex | None = None
        self.keeper: SnapshotKeeper | None = None
        """Of the index, once it is complete."""

    def check_ready(self) -> None:
        """Raise StoreUnavailable unless the index is complete and its snapshot recent."""
        if self._stopping.is_set() or self._server.should_exit:
            raise StoreUnavailable("the shard stops")
        if self.shard.calls is None or self.keeper is None:
            raise StoreUnavailable("the index is being completed")
        self.keeper.check()

    def run(self, on_alive: Callable[[], None] | None = None) -> None:
        """Serve until a signal, `stop` or damage; then close the index.

        The loop that answers calls calls `on_alive` ten times a second.
        """
        self._server.on_alive = on_alive
        self._thread.start()
        try:
            self._server.run()
        finally:
            self.stop()
            self._thread.join()
            self.shard.calls = None
            if self.index is not None:
                self.index.close()
            if self._state is not None:
                self._state.close()

    @property
    def is_listening(self) -> bool:
        """Return whether it takes connections."""
        return self._server.started

    def stop(self) -> None:
        """Stop after the requests in work."""
        self._stopping.set()
        self._server.should_exit = True

    def _open(self) -> None:
        while not self._stopping.is_set():
            try:
                self.index = open_complete(self._options, self._store)
            except (ConfigError, NotFound):
                _log.exception("index shard %d: it cannot start", self._options.number)
                self.stop()
            except NearkinError as err:
                _log.warning("index shard %d: waiting: %s", self._options.number, err)
                self._stopping.wait(RETRY_SECONDS)
            else:
                self.keeper = SnapshotKeeper(self.index)
                self.keeper.step()
                self.shard.calls = ShardCalls(self.index, self._store.container_ids)
                _log.warning("index shard %d of %d: ready", self._options.number, self._options.count)
                self.keeper.run(self._stopping)
                return

"""Put versions into the objects of a fleet, at once or after they were in flight for a time.

    store as it is now -> copy -> a put into the copy -> its new objects, delivered to the store later

Invariant: a put in flight knows what the store held when it began, as a blob of the services does: it names data that
a GC run may have marked for deletion since.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

from nearkin import open_store
from nearkin.store import Store
from nearkin_delta import container_builder
from nearkin_shared.config.settings import Settings
from nearkin_shared.objectstore.base import ObjectStore
from nearkin_shared.storage.descriptor import NAME
from tests.support.data.stores import objects


class InFlight:
    """New objects of puts that are not durable yet."""

    def __init__(self, elsewhere: ObjectStore, found: Mapping[str, bytes]) -> None:
        self._elsewhere = elsewhere
        self._waiting = dict(found)

    def deliver(self, folder: str = "") -> None:
        """Make the objects of a folder durable; containers come before the manifests that name them."""
        for name in sorted(self._waiting):  # "containers" sorts before "manifests"
            if name.startswith(folder):
                self._elsewhere.put_new(name, self._waiting.pop(name))


@contextmanager
def _copied(elsewhere: ObjectStore, settings: Settings, now: float) -> Iterator[tuple[Store, Path]]:
    """Open a copy of the objects as a local store, whose index is made from them."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder, "s")
        for top in ("containers", "manifests", "gc", "heads"):
            for name, _ in elsewhere.names(top):
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                (root / name).write_bytes(elsewhere.get(name))
        for name in (NAME, "chunking.json"):
            (root / name).write_bytes(elsewhere.get(name))
        clock = SimpleNamespace(time_ns=lambda: int(now * 1e9))  # container ids state the time
        with (
            mock.patch.object(container_builder, "time", clock),
            open_store(root, settings=settings, clock=lambda: now) as store,
        ):
            store.rebuild_index()
            yield store, root


def begin_puts(elsewhere: ObjectStore, settings: Settings, contents: Mapping[str, bytes], now: float) -> InFlight:
    """Begin puts, by key; they are in flight until they are delivered."""
    with _copied(elsewhere, settings, now) as (store, root):
        before = objects(root).keys()
        for _ in store.put_many(contents.items()):
            pass
        found = {name: data for name, data in objects(root).items() if name not in before}
    return InFlight(elsewhere, {name: data for name, data in found.items() if not name.startswith("gc/")})


def put(elsewhere: ObjectStore, settings: Settings, contents: Mapping[str, bytes], now: float) -> None:
    """Put versions, by key."""
    begin_puts(elsewhere, settings, contents, now).deliver()


def delete(elsewhere: ObjectStore, settings: Settings, key: str, version: int, now: float) -> None:
    """Delete a version."""
    with _copied(elsewhere, settings, now) as (store, root):
        before = objects(root).keys()
        store.delete(key, version)
        found = {name: data for name, data in objects(root).items() if name not in before}
    InFlight(elsewhere, found).deliver()

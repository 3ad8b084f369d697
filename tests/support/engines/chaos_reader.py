"""Read what is committed while parts of the pipeline are away, and compare each answer with what was promised.

Invariant: a part that is away makes a read fail; it never makes a committed blob, version or chunk look absent.
"""

from __future__ import annotations

import hashlib
import random
import threading
from collections.abc import Callable
from typing import Any

import httpx
import numpy as np
from numpy.typing import NDArray

from nearkin_shared.config.settings import Settings
from nearkin_shared.config.storage import SHARDS
from nearkin_shared.errors import RetryableError
from nearkin_shared.fingerprints import domain_of
from nearkin_shared.index.shards.sharded_index import ShardedIndex
from nearkin_shared.kafka.fleet_store import shards_of
from nearkin_shared.limits import MIB
from nearkin_shared.objectstore.factory import open_store_of
from nearkin_shared.storage.containers import ContainerStore
from nearkin_shared.types import U8, ContainerId
from tests.support.engines.durability import Promises

PAUSE_SECONDS = 0.3
TIMEOUT_SECONDS = 5.0
PROBLEMS_MAX = 10
BLOBS_A_ROUND = 2
NAMES_A_ROUND = 4096
SINGLE_NAMES = 4
"""Names in requests of their own, which shards answer while another is down."""
COPIES = 20
AWAY = (429, 500, 502, 503, 504)
"""Statuses of a gateway that cannot answer now."""


class ChaosReader:
    """Reader of one gateway, and of the index shards if the settings have them."""

    def __init__(self, promises: Promises, settings: Settings, seed: int) -> None:
        self._promises, self._settings = promises, settings
        self._random, self._draw = random.Random(seed + 2), np.random.default_rng(seed + 2)
        self._shards = _open_shards(settings) if settings.index.backend == SHARDS else None
        self._names: dict[int, U8] = {}
        """Names of the chunks of each container that was listed, zeros for deleted ones."""
        self._versions: dict[str, int] = {}
        """Committed versions by key."""
        self.problems: list[str] = []
        self.reads = 0
        """Blobs that were read."""
        self.lookups = 0
        """Answers of the index shards."""
        self.refusals = 0
        """Reads that failed."""

    def read_until(self, stop: threading.Event) -> None:
        """Read until `stop`, or until there are enough problems."""
        with httpx.Client(base_url=self._promises.url, timeout=30) as client:
            while not stop.wait(PAUSE_SECONDS) and len(self.problems) < PROBLEMS_MAX:
                try:
                    for key, version, digest in self._choose(client, BLOBS_A_ROUND):
                        self._read(client, key, version, digest)
                except httpx.HTTPError:
                    self.refusals += 1
                if self._shards is not None:
                    self._look_up(*self._shards)

    def _choose(self, client: httpx.Client, count: int) -> list[tuple[str, int, str]]:
        """Return key, version and digest of some blobs that are committed."""
        kept, found = self._promises.kept(), []
        for put in self._random.sample(kept, min(count, len(kept))):
            version = self._versions.get(put.key) or put.created
            if version is None:
                status = client.get(f"/v1/status/{put.accepted[0]}")
                if status.status_code != 200 or status.json()["state"] != "committed":
                    continue
                version = int(status.json()["version"])
            self._versions[put.key] = version
            found.append((put.key, version, put.digest))
        return found

    def close(self) -> None:
        """Close the connections to the shards."""
        if self._shards is not None:
            self._shards[0].close()

    def check_duplicates(self) -> None:
        """Put some committed blobs again; the shards must know all of their chunks."""
        with httpx.Client(base_url=self._promises.url, timeout=90) as client:
            for key, version, _ in self._choose(client, COPIES):
                content = client.get(f"/v1/blobs/{key}", params={"version": version}).content
                answer = client.put(f"/v1/blobs/copy/{key}", content=content, params={"wait": 60})
                unique_bytes = answer.json()["ledger"]["unique_bytes"] if answer.status_code == 201 else None
                if unique_bytes != 0:
                    self._add(f"a copy of {key}: {answer.status_code}, {unique_bytes} unique bytes")

    def _read(self, client: httpx.Client, key: str, version: int, digest: str) -> None:
        """Request a blob: all of it, or an error."""
        answer = client.get(f"/v1/blobs/{key}", params={"version": version})
        if answer.status_code in AWAY:
            self.refusals += 1
        elif answer.status_code != 200:
            self._add(f"{key} version {version}: {answer.status_code} {answer.text[:200]}")
        elif hashlib.sha256(answer.content).hexdigest() != digest:
            self._add(f"{key} version {version}: other bytes than were put")
        else:
            self.reads += 1

    def _look_up(self, index: ShardedIndex, containers: ContainerStore) -> None:
        """Ask the shards for versions, for containers, and for chunks of all containers that they list."""
        for key, version in self._random.sample(known := list(self._versions.items()), min(BLOBS_A_ROUND, len(known))):
            versions = self._ask(lambda key=key: index.versions_of(self._settings.tenant, key))  # type: ignore[misc]
            if versions is not None and version not in versions:
                self._add(f"{key}: version {version} is not among {versions} of the index")
        self._ask(lambda: self._list(index, containers))
        if not any(map(np.any, self._names.values())):
            return
        names = np.concatenate(list(self._names.values()))
        there = np.flatnonzero(names.any(axis=1))
        drawn = self._draw.choice(there, min(NAMES_A_ROUND, len(there)), replace=False)
        for rows in (drawn, *np.split(drawn[:SINGLE_NAMES], min(SINGLE_NAMES, len(drawn)))):
            self._ask(lambda rows=rows: self._compare(index, names, rows))  # type: ignore[misc]

    def _ask(self, call: Callable[[], Any]) -> Any:
        """Return an answer of the shards, or None if one of them did not answer."""
        try:
            answer = call()
        except RetryableError:
            self.refusals += 1
            return None
        self.lookups += 1
        return answer

    def _list(self, index: ShardedIndex, containers: ContainerStore) -> None:
        """Read the names of containers that are new in the list of the first shard."""
        listed = index.container_ids().tolist()
        if lost := self._names.keys() - set(listed):
            self._add(f"containers {sorted(lost)[:3]}: the index does not list them any more")
        for container in listed:
            if container not in self._names:
                chunks = containers.directory(ContainerId(container)).chunks
                self._names[container] = np.where(chunks.there[:, None], chunks.names, np.uint8(0))

    def _compare(self, index: ShardedIndex, known: U8, drawn: NDArray[np.intp]) -> None:
        """Look up some chunks of the listed containers, and as many that were never put."""
        names = known[drawn]
        located, found = index.locate_chunks(names)
        if not found.all():
            self._add(f"{int((~found).sum())} of {len(names)} known chunks are not found")
        firsts = dict(zip(self._names, np.cumsum([0, *map(len, self._names.values())]).tolist(), strict=False))
        first = np.array([firsts.get(container, -1) for container in located.containers.tolist()])
        rows = (first + located.ordinals)[first >= 0]
        if wrong := int((known[rows] != names[first >= 0]).any(axis=1).sum()):
            self._add(f"{wrong} of {len(names)} chunks have another location than the index returns")
        if index.locate_chunks(names ^ np.uint8(1))[1].any():
            self._add("a chunk that was never put is found")

    def _add(self, problem: str) -> None:
        if len(self.problems) < PROBLEMS_MAX:
            self.problems.append(f"while parts died: {problem}")


def _open_shards(settings: Settings) -> tuple[ShardedIndex, ContainerStore]:
    """Return the shards, whose calls are tried once, and the containers."""
    objects, found = open_store_of(settings, may_create=False)
    domain = domain_of(settings.tenant)
    index = shards_of(settings, found, timeout_seconds=TIMEOUT_SECONDS, retries=0)
    return index.for_domain(domain), ContainerStore(objects, domain, MIB)

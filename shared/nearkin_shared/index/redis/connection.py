"""Connection to a Redis server or Cluster.

Invariant: commands are sent in batches, and redis-py's errors never leave this module.

Every command may be sent again: scripts are idempotent, so a lost reply costs only the repetition.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from hashlib import sha1
from typing import Any
from urllib.parse import urlsplit

import redis
from redis.backoff import EqualJitterBackoff
from redis.cluster import RedisCluster
from redis.exceptions import (
    AuthenticationError,
    AuthorizationError,
    NoPermissionError,
    NoScriptError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
)
from redis.retry import Retry

from nearkin_shared.config.services import RedisSettings
from nearkin_shared.crypto.tls_files import check_certificates, check_key
from nearkin_shared.errors import ConfigError, Corrupt, NearkinError, StoreUnavailable
from nearkin_shared.index.redis.scripts import DAMAGED, SOURCES
from nearkin_shared.observability import metrics
from nearkin_shared.utils.frozen import frozen

Command = tuple[Any, ...]
"""Command as redis-py takes it; `RedisServer.call` makes that of a script."""

PIPELINE_COMMANDS = 2048
PIPELINE_BYTES = 8 << 20
"""Limits of one round trip; larger batches take several."""
BACKOFF_BASE_SECONDS, BACKOFF_CAP_SECONDS = 0.05, 1.0
TIMEOUT_SECONDS = 5.0
"""Timeout of connecting and of each reply."""
RETRIES = 6
"""Attempts after the first one; their waits add up to 3 s, within which most servers restart."""
CONNECTIONS_MAX = 64
"""Limit of one process; a thread that finds all in use receives a retryable error."""
_CLUSTER = "+cluster"
_SHAS = {name: sha1(source.encode(), usedforsecurity=False).hexdigest() for name, source in SOURCES.items()}
_TRANSLATIONS: list[tuple[tuple[type[Exception], ...], tuple[str, ...], type[NearkinError], str]] = [
    ((AuthenticationError, AuthorizationError), (), ConfigError, "check redis.username and redis.password"),
    (
        (NoPermissionError,),
        (),
        ConfigError,
        "docs/how-to/operate-services.md lists the rights that redis.username needs",
    ),
    (
        (OutOfMemoryError,),
        ("OOM command",),
        StoreUnavailable,
        "the server is full: raise maxmemory or add servers; nothing was lost",
    ),
    (
        (ReadOnlyError,),
        (),
        StoreUnavailable,
        "the server is a replica, as after a failover: redis.url must lead to the primary. Connections are reopened, "
        "and the same call may be repeated",
    ),
    (
        (),
        (DAMAGED, "WRONGTYPE"),
        Corrupt,
        "a key has an unexpected value: delete all keys of this prefix; the index is rebuilt",
    ),
    ((ValueError,), (), ConfigError, "check redis.url"),
]
"""The first match applies; other errors mean a server that is unreachable, restarting, failing over or too slow."""


@frozen
class NodeMemory:
    """Memory of a primary; `bytes_max` 0: without a bound."""

    used_bytes: int
    bytes_max: int
    policy: str

    @property
    def evicts(self) -> bool:
        """Return whether the server may evict keys."""
        return self.policy != "noeviction"


class RedisServer:
    """Connection pool of one Redis server or Cluster. Shared by threads."""

    def __init__(
        self, settings: RedisSettings, *, timeout_seconds: float = TIMEOUT_SECONDS, retries: int = RETRIES
    ) -> None:
        """Connect and check the eviction policy.

        Raises: StoreUnavailable, or ConfigError for wrong settings or a policy that evicts.
        """
        self._in_use = False
        parts = urlsplit(settings.url)
        self.name: str = f"redis {parts.hostname or parts.path}{f':{parts.port}' if parts.port else ''}"
        """Name for messages, without credentials."""
        scheme = parts.scheme.replace(_CLUSTER, "")
        options: dict[str, Any] = {
            "socket_timeout": timeout_seconds,
            "socket_connect_timeout": timeout_seconds,
            "retry": Retry(EqualJitterBackoff(BACKOFF_CAP_SECONDS, BACKOFF_BASE_SECONDS), retries),
            "health_check_interval": 30,
            "max_connections": CONNECTIONS_MAX,
        }
        options |= {name: value for name in ("username", "password") if (value := getattr(settings, name))}
        if scheme == "rediss":
            _check_files(settings)
            files = {"ssl_ca_certs": settings.ca_file, "ssl_certfile": settings.cert_file}
            files["ssl_keyfile"] = settings.key_file
            options |= {name: value for name, value in files.items() if value}
        self._client: Any
        try:
            if _CLUSTER in parts.scheme:
                self._client = RedisCluster.from_url(settings.url.replace(_CLUSTER, "", 1), **options)
            else:
                self._client = redis.Redis.from_url(settings.url, **options)
            self.clustered: bool = _CLUSTER in parts.scheme
            """Whether a script may access keys of one slot only."""
            self._check_policy()
        except (RedisError, OSError, ValueError) as err:
            raise self._translate(err) from err

    def begin_use(self) -> None:
        """Treat missing rights as temporary from now on: the settings were accepted.

        Rights that are missing later were revoked and may be granted again. Otherwise a worker would put every message
        into the dead-letter topic.
        """
        self._in_use = True

    def _check_policy(self) -> None:
        """Refuse a server that may evict: missing entries would cost dedup at random."""
        for node in self._memory():
            if node.evicts:
                raise ConfigError(
                    f'{self.name}: maxmemory-policy "{node.policy}" evicts entries: '
                    "run CONFIG SET maxmemory-policy noeviction, and set it in redis.conf"
                )

    def _memory(self) -> list[NodeMemory]:
        nodes = {"target_nodes": RedisCluster.PRIMARIES} if self.clustered else {}
        found = self._client.info("memory", **nodes)
        sections = [found] if "maxmemory_policy" in found else list(found.values())
        return [
            NodeMemory(int(node["used_memory"]), int(node["maxmemory"]), node["maxmemory_policy"]) for node in sections
        ]

    def memory(self) -> list[NodeMemory]:
        """Return the memory of each primary. Raises StoreUnavailable."""
        try:
            return self._memory()
        except (RedisError, OSError) as err:
            raise self._translate(err) from err

    def check_memory(self) -> None:
        """Refuse a server that may evict or is full now; both are metrics too.

        Raises: StoreUnavailable: the policy can be reset, and memory be added, while services run.
        """
        fault = self.find_memory_fault()
        if fault is not None:
            raise StoreUnavailable(fault)

    def find_memory_fault(self) -> str | None:
        """Return why the server may evict entries or is full, or None.

        Raises: StoreUnavailable.
        """
        nodes = self.memory()
        evicting = [node for node in nodes if node.evicts]
        fullness = max((node.used_bytes / node.bytes_max for node in nodes if node.bytes_max), default=0.0)
        metrics.REDIS_BYTES.set(sum(node.used_bytes for node in nodes))
        metrics.REDIS_FULLNESS.set(fullness)
        metrics.REDIS_EVICTS.set(bool(evicting))
        if evicting:
            return (
                f'{self.name}: maxmemory-policy "{evicting[0].policy}" evicts entries since it was '
                "changed: run CONFIG SET maxmemory-policy noeviction"
            )
        if fullness >= 1:
            return f"{self.name}: maxmemory is exhausted; raise it or add servers; nothing was lost"
        return None

    def memory_bytes(self) -> int:
        """Return the bytes in use on all primaries. Raises StoreUnavailable."""
        return sum(node.used_bytes for node in self.memory())

    @staticmethod
    def call(script: str, keys: Sequence[str], *arguments: Any) -> Command:
        """Return the command that runs a script."""
        return ("EVALSHA", _SHAS[script], len(keys), *keys, *arguments)

    def one(self, command: Command) -> Any:
        """Return one command's reply."""
        return self.run([command])[0]

    def run(self, commands: Sequence[Command]) -> list[Any]:
        """Return a reply for each command, in one round trip within the PIPELINE limits.

        Raises: StoreUnavailable. Corrupt, if a key has an unexpected value. ConfigError, for rights that were missing
        from the start.
        """
        replies: list[Any] = []
        for part in _batches(commands):
            try:
                batch_replies = self._send(part)
                if any(isinstance(reply, NoScriptError) for reply in batch_replies):
                    self._load_scripts()
                    batch_replies = self._send(part)
            except (RedisError, OSError) as err:
                raise self._translate(err) from err
            for reply in batch_replies:
                if isinstance(reply, Exception):
                    raise self._translate(reply) from reply
            replies += batch_replies
        return replies

    def _send(self, commands: Sequence[Command]) -> list[Any]:
        with self._client.pipeline(transaction=False) as pipeline:
            for command in commands:
                pipeline.execute_command(*command)
            replies: list[Any] = pipeline.execute(raise_on_error=False)
            return replies

    def _load_scripts(self) -> None:
        for source in SOURCES.values():
            self._client.script_load(source)  # on every primary of a Cluster

    def keys(self, prefix: str) -> Iterator[list[bytes]]:
        """Yield the names of all keys that start with `prefix`, in batches.

        It scans the whole server: for sweeps only.
        """
        pattern = "".join(f"\\{sign}" if sign in "*?[]\\" else sign for sign in prefix) + "*"
        found: list[bytes] = []
        try:
            for key in self._client.scan_iter(match=pattern, count=1000):
                found.append(key)
                if len(found) == 1000:
                    yield found
                    found = []
        except (RedisError, OSError) as err:
            raise self._translate(err) from err
        yield found

    def close(self) -> None:
        """Close all connections."""
        self._client.close()

    def _translate(self, err: Exception) -> NearkinError:
        if isinstance(err, ReadOnlyError) and not self.clustered:
            # A primary until now: its address leads to another server by the next try, but not these connections.
            self._client.connection_pool.disconnect(inuse_connections=False)
        text = " ".join(str(err).split()) or type(err).__name__
        kind, remedy = _classify(err, text)
        if kind is ConfigError and self._in_use:
            kind = StoreUnavailable
        return kind(f"{self.name}: {text}: {remedy}")


def _check_files(settings: RedisSettings) -> None:
    """Refuse unreadable TLS files; redis-py would report an unreachable server.

    Raises: ConfigError.
    """
    for name, check in (("ca_file", check_certificates), ("cert_file", check_certificates), ("key_file", check_key)):
        path = getattr(settings, name)
        if path:
            check(f"redis.{name}", path)


def _classify(err: Exception, text: str) -> tuple[type[NearkinError], str]:
    """Return the error class for a redis-py or server error, and the remedy."""
    for kinds, signs, translated, remedy in _TRANSLATIONS:
        if isinstance(err, kinds) or any(sign in text for sign in signs):
            return translated, remedy
    return StoreUnavailable, "nothing was lost; the same call may be repeated"


def _batches(commands: Sequence[Command]) -> Iterator[Sequence[Command]]:
    """Yield the commands in batches within the PIPELINE limits, except single large ones."""
    start = waiting_bytes = 0
    for number, command in enumerate(commands):
        command_bytes = sum(len(part) for part in command if isinstance(part, bytes))
        if number > start and (number - start == PIPELINE_COMMANDS or waiting_bytes + command_bytes > PIPELINE_BYTES):
            yield commands[start:number]
            start, waiting_bytes = number, 0
        waiting_bytes += command_bytes
    if start < len(commands):
        yield commands[start:]

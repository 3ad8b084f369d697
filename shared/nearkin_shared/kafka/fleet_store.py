# size: two functions that several services use
"""Open the store of a fleet: topics, index and object store, which belong together.

Invariant: a fleet whose index belongs to a store never creates a second store, and never mixes two stores.
"""

from __future__ import annotations

from nearkin_shared.config.settings import Settings
from nearkin_shared.config.storage import SHARDS
from nearkin_shared.errors import ConfigError
from nearkin_shared.fleet.fleet_index import FleetIndex
from nearkin_shared.fleet.store_owner import claim_index, read_owner
from nearkin_shared.index.redis import RedisIndex
from nearkin_shared.index.redis.connection import RedisServer
from nearkin_shared.index.redis.redis_shared_state import RedisSharedState
from nearkin_shared.index.shards.shard_connection import RETRIES, TIMEOUT_SECONDS, shard_token
from nearkin_shared.index.shards.sharded_index import ShardedIndex
from nearkin_shared.kafka.clients import check_durability, create_topics
from nearkin_shared.objectstore.factory import open_store_of
from nearkin_shared.objectstore.parity import ParityObjectStore
from nearkin_shared.storage.descriptor import Descriptor
from nearkin_shared.storage.pending_deletes import GcGeneration


def connect_fleet(settings: Settings) -> tuple[ParityObjectStore, Descriptor, FleetIndex]:
    """Return the object store, its descriptor and the index of the services.

    Raises NotFound: no store, and it may not be created (`storage.create`); ConfigError: the index belongs to another
    store, or topics may lose acknowledged messages; RetryableError while a server is not up.
    """
    create_topics(settings)
    check_durability(settings)
    return _connect_shards(settings) if settings.index.backend == SHARDS else _connect_redis(settings)


def shards_of(
    settings: Settings, found: Descriptor, *, timeout_seconds: float = TIMEOUT_SECONDS, retries: int = RETRIES
) -> ShardedIndex:
    """Return the index shards of the settings as the processes of a store reach them."""
    token = shard_token(bytes.fromhex(found.secret))
    return ShardedIndex(
        settings.index.shards, found.store_id, b"", token, timeout_seconds=timeout_seconds, retries=retries
    )


def _connect_shards(settings: Settings) -> tuple[ParityObjectStore, Descriptor, FleetIndex]:
    """Open the store that the first shard creates; shards refuse any other one."""
    objects, found = open_store_of(settings, may_create=False)
    index = shards_of(settings, found)
    try:
        read_owner(index.state)
    except BaseException:
        index.close()
        raise
    return objects, found, index


def _connect_redis(settings: Settings) -> tuple[ParityObjectStore, Descriptor, FleetIndex]:
    prefix = settings.redis.prefix
    state = RedisSharedState(RedisServer(settings.redis), prefix)
    try:
        objects, found = open_store_of(settings, read_owner(state))
        owner = claim_index(state, found.store_id)
    finally:
        state.close()
    if owner != found.store_id:
        raise ConfigError(
            f'redis.prefix "{prefix}": has the index of store {owner}, the object store is store {found.store_id}; '
            "set another redis.prefix, or correct object_store.url"
        )
    return objects, found, RedisIndex(settings.redis, b"", GcGeneration(objects))

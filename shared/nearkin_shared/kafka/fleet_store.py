# size: one function that several services use
"""Open the store of a fleet: topics, index and object store, which belong together.

Invariant: a fleet whose index belongs to a store never creates a second store, and never mixes two stores.
"""

from __future__ import annotations

from nearkin_shared.config.settings import Settings
from nearkin_shared.errors import ConfigError
from nearkin_shared.fleet.fleet_index import FleetIndex
from nearkin_shared.fleet.store_owner import claim_index, read_owner
from nearkin_shared.index.redis import RedisIndex
from nearkin_shared.index.redis.connection import RedisServer
from nearkin_shared.index.redis.redis_shared_state import RedisSharedState
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

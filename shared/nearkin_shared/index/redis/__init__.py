"""Redis index, shared by all workers of a fleet; see docs/adr/0007-redis-index.md."""

from nearkin_shared.index.redis.background_rebuild import Rebuilder, rebuild_in_background
from nearkin_shared.index.redis.redis_index import RedisIndex

__all__ = ["Rebuilder", "RedisIndex", "rebuild_in_background"]

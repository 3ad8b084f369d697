"""The index in Redis: one for all workers. See docs/adr/0007-redis-index.md."""

from nearkin.index.redis.index import RedisIndex
from nearkin.index.redis.rebuild import Rebuilder, rebuild_in_background

__all__ = ["Rebuilder", "RedisIndex", "rebuild_in_background"]

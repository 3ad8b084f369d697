-- Return seconds and microseconds since 1970 by the server's clock.
-- KEYS any key of a prefix.
return redis.call('TIME')

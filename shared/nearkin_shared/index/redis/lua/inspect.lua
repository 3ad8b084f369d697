-- Return GC generation, whether the server is the same, whether the partition began empty; or nil.
-- KEYS partition.
--include run_id
--include counter
if redis.call('EXISTS', KEYS[1]) == 0 then return false end
local held = redis.call('HMGET', KEYS[1], 'g', 'r', 'f')
return {generation_of(held[1]), held[2] == run_now() and 1 or 0, held[3] and 1 or 0}

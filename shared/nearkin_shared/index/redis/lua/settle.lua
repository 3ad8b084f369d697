-- Declare the entries checked against the store; nil if the partition or its server changed.
-- KEYS partition; ARGV GC generation.
--include run_id
--include counter
local held = redis.call('HMGET', KEYS[1], '', 'g', 'r')
if not held[1] or held[3] ~= run_now() then return false end
redis.call('HSET', KEYS[1], 'g', math.max(generation_of(held[2]), tonumber(ARGV[1])))
redis.call('HDEL', KEYS[1], 'f')
return 1

-- Set the GC generation: 1 if set, 0 if stale or the server restarted; nil without partition.
-- KEYS partition; ARGV GC generation required, new one.
--include run_id
--include counter
if redis.call('EXISTS', KEYS[1]) == 0 then return false end
local held = redis.call('HMGET', KEYS[1], 'g', 'r')
if held[2] ~= run_now() or generation_of(held[1]) < tonumber(ARGV[1]) then return 0 end
redis.call('HSET', KEYS[1], 'g', math.max(generation_of(held[1]), tonumber(ARGV[2])))
return 1

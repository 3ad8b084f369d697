-- Replace the summary of a published container.
-- KEYS epoch, containers; ARGV name, container id, summary.
--include epoch
local known = redis.call('HGET', KEYS[2], ARGV[2])
if name ~= ARGV[1] then return false end
if known and #known > 8 then redis.call('HSET', KEYS[2], ARGV[2], string.sub(known, 1, 8) .. ARGV[3]) end
return 1

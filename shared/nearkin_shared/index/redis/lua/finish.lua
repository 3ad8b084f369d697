-- Store the summary of a container, which means that all its entries exist.
-- KEYS epoch, containers; ARGV name, container id, summary.
--include epoch
local known = redis.call('HGET', KEYS[2], ARGV[2])
if name ~= ARGV[1] or not known then return false end
if #known == 8 then redis.call('HSET', KEYS[2], ARGV[2], known .. ARGV[3]) end
return 1

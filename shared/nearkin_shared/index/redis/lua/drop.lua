-- Remove a container. Its numbers are never assigned again.
-- KEYS epoch, containers; ARGV name, container id.
--include epoch
if name ~= ARGV[1] then return false end
redis.call('HDEL', KEYS[2], ARGV[2])
return 1

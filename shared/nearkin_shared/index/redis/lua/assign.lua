-- Return a container's first number, assigned if it has none; -1 if no number is left; nil in another epoch.
-- KEYS epoch, containers, table, next; ARGV name, container id, span, domain.
--include epoch
if name ~= ARGV[1] or run ~= run_now() then return false end
local known = redis.call('HGET', KEYS[2], ARGV[2])
if known then return (struct.unpack('<I8', known)) end
local first, span = tonumber(redis.call('GET', KEYS[4]) or '1'), tonumber(ARGV[3])
if first + span > 2 ^ 40 then return -1 end
redis.call('SET', KEYS[4], string.format('%.0f', first + span))
redis.call('HSET', KEYS[2], ARGV[2], struct.pack('<I8', first))
redis.call('RPUSH', KEYS[3], struct.pack('<I8', first) .. ARGV[2] .. struct.pack('<I4', span) .. ARGV[4])
return first

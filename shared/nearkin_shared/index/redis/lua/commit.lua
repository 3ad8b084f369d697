-- Add a member unless the version is listed, or the tag belongs to another tenant (-1); nil without partition.
-- KEYS partition, versions; ARGV start and rest of a member, tenant's tag and name.
if redis.call('EXISTS', KEYS[1]) == 0 then return false end
local owner = redis.call('HGET', KEYS[1], ARGV[3])
if owner and owner ~= ARGV[4] then return -1 end
if #redis.call('ZRANGEBYLEX', KEYS[2], '[' .. ARGV[1], '(' .. ARGV[1] .. '\255', 'LIMIT', 0, 1) > 0 then return 0 end
redis.call('HSET', KEYS[1], ARGV[3], ARGV[4])
return redis.call('ZADD', KEYS[2], 0, ARGV[1] .. ARGV[2])

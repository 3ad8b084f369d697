-- Return 1 if the version is listed, else 0; -1 if the tag belongs to another tenant; nil without partition.
-- KEYS partition, versions; ARGV start of a member, tenant's tag and name.
if redis.call('EXISTS', KEYS[1]) == 0 then return false end
local owner = redis.call('HGET', KEYS[1], ARGV[2])
if owner and owner ~= ARGV[3] then return -1 end
return #redis.call('ZRANGEBYLEX', KEYS[2], '[' .. ARGV[1], '(' .. ARGV[1] .. '\255', 'LIMIT', 0, 1)

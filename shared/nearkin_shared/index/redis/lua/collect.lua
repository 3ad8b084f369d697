-- Remove a version and record the marks that stay; nil without partition.
-- KEYS partition, versions, marks; ARGV start of a member, highest mark, bytes of those left.
if redis.call('EXISTS', KEYS[1]) == 0 then return false end
if ARGV[3] == '0' then
  redis.call('HDEL', KEYS[3], ARGV[1])
else
  redis.call('HSET', KEYS[3], ARGV[1], ARGV[2] .. ' ' .. ARGV[3])
end
local found = redis.call('ZRANGEBYLEX', KEYS[2], '[' .. ARGV[1], '(' .. ARGV[1] .. '\255', 'LIMIT', 0, 1)
if #found == 0 then return 0 end
return redis.call('ZREM', KEYS[2], found[1])

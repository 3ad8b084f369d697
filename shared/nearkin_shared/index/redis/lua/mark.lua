-- Record a version's marks unless a higher one, or more bytes of the same one, are recorded; nil without
-- partition.
-- KEYS partition, marks; ARGV start of a member, highest mark, bytes of all.
if redis.call('EXISTS', KEYS[1]) == 0 then return false end
local held = redis.call('HGET', KEYS[2], ARGV[1])
if held then
  local highest, size = string.match(held, '^(%d+) (%d+)')
  highest = tonumber(highest)
  if highest > tonumber(ARGV[2]) or (highest == tonumber(ARGV[2]) and tonumber(size) >= tonumber(ARGV[3])) then
    return 0
  end
end
return redis.call('HSET', KEYS[2], ARGV[1], ARGV[2] .. ' ' .. ARGV[3])

-- Begin an epoch if the last seen value is current; return the current value.
-- KEYS epoch; ARGV its value as last seen, version and name and partitions of a new one.
if (redis.call('GET', KEYS[1]) or '') ~= ARGV[1] then return redis.call('GET', KEYS[1]) or '' end
local run = string.match(redis.call('INFO', 'server'), 'run_id:(%w+)')
local epoch = ARGV[2] .. ' ' .. run .. ' 0'
redis.call('SET', KEYS[1], epoch)
return epoch

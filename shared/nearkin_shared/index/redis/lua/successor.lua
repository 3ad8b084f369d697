-- Return the name under which all clients continue an epoch.
-- KEYS successor; ARGV epoch's name, proposed name.
--include run_id
local before, run, name = string.match(redis.call('GET', KEYS[1]) or '', '^(%S+) (%S+) (%S+)$')
if before == ARGV[1] and run == run_now() then return name end
redis.call('SET', KEYS[1], ARGV[1] .. ' ' .. run_now() .. ' ' .. ARGV[2])
return ARGV[2]

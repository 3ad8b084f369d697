-- Run id of the server, which changes after a restart, a failover or a restored dump.
local function run_now() return string.match(redis.call('INFO', 'server'), 'run_id:(%w+)') end

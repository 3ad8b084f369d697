-- Fields of the epoch KEYS[1].
local epoch = redis.call('GET', KEYS[1])
local version, name, partitions, run, whole = string.match(epoch or '', '^(%d+) (%S+) (%d+) (%S+) (%d)$')
--include run_id

-- State and buckets of the partition KEYS[1].
--include sizes
local base = KEYS[1]
--include partition

-- Sizes of a table: ARGV[2] key bytes, ARGV[3] bytes of an entry, ARGV[4] entries per bucket.
local key_bytes, width, bucket_entries = tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
local byte, char, sub, find, floor = string.byte, string.char, string.sub, string.find, math.floor

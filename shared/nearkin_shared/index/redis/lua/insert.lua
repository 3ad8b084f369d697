-- Add the entries whose key is not in the table, in order; return their number, or nil.
-- KEYS table; ARGV entries, as above, highest number.
--include counter
--include table
--include store
local rows, highest = ARGV[1], counter(redis.call('HGET', base, 'm'), 0)
if not highest then return redis.error_reply(DAMAGED .. ' ' .. base) end
read_buckets(rows, width)
local is_added = {}
for i = 1, #bucket_of_row do
  local at, n = (i - 1) * width + 1, bucket_of_row[i]
  local key = sub(rows, at, at + key_bytes - 1)
  if not (is_added[key] or position_of(buckets[n], rows, at)) then
    is_added[key] = true
    append(n, sub(rows, at, at + width - 1))
  end
end
if highest < tonumber(ARGV[5]) then redis.call('HSET', base, 'm', ARGV[5]) end
return save()

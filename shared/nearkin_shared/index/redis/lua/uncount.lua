-- Subtract 1 from each key's count unless the marker exists.
-- KEYS table, marker; ARGV keys, as above, seconds.
--include table
--include store
if not redis.call('SET', KEYS[2], '', 'NX', 'EX', ARGV[5]) then return 0 end
local keys = ARGV[1]
read_buckets(keys, key_bytes)
for i = 1, #bucket_of_row do
  local at, n = (i - 1) * key_bytes, bucket_of_row[i]
  local bucket = buckets[n]
  local found = position_of(bucket, sub(keys, at + 1, at + key_bytes))
  if found then
    local a, b, c, d = byte(bucket, found + key_bytes, found + width - 1)
    local count = a + b * 256 + c * 65536 + d * 16777216
    local rest = sub(bucket, found + width)
    if count > 1 then
      store(n, sub(bucket, 1, found + key_bytes - 1) .. struct.pack('<I4', count - 1) .. rest)
    else
      store(n, sub(bucket, 1, found - 1) .. rest)
      entries = entries - 1
    end
  end
end
return save()

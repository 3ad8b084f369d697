-- Remove the entries that have this key and value; return minus their number, or nil.
-- KEYS table; ARGV entries, as above.
--include table
--include store
local rows = ARGV[1]
read_buckets(rows, width)
for i = 1, #bucket_of_row do
  local at, n = (i - 1) * width + 1, bucket_of_row[i]
  local bucket = buckets[n]
  local found = position_of(bucket, rows, at)
  if found and sub(bucket, found, found + width - 1) == sub(rows, at, at + width - 1) then
    store(n, sub(bucket, 1, found - 1) .. sub(bucket, found + width))
    entries = entries - 1
  end
end
return save()

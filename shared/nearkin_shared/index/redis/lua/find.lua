-- Return the keys' values, zeros for missing keys and for all of a table of an older generation; nil without
-- state.
-- KEYS tables; ARGV keys, key bytes, width, bucket entries, GC generation required, number of keys of each
-- table. In a Cluster one table, since each has a slot of its own.
--include counter
--include sizes
local function values_of(base, keys)
--include partition
  local out, none = {}, string.rep('\0', width - key_bytes)
  read_buckets(keys, key_bytes)
  for i = 1, #bucket_of_row do
    local bucket = buckets[bucket_of_row[i]]
    local found = position_of(bucket, keys, (i - 1) * key_bytes + 1)
    out[i] = found and sub(bucket, found + key_bytes, found + width - 1) or none
  end
  return table.concat(out)
end
local found, at, generation = {}, 0, tonumber(ARGV[5])
for i = 1, #KEYS do
  local keys_bytes = tonumber(ARGV[5 + i]) * key_bytes
  local values, held = nil, redis.pcall('HGET', KEYS[i], 'g')
  if type(held) == 'table' then return redis.error_reply(DAMAGED .. ' ' .. KEYS[i]) end
  if generation > generation_of(held) and redis.call('EXISTS', KEYS[i]) == 1 then
    values = string.rep('\0', keys_bytes / key_bytes * (width - key_bytes))
  else
    values = values_of(KEYS[i], sub(ARGV[1], at + 1, at + keys_bytes))
  end
  if type(values) ~= 'string' then return values end
  found[i], at = values, at + keys_bytes
end
return table.concat(found)

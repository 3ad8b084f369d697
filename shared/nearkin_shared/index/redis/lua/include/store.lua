-- Changes of the buckets of a partition: store, append and save, which returns the change of the number of
-- entries.
local changed, before = {}, entries
local function store(n, bucket)
  buckets[n] = bucket
  changed[n] = true
end
local function append(n, bucket, entry)
  if #bucket >= BUCKET_ENTRIES_MAX * width then return end
  store(n, bucket .. entry)
  entries = entries + 1
end
local function grow()
  while entries > bucket_entries * (low + split) and level < LEVEL_MAX do
    if not buckets[split] then load_all({split}, {field(split)}) end
    local bucket, lower, upper = buckets[split], {}, {}
    for at = 1, #bucket, width do
      local a, b, c = byte(bucket, at, at + 2)
      local to = (a + b * 256 + c * 65536) % high >= low and upper or lower
      to[#to + 1] = sub(bucket, at, at + width - 1)
    end
    store(split, table.concat(lower))
    store(split + low, table.concat(upper))
    split = split + 1
    if split == low then level, split, low, high = level + 1, 0, high, high * 2 end
  end
end
local function save()
  grow()
  local pairs_of, none = {}, {}
  for n in pairs(changed) do
    if buckets[n] == '' then
      none[#none + 1] = field(n)
    else
      pairs_of[#pairs_of + 1] = field(n)
      pairs_of[#pairs_of + 1] = buckets[n]
    end
  end
  for start = 1, #pairs_of, 1000 do
    redis.call('HSET', base, unpack(pairs_of, start, math.min(start + 999, #pairs_of)))
  end
  if #none > 0 then redis.call('HDEL', base, unpack(none)) end
  if entries ~= before then
    redis.call('HSET', base, '', string.format('%d %d %d', level, split, entries))
  end
  return entries - before
end

-- Changes of the buckets of a partition: store, append and save, which returns the change of the number of
-- entries.
local changed, appended, before = {}, {}, entries
local function store(n, bucket)
  buckets[n] = bucket
  changed[n] = true
end
local function append(n, entry)
  local fresh = appended[n] or ''
  if #buckets[n] + #fresh >= BUCKET_ENTRIES_MAX * width then return end
  appended[n] = fresh .. entry
  entries = entries + 1
end
-- Entries of a bucket whose hash has the bit `level` clear, and those that have it set, in order.
local function halves(bucket)
  local parts = {[false] = {}, [true] = {}}
  local offset, bit = floor(level / 8), 2 ^ (level % 8)
  local from, upper = 1, nil
  for at = 1, #bucket, width do
    local is_upper = byte(bucket, at + offset) % (2 * bit) >= bit
    if is_upper ~= upper then
      if at > from then table.insert(parts[upper], sub(bucket, from, at - 1)) end
      from, upper = at, is_upper
    end
  end
  if #bucket >= from then table.insert(parts[upper], sub(bucket, from)) end
  return table.concat(parts[false]), table.concat(parts[true])
end
-- Split the next buckets, all of this level.
local function split_buckets(count)
  local missing, names = {}, {}
  for n = split, split + count - 1 do
    if not buckets[n] then
      missing[#missing + 1] = n
      names[#names + 1] = field(n)
    end
  end
  load_all(missing, names)
  for n = split, split + count - 1 do
    local lower, upper = halves(buckets[n] .. (appended[n] or ''))
    appended[n] = nil
    store(n, lower)
    store(n + low, upper)
  end
  split = split + count
  if split == low then level, split, low, high = level + 1, 0, high, high * 2 end
end
local function grow()
  while level < LEVEL_MAX do
    local count = math.min(math.ceil(entries / bucket_entries) - low - split, low - split)
    if count <= 0 then return end
    split_buckets(count)
  end
end
local function save()
  grow()
  local pairs_of, none = {}, {}
  for n, fresh in pairs(appended) do store(n, buckets[n] .. fresh) end
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
  if next(changed) then
    redis.call('HSET', base, '', string.format('%d %d %d', level, split, entries))
  end
  return entries - before
end

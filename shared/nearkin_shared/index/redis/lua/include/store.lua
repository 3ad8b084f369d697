-- Changes of the buckets of a partition: store, append and save, which returns the change of the number of
-- entries.
local changed, appended, before = {}, {}, entries
local function store(n, bucket)
  buckets[n] = bucket
  changed[n] = true
end
-- New entries of a bucket are joined once: Redis hashes all bytes of every string that a script makes.
local function append(n, entry)
  local fresh = appended[n]
  if not fresh then
    fresh = {}
    appended[n] = fresh
  end
  if #buckets[n] + #fresh * width >= BUCKET_ENTRIES_MAX * width then return end
  fresh[#fresh + 1] = entry
  entries = entries + 1
end
local function with_appended(n)
  local fresh = appended[n]
  return fresh and buckets[n] .. table.concat(fresh) or buckets[n]
end
-- Entries of a bucket whose hash has the bit `level` clear, and those that have it set, in order.
local function halves(bucket, has_bit)
  local parts, offset, from, upper = {[false] = {}, [true] = {}}, floor(level / 8), 1, nil
  for at = 1, #bucket, width do
    local is_upper = has_bit[byte(bucket, at + offset)]
    if is_upper ~= upper then
      if at > from then
        local part = parts[upper]
        part[#part + 1] = sub(bucket, from, at - 1)
      end
      from, upper = at, is_upper
    end
  end
  if #bucket >= from then table.insert(parts[upper], sub(bucket, from)) end
  return table.concat(parts[false]), table.concat(parts[true])
end
-- Whether each byte has the bit `level` of a hash set, in the byte of the hash that has this bit.
local function bytes_with_bit()
  local found, bit = {}, 2 ^ (level % 8)
  for value = 0, 255 do found[value] = value % (2 * bit) >= bit end
  return found
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
  local has_bit = bytes_with_bit()
  for n = split, split + count - 1 do
    local lower, upper = halves(with_appended(n), has_bit)
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
  for n in pairs(appended) do store(n, with_appended(n)) end
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

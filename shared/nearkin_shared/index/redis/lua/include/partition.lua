-- State and buckets of the partition `base`; the including script or function returns nil without a state.
local state = redis.pcall('HGET', base, '')
if not state then return false end
local level, split, entries = string.match(type(state) == 'string' and state or '', '^(%d+) (%d+) (%d+)$')
level, split, entries = tonumber(level), tonumber(split), tonumber(entries)
if not level or level > LEVEL_MAX or split >= 2 ^ level then return redis.error_reply(DAMAGED .. ' ' .. base) end
local low = 2 ^ level
local high = low * 2
local buckets = {}
local function field(n) return char(n % 256, floor(n / 256) % 256, floor(n / 65536)) end
local function load_all(numbers, fields)
  for start = 1, #fields, 1000 do
    local found = redis.call('HMGET', base, unpack(fields, start, math.min(start + 999, #fields)))
    for i = 1, #found do
      local bucket = found[i]
      if not bucket or #bucket % width ~= 0 then bucket = '' end
      buckets[numbers[start + i - 1]] = bucket
    end
  end
end
local bucket_of_row, numbers, fields = {}, {}, {}
local function read_buckets(rows, stride)
  local count, row = low + split, 0
  for at = 1, #rows, stride do
    local a, b, c = byte(rows, at, at + 2)
    local n = (a + b * 256 + c * 65536) % high
    if n >= count then n = n - low end
    row = row + 1
    bucket_of_row[row] = n
    if not buckets[n] then
      buckets[n] = ''
      numbers[#numbers + 1] = n
      fields[#fields + 1] = field(n)
    end
  end
  load_all(numbers, fields)
end
-- Position of the entry whose key is at rows[at]. All keys of a bucket begin alike: most that are not in it are told
-- apart by the rest.
local function position_of(bucket, rows, at)
  local found = find(bucket, sub(rows, at + HASHED_BYTES, at + key_bytes - 1), HASHED_BYTES + 1, true)
  if not found then return nil end
  local key = sub(rows, at, at + key_bytes - 1)
  found = find(bucket, key, found - HASHED_BYTES, true)
  while found and (found - 1) % width ~= 0 do found = find(bucket, key, found + 1, true) end
  return found
end

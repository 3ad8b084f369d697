"""Scripts. Invariant: each touches one Cluster slot, may be repeated, and changes nothing where its epoch is gone.

A table lies in partitions; a partition is one Redis hash and a linear hash (Litwin, VLDB 1980) of its own:

    field ""   "level split entries": there are 2^level + split buckets
    field n    n as 3 bytes, bucket n: entries of one width, key then value, in order of arrival
    field g    GC generation: every entry withdrawn by the GC runs up to this one has been removed
    field r    run_id of the server when the partition was created, adopted or last settled
    field f    present while entries of published containers may be missing: the partition was created empty
    field m    highest number ever inserted

    h = the first 24 bits of an entry's key, little-endian; it lies in bucket h mod 2^level, or, where that is below
    `split`, in bucket h mod 2^(level + 1)

When entries outgrow buckets x `bucket_entries` the bucket at `split` is parted in two. The hash's name holds the epoch,
so whoever still knows another epoch finds no state.
"""

from __future__ import annotations

DAMAGED = "NEARKIN-DAMAGED"
"""Starts an error reply; after it comes the key that holds something else than was written."""
LEVEL_MAX = 24
"""Bits of a key that choose its bucket: with 40 entries each, 2^29 entries a partition; then buckets grow longer."""
BUCKET_ENTRIES_MAX = 2048
"""A bucket takes no more: who crafts super-features that meet in one must not make every call that reads it slow."""

_COUNTER = """
local function counter(value, missing)
  if not value then return missing end
  return type(value) == 'string' and #value <= 15 and string.match(value, '^%d+$') and tonumber(value) or nil
end
local function generation_of(value) return counter(value, 0) or -1 end
"""
"""Field g or m as a number; a missing g is 0, as before GC generations, a damaged one is older than any generation."""

_SIZES = """
local key_bytes, width, bucket_entries = tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
local byte, char, sub, find, floor = string.byte, string.char, string.sub, string.find, math.floor
"""

_PARTITION = """
local state = redis.pcall('HGET', base, '')
if not state then return false end
local level, split, entries = string.match(type(state) == 'string' and state or '', '^(%d+) (%d+) (%d+)$')
level, split, entries = tonumber(level), tonumber(split), tonumber(entries)
if not level or level > $LEVEL_MAX or split >= 2 ^ level then return redis.error_reply('$DAMAGED ' .. base) end
local low = 2 ^ level
local high = low * 2
local held = {}
local function field(n) return char(n % 256, floor(n / 256) % 256, floor(n / 65536)) end
local function load_all(numbers, fields)
  for start = 1, #fields, 1000 do
    local found = redis.call('HMGET', base, unpack(fields, start, math.min(start + 999, #fields)))
    for i = 1, #found do
      local bucket = found[i]
      if not bucket or #bucket % width ~= 0 then bucket = '' end
      held[numbers[start + i - 1]] = bucket
    end
  end
end
local wanted, numbers, fields = {}, {}, {}
local function want(rows, stride)
  for at = 1, #rows, stride do
    local a, b, c = byte(rows, at, at + 2)
    local h = a + b * 256 + c * 65536
    local n = h % low
    if n < split then n = h % high end
    wanted[#wanted + 1] = n
    if not held[n] then
      held[n] = ''
      numbers[#numbers + 1] = n
      fields[#fields + 1] = field(n)
    end
  end
  load_all(numbers, fields)
end
local function place(bucket, key)
  local at = find(bucket, key, 1, true)
  while at and (at - 1) % width ~= 0 do at = find(bucket, key, at + 1, true) end
  return at
end
"""

_TABLE = f"{_SIZES}local base = KEYS[1]\n{_PARTITION}"

FIND = (
    _COUNTER
    + _SIZES
    + "local function values_of(base, keys)"
    + _PARTITION
    + """
  local out, none = {}, string.rep('\\0', width - key_bytes)
  want(keys, key_bytes)
  for i = 1, #wanted do
    local at, bucket = (i - 1) * key_bytes, held[wanted[i]]
    local found = place(bucket, sub(keys, at + 1, at + key_bytes))
    out[i] = found and sub(bucket, found + key_bytes, found + width - 1) or none
  end
  return table.concat(out)
end
local found, at, generation = {}, 0, tonumber(ARGV[5])
for i = 1, #KEYS do
  local keys_bytes = tonumber(ARGV[5 + i]) * key_bytes
  local values, held = nil, redis.pcall('HGET', KEYS[i], 'g')
  if type(held) == 'table' then return redis.error_reply('$DAMAGED ' .. KEYS[i]) end
  if generation > generation_of(held) and redis.call('EXISTS', KEYS[i]) == 1 then
    values = string.rep('\\0', keys_bytes / key_bytes * (width - key_bytes))
  else
    values = values_of(KEYS[i], sub(ARGV[1], at + 1, at + keys_bytes))
  end
  if type(values) ~= 'string' then return values end
  found[i], at = values, at + keys_bytes
end
return table.concat(found)
"""
)
"""KEYS tables; ARGV keys, key bytes, width, bucket entries, GC generation required, how many keys for each table: the
keys' values, zeros for what is not there and for all of a table of an older generation; or nil where a table has no
state. In a Cluster one table, since each has a slot of its own."""

_STORE = """
local changed, before = {}, entries
local function store(n, bucket)
  held[n] = bucket
  changed[n] = true
end
local function append(n, bucket, entry)
  if #bucket >= $BUCKET_ENTRIES_MAX * width then return end
  store(n, bucket .. entry)
  entries = entries + 1
end
local function grow()
  while entries > bucket_entries * (low + split) and level < $LEVEL_MAX do
    if not held[split] then load_all({split}, {field(split)}) end
    local bucket, stay, go = held[split], {}, {}
    for at = 1, #bucket, width do
      local a, b, c = byte(bucket, at, at + 2)
      local to = (a + b * 256 + c * 65536) % high >= low and go or stay
      to[#to + 1] = sub(bucket, at, at + width - 1)
    end
    store(split, table.concat(stay))
    store(split + low, table.concat(go))
    split = split + 1
    if split == low then level, split, low, high = level + 1, 0, high, high * 2 end
  end
end
local function save()
  grow()
  local pairs_of, none = {}, {}
  for n in pairs(changed) do
    if held[n] == '' then
      none[#none + 1] = field(n)
    else
      pairs_of[#pairs_of + 1] = field(n)
      pairs_of[#pairs_of + 1] = held[n]
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
"""

INSERT = (
    _COUNTER
    + _TABLE
    + _STORE
    + """
local rows, highest = ARGV[1], counter(redis.call('HGET', base, 'm'), 0)
if not highest then return redis.error_reply('$DAMAGED ' .. base) end
want(rows, width)
for i = 1, #wanted do
  local at, n = (i - 1) * width, wanted[i]
  local bucket = held[n]
  if not place(bucket, sub(rows, at + 1, at + key_bytes)) then append(n, bucket, sub(rows, at + 1, at + width)) end
end
if highest < tonumber(ARGV[5]) then redis.call('HSET', base, 'm', ARGV[5]) end
return save()
"""
)
"""KEYS table; ARGV entries, as above, highest number: add those whose key is not there yet, in order; how many they
were; or nil."""

COUNT = (
    _TABLE
    + _STORE
    + """
if not redis.call('SET', KEYS[2], '', 'NX', 'EX', ARGV[5]) then return 0 end
local keys = ARGV[1]
want(keys, key_bytes)
for i = 1, #wanted do
  local at, n = (i - 1) * key_bytes, wanted[i]
  local key, bucket = sub(keys, at + 1, at + key_bytes), held[n]
  local found = place(bucket, key)
  if found then
    local a, b, c, d = byte(bucket, found + key_bytes, found + width - 1)
    local count = math.min(a + b * 256 + c * 65536 + d * 16777216 + 1, 4294967295)
    store(n, sub(bucket, 1, found + key_bytes - 1) .. struct.pack('<I4', count) .. sub(bucket, found + width))
  else
    append(n, bucket, key .. '\\1\\0\\0\\0')
  end
end
return save()
"""
)
"""KEYS table, mark; ARGV keys, as above, seconds: add 1 to each key's count unless the mark says that it was done."""

REMOVE = (
    _TABLE
    + _STORE
    + """
local rows = ARGV[1]
want(rows, width)
for i = 1, #wanted do
  local at, n = (i - 1) * width, wanted[i]
  local bucket = held[n]
  local found = place(bucket, sub(rows, at + 1, at + key_bytes))
  if found and sub(bucket, found, found + width - 1) == sub(rows, at + 1, at + width) then
    store(n, sub(bucket, 1, found - 1) .. sub(bucket, found + width))
    entries = entries - 1
  end
end
return save()
"""
)
"""KEYS table; ARGV entries, as above: take out those that are there just so; how many, below 0; or nil."""

UNCOUNT = (
    _TABLE
    + _STORE
    + """
if not redis.call('SET', KEYS[2], '', 'NX', 'EX', ARGV[5]) then return 0 end
local keys = ARGV[1]
want(keys, key_bytes)
for i = 1, #wanted do
  local at, n = (i - 1) * key_bytes, wanted[i]
  local bucket = held[n]
  local found = place(bucket, sub(keys, at + 1, at + key_bytes))
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
"""
)
"""KEYS table, mark; ARGV keys, as above, seconds: take 1 from each key's count unless the mark says it was done."""

_RUN_NOW = "local function run_now() return string.match(redis.call('INFO', 'server'), 'run_id:(%w+)') end\n"

_EPOCH = (
    """
local epoch = redis.call('GET', KEYS[1])
local version, name, partitions, run, whole = string.match(epoch or '', '^(%d+) (%S+) (%d+) (%S+) (%d)$')
"""
    + _RUN_NOW
)

BEGIN = """
if (redis.call('GET', KEYS[1]) or '') ~= ARGV[1] then return redis.call('GET', KEYS[1]) or '' end
local run = string.match(redis.call('INFO', 'server'), 'run_id:(%w+)')
local epoch = ARGV[2] .. ' ' .. run .. ' 0'
redis.call('SET', KEYS[1], epoch)
return epoch
"""
"""KEYS epoch; ARGV its value as last seen, version and name and partitions of a new one: the value now."""

CHECK = (
    _EPOCH
    + """
if name ~= ARGV[1] or run ~= run_now() then return false end
return epoch
"""
)
"""KEYS epoch; ARGV name: the epoch's value; or nil where it is another's, or that of another run of the server."""

SUCCESSOR = (
    _RUN_NOW
    + """
local before, run, name = string.match(redis.call('GET', KEYS[1]) or '', '^(%S+) (%S+) (%S+)$')
if before == ARGV[1] and run == run_now() then return name end
redis.call('SET', KEYS[1], ARGV[1] .. ' ' .. run_now() .. ' ' .. ARGV[2])
return ARGV[2]
"""
)
"""KEYS successor; ARGV epoch's name, proposed name: the name under which all clients continue that epoch."""

MOVE = """
if redis.call('EXISTS', KEYS[1]) == 0 and redis.call('EXISTS', KEYS[2]) == 1 then
  redis.pcall('RENAME', KEYS[2], KEYS[1])
end
return redis.call('EXISTS', KEYS[1])
"""
"""KEYS new, old: rename a key unless that was done before; whether the new one exists."""

RAISE = """
if tonumber(redis.call('GET', KEYS[1]) or '1') <= tonumber(ARGV[1]) then
  redis.call('SET', KEYS[1], string.format('%.0f', tonumber(ARGV[1]) + 1))
end
return 1
"""
"""KEYS next; ARGV number: no container is given that number or a lower one from now on."""

ADOPT = (
    _RUN_NOW
    + _COUNTER
    + """
if redis.call('EXISTS', KEYS[1]) == 0 then
  if KEYS[2] and redis.call('EXISTS', KEYS[2]) == 1 then redis.pcall('RENAME', KEYS[2], KEYS[1]) end
  if redis.call('EXISTS', KEYS[1]) == 0 then redis.call('HSET', KEYS[1], '', '0 0 0', 'g', ARGV[1], 'f', '1') end
  redis.call('HSET', KEYS[1], 'r', run_now())
end
return counter(redis.call('HGET', KEYS[1], 'm'), 0) or redis.error_reply('$DAMAGED ' .. KEYS[1])
"""
)
"""KEYS partition, the same partition of the epoch before; ARGV GC generation: rename the old one, or create an empty
one; the highest number in it."""

INSPECT = (
    _RUN_NOW
    + _COUNTER
    + """
if redis.call('EXISTS', KEYS[1]) == 0 then return false end
local held = redis.call('HMGET', KEYS[1], 'g', 'r', 'f')
return {generation_of(held[1]), held[2] == run_now() and 1 or 0, held[3] and 1 or 0}
"""
)
"""KEYS partition: GC generation, whether its server is still the same, whether it began empty; or nil."""

ADVANCE = (
    _RUN_NOW
    + _COUNTER
    + """
if redis.call('EXISTS', KEYS[1]) == 0 then return false end
local held = redis.call('HMGET', KEYS[1], 'g', 'r')
if held[2] ~= run_now() or generation_of(held[1]) < tonumber(ARGV[1]) then return 0 end
redis.call('HSET', KEYS[1], 'g', math.max(generation_of(held[1]), tonumber(ARGV[2])))
return 1
"""
)
"""KEYS partition; ARGV GC generation required, new one: 1 if set, 0 if stale or its server restarted; or nil."""

SETTLE = (
    _RUN_NOW
    + _COUNTER
    + """
local held = redis.call('HMGET', KEYS[1], '', 'g', 'r')
if not held[1] or held[3] ~= run_now() then return false end
redis.call('HSET', KEYS[1], 'g', math.max(generation_of(held[2]), tonumber(ARGV[1])))
redis.call('HDEL', KEYS[1], 'f')
return 1
"""
)
"""KEYS partition; ARGV GC generation: its entries were checked against the store; nil if it or its server changed."""

ASSIGN = (
    _EPOCH
    + """
if name ~= ARGV[1] or run ~= run_now() then return false end
local known = redis.call('HGET', KEYS[2], ARGV[2])
if known then return (struct.unpack('<I8', known)) end
local first, span = tonumber(redis.call('GET', KEYS[4]) or '1'), tonumber(ARGV[3])
if first + span > 2 ^ 40 then return -1 end
redis.call('SET', KEYS[4], string.format('%.0f', first + span))
redis.call('HSET', KEYS[2], ARGV[2], struct.pack('<I8', first))
redis.call('RPUSH', KEYS[3], struct.pack('<I8', first) .. ARGV[2] .. struct.pack('<I4', span) .. ARGV[4])
return first
"""
)
"""KEYS epoch, containers, table, next; ARGV name, container id, span, domain: its first number; -1 full; or nil."""

FINISH = (
    _EPOCH
    + """
local known = redis.call('HGET', KEYS[2], ARGV[2])
if name ~= ARGV[1] or not known then return false end
if #known == 8 then redis.call('HSET', KEYS[2], ARGV[2], known .. ARGV[3]) end
return 1
"""
)
"""KEYS epoch, containers; ARGV name, container id, summary: keep the summary, a sign that all entries are there."""

ANEW = (
    _EPOCH
    + """
local known = redis.call('HGET', KEYS[2], ARGV[2])
if name ~= ARGV[1] then return false end
if known and #known > 8 then redis.call('HSET', KEYS[2], ARGV[2], string.sub(known, 1, 8) .. ARGV[3]) end
return 1
"""
)
"""KEYS epoch, containers; ARGV name, container id, summary: replace the summary of a container that is there."""

GONE = (
    _EPOCH
    + """
if name ~= ARGV[1] then return false end
redis.call('HDEL', KEYS[2], ARGV[2])
return 1
"""
)
"""KEYS epoch, containers; ARGV name, container id: it is no more. Its numbers are never given again."""

WHOLE = (
    _EPOCH
    + """
if name ~= ARGV[1] or redis.call('GET', KEYS[2]) ~= ARGV[2] then return 0 end
redis.call('SET', KEYS[1], table.concat({version, name, partitions, run, '1'}, ' '))
return 1
"""
)
"""KEYS epoch, lease; ARGV name, the lease's holder: say that the index holds all that the store does."""

COMMITTED = """
if redis.call('EXISTS', KEYS[1]) == 0 then return false end
local owner = redis.call('HGET', KEYS[1], ARGV[2])
if owner and owner ~= ARGV[3] then return -1 end
return #redis.call('ZRANGEBYLEX', KEYS[2], '[' .. ARGV[1], '(' .. ARGV[1] .. '\\255', 'LIMIT', 0, 1)
"""
"""KEYS partition, versions; ARGV start of a member, tenant's tag and name: 1 where a version is there, else 0; -1 where
the tag is another tenant's; or nil."""

COMMIT = """
if redis.call('EXISTS', KEYS[1]) == 0 then return false end
local owner = redis.call('HGET', KEYS[1], ARGV[3])
if owner and owner ~= ARGV[4] then return -1 end
if #redis.call('ZRANGEBYLEX', KEYS[2], '[' .. ARGV[1], '(' .. ARGV[1] .. '\\255', 'LIMIT', 0, 1) > 0 then return 0 end
redis.call('HSET', KEYS[1], ARGV[3], ARGV[4])
return redis.call('ZADD', KEYS[2], 0, ARGV[1] .. ARGV[2])
"""
"""KEYS partition, versions; ARGV start and rest of a member, tenant's tag and name: add it unless the version is there,
or the tag is another tenant's (-1); or nil."""

MARK = """
if redis.call('EXISTS', KEYS[1]) == 0 then return false end
local held = redis.call('HGET', KEYS[2], ARGV[1])
if held then
  local highest, size = string.match(held, '^(%d+) (%d+)')
  highest = tonumber(highest)
  if highest > tonumber(ARGV[2]) or (highest == tonumber(ARGV[2]) and tonumber(size) >= tonumber(ARGV[3])) then
    return 0
  end
end
return redis.call('HSET', KEYS[2], ARGV[1], ARGV[2] .. ' ' .. ARGV[3])
"""
"""KEYS partition, marks; ARGV start of a member, highest mark, bytes of all: kept unless a higher one, or more bytes
of the same one, are; or nil."""

COLLECT = """
if redis.call('EXISTS', KEYS[1]) == 0 then return false end
if ARGV[3] == '0' then
  redis.call('HDEL', KEYS[3], ARGV[1])
else
  redis.call('HSET', KEYS[3], ARGV[1], ARGV[2] .. ' ' .. ARGV[3])
end
local found = redis.call('ZRANGEBYLEX', KEYS[2], '[' .. ARGV[1], '(' .. ARGV[1] .. '\\255', 'LIMIT', 0, 1)
if #found == 0 then return 0 end
return redis.call('ZREM', KEYS[2], found[1])
"""
"""KEYS partition, versions, marks; ARGV start of a member, highest mark, bytes of those left: take it out; or nil."""

TAKE = """
if redis.call('GET', KEYS[1]) then return false end
local holder = redis.call('INCR', KEYS[2]) .. ':' .. ARGV[1]
redis.call('SET', KEYS[1], holder, 'PX', ARGV[2])
return holder
"""
"""KEYS lease, fence; ARGV token, ms: the holder's name, a number that grows and the token; or nil while it is held."""

RENEW = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
return redis.call('PEXPIRE', KEYS[1], ARGV[2])
"""
"""KEYS lease; ARGV holder, ms: 1 while it is held by that holder."""

RELEASE = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
return redis.call('DEL', KEYS[1])
"""
"""KEYS lease; ARGV holder: let go of it."""


NOW = "return redis.call('TIME')"
"""KEYS any of a prefix: seconds and microseconds since 1970, by the server that has it."""


def _fill_template(script: str) -> str:
    for name, value in (("DAMAGED", DAMAGED), ("LEVEL_MAX", LEVEL_MAX), ("BUCKET_ENTRIES_MAX", BUCKET_ENTRIES_MAX)):
        script = script.replace(f"${name}", str(value))
    return script


SOURCES = {
    "find": _fill_template(FIND),
    "insert": _fill_template(INSERT),
    "count": _fill_template(COUNT),
    "remove": _fill_template(REMOVE),
    "uncount": _fill_template(UNCOUNT),
    "begin": BEGIN,
    "check": CHECK,
    "successor": SUCCESSOR,
    "move": MOVE,
    "raise": RAISE,
    "adopt": _fill_template(ADOPT),
    "inspect": INSPECT,
    "advance": ADVANCE,
    "settle": SETTLE,
    "assign": ASSIGN,
    "finish": FINISH,
    "anew": ANEW,
    "gone": GONE,
    "whole": WHOLE,
    "committed": COMMITTED,
    "commit": COMMIT,
    "mark": MARK,
    "collect": COLLECT,
    "take": TAKE,
    "renew": RENEW,
    "release": RELEASE,
    "now": NOW,
}
"""All scripts by name."""

-- Raise the next free number above a number.
-- KEYS next; ARGV number.
if tonumber(redis.call('GET', KEYS[1]) or '1') <= tonumber(ARGV[1]) then
  redis.call('SET', KEYS[1], string.format('%.0f', tonumber(ARGV[1]) + 1))
end
return 1

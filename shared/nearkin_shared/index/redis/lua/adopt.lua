-- Rename the partition of the previous epoch, or create an empty one; return its highest number.
-- KEYS partition, the same partition of the previous epoch; ARGV GC generation.
--include run_id
--include counter
if redis.call('EXISTS', KEYS[1]) == 0 then
  if KEYS[2] and redis.call('EXISTS', KEYS[2]) == 1 then redis.pcall('RENAME', KEYS[2], KEYS[1]) end
  if redis.call('EXISTS', KEYS[1]) == 0 then redis.call('HSET', KEYS[1], '', '0 0 0', 'g', ARGV[1], 'f', '1') end
  redis.call('HSET', KEYS[1], 'r', run_now())
end
return counter(redis.call('HGET', KEYS[1], 'm'), 0) or redis.error_reply(DAMAGED .. ' ' .. KEYS[1])

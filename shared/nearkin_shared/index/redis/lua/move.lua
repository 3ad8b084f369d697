-- Rename a key unless that was done before; return whether the new one exists.
-- KEYS new, old.
if redis.call('EXISTS', KEYS[1]) == 0 and redis.call('EXISTS', KEYS[2]) == 1 then
  redis.pcall('RENAME', KEYS[2], KEYS[1])
end
return redis.call('EXISTS', KEYS[1])

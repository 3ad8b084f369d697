-- Take the lease; return the holder's name, a growing number and the token, or nil if it is held.
-- KEYS lease, fence; ARGV token, ms.
if redis.call('GET', KEYS[1]) then return false end
local holder = redis.call('INCR', KEYS[2]) .. ':' .. ARGV[1]
redis.call('SET', KEYS[1], holder, 'PX', ARGV[2])
return holder

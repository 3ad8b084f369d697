-- Renew the lease; return 1 if that holder still has it.
-- KEYS lease; ARGV holder, ms.
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
return redis.call('PEXPIRE', KEYS[1], ARGV[2])

-- Declare that the index has all entries of the store.
-- KEYS epoch, lease; ARGV name, the lease's holder.
--include epoch
if name ~= ARGV[1] or redis.call('GET', KEYS[2]) ~= ARGV[2] then return 0 end
redis.call('SET', KEYS[1], table.concat({version, name, partitions, run, '1'}, ' '))
return 1

-- Return the epoch's value; nil if it has another name, or if the server restarted.
-- KEYS epoch; ARGV name.
--include epoch
if name ~= ARGV[1] or run ~= run_now() then return false end
return epoch

-- Field g or m as a number; a missing g is 0, as before GC generations, a damaged one is older than any
-- generation.
local function counter(value, missing)
  if not value then return missing end
  return type(value) == 'string' and #value <= 15 and string.match(value, '^%d+$') and tonumber(value) or nil
end
local function generation_of(value) return counter(value, 0) or -1 end

"""The Lua that the records in Redis and their operator's side share."""

from __future__ import annotations

from flask_idempotency.core.records import OBSERVED

NOW = """
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
"""


def is_observed(owner: str) -> str:
    """Make the Lua for: this was only observed. ``owner`` is an expression for its owner."""
    return f"string.sub({owner}, 1, {len(OBSERVED)}) == '{OBSERVED}'"


# -> name, length and end of each finished step
STEPS = """
local found = {}
for _, field in ipairs(redis.call('HKEYS', KEYS[1])) do
  if string.sub(field, 1, 5) == 'step:' then
    local name = string.sub(field, 6)
    local size = #redis.call('HGET', KEYS[1], field)
    found[#found + 1] = {name, size, redis.call('HGET', KEYS[1], 'end:' .. name) or ''}
  end
end
return found"""

RESULTS = "return redis.call('HMGET', KEYS[1], unpack(ARGV))"

AT_ONCE = 1000
"""How many records or steps to ask for at once: some milliseconds of the server's time."""

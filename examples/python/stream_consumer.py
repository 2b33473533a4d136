"""A single consumer of a stream, in order: others stand by, and go on where it was killed.

    python stream_consumer.py NAME        redis-cli XADD orders '*' item 7

The position is written with the fence of the lock, together with the result, in one step: a consumer that was paused, and lost its lock
meanwhile, can neither apply an entry again nor move the position back.
"""
import os
import sys

import holdfast
import redis

name = sys.argv[1]
client = redis.Redis.from_url(os.environ.get("REDIS_URL", "redis://127.0.0.1:6379"), decode_responses=True)
apply = client.register_script(
    """
    if tonumber(ARGV[1]) < tonumber(redis.call('HGET', KEYS[1], 'fence') or 0) then return 0 end
    redis.call('HSET', KEYS[1], 'fence', ARGV[1], 'position', ARGV[2])
    redis.call('RPUSH', KEYS[2], ARGV[3])
    return 1
    """
)

with holdfast.Holdfast(client) as locks:
    # Waits for as long as another one consumes.
    with locks.lock("orders:consumer", lease=5) as hold:
        print(f"{name} consumes", flush=True)
        while not hold.lost.is_set():
            position = client.hget("orders:state", "position") or "0"
            for _, entries in client.xread({"orders": position}, count=1, block=500) or []:
                for entry, fields in entries:
                    if not apply(keys=["orders:state", "orders:done"], args=[hold.fence, entry, fields["item"]]):
                        sys.exit(f"{name}: another one consumes")

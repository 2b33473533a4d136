"""A semaphore that bounds the calls to a service: at most three at a time, from all processes together.

    python bounded_calls.py CALLS

A process that is killed during a call gives its permit back a lease later.
"""
import concurrent.futures
import os
import sys
import time

import holdfast
import redis

client = redis.Redis.from_url(os.environ.get("REDIS_URL", "redis://127.0.0.1:6379"))


def service(number: int) -> int:
    """What stands for the service counts how many calls it has at a time."""
    now = client.incr("service:calls")
    client.zadd("service:most", {"calls": now}, gt=True)
    time.sleep(0.05)
    client.decr("service:calls")
    return number


with holdfast.Holdfast(client) as locks, concurrent.futures.ThreadPoolExecutor(16) as pool:
    permits = locks.semaphore("service", 3)

    def call(number: int) -> int:
        with permits.acquire(60):
            return service(number)

    print(sum(1 for _ in pool.map(call, range(int(sys.argv[1])))), "calls", flush=True)

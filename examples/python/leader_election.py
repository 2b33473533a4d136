"""Leader election with a fenced write: of all processes that run this, one leads and writes, and a former leader's late write is refused.

    python leader_election.py NAME

A leader that exits hands over at once; one that is killed is replaced a lease later. One that was paused (SIGSTOP, a garbage collection, a
virtual machine that moved) may wake up and write before it learns that it no longer leads: the fence of its term is lower than the new
leader's, and the storage refuses it. Without the fence, that write would be lost or would overwrite a newer one.
"""
import os
import signal
import sys
import threading

import holdfast
import redis

name = sys.argv[1]
client = redis.Redis.from_url(os.environ.get("REDIS_URL", "redis://127.0.0.1:6379"), decode_responses=True)
# The storage keeps the highest fence that it has seen, and takes no lower one. Here it is a hash; in SQL: sql_update.py.
fenced_write = client.register_script(
    """
    if tonumber(ARGV[1]) < tonumber(redis.call('HGET', KEYS[1], 'fence') or 0) then return 0 end
    redis.call('HSET', KEYS[1], 'fence', ARGV[1], 'by', ARGV[2])
    redis.call('HINCRBY', KEYS[1], 'writes', 1)
    return 1
    """
)
stop = threading.Event()


def lead(hold: holdfast.Hold) -> None:
    """Runs in the election's thread for as long as this process leads."""
    print(f"{name} leads, term {hold.fence}", flush=True)
    while not stop.is_set() and not hold.lost.wait(0.2):
        if not fenced_write(keys=["schedule"], args=[hold.fence, name]):
            print(f"{name}: refused, term {hold.fence} is over", flush=True)
            return


with holdfast.Holdfast(client) as locks:
    election = locks.elect("scheduler", on_elected=lead, on_lost=lambda reason: print(f"{name}: {reason}", flush=True), value=name)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    while not stop.wait(3600):
        pass
    election.close()

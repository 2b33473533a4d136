"""An APScheduler job that runs once in a fleet: the scheduler of every host fires at the same time, and one host does the work.

    python apscheduler_once.py SECONDS        # The job runs every so many seconds.

The others wait in the queue of the lock, then find that this run is done. If the process that works is killed, its lock ends a lease later, and
the next host does this run. The name of a run comes from the clock's grid, so it is the same on hosts whose clocks differ a little.
"""
import os
import sys
import time

import holdfast
import redis
from apscheduler.schedulers.blocking import BlockingScheduler

every = int(sys.argv[1])
client = redis.Redis.from_url(os.environ.get("REDIS_URL", "redis://127.0.0.1:6379"), decode_responses=True)


def job() -> None:
    run = int(time.time()) // every * every
    with locks.lock("report", lease=5) as hold:
        if client.exists(f"report:{run}:done"):
            return
        client.rpush("report:begun", run)
        time.sleep(float(os.environ.get("SECONDS", "0")))  # Stands for the work.
        hold.check()  # LockLostError: another host has the lock, and begins anew.
        client.set(f"report:{run}:done", 1, ex=86400)
        client.rpush("report:log", run)


with holdfast.Holdfast(client) as locks:
    scheduler = BlockingScheduler()
    # From a common start on, so that all hosts fire at the same moments.
    scheduler.add_job(job, "interval", seconds=every, start_date="2026-01-01 00:00:00+00:00", misfire_grace_time=every)
    scheduler.start()

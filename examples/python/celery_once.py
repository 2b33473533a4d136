"""A Celery task that runs once in a fleet, however often it was queued: by the beat of each host, or again after a worker was killed.

    celery --app celery_once worker        python celery_once.py DAY        # Queues the report of a day.

A copy of the task that finds the lock taken does not block its worker: it comes back a lease later. Then the report is done, or its worker was
killed, and this copy does the work. Redis is broker and lock server at once.
"""
import functools
import os
import sys
import time

import holdfast
import redis
from celery import Celery, Task

URL = os.environ.get("REDIS_URL", "redis://127.0.0.1:6379")
LEASE = 5
app = Celery("celery_once", broker=URL)


@functools.cache
def opened() -> tuple[redis.Redis, holdfast.Holdfast]:
    """Made by the process that uses it: Celery's workers fork, and a fork holds no locks."""
    client = redis.Redis.from_url(URL, decode_responses=True)
    return client, holdfast.Holdfast(client)


@app.task(bind=True, name="report", max_retries=None)
def report(self: Task, day: str) -> None:
    client, locks = opened()
    hold = locks.lock("report", lease=LEASE).try_acquire()
    if hold is None:
        raise self.retry(countdown=LEASE)
    with hold:
        if client.exists(f"report:{day}:done"):
            print(f"{day} is done", flush=True)
            return
        client.rpush("report:log", day)
        time.sleep(float(os.environ.get("SECONDS", "0")))  # Stands for the work.
        hold.check()  # LockLostError: another worker has the lock, and begins anew.
        client.set(f"report:{day}:done", 1, ex=7 * 86400)
        print(f"{day}: reported", flush=True)


if __name__ == "__main__":
    report.delay(sys.argv[1])

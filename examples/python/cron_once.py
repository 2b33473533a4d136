r"""A cron job that runs once in a fleet: every host's cron starts this at the same time, and one of them does the work.

    python cron_once.py PERIOD COMMAND [ARGUMENT...]        0 3 * * *  cron_once.py "$(date +\%F)" /usr/local/bin/report

PERIOD names the run: the day, say. A host whose clock is late finds that it was done. If the host that works is killed, its lock ends a
lease later, and the next start (another minute of the crontab, another host) does the work: at least once, and never twice at the same time.
"""
import os
import subprocess
import sys

import holdfast
import redis

period, command = sys.argv[1], sys.argv[2:]
client = redis.Redis.from_url(os.environ.get("REDIS_URL", "redis://127.0.0.1:6379"), decode_responses=True)

with holdfast.Holdfast(client) as locks:
    hold = locks.lock("cron:report", lease=5).try_acquire()
    if hold is None:
        print("another host is at it")
        sys.exit()
    with hold:
        if client.get("cron:report:done") == period:
            print(f"{period} is done")
            sys.exit()
        work = subprocess.Popen(command)
        # A lock that is lost ends the work: another host may have begun it.
        while work.poll() is None:
            if hold.lost.wait(0.2):
                work.terminate()
                sys.exit("the lock was lost")
        if work.returncode == 0:
            client.set("cron:report:done", period)
sys.exit(work.returncode)

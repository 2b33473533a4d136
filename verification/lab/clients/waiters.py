"""Waits for locks through redis-py, each in a thread, and prints each result: a line KEY <tab> granted, or the error.

usage: waiters.py HOST:PORT,... KEY ...

The addresses are of Sentinels. Keys with "session" in their names are waited for by way of Holdfast's own client, which finds a new
master by itself; the others by a command that blocks on a connection of its own.
"""

import sys
import threading

import holdfast
from redis.backoff import NoBackoff
from redis.retry import Retry
from redis.sentinel import Sentinel

MASTER_NAME = "lab"
LEASE = 300_000

printing = threading.Lock()


def master(sentinels):
    sentinel = Sentinel(sentinels, socket_timeout=0.5, sentinel_kwargs={"socket_timeout": 0.5})
    # A blocked client waits without a timeout, and sends its request only once.
    return sentinel.master_for(MASTER_NAME, socket_timeout=None, socket_connect_timeout=1.0, retry=Retry(NoBackoff(), 0))


def wait(client, key):
    try:
        if "session" in key:
            hold = client.lock(key).acquire()
            said = "granted"
            hold.release()
        else:
            said = "granted" if client.execute_command("LOCK.ACQUIRE", key, "waiter", "LEASE", LEASE, "WAIT", 0) else "nil"
    except Exception as why:  # the lab reads every error
        said = repr(why).replace("\n", " ")
    with printing:
        print(f"{key}\t{said}", flush=True)


def main():
    sentinels = [(host, int(port)) for host, port in (at.rsplit(":", 1) for at in sys.argv[1].split(","))]
    shared = holdfast.Holdfast(master(sentinels))
    for key in sys.argv[2:]:
        client = shared if "session" in key else master(sentinels)
        threading.Thread(target=wait, args=(client, key)).start()


main()

"""A lock with redis-py and raw LOCK.* commands.  Usage: recipe.py PORT KEY"""
import secrets
import sys
import threading
import time
from contextlib import contextmanager

import redis
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError, TimeoutError  # noqa: A004
from redis.retry import Retry

LEASE = 10_000  # ms; a killed process blocks others for at most this long
SURE = LEASE / 1000 * 0.99  # s; a lease counts for this long, from before its request was sent: two clocks may differ by 1 %
PAUSE = 0.1  # s


def clients(port):
    """One client for waits, without a read timeout, and one for everything else. redis-py must not repeat commands by itself."""
    never = Retry(NoBackoff(), 0)
    waits = redis.Redis(port=port, socket_timeout=None, retry=never)
    short = redis.Redis(port=port, socket_timeout=LEASE / 8 / 1000, retry=never)
    return waits, short


class Hold:
    """A lock of this process, under its fencing token."""

    def __init__(self, key, owner, token, sent):
        self.key, self.owner, self.token = key, owner, token
        self.certain = sent + SURE  # until then no other client can hold the lock

    def is_held(self):
        return time.monotonic() < self.certain

    def renew(self, short):
        sent = time.monotonic()
        renewed = short.execute_command("LOCK.RENEW", self.key, self.owner, "TOKEN", self.token, "LEASE", LEASE)
        self.certain = 0 if renewed is None else sent + SURE  # nil: lost


@contextmanager
def lock(waits, short, key, wait):
    """Holds `key` and yields the hold. Waits for at most `wait` seconds."""
    owner = secrets.token_hex(16)  # unique for each acquisition
    hold, broke = acquire(waits, short, key, owner, wait)
    stop = threading.Event()
    timer = threading.Thread(target=renew, args=(short, hold, stop), daemon=True)
    timer.start()
    try:
        yield hold
    finally:
        stop.set()
        timer.join()
        release(short, key, owner, hold.token, broke)


def acquire(waits, short, key, owner, wait):
    """Returns the hold, and whether a connection broke meanwhile."""
    began, broke = time.monotonic(), False
    while (left := wait - (time.monotonic() - began)) > 0:
        sent = time.monotonic()
        waited = int((sent - began) * 1000)  # keeps the place in the queue when the request is sent again
        try:
            token = waits.execute_command(
                "LOCK.ACQUIRE", key, owner, "HOLDS", 1, "LEASE", LEASE, "WAIT", int(left * 1000) + 1, "WAITED", waited
            )
            if token is None:
                break
            hold = Hold(key, owner, token, sent)
            if hold.certain - time.monotonic() < SURE / 2:  # the lease began during the wait, but it is not known when
                hold.renew(short)
        except (ConnectionError, TimeoutError):
            broke = True
            time.sleep(PAUSE)
            continue
        if hold.is_held():
            return hold, broke
    if broke:  # a request may still be on its way
        short.execute_command("LOCK.RELEASE", key, owner, "ALL")
    raise TimeoutError(f"{key} was not acquired within {wait} s")


def renew(short, hold, stop):
    pause = LEASE / 4 / 1000
    while hold.is_held() and not stop.wait(pause):
        try:
            hold.renew(short)
            pause = LEASE / 4 / 1000
        except redis.RedisError:
            pause = PAUSE  # asked again while the lease is certain


def release(short, key, owner, token, broke):
    first = True
    deadline = time.monotonic() + LEASE / 1000  # after that the lease has ended anyway
    while time.monotonic() < deadline:
        try:
            released = short.execute_command("LOCK.RELEASE", key, owner, "TOKEN", token)
            if broke:  # a request that was sent twice may still be in the queue
                short.execute_command("LOCK.RELEASE", key, owner, "ALL")
            if released is None and first:
                raise RuntimeError(f"{key} had been lost")
            return  # nil to a repetition: the first reply was lost
        except (ConnectionError, TimeoutError):
            first = False
            broke = True
            time.sleep(PAUSE)


def main(port, key):
    waits, short = clients(port)
    with lock(waits, short, key, wait=30) as hold:
        print("held", hold.token, flush=True)
        assert short.incr("inside:" + key) == 1, "two processes hold the lock"
        time.sleep(LEASE / 2 / 1000)  # the work
        assert hold.is_held()
        short.decr("inside:" + key)
    print("released", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])

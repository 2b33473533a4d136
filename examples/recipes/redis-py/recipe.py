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
PAUSE = 0.1  # s


def clients(port):
    """One client for waits, without a read timeout, and one for everything else. redis-py must not repeat commands by itself."""
    never = Retry(NoBackoff(), 0)
    waits = redis.Redis(port=port, socket_timeout=None, retry=never)
    short = redis.Redis(port=port, socket_timeout=LEASE / 8 / 1000, retry=never)
    return waits, short


@contextmanager
def lock(waits, short, key, wait):
    """Holds `key` and yields its fencing token and an event that is set when the lock is lost. Waits for at most `wait` seconds."""
    owner = secrets.token_hex(16)  # unique for each acquisition
    token, broke = acquire(waits, short, key, owner, wait)
    stop, lost = threading.Event(), threading.Event()
    timer = threading.Thread(target=renew, args=(short, key, owner, token, stop, lost), daemon=True)
    timer.start()
    try:
        yield token, lost
    finally:
        stop.set()
        timer.join()
        release(short, key, owner, token, broke)


def acquire(waits, short, key, owner, wait):
    """Returns the token, and whether a connection broke meanwhile."""
    began, broke = time.monotonic(), False
    while (left := wait - (time.monotonic() - began)) > 0:
        waited = int((time.monotonic() - began) * 1000)  # keeps the place in the queue when the request is sent again
        try:
            token = waits.execute_command(
                "LOCK.ACQUIRE", key, owner, "HOLDS", 1, "LEASE", LEASE, "WAIT", int(left * 1000) + 1, "WAITED", waited
            )
        except (ConnectionError, TimeoutError):
            broke = True
            time.sleep(PAUSE)
            continue
        if token is None:
            break
        return token, broke
    if broke:  # a request may still be on its way
        short.execute_command("LOCK.RELEASE", key, owner, "ALL")
    raise TimeoutError(f"{key} was not acquired within {wait} s")


def renew(short, key, owner, token, stop, lost):
    certain = time.monotonic() + LEASE / 1000
    while not stop.wait(LEASE / 4 / 1000):
        sent = time.monotonic()
        try:
            if short.execute_command("LOCK.RENEW", key, owner, "TOKEN", token, "LEASE", LEASE) is None:
                return lost.set()
            certain = sent + LEASE / 1000
        except redis.RedisError:
            pass  # asked again while the lease is certain
        if time.monotonic() >= certain:
            return lost.set()


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
    with lock(waits, short, key, wait=30) as (token, lost):
        print("held", token, flush=True)
        assert short.incr("inside:" + key) == 1, "two processes hold the lock"
        time.sleep(LEASE / 2 / 1000)  # the work
        assert not lost.is_set()
        short.decr("inside:" + key)
    print("released", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])

"""Measures redis-py's own Lock with its defaults; prints JSON. Called by the bench program.

usage: redis_py_lock.py pairs PORT COUNT | handoffs PORT WAITERS SECONDS
"""

import json
import random
import sys
import threading
import time

import redis

LEASE = 30


def microseconds(since):
    return (time.perf_counter() - since) * 1e6


def pairs(port, count):
    lock = redis.Redis(port=port).lock("redis-py", timeout=LEASE)
    times = []
    for _ in range(count):
        start = time.perf_counter()
        lock.acquire()
        lock.release()
        times.append(microseconds(start))
    return times


def server_cpu(client):
    cpu = client.info("cpu")
    return float(cpu["used_cpu_sys_main_thread"]) + float(cpu["used_cpu_user_main_thread"])


class Relay:
    """One lock that is handed on among threads, each with its own connection.

    A client that released asks again when the next one holds it, and that one releases when all others wait.
    """

    def __init__(self, port, clients):
        self.port = port
        self.changed = threading.Condition()
        self.grants = 0
        self.waiting = 0
        self.released = None
        self.times = []
        self.acquisitions = [0] * clients
        self.over = False

    def run(self, client):
        lock = redis.Redis(port=self.port).lock("redis-py", timeout=LEASE)
        while not self.over:
            self.acquire(lock)
            turn = self.granted(client, time.perf_counter())
            self.wait_until(lambda: self.waiting == len(self.acquisitions) - 1)
            self.released = time.perf_counter()
            lock.release()
            self.wait_until(lambda: self.grants > turn)

    def acquire(self, lock):
        if lock.acquire(blocking=False):
            return
        with self.changed:
            self.waiting += 1
            self.changed.notify_all()
        # The thread arrives in step with the hand-offs; a random delay makes it independent of them.
        time.sleep(random.uniform(0, lock.sleep))
        lock.acquire()
        with self.changed:
            self.waiting -= 1

    def granted(self, client, now):
        with self.changed:
            if self.released is not None and not self.over:
                self.times.append((now - self.released) * 1e6)
                self.acquisitions[client] += 1
            self.grants += 1
            self.changed.notify_all()
            return self.grants

    def wait_until(self, condition):
        with self.changed:
            self.changed.wait_for(lambda: condition() or self.over)


def handoffs(port, waiters, seconds):
    control = redis.Redis(port=port)
    relay = Relay(port, waiters + 1)
    threads = [threading.Thread(target=relay.run, args=(client,)) for client in range(waiters + 1)]
    cpu, start = server_cpu(control), time.perf_counter()
    for thread in threads:
        thread.start()
    time.sleep(seconds)
    cpu, length = server_cpu(control) - cpu, time.perf_counter() - start
    with relay.changed:
        relay.over = True
        relay.changed.notify_all()
    for thread in threads:
        thread.join()
    return {
        "times_us": relay.times,
        "seconds": length,
        "acquisitions": relay.acquisitions,
        "server_cpu": cpu,
    }


def main():
    what, port, count, *rest = sys.argv[1:]
    if what == "pairs":
        result = pairs(int(port), int(count))
    else:
        result = handoffs(int(port), int(count), float(rest[0]))
    json.dump(result, sys.stdout)


if __name__ == "__main__":
    main()

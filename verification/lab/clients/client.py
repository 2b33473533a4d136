"""A client of the lab in Python: acquires, waits, renews and releases through redis-py, and records what it sees.

usage: client.py sentinel|cluster HOST:PORT,... KEY-PREFIX nothing|wait|N THREADS THIN SEED

In addition, THIN threads share one object of Holdfast's own client.

Runs until its standard input is closed, then prints its record (format: verification/lab/src/record.rs).
"""

import random
import sys
import threading
import time

import holdfast
import redis
from redis.backoff import NoBackoff
from redis.cluster import ClusterNode, RedisCluster
from redis.retry import Retry
from redis.sentinel import Sentinel

MASTER_NAME = "lab"
PATIENCE = 2.0
REPLICAS_TIMEOUT = 1_000_000
WAIT_FOR_REPLICA = 50
LONGEST_WAIT = 1500
# The timeout of Holdfast's client for a reply. After it, the client closes the connection.
REPLY_TIMEOUT = 5_000_000
# The lease of the locks of Holdfast's client, which renews them, in seconds.
LEASE = 3
# Longer than any request may take, so that a timeout means a missing reply.
SOCKET_TIMEOUT = (LONGEST_WAIT + 1000) / 1000 + PATIENCE

FAILED = (redis.RedisError, OSError)


def now():
    return time.monotonic_ns() // 1000


class BySentinel:
    """The current primary according to the Sentinels."""

    attempts = 1

    def __init__(self, addresses, rng):
        rng.shuffle(addresses)
        sentinel = Sentinel(addresses, socket_timeout=0.5, sentinel_kwargs={"socket_timeout": 0.5})
        # A retry needs its own times in the record, so the library must not retry.
        self.redis = sentinel.master_for(
            MASTER_NAME,
            socket_timeout=SOCKET_TIMEOUT,
            socket_connect_timeout=1.0,
            retry=Retry(NoBackoff(), 0),
        )

    def ask(self, *command):
        """The reply and the server's replication id, read in one pipeline over one connection."""
        pipe = self.redis.pipeline(transaction=False)
        pipe.info("replication")
        pipe.execute_command(*command)
        info, reply = pipe.execute()
        return reply, info["master_replid"]

    def confirmed(self, _key, command):
        """Like ask, with a WAIT on the same connection."""
        pipe = self.redis.pipeline(transaction=False)
        pipe.info("replication")
        pipe.execute_command(*command)
        pipe.execute_command("WAIT", 1, WAIT_FOR_REPLICA)
        info, reply, replicas = pipe.execute()
        return reply, info["master_replid"], replicas

    def forget(self):
        self.redis.connection_pool.disconnect()

    def shared(self):
        return self.redis


class ByCluster:
    """A cluster. The library chooses the node."""

    # The library follows a slot that moves, and then the wait restarts.
    attempts = 3

    def __init__(self, addresses, rng):
        rng.shuffle(addresses)
        self.nodes = [ClusterNode(host, port) for host, port in addresses]
        self.cluster = None

    def ask(self, *command):
        if self.cluster is None:
            self.cluster = RedisCluster(
                startup_nodes=self.nodes, socket_timeout=SOCKET_TIMEOUT, socket_connect_timeout=1.0
            )
        return self.cluster.execute_command(*command), "-"

    def shared(self):
        return RedisCluster(startup_nodes=self.nodes, socket_timeout=SOCKET_TIMEOUT, socket_connect_timeout=1.0)

    def forget(self):
        if self.cluster is not None:
            self.cluster.close()
        self.cluster = None


class Contender:
    """Acquires one lock after the other, and records what it sees."""

    def __init__(self, name, prefix, long, rng, stop):
        self.name = name
        self.prefix = prefix
        self.long = long
        self.rng = rng
        self.stop = stop
        self.record = []
        self.asked = 0

    def note(self, *fields):
        self.record.append("\t".join(str(field) for field in fields))

    def run(self):
        while not self.stop.is_set():
            self.turn()


class Client(Contender):
    def __init__(self, name, way, prefix, asks, long, rng, stop):
        super().__init__(name, prefix, long, rng, stop)
        self.way = way
        self.asks = asks

    def turn(self):
        self.asked += 1
        key, limit, words = self.wanted()
        owner = f"{self.name}-{self.asked}"
        lease = self.rng.randrange(2500, 5000) if self.long else self.rng.randrange(400, 1500)
        wait = self.rng.randrange(20, LONGEST_WAIT) if self.rng.random() < 0.8 else 0
        command = ["LOCK.ACQUIRE", key, owner, "LEASE", lease, *words, "HOLDS", 1]
        if wait:
            command += ["WAIT", wait]
        first = now()
        reply = self.request(command, wait, confirm=True)
        if reply is None and self.rng.random() < 0.5 and not self.stop.is_set():
            reply = self.request(command, wait, confirm=True)
        if reply is None or reply[0] is None:
            time.sleep(self.rng.uniform(0.001, 0.02))
            return
        token, epoch, assurance, sent, replied = reply
        hold = self.asked
        self.note(
            "G", hold, key, owner, limit, token, first, sent, replied, lease * 1000, epoch, assurance
        )
        self.hold(hold, key, owner, token, lease, sent + lease * 1000)

    def wanted(self):
        if self.long:
            return f"{self.prefix}long:{{{self.rng.randrange(6)}}}", 1, []
        dice = self.rng.randrange(10)
        if dice == 0:
            return f"{self.prefix}sem:{{{self.rng.randrange(2)}}}", 3, ["LIMIT", 3]
        if dice <= 2:
            key = f"{self.prefix}rw:{{{self.rng.randrange(2)}}}"
            return (key, 1, []) if self.rng.random() < 0.3 else (key, "shared", ["SHARED"])
        return f"{self.prefix}m:{{{self.rng.randrange(4)}}}", 1, []

    def hold(self, hold, key, owner, token, lease, ends):
        """The lock is held until `ends` at least, which counts from the request: a wait in the queue only shortens it."""
        until = now() + (self.rng.randrange(500_000, 4_500_000) if self.long else self.rng.randrange(1_000, 25_000))
        while now() < until and not self.stop.is_set():
            time.sleep(min(0.4, (until - now()) / 1e6) if until > now() else 0)
            self.note("W", hold, now())
            if self.rng.random() < (0.3 if self.long else 0.07):
                renewed = self.request(["LOCK.RENEW", key, owner, "LEASE", lease, "TOKEN", token], 0, confirm=True)
                if renewed is not None and renewed[0] is None:
                    self.note("E", hold, now())
                    return
                if renewed is not None:
                    _, epoch, assurance, sent, replied = renewed
                    self.note("N", hold, sent, replied, lease * 1000, epoch, assurance)
                    ends = max(ends, sent + lease * 1000)
            if now() >= ends:
                break
        if self.rng.random() < 0.02:
            return
        self.note("E", hold, now())
        for _ in range(2):
            if self.request(["LOCK.RELEASE", key, owner, "TOKEN", token, "ALL"], 0, confirm=False) is not None:
                return

    def request(self, command, wait, confirm):
        """(reply, epoch, assurance, sent, replied), or None after an error or a timeout."""
        replicas = self.asks.isdigit()
        if replicas and confirm:
            command = [*command, "REPLICAS", self.asks]
        allowed = (wait * 1000 + (REPLICAS_TIMEOUT if replicas else 0)) * self.way.attempts
        assurance = "replicas" if replicas else "plain"
        sent = now()
        outcome = "granted"
        try:
            if confirm and self.asks == "wait":
                allowed += WAIT_FOR_REPLICA * 1000
                reply, epoch, confirmed = self.way.confirmed(command[1], command)
                assurance = "confirmed" if confirmed else "unconfirmed"
            else:
                reply, epoch = self.way.ask(*command)
            if reply is None:
                outcome = "refused"
            return reply, epoch, assurance, sent, now()
        except redis.TimeoutError:
            outcome = "unanswered" if now() - sent > allowed + PATIENCE * 1e6 / 2 else "failed"
        except FAILED:
            outcome = "failed"
        finally:
            self.note("Q", sent, allowed, now(), outcome)
        self.way.forget()
        time.sleep(self.rng.uniform(0.005, 0.04))
        return None


class Thin(Contender):
    """A thread that uses Holdfast's own client, and writes only while that client reports the lock as held."""

    def __init__(self, name, locks, prefix, asks, long, rng, stop):
        super().__init__(name, prefix, long, rng, stop)
        self.locks = locks
        self.replicas = int(asks) if asks.isdigit() else 0

    def turn(self):
        self.asked += 1
        if self.long:
            key, shared = f"{self.prefix}long:{{{self.rng.randrange(6)}}}", False
        else:
            name, count = self.rng.choice([("forced", 6), ("forced", 6), ("m", 4), ("rw", 2)])
            key = f"{self.prefix}{name}:{{{self.rng.randrange(count)}}}"
            shared = name == "rw" and self.rng.random() < 0.7
        lock = self.locks.lock(key, lease=LEASE, shared=shared, replicas=self.replicas)
        wait = self.rng.randrange(20, LONGEST_WAIT)
        sent = now()
        outcome, hold = "failed", None
        try:
            hold = lock.acquire(wait / 1000)
            outcome = "granted"
        except holdfast.NotAcquiredError as why:
            outcome = "refused" if why.__cause__ is None else "failed"
        except FAILED:
            time.sleep(self.rng.uniform(0.005, 0.04))
        finally:
            self.note("Q", sent, wait * 1000 + REPLY_TIMEOUT, now(), outcome)
        if hold is not None:
            replied = now()
            assurance = "replicas" if self.replicas else "plain"
            limit = "shared" if shared else 1
            # How long the lock is held after the reply is known from each check of the client.
            self.note(
                "G", self.asked, key, f"{self.name}-{self.asked}", limit, hold.fence, sent, sent, replied, 2000, "-", assurance
            )
            self.hold(hold, assurance)

    def hold(self, hold, assurance):
        until = now() + (self.rng.randrange(500_000, 4_500_000) if self.long else self.rng.randrange(2_000, 400_000))
        seen = now()
        while now() < until and not self.stop.is_set():
            hold.lost.wait(self.rng.uniform(0.002, 0.04))
            at = now()
            if not hold.is_held():
                break
            self.note("N", self.asked, at, seen, 2000, "-", assurance)
            self.note("W", self.asked, at)
            seen = at
        self.note("E", self.asked, now())
        try:
            hold.release()
        except FAILED:
            pass


def main():
    kind, addresses, prefix, asks, threads, thin, seed = sys.argv[1:]
    addresses = [(host, int(port)) for host, port in (at.rsplit(":", 1) for at in addresses.split(","))]
    way = {"sentinel": BySentinel, "cluster": ByCluster}[kind]
    stop = threading.Event()
    clients = []
    for index in range(int(threads)):
        rng = random.Random(f"{seed}-{index}")
        clients.append(
            Client(f"py{seed}.{index}", way(list(addresses), rng), prefix, asks, index % 2 == 1, rng, stop)
        )
    if int(thin):
        shared = holdfast.Holdfast(way(list(addresses), random.Random(seed)).shared())
        for index in range(int(thin)):
            rng = random.Random(f"thin {seed}-{index}")
            clients.append(Thin(f"python-thin{seed}.{index}", shared, prefix, asks, index % 2 == 1, rng, stop))
    workers = [threading.Thread(target=client.run, daemon=True) for client in clients]
    for worker in workers:
        worker.start()
    sys.stdin.read()
    stop.set()
    end = time.monotonic() + 20
    for worker in workers:
        worker.join(max(0, end - time.monotonic()))
    for number, client in enumerate(clients):
        for line in client.record:
            kind, *fields = line.split("\t")
            if kind in "GNEW":
                # One record for all threads: each has its own range of numbers.
                fields[0] = str(int(fields[0]) * 100 + number)
            print(kind, *fields, sep="\t")
    for worker in workers:
        if worker.is_alive():
            print("Q", now(), 0, "-", "unanswered", sep="\t")
    sys.stdout.flush()


main()

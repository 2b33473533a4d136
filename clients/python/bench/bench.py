"""Compares the locks with those of other libraries, on one server in one run, and prints tables.

usage: bench.py [--quick] [uncontended] [handoff] [crowd] [holders] [import] [redlock] [election]

HOLDFAST_MODULE: the module. HOLDFAST_SERVER: the server's program (redis-server).
"""

import argparse
import asyncio
import collections
import concurrent.futures
import contextlib
import itertools
import logging
import multiprocessing
import queue
import random
import resource
import signal
import statistics
import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path

import redis
import redis.asyncio
import redis_lock
from pottery import Redlock

import holdfast
import holdfast.asyncio
from holdfast.redlock import RedLock

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from servers import HOST, Server

LEASE = 60
LOCKS = 10
HOLD = 0.001


class Ours:
    """A lock of holdfast with redis-py's methods, for threads."""

    def __init__(self, locks, name, **terms):
        self.lock = locks.lock(name, lease=LEASE, **terms)

    def acquire(self):
        self.hold = self.lock.acquire()
        return True

    def release(self):
        self.hold.release()


class OursOfTasks(Ours):
    """The same for asyncio."""

    async def acquire(self):
        self.hold = await self.lock.acquire()

    async def release(self):
        await self.hold.release()


class Threads:
    """Ways to lock with threads: functions of a redis-py client, a Holdfast object, and the lock's name."""

    ours = holdfast.Holdfast

    @staticmethod
    def client(port, connections):
        return redis.Redis(host=HOST, port=port, max_connections=connections)

    ways = {  # noqa: RUF012
        "holdfast": lambda _, locks, name: Ours(locks, name),
        "holdfast, not renewed": lambda _, locks, name: Ours(locks, name, renew=False),
        "redis-py": lambda client, _, name: client.lock(name, timeout=LEASE),
        "python-redis-lock": lambda client, _, name: redis_lock.Lock(client, name, expire=LEASE),
    }


class Tasks:
    """Ways to lock with asyncio: as with threads."""

    ours = holdfast.asyncio.Holdfast

    @staticmethod
    def client(port, connections):
        return redis.asyncio.Redis(host=HOST, port=port, max_connections=connections)

    ways = {  # noqa: RUF012
        "holdfast": lambda _, locks, name: OursOfTasks(locks, name),
        "holdfast, not renewed": lambda _, locks, name: OursOfTasks(locks, name, renew=False),
        "redis-py": lambda client, _, name: client.lock(name, timeout=LEASE),
    }


def table(title, heads, rows):
    print(f"\n## {title}\n")
    print("| " + " | ".join(heads) + " |")
    print("|---|" + "--:|" * (len(heads) - 1))
    for row in rows:
        print("| " + " | ".join(row) + " |", flush=True)


# One lock without contention: a round of each way in turn, so that other load on the machine affects all of them.


def uncontended(port, rounds, pairs):
    client = Threads.client(port, 100)
    times = collections.defaultdict(list)
    with Threads.ours(client) as ours:
        locks = {name: make(client, ours, f"pair:{name}") for name, make in Threads.ways.items()}
        for _ in range(rounds):
            for name, lock in locks.items():
                begin = time.perf_counter()
                for _ in range(pairs):
                    lock.acquire()
                    lock.release()
                times[name].append((time.perf_counter() - begin) / pairs * 1e6)
    return times


async def uncontended_tasks(port, rounds, pairs):
    client = Tasks.client(port, 100)
    times = collections.defaultdict(list)
    async with Tasks.ours(client) as ours:
        locks = {name: make(client, ours, f"pair:{name}") for name, make in Tasks.ways.items()}
        for _ in range(rounds):
            for name, lock in locks.items():
                begin = time.perf_counter()
                for _ in range(pairs):
                    await lock.acquire()
                    await lock.release()
                times[name].append((time.perf_counter() - begin) / pairs * 1e6)
    await client.aclose()
    return times


def pairs_table(title, times):
    base = statistics.median(times["redis-py"])
    rows = [
        (name, f"{statistics.median(all_):.0f} µs", f"{statistics.median(all_) / base:.2f}")
        for name, all_ in times.items()
    ]
    table(title, ("", "median", "of redis-py's"), rows)


# One client waits for the lock that another one releases.


def moment():
    """When the release begins: the same part of a polling interval must not come again and again."""
    return random.uniform(0.005, 0.105)


def handed_off(port, rounds):
    """Microseconds from the call of release until the acquire of a client that waits returns."""

    def acquire(lock):
        lock.acquire()
        return time.perf_counter()

    def release(lock):
        begin = time.perf_counter()
        lock.release()
        return begin

    times = collections.defaultdict(list)
    for name, make in Threads.ways.items():
        with contextlib.ExitStack() as stack:
            # redis-py's locks are held by a thread.
            threads = [stack.enter_context(concurrent.futures.ThreadPoolExecutor(1)) for _ in range(2)]
            clients = [stack.enter_context(Threads.client(port, 10)) for _ in range(2)]
            ours = [stack.enter_context(Threads.ours(client)) for client in clients]
            locks = [make(client, one, f"hand-off:{name}") for client, one in zip(clients, ours, strict=True)]
            threads[0].submit(acquire, locks[0]).result()
            for holder, waiter in [(0, 1), (1, 0)] * rounds:
                granted = threads[waiter].submit(acquire, locks[waiter])
                time.sleep(moment())
                released = threads[holder].submit(release, locks[holder])
                times[name].append((granted.result() - released.result()) * 1e6)
            threads[0].submit(release, locks[0]).result()
    return times


async def handed_off_tasks(port, rounds):
    async def acquire(lock):
        await lock.acquire()
        return time.perf_counter()

    times = collections.defaultdict(list)
    for name, make in Tasks.ways.items():
        async with contextlib.AsyncExitStack() as stack:
            clients = [await stack.enter_async_context(Tasks.client(port, 10)) for _ in range(2)]
            ours = [await stack.enter_async_context(Tasks.ours(client)) for client in clients]
            locks = [make(client, one, f"hand-off:{name}") for client, one in zip(clients, ours, strict=True)]
            await acquire(locks[0])
            for holder, waiter in [(0, 1), (1, 0)] * rounds:
                granted = asyncio.create_task(acquire(locks[waiter]))
                await asyncio.sleep(moment())
                begin = time.perf_counter()
                await locks[holder].release()
                times[name].append((await granted - begin) * 1e6)
            await locks[0].release()
    return times


# Many threads or tasks on ten locks, until each has finished its turns.


class Crowd:
    """The progress of a crowd: how long its members waited, and when each finished."""

    def __init__(self, members, turns, limit):
        self.waits = []
        self.ends = [None] * members
        self.turns = turns
        self.done = 0
        self.end = time.monotonic() + limit

    @property
    def over(self):
        return time.monotonic() > self.end


class Watch:
    """The server's figures for a run: CPU time, commands, and the most connections at once."""

    def __init__(self, port):
        self.client = redis.Redis(host=HOST, port=port)
        self.most = 0
        self.stopped = threading.Event()
        self.thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self):
        self.looks = 0
        self.before = self._counters()
        self.begin = time.monotonic()
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.seconds = time.monotonic() - self.begin
        self.stopped.set()
        self.thread.join()
        after = self._counters()
        self.cpu = after[0] - self.before[0]
        # Its own requests do not count.
        self.commands = after[1] - self.before[1] - self.looks - 2
        self.client.close()

    def _look(self):
        while not self.stopped.wait(0.1):
            self.most = max(self.most, self.client.info("clients")["connected_clients"] - 1)
            self.looks += 1

    def _counters(self):
        info = {**self.client.info("cpu"), **self.client.info("stats")}
        cpu = float(info["used_cpu_sys_main_thread"]) + float(info["used_cpu_user_main_thread"])
        return cpu, info["total_commands_processed"]


def crowd_of_threads(way, port, members, turns, limit):
    client = Threads.client(port, members + 10)
    ours = Threads.ours(client)
    crowd = Crowd(members, turns, limit)
    begin = time.monotonic()

    def work(number):
        lock = Threads.ways[way](client, ours, f"{way}:{number % LOCKS}")
        for _ in range(turns):
            asked = time.monotonic()
            if not lock.acquire():
                return
            crowd.waits.append(time.monotonic() - asked)
            time.sleep(HOLD)
            lock.release()
            crowd.done += 1
            if crowd.over:
                return
        crowd.ends[number] = time.monotonic() - begin

    with Watch(port) as watch:
        threads = [threading.Thread(target=work, args=(number,)) for number in range(members)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    ours.close()
    client.close()
    return crowd, watch


def crowd_of_tasks(way, port, members, turns, limit):
    crowd = Crowd(members, turns, limit)

    async def work(client, ours, begin, number):
        lock = Tasks.ways[way](client, ours, f"{way}:{number % LOCKS}")
        for _ in range(turns):
            asked = time.monotonic()
            await lock.acquire()
            crowd.waits.append(time.monotonic() - asked)
            await asyncio.sleep(HOLD)
            await lock.release()
            crowd.done += 1
        crowd.ends[number] = time.monotonic() - begin

    async def main():
        client = Tasks.client(port, members + 10)
        ours = Tasks.ours(client)
        begin = time.monotonic()
        tasks = [asyncio.create_task(work(client, ours, begin, number)) for number in range(members)]
        done, pending = await asyncio.wait(tasks, timeout=limit)
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
        for task in done:
            task.result()
        await ours.close()
        await client.aclose()

    with Watch(port) as watch:
        asyncio.run(main())
    return crowd, watch


def jain(values):
    """Jain's index: 1 if all values are equal, 1/n if only one is not 0."""
    return sum(values) ** 2 / (len(values) * sum(value * value for value in values))


def crowd_row(name, crowd, watch, members, turns):
    finished = all(end is not None for end in crowd.ends)
    shares = [1 / end if end else 0 for end in crowd.ends]
    return (
        name,
        f"{watch.seconds:.1f} s" if finished else f"not in {watch.seconds:.0f} s ({crowd.done / members / turns:.0%})",
        f"{max(crowd.waits) * 1e3:,.0f} ms",
        f"{jain(shares):.3f}" if any(shares) else "-",
        f"{watch.cpu:.2f} s",
        f"{watch.commands:,}",
        f"{watch.most}",
    )


# Locks on a majority of independent servers.


class Rounds:
    """Makes locks of pottery, and counts their rounds without a majority, which pottery does not report."""

    def __init__(self):
        self.failed = 0

    def lock(self, name, clients):
        rounds = self

        class Counting(Redlock):
            def _acquire_masters(self, **kwargs):
                granted = super()._acquire_masters(**kwargs)
                rounds.failed += not granted
                return granted

            # pottery calls it by this mangled name.
            _Redlock__acquire_masters = _acquire_masters

        return Counting(key=name, masters=set(clients), auto_release_time=LEASE)


class OursOnMany(Rounds):
    """Makes locks of holdfast, which has no such rounds to count."""

    def lock(self, name, clients):
        return OnMany([holdfast.Holdfast(client) for client in clients], name)


class OnMany(Ours):
    """A RedLock of holdfast with redis-py's methods."""

    def __init__(self, servers, name, **terms):
        self.lock = RedLock(servers, name, lease=LEASE, **terms)


def redlock_pairs(clients, rounds, pairs):
    """How long it takes to acquire and release, in microseconds."""
    servers = [holdfast.Holdfast(client) for client in clients]
    locks = {
        "holdfast": OnMany(servers, "pair:holdfast"),
        "pottery": Redlock(key="pair", masters=set(clients), auto_release_time=LEASE),
    }
    times = collections.defaultdict(list)
    for _ in range(rounds):
        for name, lock in locks.items():
            begin = time.perf_counter()
            for _ in range(pairs):
                lock.acquire()
                lock.release()
            times[name].append((time.perf_counter() - begin) / pairs * 1e6)
    return times


def redlock_crowd(kind, ports, members, turns, limit):
    """How long until all clients had their turns, the longest wait, and the rounds without a majority."""
    rounds, waits, done = kind(), [], []
    end = time.monotonic() + limit

    def work():
        clients = [redis.Redis(host=HOST, port=port) for port in ports]
        lock = rounds.lock("crowd", clients)
        for _ in range(turns):
            asked = time.monotonic()
            lock.acquire()
            waits.append(time.monotonic() - asked)
            time.sleep(HOLD)
            lock.release()
            done.append(time.monotonic())
            if time.monotonic() > end:
                return

    begin = time.monotonic()
    threads = [threading.Thread(target=work) for _ in range(members)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    share = len(done) / members / turns
    seconds = max(done) - begin
    return (
        f"{seconds:.1f} s" if share == 1 else f"not in {seconds:.0f} s ({share:.0%})",
        f"{max(waits) * 1e3:,.0f} ms",
        f"{rounds.failed:,}",
    )


def redlock(quick):
    # It logs each round without a majority.
    logging.getLogger("pottery").setLevel(logging.CRITICAL)
    rounds, pairs = (3, 20) if quick else (20, 200)
    members, turns, limit = (4, 3, 4) if quick else (10, 20, 120)
    for count in (3, 5):
        servers = [Server() for _ in range(count)]
        try:
            ports = [server.port for server in servers]
            clients = [redis.Redis(host=HOST, port=port) for port in ports]
            times = redlock_pairs(clients, rounds, pairs)
            base = statistics.median(times["pottery"])
            rows = [
                (name, f"{statistics.median(all_):.0f} µs", f"{statistics.median(all_) / base:.2f}")
                for name, all_ in times.items()
            ]
            table(f"RedLock over {count} servers, uncontended", ("", "acquire and release", "of pottery's"), rows)
            crowds = [
                (name, *redlock_crowd(kind, ports, members, turns, limit))
                for name, kind in (("holdfast", OursOnMany), ("pottery", Rounds))
            ]
            table(
                f"RedLock over {count} servers: {members} clients, {turns} turns each of {HOLD * 1e3:.0f} ms",
                ("", "all had their turns", "longest wait", "rounds without a majority"),
                crowds,
            )
        finally:
            for server in servers:
                server.close()


# Many locks of one process.


def hold_with_holdfast(client, names, lease):
    """Acquires the locks. Returns a function that says how many are lost."""
    locks = holdfast.Holdfast(client)
    held = [locks.lock(name, lease=lease).acquire() for name in names]
    return lambda: sum(not hold.is_held() for hold in held)


def hold_with_redis_py(client, names, _):
    """The same with redis-py's own lock, which nothing renews: so it has a longer lease."""
    held = [client.lock(name, timeout=LEASE) for name in names]
    for lock in held:
        lock.acquire()
    return lambda: sum(not lock.owned() for lock in held)


def hold_as_redisson_does(client, names, lease):
    """The same by Redisson's scripts. Its watchdog renews up to 100 locks with one script, every third of the lease."""
    acquire = client.register_script(
        "if redis.call('exists', KEYS[1]) == 0 or redis.call('hexists', KEYS[1], ARGV[2]) == 1 then "
        "redis.call('hincrby', KEYS[1], ARGV[2], 1) redis.call('pexpire', KEYS[1], ARGV[1]) return nil end "
        "return redis.call('pttl', KEYS[1])"
    )
    renew = client.register_script(
        "local renewed = 0 for i, key in ipairs(KEYS) do if redis.call('hexists', key, ARGV[i + 1]) == 1 then "
        "redis.call('pexpire', key, ARGV[1]) renewed = renewed + 1 end end return renewed"
    )
    owner, milliseconds = f"{uuid.uuid4()}:1", lease * 1000
    for name in names:
        acquire(keys=[name], args=[milliseconds, owner])
    lost = len(names)

    def watchdog():
        nonlocal lost
        while True:
            time.sleep(lease / 3)
            batches = [names[at : at + 100] for at in range(0, len(names), 100)]
            lost = len(names) - sum(renew(keys=keys, args=[milliseconds, *[owner] * len(keys)]) for keys in batches)

    threading.Thread(target=watchdog, daemon=True).start()
    return lambda: lost


HOLDERS = {"holdfast": hold_with_holdfast, "redis-py": hold_with_redis_py, "redisson's way": hold_as_redisson_does}


def holders(port, way, count, lease, seconds):
    """The cost of `count` locks that one process holds."""
    admin = redis.Redis(host=HOST, port=port)

    def server_cpu():
        cpu = admin.info("cpu")
        return float(cpu["used_cpu_sys_main_thread"]) + float(cpu["used_cpu_user_main_thread"])

    def renewals():
        calls = {command: stats["calls"] for command, stats in admin.info("commandstats").items()}
        return calls.get("cmdstat_lock.renew", 0) + calls.get("cmdstat_pexpire", 0)

    memory, own = admin.info("memory")["used_memory"], resource.getrusage(resource.RUSAGE_SELF)
    lost = HOLDERS[way](redis.Redis(host=HOST, port=port), [f"{way}:{number}" for number in range(count)], lease)
    cpu, calls, begin = server_cpu(), renewals(), time.perf_counter()
    time.sleep(seconds)
    length = time.perf_counter() - begin
    return (
        way,
        f"{count:,}",
        f"{admin.info('clients')['connected_clients'] - 1}",
        f"{(admin.info('memory')['used_memory'] - memory) / count:,.0f} B",
        f"{(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - own.ru_maxrss) * 1024 / count:,.0f} B",
        f"{(renewals() - calls) / length:,.0f}",
        f"{(server_cpu() - cpu) / length:.2%}",
        f"{lost()}",
    )


def many_holders(quick):
    # Each in a process and on a server of its own: memory that another one had freed would be used again.
    processes = multiprocessing.get_context("spawn")
    heads = ("", "locks", "connections", "server, each", "client, each", "renewals/s", "server CPU", "lost")
    counts, lease, seconds = ((100,), 2, 2) if quick else ((1_000, 10_000), 10, 20)
    rows = []
    for count, way in itertools.product(counts, HOLDERS):
        server = Server()
        try:
            with processes.Pool(1) as pool:
                rows.append(pool.apply(holders, (server.port, way, count, lease, seconds)))
        finally:
            server.close()
    table(f"Locks held by one process, lease {lease} s", heads, rows)


# How long it takes to import the package, beside redis-py.

IMPORT = "import time; start = time.perf_counter(); import {0}; print(time.perf_counter() - start)"


def imports(quick):
    times = collections.defaultdict(list)
    for _ in range(3 if quick else 30):
        for name in ("redis", "redis, holdfast", "redis, holdfast, holdfast.asyncio"):
            command = [sys.executable, "-c", IMPORT.format(name)]
            times[name].append(float(subprocess.run(command, capture_output=True, check=True).stdout) * 1e3)
    base = statistics.median(times["redis"])
    rows = [
        (f"import {name}", f"{statistics.median(all_):.0f} ms", f"{statistics.median(all_) - base:.1f} ms")
        for name, all_ in times.items()
    ]
    table("Imports", ("", "median", "beyond import redis"), rows)


# How long an election has no leader.

LEADER = """
import sys, holdfast, redis
locks = holdfast.Holdfast(redis.Redis(port=int(sys.argv[1])))
terms = {"lease": float(sys.argv[2]), "ephemeral": sys.argv[3] == "True"}
election = locks.elect("led", lambda hold: print("leads", flush=True), **terms)
sys.stdin.readline()
"""
# What happens to the leader, whether its hold is ephemeral, and the goal: seconds beside the lease until the next one.
ENDS = (
    ("exits", None, False, 0.05),
    ("killed", signal.SIGKILL, False, 0.2),
    ("paused", signal.SIGSTOP, False, 0.2),
    ("killed, ephemeral", signal.SIGKILL, True, 0.05),
)


def replaced(port, signal_, lease, ephemeral):
    """Seconds from the end of a leader in another process until a candidate in this process is called back."""
    command = [sys.executable, "-c", LEADER, str(port), str(lease), str(ephemeral)]
    elected = queue.Queue()
    with contextlib.ExitStack() as stack:
        leader = stack.enter_context(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
        stack.callback(leader.kill)
        leader.stdout.readline()
        locks = stack.enter_context(holdfast.Holdfast(redis.Redis(host=HOST, port=port)))
        stack.enter_context(locks.elect("led", lambda _: elected.put(time.monotonic()), lease=lease))
        while not locks.waiters("led"):
            time.sleep(0.01)
        # At a random time between two renewals.
        time.sleep(lease / 4 * random.random())
        begin = time.monotonic()
        if signal_ is None:
            leader.stdin.close()
        else:
            leader.send_signal(signal_)
        return elected.get(timeout=60) - begin


def election(quick):
    lease, rounds = (1, 2) if quick else (2, 20)
    server = Server()
    rows = []
    try:
        for name, signal_, ephemeral, bound in ENDS:
            times = [replaced(server.port, signal_, lease, ephemeral) for _ in range(rounds)]
            bound += 0 if signal_ is None or ephemeral else lease
            within = sum(time_ <= bound for time_ in times)
            cells = (f"{seconds * 1e3:,.0f} ms" for seconds in (statistics.median(times), max(times), bound))
            rows.append((name, *cells, f"{within} of {rounds}"))
    finally:
        server.close()
    table(
        f"A leader is replaced, lease {lease} s", ("the leader", "median", "longest", "goal", "within the goal"), rows
    )


SECTIONS = ("uncontended", "handoff", "crowd", "holders", "import", "redlock", "election")


def main():
    arguments = argparse.ArgumentParser(description="Compares the locks of holdfast with others.")
    arguments.add_argument("--quick", action="store_true", help="short runs, to see that the bench works")
    arguments.add_argument("sections", nargs="*", metavar="SECTION", help=f"only these of {', '.join(SECTIONS)}")
    given = arguments.parse_args()
    quick, sections = given.quick, given.sections or SECTIONS
    if unknown := set(sections) - set(SECTIONS):
        arguments.error(f"unknown section {unknown.pop()}; there are {', '.join(SECTIONS)}")
    load = Path("/proc/loadavg").read_text().split()[0]
    print(f"redis-py {redis.__version__}, Python {sys.version.split()[0]}, load {load}")
    if {"uncontended", "handoff", "crowd"} & set(sections):
        one_server(quick, sections)
    if "holders" in sections:
        many_holders(quick)
    if "import" in sections:
        imports(quick)
    if "redlock" in sections:
        redlock(quick)
    if "election" in sections:
        election(quick)


def one_server(quick, sections):
    rounds, pairs = (20, 25) if quick else (800, 25)
    threads, tasks, turns, limit = (20, 100, 3, 10) if quick else (100, 1000, 10, 120)
    server = Server()
    try:
        if "uncontended" in sections:
            pairs_table("Threads: acquire and release, uncontended", uncontended(server.port, rounds, pairs))
            pairs_table(
                "asyncio: acquire and release, uncontended", asyncio.run(uncontended_tasks(server.port, rounds, pairs))
            )
        if "handoff" in sections:
            hand_offs = 5 if quick else 100
            pairs_table("Threads: hand-off to a client that waits", handed_off(server.port, hand_offs))
            pairs_table(
                "asyncio: hand-off to a client that waits", asyncio.run(handed_off_tasks(server.port, hand_offs))
            )
        if "crowd" not in sections:
            return
        heads = ("", "all had their turns", "longest wait", "Jain's index", "server CPU", "commands", "connections")
        for kind, crowd_of, members in ((Threads, crowd_of_threads, threads), (Tasks, crowd_of_tasks, tasks)):
            rows = []
            for way in kind.ways:
                crowd, watch = crowd_of(way, server.port, members, turns, limit)
                rows.append(crowd_row(way, crowd, watch, members, turns))
            table(
                f"{members} {kind.__name__.lower()} on {LOCKS} locks, {turns} turns each of {HOLD * 1e3:.0f} ms",
                heads,
                rows,
            )
    finally:
        with contextlib.suppress(Exception):
            server.close()


if __name__ == "__main__":
    main()

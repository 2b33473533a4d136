#!/usr/bin/env python3
"""Measures Holdfast and its competitors, and checks exclusion while it measures. `run` starts it; README.md describes it.

    --smoke              a second for each question: shows that everything works; its figures mean nothing
    --league M           only this league (may be repeated, as the next two)
    --contender redsync  only this contender
    --question pair      only this question
    --seconds 3          how long a question is measured
"""
from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import report
from processes import (Client, Failed, Place, Programs, Servers, Starter, go_server, hazelcast, independent_redis, postgresql, redis,
                       redis_with_module, until, zookeeper)


@dataclass(frozen=True)
class Contender:
    name: str
    title: str
    language: str
    leagues: str
    start: Starter
    shared: bool = False  # supports read-write locks
    waiters: bool = True  # a thousand clients fit into one process
    only_faults: bool = False  # differs from the previous one only when its holder fails
    fault_leagues: str = "MR"  # a sync to disk changes nothing for a holder that fails
    limit: float = 40  # seconds until the lock of a failed holder is free


CONTENDERS = [
    Contender("holdfast-go", "Holdfast, Go", "go", "MFR", redis_with_module, shared=True),
    Contender("holdfast-go-ephemeral", "Holdfast, Go, ephemeral", "go", "MFR", redis_with_module, only_faults=True),
    Contender("redsync", "redsync 4.18.1", "go", "MFR", independent_redis),
    Contender("redislock", "bsm/redislock 0.9.4", "go", "MF", redis),
    Contender("postgresql", "PostgreSQL 15 advisory lock", "go", "M", postgresql, shared=True),
    Contender("etcd", "etcd 3.7.3 concurrency.Mutex", "go", "MFR", go_server("etcd")),
    Contender("nats", "NATS 2.15.3 KV", "go", "MFR", go_server("nats")),
    Contender("holdfast-java", "Holdfast, Java", "java", "MFR", redis_with_module, shared=True, waiters=False),
    Contender("redisson", "Redisson 4.7.0 getLock", "java", "MFR", redis, shared=True, waiters=False),
    Contender("redisson-fair", "Redisson 4.7.0 getFairLock", "java", "MFR", redis, waiters=False),
    Contender("redisson-fenced", "Redisson 4.7.0 getFencedLock", "java", "MFR", redis, waiters=False),
    Contender("zookeeper", "ZooKeeper 3.9.5, Curator 5.9.0", "java", "MFR", zookeeper, shared=True, waiters=False),
    Contender("redis-py", "redis-py 8.1.0 Lock", "python", "MF", redis),
    Contender("redlock", "node-redlock 5.0.0-beta.2", "node", "MFR", independent_redis),
    Contender("redis-semaphore", "redis-semaphore 5.8.0", "node", "MFR", independent_redis),
    Contender("hazelcast", "Hazelcast 5.4.0 FencedLock", "java", "MR", hazelcast, waiters=False, limit=320, fault_leagues="R"),
]


@dataclass(frozen=True)
class Setting:
    smoke: bool
    seconds: float
    programs: Programs
    output: Path

    def warm(self, language: str, first: bool) -> int:
        if self.smoke:
            return 500
        return 20_000 if language == "java" and first else 2_000


@dataclass
class Stage:
    """A contender with its servers and a client program, for all measurements."""

    setting: Setting
    contender: Contender
    league: str
    place: Place
    servers: Servers
    round: int = 0

    def start_client(self, name: str, network: str | None = None) -> Client:
        command = [*self.setting.programs.client(self.contender.language), self.contender.name, self.league, ",".join(self.servers.endpoints)]
        return Client(self.place, name, command, network)

    def key(self) -> str:
        self.round += 1
        return f"league:{self.round}:0"

    @property
    def limit(self) -> float:
        return 2 if self.setting.smoke else self.contender.limit


def start(setting: Setting, contender: Contender, league: str, place: Place) -> Stage:
    if not setting.smoke:
        wait_until_idle()
    shutil.rmtree(place.folder, ignore_errors=True)
    place.folder.mkdir(parents=True)
    return Stage(setting, contender, league, place, contender.start(place, league, setting.programs))


@dataclass(frozen=True)
class Sample:
    client: int
    key: int
    shared: bool
    asked: int
    granted: int
    releasing: int
    released: int
    token: int


@dataclass
class Run:
    samples: list[Sample]
    begin: int
    end: int
    cpu: float  # of the servers, in seconds

    @property
    def measured(self) -> list[Sample]:
        return [s for s in self.samples if self.begin <= s.granted < self.end]

    @property
    def seconds(self) -> float:
        return (self.end - self.begin) / 1e9


def run(stage: Stage, client: Client, clients: int, keys: int, readers: int = 0) -> Run:
    """Runs clients that acquire and release locks, and checks mutual exclusion."""
    stage.round += 1
    path = stage.place.folder / f"samples{stage.round}"
    warm = stage.setting.warm(stage.contender.language, stage.round == 1)
    milliseconds = int(stage.setting.seconds * 1000)
    client.send(f"run clients={clients} keys={keys} readers={readers} round={stage.round} warm={warm} ms={milliseconds} {path}")
    (begin,) = client.expect("begin", warm / 1000 + 60)
    before = stage.servers.cpu()
    (end,) = client.expect("end", milliseconds / 1000 + 60)
    cpu = stage.servers.cpu() - before
    overlaps, failures = map(int, client.expect("done", 120))
    samples = [Sample(int(c), int(k), h == "1", *map(int, rest)) for c, k, h, *rest in map(str.split, path.open())]
    path.unlink()
    result = Run(samples, int(begin), int(end), cpu)
    overlaps += overlapping(samples)
    if overlaps:
        raise Failed(f"EXCLUSION VIOLATED: {overlaps} times two clients held one lock")
    if failures:
        raise Failed(f"{failures} requests failed: see client.log")
    if not result.measured:
        raise Failed("no lock was granted")
    return result


def overlapping(samples: list[Sample]) -> int:
    """The number of grants before the last holder had begun to release the lock. The times are of one clock."""
    count = 0
    writer_until: dict[int, int] = defaultdict(int)
    reader_until: dict[int, int] = defaultdict(int)
    for s in sorted(samples, key=lambda s: s.granted):
        if s.granted < writer_until[s.key] or (not s.shared and s.granted < reader_until[s.key]):
            count += 1
        ends = reader_until if s.shared else writer_until
        ends[s.key] = max(ends[s.key], s.releasing)
    return count


def quantile(values: list[float], q: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))]


def tokens(samples: list[Sample]) -> str:
    """Whether the tokens of each key increase from grant to grant."""
    newest: dict[int, int] = {}
    for s in sorted(samples, key=lambda s: s.granted):
        if s.token == 0:
            return "none"
        if s.token <= newest.get(s.key, 0):
            return "NO"
        newest[s.key] = s.token
    return "yes"


Figures = dict[str, object]


def pair(stage: Stage, client: Client) -> Figures:
    result = run(stage, client, 1, 1)
    times = [(s.granted - s.asked + s.released - s.releasing) / 1e3 for s in result.measured]
    return {
        "pair p50 µs": quantile(times, 0.5), "pair p99 µs": quantile(times, 0.99), "pairs/s": len(times) / result.seconds,
        "server CPU µs": result.cpu * 1e6 / len(times), "tokens grow": tokens(result.samples),
    }


def eight(stage: Stage, client: Client) -> Figures:
    result = run(stage, client, 8, 8)
    times = [(s.granted - s.asked + s.released - s.releasing) / 1e3 for s in result.measured]
    return {
        "pairs/s": len(times) / result.seconds, "pair p50 µs": quantile(times, 0.5), "pair p99 µs": quantile(times, 0.99),
        "server CPU µs": result.cpu * 1e6 / len(times),
    }


def handoff(stage: Stage, client: Client) -> Figures:
    clients = 16
    result = run(stage, client, clients, 1)
    measured = sorted(result.measured, key=lambda s: s.granted)
    changes = sum(a.client != b.client for a, b in zip(measured, measured[1:]))
    share = [sum(s.client == client for s in measured) for client in range(clients)]
    # A request that still waits at the end counts with its waiting time so far.
    asked = [s for s in result.samples if s.asked < result.end and s.granted >= result.begin]
    waits = [(min(s.granted, result.end) - s.asked) / 1e6 for s in asked]
    return {
        "owner changes/s": changes / result.seconds, "wait p50 ms": quantile(waits, 0.5), "wait p99 ms": quantile(waits, 0.99),
        "longest ms": max(waits), "largest/smallest share": max(share) / min(share) if min(share) else "one got none",
        "server CPU µs": result.cpu * 1e6 / changes if changes else "no change", "tokens grow": tokens(result.samples),
    }


def mix(stage: Stage, client: Client) -> Figures:
    result = run(stage, client, 16, 1, readers=90)
    waits = {shared: [(s.granted - s.asked) / 1e6 for s in result.measured if s.shared == shared] for shared in (True, False)}
    return {
        "pairs/s": len(result.measured) / result.seconds,
        **{f"{who} p99 ms": quantile(waits[shared], 0.99) if waits[shared] else "none" for shared, who in ((True, "reader"), (False, "writer"))},
        "longest writer ms": max(waits[False], default=0.0), "server CPU µs": result.cpu * 1e6 / len(result.measured),
    }


@dataclass
class Contention:
    """A holder that is about to fail, and a waiter for its lock."""

    holder: Client
    waiter: Client
    key: str
    token: int
    network: Network | None  # that of the holder, if it is to be cut off


def contention(stage: Stage, question: str, network: Network | None) -> Contention:
    holder = stage.start_client(f"{question}-holder", network.name if network and question == "cut" else None)
    waiter, key = stage.start_client(f"{question}-waiter"), stage.key()
    holder.send(f"lock {key}")
    token = int(granted(holder.read(60))[1])
    waiter.send(f"lock {key}")
    if waiter.read(1.5 if stage.contender.language == "java" else 0.5) is not None:
        raise Failed("EXCLUSION VIOLATED: the waiter has a lock that is held")
    return Contention(holder, waiter, key, token, network)


def killed(stage: Stage, held: Contention) -> Figures:
    at = time.monotonic_ns()
    held.holder.process.kill()
    return {"next holder after s": next_holder(stage, held.waiter, at)}


def paused(stage: Stage, held: Contention) -> Figures:
    at = time.monotonic_ns()
    os.killpg(held.holder.process.pid, signal.SIGSTOP)
    words = held.waiter.read(stage.limit)
    os.killpg(held.holder.process.pid, signal.SIGCONT)
    if words is None:
        return {"next holder after s": f"> {stage.limit:g}", "late holder's release": "not late", "its token is smaller": "not late"}
    after = (int(granted(words)[0]) - at) / 1e9
    # A client may notice the loss by itself; this is not measured.
    time.sleep(1)
    held.holder.send(f"unlock {held.key}")
    answer = held.holder.read(30)
    smaller = "none" if int(words[2]) == 0 else "yes" if held.token < int(words[2]) else "NO"
    return {"next holder after s": after, "late holder's release": "reports success" if answer == ["released"] else "reports the loss",
            "its token is smaller": smaller}


def cut(stage: Stage, held: Contention) -> Figures:
    """The holder's host stops sending and receiving, without closing its connections."""
    at = time.monotonic_ns()
    assert held.network
    held.network.drop()
    return {"next holder after s": next_holder(stage, held.waiter, at)}


def granted(words: list[str] | None) -> list[str]:
    if words is None or words[0] != "held":
        raise Failed(f"no lock: {words}")
    return words[1:]


def next_holder(stage: Stage, waiter: Client, at: int) -> float | str:
    words = waiter.read(stage.limit)
    if words is None:
        return f"> {stage.limit:g}"
    seconds = (int(granted(words)[0]) - at) / 1e9
    if seconds < 0:
        raise Failed("EXCLUSION VIOLATED: the waiter was granted a lock that was held")
    return seconds


def memory(stage: Stage, _: Client) -> Figures:
    count = 50 if stage.setting.smoke else 1000
    holder, waiters, key = stage.start_client("holder"), stage.start_client("waiter"), stage.key()
    holder.send(f"lock {key}")
    granted(holder.read(60))
    before = settled(stage)
    waiters.send(f"wait {key} clients={count}")
    waiters.expect("waiting", 300)
    # What a server frees once a client has been idle for some seconds does not count.
    time.sleep(0 if stage.setting.smoke else 20)
    return {"kB for a waiter": (settled(stage) - before) / count}


def settled(stage: Stage) -> int:
    """The servers' memory, once it has not grown by more than a hundredth for a second."""
    last, pause = -1, 0.3 if stage.setting.smoke else 1
    for _ in range(60):
        now = stage.servers.memory()
        if abs(now - last) <= now / 100:
            return now
        last = now
        time.sleep(pause)
    raise Failed("the servers' memory does not settle")


class Network:
    """A separate host for a holder: a network namespace, connected to this one by a pair of interfaces."""

    numbers = itertools.count()
    # Addresses that are reserved for examples, so no host has them.
    addresses = "198.51.100."

    def __init__(self) -> None:
        number = next(self.numbers) % 60
        self.name = f"league{os.getpid()}-{number}"
        self.host, guest = (f"{self.addresses}{4 * number + last}" for last in (1, 2))
        outside, inside = f"lg{os.getpid()}-{number}a", f"lg{os.getpid()}-{number}b"
        try:
            for command in (f"ip netns add {self.name}", f"ip link add {outside} type veth peer name {inside} netns {self.name}",
                            f"ip addr add {self.host}/30 dev {outside}", f"ip link set {outside} up",
                            f"ip -n {self.name} addr add {guest}/30 dev {inside}", f"ip -n {self.name} link set {inside} up",
                            f"ip -n {self.name} link set lo up"):
                subprocess.run(command.split(), check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError):
            self.close()
            raise

    @classmethod
    def reason_against(cls) -> str | None:
        """Why there can be none, if there is a reason."""
        try:
            if cls.addresses in subprocess.run(["ip", "addr"], check=True, capture_output=True, text=True).stdout:
                return f"the addresses {cls.addresses}0/24 are in use here"
            cls().close()
        except (OSError, subprocess.CalledProcessError) as why:
            return str(why)
        return None

    def drop(self) -> None:
        for chain in ("INPUT", "OUTPUT"):
            subprocess.run(["ip", "netns", "exec", self.name, "iptables", "-P", chain, "DROP"], check=True, capture_output=True)

    def close(self) -> None:
        subprocess.run(["ip", "netns", "del", self.name], check=False, capture_output=True)


MEASURED: dict[str, Callable[[Stage, Client], Figures]] = {"pair": pair, "eight": eight, "handoff": handoff, "mix": mix, "memory": memory}
FAULTS: dict[str, Callable[[Stage, Contention], Figures]] = {"killed": killed, "paused": paused, "cut": cut}
UNPINNED = ("pair", "eight", "handoff")  # measured without pinning, too


def measure(setting: Setting, contender: Contender, league: str, pinned: bool, names: list[str]) -> dict[str, Figures]:
    """Asks a contender, with servers that are started for these questions."""
    # A smoke run shares its machine with other processes, so it uses the processor that is free.
    place = Place(setting.output / "run" / f"{contender.name}-{league}", pinned and not setting.smoke)
    results: dict[str, Figures] = {}
    try:
        stage = start(setting, contender, league, place)
        client = stage.start_client("client")
        for name in names:
            try:
                results[name] = MEASURED[name](stage, client)
            except Failed as why:
                results[name] = {"failed": str(why)}
    except Failed as why:
        results |= {name: {"failed": str(why)} for name in names if name not in results}
    finally:
        place.stop()
    return clean(place, results)


def fail_holders(setting: Setting, contender: Contender, league: str, names: list[str], threads: ThreadPoolExecutor) -> Future[dict[str, Figures]]:
    """Prepares all faults of a contender, each with a lock of its own. Until the next holder has it, there is only waiting, so the next contender
    can be prepared meanwhile."""
    network = Network() if "cut" in names else None
    place = Place(setting.output / "run" / f"{contender.name}-{league}-faults", not setting.smoke, network.host if network else "127.0.0.1")
    held: dict[str, Contention] = {}
    failure = None
    try:
        stage = start(setting, contender, league, place)
        for name in names:
            held[name] = contention(stage, name, network)
    except Failed as why:
        failure = why
    except BaseException:
        place.stop()
        if network:
            network.close()
        raise

    def ask(name: str) -> Figures:
        try:
            if failure is not None:
                raise failure
            return FAULTS[name](stage, held[name])
        except Failed as why:
            return {"failed": str(why)}

    def finish() -> dict[str, Figures]:
        try:
            with ThreadPoolExecutor() as each:
                results = dict(zip(names, each.map(ask, names), strict=True))
        finally:
            place.stop()
            if network:
                network.close()
        return clean(place, results)

    return threads.submit(finish)


def clean(place: Place, results: dict[str, Figures]) -> dict[str, Figures]:
    """The results. What a failure left stays to be looked at."""
    if not any("failed" in figures for figures in results.values()):
        shutil.rmtree(place.folder)
    return results


def asked(contender: Contender, league: str, wanted: list[str]) -> list[str]:
    """The measurements that this contender takes part in."""
    return [name for name in MEASURED if name in wanted and not contender.only_faults
            and (contender.shared or name != "mix") and ((contender.waiters and league == "M") or name != "memory")]


def wait_until_idle() -> None:
    """Refuses a busy machine: at most a twentieth of the processor time may be used by other processes."""
    def used() -> tuple[int, int]:
        ticks = [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
        return sum(ticks), ticks[3] + ticks[4]

    def idle() -> bool:
        total, unused = used()
        time.sleep(1)
        total_later, unused_later = used()
        return unused_later - unused >= 0.95 * (total_later - total)

    try:
        until("the machine is idle for a second", idle, 60)
    except Failed as why:
        sys.exit(f"league: {why}. Nothing else may run while the league measures.")


def end(*_: object) -> None:
    """When it is terminated, it ends the processes that it has started."""
    for place in list(Place.all):
        place.stop()
    sys.exit("league: ended from outside")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--seconds", type=float)
    parser.add_argument("--league", action="append", choices=list("MFR"))
    parser.add_argument("--contender", action="append", choices=[each.name for each in CONTENDERS])
    parser.add_argument("--question", action="append", choices=[*MEASURED, *FAULTS])
    for name in ("go", "classpath", "python", "node", "module", "output"):
        parser.add_argument(f"--with-{name}", required=True, help=argparse.SUPPRESS)
    options = parser.parse_args()
    programs = Programs(options.with_go, options.with_classpath, options.with_python, options.with_node, options.with_module)
    setting = Setting(options.smoke, options.seconds or (1 if options.smoke else 3), programs, Path(options.with_output))

    signal.signal(signal.SIGTERM, end)
    wanted = options.question or [*MEASURED, *FAULTS]
    notes = []
    if "cut" in wanted and (why := Network.reason_against()):
        wanted = [name for name in wanted if name != "cut"]
        notes.append(f"Question `cut` was not asked: it needs root, `ip` and `iptables` ({why}).")
    results = report.Results(setting.output / ("smoke.json" if setting.smoke else "results.json"), fresh=setting.smoke)
    failed = []

    def add(league: str, contender: Contender, pinned: bool, number: int, found: dict[str, Figures]) -> None:
        for name, figures in found.items():
            results.add(league, name, contender.title, pinned, number, figures)
            where = f"{league} {contender.name} {name}{'' if pinned else ' unpinned'}"
            print(f"{where}: {report.line(figures)}", flush=True)
            if "failed" in figures:
                failed.append(where)

    for number in (1,) if setting.smoke else (1, 2):
        for league in options.league or "MFR":
            contenders = [one for one in CONTENDERS if league in one.leagues and (not options.contender or one.name in options.contender)]
            for contender in contenders:
                names = asked(contender, league, wanted)
                for pinned in (True,) if setting.smoke else (True, False):
                    if some := [name for name in names if pinned or name in UNPINNED]:
                        add(league, contender, pinned, number, measure(setting, contender, league, pinned, some))
            if names := [name for name in FAULTS if name in wanted]:
                with ThreadPoolExecutor(len(contenders)) as threads:
                    found = [(one, fail_holders(setting, one, league, names, threads)) for one in contenders if league in one.fault_leagues]
                for contender, result in found:
                    add(league, contender, True, number, result.result())
    document = setting.output / "league.md" if setting.smoke else Path(__file__).parents[2] / "docs" / "league.md"
    report.write(results, document, setting.output, notes, smoke=setting.smoke, titles=[each.title for each in CONTENDERS])
    print(f"league: wrote {document}" + ("; it is a smoke run, so its figures mean nothing" if setting.smoke else ""))
    if failed:
        print("league: failed: " + "; ".join(failed), file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
"""Measures Holdfast and its competitors, and checks exclusion while it measures. `run` starts it; README.md describes it.

    --smoke              a second for each question: shows that everything works; its figures mean nothing
    --league M           only this league (may be repeated, as the next two)
    --contender redsync  only this contender
    --question pair      only this question
    --seconds 5          how long a question is measured
"""
from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
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
    Contender("hazelcast", "Hazelcast 5.4.0 FencedLock", "java", "MR", hazelcast, waiters=False, limit=320),
    Contender("redis-py", "redis-py 8.1.0 Lock", "python", "MF", redis),
    Contender("redlock", "node-redlock 5.0.0-beta.2", "node", "MFR", independent_redis),
    Contender("redis-semaphore", "redis-semaphore 5.8.0", "node", "MFR", independent_redis),
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
    client: Client
    round: int = 0

    def another(self, name: str, network: str | None = None) -> Client:
        return start_client(self.setting, self.contender, self.league, self.place, self.servers, name, network)

    def key(self) -> str:
        self.round += 1
        return f"league:{self.round}:0"

    @property
    def limit(self) -> float:
        return 2 if self.setting.smoke else self.contender.limit


def start_client(setting: Setting, contender: Contender, league: str, place: Place, servers: Servers, name: str,
                 network: str | None = None) -> Client:
    command = [*setting.programs.client(contender.language), contender.name, league, ",".join(servers.endpoints)]
    return Client(place, name, command, network)


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


def run(stage: Stage, clients: int, keys: int, readers: int = 0) -> Run:
    """Runs clients that acquire and release locks, and checks mutual exclusion."""
    stage.round += 1
    path = stage.place.folder / f"samples{stage.round}"
    warm = stage.setting.warm(stage.contender.language, stage.round == 1)
    milliseconds = int(stage.setting.seconds * 1000)
    stage.client.send(f"run clients={clients} keys={keys} readers={readers} round={stage.round} warm={warm} ms={milliseconds} {path}")
    (begin,) = stage.client.expect("begin", warm / 1000 + 60)
    before = stage.servers.cpu()
    (end,) = stage.client.expect("end", milliseconds / 1000 + 60)
    cpu = stage.servers.cpu() - before
    overlaps, failures = map(int, stage.client.expect("done", 120))
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


def pair(stage: Stage) -> Figures:
    result = run(stage, 1, 1)
    times = [(s.granted - s.asked + s.released - s.releasing) / 1e3 for s in result.measured]
    return {
        "pair p50 µs": quantile(times, 0.5), "pair p99 µs": quantile(times, 0.99), "pairs/s": len(times) / result.seconds,
        "server CPU µs": result.cpu * 1e6 / len(times), "tokens grow": tokens(result.samples),
    }


def eight(stage: Stage) -> Figures:
    result = run(stage, 8, 8)
    times = [(s.granted - s.asked + s.released - s.releasing) / 1e3 for s in result.measured]
    return {
        "pairs/s": len(times) / result.seconds, "pair p50 µs": quantile(times, 0.5), "pair p99 µs": quantile(times, 0.99),
        "server CPU µs": result.cpu * 1e6 / len(times),
    }


def handoff(stage: Stage) -> Figures:
    clients = 16
    result = run(stage, clients, 1)
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


def mix(stage: Stage) -> Figures:
    result = run(stage, 16, 1, readers=90)
    waits = {shared: [(s.granted - s.asked) / 1e6 for s in result.measured if s.shared == shared] for shared in (True, False)}
    return {
        "pairs/s": len(result.measured) / result.seconds,
        **{f"{who} p99 ms": quantile(waits[shared], 0.99) if waits[shared] else "none" for shared, who in ((True, "reader"), (False, "writer"))},
        "longest writer ms": max(waits[False], default=0.0), "server CPU µs": result.cpu * 1e6 / len(result.measured),
    }


def killed(stage: Stage) -> Figures:
    holder, waiter, key = stage.another("holder"), stage.another("waiter"), stage.key()
    begin_wait(stage, holder, waiter, key)
    at = time.monotonic_ns()
    holder.process.kill()
    return {"next holder after s": next_holder(stage, waiter, at)}


def paused(stage: Stage) -> Figures:
    holder, waiter, key = stage.another("holder"), stage.another("waiter"), stage.key()
    token = begin_wait(stage, holder, waiter, key)
    at = time.monotonic_ns()
    os.killpg(holder.process.pid, signal.SIGSTOP)
    words = waiter.read(stage.limit)
    os.killpg(holder.process.pid, signal.SIGCONT)
    if words is None:
        return {"next holder after s": f"> {stage.limit:g}", "late holder's release": "not late", "its token is smaller": "not late"}
    after = (int(granted(words)[0]) - at) / 1e9
    # A client may notice the loss by itself; this is not measured.
    time.sleep(1)
    holder.send(f"unlock {key}")
    answer = holder.read(30)
    smaller = "none" if int(words[2]) == 0 else "yes" if token < int(words[2]) else "NO"
    return {"next holder after s": after, "late holder's release": "reports success" if answer == ["released"] else "reports the loss",
            "its token is smaller": smaller}


def cut(stage: Stage) -> Figures:
    """The holder's host stops sending and receiving, without closing its connections."""
    network = Network.name
    holder, waiter, key = stage.another("holder", network), stage.another("waiter"), stage.key()
    begin_wait(stage, holder, waiter, key)
    at = time.monotonic_ns()
    Network.drop()
    try:
        return {"next holder after s": next_holder(stage, waiter, at)}
    finally:
        holder.process.kill()
        holder.process.wait()
        Network.restore()


def begin_wait(stage: Stage, holder: Client, waiter: Client, key: str) -> int:
    """The holder has the lock, and the waiter waits. Returns the holder's token."""
    holder.send(f"lock {key}")
    token = int(granted(holder.read(60))[1])
    waiter.send(f"lock {key}")
    if waiter.read(1.5 if stage.contender.language == "java" else 0.5) is not None:
        raise Failed("EXCLUSION VIOLATED: the waiter has a lock that is held")
    return token


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


def memory(stage: Stage) -> Figures:
    count = 50 if stage.setting.smoke else 1000
    holder, waiters, key = stage.another("holder"), stage.another("waiter"), stage.key()
    holder.send(f"lock {key}")
    granted(holder.read(60))
    before = settled(stage)
    waiters.send(f"wait {key} clients={count}")
    waiters.expect("waiting", 300)
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

    name = f"league{os.getpid()}"
    # Addresses that are reserved for examples, so no host has them.
    host, guest = "198.51.100.1", "198.51.100.2"

    @classmethod
    def make(cls) -> None:
        if "198.51.100." in subprocess.run(["ip", "addr"], check=True, capture_output=True, text=True).stdout:
            raise OSError("the addresses 198.51.100.0/30 are in use here")
        outside, inside = f"lg{os.getpid()}a", f"lg{os.getpid()}b"
        for command in (f"ip netns add {cls.name}", f"ip link add {outside} type veth peer name {inside} netns {cls.name}",
                        f"ip addr add {cls.host}/30 dev {outside}", f"ip link set {outside} up",
                        f"ip -n {cls.name} addr add {cls.guest}/30 dev {inside}", f"ip -n {cls.name} link set {inside} up",
                        f"ip -n {cls.name} link set lo up"):
            subprocess.run(command.split(), check=True, capture_output=True)
        cls.restore()

    @classmethod
    def policy(cls, target: str) -> None:
        for chain in ("INPUT", "OUTPUT"):
            subprocess.run(["ip", "netns", "exec", cls.name, "iptables", "-P", chain, target], check=True, capture_output=True)

    @classmethod
    def drop(cls) -> None:
        cls.policy("DROP")

    @classmethod
    def restore(cls) -> None:
        cls.policy("ACCEPT")

    @classmethod
    def remove(cls) -> None:
        subprocess.run(["ip", "netns", "del", cls.name], check=False, capture_output=True)


QUESTIONS: dict[str, Callable[[Stage], Figures]] = {
    "pair": pair, "eight": eight, "handoff": handoff, "mix": mix, "killed": killed, "paused": paused, "cut": cut, "memory": memory,
}
UNPINNED = ("pair", "eight", "handoff")  # measured without pinning, too
FAULTS = ("killed", "paused", "cut")


def asked(contender: Contender, pinned: bool, wanted: list[str], network: bool) -> list[str]:
    """The measurements of a contender. `cut` is last: its servers listen on another address."""
    names = [name for name in QUESTIONS if name in wanted and (pinned or name in UNPINNED)]
    if contender.only_faults:
        names = [name for name in names if name in FAULTS]
    if not contender.shared:
        names = [name for name in names if name != "mix"]
    if not contender.waiters:
        names = [name for name in names if name != "memory"]
    return [name for name in names if (name == "cut") == network]


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


def play(setting: Setting, contender: Contender, league: str, pinned: bool, names: list[str], network: bool) -> dict[str, Figures]:
    """All measurements of one contender, with servers that are started for them."""
    if not names:
        return {}
    if not setting.smoke:
        wait_until_idle()
    results: dict[str, Figures] = {}
    folder = setting.output / "run" / f"{contender.name}-{league}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    # A smoke run shares its machine with other processes, so it uses the processor that is free.
    place = Place(folder, pinned and not setting.smoke, Network.host if network else "127.0.0.1")
    try:
        servers = contender.start(place, league, setting.programs)
        client = start_client(setting, contender, league, place, servers, "client")
        stage = Stage(setting, contender, league, place, servers, client)
        for name in names:
            try:
                results[name] = QUESTIONS[name](stage)
            except Failed as why:
                results[name] = {"failed": str(why)}
    except Failed as why:
        results |= {name: {"failed": str(why)} for name in names if name not in results}
    finally:
        place.stop()
    if not any("failed" in figures for figures in results.values()):
        shutil.rmtree(folder)
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--seconds", type=float)
    parser.add_argument("--league", action="append", choices=list("MFR"))
    parser.add_argument("--contender", action="append", choices=[each.name for each in CONTENDERS])
    parser.add_argument("--question", action="append", choices=list(QUESTIONS))
    for name in ("go", "classpath", "python", "node", "module", "output"):
        parser.add_argument(f"--with-{name}", required=True, help=argparse.SUPPRESS)
    options = parser.parse_args()
    programs = Programs(options.with_go, options.with_classpath, options.with_python, options.with_node, options.with_module)
    setting = Setting(options.smoke, options.seconds or (1 if options.smoke else 5), programs, Path(options.with_output))

    # When it is terminated, it ends the processes that it has started.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("league: ended from outside"))
    wanted = options.question or list(QUESTIONS)
    notes = []
    if "cut" in wanted:
        try:
            Network.make()
        except (OSError, subprocess.CalledProcessError) as why:
            Network.remove()
            wanted = [name for name in wanted if name != "cut"]
            notes.append(f"Question `cut` was not asked: it needs root, `ip` and `iptables` ({why}).")
    results = report.Results(setting.output / ("smoke.json" if setting.smoke else "results.json"), fresh=setting.smoke)
    failed = []
    try:
        for number in (1,) if setting.smoke else (1, 2):
            for league in options.league or "MFR":
                for contender in CONTENDERS:
                    if league not in contender.leagues or (options.contender and contender.name not in options.contender):
                        continue
                    for pinned, network in ((True, False), (True, True)) if setting.smoke else ((True, False), (False, False), (True, True)):
                        names = asked(contender, pinned, wanted, network)
                        for name, figures in play(setting, contender, league, pinned, names, network).items():
                            results.add(league, name, contender.title, pinned, number, figures)
                            where = f"{league} {contender.name} {name}{'' if pinned else ' unpinned'}"
                            print(f"{where}: {report.line(figures)}", flush=True)
                            if "failed" in figures:
                                failed.append(where)
    finally:
        Network.remove()
    document = setting.output / "league.md" if setting.smoke else Path(__file__).parents[2] / "docs" / "league.md"
    report.write(results, document, setting.output, notes, smoke=setting.smoke, titles=[each.title for each in CONTENDERS])
    print(f"league: wrote {document}" + ("; it is a smoke run, so its figures mean nothing" if setting.smoke else ""))
    if failed:
        print("league: failed: " + "; ".join(failed), file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

"""The servers and clients of the league: each a process in its own folder, on its own core, that is killed at the end."""
from __future__ import annotations

import contextlib
import os
import pwd
import select
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

SERVER_CORE, CLIENT_CORE = 0, 1


class Failed(Exception):
    """A contender failed to execute a request, which the text names."""


@dataclass(frozen=True)
class Programs:
    """The programs that `run` has built."""

    go: str
    classpath: str
    python: str
    node: str  # the folder with node_modules
    module: str

    def client(self, language: str) -> list[str]:
        here = Path(__file__).parent
        return {
            "go": [self.go, "client"],
            "java": [*self.java(), "league.Main"],
            "python": [self.python, str(here / "python" / "contender.py")],
            "node": ["node", str(Path(self.node) / "contender.mjs")],
        }[language]

    def java(self) -> list[str]:
        # Hazelcast accesses these packages by reflection, and warns of it at every start.
        opens = [f"--add-opens=java.base/{package}=ALL-UNNAMED" for package in ("java.lang", "java.nio", "sun.nio.ch")]
        return ["java", "-Xshare:auto", "-Dorg.slf4j.simpleLogger.defaultLogLevel=error", *opens, "-cp", self.classpath]


@dataclass(eq=False)
class Place:
    """The environment of the processes."""

    folder: Path
    pinned: bool
    host: str = "127.0.0.1"
    started: list[subprocess.Popen] = field(default_factory=list)
    all: ClassVar[list[Place]] = []

    def __post_init__(self) -> None:
        self.all.append(self)

    def start(self, command: list[str], name: str, core: int, *, user: str | None = None, **pipes: int) -> subprocess.Popen:
        if self.pinned:
            command = ["taskset", "--cpu-list", str(core % (os.cpu_count() or 1)), *command]
        log = (self.folder / f"{name}.log").open("wb")
        identity = {"user": user, "group": user, "extra_groups": []} if user else {}
        process = subprocess.Popen(command, cwd=self.folder, stderr=log, stdin=pipes.get("stdin", subprocess.DEVNULL),
                                   stdout=pipes.get("stdout", log), start_new_session=True, **identity)
        self.started.append(process)
        return process

    def stop(self) -> None:
        for process in reversed(self.started):
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGCONT)
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if process.stdin:
                with contextlib.suppress(BrokenPipeError):
                    process.stdin.close()
            if process.stdout:
                process.stdout.close()
        self.started.clear()
        if self in self.all:
            self.all.remove(self)


@dataclass
class Servers:
    endpoints: list[str]
    processes: list[subprocess.Popen]

    def cpu(self) -> float:
        """Seconds of processor time that the servers have used."""
        ticks = 0
        for pid in self.pids():
            fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
            ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")

    def memory(self) -> int:
        """kB of their memory, each shared page divided among those that share it."""
        rows = (row for pid in self.pids() for row in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines())
        return sum(int(row.split()[1]) for row in rows if row.startswith("Pss:"))

    def pids(self) -> list[int]:
        found, left = [], [process.pid for process in self.processes]
        while left:
            pid = left.pop()
            found.append(pid)
            for children in Path(f"/proc/{pid}/task").glob("*/children"):
                left.extend(int(child) for child in children.read_text().split())
        return found


def ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    try:
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


def until(what: str, condition: Callable[[], bool], limit: float = 60) -> None:
    end = time.monotonic() + limit
    while not condition():
        if time.monotonic() > end:
            raise Failed(f"{what}: not within {limit:g} s")
        time.sleep(0.05)


def listening(host: str, port: int, process: subprocess.Popen, name: str) -> None:
    def connects() -> bool:
        if process.poll() is not None:
            raise Failed(f"{name} ended with {process.returncode}: see its log")
        try:
            socket.create_connection((host, port), 1).close()
        except OSError:
            return False
        return True

    until(f"{name} listens", connects)


# Each of these starts what one contender needs for a league.
Starter = Callable[[Place, str, Programs], Servers]


def redis_server(place: Place, league: str, name: str, port: int, *options: str) -> subprocess.Popen:
    durable = ["--appendonly", "yes", "--appendfsync", "always"] if league == "F" else ["--appendonly", "no"]
    folder = place.folder / name
    folder.mkdir()
    command = ["redis-server", "--port", str(port), "--bind", place.host, "--protected-mode", "no", "--dir", str(folder), "--save", "",
               "--maxclients", "5000", *durable, *options]
    process = place.start(command, name, SERVER_CORE)
    listening(place.host, port, process, name)
    return process


def redis(place: Place, league: str, programs: Programs, *options: str) -> Servers:
    """One server; in league R a primary with two replicas."""
    numbers = ports(3 if league == "R" else 1)
    processes = [redis_server(place, league, "redis", numbers[0], *options)]
    for index, port in enumerate(numbers[1:], 1):
        primary = ["--replicaof", place.host, str(numbers[0])]
        processes.append(redis_server(place, league, f"replica{index}", port, *primary, *options))
    for port in numbers[1:]:
        until("a replica is in step", lambda port=port: "master_link_status:up" in redis_info(place.host, port))
    return Servers([f"{place.host}:{port}" for port in numbers], processes)


def redis_info(host: str, port: int) -> str:
    with socket.create_connection((host, port), 5) as connection:
        connection.sendall(b"INFO replication\r\n")
        return connection.recv(65536).decode()


def redis_with_module(place: Place, league: str, programs: Programs) -> Servers:
    return redis(place, league, programs, "--loadmodule", programs.module)


def independent_redis(place: Place, league: str, programs: Programs) -> Servers:
    """One server; in league R three independent ones, as Redlock requires."""
    numbers = ports(3 if league == "R" else 1)
    processes = [redis_server(place, league, f"redis{port}", port) for port in numbers]
    return Servers([f"{place.host}:{port}" for port in numbers], processes)


def postgresql(place: Place, league: str, programs: Programs) -> Servers:
    (port,) = ports(1)
    data = place.folder / "data"
    data.mkdir()
    user = None
    if os.geteuid() == 0:  # it refuses to run as root
        user = "postgres"
        shutil.chown(data, user, user)
        for parent in data.parents:
            if not parent.stat().st_mode & 0o001:
                raise Failed(f"user {user} can't enter {parent}")
    name = user or pwd.getpwuid(os.geteuid()).pw_name
    initialised = place.start(["initdb", "--auth", "trust", "--username", name, "-D", str(data)], "initdb", SERVER_CORE, user=user)
    if initialised.wait() != 0:
        raise Failed("initdb failed: see initdb.log")
    (data / "pg_hba.conf").write_text("host all all all trust\n")  # it listens on loopback, or on the address for question cut
    options = ["-c", "max_connections=1100", "-c", f"listen_addresses={place.host}", "-c", "unix_socket_directories="]
    process = place.start(["postgres", "-D", str(data), "-p", str(port), *options], "postgres", SERVER_CORE, user=user)
    listening(place.host, port, process, "postgres")
    return Servers([f"postgres://{name}@{place.host}:{port}/postgres?sslmode=disable"], [process])


def go_server(kind: str) -> Starter:
    def start(place: Place, league: str, programs: Programs) -> Servers:
        count = 3 if league == "R" else 1
        addresses = [f"{place.host}:{port}" for port in ports(2 * count)]
        clients, peers = addresses[:count], addresses[count:]
        processes = []
        for number in range(count):
            folder = place.folder / f"{kind}{number}"
            folder.mkdir(mode=0o700)
            command = [programs.go, "server", kind, league, str(folder), str(number), ",".join(clients), ",".join(peers)]
            processes.append(place.start(command, f"{kind}{number}", SERVER_CORE))
        for number in range(count):
            log = place.folder / f"{kind}{number}.log"
            until(f"{kind}{number} is ready", lambda log=log: "ready" in log.read_text())
        return Servers(clients, processes)

    return start


def zookeeper(place: Place, league: str, programs: Programs) -> Servers:
    count = 3 if league == "R" else 1
    numbers = ports(3 * count)
    clients, rest = numbers[:count], numbers[count:]
    members = [f"server.{n + 1}={place.host}:{rest[2 * n]}:{rest[2 * n + 1]}" for n in range(count)] if count > 1 else []
    processes = []
    for number, port in enumerate(clients):
        folder = place.folder / f"zookeeper{number}"
        folder.mkdir()
        (folder / "myid").write_text(f"{number + 1}\n")
        lines = [f"dataDir={folder}", f"clientPort={port}", f"clientPortAddress={place.host}", "tickTime=2000", "initLimit=10", "syncLimit=5",
                 "maxClientCnxns=0", "admin.enableServer=false", *members]
        (folder / "zoo.cfg").write_text("\n".join(lines) + "\n")
        main = "org.apache.zookeeper.server.quorum.QuorumPeerMain"
        sync = [f"-Dzookeeper.forceSync={'no' if league == 'M' else 'yes'}"]
        command = [*programs.java()[:1], *sync, *programs.java()[1:], main, str(folder / "zoo.cfg")]
        processes.append(place.start(command, f"zookeeper{number}", SERVER_CORE))
    for number, port in enumerate(clients):
        listening(place.host, port, processes[number], f"zookeeper{number}")
    return Servers([f"{place.host}:{port}" for port in clients], processes)


def hazelcast(place: Place, league: str, programs: Programs) -> Servers:
    """Three members in one process, since its CP subsystem needs three."""
    endpoints = [f"{place.host}:{port}" for port in ports(3)]
    process = place.start([*programs.java(), "league.HazelcastMembers", ",".join(endpoints)], "hazelcast", SERVER_CORE)

    def ready() -> bool:
        if process.poll() is not None:
            raise Failed("hazelcast ended: see its log")
        return "ready" in (place.folder / "hazelcast.log").read_text()

    until("hazelcast is ready", ready, 120)
    return Servers(endpoints, [process])


class Client:
    """A contender's program: requests and replies are lines."""

    def __init__(self, place: Place, name: str, command: list[str], network: str | None = None) -> None:
        prefix = ["ip", "netns", "exec", network] if network else []
        self.process = place.start([*prefix, *command], name, CLIENT_CORE, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.rest = b""
        self.expect("ready", 60)

    def send(self, line: str) -> None:
        assert self.process.stdin
        try:
            self.process.stdin.write(line.encode() + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise Failed(f"the client ended with {self.process.wait()}: see its log") from None

    def read(self, limit: float) -> list[str] | None:
        """The words of the next line, or None after the timeout."""
        assert self.process.stdout
        end = time.monotonic() + limit
        while b"\n" not in self.rest:
            left = end - time.monotonic()
            if left <= 0 or not select.select([self.process.stdout], [], [], left)[0]:
                return None
            data = os.read(self.process.stdout.fileno(), 65536)
            if not data:
                raise Failed(f"the client ended with {self.process.wait()}: see its log")
            self.rest += data
        line, self.rest = self.rest.split(b"\n", 1)
        return line.decode().split()

    def expect(self, word: str, limit: float) -> list[str]:
        words = self.read(limit)
        if words is None:
            raise Failed(f"the client did not say {word} within {limit:g} s")
        if words[0] != word:
            raise Failed(f"the client said {' '.join(words)!r}, not {word}")
        return words[1:]

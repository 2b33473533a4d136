"""Servers for tests: on loopback, on free ports, ended with the test."""

import contextlib
import os
import random
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path

import redis

PROGRAM = os.environ.get("HOLDFAST_SERVER", "redis-server")
MODULE = os.environ.get("HOLDFAST_MODULE", str(Path(__file__).parents[3] / "target/release/libholdfast.so"))
HOST = "127.0.0.1"


def until(condition, what="the condition", seconds=30.0):
    """Waits until the condition is true, and returns its value."""
    end = time.monotonic() + seconds
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < end, f"not within {seconds} s: {what}"
        time.sleep(0.005)


def renewed(*holds):
    """Waits until each was renewed by a request that was sent after this call began."""
    for _ in range(2):
        before = [hold._grant.certain for hold in holds]
        until(lambda before=before: all(h._grant.certain > b for h, b in zip(holds, before, strict=True)), "renewed")


def free_port():
    """A free port, whose cluster bus port, 10,000 above it, is free, too."""
    while True:
        # Below the system's range for outgoing connections.
        port = random.randrange(12_000, 22_000)
        with contextlib.suppress(OSError):
            for taken in (port, port + 10_000):
                with socket.socket() as probe:
                    probe.bind((HOST, taken))
            return port


class Server:
    """One server. `settings`: directives of its configuration."""

    def __init__(self, *settings, module=True, sentinel=None):
        self.directory = tempfile.mkdtemp(prefix="holdfast-python-")
        self.settings = settings
        self.module = module
        self.sentinel = sentinel
        self.process = None
        for _ in range(20):
            self.port = free_port()
            if self._start():
                return
        raise AssertionError(f"no free port in 20 attempts; the end of the log:\n{self.log()[-2000:]}")

    def _start(self):
        command = [PROGRAM]
        if self.sentinel:
            file = Path(self.directory, "sentinel.conf")
            file.write_text(self.sentinel)
            command += [str(file), "--sentinel"]
        command += ["--port", str(self.port), "--bind", HOST, "--dir", self.directory]
        if not self.sentinel:
            command += ["--save", "", "--appendonly", "no", "--repl-diskless-sync-delay", "0"]
        for name, value in self.settings:
            command += [f"--{name}", *value.split(" ")]
        if self.module and not self.sentinel:
            command += ["--loadmodule", MODULE]
        seen = len(self.log())
        with open(self._log_path(), "ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        return until(lambda: self._ready(seen), "the server answers", 60) == "ready"

    def _ready(self, seen):
        log = self.log()[seen:]
        if self.process.poll() is not None:
            assert "Address already in use" in log, f"the server did not start; its log:\n{log}"
            return "port taken"
        if "eady to accept connections" not in log and "+monitor" not in log and "Sentinel ID is" not in log:
            return None
        with contextlib.suppress(redis.RedisError):
            return "ready" if self.client(socket_timeout=1).ping() else None

    def _log_path(self):
        return Path(self.directory, "log")

    def log(self):
        with contextlib.suppress(FileNotFoundError):
            return self._log_path().read_text(errors="replace")
        return ""

    def client(self, **settings):
        return redis.Redis(host=HOST, port=self.port, **settings)

    def signal(self, number):
        self.process.send_signal(number)

    def kill(self):
        """Ends it at once, without a shutdown."""
        if self.process.poll() is None:
            self.signal(signal.SIGCONT)
            self.process.kill()
        self.process.wait()

    def start(self):
        """Starts it again on the same port."""
        until(self._start, "the port is free again")

    def close(self):
        """Ends it. Raises AssertionError if the module has reported an internal error: its log has each kind once."""
        self.kill()
        errors = [line for line in self.log().splitlines() if "holdfast: internal error" in line]
        shutil.rmtree(self.directory, ignore_errors=True)
        assert not errors, errors


def close_all(servers):
    """Ends all of them, even if one has reported an error."""
    with contextlib.ExitStack() as stack:
        for server in servers:
            stack.callback(server.close)


class Cluster:
    """Primaries that share the slots evenly, with one replica each if `replicas`."""

    def __init__(self, masters=2, replicas=False):
        count = masters * 2 if replicas else masters
        settings = [
            ("cluster-enabled", "yes"),
            ("cluster-node-timeout", "1500"),
            ("cluster-replica-validity-factor", "0"),
        ]
        self.nodes = [Server(*settings) for _ in range(count)]
        self.masters = self.nodes[:masters]
        for index, node in enumerate(self.masters):
            first, last = index * 16384 // masters, (index + 1) * 16384 // masters - 1
            node.client().execute_command("CLUSTER", "ADDSLOTSRANGE", first, last)
            node.client().execute_command("CLUSTER", "SET-CONFIG-EPOCH", index + 1)
        for node in self.nodes[1:]:
            self.nodes[0].client().execute_command("CLUSTER", "MEET", HOST, node.port)
        self._wait_until_all(lambda info: int(info["cluster_known_nodes"]) == count, "all nodes know each other")
        for master, replica in zip(self.masters, self.nodes[masters:], strict=False):
            until(lambda m=master, r=replica: self._replicate(m, r), "the replica knows its master")
        self._wait_until_all(lambda info: info["cluster_state"] == "ok", "the cluster is ready")
        until(lambda: all(self._knows_all(node) for node in self.nodes), "all are connected and know the replicas", 60)

    def _replicate(self, master, replica):
        with contextlib.suppress(redis.ResponseError):
            return replica.client().execute_command("CLUSTER", "REPLICATE", self.id(master))

    def _knows_all(self, node):
        """Whether this node could vote for any replica: it is connected to all, and knows their primaries."""
        seen = [line.split() for line in node.client().execute_command("CLUSTER", "NODES").splitlines()]
        replicas = [words for words in seen if b"slave" in words[2] and words[3] != b"-"]
        connected = all(words[7] == b"connected" for words in seen)
        return connected and len(replicas) == len(self.nodes) - len(self.masters)

    def _wait_until_all(self, holds, what):
        until(lambda: all(holds(node.client().execute_command("CLUSTER INFO")) for node in self.nodes), what, 60)

    @staticmethod
    def id(node):
        return node.client().execute_command("CLUSTER", "MYID").decode()

    def owner(self, key):
        """The index of the primary that serves a key."""
        slot = self.slot(key)
        masters = len(self.masters)
        return next(i for i in range(masters) if slot < (i + 1) * 16384 // masters)

    def slot(self, key):
        return self.nodes[0].client().execute_command("CLUSTER", "KEYSLOT", key)

    def begin_move(self, slot, source, target):
        """Marks a slot as moving at both ends, and moves no key."""
        target.client().execute_command("CLUSTER", "SETSLOT", slot, "IMPORTING", self.id(source))
        source.client().execute_command("CLUSTER", "SETSLOT", slot, "MIGRATING", self.id(target))

    def finish_move(self, slot, source, target):
        """Moves the keys, and gives the slot to the target."""
        while keys := source.client().execute_command("CLUSTER", "GETKEYSINSLOT", slot, 100):
            source.client().execute_command("MIGRATE", HOST, target.port, "", 0, 5000, "KEYS", *keys)
        for node in [target, source, *(n for n in self.masters if n not in (source, target))]:
            node.client().execute_command("CLUSTER", "SETSLOT", slot, "NODE", self.id(target))

    def close(self):
        close_all(self.nodes)


class Sentinels:
    """A primary, a replica and one Sentinel, which decides alone."""

    NAME = "locks"

    def __init__(self):
        self.master = Server()
        self.replica = Server(("replicaof", f"{HOST} {self.master.port}"))
        until(lambda: self.replica.client().info("replication")["master_link_status"] == "up", "the replica is in sync")
        self.sentinel = Server(
            sentinel=(
                f"sentinel monitor {self.NAME} {HOST} {self.master.port} 1\n"
                # So that a busy machine is no failure: see kill_master.
                f"sentinel down-after-milliseconds {self.NAME} 60000\n"
                f"sentinel failover-timeout {self.NAME} 3000\n"
            )
        )
        until(self._knows_replica, "the Sentinel knows the replica", 30)

    def _knows_replica(self):
        known = self.sentinel.client().execute_command("SENTINEL", "REPLICAS", self.NAME)
        return len(known) == 1

    def kill_master(self):
        """Ends the primary, and lets the Sentinel notice that soon."""
        self.master.kill()
        self.sentinel.client().execute_command("SENTINEL", "SET", self.NAME, "down-after-milliseconds", 500)

    def close(self):
        close_all([self.master, self.replica, self.sentinel])

"""A client without a client: LOCK.* commands over a bare socket. It shows what is left to do for a real one, and how it fails.

Each hold has a connection of its own, which waits, watches and gives back. There is no session, no second attempt, and nothing that
happens when a connection breaks.
"""

import json
import os
import socket
import sys
import threading
import time
from urllib.parse import urlsplit

printing = threading.Lock()


def say(**line):
    with printing:
        print(json.dumps({**line, "at": time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000}), flush=True)


class ServerError(Exception):
    pass


class Connection:
    def __init__(self, address):
        self.socket = socket.create_connection(address)
        self.file = self.socket.makefile("rb")

    def ask(self, *words):
        words = [str(word).encode() for word in words]
        self.socket.sendall(b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%s\r\n" % (len(word), word) for word in words))
        line = self.file.readline()
        if not line:
            raise ConnectionError("the connection has ended")
        kind, rest = line[:1], line[1:].strip()
        if kind == b":":
            return int(rest)
        if kind == b"-":
            raise ServerError(rest.decode())
        if kind == b"*" and int(rest) >= 0:
            return [int(self.file.readline()[1:]) for _ in range(int(rest))]
        return None  # $-1, *-1, _

    def close(self):
        self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()


class Driver:
    def __init__(self):
        self.address, self.holds, self.waiting, self.number = None, {}, set(), 0

    def open(self, url):
        parts = urlsplit(url)
        self.address, self.holds = (parts.hostname, parts.port), {}
        return {"outcome": "ok"}

    def acquire(self, hold, keys, wait=None, lease=None, watched=False, limit=None, shared=False, replicas=0, ephemeral=False):
        self.number += 1
        owner = f"{os.getpid()}:{self.number}"
        names = ["LOCK.MACQUIRE", len(keys), *keys] if len(keys) > 1 else ["LOCK.ACQUIRE", keys[0]]
        words = [*names, owner]
        if wait != 0:
            words += ["WAIT", wait or 0]
        if lease:
            words += ["LEASE", lease]
        if watched or not lease:
            words += ["WATCHDOG"]
        if ephemeral:
            words += ["EPHEMERAL"]
        if shared:
            words += ["SHARED"]
        if limit:
            words += ["LIMIT", limit]
        if replicas:
            words += ["REPLICAS", replicas]
        connection = Connection(self.address)
        self.waiting.add(connection)
        fence = connection.ask(*words)
        self.waiting.discard(connection)
        if fence is None:
            connection.close()
            return {"outcome": "not-granted"}
        self.holds[hold] = (connection, keys, owner)
        return {"outcome": "held", "fence": fence}

    def about(self, verb, hold, *more):
        connection, keys, owner = self.holds[hold]
        names = [f"LOCK.M{verb}", len(keys), *keys] if len(keys) > 1 else [f"LOCK.{verb}", keys[0]]
        replies = connection.ask(*names, owner, *more)
        return None if replies is None or replies == [None] else replies

    def release(self, hold):
        released = self.about("RELEASE", hold)
        self.holds.pop(hold)[0].close()
        return {"outcome": "released"} if released is not None else {"outcome": "lost", "reason": "unknown"}

    def renew(self, hold, lease):
        renewed = self.about("RENEW", hold, "LEASE", lease)
        return {"outcome": "renewed"} if renewed else {"outcome": "lost", "reason": "unknown"}

    def check(self, hold):
        # It was told once that it holds it.
        return {"outcome": "held"}

    def cancel(self, hold):
        return {"outcome": "ok"}

    def drop(self, hold):
        del self.holds[hold]
        return {"outcome": "ok"}

    def threads(self):
        return {"outcome": "ok", "count": threading.active_count()}

    def close(self):
        for hold in list(self.holds):
            self.release(hold)
        for connection in self.waiting:
            connection.close()
        return {"outcome": "ok"}

    def call(self, id, call, arguments):
        try:
            outcome = getattr(self, call)(**arguments)
        except ServerError as error:
            codes = {"DEADLOCK": "deadlock", "NOREPLICAS": "no-replicas", "WRONGTYPE": "wrong-type"}
            codes["UNCONFIRMED"] = codes["NOREPLICAS"]
            outcome = {"outcome": codes.get(str(error).split()[0], "server"), "text": str(error)}
        except (OSError, ValueError) as error:
            outcome = {"outcome": "connection", "text": str(error)}
        except KeyError:
            outcome = {"outcome": "invalid", "text": "it holds no such thing"}
        say(id=id, **outcome)


driver = Driver()
for text in sys.stdin:
    line = json.loads(text)
    call = (line.pop("id"), line.pop("call"), line)
    if call[1] in ("acquire", "release", "renew"):
        threading.Thread(target=driver.call, args=call, daemon=True).start()
    else:
        driver.call(*call)

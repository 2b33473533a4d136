"""A client of the basic profile over plain sockets, written from docs/client-protocol.md alone: a driver of the suite.

Comments name the rules that it follows. It supports one server, and has no limit on connections (B29 to B32).
"""

import contextlib
import json
import math
import os
import random
import select
import socket
import sys
import threading
import time

PASSING = "LOADING BUSY TRYAGAIN MASTERDOWN MISCONF NOREPLICAS CLUSTERDOWN OOM UNCONFIRMED READONLY UNBLOCKED SUPERSEDED"
PASSING_TEXTS = "too many waiters", "being confirmed", "max number of clients"
ENDS = {"release": "released", "renew": "renewed", "check": "held"}
# How a call fails, by the first word of the error.
FAILS = {"DEADLOCK": "deadlock", "WRONGTYPE": "wrong-type", "UNCONFIRMED": "no-replicas", "NOREPLICAS": "no-replicas"}
FAILS |= {"gone": "lost", "expired": "lost"}


def now():
    return time.clock_gettime(time.CLOCK_BOOTTIME)  # B7


def ms(seconds):
    return max(1, math.ceil(seconds * 1000 - 1e-6))  # B2


def say(**line):
    print(json.dumps({**line, "at": time.monotonic_ns() // 1000}) + "\n", end="", flush=True)


class Refused(Exception):
    """An error reply, or the reason of a loss."""


def passes(reply):
    """Whether this is an error after which a request is repeated."""
    is_listed = str(reply).partition(" ")[0] in PASSING.split() or any(text in str(reply) for text in PASSING_TEXTS)
    return isinstance(reply, OSError) or (isinstance(reply, Refused) and is_listed)


def is_nil(reply):
    """Whether this reply says that the hold is gone."""
    return reply is None or "WRONGTYPE" in str(reply) or (isinstance(reply, list) and None in reply)


class Connection:
    """A connection, which is closed when nothing refers to it any more."""

    def __init__(self, address, seconds):
        self.socket = socket.create_connection(address, max(seconds, 0.01))
        self.file = self.socket.makefile("rb")
        self.poll = select.poll()
        self.poll.register(self.socket, select.POLLIN)

    def send(self, *commands):
        for words in commands:
            parts = [b"$%d\r\n%s\r\n" % (len(word), word) for word in (str(word).encode() for word in words)]
            self.socket.sendall(b"*%d\r\n" % len(parts) + b"".join(parts))

    def has_input(self, seconds):
        """Whether a reply, or the end of the connection, arrives in time."""
        return bool(self.poll.poll(max(seconds, 0) * 1000))

    def read(self, seconds):
        """The next reply. OSError: it does not arrive in time, or the connection breaks."""
        self.socket.settimeout(max(seconds, 0.001))
        line = self.file.readline()
        if not line:
            raise ConnectionError("end of file")
        kind, rest = line[:1], line[1:-2]
        if kind == b"-":
            return Refused(rest.decode())
        if kind == b"$" and rest != b"-1":
            return self.file.read(int(rest) + 2)[:-2]
        if kind == b"*" and rest != b"-1":
            return [self.read(seconds) for _ in range(int(rest))]
        return int(rest) if kind == b":" else None if rest == b"-1" else rest


class Client:
    """The connections, and the calls of the suite that are not about one hold."""

    def __init__(self):
        self.idle, self.named, self.is_closed = [], {}, False

    def open(self, url):
        self.close()
        self.address, self.is_greeted, self.pause = url.split("/")[2].split(":"), False, 0.0

    def close(self):
        """Ends all acquisitions, and releases all holds (B38)."""
        self.is_closed = True
        for hold in self.named.values():
            hold.thread.join(5)
        self.idle.clear()

    def threads(self):
        return {"outcome": "ok", "count": threading.active_count()}

    def take(self, seconds):
        """An idle connection that the server has not closed (B28), or a new one."""
        with contextlib.suppress(IndexError):
            while (found := self.idle.pop()).has_input(0):
                pass
            return found
        return Connection(self.address, seconds)

    def put(self, connection):
        if not self.is_closed:
            self.idle.append(connection)

    def ask(self, seconds, *commands):
        """The replies to a pipeline, or the error that broke its connection in place of each (B23)."""
        end = now() + seconds
        try:
            connection = self.take(seconds)
            connection.send(*commands)
            replies = [connection.read(end - now()) for _ in commands]
            self.put(connection)
            return replies
        except OSError as error:
            # The traceback would refer to the connection.
            return [error.with_traceback(None) for _ in commands]

    def greet(self):
        """Checks the protocol version, once (B26)."""
        [reply] = self.ask(1.0, ("LOCK.VERSION",))
        if isinstance(reply, Exception):
            raise reply if passes(reply) else Refused(f"is the module Holdfast loaded, and new enough? {reply}")
        about = dict(zip(reply[::2], reply[1::2]))
        lowest, highest = about[b"protocol"][:2]
        if not lowest <= 4 <= highest:
            old = "this client" if lowest > 4 else "the server's module"
            raise Refused(f"{old} is too old: protocol 4 here, version {about[b'version'].decode()} there")
        self.is_greeted = True

    def rest(self, error, lease):
        """The pause: it doubles, with jitter, up to a limit (B27). Other connections may have broken, too."""
        if isinstance(error, OSError) or str(error).startswith(("READONLY", "UNBLOCKED")):
            self.idle.clear()
        self.pause = min(max(self.pause * 2, 0.02), 1.0, lease / 16)
        time.sleep(self.pause * random.uniform(0.5, 1.0))

    def call(self, id, call, hold=None, **options):
        try:
            outcome = getattr(self.named.get(hold, self), call)(**options) or {"outcome": ENDS.get(call, "ok")}
        except (Refused, OSError) as error:
            kind = "connection" if isinstance(error, OSError) else FAILS.get(str(error).partition(" ")[0], "server")
            outcome = {"outcome": kind, "reason": str(error), "text": f"{options}: {error}"}
        say(id=id, **outcome)
        if call == "acquire":
            made = self.named[hold]
            made.keep() if "fence" in outcome else made.withdraw()


class Hold:
    def __init__(self, client, thread, hold, keys, lease=None, watched=False, limit=1, shared=False, replicas=0, **_):
        self.client, self.thread, self.name, self.keys = client, thread, hold, keys
        self.lease, self.renewed_at = (lease or 10_000) / 1000, 0.25 if watched or not lease else math.inf
        self.limit = ["SHARED"] if shared else ["LIMIT", limit] if limit != 1 else []
        self.replicas = ["REPLICAS", replicas] if replicas else []
        self.silence = min(max(self.lease / 8, 0.05), 1.0) + bool(replicas)  # B23
        self.owner, self.broke, self.loss, self.pending, self.sent = os.urandom(16).hex(), False, None, None, 0.0  # B1
        self.is_cancelled, self.is_held = False, False

    def command(self, verb, *words):
        head = [f"LOCK.{verb}"] if len(self.keys) == 1 else [f"LOCK.M{verb}", len(self.keys)]
        return (*head, *self.keys, self.owner, *words)

    def acquire(self, wait=None, **_):
        """Waits for at most `wait` ms; 0: not at all."""
        began, ask_at = now(), 0.0
        until = began + (31_536_000 if wait is None else wait / 1000 or self.silence)
        while not (self.is_cancelled or self.client.is_closed) and now() < until + 0.25 * bool(self.pending):  # B13
            try:
                if not self.client.is_greeted:
                    self.client.greet()
                if ask_at <= now() < until:  # B11, B12
                    self.ask_for(wait, until, began)
                    ask_at = self.sent + 2.0 + bool(self.replicas)
                if not self.pending or not self.pending.has_input(min(until + 0.25 - now(), 0.05)):
                    continue
                reply, self.pending, ask_at = self.settle(self.pending), None, 0.0
            except (OSError, Refused) as error:
                reply, ask_at = error, 0.0
            if isinstance(reply, list):
                self.fence = reply[0]  # B4: more elements are ignored.
                self.set_certain(self.sent + reply[1] / 1000, self.lease)  # B6
                if self.certain - now() < self.lease / 2:  # B8
                    reply = self.extend(self.lease)
                    self.broke |= isinstance(reply, Exception) or is_nil(reply)
            if passes(reply) and wait != 0 and now() < until:
                self.client.rest(reply, self.lease)
                continue
            self.must_hold(reply)
            self.is_held = not is_nil(reply)
            return {"outcome": "held", "fence": self.fence} if self.is_held else {"outcome": "not-granted"}
        if wait == 0 and now() >= until:
            raise TimeoutError("no reply, so the outcome is unknown")
        return {"outcome": "not-granted" if now() >= until else "cancelled"}

    def ask_for(self, wait, until, began):
        """Sends ACQUIRE, and reads the reply to the request that it supersedes."""
        words = ["HOLDS", 1, "LEASE", ms(self.lease), *self.limit, *self.replicas, "WITHWAITED"]  # B3
        words += ["WAIT", ms(min(until - now(), 3600))] if wait != 0 else []  # B2, B10
        words += ["WAITED", ms(now() - began)] if wait != 0 and self.sent else []
        old, self.pending, self.sent = self.pending, self.client.take(self.silence), now()
        with contextlib.suppress(OSError):  # Then there is no reply, either.
            self.pending.send(self.command("ACQUIRE", *words))
        if old:
            self.settle(old)

    def settle(self, pending):
        """The reply to an ACQUIRE, or an error. The connection can be used again, or is closed (B11, B20)."""
        try:
            reply = pending.read(1.0)
            self.client.put(pending)
        except OSError as error:
            self.broke, reply = True, error.with_traceback(None)
        return ConnectionError(f"no reply to ACQUIRE: {reply}") if isinstance(reply, (bytes, int)) else reply

    def cancel(self):
        self.is_cancelled = True

    def withdraw(self):
        """Ends what an acquisition without a grant may have left at the server (B20, B21)."""
        answers, least, end = 0, bool(self.pending), now() + self.lease
        while now() < end and answers < max(least, 2 * self.broke):
            [reply] = self.client.ask(self.silence, self.command("RELEASE", "ALL"))
            if isinstance(reply, Exception):
                self.client.rest(reply, self.lease)
                continue
            late, self.pending = self.pending and self.settle(self.pending), None
            answers = 0 if isinstance(late, list) else answers + 1
            time.sleep(1.0 if self.broke and answers == 1 else 0.02)

    def keep(self):
        """Renews the hold until it ends (B14)."""
        while self.is_held and not self.client.is_closed:
            if now() >= self.certain:
                self.lose("expired")
            elif now() >= self.due and isinstance(reply := self.extend(self.lease), Exception):
                self.client.rest(reply, self.lease)
            time.sleep(0.005)
        if self.is_held:
            with contextlib.suppress(Refused, OSError):
                self.release()

    def extend(self, lease):
        """Sends RENEW. Returns the reply."""
        sent = now()
        self.certain = min(self.certain, sent + lease * 0.99)
        renewal = self.command("RENEW", "TOKEN", self.fence, "LEASE", ms(lease), *self.replicas)
        [reply] = self.client.ask(self.silence, renewal)
        self.broke |= isinstance(reply, OSError)
        if is_nil(reply):
            self.lose("gone")
        elif not isinstance(reply, Exception):
            self.set_certain(sent, lease)
        return reply

    def set_certain(self, began, lease):
        self.client.pause, self.lease = 0.0, lease
        self.certain, self.due = began + lease * 0.99, began + lease * self.renewed_at

    def lose(self, why):
        if self.is_held:
            self.is_held, self.loss = False, Refused(why)
            say(lost=self.name, reason=why)

    def must_hold(self, reply):
        """Raises the loss, if there was one, or this error."""
        for error in (self.loss, reply):
            if isinstance(error, Exception):
                raise error

    def renew(self, lease):
        self.must_hold(self.extend(lease / 1000))

    def release(self):
        self.is_held, first, attempts = False, now(), 0  # B16
        while True:
            commands = [self.command("RELEASE", "TOKEN", self.fence), self.command("RELEASE", "ALL")]
            reply = self.client.ask(self.silence, *commands[: 1 + self.broke])[0]  # B18
            attempts += not isinstance(reply, ConnectionRefusedError)  # It was not sent.
            if not passes(reply) or now() > min(first + 5, self.certain):
                break
            self.broke |= isinstance(reply, OSError)
            self.client.rest(reply, self.lease)
        if is_nil(reply) and (attempts == 1 or first >= self.certain):  # B17
            self.loss = self.loss or Refused("gone")
        self.must_hold(None if is_nil(reply) else reply)

    def check(self):
        """B9."""
        if now() >= self.certain:
            self.lose("expired")
        for info in self.client.ask(1.0, *[("LOCK.INFO", key) for key in self.keys]):
            holders = dict(zip(info[::2], info[1::2]))[b"holders"] if isinstance(info, list) else []
            is_ours = any(self.owner.encode() in holder and self.fence in holder for holder in holders)
            if not is_ours and (is_nil(info) or isinstance(info, list)):
                self.lose("gone")
            self.must_hold(info)


client = Client()
for text in sys.stdin:
    line = json.loads(text)
    thread = threading.Thread(target=client.call, kwargs=line, daemon=True)
    if line["call"] == "acquire":
        client.is_closed = False  # After close(), it is used again.
        client.named[line["hold"]] = Hold(client, thread, **line)
    if line["call"] in ("acquire", *ENDS):
        thread.start()
    else:
        client.call(**line)
client.close()

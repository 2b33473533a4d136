"""A client of the basic profile over plain sockets, written from docs/client-protocol.md alone, as a driver of the suite.

Comments name the rules that it follows. It supports one server, and has no limit on connections (B29 to B32).
"""

import json
import os
import random
import socket
import sys
import threading
import time
from urllib.parse import urlsplit

PASSING = "LOADING BUSY TRYAGAIN MASTERDOWN MISCONF NOREPLICAS CLUSTERDOWN OOM UNCONFIRMED READONLY UNBLOCKED SUPERSEDED"
PASSING_TEXTS = "too many waiters", "being confirmed", "max number of clients"
ENDS = {"release": "released", "renew": "renewed", "check": "held"}


def now():
    return time.clock_gettime(time.CLOCK_BOOTTIME)  # B7


def ms(seconds):
    return max(1, int(seconds * 1000 + 0.999))  # B2


def say(**line):
    sys.stdout.write(json.dumps({**line, "at": time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000}) + "\n")
    sys.stdout.flush()


class Refused(Exception):
    """An error reply."""

    def passes(self):
        return str(self).split()[0] in PASSING.split() or any(text in str(self) for text in PASSING_TEXTS)


class Lost(Exception):
    """A hold is lost, for this reason."""


class Connection:
    def __init__(self, address, timeout):
        self.socket, self.buffer, self.is_fresh = socket.create_connection(address, timeout), b"", True

    def send(self, *words):
        parts = [b"$%d\r\n%s\r\n" % (len(word), word) for word in (str(word).encode() for word in words)]
        self.socket.sendall(b"*%d\r\n" % len(parts) + b"".join(parts))

    def read(self, until):
        """The next reply. TimeoutError: it has not arrived, and can be read later."""
        while True:
            try:
                reply, used = parse(self.buffer, 0)
                self.buffer, self.is_fresh = self.buffer[used:], False
                return reply
            except IndexError:
                self.socket.settimeout(max(until - now(), 0.001))
                data = self.socket.recv(65536)
                if not data:
                    raise ConnectionError("end of file") from None
                self.buffer += data


def parse(data, at):
    """A reply and its end. IndexError: it is incomplete."""
    end = data.find(b"\r\n", at)
    if end < 0:
        raise IndexError
    kind, rest, at = data[at : at + 1], data[at + 1 : end], end + 2
    if kind in b"-+:":
        return Refused(rest.decode()) if kind == b"-" else int(rest) if kind == b":" else rest, at
    if rest == b"-1":
        return None, at
    if kind == b"$":
        return data[at : at + int(rest)], at + int(rest) + 2 if data[at + int(rest) + 1] else at
    items = [None] * int(rest)
    for index in range(len(items)):
        items[index], at = parse(data, at)
    return items, at


class Client:
    def __init__(self, address):
        self.address, self.idle, self.pause, self.holds = address, [], 0.0, set()
        self.is_greeted, self.is_closed, self.all, self.background = False, False, [], []
        threading.Thread(target=self.keep, daemon=True).start()

    def connection(self, seconds):
        try:
            return self.idle.pop()
        except IndexError:
            made = Connection(self.address, max(seconds, 0.01))
            self.all.append(made)
            if self.is_closed:
                made.socket.close()
            return made

    def ask(self, seconds, *commands, again=True):
        """The replies to a pipeline. An error closes the connection (B23); a closed idle one is replaced immediately, once (B28)."""
        end, connection = now() + seconds, self.connection(seconds)
        try:
            for command in commands:
                connection.send(*command)
            replies = [connection.read(end) for _ in commands]
        except OSError as error:
            connection.socket.close()
            if connection.is_fresh or isinstance(error, TimeoutError) or not again:
                raise
            self.drop_idle()
            return self.ask(end - now(), *commands)
        self.idle.append(connection)
        return replies

    def drop_idle(self):
        while self.idle:
            self.idle.pop().socket.close()

    def greet(self):
        """Checks the protocol version, once (B26)."""
        [reply] = self.ask(1.0, ("LOCK.VERSION",))
        if isinstance(reply, Refused):
            raise reply if reply.passes() else Refused(f"is the module Holdfast loaded, and new enough? {reply}")
        about = dict(zip(reply[::2], reply[1::2]))
        if not about[b"protocol"][0] <= 4 <= about[b"protocol"][1]:
            old = "this client" if about[b"protocol"][0] > 4 else "the server's module"
            raise Refused(f"{old} is too old: protocol 4 here, version {about[b'version'].decode()} there")
        self.is_greeted = True

    def rest(self, lease):
        """The pause: it doubles, with jitter, up to a limit (B27)."""
        self.drop_idle()
        self.pause = min(max(self.pause * 2, 0.02), 1.0, lease / 16)
        time.sleep(self.pause * random.uniform(0.5, 1.0))
        return 0.0

    def keep(self):
        """The timer of all holds. Renewals that are due share a pipeline (B14, B15)."""
        while not self.is_closed:
            due = [hold for hold in list(self.holds) if hold.is_renewed and now() >= hold.due]
            if due:
                self.renew(due)
            for hold in list(self.holds):
                if now() >= hold.certain:
                    hold.lose("expired")
            time.sleep(0.005)

    def renew(self, due):
        sent = now()
        try:
            replies = self.ask(min(hold.silence for hold in due), *[hold.renewal(hold.lease) for hold in due])
        except OSError as error:
            replies = [error] * len(due)
        for hold, reply in zip(due, replies):
            try:
                hold.renewed(reply, sent, hold.lease)
            except (Refused, Lost, OSError):
                hold.due = now() + min(0.02, hold.lease / 16)

    def close(self):
        self.is_closed = True
        for connection in self.all:
            connection.socket.close()


class Hold:
    def __init__(self, client, name, keys, lease=None, watched=False, limit=1, shared=False, replicas=0):
        self.client, self.name, self.keys = client, name, keys
        self.lease, self.is_renewed = (lease or 10_000) / 1000, watched or not lease
        self.limit = ["SHARED"] if shared else ["LIMIT", limit] if limit != 1 else []
        self.replicas = ["REPLICAS", replicas] if replicas else []
        self.owner, self.broke, self.why, self.pending, self.sent = os.urandom(16).hex(), False, None, [], 0.0  # B1
        self.silence, self.cancelled = min(max(self.lease / 8, 0.05), 1.0) + bool(replicas), None  # B23
        self.is_over = threading.Event()

    def command(self, verb, *words):
        head = [f"LOCK.{verb}"] if len(self.keys) == 1 else [f"LOCK.M{verb}", len(self.keys)]
        return (*head, *self.keys, self.owner, *words)

    def acquire(self, wait):
        """Waits for at most this many seconds; 0: not at all. Returns whether the lock is held."""
        began, silent_at, until = now(), 0.0, now() + wait
        try:
            while not self.cancelled:
                try:
                    if not self.client.is_greeted:
                        self.client.greet()
                    if now() >= silent_at and (now() < until or not self.sent):  # B11, B12
                        self.ask_for(wait, until, began)
                        silent_at = self.sent + (2.0 if wait else self.silence)
                    if not self.pending or now() >= (until + 0.25 if wait else silent_at):  # B13
                        if not wait:
                            raise TimeoutError("no reply, so the outcome is unknown")
                        return False
                    reply = self.pending[-1].read(min(silent_at, now() + 0.1) if wait else silent_at)
                except TimeoutError:
                    if not wait and now() >= silent_at:
                        raise
                    continue
                except (OSError, Refused) as error:
                    is_dead = bool(self.pending) and not self.pending[-1].is_fresh  # it was closed while it was idle (B28)
                    self.drop(self.pending[-1] if self.pending else None)
                    if is_dead:
                        self.client.drop_idle()
                        self.sent, silent_at = self.sent if wait else 0.0, 0.0
                        continue
                    if now() >= until or isinstance(error, Refused) and not error.passes():
                        raise
                    silent_at = self.client.rest(self.lease)
                    continue
                self.client.idle.append(self.pending.pop())
                if reply is None:
                    return False
                if not isinstance(reply, Refused):
                    self.client.pause, self.fence = 0.0, reply[0]
                    self.set_certain(self.sent + reply[1] / 1000)  # B6; B4: more elements are ignored
                    if self.certain - now() < self.lease / 2:  # B8
                        self.renew(self.lease)
                    self.client.holds.add(self)
                    return True
                if not reply.passes() or now() >= until:
                    raise reply
                silent_at = self.client.rest(self.lease)
        finally:
            if self not in self.client.holds and (self.pending or self.broke):
                self.client.background.append(threading.Thread(target=self.withdraw, daemon=True))
                self.client.background[-1].start()
            self.is_over.set()

    def ask_for(self, wait, until, began):
        connection = self.client.connection(self.silence)
        words = ["HOLDS", 1, "LEASE", ms(self.lease), *self.limit, *self.replicas, "WITHWAITED"]  # B3
        words += ["WAIT", ms(min(until - now(), 3600))] if wait else []  # B2, B10
        words += ["WAITED", ms(now() - began)] if wait and self.sent else []
        self.sent = now()
        self.pending.append(connection)
        connection.send(*self.command("ACQUIRE", *words))
        for old in self.pending[:-1]:
            self.settle(old)

    def settle(self, old):
        """Reads a pending reply. The connection can be used again, or is closed (B11, B20)."""
        try:
            reply = old.read(now() + 1.0)
            self.pending.remove(old)
            self.client.idle.append(old)
            return reply
        except OSError:
            return self.drop(old)

    def drop(self, connection):
        if connection in self.pending:
            self.broke = True
            self.pending.remove(connection)
            connection.socket.close()

    def withdraw(self):
        """B20, B21."""
        answers, end = 0, now() + self.lease
        while now() < end and answers < (2 if self.broke else 1):
            try:
                [reply] = self.client.ask(self.silence, self.command("RELEASE", "ALL"))
            except OSError:
                self.client.rest(self.lease)
                continue
            overtaken = [isinstance(self.settle(one), list) for one in list(self.pending)]
            answers = 0 if any(overtaken) else answers + (not isinstance(reply, Refused))
            time.sleep(1.0 if self.broke and answers == 1 else 0.02)

    def set_certain(self, began):
        self.certain, self.due = began + self.lease * 0.99, began + self.lease / 4

    def lose(self, why):
        self.client.holds.discard(self)
        if self.why is None:
            self.why = why
            say(lost=self.name, reason=why)

    def renewal(self, lease):
        return self.command("RENEW", "TOKEN", self.fence, "LEASE", ms(lease), *self.replicas)

    def renew(self, lease):
        sent = now()
        try:
            [reply] = self.client.ask(self.silence, self.renewal(lease))
        except OSError as error:
            reply = error
        self.renewed(reply, sent, lease)

    def renewed(self, reply, sent, lease):
        self.broke = self.broke or isinstance(reply, OSError)
        if is_nil(reply) or "WRONGTYPE" in str(reply):
            self.lose("gone")
            raise Lost("gone")
        if isinstance(reply, Exception):
            raise reply
        self.lease = lease
        self.set_certain(sent)

    def release(self):
        was_lost, first, attempts = self.why, now(), 0
        self.client.holds.discard(self)  # B16
        while True:
            commands = [self.command("RELEASE", "TOKEN", self.fence), self.command("RELEASE", "ALL")]  # B18
            attempts += 1
            try:
                reply = self.client.ask(self.silence, *commands[: 1 + bool(self.broke or self.pending)], again=False)[0]
                reply = None if "WRONGTYPE" in str(reply) else reply  # it was overwritten
                if not isinstance(reply, Refused):
                    break
                if not reply.passes():
                    raise reply
            except OSError:
                self.broke = True
                if now() > min(first + 5, self.certain):
                    raise
            self.client.rest(self.lease)
        if was_lost or is_nil(reply) and (attempts == 1 or first >= self.certain):  # B17
            raise Lost(was_lost or "gone")

    def check(self):
        """B9."""
        if self.why or now() >= self.certain:
            raise Lost(self.why or "expired")
        for key in self.keys:
            [info] = self.client.ask(1.0, ("LOCK.INFO", key))
            holders = dict(zip(info[::2], info[1::2]))[b"holders"] if isinstance(info, list) else []
            if not any(self.owner.encode() in holder and self.fence in holder for holder in holders):
                self.lose("gone")
        if self.why:
            raise Lost(self.why)


def is_nil(reply):
    return reply is None or isinstance(reply, list) and None in reply


class Driver:
    client = None

    def open(self, url):
        self.close()
        self.client, self.holds = Client((urlsplit(url).hostname, urlsplit(url).port)), {}

    def asked(self, hold, wait=None, **terms):
        """From now on the request can be cancelled, even before its thread runs."""
        self.holds[hold] = Hold(self.client, hold, **terms)

    def acquire(self, hold, wait=None, **terms):
        made = self.holds[hold]
        is_held = made.acquire(31_536_000 if wait is None else wait / 1000)
        return {"outcome": "held", "fence": made.fence} if is_held else {"outcome": made.cancelled or "not-granted"}

    def cancel(self, hold):
        self.holds[hold].cancelled = "cancelled"

    def threads(self):
        return {"outcome": "ok", "count": threading.active_count()}

    def close(self):
        """Cancels all waits and releases all holds (B38)."""
        if self.client is None:
            return
        for hold in list(self.holds):
            self.cancel(hold)
            self.holds[hold].is_over.wait(5)
        for thread in self.client.background:
            thread.join(5)
        for hold in list(self.client.holds):
            try:
                hold.release()
            except (Refused, Lost, OSError):
                pass
        self.client.close()

    def call(self, id, call, arguments):
        try:
            if call in ("release", "renew", "check"):
                hold, lease = self.holds[arguments.pop("hold")], [one / 1000 for one in arguments.values()]
                outcome = getattr(hold, call)(*lease)
            else:
                outcome = getattr(self, call)(**arguments)
            outcome = outcome or {"outcome": ENDS.get(call, "ok")}
        except Lost as lost:
            outcome = {"outcome": "lost", "reason": str(lost), "text": f"lost: {lost}"}
        except (Refused, OSError) as error:
            kinds = {"DEADLOCK": "deadlock", "WRONGTYPE": "wrong-type", "UNCONFIRMED": "no-replicas", "NOREPLICAS": "no-replicas"}
            kind = kinds.get(str(error).split()[0], "server") if isinstance(error, Refused) else "connection"
            outcome = {"outcome": kind, "text": f"{arguments}: {error}"}
        say(id=id, **outcome)


driver = Driver()
for text in sys.stdin:
    line = json.loads(text)
    call = (line.pop("id"), line.pop("call"), line)
    if call[1] == "acquire":
        driver.asked(**line)
    if call[1] in ("acquire", "release", "renew", "check"):
        threading.Thread(target=driver.call, args=call, daemon=True).start()
    else:
        driver.call(*call)
driver.close()

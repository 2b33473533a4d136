"""A server that follows a script: replies, errors, silence, and cuts at any message."""

import collections
import contextlib
import socket
import threading
import time

from proxy import read
from servers import HOST

CUT = object()
"""The connection ends."""
SILENCE = object()
"""No reply, ever, on this connection."""
NIL = b"$-1\r\n"
OK = b"+OK\r\n"


def integer(value):
    return b":%d\r\n" % value


def array(*numbers):
    return b"*%d\r\n" % len(numbers) + b"".join(map(integer, numbers))


def error(text):
    return b"-" + text.encode() + b"\r\n"


def granted(token, waited=0):
    return array(token, waited)


VERSION = (
    b"*6\r\n$8\r\nprotocol\r\n*2\r\n:4\r\n:4\r\n$7\r\nversion\r\n$5\r\n0.4.0\r\n$16\r\nreplicas-timeout\r\n:1000\r\n"
)


class Fake:
    """Answers each LOCK command with the next entry of its script, and with success when there is none.

    `script` has the entries for each verb: replies, CUT, SILENCE, or functions of the request.
    """

    def __init__(self):
        self.script = {verb: collections.deque() for verb in ("ACQUIRE", "RENEW", "RELEASE", "VERSION")}
        self.seen = []
        """(when, connection, words) of each LOCK command but VERSION."""
        self.answered = 0
        """How many replies were sent."""
        self.connections = 0
        self.token = 100
        self._sockets = set()
        self._listener = socket.create_server((HOST, 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def of(self, verb):
        """The commands with this verb that were seen."""
        return [words for _, _, words in list(self.seen) if words[0].endswith(verb.encode())]

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self.connections += 1
                self._sockets.add(connection)
                threading.Thread(target=self._serve, args=(connection, self.connections), daemon=True).start()

    def _serve(self, connection, number):
        with contextlib.suppress(OSError, EOFError, ValueError), connection, connection.makefile("rb") as stream:
            is_silent = False
            while True:
                words = read(stream)
                reply = self._reply(words, number)
                if callable(reply):
                    reply = reply(words)
                if reply is CUT:
                    connection.shutdown(socket.SHUT_RDWR)
                    return
                is_silent = is_silent or reply is SILENCE
                if not is_silent:
                    connection.sendall(reply)
                    self.answered += 1

    def _reply(self, words, number):
        name = words[0].decode().upper()
        if not name.startswith("LOCK."):
            return error("ERR unknown command 'HELLO'") if name == "HELLO" else OK
        verb = name.removeprefix("LOCK.").removeprefix("M") if name != "LOCK.VERSION" else "VERSION"
        if verb != "VERSION":
            self.seen.append((time.monotonic(), number, words))
        if self.script.get(verb):
            return self.script[verb].popleft()
        if verb == "ACQUIRE":
            self.token += 1
            return granted(self.token)
        if verb in ("RENEW", "RELEASE"):
            number = int(words[words.index(b"TOKEN") + 1]) if verb == "RENEW" else 1
            return array(*[number] * int(words[1])) if name.startswith("LOCK.M") else integer(number)
        return VERSION if verb == "VERSION" else NIL

    def close(self):
        with contextlib.suppress(OSError):
            # The accepting thread would keep the socket open.
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for one in list(self._sockets):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

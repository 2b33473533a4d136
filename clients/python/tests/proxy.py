"""A proxy between a client and its server that loses the messages that its rule names."""

import contextlib
import socket
import threading

from servers import HOST


class Proxy:
    """Passes everything on, connection by connection, unless `rule` says otherwise.

    `rule(request)` is called with each request (a list of byte strings) before it is passed on. It returns None, or
    "reply": the server gets the request, and the connection breaks before the client has the reply; "request": the
    connection breaks before the server gets it; "late": as "request", and `deliver` sends it to the server later.
    """

    def __init__(self, port):
        self.target = port
        self.rule = lambda request: None
        self.requests = []
        self.late = []
        self.sockets = set()
        self.links = set()
        self.cut_off = False
        self.listener = socket.create_server((HOST, 0))
        self.port = self.listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                client, _ = self.listener.accept()
                if self.cut_off:
                    client.close()
                    continue
                try:
                    server = socket.create_connection((HOST, self.target))
                except OSError:
                    client.close()
                    continue
                link = _Link(self, client, server)
                self.links.add(link)
                threading.Thread(target=link.upstream, daemon=True).start()
                threading.Thread(target=link.downstream, daemon=True).start()

    def cut(self):
        """Breaks every connection and takes no new ones."""
        self.cut_off = True
        for one in list(self.sockets):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def mend(self):
        self.cut_off = False

    def deliver(self):
        """Sends the late requests to the server, each on a connection of its own, and returns the replies."""
        replies = []
        for request in self.late:
            with socket.create_connection((HOST, self.target)) as server:
                server.sendall(pack(request))
                replies.append(server.recv(65536))
        self.late = []
        return replies

    def close(self):
        self.listener.close()
        self.cut()


class _Link:
    def __init__(self, proxy, client, server):
        self.proxy = proxy
        self.client = client
        self.server = server
        self.mute = False
        for one in (client, server):
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        proxy.sockets |= {client, server}

    def upstream(self):
        with contextlib.suppress(OSError, EOFError), self.client.makefile("rb") as stream:
            while True:
                request = read(stream)
                self.proxy.requests.append(request)
                fate = self.proxy.rule(request)
                if fate == "late":
                    self.proxy.late.append(request)
                if fate in ("late", "request"):
                    break
                if fate == "reply":
                    self.mute = True
                self.server.sendall(pack(request))
        self.close()

    def downstream(self):
        with contextlib.suppress(OSError):
            while data := self.server.recv(65536):
                if self.mute:
                    break
                self.client.sendall(data)
        self.close()

    def close(self):
        self.proxy.links.discard(self)
        for one in (self.client, self.server):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()
            self.proxy.sockets.discard(one)


def read(stream):
    """Reads one request."""
    head = stream.readline()
    if not head:
        raise EOFError
    return [stream.read(int(stream.readline()[1:]) + 2)[:-2] for _ in range(int(head[1:]))]


def pack(request):
    return b"*%d\r\n" % len(request) + b"".join(b"$%d\r\n%s\r\n" % (len(part), part) for part in request)

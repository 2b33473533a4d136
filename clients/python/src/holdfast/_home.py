"""The I/O of a blocking client: a thread that reads, opens and wakes; and callers who read their own replies.

Whoever asks for something takes the step himself and reads the requests' connection until his answer is there, if
nobody else does: no other thread has to run for it. All else is the thread's business.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import heapq
import itertools
import logging
import math
import select
import selectors
import socket
import ssl
import threading
import time
import weakref
from typing import Any, Callable, TypeVar

import redis.asyncio
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError, RedisClusterException, RedisError
from redis.retry import Retry

from . import _flow as flows
from ._clock import LOOK_AGAIN, millis, now
from ._core.core import Core
from ._core.step import Outcome
from ._flow import Flow
from ._hold import Hold
from ._line import Line
from ._lock import Held
from ._owners import OWNERS
from ._redis import is_final, own_settings
from ._shell import PATIENCE, Homes, Link, Node, Pending, Waiter
from ._shell import Home as Shared

logger = logging.getLogger("holdfast")

T = TypeVar("T")

# For how many milliseconds a caller reads himself without a word of the server.
_READS_FOR = 50
# How long the end of the program waits for what was given up just before.
_LAST_WORDS = 1.0
_PIECE = 65536
_NOTHING_YET = (BlockingIOError, InterruptedError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


def run(flow: Flow[T]) -> T:
    """Runs a flow whose steps block."""
    try:
        value = next(flow)
        while True:
            value = flow.send(value)
    except StopIteration as end:
        result: T = end.value
        return result
    except BaseException:
        # Of an exception from outside (a signal, a soft time limit) the flow has to hear before the caller does.
        flow.close()
        raise


class Wire:
    """One connection: redis-py's, of which only the socket is used once it is there."""

    def __init__(self, connection: Any) -> None:
        self.connection = connection
        self.socket: socket.socket = connection._sock  # redis-py has no other way to it.
        self.socket.setblocking(False)
        # What the network did not take yet.
        self.out = bytearray()
        self._is_tls = isinstance(self.socket, ssl.SSLSocket)
        # One looks at a time: a caller who reads, or who is about to ask while nobody reads.
        self._look: Callable[[int], Any] = lambda ms: select.select([self.socket], [], [], ms / 1000)[0]
        if hasattr(select, "poll"):
            poll = select.poll()
            poll.register(self.socket.fileno(), select.POLLIN)
            self._look = poll.poll

    @property
    def descriptor(self) -> int:
        """Negative: it is closed."""
        return self.socket.fileno()

    def flush(self) -> None:
        """Sends what there is. An error is found by whoever reads."""
        while self.out:
            try:
                sent = self.socket.send(self.out)
            except _NOTHING_YET:
                return
            except (OSError, ValueError):
                self.out.clear()
                return
            del self.out[:sent]

    def can_read(self, milliseconds: int) -> bool:
        """Whether there is something to be read, or the end, within this time."""
        if self._is_tls and self.socket.pending():  # type: ignore[attr-defined]
            return True
        try:
            return bool(self._look(milliseconds))
        except (OSError, ValueError):
            # It was closed meanwhile.
            return True

    def read(self) -> bytes | None:
        """What has arrived, a piece of it at most; nothing: it has ended. None: nothing yet."""
        try:
            return self.socket.recv(_PIECE)
        except _NOTHING_YET:
            return None

    def may_have_more(self, data: bytes) -> bool:
        """Whether there may be more behind this piece."""
        return self._is_tls or len(data) == _PIECE

    def close(self) -> None:
        """Ends it, also for a thread that waits for it."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        try:
            self.connection.disconnect()
        except Exception:
            logger.debug("a connection did not close", exc_info=True)


class Home(Shared):
    """Connections, waits and holds of one pool. Keeps no reference to it, so that it can end with it."""

    def __init__(self, anchor: Any, limit: float | None) -> None:
        super().__init__(anchor)
        # How many seconds it may take to connect, where the program's own settings are not meant.
        self.limit = limit
        self.mutex = threading.Lock()
        self._thread: threading.Thread | None = None
        self._posts: collections.deque[Callable[[], object]] = collections.deque()
        # What is to be called when.
        self._looks: list[tuple[int, int, Callable[[], object]]] = []
        self._wakes_at = math.inf
        self._ear, self._mouth = socket.socketpair()
        for one in (self._ear, self._mouth):
            one.setblocking(False)

    # What flows ask for.

    def find(self, key: bytes) -> Node:
        if not self._in_cluster:
            return self.node(None)
        try:
            address = self.address_of(key)
        except RedisClusterException:
            self._know()
            address = self.address_of(key)
        return self.node(address)

    def begin(self, pending: Pending, what: Callable[..., None], *said: Any) -> None:
        with self.mutex:
            if self.stepping is not None:
                self.recover()
            pending.follow()
            link = pending.node.link
            # What is there is read first: the end of a connection, too, or that the lock is at another server now.
            if link is not None and not link.is_read and link.requests.can_read(0):
                self._read(pending.node, link, link.requests)
                pending.follow()
            self.calls[pending.id] = pending
            self.step(pending.node, what, pending.id, *said)
            self._drive()

    def wait(self, pending: Pending, seconds: float | None) -> Outcome | None:
        """Waits for the outcome: by reading, if nobody does, and else until another one has it."""
        if pending.outcome is None:
            self._read_along(pending)
        self.wait_for(pending, seconds)
        return pending.outcome

    def wait_for(self, waiter: Waiter, seconds: float | None) -> None:
        if waiter.outcome is None:
            event = threading.Event()
            waiter.wake = event.set
            end = math.inf if seconds is None else now() + seconds
            while waiter.outcome is None and now() < end:
                event.wait(min(end - now(), threading.TIMEOUT_MAX))
                event.clear()

    def _read_along(self, pending: Pending) -> None:
        node = pending.node
        with self.mutex:
            link = node.link
            if link is None or link.is_read:
                return
            link.is_read = True
        try:
            while pending.outcome is None and not node.core.is_idle and link.requests.can_read(_READS_FOR):
                with self.mutex:
                    if self.stepping is not None:
                        self.recover()
                    if node.link is not link:
                        return
                    self._read(node, link, link.requests)
        finally:
            link.is_read = False
            if not node.core.is_idle:
                self._poke()

    def pause(self, seconds: float) -> None:
        time.sleep(seconds)

    def drop(self, node: Node, call: int) -> None:
        def drop() -> None:
            self.calls.pop(call, None)
            self.holds.pop(call, None)
            self.step(node, Core.drop, call)

        self.post(drop)

    def leave(self, line: Line, hold: Hold) -> None:
        self.post(lambda: line.done(hold))

    def start(self, flow: Flow[None]) -> None:
        """Runs a flow in a thread."""

        def background() -> None:
            try:
                run(flow)
            except (ReferenceError, RedisError) as error:
                logger.debug("something in the background ended: %s", error)

        threading.Thread(target=background, name="holdfast", daemon=True).start()

    # The thread.

    def post(self, task: Callable[[], object]) -> None:
        """Has it done by the thread. May be called anywhere, also where objects are collected."""
        self._posts.append(task)
        self._poke()

    def _drive(self) -> None:
        """Sees to it that there is a thread. With the mutex: so there is one."""
        if self._thread is None and not self.closed:
            thread = threading.Thread(target=self._run, name="holdfast-session", daemon=True)
            with contextlib.suppress(RuntimeError):
                # At the end of the program none can be started.
                thread.start()
                self._thread = thread

    def _poke(self) -> None:
        """Wakes the thread. Each time: whoever remembered that he has could be interrupted before he does."""
        with contextlib.suppress(OSError):
            self._mouth.send(b"!")

    def _set_timer(self, node: Node) -> None:
        at = node.core.wakes_at
        if at is not None and at < self._wakes_at:
            self._poke()

    def call_at(self, at: int, call: Callable[[], object]) -> None:
        heapq.heappush(self._looks, (at, next(_numbers), call))
        if at < self._wakes_at:
            self._poke()

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._ear, selectors.EVENT_READ)
            try:
                while not self._has_ended:
                    self._turn(selector)
            except BaseException as error:
                # Whatever it is, the session ends, and everybody hears of that.
                logger.error("the thread of a session ended: %r", error, exc_info=error)
                with self.mutex:
                    self.recover()
                    self._thread = None
                    for node in list(self.nodes.values()):
                        if node.link is not None:
                            self.broken(node, node.link.pair, None)
                    self._drive()
                return
        self.closed = True
        for one in (self._ear, self._mouth):
            one.close()

    @property
    def _has_ended(self) -> bool:
        return self.closed and not self._posts and all(node.core.has_ended for node in self.nodes.values())

    def _turn(self, selector: Any) -> None:
        with self.mutex:
            self._watch(selector)
            times = [at for node in self.nodes.values() if (at := node.core.wakes_at) is not None]
            self._wakes_at = min([*times, *(at for at, _, _ in self._looks[:1])], default=math.inf)
        wait = min(max(self._wakes_at / 1000 - now(), 0), LOOK_AGAIN)
        ready = selector.select(wait if self._wakes_at < math.inf else None)
        with self.mutex:
            self.recover()
            for key, mask in ready:
                if key.data is None:
                    with contextlib.suppress(OSError):
                        self._ear.recv(_PIECE)
                    continue
                node, link, wire = key.data
                if mask & selectors.EVENT_WRITE:
                    link.flush()
                if mask & selectors.EVENT_READ and node.link is link and not (wire is link.requests and link.is_read):
                    self._read(node, link, wire)
            while self._posts:
                self._posts.popleft()()
            for node in list(self.nodes.values()):
                self._wake(node)
            while self._looks and self._looks[0][0] <= millis():
                heapq.heappop(self._looks)[2]()

    def _wake(self, node: Node) -> None:
        at = node.core.wakes_at
        if at is None or at > millis():
            return
        # It comes last: what has arrived is read before.
        link = node.link
        if link is not None:
            for wire in link.wires.values():
                self._read(node, link, wire)
        self.step(node, Core.wake)

    def _watch(self, selector: Any) -> None:
        """Says which connections to look at: that of requests while answers are owed and no caller looks himself."""
        wanted: dict[int, tuple[Any, int, Any]] = {}
        for node in self.nodes.values():
            link = node.link
            if link is None:
                continue
            for wire in link.wires.values():
                is_read = wire is not link.requests or not (link.is_read or node.core.is_idle)
                events = (selectors.EVENT_READ if is_read else 0) | (selectors.EVENT_WRITE if wire.out else 0)
                if events and wire.descriptor >= 0:
                    wanted[wire.descriptor] = (wire.socket, events, (node, link, wire))
        for key in list(selector.get_map().values()):
            if key.data is not None and (key.fd not in wanted or wanted[key.fd][0] is not key.fileobj):
                selector.unregister(key.fileobj)
        known = {key.fd: key for key in selector.get_map().values()}
        for fd, (one, events, data) in wanted.items():
            if fd not in known:
                selector.register(one, events, data)
            elif known[fd].events != events:
                selector.modify(one, events, data)

    def _read(self, node: Node, link: Link, wire: Wire) -> None:
        """Tells the core what has arrived. With the mutex."""
        channel = "requests" if wire is link.requests else "session"
        while node.link is link:
            try:
                data = wire.read()
            except (OSError, ValueError) as error:
                self.broken(node, link.pair, ConnectionError(f"the connection broke: {error}"))
                return
            if data is None:
                return
            if not data:
                self.broken(node, link.pair, None)
                return
            self.step(node, Core.received, link.pair, channel, data)
            if not wire.may_have_more(data):
                return

    def _open(self, node: Node, pair: int) -> None:
        thread = threading.Thread(target=self._connect, args=(node, pair), name="holdfast", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            # None can be started at the end of the program, and where there are too many.
            failure = ConnectionError(f"no connection can be opened: {error}")
            self._posts.append(lambda: self.connected(node, pair, None, failure, is_final=True))

    def _connect(self, node: Node, pair: int) -> None:
        link, failure, connections = None, None, []
        retry: Any = None
        try:
            if self._in_cluster and self._in_doubt:
                self._know()
            connection_class, settings = self.settings_of(node.address)
            retry = settings.get("retry")
            own = own_settings(settings, Retry(NoBackoff(), 0), cluster=self._in_cluster, limit=self.limit)
            for _ in range(2):
                connections.append(connection_class(**own))
                connections[-1].connect()
            link = Link(pair, *map(Wire, connections))
        except BaseException as error:
            for connection in connections:
                connection.disconnect()
            failure = error if isinstance(error, Exception) else ConnectionError(f"no connection: {error!r}")
        with self.mutex:
            self.recover()
            final = failure is not None and is_final(retry, node.failures + 1, failure)
            self.connected(node, pair, link, failure, is_final=final)
        self._poke()

    def _know(self) -> None:
        """Asks who serves what."""
        self._in_doubt = False
        try:
            self.anchor.nodes_manager.initialize()
        except (RedisError, OSError) as error:
            self._in_doubt = True
            logger.debug("who serves what was not to be learned: %s", error)

    # Its end.

    def close(self) -> None:
        """Gives back all there is, as far as the servers answer, and ends the connections."""
        self.lose_all()
        pending = []
        for node in list(self.nodes.values()):
            call = Pending(OWNERS.number(), node, None)
            self.begin(call, Core.close, PATIENCE)
            pending.append(call)
        self.closed = True
        self.end_lines()
        for call in pending:
            self.wait(call, None)
        self._poke()

    def end(self) -> None:
        """The client is gone: the same in the background."""

        def end() -> None:
            self.closed = True
            for node in list(self.nodes.values()):
                self.step(node, Core.close, OWNERS.number(), PATIENCE)

        if self._thread is None:
            self.closed = True
        else:
            self.post(end)

    def hang_up(self) -> None:
        """The program ends. Its threads may live on for a moment, in which nothing is begun anew for those who wait."""
        self.closed = True
        with self.mutex:
            for node in self.nodes.values():
                link, node.link, node.opening = node.link, None, None
                if link is not None:
                    link.close()

    def forget(self) -> None:
        """This is the child of a fork: everything belongs to the parent."""
        self.closed = True
        self.holds.clear()
        for node in self.nodes.values():
            if node.link is not None:
                node.link.let_go()


_homes = Homes(Home)
home_of, homes_of = _homes.of, _homes.those_of

# Of each thread, a number that no other one has.
_actors = threading.local()
_numbers = itertools.count(1)


def actor() -> int:
    """The number of this thread."""
    if not hasattr(_actors, "number"):
        _actors.number = next(_numbers)
    number: int = _actors.number
    return number


def fits(client: Any) -> None:
    """Raises TypeError for a client of asyncio."""
    if isinstance(client, (redis.asyncio.Redis, redis.asyncio.RedisCluster)):
        raise TypeError(f"client must be a blocking one, of redis; for {client!r} there is holdfast.asyncio")


def keep(held: Held) -> None:
    """Sees to it that what is held is given back when nobody can reach it any more."""
    end: Any = weakref.finalize(held, _let_go, OWNERS.process, held.holds)
    end.atexit = False


def _let_go(process: bytes, holds: list[Any]) -> None:
    # Whatever is collected in the child of a fork was its parent's.
    if process is OWNERS.process:
        flows.abandon(holds)


@atexit.register
def _at_exit() -> None:
    until = now() + _LAST_WORDS
    for home in _homes.all():
        home.clear_lines()
        while (home._posts or not home.is_settled) and now() < until:
            time.sleep(0.002)
        home.hang_up()

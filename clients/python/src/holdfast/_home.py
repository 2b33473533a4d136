"""The I/O of a blocking client: its sessions, each with a thread that reads it, and the requests over its pool."""

from __future__ import annotations

import atexit
import collections
import contextlib
import logging
import os
import queue
import socket
import threading
import time
import weakref
from typing import Any, Callable, NamedTuple, TypeVar

from redis import RedisCluster
from redis.backoff import NoBackoff
from redis.exceptions import (
    AskError,
    ConnectionError,
    MovedError,
    RedisClusterException,
    RedisError,
    ResponseError,
    TimeoutError,
)
from redis.retry import Retry

from . import _flow as flows
from . import _requests as requests
from ._book import Book
from ._flow import Flow, Node, Reply, Waitable
from ._hold import Hold
from ._lock import OWNERS
from ._redis import broken, connected, let_go, say, session_settings
from ._requests import FOREVER, Request
from ._session import SessionState

logger = logging.getLogger("holdfast")

T = TypeVar("T")

# How long the end of the program waits for what was given up just before.
_LAST_WORDS = 1.0


def run(flow: Flow[T]) -> T:
    """Runs a flow whose steps block."""
    try:
        value = next(flow)
        while True:
            value = flow.send(value)
    except StopIteration as end:
        result: T = end.value
        return result


def gate() -> queue.SimpleQueue[None]:
    """Turns to take and to give back. Far cheaper than a threading.Semaphore."""
    turns: queue.SimpleQueue[None] = queue.SimpleQueue()
    for _ in range(flows.UNDER_WAY):
        turns.put(None)
    return turns


class Session(SessionState):
    """A connection of its own, made from the settings of a pool."""

    def __init__(self, pool: Any, *, cluster: bool, limit: float | None) -> None:
        super().__init__(limit)
        settings = session_settings(pool.connection_kwargs, Retry(NoBackoff(), 0), cluster=cluster)
        self._connection = pool.connection_class(**settings)
        self.seen = time.monotonic()
        try:
            self._connection.connect()
            self.id = self._ask(b"LOCK.OWNER")
            self.answered(self.seen, self._ask(*requests.ALIVE))
        except BaseException:
            self._connection.disconnect()
            raise
        self._socket: socket.socket = self._connection._sock  # redis-py has no other way to interrupt a reader.

    def _ask(self, *request: bytes) -> Any:
        self._connection.send_command(*request)
        return self._connection.read_response(disable_decoding=True)

    def next_events(self) -> Any:
        """Blocks until there are events, or a sign of life."""
        asked = time.monotonic()
        self._connection.send_command(*self.question())
        if not self._connection.can_read(self.patience):
            raise ConnectionError("the server is silent")
        try:
            reply = self._connection.read_response(disable_decoding=True)
        except ResponseError as error:
            # By CLIENT UNBLOCK.
            if requests.code(error) != "UNBLOCKED":
                raise
            reply = []
        return self.answered(asked, reply)

    def interrupt(self) -> None:
        """Ends the wait of the thread that reads."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Closes the connection. For the thread that reads."""
        try:
            self._connection.disconnect()
        except Exception:
            logger.debug("a session's connection did not close", exc_info=True)

    def let_go(self) -> None:
        """Leaves the connection to the parent of a fork."""
        if self._socket.fileno() >= 0:
            let_go(self._socket.fileno())


class Line:
    """Connections of our own, made from the settings of a pool. No step of theirs takes longer than `limit` s."""

    def __init__(self, pool: Any, limit: float) -> None:
        self.connection_class = pool.connection_class
        self.connection_kwargs = session_settings(pool.connection_kwargs, Retry(NoBackoff(), 0), limit=limit)
        self._idle: collections.deque[Any] = collections.deque()

    def get_connection(self, *_: str) -> Any:
        """An idle one that the server has not closed, or a new one."""
        while self._idle:
            with contextlib.suppress(ConnectionError, IndexError):
                connection = self._idle.pop()
                if not connection.can_read(0):
                    return connection
                connection.disconnect()
        connection = self.connection_class(**self.connection_kwargs)
        connection.connect()
        return connection

    def release(self, connection: Any) -> None:
        """Keeps it for the next one, if it is still open."""
        if connection._sock is not None:
            self._idle.append(connection)

    def disconnect(self) -> None:
        """Closes those that are idle."""
        with contextlib.suppress(IndexError):
            while True:
                self._idle.pop().disconnect()


class Posted(NamedTuple):
    """A request whose reply is still to be read, or why it was not sent."""

    node: Node | None
    connection: Any
    error: RedisError | None


class Home:
    """Sessions, waits and holds of one connection pool. Keeps no reference to it, so that it can end with it."""

    limit: float | None = None

    def __init__(self, anchor: Any) -> None:
        self.book = Book()
        self.suspect = False
        self.closed = False
        self._anchor = weakref.ref(anchor)
        self._sessions: dict[str, Session] = {}
        self._doors: dict[str, _Door] = {}
        self._gates: dict[str, queue.SimpleQueue[None]] = collections.defaultdict(gate)
        self._background: set[threading.Thread] = set()

    def find(self, key: bytes, redirection: AskError | None) -> Node:
        name, pool = self._server(key, redirection)
        session = self._sessions.get(name)
        if session is None or session.ended:
            session = self._open(name, pool)
        return Node(pool, session, self._gates[name], redirection is not None)

    def send(self, node: Node, request: Request) -> tuple[Any, int]:
        node.gate.get()
        try:
            return self._send(node, request)
        finally:
            node.gate.put(None)

    def _send(self, node: Node, request: Request) -> tuple[Any, int]:
        connection = connected(node.server)
        sent = 0

        def once() -> Any:
            nonlocal sent
            sent += 1
            if node.asking:
                connection.send_command("ASKING")
                connection.read_response()
            say(connection, request)
            return connection.read_response(disable_decoding=True)

        try:
            return connection.retry.call_with_retry(once, lambda _: connection.disconnect()), sent
        except ResponseError:
            raise
        except BaseException as error:
            connection.disconnect()
            if (instead := broken(error)) is not None:
                raise instead from error
            raise
        finally:
            node.server.release(connection)

    def post(self, key: bytes, request: Callable[[SessionState], Request]) -> Posted:
        try:
            node = self.find(key, None)
            words = request(node.session)
            node.gate.get()
            try:
                connection = self._post(node, words)
            except BaseException:
                node.gate.put(None)
                raise
        except RedisError as error:
            return Posted(None, None, error)
        return Posted(node, connection, None)

    def _post(self, node: Node, request: Request) -> Any:
        connection = connected(node.server)
        try:
            say(connection, request)
        except BaseException:
            connection.disconnect()
            node.server.release(connection)
            raise
        return connection

    def collect(self, posted: Posted, seconds: float) -> Reply:
        if posted.node is None:
            raise posted.error or ConnectionError("nothing was sent")
        try:
            if not posted.connection.can_read(seconds):
                raise TimeoutError(f"no answer within {seconds:.3f} s")
            value = posted.connection.read_response(disable_decoding=True)
        except ResponseError:
            self._put_back(posted)
            raise
        except BaseException:
            self.drop(posted)
            raise
        self._put_back(posted)
        return Reply(value, posted.node.session, False)

    def drop(self, posted: Posted) -> None:
        if posted.node is not None:
            posted.connection.disconnect()
            self._put_back(posted)

    @staticmethod
    def _put_back(posted: Posted) -> None:
        if posted.node is not None:
            posted.node.server.release(posted.connection)
            posted.node.gate.put(None)

    def disconnect(self) -> None:
        self._client().disconnect(inuse_connections=False)

    def learn(self, error: Exception) -> bool:
        return False

    def outcome(self, hold: Waitable, seconds: float) -> None:
        event = threading.Event()
        if hold.wait(event.set):
            event.wait(None if seconds == FOREVER else min(seconds, threading.TIMEOUT_MAX))

    def pause(self, seconds: float) -> None:
        time.sleep(seconds)

    def end(self, session: SessionState) -> None:
        session.ended = True
        if isinstance(session, Session):
            session.interrupt()

    def start(self, hold: Hold | None, flow: Flow[None]) -> None:
        """Runs a flow in a thread."""

        def background() -> None:
            try:
                run(flow)
            except ReferenceError:
                logger.debug("the client ended while something was done in the background")
            except RedisError as error:
                logger.warning("what was given up may live on until its lease runs out: %s", error)
            finally:
                self._background.discard(threading.current_thread())

        thread = threading.Thread(target=background, name="holdfast", daemon=True)
        if hold is not None:
            self._background.add(thread)
        thread.start()

    def finish(self, until: float) -> None:
        """Lets what runs in the background come to its end."""
        for thread in [*self._background]:
            thread.join(max(0, until - time.monotonic()))

    def close(self) -> None:
        """Ends every session: the client is gone, or the program ends."""
        self.closed = True
        for session in [*self._sessions.values()]:
            self.end(session)

    def forget(self) -> None:
        """This is the child of a fork: everything belongs to the parent."""
        self.closed = True
        self.book.forget()
        for session in self._sessions.values():
            session.ended = True
            session.let_go()

    def _server(self, key: bytes, redirection: AskError | None) -> tuple[str, Any]:
        """Name and pool of the server that serves a key."""
        return "", self._client()

    def _client(self) -> Any:
        anchor = self._anchor()
        if anchor is None or self.closed:
            raise ReferenceError("the client of this lock is gone")
        return anchor

    def _open(self, name: str, pool: Any) -> Session:
        asked = time.monotonic()
        door = self._doors.setdefault(name, _Door())
        with door.mutex:
            session = self._sessions.get(name)
            if session is not None and not session.ended:
                return session
            # Who came while another one failed does not try again, lest a crowd tries one by one.
            if door.failed is not None and door.failed_at > asked:
                raise door.failed
            try:
                session = Session(pool, cluster=isinstance(self, ClusterHome), limit=self.limit)
            except RedisError as error:
                door.failed, door.failed_at = error, time.monotonic()
                raise
            self._sessions[name] = session
        threading.Thread(target=self._read, args=(session,), name="holdfast-session", daemon=True).start()
        return session

    def _read(self, session: Session) -> None:
        try:
            while not session.ended:
                moved = self.book.tell(session, session.next_events())
                if moved:
                    self.start(None, flows.carry(self, moved))
        except Exception as error:
            # Of a connection that another thread ends, redis-py may say anything.
            logger.debug("session %r ended: %s", session.id, error)
        session.close()
        if self.closed:
            # Nobody is there any more to be told; who still waits at the end of the program ends with it.
            return
        holds = self.book.session_ended(session)
        if holds:
            try:
                run(flows.carry(self, holds))
            except ReferenceError:
                logger.debug("the client ended while its locks were taken along")


class BoundedHome(Home):
    """Sessions, waits and holds at one server of several, which must not keep the others waiting."""

    def __init__(self, anchor: Any, limit: float) -> None:
        super().__init__(anchor)
        self.limit = limit
        self._line = Line(anchor, limit)

    def disconnect(self) -> None:
        self._line.disconnect()

    def close(self) -> None:
        super().close()
        self.disconnect()

    def _client(self) -> Any:
        super()._client()
        return self._line


class ClusterHome(Home):
    """Sessions, waits and holds of a cluster's client."""

    def learn(self, error: Exception) -> bool:
        manager = self._client().nodes_manager
        if isinstance(error, MovedError) and hasattr(manager, "move_slot"):
            manager.move_slot(error)
        else:
            try:
                manager.initialize()
            except RedisClusterException as failed:
                # Also when redis-py before version 8 closed the connection under it, for another one who looks.
                logger.debug("who serves what was not to be learned: %s", failed)
        return True

    def _server(self, key: bytes, redirection: AskError | None) -> tuple[str, Any]:
        cluster = self._client()
        node = None
        if redirection is not None:
            node = cluster.get_node(host=redirection.host, port=redirection.port)
        if node is None:
            node = cluster.get_node_from_key(key)
        return node.name, cluster.get_redis_connection(node).connection_pool


class _Door:
    """Where those queue who need a session of one server."""

    def __init__(self) -> None:
        self.mutex = threading.Lock()
        self.failed: RedisError | None = None
        self.failed_at = 0.0


# Of each client's pool, those by their limits.
_homes: weakref.WeakKeyDictionary[Any, dict[float | None, Home]] = weakref.WeakKeyDictionary()
_mutex = threading.Lock()


def home_of(client: Any, limit: float | None = None) -> Home:
    """The home of a client; of those who share a pool, the same. With a limit, one of connections of its own."""
    cluster = isinstance(client, RedisCluster)
    anchor = client if cluster else client.connection_pool
    home = _homes.get(anchor, {}).get(limit)
    if home is None or home.closed:
        with _mutex:
            homes = _homes.setdefault(anchor, {})
            home = homes.get(limit)
            if home is None or home.closed:
                home = ClusterHome(anchor) if cluster else Home(anchor) if limit is None else BoundedHome(anchor, limit)
                homes[limit] = home
                end: Any = weakref.finalize(anchor, home.close)
                end.atexit = False
    return home


def _all_homes() -> list[Home]:
    return [home for homes in list(_homes.values()) for home in list(homes.values())]


def alarm(hold: Hold) -> Callable[[float], object]:
    """Sees to it that a hold lapses in time, by a timer that is set when somebody wants to know."""
    mutex = threading.Lock()
    timer: threading.Timer | None = None

    def at(deadline: float) -> None:
        nonlocal timer
        with mutex:
            if timer is not None:
                timer.cancel()
                timer = None
            if deadline != FOREVER:
                timer = threading.Timer(max(0, deadline - time.monotonic()), hold.lapse)
                timer.daemon = True
                timer.start()

    return at


@atexit.register
def _at_exit() -> None:
    until = time.monotonic() + _LAST_WORDS
    for home in _all_homes():
        home.finish(until)
        home.close()


def _after_fork() -> None:
    """In the child: starts afresh."""
    global _mutex
    _mutex = threading.Lock()
    homes = _all_homes()
    _homes.clear()
    OWNERS.start()
    for home in homes:
        home.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)

"""The I/O of a blocking client: its sessions, each with a thread that reads it, and the requests over its pool."""

from __future__ import annotations

import atexit
import collections
import contextlib
import functools
import logging
import os
import socket
import threading
import time
import weakref
from typing import Any, Callable, TypeVar

from redis import RedisCluster
from redis.backoff import NoBackoff
from redis.exceptions import AskError, ConnectionError, MovedError, RedisError, ResponseError
from redis.retry import Retry

from . import _flow as flows
from . import _requests as requests
from ._book import Book
from ._flow import Flow, Node
from ._hold import Hold
from ._lock import OWNERS
from ._redis import POOL_ARGUMENTS, let_go, session_settings
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


class Session(SessionState):
    """A connection of its own, made from the settings of a pool."""

    def __init__(self, pool: Any, *, cluster: bool) -> None:
        super().__init__()
        settings = session_settings(pool.connection_kwargs, Retry(NoBackoff(), 0), cluster=cluster)
        self._connection = pool.connection_class(**settings)
        self.seen = time.monotonic()
        try:
            self._connection.connect()
            self.id = self._ask("LOCK.OWNER")
            self._read_lease()
        except BaseException:
            self._connection.disconnect()
            raise
        self._socket: socket.socket = self._connection._sock  # redis-py has no other way to interrupt a reader.

    def _read_lease(self) -> None:
        try:
            self.read_lease(self._ask("CONFIG", "GET", "holdfast.default-lease"))
        except ResponseError:
            logger.debug("CONFIG GET is not allowed here; the default lease counts as %s s", self.lease)

    def _ask(self, *request: Any) -> Any:
        self._connection.send_command(*request)
        return self._connection.read_response(disable_decoding=True)

    def next_events(self) -> Any:
        """Blocks until there are events, or for a beat."""
        asked = time.monotonic()
        self._connection.send_command(*requests.next_events(self.beat))
        if not self._connection.can_read(self.patience):
            raise ConnectionError("the server is silent")
        try:
            reply = self._connection.read_response(disable_decoding=True)
        except ResponseError as error:
            # By CLIENT UNBLOCK.
            if requests.code(error) != "UNBLOCKED":
                raise
            reply = None
        self.seen = asked
        return reply or []

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


class Home:
    """Sessions, waits and holds of one connection pool. Keeps no reference to it, so that it can end with it."""

    def __init__(self, anchor: Any) -> None:
        self.book = Book()
        self.closed = False
        self._anchor = weakref.ref(anchor)
        self._sessions: dict[str, Session] = {}
        self._doors: dict[str, _Door] = {}
        self._gates: dict[str, threading.Semaphore] = collections.defaultdict(
            functools.partial(threading.Semaphore, flows.UNDER_WAY)
        )
        self._background: set[threading.Thread] = set()

    def find(self, key: bytes, redirection: AskError | None) -> Node:
        name, pool = self._server(key, redirection)
        session = self._sessions.get(name)
        if session is None or session.ended:
            session = self._open(name, pool)
        return Node(pool, session, self._gates[name], redirection is not None)

    def send(self, node: Node, request: Request) -> tuple[Any, int]:
        with node.gate:
            return self._send(node, request)

    def _send(self, node: Node, request: Request) -> tuple[Any, int]:
        connection = node.server.get_connection(*POOL_ARGUMENTS)
        sent = 0

        def once() -> Any:
            nonlocal sent
            sent += 1
            if node.asking:
                connection.send_command("ASKING")
                connection.read_response()
            connection.send_command(*request)
            return connection.read_response(disable_decoding=True)

        try:
            return connection.retry.call_with_retry(once, lambda _: connection.disconnect()), sent
        except ResponseError:
            raise
        except BaseException:
            connection.disconnect()
            raise
        finally:
            node.server.release(connection)

    def learn(self, error: Exception) -> bool:
        return False

    def outcome(self, hold: Hold, seconds: float) -> None:
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
            except (RedisError, ReferenceError) as error:
                logger.warning("what was given up may live on until its lease runs out: %s", error)
            finally:
                self._background.discard(threading.current_thread())

        thread = threading.Thread(target=background, name="holdfast", daemon=True)
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
                session = Session(pool, cluster=isinstance(self, ClusterHome))
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


class ClusterHome(Home):
    """Sessions, waits and holds of a cluster's client."""

    def learn(self, error: Exception) -> bool:
        manager = self._client().nodes_manager
        if isinstance(error, MovedError) and hasattr(manager, "move_slot"):
            manager.move_slot(error)
        else:
            manager.initialize()
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


_homes: weakref.WeakKeyDictionary[Any, Home] = weakref.WeakKeyDictionary()
_mutex = threading.Lock()


def home_of(client: Any) -> Home:
    """The home of a client; of those who share a pool, the same."""
    cluster = isinstance(client, RedisCluster)
    anchor = client if cluster else client.connection_pool
    home = _homes.get(anchor)
    if home is None or home.closed:
        with _mutex:
            home = _homes.get(anchor)
            if home is None or home.closed:
                home = (ClusterHome if cluster else Home)(anchor)
                _homes[anchor] = home
                end: Any = weakref.finalize(anchor, home.close)
                end.atexit = False
    return home


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
    for home in list(_homes.values()):
        home.finish(until)
        home.close()


def _after_fork() -> None:
    """In the child: starts afresh."""
    global _mutex
    _mutex = threading.Lock()
    homes = list(_homes.values())
    _homes.clear()
    OWNERS.start()
    for home in homes:
        home.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)

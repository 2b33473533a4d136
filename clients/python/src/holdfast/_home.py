"""The I/O of a blocking client: its sessions, each with a thread that reads it, and the requests over its pool."""

from __future__ import annotations

import atexit
import collections
import contextlib
import itertools
import logging
import os
import socket
import threading
import time
import weakref
from collections.abc import Sequence
from typing import Any, Callable, NamedTuple, TypeVar

import redis.asyncio
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
from ._aside import ASIDE
from ._book import Book
from ._clock import now
from ._flow import Flow, Node, Reply, Waitable
from ._hold import Hold
from ._lock import OWNERS, Held
from ._redis import again, broken, let_go, session_settings
from ._requests import FOREVER, Request
from ._session import SessionState
from .errors import LockError

logger = logging.getLogger("holdfast")

T = TypeVar("T")

# How often a thread looks for a place if nobody tells it of one.
_LOOK_AGAIN = 0.1
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
    except BaseException:
        # Of an exception from outside (a signal, a soft time limit) the flow has to hear before the caller does.
        flow.close()
        raise


def within(seconds: float, step: Callable[[], T]) -> T:
    """What comes of a step that nobody can end. One that takes longer goes on without us, in a thread of its own."""
    outcome: list[T] = []
    errors: list[BaseException] = []

    def work() -> None:
        try:
            outcome.append(step())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work, name="holdfast", daemon=True)
    thread.start()
    thread.join(max(seconds, 0))
    if errors:
        raise errors[0]
    if not outcome:
        raise TimeoutError(f"not within {seconds:.3f} s")
    return outcome[0]


class Line:
    """The way to one server: connections of our own, so many at once.

    Cheaper than a threading.Semaphore and a pool, and no exception from outside can cost a place.
    """

    def __init__(self) -> None:
        self._places = collections.deque(Place(self) for _ in range(flows.UNDER_WAY))
        self._waiting: collections.deque[threading.Lock] = collections.deque()
        self._idle: collections.deque[Any] = collections.deque()

    def enter(self, seconds: float) -> Place:
        """Returns when it is our turn.

        SimpleQueue.get would wait without a limit if woken, when its time is over, for what somebody else has taken.
        """
        end = now() + seconds
        while True:
            turn = threading.Lock()
            turn.acquire()
            self._waiting.append(turn)
            try:
                return self._places.popleft()
            except IndexError:
                left = end - now()
                # Whoever was interrupted may have been woken and told nobody.
                turn.acquire(timeout=min(max(left, 0), _LOOK_AGAIN))
            finally:
                self._stop_waiting(turn)
            if left <= 0:
                raise TimeoutError(f"{flows.UNDER_WAY} requests are under way, none was answered")

    def leave(self) -> None:
        """Lets the next one in."""
        # Who is interrupted while leaving may leave once more.
        if len(self._places) < flows.UNDER_WAY:
            self._places.append(Place(self))
            self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(IndexError):
            self._waiting.popleft().release()

    def _stop_waiting(self, turn: threading.Lock) -> None:
        try:
            self._waiting.remove(turn)
        except ValueError:
            # It was woken. If that was for a place which it does not take, it is somebody else's turn.
            if self._places:
                self._wake()

    def take(self, make: Callable[[], Any], seconds: float) -> Any:
        """An idle connection that the server has not closed, or a new one."""
        while self._idle:
            with contextlib.suppress(ConnectionError, IndexError):
                connection = self._idle.pop()
                if not connection.can_read(0):
                    return connection
                connection.disconnect()
        connection = make()
        try:
            within(seconds, connection.connect)
        except TimeoutError as error:
            raise TimeoutError(f"no connection within {seconds:.3f} s") from error
        return connection

    def keep(self, connection: Any) -> None:
        """Keeps it for the next one, if it is still open."""
        if connection._sock is not None:
            self._idle.append(connection)

    def disconnect(self) -> None:
        """Closes those that are idle."""
        with contextlib.suppress(IndexError):
            while True:
                self._idle.pop().disconnect()

    def forget(self) -> None:
        """They belong to the parent of a fork."""
        self._idle.clear()


class Place:
    """Who has it is in. Whoever forgets to leave does so when nobody knows of it any more."""

    __slots__ = ("_line",)

    def __init__(self, line: Line) -> None:
        self._line: Callable[[], Line | None] = weakref.ref(line)

    def leave(self) -> None:
        """Lets the next one in, once."""
        line = self._line()
        if line is not None:
            line.leave()
            self._line = _no_line

    __del__ = leave


def _no_line() -> None:
    """It has been left."""


class Session(SessionState):
    """A connection of its own, made from the settings of a pool."""

    def __init__(self, pool: Any, ids: list[bytes], *, cluster: bool, limit: float | None) -> None:
        super().__init__(limit)
        settings = session_settings(pool.connection_kwargs, Retry(NoBackoff(), 0), cluster=cluster)
        self._connection = pool.connection_class(**settings)
        self.seen = now()
        try:
            self._connection.connect()
            self.begins(self._ask(*requests.begin(ids)), ids)
            self.answered(self.seen, self._ask(*requests.ALIVE))
        except BaseException as error:
            self._connection.disconnect()
            if isinstance(error, ResponseError):
                raise requests.advised(error) from error
            raise
        self._socket: socket.socket = self._connection._sock  # redis-py has no other way to interrupt a reader.

    def _ask(self, *request: bytes) -> Any:
        self._connection.send_command(*request)
        return self._connection.read_response(disable_decoding=True)

    def next_events(self) -> Any:
        """Blocks until there are events, or a sign of life."""
        asked = now()
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


class Posted(NamedTuple):
    """A request whose reply is still to be read, or why it was not sent."""

    node: Node | None
    place: Place | None
    connection: Any
    error: RedisError | None


class Home:
    """Sessions, waits and holds of one connection pool. Keeps no reference to it, so that it can end with it."""

    def __init__(self, anchor: Any, limit: float | None) -> None:
        self.book = Book()
        # How many seconds a step may take, if it must not keep other servers waiting.
        self.limit = limit
        self.suspect = False
        self.closed = False
        self._anchor = weakref.ref(anchor)
        self._sessions: dict[str, Session] = {}
        # Those at each server that may not be gone there.
        self._ids: dict[str, list[bytes]] = collections.defaultdict(list)
        self._mutex = threading.Lock()
        self._openings: dict[str, Opening] = {}
        self._lines: dict[str, Line] = collections.defaultdict(Line)
        self._background: set[threading.Thread] = set()

    def find(self, key: bytes, redirection: AskError | None, seconds: float) -> Node:
        name, pool = self._server(key, redirection)
        session = self._sessions.get(name)
        if session is None or session.ended:
            session = self._open(name, pool, seconds)
        return Node(pool, session, self._lines[name], redirection is not None)

    def send(self, node: Node, request: Request, seconds: float) -> tuple[Any, int]:
        until = now() + seconds
        # As often as redis-py would.
        retry = node.server.connection_kwargs.get("retry")
        for sent in itertools.count(1):
            try:
                return self._send(node, request, until), sent
            except (ConnectionError, TimeoutError):
                pause = again(retry, sent)
                if pause is None or now() + pause >= until:
                    raise
                time.sleep(pause)
        raise AssertionError("it ends by an answer or an error")

    def _send(self, node: Node, request: Request, until: float) -> Any:
        line: Line = node.gate
        place = line.enter(until - now())
        connection = None
        try:
            connection = line.take(lambda: self._new_connection(node.server), until - now())
            if node.asking:
                connection.send_command("ASKING")
                self._read_reply(connection, until)
            connection.send_packed_command([requests.pack(request)])
            return self._read_reply(connection, until)
        except ResponseError:
            raise
        except BaseException as error:
            if connection is not None:
                connection.disconnect()
            if (instead := broken(error)) is not None:
                raise instead from error
            raise
        finally:
            if connection is not None:
                line.keep(connection)
            place.leave()

    def send_all(self, node: Node, batch: Sequence[Request], seconds: float) -> list[Any]:
        until = now() + seconds
        line: Line = node.gate
        place = line.enter(seconds)
        connection = None
        try:
            connection = line.take(lambda: self._new_connection(node.server), until - now())
            connection.send_packed_command([b"".join([requests.pack(request) for request in batch])])
            replies: list[Any] = []
            for _ in batch:
                try:
                    replies.append(self._read_reply(connection, until))
                except ResponseError as error:
                    replies.append(error)
            return replies
        except BaseException as error:
            if connection is not None:
                connection.disconnect()
            if (instead := broken(error)) is not None:
                raise instead from error
            raise
        finally:
            if connection is not None:
                line.keep(connection)
            place.leave()

    @staticmethod
    def _read_reply(connection: Any, until: float) -> Any:
        seconds = max(until - now(), 0)
        if not connection.can_read(seconds):
            raise TimeoutError(f"no answer within {seconds:.3f} s")
        return connection.read_response(disable_decoding=True)

    def _new_connection(self, pool: Any) -> Any:
        cluster = isinstance(self, ClusterHome)
        settings = session_settings(pool.connection_kwargs, Retry(NoBackoff(), 0), cluster=cluster, limit=self.limit)
        return pool.connection_class(**settings)

    def post(self, key: bytes, request: Callable[[SessionState], Request]) -> Posted:
        limit = self.limit or flows.PATIENCE
        try:
            node = self.find(key, None, limit)
            words = request(node.session)
            place = node.gate.enter(limit)
            try:
                connection = self._post(node, words, limit)
            except BaseException:
                place.leave()
                raise
        except RedisError as error:
            return Posted(None, None, None, error)
        return Posted(node, place, connection, None)

    def _post(self, node: Node, request: Request, limit: float) -> Any:
        connection = node.gate.take(lambda: self._new_connection(node.server), limit)
        try:
            connection.send_packed_command([requests.pack(request)])
        except BaseException:
            connection.disconnect()
            raise
        return connection

    def collect(self, posted: Posted, seconds: float) -> Reply:
        if posted.node is None:
            raise posted.error or ConnectionError("nothing was sent")
        try:
            value = self._read_reply(posted.connection, now() + seconds)
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
        if posted.node is not None and posted.place is not None:
            posted.node.gate.keep(posted.connection)
            posted.place.leave()

    def disconnect(self) -> None:
        for line in [*self._lines.values()]:
            line.disconnect()

    def learn(self, error: Exception, seconds: float) -> bool:
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
            except LockError as error:
                logger.debug("not taken back: %s", error)
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
            thread.join(max(0, until - now()))

    def close(self) -> None:
        """Ends every session: the client is gone, it is closed, or the program ends."""
        self.closed = True
        for session in [*self._sessions.values()]:
            self.end(session)
        self.disconnect()

    def forget(self) -> None:
        """This is the child of a fork: everything belongs to the parent."""
        self.closed = True
        self.book.forget()
        for session in self._sessions.values():
            session.ended = True
            session.let_go()
        for line in self._lines.values():
            line.forget()

    def _server(self, key: bytes, redirection: AskError | None) -> tuple[str, Any]:
        """Name and pool of the server that serves a key."""
        return "", self._client()

    def _client(self) -> Any:
        anchor = self._anchor()
        if anchor is None:
            raise ReferenceError("the client of this lock is gone")
        if self.closed:
            raise LockError("the session of this lock was closed")
        return anchor

    def _open(self, name: str, pool: Any, seconds: float) -> Session:
        """Opens a session, in the thread that reads it then, for all who need it."""
        with self._mutex:
            session = self._sessions.get(name)
            if session is not None and not session.ended:
                return session
            opening = self._openings.get(name)
            if opening is None:
                opening = self._openings[name] = Opening(name, pool)
                threading.Thread(target=self._run, args=(opening,), name="holdfast-session", daemon=True).start()
        if not opening.done.wait(seconds):
            raise TimeoutError(f"no session within {seconds:.3f} s")
        if opening.session is None:
            raise opening.error
        return opening.session

    def _run(self, opening: Opening) -> None:
        name, pool = opening.name, opening.pool
        # It must be able to end before the session does.
        opening.pool = None
        try:
            session = Session(pool, self._ids[name], cluster=isinstance(self, ClusterHome), limit=self.limit)
            opening.session = session
        except RedisError as error:
            opening.error = error
        except BaseException as error:
            opening.error = ConnectionError(f"no session: {error!r}")
        del pool
        with self._mutex:
            del self._openings[name]
            if opening.session is not None:
                self._sessions[name] = opening.session
        opening.done.set()
        if opening.session is not None:
            self._read(opening.session)

    def _read(self, session: Session) -> None:
        try:
            while not session.ended:
                if self.closed:
                    # While it was opened.
                    self.end(session)
                    break
                moved = self.book.tell(session, session.next_events())
                if moved:
                    self.start(None, flows.carry(self, session, moved))
        except BaseException as error:
            # Whatever it is, the session ends, and everybody hears of that. Of a connection that another thread ends,
            # redis-py may say anything.
            expected = session.ended or isinstance(error, (RedisError, OSError))
            logger.log(
                logging.DEBUG if expected else logging.ERROR,
                "session %r ended: %s",
                session.id,
                error,
                exc_info=None if expected else error,
            )
        session.close()
        if self.closed:
            # Nobody is there any more to be told; who still waits at the end of the program ends with it.
            return
        holds = self.book.session_ended(session)
        if holds:
            try:
                run(flows.carry(self, session, holds))
            except ReferenceError:
                logger.debug("the client ended while its locks were taken along")


class ClusterHome(Home):
    """Sessions, waits and holds of a cluster's client."""

    def learn(self, error: Exception, seconds: float) -> bool:
        manager = self._client().nodes_manager
        if isinstance(error, MovedError) and hasattr(manager, "move_slot"):
            manager.move_slot(error)
        else:
            try:
                within(seconds, lambda: manager.initialize() or True)
            except (RedisClusterException, TimeoutError) as failed:
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


class Opening:
    """A session that is being opened, and those who wait for it."""

    def __init__(self, name: str, pool: Any) -> None:
        self.name = name
        self.pool = pool
        self.done = threading.Event()
        self.session: Session | None = None
        self.error: RedisError = ConnectionError("no session")


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
                home = ClusterHome(anchor, limit) if cluster else Home(anchor, limit)
                homes[limit] = home
                end: Any = weakref.finalize(anchor, home.close)
                end.atexit = False
    return home


def homes_of(client: Any) -> list[Home]:
    """Those that a client has."""
    anchor = client if isinstance(client, RedisCluster) else client.connection_pool
    return list(_homes.get(anchor, {}).values())


def _all_homes() -> list[Home]:
    return [home for homes in list(_homes.values()) for home in list(homes.values())]


def alarm(hold: Hold) -> Callable[[float], object]:
    """Sees to it that a hold lapses in time."""
    watched = False

    def at(deadline: float) -> None:
        nonlocal watched
        if watched or deadline != FOREVER:
            watched = True
            # It asks the hold itself, lest the older one of two deadlines counts that are told at the same time.
            ASIDE.watch(hold)

    return at


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
    # Where objects are collected, no thread can be started.
    ASIDE.start()
    end: Any = weakref.finalize(held, _let_go, OWNERS.process, held.holds)
    end.atexit = False


def _let_go(process: bytes, holds: list[Hold]) -> None:
    # Whatever is collected in the child of a fork was its parent's.
    if process is OWNERS.process and any(hold.held for hold in holds):
        ASIDE.do(lambda: flows.abandon(holds))


@atexit.register
def _at_exit() -> None:
    until = now() + _LAST_WORDS
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
    ASIDE.start_afresh()
    for home in homes:
        home.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)

"""The I/O of an asyncio client: its sessions, each with a task that reads it, and the requests over its pool."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import inspect
import itertools
import logging
import os
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, Callable, NamedTuple, TypeVar, cast

import redis
from redis.asyncio import RedisCluster
from redis.asyncio.retry import Retry
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

from .. import _flow as flows
from .. import _requests as requests
from .._book import Book
from .._clock import LOOK_AGAIN, now
from .._flow import Flow, Node, Part, Reply, Waitable
from .._hold import Hold
from .._lock import OWNERS, Held
from .._redis import POOL_ARGUMENTS, broken, let_go, session_settings
from .._requests import FOREVER, Request
from .._session import SessionState
from ..errors import LockError, LockLost
from ._heed import heeded, within

logger = logging.getLogger("holdfast")

T = TypeVar("T")

# How long a cancelled acquire waits for what it takes back. After that it goes on in the background.
_CANCEL_WAIT = 0.1
# How long the last look for a server's sign of life takes, of the shortest silence that says something: half of it.
_LOOK_ONCE_MORE = 0.1


async def run(flow: Flow[T]) -> T:
    """Runs a flow whose steps are awaitables, or values that were there at once."""
    try:
        step = next(flow)
        while True:
            try:
                value = await step if hasattr(step, "__await__") else step
            except BaseException as error:
                step = flow.throw(error)
            else:
                step = flow.send(value)
    except StopIteration as end:
        result: T = end.value
        return result


def ready(connection: Any) -> bool:
    """Whether a request can be written to it as it is: it is open, as far as one sees, and needs no PING first."""
    # redis-py has no other way to its stream; a connection of another kind may have none.
    reader, writer = getattr(connection, "_reader", None), getattr(connection, "_writer", None)
    return not (reader is None or writer is None or reader.at_eof() or connection.health_check_interval)


class Gate:
    """Lets so many in at once. Before Python 3.11, asyncio.Semaphore can lose a place to a task that is cancelled."""

    def __init__(self) -> None:
        self._free = flows.UNDER_WAY
        self._queue: collections.deque[asyncio.Future[None]] = collections.deque()

    async def enter(self) -> None:
        """Returns when it is our turn."""
        if self._free:
            self._free -= 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.append(turn)
        try:
            await turn
        except BaseException:
            # Cancelled when it was our turn already: the next one has it.
            if turn.done() and not turn.cancelled():
                self.leave()
            raise

    def leave(self) -> None:
        """Lets the next one in."""
        while self._queue:
            turn = self._queue.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1


class Session(SessionState):
    """A connection of its own, made from the settings of a pool."""

    def __init__(self, server: Any, *, cluster: bool, limit: float | None) -> None:
        super().__init__(limit)
        settings = session_settings(server.connection_kwargs, Retry(NoBackoff(), 0), cluster=cluster)
        self._connection = server.connection_class(**settings)
        self.reader: asyncio.Task[None] | None = None

    async def open(self, ids: list[bytes]) -> None:
        """Connects, and asks who it is."""
        self.seen = now()
        try:
            await self._connection.connect()
            self.begins(await self._ask(*requests.begin(ids)), ids)
            self.answered(self.seen, await self._ask(*requests.ALIVE))
        except BaseException as error:
            await self.close()
            if isinstance(error, ResponseError):
                raise requests.advised(error) from error
            raise

    async def _ask(self, *request: bytes) -> Any:
        await self._connection.send_command(*request)
        return await self._connection.read_response(disable_decoding=True)

    async def next_events(self) -> Any:
        """Returns when there are events, or a sign of life."""
        asked = now()
        await self._connection.send_command(*self.question())
        try:
            reply = await self._read(self.patience - _LOOK_ONCE_MORE)
            if reply is None:
                # A loop that stood still runs its timers although the reply is there: we were silent, not the server.
                reply = await self._read(_LOOK_ONCE_MORE)
        except ResponseError as error:
            # By CLIENT UNBLOCK.
            if requests.code(error) != "UNBLOCKED":
                raise
            reply = []
        if reply is None:
            raise ConnectionError("the server is silent")
        return self.answered(asked, reply)

    async def _read(self, seconds: float) -> Any:
        """The next reply; None, as redis-py says it, if there is none in time. What came of it by then is not lost."""
        return await self._connection.read_response(disable_decoding=True, timeout=seconds)

    async def close(self) -> None:
        """Closes the connection."""
        try:
            await self._connection.disconnect(nowait=True)
        except Exception:
            logger.debug("a session's connection did not close", exc_info=True)

    def drop(self) -> None:
        """Closes what is still open of the connection, without waiting for it."""
        writer = self._connection._writer  # redis-py has no other way to its socket.
        if writer is not None:
            self._connection._reader = self._connection._writer = None
            writer.close()

    def let_go(self) -> None:
        """Leaves the connection to the parent of a fork."""
        writer = self._connection._writer  # redis-py has no other way to its socket.
        if writer is not None and writer.get_extra_info("socket").fileno() >= 0:
            let_go(writer.get_extra_info("socket").fileno())


class Posted(NamedTuple):
    """A request whose reply is still to be read."""

    task: asyncio.Task[Reply]


class Home:
    """Sessions, waits and holds of one connection pool in one event loop. Keeps no reference to the pool."""

    limit: float | None = None

    def __init__(self, anchor: Any) -> None:
        self.book = Book()
        self.suspect = False
        self.loop = asyncio.get_running_loop()
        self.closed = False
        self._anchor = weakref.ref(anchor)
        self._sessions: dict[str, Session] = {}
        # Those at each server that may not be gone there.
        self._ids: dict[str, list[bytes]] = collections.defaultdict(list)
        self._gates: dict[str, Gate] = collections.defaultdict(Gate)
        self._opening: dict[str, asyncio.Task[Session]] = {}
        self._background: dict[asyncio.Task[None], Hold | None] = {}

    def find(self, key: bytes, redirection: AskError | None, seconds: float) -> Any:
        server = self._client()
        session = self._sessions.get("")
        if session is None or session.ended:
            return self._with_session("", server, seconds, asking=False)
        return Node(server, session, self._gates[""], asking=False)

    async def send(self, node: Node, request: Request, seconds: float) -> tuple[Any, int]:
        return await within(seconds, self._through_gate(node, request))

    async def _through_gate(self, node: Node, request: Request) -> tuple[Any, int]:
        await node.gate.enter()
        try:
            return await self._send(node, request)
        finally:
            node.gate.leave()

    async def _send(self, node: Node, request: Request) -> tuple[Any, int]:
        connection = await self._take(node.server)
        sent = 0

        async def once() -> Any:
            nonlocal sent
            sent += 1
            if node.asking:
                await connection.send_command("ASKING")
                await connection.read_response()
            if ready(connection):
                # As send_command, but for its wait until the network took it: the reply tells.
                connection._writer.write(requests.pack(request))
            else:
                await connection.send_command(*request)
            return await connection.read_response(disable_decoding=True)

        async def again(_: Any) -> None:
            await connection.disconnect()

        try:
            return await connection.retry.call_with_retry(once, again), sent
        except ResponseError:
            raise
        except BaseException as error:
            await connection.disconnect(nowait=True)
            if (instead := broken(error)) is not None:
                raise instead from error
            raise
        finally:
            await self._give_back(node.server, connection)

    async def send_all(self, node: Node, batch: Sequence[Request], seconds: float) -> list[Any]:
        return await within(seconds, self._all_through_gate(node, batch))

    async def _all_through_gate(self, node: Node, batch: Sequence[Request]) -> list[Any]:
        await node.gate.enter()
        try:
            return await self._send_all(node, batch)
        finally:
            node.gate.leave()

    async def _send_all(self, node: Node, batch: Sequence[Request]) -> list[Any]:
        connection = await self._take(node.server)
        try:
            await connection.send_packed_command(b"".join([requests.pack(request) for request in batch]))
            replies: list[Any] = []
            for _ in batch:
                try:
                    replies.append(await connection.read_response(disable_decoding=True))
                except ResponseError as error:
                    replies.append(error)
            return replies
        except BaseException as error:
            await connection.disconnect(nowait=True)
            if (instead := broken(error)) is not None:
                raise instead from error
            raise
        finally:
            await self._give_back(node.server, connection)

    def post(self, key: bytes, request: Callable[[SessionState], Request]) -> Posted:
        task = self.loop.create_task(self._ask(key, request))
        # An answer that nobody waits for any more may be an error; asyncio would complain that nobody looked at it.
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        return Posted(task)

    async def _ask(self, key: bytes, request: Callable[[SessionState], Request]) -> Reply:
        limit = self.limit or flows.PATIENCE
        found = self.find(key, None, limit)
        node = found if isinstance(found, Node) else await found
        value, sent = await self.send(node, request(node.session), limit)
        return Reply(value, node.session, sent > 1)

    async def collect(self, posted: Posted, seconds: float) -> Reply:
        done, _ = await asyncio.wait({posted.task}, timeout=seconds)
        if not done:
            posted.task.cancel()
            raise TimeoutError(f"no answer within {seconds:.3f} s")
        return posted.task.result()

    def drop(self, posted: Posted) -> None:
        posted.task.cancel()

    async def disconnect(self) -> None:
        await heeded(self._client().disconnect(inuse_connections=False))

    async def learn(self, error: Exception, seconds: float) -> bool:
        return False

    async def outcome(self, hold: Waitable, seconds: float) -> None:
        future: asyncio.Future[None] = self.loop.create_future()

        def wake() -> None:
            if not future.done():
                future.set_result(None)

        if not hold.wait(wake):
            return
        timer = None if seconds == FOREVER else self.loop.call_later(max(0, seconds), wake)
        try:
            await future
        finally:
            if timer is not None:
                timer.cancel()

    async def pause(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    def end(self, session: SessionState) -> None:
        session.ended = True
        if isinstance(session, Session) and session.reader is not None:
            session.reader.cancel()

    def start(self, hold: Hold | None, flow: Flow[None]) -> None:
        """Runs a flow in a task."""
        if self.loop.is_closed():
            flow.close()
            return
        task = self.loop.create_task(self._quietly(flow))
        self._background[task] = hold
        task.add_done_callback(lambda done: self._background.pop(done, None))

    def taking_back(self, hold: Hold) -> list[asyncio.Task[None]]:
        """What takes it back in the background."""
        return [task for task, given_up in self._background.items() if given_up is hold]

    def close(self) -> None:
        """Ends every session: the client is gone. From whatever thread."""
        self.closed = True
        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(self.end_all)

    def end_all(self) -> list[asyncio.Task[None]]:
        """Ends every session. Those who read them."""
        self.closed = True
        for session in self._sessions.values():
            self.end(session)
        return [session.reader for session in self._sessions.values() if session.reader is not None]

    def forget(self) -> None:
        """This is the child of a fork: everything belongs to the parent."""
        self.closed = True
        self.book.forget()
        for session in self._sessions.values():
            session.ended = True
            session.let_go()

    def _client(self) -> Any:
        anchor = self._anchor()
        if anchor is None:
            raise ReferenceError("the client of this lock is gone")
        if self.closed:
            raise LockError("the session of this lock was closed")
        return anchor

    async def _with_session(self, name: str, server: Any, seconds: float, *, asking: bool) -> Node:
        session = self._sessions.get(name)
        if session is None or session.ended:
            task = self._opening.get(name)
            if task is None:
                task = self._opening[name] = self.loop.create_task(self._open(name, server))
                task.add_done_callback(lambda done: self._opened(name, done))
            # Others may need it who are not cancelled, and have more time.
            done, _ = await asyncio.wait({task}, timeout=max(seconds, 0))
            if not done:
                raise TimeoutError(f"no session within {seconds:.3f} s")
            session = task.result()
        return Node(server, session, self._gates[name], asking)

    def _opened(self, name: str, task: asyncio.Task[Session]) -> None:
        del self._opening[name]
        if not task.cancelled() and task.exception() is not None:
            logger.debug("a session did not open: %s", task.exception())

    async def _open(self, name: str, server: Any) -> Session:
        session = Session(server, cluster=isinstance(self, ClusterHome), limit=self.limit)
        await session.open(self._ids[name])
        self._sessions[name] = session
        reader: Any = self.loop.create_task(self._read(session))
        # A loop that is closed without ending its tasks has nothing to lose here, and is not to be told that it has.
        reader._log_destroy_pending = False
        session.reader = reader
        # A task that is cancelled before it has begun does nothing, and would leave the connection open.
        reader.add_done_callback(lambda _: session.drop())
        return session

    async def _read(self, session: Session) -> None:
        try:
            while not session.ended:
                moved = self.book.tell(session, await heeded(session.next_events()))
                if moved:
                    self.start(None, flows.carry(self, session, moved))
        except asyncio.CancelledError:
            # By us, or because the loop ends.
            logger.debug("session %r is not read any more", session.id)
        except (RedisError, OSError) as error:
            logger.debug("session %r ended: %s", session.id, error)
        except Exception:
            # Whatever it is, the session ends, and everybody hears of that.
            logger.exception("session %r ended", session.id)
        await session.close()
        if self.closed:
            return
        holds = self.book.session_ended(session)
        if holds:
            self.start(None, flows.carry(self, session, holds))

    async def _quietly(self, flow: Flow[None]) -> None:
        try:
            await run(flow)
        except ReferenceError:
            logger.debug("the client ended while something was done in the background")
        except LockError as error:
            logger.debug("not taken back: %s", error)
        except RedisError as error:
            logger.warning("what was given up may live on until its lease runs out: %s", error)

    async def _take(self, server: Any) -> Any:
        return await server.get_connection(*POOL_ARGUMENTS)

    async def _give_back(self, server: Any, connection: Any) -> None:
        await server.release(connection)


class BoundedHome(Home):
    """Sessions, waits and holds at one server of several, which must not keep the others waiting."""

    def __init__(self, anchor: Any, limit: float) -> None:
        super().__init__(anchor)
        self.limit = limit


class ClusterHome(Home):
    """Sessions, waits and holds of a cluster's client."""

    async def find(self, key: bytes, redirection: AskError | None, seconds: float) -> Node:
        until = now() + seconds
        cluster = self._client()
        # Whether there is anything to do; redis-py asks itself the same.
        if getattr(cluster, "_initialize", True):
            await within(seconds, cluster.initialize())
        node = None
        if redirection is not None:
            node = cluster.get_node(host=redirection.host, port=redirection.port)
        if node is None:
            node = cluster.get_node_from_key(key)
        left = until - now()
        return await self._with_session(node.name, node, left, asking=redirection is not None)

    async def learn(self, error: Exception, seconds: float) -> bool:
        manager = self._client().nodes_manager
        if isinstance(error, MovedError) and hasattr(manager, "move_slot"):
            await within(seconds, manager.move_slot(error))
        else:
            try:
                await within(seconds, manager.initialize())
            except (RedisClusterException, TimeoutError) as failed:
                # Also when redis-py before version 8 closed the connection under it, for another one who looks.
                logger.debug("who serves what was not to be learned: %s", failed)
        return True

    async def _take(self, server: Any) -> Any:
        connection = server.acquire_connection()
        try:
            if not connection.is_connected:
                await connection.connect()
        except BaseException:
            await self._give_back(server, connection)
            raise
        return connection

    async def _give_back(self, server: Any, connection: Any) -> None:
        if hasattr(server, "release"):
            server.release(connection)
        else:
            # redis-py before 5.3 gives them back in no other way.
            server._free.append(connection)


# Of each client's pool, those by their limits.
_homes: weakref.WeakKeyDictionary[Any, dict[float | None, Home]] = weakref.WeakKeyDictionary()


def home_of(client: Any, limit: float | None = None) -> Home:
    """The home of a client in this event loop; of those who share a pool, the same. See that for threads."""
    cluster = isinstance(client, RedisCluster)
    anchor = client if cluster else client.connection_pool
    home = _homes.get(anchor, {}).get(limit)
    if home is None or home.closed or home.loop is not asyncio.get_running_loop():
        home = ClusterHome(anchor) if cluster else Home(anchor) if limit is None else BoundedHome(anchor, limit)
        _homes.setdefault(anchor, {})[limit] = home
        end: Any = weakref.finalize(anchor, home.close)
        end.atexit = False
    return home


async def close(client: Any) -> None:
    """Closes what a client has in this loop."""
    anchor = client if isinstance(client, RedisCluster) else client.connection_pool
    loop = asyncio.get_running_loop()
    homes = [home for home in _homes.get(anchor, {}).values() if home.loop is loop]
    for home in homes:
        await run(flows.close(home))
        readers = home.end_all()
        if readers:
            await asyncio.wait(readers)


# Of each task, a number that no other one has.
_actors: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
_numbers = itertools.count(1)


def actor() -> int:
    """The number of this task."""
    task = asyncio.current_task()
    number = _actors.get(task)
    if number is None:
        number = _actors[task] = next(_numbers)
    return number


def fits(client: Any) -> None:
    """Raises TypeError for a blocking client."""
    if isinstance(client, (redis.Redis, redis.RedisCluster)):
        raise TypeError(f"client must be one of redis.asyncio; for the blocking {client!r} there is holdfast itself")


def keep(held: Held) -> None:
    """Sees to it that what is held is given back when nobody can reach it any more."""
    end: Any = weakref.finalize(held, _let_go, asyncio.get_running_loop(), OWNERS.process, held.holds)
    end.atexit = False


def _let_go(loop: asyncio.AbstractEventLoop, process: bytes, holds: list[Hold]) -> None:
    # Whatever is collected in the child of a fork was its parent's.
    if process is OWNERS.process and any(hold.held for hold in holds):
        with contextlib.suppress(RuntimeError):
            # The loop may be closed.
            loop.call_soon_threadsafe(flows.abandon, holds)


async def settled(parts: Iterable[Part]) -> None:
    """Returns when what was given up has been taken back, or takes long."""
    tasks = [task for home, hold in parts for task in cast(Home, home).taking_back(hold)]
    if tasks:
        await asyncio.wait(tasks, timeout=_CANCEL_WAIT)


def alarm(hold: Hold) -> Callable[[float], object]:
    """Sees to it that a hold lapses in time, by a timer of the loop."""
    loop = asyncio.get_running_loop()
    timer: asyncio.TimerHandle | None = None

    def at(deadline: float) -> None:
        nonlocal timer
        if timer is not None:
            timer.cancel()
            timer = None
        if deadline != FOREVER:
            timer = loop.call_later(max(0, min(deadline - now(), LOOK_AGAIN)), hold.lapse)

    return at


# Those under way: the loop itself would let go of them.
_calls: set[asyncio.Task[None]] = set()


def call(listener: Callable[[LockLost], object], error: LockLost) -> None:
    """Calls somebody who wants to hear of a loss, in a task of its own."""
    task = asyncio.get_running_loop().create_task(_call(listener, error))
    _calls.add(task)
    task.add_done_callback(_calls.discard)


async def _call(listener: Callable[[LockLost], object], error: LockLost) -> None:
    try:
        result = listener(error)
        if inspect.isawaitable(result):
            await result
    except (asyncio.CancelledError, KeyboardInterrupt):
        raise
    except BaseException:
        # Also sys.exit(), which would end the loop.
        logger.exception("on_lost failed, which was told: %s", error)


def _after_fork() -> None:
    """In the child: starts afresh."""
    homes = [home for homes in _homes.values() for home in homes.values()]
    _homes.clear()
    for home in homes:
        home.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)

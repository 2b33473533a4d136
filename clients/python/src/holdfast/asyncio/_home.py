"""The I/O of an asyncio client: connections that tell the core what arrives, in the loop, without a task in between."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import itertools
import logging
import weakref
from collections.abc import Coroutine
from typing import Any, Callable, TypeVar, cast

import redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError, RedisError

from .. import _flow as flows
from .._clock import LOOK_AGAIN, millis, now
from .._core.core import Core
from .._core.step import Outcome
from .._flow import Flow
from .._hold import Hold
from .._line import Line
from .._lock import Held
from .._owners import OWNERS
from .._redis import is_final, own_settings
from .._shell import PATIENCE, Homes, Link, Node, Pending, Waiter
from .._shell import Home as Shared
from ..errors import LockLost

logger = logging.getLogger("holdfast")

T = TypeVar("T")

# How long a cancelled acquire waits for what it takes back. After that it goes on in the background.
_CANCEL_WAIT = 0.1
# For how many milliseconds kept locks are taken without a turn of the loop.
_TURN = 5


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


class Wire(asyncio.Protocol):
    """One connection: redis-py's, of which only the transport is used once it is there."""

    def __init__(self, home: Home, node: Node, pair: int, channel: str, connection: Any) -> None:
        self._home, self._node, self._pair, self._channel = home, node, pair, channel
        self._connection = connection
        # redis-py has no other way to it.
        self.transport: asyncio.Transport = connection._writer.transport
        self.out = bytearray()

    def begin(self) -> None:
        """From now on what arrives is told to the core."""
        self.transport.set_protocol(self)
        # Whoever reads streams may have asked for a pause.
        with contextlib.suppress(RuntimeError):
            self.transport.resume_reading()

    def data_received(self, data: bytes) -> None:
        if not self._home.closed_by_loop:
            self._home.step(self._node, Core.received, self._pair, self._channel, bytes(data))

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, error: Exception | None) -> None:
        self._home.lost(self._node, self._pair, error)

    def flush(self) -> None:
        """Sends what there is."""
        if not self.transport.is_closing():
            self.transport.write(bytes(self.out))
        self.out.clear()

    def close(self) -> None:
        """Closes it, without waiting for it."""
        # A loop that is closed takes no more calls: then the socket goes with the transport.
        with contextlib.suppress(RuntimeError):
            self.transport.abort()
        # What redis-py would close, too.
        self._connection._reader = self._connection._writer = None

    @property
    def descriptor(self) -> int:
        """Negative: it is closed."""
        one = self.transport.get_extra_info("socket")
        return -1 if one is None else int(one.fileno())


class Home(Shared):
    """Connections, waits and holds of one pool in one event loop. Keeps no reference to the pool."""

    def __init__(self, anchor: Any, limit: float | None) -> None:
        super().__init__(anchor)
        self.limit = limit
        self.loop = asyncio.get_running_loop()
        self.closed_by_loop = False
        self._timers: dict[Any, asyncio.TimerHandle] = {}
        self._background: set[asyncio.Task[None]] = set()
        self._openings: dict[Node, asyncio.Task[None]] = {}
        self._keeper: asyncio.Task[None] | None = None
        self._settled = asyncio.Event()
        # How many wait for it.
        self._settles = 0
        # Since when the loop is to turn once more, if it is.
        self._turns_since: int | None = None

    # What flows ask for.

    def find(self, key: bytes) -> Any:
        if not self._in_cluster:
            return self.node(None)
        return self._find(key)

    async def _find(self, key: bytes) -> Node:
        # Whether there is anything to do; redis-py asks itself the same.
        if getattr(self.anchor, "_initialize", True):
            await self._apart(self.anchor.initialize())
        try:
            return self.node(self.address_of(key))
        except RedisError:
            await self._apart(self._know())
            return self.node(self.address_of(key))

    async def _apart(self, step: Coroutine[Any, Any, Any]) -> None:
        """A step of redis-py's, in a task of its own: before Python 3.12, it could forget that it is cancelled."""
        task = self._task(step)
        await asyncio.wait({task})
        task.result()

    def begin(self, pending: Pending, what: Callable[..., None], *said: Any) -> None:
        self.calls[pending.id] = pending
        self.step(pending.node, what, pending.id, *said)
        if self._keeper is None:
            self._keeper = self._task(self._keep())

    async def wait(self, pending: Pending, seconds: float | None) -> Outcome | None:
        """Waits for the outcome."""
        await self.wait_for(pending, seconds)
        return pending.outcome

    async def wait_for(self, waiter: Waiter, seconds: float | None) -> None:
        if waiter.outcome is not None:
            return
        future: asyncio.Future[None] = self.loop.create_future()

        def wake() -> None:
            if not future.done():
                future.set_result(None)

        waiter.wake = wake
        timer = None if seconds is None else self.loop.call_later(seconds, wake)
        try:
            await future
        finally:
            if timer is not None:
                timer.cancel()

    async def pause(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    def drop(self, node: Node, call: int) -> None:
        self.calls.pop(call, None)
        self.holds.pop(call, None)
        if not self.closed_by_loop:
            self.step(node, Core.drop, call)

    def leave(self, line: Line, hold: Hold) -> None:
        if not self.closed_by_loop:
            line.done(hold)

    async def let_others(self) -> None:
        """Lets the loop turn, if it has not for long: who takes what is at hand again and again waits for nothing.

        Other tasks have their turns then, and other processes are heard who want it.
        """
        if self._turns_since is None:
            self._turns_since = millis()
            self.loop.call_soon(self._turned)
        elif millis() - self._turns_since >= _TURN:
            await asyncio.sleep(0)

    def _turned(self) -> None:
        self._turns_since = None

    def start(self, flow: Flow[None]) -> None:
        """Runs a flow in a task."""

        async def background() -> None:
            try:
                await run(flow)
            except (ReferenceError, RedisError) as error:
                logger.debug("something in the background ended: %s", error)

        self._task(background())

    def _task(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task: Any = self.loop.create_task(work)
        # Whoever closes the loop before its end has no need to hear of it.
        task._log_destroy_pending = False
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return cast("asyncio.Task[None]", task)

    # Connections and timers.

    def _open(self, node: Node, pair: int) -> None:
        if self.loop.is_closed():
            return
        self._openings[node] = self._task(self._connect(node, pair))

    async def _connect(self, node: Node, pair: int) -> None:
        link, failure, connections = None, None, []
        retry: Any = None
        try:
            if self._in_cluster and self._in_doubt:
                await self._know()
            connection_class, settings = self.settings_of(node.address)
            retry = settings.get("retry")
            own = own_settings(settings, Retry(NoBackoff(), 0), cluster=self._in_cluster, limit=self.limit)
            for _ in range(2):
                connections.append(connection_class(**own))
                await connections[-1].connect()
            # Nobody hears any more of an end that has come by now.
            if any(one._reader.at_eof() or one._writer.is_closing() for one in connections):
                raise ConnectionError("Connection closed by server.")
            channels = zip(("session", "requests"), connections)
            link = Link(pair, *(Wire(self, node, pair, channel, one) for channel, one in channels))
        except BaseException as error:
            for one in connections:
                if one._writer is not None:
                    one._writer.transport.abort()
                    one._reader = one._writer = None
            if isinstance(error, asyncio.CancelledError) and node.opening == pair:
                self._end_with_loop()
                raise
            failure = error if isinstance(error, Exception) else ConnectionError(f"no connection: {error!r}")
        if link is not None:
            for wire in link.wires.values():
                wire.begin()
        final = failure is not None and is_final(retry, node.failures + 1, failure)
        self.connected(node, pair, link, failure, is_final=final)

    async def _know(self) -> None:
        """Asks who serves what."""
        self._in_doubt = False
        try:
            await self.anchor.nodes_manager.initialize()
        except (RedisError, OSError) as error:
            self._in_doubt = True
            logger.debug("who serves what was not to be learned: %s", error)

    def lost(self, node: Node, pair: int, error: Exception | None) -> None:
        """A connection has ended."""
        if node.link is not None and node.link.pair == pair and not self.closed_by_loop:
            self.broken(node, pair, None if error is None else ConnectionError(f"the connection broke: {error}"))

    def step(self, node: Node, what: Callable[..., None], *said: Any) -> None:
        super().step(node, what, *said)
        if self._settles and self.is_settled:
            self._settled.set()
        if self.closed and all(one.core.has_ended for one in self.nodes.values()) and self._keeper is not None:
            self._keeper.cancel()

    def _set_timer(self, node: Node) -> None:
        """One that is too early does no harm, and is set once more."""
        at, timer = node.core.wakes_at, self._timers.get(node)
        if at is None or self.loop.is_closed():
            return
        when = self.loop.time() + min(max(at / 1000 - now(), 0), LOOK_AGAIN)
        if timer is None or timer.when() > when:
            if timer is not None:
                timer.cancel()
            self._timers[node] = self.loop.call_at(when, self._due, node)

    def call_at(self, at: int, call: Callable[[], object]) -> None:
        if self.closed_by_loop or self.loop.is_closed():
            return
        wait = max(at / 1000 - now(), 0)
        if wait > LOOK_AGAIN:
            self.loop.call_later(LOOK_AGAIN, self.call_at, at, call)
        else:
            # Behind what has arrived by then.
            self.loop.call_later(wait, self.loop.call_soon, call)

    def _due(self, node: Node) -> None:
        del self._timers[node]
        at = node.core.wakes_at
        if at is not None and at <= millis():
            # It comes last: the loop has looked for what has arrived before this runs.
            self._timers[node] = self.loop.call_later(0, self._wake, node)
        else:
            self._set_timer(node)

    def _wake(self, node: Node) -> None:
        del self._timers[node]
        if not self.closed_by_loop:
            self.step(node, Core.wake)

    @property
    def is_usable(self) -> bool:
        return not self.closed and self.loop is asyncio.get_running_loop()

    @property
    def is_over(self) -> bool:
        return self.closed or self.loop.is_closed()

    async def settle(self) -> None:
        """Returns when what was given up has been taken back, or takes long."""
        if not self.is_settled:
            self._settled.clear()
            self._settles += 1
            timer = self.loop.call_later(_CANCEL_WAIT, self._settled.set)
            try:
                await self._settled.wait()
            finally:
                self._settles -= 1
                timer.cancel()

    # Its end.

    async def _keep(self) -> None:
        """Hears when the loop ends, which cancels all its tasks."""
        try:
            await asyncio.Event().wait()
        finally:
            self._end_with_loop()

    def _end_with_loop(self) -> None:
        self.closed = self.closed_by_loop = True
        if not self.loop.is_closed():
            # What is sent here goes out at once.
            self.clear_lines()
        for hold in list(self.holds.values()):
            hold.lose("disconnected")
        self.holds.clear()
        for timer in self._timers.values():
            timer.cancel()
        for node in self.nodes.values():
            link, node.link, node.opening = node.link, None, None
            if link is not None:
                link.close()
        for pending in list(self.calls.values()):
            pending.outcome = Outcome("closed")
            pending.wake()
        if not self.loop.is_closed():
            self.end_lines()
            for task in list(self._background):
                task.cancel()

    async def close(self) -> None:
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
            await self.wait(call, None)
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.wait([self._keeper])

    def end(self) -> None:
        """The client is gone: the same in the background."""

        def end() -> None:
            if not self.closed_by_loop:
                self.closed = True
                for node in list(self.nodes.values()):
                    self.step(node, Core.close, OWNERS.number(), PATIENCE)

        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(end)

    def forget(self) -> None:
        """This is the child of a fork: everything belongs to the parent."""
        self.closed = self.closed_by_loop = True
        for node in self.nodes.values():
            if node.link is not None:
                node.link.let_go()


_homes = Homes(Home)
home_of = _homes.of


async def close(client: Any) -> None:
    """Closes what a client has in this loop."""
    for home in _homes.those_of(client):
        await home.close()


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


def _let_go(loop: asyncio.AbstractEventLoop, process: bytes, holds: list[Any]) -> None:
    # Whatever is collected in the child of a fork was its parent's.
    if process is OWNERS.process and any(hold.held for hold in holds):
        with contextlib.suppress(RuntimeError):
            # The loop may be closed.
            loop.call_soon_threadsafe(flows.abandon, holds)


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

"""The I/O of both flavours: connections, events, threads and tasks. It decides nothing.

The client is written once, as coroutines that await only what is in this module. With threads, all of it blocks instead
of suspending, so `run` executes such a coroutine in one step.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, ClassVar, TypeVar

import redis
import redis.asyncio
import redis.connection
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, BusyLoadingError, ConnectionError, ResponseError, TimeoutError
from redis.retry import Retry

from ._rules import Silence, now

logger = logging.getLogger("holdfast")
T = TypeVar("T")
Address = tuple[str, int]
Work = Callable[[], Coroutine[Any, Any, Any]]

# How long it may take to connect and to log in, in seconds.
HANDSHAKE = 5.0
_ERROR_REPLIES = (ResponseError, BusyLoadingError, AuthenticationError)
# Settings of redis-py's pools that connections do not take, or that make them repeat requests.
_OF_THE_POOL = """event_dispatcher maint_notifications_config maint_notifications_pool_handler response_callbacks
    oss_cluster_maint_notifications_handler retry_on_error retry_on_timeout cache cache_config"""


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine that never suspends."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        result: T = done.value
        return result
    raise RuntimeError("a coroutine was suspended that should block")


async def _quietly(work: Work) -> None:
    try:
        await work()
    except Exception as error:
        logger.warning("work in the background failed, a lock may stay held until its lease ends: %s", error)


class _Line:
    """A connection with one pipeline under way at a time."""

    def __init__(self, raw: Any) -> None:
        self.raw = raw
        # No reply was read yet. If it breaks, the reason is not that it was idle for too long.
        self.is_fresh = True
        self.is_closed = False
        # It must not be used again.
        self.is_spent = False

    def _error(self, error: Exception) -> Exception:
        """Takes an error reply. redis-py keeps one that is no ResponseError in its buffer, and would read it again."""
        self.is_spent = self.is_spent or not isinstance(error, ResponseError)
        return error


class ThreadLine(_Line):
    """With threads: the calling thread writes and reads."""

    def start(self, payload: bytes, count: int) -> None:
        """Takes a pipeline, which `wait` sends."""
        self._payload, self._count = payload, count
        self._replies: list[Any] = []

    async def wait(self, seconds: float) -> list[Any]:
        """Returns the replies, with errors as elements. Raises Silence if not all came in time; call it again then."""
        end = now() + seconds
        try:
            while len(self._replies) < self._count:
                if self.is_closed:
                    # redis-py would connect anew.
                    raise ConnectionError("this connection is closed")
                payload, self._payload = self._payload, b""
                if payload:
                    self.raw.send_packed_command([payload])
                if not self.raw.can_read(max(end - now(), 0.0)):
                    raise Silence("no reply in time")
                # redis-py keeps a part of a reply. A timeout of 0 would make the socket non-blocking.
                self.raw._sock.settimeout(max(end - now(), 0.01))
                try:
                    self._replies.append(self.raw.read_response(disable_decoding=True, disconnect_on_error=False))
                except _ERROR_REPLIES as error:
                    self._replies.append(self._error(error))
                except TimeoutError as error:
                    raise Silence("no whole reply in time") from error
                self.raw._sock.settimeout(self.raw.socket_timeout)
        except (AttributeError, TypeError, ValueError) as error:
            # redis-py raises these if another thread has closed the connection.
            raise ConnectionError("this connection is closed") from error
        self.is_fresh = False
        return self._replies

    def close(self) -> None:
        """Closes the connection. A thread that is reading from it gets an error."""
        self.is_closed = True
        with contextlib.suppress(Exception):
            self.raw.disconnect()


class TaskLine(_Line):
    """With asyncio: a task of its own reads, so that a reply is read to its end even if the caller is cancelled."""

    _task: asyncio.Task[list[Any]] | None = None
    # Kept for `ended`: redis-py drops it when it closes the connection.
    _writer: asyncio.StreamWriter | None = None

    def start(self, payload: bytes, count: int) -> None:
        """Sends a pipeline."""
        self._task = asyncio.get_running_loop().create_task(self._exchange(payload, count))

    async def _exchange(self, payload: bytes, count: int) -> list[Any]:
        await self.raw.send_packed_command([payload])
        replies: list[Any] = []
        while len(replies) < count:
            try:
                replies.append(await self.raw.read_response(disable_decoding=True, disconnect_on_error=False))
            except _ERROR_REPLIES as error:
                replies.append(self._error(error))
        self.is_fresh = False
        return replies

    async def wait(self, seconds: float) -> list[Any]:
        """Returns the replies, with errors as elements. Raises Silence if not all came in time; call it again then."""
        assert self._task is not None  # noqa: S101
        if not self._task.done():
            await asyncio.wait((self._task,), timeout=max(seconds, 0.0))
        if not self._task.done():
            raise Silence("no reply in time")
        if self._task.cancelled():
            raise ConnectionError("this connection is closed")
        return self._task.result()

    def close(self) -> None:
        """Closes the connection. A task that waits for a reply gets an error."""
        if self._task is not None:
            self._task.cancel()
            # asyncio logs an error that is never fetched.
            self._task.add_done_callback(lambda task: task.cancelled() or task.exception())
        self._writer = self._writer or getattr(self.raw, "_writer", None)
        # `_disconnect` never suspends. A task could be cancelled before it starts, as asyncio.run does at its end.
        with contextlib.suppress(StopIteration):
            _disconnect(self.raw).send(None)

    async def ended(self) -> None:
        """Waits until a closed connection has ended."""
        if self._writer is not None:
            with contextlib.suppress(Exception):
                await self._writer.wait_closed()


async def _disconnect(raw: Any) -> None:
    with contextlib.suppress(Exception):
        await raw.disconnect(nowait=True)


class Threads:
    """Threads: events are those of `threading`, and everything blocks."""

    # The clients of redis-py whose connections it can open.
    clients = (redis.Redis, redis.RedisCluster)
    event = staticmethod(threading.Event)
    # What a callback of the application may raise without ending the thread of the client that called it.
    callback_errors = (Exception, SystemExit)

    async def wait(self, event: threading.Event, seconds: float | None) -> bool:
        """Waits for an event. Returns whether it was set in time."""
        return event.wait(seconds)

    async def sleep(self, seconds: float) -> None:
        """Sleeps."""
        time.sleep(max(seconds, 0.0))

    def spawn(self, work: Work) -> bool:
        """Starts `work` in the background. Returns False if no thread can be started."""
        try:
            threading.Thread(target=lambda: run(_quietly(work)), name="holdfast", daemon=True).start()
        except RuntimeError:
            return False
        return True

    async def background(self, work: Work) -> None:
        """Runs `work` in the background, or in this thread if no other one can be started."""
        if not self.spawn(work):
            await _quietly(work)

    async def gather(self, works: Sequence[Work]) -> list[Any]:
        """Runs all at the same time. Returns the results, with errors as elements."""
        futures: list[concurrent.futures.Future[Any]] = [concurrent.futures.Future() for _ in works]

        def work(future: concurrent.futures.Future[Any], make: Work) -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(run(make()))
                except BaseException as error:
                    future.set_exception(error)

        try:
            for of_work in zip(futures, works, strict=True):
                try:
                    threading.Thread(target=work, args=of_work, name="holdfast", daemon=True).start()
                except RuntimeError:
                    # No thread can be started, as at the end of a program.
                    work(*of_work)
            concurrent.futures.wait(futures)
        finally:
            # Even if this thread is interrupted, no work starts or goes on after the return: the caller cleans up.
            concurrent.futures.wait([future for future in futures if not future.cancel()])
        return [future.exception() or future.result() for future in futures]

    async def end(self, attempts: Sequence[int], lines: Sequence[ThreadLine], seconds: float) -> None:
        """Does nothing: closed connections have ended, and an attempt to connect finds its pool closed."""

    def is_cancelled(self) -> bool:
        """Whether the caller is cancelled. A thread never is."""
        return False

    def me(self) -> int:
        """The calling thread, as threading.RLock identifies it."""
        return threading.get_ident()

    async def open(self, source: Source, address: Address | None) -> ThreadLine:
        """Opens a connection."""
        raw = source.connection(address, Retry(NoBackoff(), 0))
        try:
            raw.connect()
        except BaseException:
            raw.disconnect()
            raise
        return ThreadLine(raw)


class Tasks:
    """Tasks of the running event loop: events are those of asyncio."""

    # The clients of redis-py whose connections it can open.
    clients = (redis.asyncio.Redis, redis.asyncio.RedisCluster)
    event = staticmethod(asyncio.Event)
    # An event loop has only weak references to its tasks.
    _tasks: ClassVar[set[asyncio.Task[Any]]] = set()
    # What a callback may raise without ending the task of the client that called it. SystemExit ends the loop.
    callback_errors = (Exception, asyncio.CancelledError)

    async def wait(self, event: asyncio.Event, seconds: float | None) -> bool:
        """Waits for an event. Returns whether it was set in time."""
        if not event.is_set():
            task = asyncio.get_running_loop().create_task(event.wait())
            try:
                await asyncio.wait((task,), timeout=seconds)
            finally:
                task.cancel()
        return event.is_set()

    async def sleep(self, seconds: float) -> None:
        """Sleeps."""
        await asyncio.sleep(seconds)

    def spawn(self, work: Work) -> bool:
        """Starts `work` in the background."""
        task = asyncio.get_running_loop().create_task(_quietly(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return True

    async def background(self, work: Work) -> None:
        """Starts `work` in the background."""
        self.spawn(work)

    async def gather(self, works: Sequence[Work]) -> list[Any]:
        """Runs all at the same time. Returns the results, with errors as elements."""
        return list(await asyncio.gather(*(work() for work in works), return_exceptions=True))

    async def end(self, attempts: Sequence[asyncio.Task[Any]], lines: Sequence[TaskLine], seconds: float) -> None:
        """Cancels attempts to connect, and waits until closed connections have ended: with TLS, a round trip later."""
        loop = asyncio.get_running_loop()
        ends: list[asyncio.Task[Any]] = [loop.create_task(line.ended()) for line in lines]
        for task in attempts:
            # An attempt of another loop has ended with that loop.
            if task.get_loop() is loop:
                task.cancel()
                ends.append(task)
        if ends:
            await asyncio.wait(ends, timeout=seconds)
        for task in ends:
            task.cancel()
        # The loop ends the connection of an attempt in its next iteration.
        await asyncio.sleep(0)

    def is_cancelled(self) -> bool:
        """Whether the calling task itself is cancelled, not only what it awaits. Python 3.10 can't tell: True."""
        return bool(getattr(asyncio.current_task(), "cancelling", lambda: 1)())

    def me(self) -> Any:
        """The calling task. Not its id, which a later task may get."""
        return asyncio.current_task()

    async def open(self, source: Source, address: Address | None) -> TaskLine:
        """Opens a connection."""
        raw = source.connection(address, AsyncRetry(NoBackoff(), 0))
        try:
            await asyncio.wait_for(raw.connect(), HANDSHAKE)
        except BaseException:
            await _disconnect(raw)
            raise
        # From here on, only `wait` limits how long a reply may take.
        raw.socket_timeout = None
        return TaskLine(raw)


class Source:
    """Makes connections as the application's client of redis-py does, of either flavour."""

    def __init__(self, client: Any) -> None:
        self.is_cluster = hasattr(client, "nodes_manager")
        self._client = client

    def _nodes(self) -> list[Any]:
        """The nodes of a cluster: those that are known, and those that were configured."""
        manager = self._client.nodes_manager
        return [*manager.nodes_cache.values(), *manager.startup_nodes.values()]

    @property
    def addresses(self) -> list[Address]:
        """The addresses of the nodes of a cluster."""
        return list(dict.fromkeys((str(node.host), int(node.port)) for node in self._nodes()))

    @property
    def server_name(self) -> bytes:
        """The server's name, as it was configured, in RedLock's order of servers (docs/redlock.md)."""
        pool = self._client.connection_pool
        if hasattr(pool, "service_name"):
            return str(pool.service_name).encode()
        settings = pool.connection_kwargs
        return str(settings.get("path") or f"{settings.get('host', 'localhost')}:{settings.get('port', 6379)}").encode()

    def remap(self, address: Address) -> Address:
        """The address to use instead of this one, by the application's `address_remap`."""
        host, port = self._client.nodes_manager.remap_host_port(*address)
        return str(host), int(port)

    def connection(self, address: Address | None, no_retry: Any) -> Any:
        """Makes a connection that is not connected yet. redis-py only connects it and logs in (B5, B32)."""
        if self.is_cluster:
            pool = self._nodes()[0]
            if not hasattr(pool, "connection_class"):
                # With threads, a node has its settings in its client's pool; with asyncio, in itself.
                pool = self._client.get_redis_connection(pool).connection_pool
        else:
            pool = self._client.connection_pool
        settings = {name: value for name, value in pool.connection_kwargs.items() if name not in _OF_THE_POOL.split()}
        limit = min(settings.get("socket_connect_timeout") or HANDSHAKE, HANDSHAKE)
        settings.update(health_check_interval=0, protocol=2, socket_timeout=limit, retry=no_retry)
        # A connection over a unix socket does not take this setting.
        if "path" not in settings:
            settings["socket_connect_timeout"] = limit
        if self.is_cluster:
            # redis-py sends READONLY with it, to read from replicas.
            settings.pop("redis_connect_func", None)
        if address is not None:
            settings["host"], settings["port"] = address
        kind = pool.connection_class
        if isinstance(no_retry, Retry) and kind.__module__.startswith("redis.asyncio"):
            # A blocking connection for an asyncio client whose loop has ended, at the end of the program. It can't ask
            # the Sentinels: it goes to the primary that they named last.
            if (sentinel := settings.pop("connection_pool", None)) is not None:
                settings["host"], settings["port"] = sentinel.master_address
            kind = getattr(redis.connection, kind.__name__.removeprefix("SentinelManaged"))
        return kind(**settings)

"""The edge: connections, events, threads and tasks. Nothing here decides anything.

What the client does is written once, as coroutines that await nothing but what is here. With threads everything here
blocks, so such a coroutine runs to its end in one go (`run`).
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

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
# Settings that no connection has, or that make it repeat requests.
_OF_THE_POOL = """event_dispatcher maint_notifications_config maint_notifications_pool_handler response_callbacks
    oss_cluster_maint_notifications_handler retry_on_error retry_on_timeout cache cache_config"""


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine to its end that only awaits what blocks."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        result: T = done.value
        return result
    raise RuntimeError("a coroutine of the threads' flavour was suspended")


async def _quietly(work: Work) -> None:
    try:
        await work()
    except Exception as error:
        logger.warning("what was to be done in the background failed, a lock ends with its lease: %s", error)


class _Line:
    """A connection on which one pipeline at a time is under way."""

    def __init__(self, raw: Any) -> None:
        self.raw = raw
        # Nothing was received yet: if it breaks, it was not for having been idle.
        self.is_fresh = True
        self.is_closed = False
        self.is_spent = False

    def _error(self, error: Exception) -> Exception:
        """An error reply. One that is no ResponseError stays in redis-py's buffer: it would be read again."""
        self.is_spent = self.is_spent or not isinstance(error, ResponseError)
        return error


class ThreadLine(_Line):
    """With threads: the caller's thread writes and reads."""

    def start(self, payload: bytes, count: int) -> None:
        """A pipeline, which is sent when its replies are waited for."""
        self._payload, self._count = payload, count
        self._replies: list[Any] = []

    async def wait(self, seconds: float) -> list[Any]:
        """The replies, of which errors are elements. Raises Silence if they do not come in time: then call it again."""
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
                # Of a reply, only a part may have come, which redis-py keeps. 0 would mean not to wait at all.
                self.raw._sock.settimeout(max(end - now(), 0.01))
                try:
                    self._replies.append(self.raw.read_response(disable_decoding=True, disconnect_on_error=False))
                except _ERROR_REPLIES as error:
                    self._replies.append(self._error(error))
                except TimeoutError as error:
                    raise Silence("no whole reply in time") from error
                self.raw._sock.settimeout(self.raw.socket_timeout)
        except (AttributeError, TypeError, ValueError) as error:
            # redis-py's, if another thread has closed it.
            raise ConnectionError("this connection is closed") from error
        self.is_fresh = False
        return self._replies

    def close(self) -> None:
        """Also while another thread reads: that one gets an error."""
        self.is_closed = True
        with contextlib.suppress(Exception):
            self.raw.disconnect()


class TaskLine(_Line):
    """With asyncio: a task of its own reads, so that a cancelled caller leaves the reply to be read to its end."""

    _task: asyncio.Task[list[Any]] | None = None
    # redis-py forgets it when it closes the connection, and has no way to wait for its end afterwards.
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
        """The replies, of which errors are elements. Raises Silence if they do not come in time: then call it again."""
        assert self._task is not None  # noqa: S101
        if not self._task.done():
            await asyncio.wait((self._task,), timeout=max(seconds, 0.0))
        if not self._task.done():
            raise Silence("no reply in time")
        if self._task.cancelled():
            raise ConnectionError("this connection is closed")
        return self._task.result()

    def close(self) -> None:
        """A caller that waits gets an error."""
        if self._task is not None:
            self._task.cancel()
            # An error that was fetched is not logged.
            self._task.add_done_callback(lambda task: task.cancelled() or task.exception())
        self._writer = self._writer or getattr(self.raw, "_writer", None)
        # It awaits nothing. A task for it might be cancelled before it begins, as by asyncio.run at its end.
        with contextlib.suppress(StopIteration):
            _disconnect(self.raw).send(None)

    async def ended(self) -> None:
        """When it was closed: until that is done."""
        if self._writer is not None:
            with contextlib.suppress(Exception):
                await self._writer.wait_closed()


async def _disconnect(raw: Any) -> None:
    with contextlib.suppress(Exception):
        await raw.disconnect(nowait=True)


# A loop refers to its tasks weakly only.
_tasks: set[asyncio.Task[Any]] = set()


def _start(work: Work) -> None:
    task = asyncio.get_running_loop().create_task(_quietly(work))
    _tasks.add(task)
    task.add_done_callback(_tasks.discard)


class Threads:
    """Events are threading's, and everything blocks."""

    event = staticmethod(threading.Event)
    # What the application's code may raise without ending the client's thread that called it.
    callback_errors = (Exception, SystemExit)

    async def wait(self, event: threading.Event, seconds: float | None) -> bool:
        """Whether it was set in time."""
        return event.wait(seconds)

    async def sleep(self, seconds: float) -> None:
        """Does nothing for a while."""
        time.sleep(max(seconds, 0.0))

    def spawn(self, work: Work) -> bool:
        """Runs something in the background. False if there is no thread to be had."""
        try:
            threading.Thread(target=lambda: run(_quietly(work)), name="holdfast", daemon=True).start()
        except RuntimeError:
            return False
        return True

    async def background(self, work: Work) -> None:
        """Runs something in the background, or here if there is no thread to be had."""
        if not self.spawn(work):
            await _quietly(work)

    async def gather(self, works: Sequence[Work]) -> list[Any]:
        """The results of what runs at the same time, of which errors are elements."""
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
                    # There is no thread to be had, as at the end of a program.
                    work(*of_work)
            concurrent.futures.wait(futures)
        finally:
            # If this thread is interrupted, the caller still learns what they did: none goes on, and none begins.
            concurrent.futures.wait([future for future in futures if not future.cancel()])
        return [future.exception() or future.result() for future in futures]

    async def end(self, attempts: Sequence[int], lines: Sequence[ThreadLine], seconds: float) -> None:
        """Nothing: closed connections have ended, and attempts to connect find their pool closed."""

    def is_cancelled(self) -> bool:
        """Whether the caller is to end. Threads are not cancelled."""
        return False

    def me(self) -> int:
        """Who calls, as threading.RLock has it."""
        return threading.get_ident()

    async def open(self, source: Source, address: Address | None) -> ThreadLine:
        """A new connection."""
        raw = source.connection(address, Retry(NoBackoff(), 0))
        try:
            raw.connect()
        except BaseException:
            raw.disconnect()
            raise
        return ThreadLine(raw)


class Tasks:
    """Events are asyncio's; the background is tasks of the running loop."""

    event = staticmethod(asyncio.Event)
    # The same for tasks. SystemExit ends the loop.
    callback_errors = (Exception, asyncio.CancelledError)

    async def wait(self, event: asyncio.Event, seconds: float | None) -> bool:
        """Whether it was set in time."""
        if not event.is_set():
            task = asyncio.get_running_loop().create_task(event.wait())
            try:
                await asyncio.wait((task,), timeout=seconds)
            finally:
                task.cancel()
        return event.is_set()

    async def sleep(self, seconds: float) -> None:
        """Does nothing for a while."""
        await asyncio.sleep(seconds)

    def spawn(self, work: Work) -> bool:
        """Runs something in the background."""
        _start(work)
        return True

    async def background(self, work: Work) -> None:
        """The same."""
        _start(work)

    async def gather(self, works: Sequence[Work]) -> list[Any]:
        """The results of what runs at the same time, of which errors are elements."""
        return list(await asyncio.gather(*(work() for work in works), return_exceptions=True))

    async def end(self, attempts: Sequence[asyncio.Task[Any]], lines: Sequence[TaskLine], seconds: float) -> None:
        """Ends attempts to connect, and waits for the end of closed connections: with TLS it takes a round trip."""
        loop = asyncio.get_running_loop()
        ends: list[asyncio.Task[Any]] = [loop.create_task(line.ended()) for line in lines]
        for task in attempts:
            # Those of a loop that has ended have ended, too.
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
        """Whether the calling task is to end, not only what it awaits. Python 3.10 does not know: yes."""
        return bool(getattr(asyncio.current_task(), "cancelling", lambda: 1)())

    def me(self) -> Any:
        """Who calls. The object: its number is used again."""
        return asyncio.current_task()

    async def open(self, source: Source, address: Address | None) -> TaskLine:
        """A new connection."""
        raw = source.connection(address, AsyncRetry(NoBackoff(), 0))
        try:
            await asyncio.wait_for(raw.connect(), HANDSHAKE)
        except BaseException:
            await _disconnect(raw)
            raise
        # From here on the reader's own times count.
        raw.socket_timeout = None
        return TaskLine(raw)


class Source:
    """How the application's client opens its connections: redis-py's, of either flavour."""

    def __init__(self, client: Any) -> None:
        self.is_cluster = hasattr(client, "nodes_manager")
        if not (self.is_cluster or hasattr(client, "connection_pool")):
            raise TypeError(f"redis must be a client of redis-py, got {client!r}")
        self._client = client

    def _nodes(self) -> list[Any]:
        """Of a cluster: those that are known, and those that were configured."""
        manager = self._client.nodes_manager
        return [*manager.nodes_cache.values(), *manager.startup_nodes.values()]

    @property
    def addresses(self) -> list[Address]:
        """Of the nodes of a cluster."""
        return list(dict.fromkeys((str(node.host), int(node.port)) for node in self._nodes()))

    @property
    def server_name(self) -> bytes:
        """What a server is called in the order of servers (docs/redlock.md): as it was configured."""
        pool = self._client.connection_pool
        if hasattr(pool, "service_name"):
            return str(pool.service_name).encode()
        settings = pool.connection_kwargs
        return str(settings.get("path") or f"{settings.get('host', 'localhost')}:{settings.get('port', 6379)}").encode()

    def remap(self, address: Address) -> Address:
        """What the application says an address is to be replaced with."""
        host, port = self._client.nodes_manager.remap_host_port(*address)
        return str(host), int(port)

    def connection(self, address: Address | None, no_retry: Any) -> Any:
        """A connection that is not connected yet. The library only connects it and logs in (B5, B32)."""
        if self.is_cluster:
            pool = self._nodes()[0]
            if not hasattr(pool, "connection_class"):
                # With asyncio, a node is its pool.
                pool = self._client.get_redis_connection(pool).connection_pool
        else:
            pool = self._client.connection_pool
        settings = {name: value for name, value in pool.connection_kwargs.items() if name not in _OF_THE_POOL.split()}
        limit = min(settings.get("socket_connect_timeout") or HANDSHAKE, HANDSHAKE)
        settings.update(health_check_interval=0, protocol=2, socket_timeout=limit, retry=no_retry)
        # A socket with a path takes none.
        if "path" not in settings:
            settings["socket_connect_timeout"] = limit
        if self.is_cluster:
            # What redis-py has called only says READONLY, for reading from replicas.
            settings.pop("redis_connect_func", None)
        if address is not None:
            settings["host"], settings["port"] = address
        kind = pool.connection_class
        if isinstance(no_retry, Retry) and kind.__module__.startswith("redis.asyncio"):
            # At the end of a program whose loop has ended. The Sentinels cannot be asked: to the last primary.
            if (sentinel := settings.pop("connection_pool", None)) is not None:
                settings["host"], settings["port"] = sentinel.master_address
            kind = getattr(redis.connection, kind.__name__.removeprefix("SentinelManaged"))
        return kind(**settings)

"""The edge: connections, events, threads and tasks. Nothing here decides anything.

What the client does is written once, as coroutines that await nothing but what is here. With threads everything here
blocks, so such a coroutine runs to its end in one go (`run`).
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

import redis.connection
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, BusyLoadingError, ConnectionError, ResponseError
from redis.retry import Retry

from ._clock import now
from ._rules import Silence

logger = logging.getLogger("holdfast")
T = TypeVar("T")
Address = tuple[str, int]

HANDSHAKE = 5.0
"""How long it may take to connect and to log in, in seconds."""
_OF_THE_POOL = frozenset(
    (
        "event_dispatcher",
        "maint_notifications_config",
        "maint_notifications_pool_handler",
        "oss_cluster_maint_notifications_handler",
        "retry_on_error",
        "retry_on_timeout",
        "response_callbacks",
        "cache",
        "cache_config",
    )
)


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine to its end that only awaits what blocks."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        result: T = done.value
        return result
    raise RuntimeError("a coroutine of the threads' flavour was suspended")


class _Line:
    """A connection on which one pipeline at a time is under way."""

    def __init__(self, raw: Any, address: Address | None) -> None:
        self.raw = raw
        self.address = address
        self.is_fresh = True
        """Nothing was received yet: if it breaks, it was not for having been idle."""
        self.is_closed = False
        self.is_spent = False
        """redis-py would read the last reply again: it is good for nothing more."""


class ThreadLine(_Line):
    """With threads: the caller's thread reads."""

    def start(self, payload: bytes, replies: int) -> None:
        """Sends a pipeline."""
        self._left = replies
        self._replies: list[Any] = []
        self.raw.send_packed_command([payload])

    async def wait(self, seconds: float) -> list[Any]:
        """The replies, of which errors are elements. Raises Silence if they do not come in time: then call it again."""
        end = now() + seconds
        while self._left:
            if self.is_closed:
                # redis-py would connect anew.
                raise ConnectionError("this connection is closed")
            try:
                if not self.raw.can_read(max(end - now(), 0.0)):
                    raise Silence("no reply in time")
                self._replies.append(self.raw.read_response(disable_decoding=True, disconnect_on_error=False))
            except (AttributeError, TypeError, ValueError) as error:
                # redis-py's, if another thread has closed it.
                raise ConnectionError("this connection is closed") from error
            except ResponseError as error:
                self._replies.append(error)
            except (BusyLoadingError, AuthenticationError) as error:
                self.is_spent = True
                self._replies.extend([error] * self._left)
                break
            self._left -= 1
        self._left = 0
        self.is_fresh = False
        return self._replies

    def close(self) -> None:
        """Also while another thread reads: that one gets an error."""
        self.is_closed = True
        with contextlib.suppress(Exception):
            self.raw.disconnect()


class TaskLine(_Line):
    """With asyncio: a task of its own reads, so that a cancelled caller leaves the reply to be read to its end."""

    _task: asyncio.Task[list[Any]]

    def start(self, payload: bytes, replies: int) -> None:
        """Sends a pipeline."""
        self._task = asyncio.get_running_loop().create_task(self._exchange(payload, replies))

    async def _exchange(self, payload: bytes, replies: int) -> list[Any]:
        await self.raw.send_packed_command([payload])
        found: list[Any] = []
        while len(found) < replies:
            try:
                found.append(await self.raw.read_response(disable_decoding=True, disconnect_on_error=False))
            except ResponseError as error:
                found.append(error)
            except (BusyLoadingError, AuthenticationError) as error:
                self.is_spent = True
                found.extend([error] * (replies - len(found)))
        self.is_fresh = False
        return found

    async def wait(self, seconds: float) -> list[Any]:
        """The replies, of which errors are elements. Raises Silence if they do not come in time: then call it again."""
        if not self._task.done():
            await asyncio.wait((self._task,), timeout=max(seconds, 0.0))
        if not self._task.done():
            raise Silence("no reply in time")
        if self._task.cancelled():
            raise ConnectionError("the task that read from this connection was cancelled")
        return self._task.result()

    def close(self) -> None:
        """A caller that waits gets an error."""
        task = getattr(self, "_task", None)
        if task is not None:
            task.cancel()
            task.add_done_callback(_forget)
        with contextlib.suppress(RuntimeError):
            _background(asyncio.get_running_loop(), self._disconnect(), _closing)

    async def _disconnect(self) -> None:
        with contextlib.suppress(Exception):
            await self.raw.disconnect(nowait=True)


def _forget(task: asyncio.Task[Any]) -> None:
    # An error that was fetched is not logged.
    if not task.cancelled():
        task.exception()


# A loop refers to its tasks weakly only.
_tasks: set[asyncio.Task[Any]] = set()
_closing: set[asyncio.Task[Any]] = set()


def _background(
    loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, Any], tasks: set[asyncio.Task[Any]] = _tasks
) -> None:
    task = loop.create_task(coroutine)
    tasks.add(task)
    task.add_done_callback(tasks.discard)


class Threads:
    """Events are threading's, and everything blocks."""

    event = staticmethod(threading.Event)

    def set(self, event: threading.Event) -> None:
        """From any thread."""
        event.set()

    async def wait(self, event: threading.Event, seconds: float | None) -> bool:
        """Whether it was set in time."""
        return event.wait(seconds)

    async def sleep(self, seconds: float) -> None:
        """Does nothing for a while."""
        time.sleep(seconds)

    async def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Calls a function of the application."""
        return function(*args)

    def spawn(self, work: Callable[[], Coroutine[Any, Any, Any]]) -> bool:
        """Runs something in the background. False if there is no thread to be had."""

        def to_its_end() -> None:
            try:
                run(work())
            except Exception:
                logger.exception("something in the background failed")

        try:
            threading.Thread(target=to_its_end, name="holdfast", daemon=True).start()
        except RuntimeError:
            return False
        return True

    async def gather(self, works: Sequence[Callable[[], Coroutine[Any, Any, Any]]]) -> list[Any]:
        """The results of what runs at the same time, of which errors are elements."""
        results: list[Any] = [None] * len(works)

        def work(number: int) -> None:
            try:
                results[number] = run(works[number]())
            except Exception as error:
                results[number] = error

        threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(1, len(works))]
        for thread in threads:
            thread.start()
        if works:
            work(0)
        for thread in threads:
            thread.join()
        return results

    async def drain(self) -> None:
        """Waits until closed connections are closed."""

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
        return ThreadLine(raw, address)


class Tasks:
    """Events are asyncio's; the background is tasks of the running loop."""

    event = staticmethod(asyncio.Event)

    def set(self, event: asyncio.Event) -> None:
        """From the loop's thread."""
        event.set()

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

    async def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Calls a function of the application, which may be a coroutine function."""
        result = function(*args)
        return await result if inspect.isawaitable(result) else result

    def spawn(self, work: Callable[[], Coroutine[Any, Any, Any]]) -> bool:
        """Runs something in the background."""
        _background(asyncio.get_running_loop(), work())
        return True

    async def gather(self, works: Sequence[Callable[[], Coroutine[Any, Any, Any]]]) -> list[Any]:
        """The results of what runs at the same time, of which errors are elements."""
        return list(await asyncio.gather(*(work() for work in works), return_exceptions=True))

    async def drain(self) -> None:
        """Waits until closed connections are closed."""
        mine = [task for task in _closing if task.get_loop() is asyncio.get_running_loop()]
        if mine:
            await asyncio.wait(mine, timeout=1.0)

    def me(self) -> Any:
        """Who calls. The object: its number is used again."""
        return asyncio.current_task()

    async def open(self, source: Source, address: Address | None) -> TaskLine:
        """A new connection."""
        raw = source.connection(address, AsyncRetry(NoBackoff(), 0))
        try:
            await asyncio.wait_for(raw.connect(), HANDSHAKE)
        except BaseException:
            with contextlib.suppress(Exception):
                await raw.disconnect(nowait=True)
            raise
        # From here on the reader's own times count.
        raw.socket_timeout = None
        return TaskLine(raw, address)


class Source:
    """How the application's client opens its connections: redis-py's, of either flavour."""

    def __init__(self, client: Any) -> None:
        self.is_cluster = hasattr(client, "nodes_manager")
        self._is_blocking = False
        self._client = client
        if not self.is_cluster:
            self._use(client.connection_pool.connection_class, client.connection_pool.connection_kwargs)

    @property
    def addresses(self) -> list[Address]:
        """Of a cluster: the nodes that are known, and those that were configured."""
        manager = self._client.nodes_manager
        nodes = [*manager.nodes_cache.values(), *manager.startup_nodes.values()]
        return list(dict.fromkeys((str(node.host), int(node.port)) for node in nodes))

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
        """A connection that is not connected yet. The library only connects it and logs in."""
        if self.is_cluster:
            self._use_node()
        settings = dict(self._settings)
        if address is not None:
            settings["host"], settings["port"] = address
        settings["retry"] = no_retry
        kind = getattr(redis.connection, self._class.__name__, self._class) if self._is_blocking else self._class
        return kind(**settings)

    def become_blocking(self) -> None:
        """Connections of the other flavour, for the end of the program."""
        self._is_blocking = True

    def _use(self, kind: Any, settings: Mapping[str, Any]) -> None:
        self._class = kind
        self._settings = {name: value for name, value in settings.items() if name not in _OF_THE_POOL}
        limit = min(settings.get("socket_connect_timeout") or HANDSHAKE, HANDSHAKE)
        self._settings.update(health_check_interval=0, protocol=2, socket_timeout=limit)
        # A socket with a path takes none.
        if "path" not in settings:
            self._settings["socket_connect_timeout"] = limit

    def _use_node(self) -> None:
        manager = self._client.nodes_manager
        node = next(iter([*manager.nodes_cache.values(), *manager.startup_nodes.values()]))
        # With asyncio, a node is its pool.
        pool = node if hasattr(node, "connection_class") else self._client.get_redis_connection(node).connection_pool
        # What redis-py has called only says READONLY, for reading from replicas.
        settings = {name: value for name, value in pool.connection_kwargs.items() if name != "redis_connect_func"}
        self._use(pool.connection_class, settings)

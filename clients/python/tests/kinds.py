"""Both flavours with one blocking interface, so that a test of both is written once."""

import asyncio
import gc
import threading

import redis
import redis.asyncio
import redis.asyncio.sentinel
import redis.sentinel

import holdfast
import holdfast.asyncio
import holdfast.redlock
from servers import HOST


class Threads:
    """holdfast with threads."""

    name = "threads"

    def __init__(self):
        self.opened = []

    def redis(self, port, **settings):
        return redis.Redis(host=HOST, port=port, **settings)

    def cluster(self, port, **settings):
        return redis.RedisCluster(host=HOST, port=port, **settings)

    def sentinel(self, port, name):
        return redis.sentinel.Sentinel([(HOST, port)], socket_timeout=1).master_for(name)

    def unix(self, path):
        return redis.Redis(unix_socket_path=path)

    def open(self, client, **settings):
        self.opened.append(holdfast.Holdfast(client, **settings))
        return self.opened[-1]

    def redlock(self, holdfasts, name, **terms):
        return holdfast.redlock.RedLock(holdfasts, name, **terms)

    def close(self):
        for one in self.opened:
            one.close()


class Tasks:
    """holdfast.asyncio, in an event loop in a thread of its own."""

    name = "asyncio"

    def __init__(self):
        self.loop = asyncio.new_event_loop()
        self.clients = []
        self.opened = []
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()

    def run(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(120)

    def inside(self, make):
        async def call():
            return make()

        return self.run(call())

    def _client(self, make):
        self.clients.append(self.inside(make))
        return self.clients[-1]

    def redis(self, port, **settings):
        return self._client(lambda: redis.asyncio.Redis(host=HOST, port=port, **settings))

    def cluster(self, port, **settings):
        return self._client(lambda: redis.asyncio.RedisCluster(host=HOST, port=port, **settings))

    def sentinel(self, port, name):
        def make():
            manager = redis.asyncio.sentinel.Sentinel([(HOST, port)], socket_timeout=1)
            self.clients.extend(manager.sentinels)
            return manager.master_for(name)

        return self._client(make)

    def unix(self, path):
        return self._client(lambda: redis.asyncio.Redis(unix_socket_path=path))

    def open(self, client, **settings):
        self.opened.append(self.inside(lambda: holdfast.asyncio.Holdfast(client, **settings)))
        return Blocking(self, self.opened[-1])

    def redlock(self, holdfasts, name, **terms):
        return Blocking(self, holdfast.redlock.AsyncRedLock([one._inner for one in holdfasts], name, **terms))

    def close(self):
        async def end():
            for one in self.opened:
                await one.close()
            await end_others()
            for client in self.clients:
                await closed(client)

        self.run(end())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()
        # So that this test reports what it left open, not a later one.
        gc.collect(1)


async def closed(client):
    """Closes a client of redis-py. Before version 5.0.1, the method was `close`."""
    await getattr(client, "aclose", client.close)()
    await asyncio.sleep(0)


async def end_others():
    """Ends the other tasks of this loop, and those that they start when they are cancelled."""
    while others := asyncio.all_tasks() - {asyncio.current_task()}:
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
    await asyncio.sleep(0)


_WRAPPED = (
    holdfast.asyncio.Lock,
    holdfast.asyncio.ReentrantLock,
    holdfast.asyncio.ReadWriteLock,
    holdfast.asyncio.Hold,
    holdfast.asyncio.Election,
    holdfast.redlock.AsyncRedHold,
)


class Blocking:
    """An object of holdfast.asyncio with the interface of one of holdfast."""

    def __init__(self, kind, inner):
        self._kind = kind
        self._inner = inner
        self._entered = self

    def _wrap(self, value):
        return Blocking(self._kind, value) if isinstance(value, _WRAPPED) else value

    def __getattr__(self, name):
        value = self._kind.inside(lambda: getattr(self._inner, name))
        if isinstance(value, asyncio.Event):
            return _Event(self._kind, value)
        if not callable(value) or isinstance(value, _WRAPPED):
            return self._wrap(value)

        def call(*args, **kwargs):
            async def inside():
                result = value(*args, **kwargs)
                return await result if asyncio.iscoroutine(result) else result

            return self._wrap(self._kind.run(inside()))

        return call

    def __enter__(self):
        # A lock remembers which task has entered it, and each call here is a task of its own.
        self._entered = self.acquire() if isinstance(self._inner, holdfast.asyncio.Lock) else self
        return self._entered

    def __exit__(self, *error):
        if self._entered is not self:
            return self._entered.__exit__(*error)
        return self._kind.run(self._inner.__aexit__(*error))


class _Event:
    def __init__(self, kind, inner):
        self._kind = kind
        self._inner = inner

    def is_set(self):
        return self._inner.is_set()

    def wait(self, timeout):
        try:
            return self._kind.run(asyncio.wait_for(self._inner.wait(), timeout))
        except asyncio.TimeoutError:
            return False

"""Both kinds of client behind one blocking face, so that what both must do is written once."""

import asyncio
import threading

import redis
import redis.asyncio
import redis.asyncio.sentinel
import redis.sentinel

import holdfast
import holdfast.asyncio
from servers import HOST


class Threads:
    """holdfast with threads."""

    name = "threads"
    api = holdfast

    def client(self, port, **settings):
        return redis.Redis(host=HOST, port=port, **settings)

    def cluster(self, port, **settings):
        return redis.RedisCluster(host=HOST, port=port, **settings)

    def sentinel(self, port, name, **settings):
        return redis.sentinel.Sentinel([(HOST, port)], socket_timeout=20).master_for(name, **settings)

    def __getattr__(self, name):
        return getattr(self.api, name)

    def home(self, client):
        from holdfast._home import home_of

        return home_of(client)

    def close(self):
        pass


class Tasks:
    """holdfast.asyncio in a loop of its own, driven from outside."""

    name = "asyncio"
    api = holdfast.asyncio

    def __init__(self):
        self.loop = asyncio.new_event_loop()
        self.clients = []
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()

    def run(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result()

    def _in_loop(self, make):
        async def call():
            return make()

        return self.run(call())

    def _client(self, make):
        client = self._in_loop(make)
        self.clients.append(client)
        return client

    def client(self, port, **settings):
        return self._client(lambda: redis.asyncio.Redis(host=HOST, port=port, **settings))

    def cluster(self, port, **settings):
        return self._client(lambda: redis.asyncio.RedisCluster(host=HOST, port=port, **settings))

    def sentinel(self, port, name, **settings):
        def make():
            manager = redis.asyncio.sentinel.Sentinel([(HOST, port)], socket_timeout=20)
            # The client of the master does not close them.
            self.clients.extend(manager.sentinels)
            return manager.master_for(name, **settings)

        return self._client(make)

    def __getattr__(self, name):
        made = getattr(self.api, name)

        def make(*args, **kwargs):
            return Blocking(self, made(*map(_inner, args), **kwargs))

        return make

    def home(self, client):
        from holdfast.asyncio._home import home_of

        return self._in_loop(lambda: home_of(client))

    def close(self):
        async def end():
            for client in self.clients:
                await closed(client)

        self.run(end())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()


async def end_others():
    """Ends the other tasks of this loop, and those that they begin when they are cancelled."""
    while others := asyncio.all_tasks() - {asyncio.current_task()}:
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
    # Transports close one turn later.
    await asyncio.sleep(0)


async def closed(client):
    """Closes a client once nothing uses it any more: what still runs would connect anew."""
    await end_others()
    await getattr(client, "aclose", client.close)()
    await asyncio.sleep(0)


def _inner(argument):
    """What is inside, also of each of several."""
    if isinstance(argument, Blocking):
        return argument._inner
    if isinstance(argument, list):
        return [_inner(one) for one in argument]
    return argument


class Blocking:
    """An object of holdfast.asyncio as if it were one of holdfast."""

    def __init__(self, kind, inner):
        self._kind = kind
        self._inner = inner

    def __getattr__(self, name):
        value = self._kind._in_loop(lambda: getattr(self._inner, name))
        if isinstance(value, asyncio.Event):
            return _Event(self._kind, value)
        if not callable(value):
            return value

        def call(*args, **kwargs):
            async def inside():
                result = value(*args, **kwargs)
                return await result if asyncio.iscoroutine(result) else result

            result = self._kind.run(inside())
            return Blocking(self._kind, result) if isinstance(result, holdfast.asyncio.Lock) else result

        return call

    def __enter__(self):
        self._kind.run(self._inner.__aenter__())
        return self

    def __exit__(self, *error):
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

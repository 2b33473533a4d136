"""redis-py's tests/test_asyncio/test_lock.py on holdfast.asyncio.Lock."""

import pytest
import redis.asyncio

import holdfast.asyncio
import upstream
from servers import Stalls

tests = upstream.load("tests/test_asyncio/test_lock.py")

pytestmark = pytest.mark.usefixtures("end_tasks")


class AdaptedLock(upstream.Token, holdfast.asyncio.Lock):
    unstalled = None

    async def acquire(self, *args, **kwargs):
        is_granted = await super().acquire(*args, **kwargs)
        if self.unstalled:
            self.unstalled.begins()
        return is_granted


class Redis(redis.asyncio.Redis):
    """Reads our layout where redis-py's tests read theirs."""

    unstalled = None

    async def get(self, name):
        try:
            return await super().get(name)
        except redis.ResponseError as error:
            if not upstream.is_hash(error):
                raise
            return upstream.owner(await self.hkeys(name))

    async def pttl(self, name):
        left = await super().pttl(name)
        return self.unstalled.left(left) if self.unstalled else left


@pytest.fixture
async def create_redis(own_server):
    clients = []

    async def create(**settings):
        clients.append(Redis(port=own_server.port, **settings))
        await clients[-1].flushall()
        return clients[-1]

    yield create
    for client in clients:
        await getattr(client, "aclose", client.close)()


@pytest.fixture
async def r(create_redis):
    return await create_redis()


class TestLock(tests.TestLock):
    def get_lock(self, redis, *args, **kwargs):
        lock = AdaptedLock(redis, *args, **kwargs)
        lock.unstalled = redis.unstalled
        return lock

    async def test_extend_lock_float(self, r):
        with Stalls() as stalls:
            r.unstalled = upstream.Unstalled(stalls)
            await super().test_extend_lock_float(r)

    test_lock = upstream.left_out(upstream.NO_EXPIRY)
    test_lock_token = upstream.left_out(upstream.NO_EXPIRY)
    test_lock_token_thread_local_false = upstream.left_out(upstream.NO_EXPIRY)
    test_blocking_timeout = upstream.left_out(upstream.POLLS)
    test_context_manager_blocking_timeout = upstream.left_out(upstream.POLLS)
    test_high_sleep_small_blocking_timeout = upstream.left_out(upstream.POLLS)


class TestLockClassSelection(tests.TestLockClassSelection):
    pass

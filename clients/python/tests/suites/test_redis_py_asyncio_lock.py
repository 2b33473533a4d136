"""redis-py's tests/test_asyncio/test_lock.py on holdfast.asyncio.Lock."""

import pytest
import redis.asyncio

import holdfast.asyncio
import upstream
from holdfast.redis_py import lock_class

tests = upstream.load("tests/test_asyncio/test_lock.py")

pytestmark = pytest.mark.usefixtures("end_tasks")


_opened = {}


class Redis(redis.asyncio.Redis):
    """Gives redis-py's tests the owner as the value of a lock's key."""

    async def get(self, name):
        try:
            return await super().get(name)
        except redis.ResponseError as error:
            if not upstream.is_hash(error):
                raise
            return upstream.owner(await self.hkeys(name))


@pytest.fixture
async def create_redis(own_server):
    clients = []

    async def create(**settings):
        client = Redis(port=own_server.port, **settings)
        clients.append(client)
        await client.flushall()
        # Some tests leave 0.2 s for an acquisition. Connecting belongs to the set-up, as for redis-py's own client.
        _opened[client] = holdfast.asyncio.Holdfast(client)
        await _opened[client].info("foo")
        return client

    yield create
    for opened in _opened.values():
        await opened.close()
    _opened.clear()
    for client in clients:
        await getattr(client, "aclose", client.close)()


@pytest.fixture
async def r(create_redis):
    return await create_redis()


class TestLock(tests.TestLock):
    def get_lock(self, redis, *args, **kwargs):
        # The lock() of older versions does not take all arguments.
        return lock_class(_opened[redis])(redis, *args, **kwargs)

    test_lock = upstream.left_out(upstream.NO_EXPIRY)
    test_lock_token = upstream.left_out(upstream.NO_EXPIRY)
    test_lock_token_thread_local_false = upstream.left_out(upstream.NO_EXPIRY)
    test_blocking_timeout = upstream.left_out(upstream.POLLS)
    test_context_manager_blocking_timeout = upstream.left_out(upstream.POLLS)
    test_high_sleep_small_blocking_timeout = upstream.left_out(upstream.POLLS)


class TestLockClassSelection(tests.TestLockClassSelection):
    pass

"""redis-py's tests/test_asyncio/test_lock.py on holdfast.asyncio.Lock."""

import pytest
import redis.asyncio

import holdfast.asyncio
import upstream

tests = upstream.load("tests/test_asyncio/test_lock.py")

pytestmark = pytest.mark.usefixtures("end_tasks")


class AdaptedLock(upstream.Token, holdfast.asyncio.Lock):
    pass


class Redis(redis.asyncio.Redis):
    """Reads our layout where redis-py's tests read theirs."""

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
        return AdaptedLock(redis, *args, **kwargs)

    # redis-py's allows half a second from one look at what is left to the next; this one goes by the server's clock.
    # What is left is counted from when the lock was asked for, and rounded up to a millisecond.
    async def test_extend_lock_float(self, r):
        lock = self.get_lock(r, "foo", timeout=10.5)
        asked = upstream.millis(await r.time())
        assert await lock.acquire(blocking=False)
        granted = await r.pexpiretime("foo")
        assert asked + 10500 <= granted <= upstream.millis(await r.time()) + 10500
        begin = upstream.millis(await r.time())
        assert await lock.extend(10.5)
        extended = await r.pexpiretime("foo")
        end = upstream.millis(await r.time())
        assert asked + 21000 <= extended <= granted + 10500 + end - begin + 1
        await lock.release()

    test_lock = upstream.left_out(upstream.NO_EXPIRY)
    test_lock_token = upstream.left_out(upstream.NO_EXPIRY)
    test_lock_token_thread_local_false = upstream.left_out(upstream.NO_EXPIRY)
    test_blocking_timeout = upstream.left_out(upstream.POLLS)
    test_context_manager_blocking_timeout = upstream.left_out(upstream.POLLS)
    test_high_sleep_small_blocking_timeout = upstream.left_out(upstream.POLLS)


class TestLockClassSelection(tests.TestLockClassSelection):
    pass

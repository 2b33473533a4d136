"""redis-py's tests/test_lock.py on holdfast.Lock."""

import pytest
import redis

import holdfast
import upstream
from holdfast.redis_py import lock_class

tests = upstream.load("tests/test_lock.py", _get_client=lambda _, request, **settings: _client(**settings))

_server = None
_opened = {}


class Redis(redis.Redis):
    """Gives redis-py's tests the owner as the value of a lock's key."""

    def get(self, name):
        try:
            return super().get(name)
        except redis.ResponseError as error:
            if not upstream.is_hash(error):
                raise
            return upstream.owner(self.hkeys(name))


def _client(**settings):
    client = Redis(port=_server.port, **settings)
    client.flushall()
    # Some tests leave 0.2 s for an acquisition. Connecting belongs to the set-up, as for redis-py's own client.
    _opened[client] = holdfast.Holdfast(client)
    _opened[client].info("foo")
    return client


@pytest.fixture(autouse=True)
def _start(own_server):
    global _server
    _server = own_server
    yield
    for opened in _opened.values():
        opened.close()
    _opened.clear()


@pytest.fixture
def r():
    client = _client()
    yield client
    client.close()


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

"""redis-py's tests/test_lock.py on holdfast.Lock."""

import pytest
import redis

import holdfast
import upstream
from servers import Stalls

tests = upstream.load("tests/test_lock.py", _get_client=lambda _, request, **settings: _client(**settings))

_server = None


class AdaptedLock(upstream.Token, holdfast.Lock):
    unstalled = None

    def acquire(self, *args, **kwargs):
        is_granted = super().acquire(*args, **kwargs)
        if self.unstalled:
            self.unstalled.begins()
        return is_granted


class Redis(redis.Redis):
    """Reads our layout where redis-py's tests read theirs."""

    unstalled = None

    def get(self, name):
        try:
            return super().get(name)
        except redis.ResponseError as error:
            if not upstream.is_hash(error):
                raise
            return upstream.owner(self.hkeys(name))

    def pttl(self, name):
        left = super().pttl(name)
        return self.unstalled.left(left) if self.unstalled else left


def _client(**settings):
    client = Redis(port=_server.port, **settings)
    client.flushall()
    return client


@pytest.fixture(autouse=True)
def _start(own_server):
    global _server
    _server = own_server


@pytest.fixture
def r():
    client = _client()
    yield client
    client.close()


class TestLock(tests.TestLock):
    def get_lock(self, redis, *args, **kwargs):
        lock = AdaptedLock(redis, *args, **kwargs)
        lock.unstalled = redis.unstalled
        return lock

    def test_extend_lock_float(self, r):
        with Stalls() as stalls:
            r.unstalled = upstream.Unstalled(stalls)
            super().test_extend_lock_float(r)

    test_lock = upstream.left_out(upstream.NO_EXPIRY)
    test_lock_token = upstream.left_out(upstream.NO_EXPIRY)
    test_lock_token_thread_local_false = upstream.left_out(upstream.NO_EXPIRY)
    test_blocking_timeout = upstream.left_out(upstream.POLLS)
    test_context_manager_blocking_timeout = upstream.left_out(upstream.POLLS)
    test_high_sleep_small_blocking_timeout = upstream.left_out(upstream.POLLS)


class TestLockClassSelection(tests.TestLockClassSelection):
    pass

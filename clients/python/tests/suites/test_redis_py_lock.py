"""redis-py's tests/test_lock.py on holdfast.Lock."""

import pytest
import redis

import holdfast
import upstream

tests = upstream.load("tests/test_lock.py", _get_client=lambda _, request, **settings: _client(**settings))

_server = None


class AdaptedLock(upstream.Token, holdfast.Lock):
    pass


class Redis(redis.Redis):
    """Reads our layout where redis-py's tests read theirs."""

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
        return AdaptedLock(redis, *args, **kwargs)

    # redis-py's allows half a second from one look at what is left to the next; this one goes by the server's clock.
    # What is left is counted from when the lock was asked for, and rounded up to a millisecond.
    def test_extend_lock_float(self, r):
        lock = self.get_lock(r, "foo", timeout=10.5)
        asked = upstream.millis(r.time())
        assert lock.acquire(blocking=False)
        granted = r.pexpiretime("foo")
        assert asked + 10500 <= granted <= upstream.millis(r.time()) + 10500
        begin = upstream.millis(r.time())
        assert lock.extend(10.5)
        extended = r.pexpiretime("foo")
        end = upstream.millis(r.time())
        assert asked + 21000 <= extended <= granted + 10500 + end - begin + 1
        lock.release()

    test_lock = upstream.left_out(upstream.NO_EXPIRY)
    test_lock_token = upstream.left_out(upstream.NO_EXPIRY)
    test_lock_token_thread_local_false = upstream.left_out(upstream.NO_EXPIRY)
    test_blocking_timeout = upstream.left_out(upstream.POLLS)
    test_context_manager_blocking_timeout = upstream.left_out(upstream.POLLS)
    test_high_sleep_small_blocking_timeout = upstream.left_out(upstream.POLLS)


class TestLockClassSelection(tests.TestLockClassSelection):
    pass

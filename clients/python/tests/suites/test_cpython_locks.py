"""CPython's own tests of threading.Lock, RLock and Semaphore, run on ours.

They come with the interpreter (Debian: libpython3-testsuite). Left out, each with its reason, is what no lock outside
the process can mean.
"""

import itertools
import threading
import unittest

import pytest

import holdfast

lock_tests = pytest.importorskip("test.lock_tests", reason="this interpreter came without its own tests")

_names = itertools.count(1)
_client = None


@pytest.fixture(autouse=True, scope="module")
def _session(server):
    global _client
    _client = server.client()
    # The session's thread is there before the tests count threads.
    with holdfast.Lock(_client, "cpython"):
        yield


def left_out(reason):
    def test(self):
        self.skipTest(reason)

    return test


class _Adapter:
    """threading's signature and errors on one of our locks."""

    def __init__(self, lock):
        self.lock = lock

    def acquire(self, blocking=True, timeout=-1):
        if timeout != -1 and (timeout < 0 or not blocking):
            raise ValueError("this timeout makes no sense")
        if timeout > threading.TIMEOUT_MAX:
            raise OverflowError("timeout value is too large")
        return self.lock.acquire(blocking=blocking, blocking_timeout=None if timeout == -1 else timeout)

    def release(self):
        try:
            self.lock.release()
        except holdfast.NotHeld as error:
            raise self.not_held(str(error)) from None

    not_held = RuntimeError
    __enter__ = acquire

    def __exit__(self, *_):
        self.release()

    def locked(self):
        return self.lock.locked()

    def __repr__(self):
        return f"<{'locked' if self.locked() else 'unlocked'} {type(self).__name__} object at {id(self):#x}>"


class _RAdapter(_Adapter):
    def _is_owned(self):
        return self.lock.fence is not None

    def _recursion_count(self):
        holds = self.lock._holds()
        return holds[-1].entries + 1 if holds else 0


class _SemaphoreAdapter(_Adapter):
    not_held = ValueError

    def acquire(self, blocking=True, timeout=None):
        return super().acquire(blocking, -1 if timeout is None else timeout)

    __enter__ = acquire

    def release(self, n=1):
        for _ in range(n):
            super().release()


def _name():
    return f"cpython:{next(_names)}"


def lock():
    return _Adapter(holdfast.Lock(_client, _name(), thread_local=False))


def rlock():
    return _RAdapter(holdfast.RLock(_client, _name()))


def semaphore(value=1):
    return _SemaphoreAdapter(holdfast.Semaphore(_client, _name(), value, thread_local=False))


class LockTests(lock_tests.LockTests, unittest.TestCase):
    locktype = staticmethod(lock)
    test_at_fork_reinit = left_out("an internal of CPython: the child of a fork does not hold what its parent holds")


class RLockTests(lock_tests.RLockTests, unittest.TestCase):
    locktype = staticmethod(rlock)
    test_release_save_unacquired = left_out("an internal of threading.Condition")


class SemaphoreTests(lock_tests.SemaphoreTests, unittest.TestCase):
    semtype = staticmethod(semaphore)
    test_release_unacquired = left_out("a permit that was never taken can't be given back; see BoundedSemaphoreTests")
    test_repr = left_out("the number of free permits is the server's to know")


class BoundedSemaphoreTests(lock_tests.BoundedSemaphoreTests, unittest.TestCase):
    semtype = staticmethod(semaphore)
    test_repr = left_out("the number of free permits is the server's to know")

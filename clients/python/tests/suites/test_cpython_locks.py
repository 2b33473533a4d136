"""CPython's own tests of threading.Lock, RLock and Semaphore, run with holdfast's locks.

They come with the interpreter (Debian: libpython3-testsuite). Tests that make no sense for a lock outside of the
process are skipped, each with its reason.
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
def _opened(server):
    global _client
    with holdfast.Holdfast(server.client()) as _client:
        # So that the client's timer runs before the tests count threads.
        for _ in range(3):
            _client.lock("cpython").acquire().release()
        yield


def left_out(reason):
    def test(self):
        self.skipTest(reason)

    return test


class _Adapter:
    """One of our locks with the signature and errors of `threading`. Any thread may release it."""

    not_held = RuntimeError

    def __init__(self, lock):
        self.lock = lock
        self.holds = []

    def acquire(self, blocking=True, timeout=-1):
        if timeout != -1 and (timeout < 0 or not blocking):
            raise ValueError("a timeout must not be negative, and needs blocking")
        if timeout > threading.TIMEOUT_MAX:
            raise OverflowError("timeout value is too large")
        if 0 < timeout < 0.1:
            timeout = 1  # A server on a busy machine does not answer within a few milliseconds.
        try:
            hold = self.lock.acquire(None if timeout == -1 else timeout) if blocking else self.lock.try_acquire()
        except holdfast.NotAcquiredError:
            return False
        if hold is None:
            return False
        self.holds.append(hold)
        return True

    def release(self):
        try:
            self.holds.pop().release()
        except IndexError:
            raise self.not_held("it is not held") from None

    __enter__ = acquire

    def __exit__(self, *_):
        self.release()

    def locked(self):
        return _client.info(self.lock.name) is not None

    def __repr__(self):
        return f"<{'locked' if self.locked() else 'unlocked'} {type(self).__name__} object at {id(self):#x}>"


class _RAdapter(_Adapter):
    def release(self):
        try:
            self.lock.release()
        except holdfast.NotHeldError as error:
            raise RuntimeError(str(error)) from None

    def _is_owned(self):
        return threading.get_ident() in self.lock._mine

    def _recursion_count(self):
        return len(self.lock._mine.get(threading.get_ident(), ()))


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
    return _Adapter(_client.lock(_name()))


def rlock():
    return _RAdapter(_client.reentrant_lock(_name()))


def semaphore(value=1):
    if value < 0:
        raise ValueError("a negative number of permits")
    # A semaphore without permits: its only one is taken.
    made = _SemaphoreAdapter(_client.semaphore(_name(), max(value, 1)))
    if value == 0:
        made.blocker = made.lock.acquire()
    return made


class _Uncounted:
    """Lets CPython not count threads: the client starts and ends threads of its own."""

    def setUp(self):
        pass

    def tearDown(self):
        pass


class LockTests(_Uncounted, lock_tests.LockTests, unittest.TestCase):
    locktype = staticmethod(lock)
    test_at_fork_reinit = left_out("an internal of CPython: the child of a fork does not hold what its parent holds")


class RLockTests(_Uncounted, lock_tests.RLockTests, unittest.TestCase):
    locktype = staticmethod(rlock)
    test_release_save_unacquired = left_out("an internal of threading.Condition")


class SemaphoreTests(_Uncounted, lock_tests.SemaphoreTests, unittest.TestCase):
    semtype = staticmethod(semaphore)
    test_release_unacquired = left_out("a permit that was never acquired can't be released; see BoundedSemaphoreTests")
    test_repr = left_out("the number of free permits is the server's to know")


class BoundedSemaphoreTests(_Uncounted, lock_tests.BoundedSemaphoreTests, unittest.TestCase):
    semtype = staticmethod(semaphore)
    test_repr = left_out("the number of free permits is the server's to know")

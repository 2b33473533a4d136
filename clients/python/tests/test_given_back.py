"""What nobody can reach any more is given back, and a session may be closed by name."""

import asyncio
import ctypes
import gc
import os
import threading

import pytest
import redis

import holdfast
import holdfast.asyncio
from holdfast._home import home_of
from kinds import end_others
from proxy import Proxy
from servers import HOST, Server, until, waiters
from test_lock import in_thread
from test_reconnect import sessions

# The server's default lease is thirty seconds: whatever is free before has been given back.


def free(admin, name):
    until(lambda: not admin.exists(name), "it was given back")


def several(kind, client, name):
    """A lock of each kind."""
    return {
        "Lock": lambda: kind.Lock(client, name),
        "timeout": lambda: kind.Lock(client, name, timeout=60, on_lost=print),
        # With asyncio, each call of these tests is a task of its own, and what an ended task held is given back.
        "RLock": lambda: (kind.RLock if kind.name == "threads" else kind.Lock)(client, name),
        "LockAll": lambda: kind.LockAll(client, [name]),
        "MultiLock": lambda: kind.MultiLock([kind.Lock(client, name)]),
        "RedLock": lambda: kind.RedLock([client], name),
    }


ALL = ["Lock", "timeout", "RLock", "LockAll", "MultiLock", "RedLock"]


@pytest.mark.parametrize("what", ALL)
def test_a_lock_object_that_is_collected_gives_back(kind, client, admin, name, what):
    lock = several(kind, client, name)[what]()
    lock.acquire()
    assert admin.exists(name)
    del lock
    gc.collect()
    free(admin, name)


def test_what_a_thread_held_that_has_ended_is_given_back(server, admin, name):
    lock = holdfast.Lock(server.client(), name)
    in_thread(lock.acquire)()
    free(admin, name)
    # Another thread's is not touched.
    lock.acquire()
    in_thread(lambda: lock.acquire(blocking=False))()
    assert lock.owned()
    lock.release()


async def test_what_a_task_held_that_has_ended_is_given_back(server, admin, name):
    client = redis.asyncio.Redis(port=server.port)
    lock = holdfast.asyncio.RLock(client, name)
    await asyncio.create_task(lock.acquire())
    gc.collect()
    for _ in range(2000):
        if not admin.exists(name):
            break
        await asyncio.sleep(0.01)
    assert not admin.exists(name)
    await holdfast.asyncio.Session(client).close()
    await getattr(client, "aclose", client.close)()


def test_what_is_collected_in_the_child_of_a_fork_stays_with_the_parent(server, admin, name):
    locks = [holdfast.Lock(server.client(), name)]
    locks[0].acquire()
    child = os.fork()
    if child == 0:
        locks.clear()
        gc.collect()
        with holdfast.Lock(server.client(), f"{name}:child"):
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert locks[0].owned()
    locks[0].release()


def test_what_is_given_back_is_forgotten(kind, client, name):
    lock = kind.Lock(client, name)
    for _ in range(20):
        with lock:
            pass
    lock.acquire()
    assert len(kind.home(client).holds) == 1
    lock.release()
    assert not kind.home(client).holds


@pytest.fixture
def own_client(kind):
    server = Server()
    yield kind.client(server.port), server.client()
    server.close()


def test_a_session_that_is_closed_gives_everything_back(kind, own_client, name):
    client, admin = own_client
    told = []
    locks = [several(kind, client, f"{name}:{what}")[what]() for what in ALL]
    for lock in locks:
        lock.acquire()
    told_lock = kind.Lock(client, f"{name}:told", on_lost=told.append)
    told_lock.acquire()
    until(lambda: sessions(admin), "there is a session")
    kind.Session(client).close()
    assert not admin.keys(f"{name}*")
    until(lambda: not sessions(admin), "it ended")
    until(lambda: told, "it was told")
    for lock in locks:
        with pytest.raises(holdfast.LockLost):
            lock.check()
        with pytest.raises(holdfast.LockLost):
            lock.release()
        with pytest.raises(holdfast.NotHeld):
            lock.release()
    # It begins anew.
    with kind.Lock(client, name) as lock:
        lock.check()


def test_whoever_waits_when_a_session_is_closed_is_told(kind, own_client, name):
    client, admin = own_client
    holder = holdfast.Lock(redis.Redis(connection_pool=admin.connection_pool), name)
    holder.acquire()
    lock = kind.Lock(client, name)
    join = in_thread(lock.acquire)
    until(lambda: waiters(admin, name) == 1, "it waits")
    kind.Session(client).close()
    with pytest.raises(holdfast.LockError):
        join()
    assert waiters(admin, name) == 0
    assert holder.owned()
    holder.release()
    assert not admin.exists(name)


def test_a_block_of_a_session(kind, own_client, name):
    client, admin = own_client
    with kind.Session(client):
        lock = kind.Lock(client, name)
        lock.acquire()
    assert not admin.exists(name)
    until(lambda: not sessions(admin), "it ended")
    # To close what was never opened, or is closed, is nothing.
    kind.Session(client).close()


class SoftLimit(Exception):
    pass


@pytest.fixture
def no_collection():
    """Python swallows what is raised in another thread while that one collects garbage, and runs a finalizer."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def interrupt(thread):
    """Raises in another thread, at its next step; as a soft time limit does in the main thread."""
    assert ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(SoftLimit)) == 1


class Interruptible:
    """An acquire in a thread."""

    def __init__(self, lock):
        self.lock, self.outcome = lock, None
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self):
        try:
            self.outcome = self.lock.acquire()
        except SoftLimit:
            self.outcome = "interrupted"


def test_soft_time_limits_leave_nothing(server, admin, name, no_collection):
    proxy = Proxy(server.port)
    try:
        client = redis.Redis(host=HOST, port=proxy.port)
        with holdfast.Lock(client, name):
            pass
        go_on = threading.Event()
        proxy.rule = lambda request: None if request[0] != b"LOCK.ACQUIRE" or go_on.wait(50) else "request"
        many = [Interruptible(holdfast.Lock(client, f"{name}:{n}")) for n in range(64)]
        until(lambda: len(home_of(client).calls) == 64, "all have asked")
        for one in many[::2]:
            interrupt(one.thread.ident)
        go_on.set()
        for number, one in enumerate(many):
            one.thread.join(20)
            assert one.outcome == (True if number % 2 else "interrupted")
        # As many as before may ask.
        assert in_thread(lambda: holdfast.Lock(client, name).acquire())(20)
        many.clear()
        del one
        gc.collect()
        until(lambda: not admin.keys(f"{name}*"), "nothing is left")
    finally:
        proxy.close()


def test_a_soft_time_limit_in_the_instant_of_the_grant_leaves_nothing(server, admin, name, no_collection):
    # Each with a session of its own: what is interrupted within a step ends its session, and a release that has to be
    # asked again over the next one can not say what the first one did.
    client, another = server.client(), server.client()
    for _ in range(20):
        holder = holdfast.Lock(another, name)
        holder.acquire()
        lock = holdfast.Lock(client, name, thread_local=False)
        waiting = Interruptible(lock)
        until(lambda: waiters(admin, name) == 1, "it waits")
        interrupt(waiting.thread.ident)
        holder.release()
        waiting.thread.join(20)
        assert waiting.outcome == "interrupted"
        free(admin, name)
        assert lock.fence is None


async def test_connections_that_are_cancelled_while_they_are_opened_are_closed(server, admin, name):
    client = redis.asyncio.Redis(host=HOST, port=server.port)
    before = len(admin.client_list())
    try:
        for turns in range(12):
            task = asyncio.create_task(holdfast.asyncio.Lock(client, name).acquire())
            for _ in range(turns):
                await asyncio.sleep(0)
            await end_others()
            assert task.done()
        until(lambda: len(admin.client_list()) == before, "none is left")
    finally:
        await getattr(client, "aclose", client.close)()

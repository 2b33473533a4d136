"""Callbacks that are told of a loss: whatever they do, nobody else suffers for it."""

import asyncio
import ctypes
import sys
import threading

import pytest

import holdfast
from servers import until, waiters
from test_lock import in_thread
from test_reconnect import sessions


@pytest.fixture
def admin(own_server):
    client = own_server.client()
    yield client
    client.close()


@pytest.fixture
def client(kind, own_server):
    return kind.client(own_server.port)


def force(admin, name):
    admin.execute_command("LOCK.FORCE", name)


def all_goes_on(kind, client, admin, name):
    """Another loss is told, and whoever waits is served."""
    told = []
    other = kind.Lock(client, f"{name}:other", on_lost=told.append)
    other.acquire()
    waiting = kind.Lock(client, f"{name}:other", thread_local=False)
    join = in_thread(lambda: waiting.acquire(blocking_timeout=30))
    until(lambda: waiters(admin, f"{name}:other") == 1, "it waits")
    force(admin, f"{name}:other")
    assert join(30) is True
    waiting.release()
    until(lambda: told, "the other one was told")
    assert told[0].reason == "forced"


def leave(lost):
    sys.exit(1)


def fail(lost):
    raise BaseException("of no kind that one expects")


@pytest.mark.parametrize("on_lost", [leave, fail])
def test_one_that_ends_the_thread_harms_nobody(kind, client, admin, name, on_lost):
    lock = kind.Lock(client, name, on_lost=on_lost)
    lock.acquire()
    lost = lock.lost
    force(admin, name)
    assert lost.wait(10)
    all_goes_on(kind, client, admin, name)


def test_one_that_blocks_harms_nobody(kind, client, admin, name):
    begun, go_on = threading.Event(), threading.Event()

    def block(lost):
        begun.set()
        go_on.wait(50)

    async def wait(lost):
        begun.set()
        while not go_on.is_set():
            await asyncio.sleep(0.01)

    locks = [kind.Lock(client, f"{name}:{n}", on_lost=block if kind.name == "threads" else wait) for n in range(3)]
    try:
        for lock in locks:
            lock.acquire()
            force(admin, lock.name)
        assert begun.wait(10)
        all_goes_on(kind, client, admin, name)
    finally:
        go_on.set()


def test_one_that_waits_for_a_lock_harms_nobody(kind, client, admin, name):
    holder = kind.Lock(client, f"{name}:held")
    holder.acquire()
    got = []

    def take(lost):
        with holdfast.Lock(client, f"{name}:held"):
            got.append(lost)

    async def take_with_await(lost):
        async with holdfast.asyncio.Lock(client, f"{name}:held"):
            got.append(lost)

    lock = kind.Lock(client, name, on_lost=take if kind.name == "threads" else take_with_await)
    lock.acquire()
    force(admin, name)
    until(lambda: waiters(admin, f"{name}:held") == 1, "it waits")
    all_goes_on(kind, client, admin, name)
    holder.release()
    until(lambda: got, "it was served, too")


def test_five_hundred_locks_make_no_five_hundred_threads(kind, client, name):
    told = []
    before = threading.active_count()
    locks = [kind.Lock(client, f"{name}:{n}", timeout=300, on_lost=told.append) for n in range(500)]
    for lock in locks:
        lock.acquire()
    assert threading.active_count() <= before + 5
    for lock in locks:
        lock.release()
    assert told == []


def test_each_of_many_whose_time_is_over_is_told_once(kind, client, name):
    told = []
    locks = [kind.Lock(client, f"{name}:{n}", timeout=1.5, on_lost=told.append) for n in range(50)]
    for lock in locks:
        lock.acquire()
    until(lambda: len(told) >= 50, "all are told")
    assert {(lost.lock_name, lost.reason) for lost in told} == {(lock.name, "expired") for lock in locks}
    assert len(told) == 50


def test_a_time_that_is_extended_is_over_later(kind, client, name):
    told = []
    lock = kind.Lock(client, name, timeout=1.5, on_lost=told.append)
    lock.acquire()
    lock.extend(60)
    other = kind.Lock(client, f"{name}:other", timeout=2, on_lost=told.append)
    other.acquire()
    until(lambda: told, "the other one is told")
    assert [lost.lock_name for lost in told] == [other.name]
    lock.check()
    lock.extend(0.5, replace_ttl=True)
    until(lambda: len(told) == 2, "it is told")
    assert told[1].lock_name == name


def test_whatever_ends_the_thread_that_reads_ends_the_session(own_server, admin, name):
    before = set(threading.enumerate())
    told = []
    lock = holdfast.Lock(own_server.client(), name, on_lost=told.append)
    lock.acquire()
    [session] = until(lambda: sessions(admin), "there is a session")
    [reader] = [one for one in threading.enumerate() if one not in before and "session" in one.name]
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(reader.ident), ctypes.py_object(SystemExit))
    until(lambda: sessions(admin) and session not in sessions(admin), "another one reads")
    lock.check()
    force(admin, name)
    until(lambda: told, "the loss is told")

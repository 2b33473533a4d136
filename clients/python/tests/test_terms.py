"""On which terms a lock is held, what is told of it, and what is said where it can't be had."""

import logging

import pytest
import redis
import redis.asyncio
from test_process import program

import holdfast
import holdfast.asyncio
from servers import Server, holder, until
from test_reconnect import kill_session


def test_a_watched_lock_with_a_lease_of_its_own(kind, client, admin, name):
    lock = kind.Lock(client, name, watched=2)
    lock.acquire()
    fence = lock.fence
    assert holder(admin, name)[b"watchdog"]
    assert admin.pttl(name) <= 2000
    # It is renewed, again and again.
    ends = []
    until(lambda: ends.append(admin.pexpiretime(name)) or len(set(ends)) >= 4, "it was renewed three times")
    lock.check()
    assert lock.fence == fence
    with pytest.raises(holdfast.LockError):
        lock.extend(1)
    lock.release()
    assert not admin.exists(name)


def test_a_watched_lock_with_a_lease_of_its_own_is_taken_along(kind, own_server, name):
    admin = own_server.client()
    lock = kind.Lock(kind.client(own_server.port), name, watched=10)
    lock.acquire()
    before = holder(admin, name)[b"client"]
    kill_session(admin)
    until(lambda: holder(admin, name)[b"client"] not in (None, before), "tied anew")
    assert holder(admin, name)[b"watchdog"]
    assert 8000 < admin.pttl(name) <= 10_000
    lock.release()


@pytest.mark.parametrize("make", ["LockAll", "MultiLock", "RedLock"])
def test_several_with_a_lease_of_their_own(kind, client, admin, name, make):
    lock = {
        "LockAll": lambda: kind.LockAll(client, [name], watched=20),
        "MultiLock": lambda: kind.MultiLock([kind.Lock(client, name, watched=20)]),
        "RedLock": lambda: kind.RedLock([client], name, watched=20, server_timeout=5),
    }[make]()
    with lock:
        assert holder(admin, name)[b"watchdog"]
        assert 10_000 < admin.pttl(name) <= 20_000
        lock.check()


def test_a_watched_lock_has_no_timeout(kind, client, name):
    with pytest.raises(ValueError, match="timeout"):
        kind.Lock(client, name, timeout=5, watched=5)
    with pytest.raises(ValueError, match="watched"):
        kind.Lock(client, name, watched=0)
    with pytest.raises(ValueError, match="watched"):
        kind.MultiLock([kind.Lock(client, name), kind.Lock(client, f"{name}:2", watched=5)])


def test_a_timeout_of_none_cannot_be_extended(kind, client, name):
    lock = kind.Lock(client, name, timeout=0)
    lock.acquire()
    for use in (lambda: lock.extend(1), lambda: lock.extend(1, replace_ttl=True), lock.reacquire):
        with pytest.raises(holdfast.LockError):
            use()
    lock.release()


@pytest.mark.parametrize("session", ["stands", "was another one"])
def test_the_loss_of_a_lock_with_a_timeout_is_told(kind, own_server, name, session):
    admin = own_server.client()
    told = []
    lock = kind.Lock(kind.client(own_server.port), name, timeout=300, on_lost=told.append)
    lock.acquire()
    before = holder(admin, name)[b"client"]
    if session != "stands":
        kill_session(admin)
        until(lambda: holder(admin, name)[b"client"] not in (None, before), "tied anew")
        assert 200_000 < admin.pttl(name) <= 300_000
        assert not holder(admin, name)[b"watchdog"]
    admin.execute_command("LOCK.FORCE", name)
    until(lambda: told, "it is told")
    assert told[0].reason == "forced"


def test_arguments_in_the_order_of_redis_py(kind, client, admin, name):
    first = kind.Lock(client, name)
    assert first.acquire(*((0.1, True, 5) if kind.name == "threads" else (True, 5)))
    assert b"5" not in admin.hgetall(name)
    # Also the last of them.
    other = kind.Lock(client, f"{name}:other")
    assert other.acquire(*((0.1, True, 5, "mine") if kind.name == "threads" else (True, 5, "mine")))
    assert admin.hget(f"{name}:other", "mine") == b"1"
    assert not kind.Lock(client, name).acquire(*((0.1, False) if kind.name == "threads" else (False,)))


def test_whether_to_wait_is_not_taken_for_the_time_to_sleep(client, name, server):
    with pytest.raises(TypeError, match="blocking="):
        holdfast.Lock(server.client(), name).acquire(False)


def test_a_client_of_the_other_kind(name):
    blocking, tasks = redis.Redis(), redis.asyncio.Redis()
    for api, client in ((holdfast, tasks), (holdfast.asyncio, blocking)):
        for make in (
            lambda a, c: a.Lock(c, name),
            lambda a, c: a.RLock(c, name),
            lambda a, c: a.Semaphore(c, name, 2),
            lambda a, c: a.LockAll(c, [name]),
            lambda a, c: a.RWLock(c, name).read(),
            lambda a, c: a.RedLock([c], name),
            lambda a, c: a.Session(c),
        ):
            with pytest.raises(TypeError, match="client must be"):
                make(api, client)
    with pytest.raises(TypeError, match="same kind"):
        holdfast.MultiLock([holdfast.Lock(blocking, name), holdfast.asyncio.Lock(tasks, f"{name}:2")])


def test_a_server_without_the_module_is_told_with_advice(kind, name):
    server = Server(module=False)
    try:
        with pytest.raises(holdfast.NotLoaded, match="MODULE LOAD") as caught:
            kind.Lock(kind.client(server.port), name).acquire()
        assert isinstance(caught.value, redis.ResponseError)
        assert isinstance(caught.value, holdfast.LockError)
    finally:
        server.close()


def test_a_final_refusal_leaves_nothing_and_says_nothing(kind, own_server, caplog):
    own_server.client().execute_command("ACL", "SETUSER", "limited", "on", ">secret", "~mine", "+@all")
    client = kind.client(own_server.port, username="limited", password="secret")
    mine = kind.Lock(client, "mine", ephemeral=True)
    mine.acquire()
    with caplog.at_level(logging.WARNING), pytest.raises(redis.ResponseError):
        kind.Lock(client, "another's").acquire()
    # Nothing goes on in the background that would say it later, or end the session.
    with kind.Session(client):
        mine.check()
    assert [record.getMessage() for record in caplog.records if "holdfast" in record.name] == []


def test_who_kept_a_lock_apart_from_a_block_is_not_taken_for_the_thread_that_waits(own_server, name):
    """Of a fresh process, both count from one."""
    program_ = program(
        own_server,
        f"""
        kept = holdfast.Lock(client, "{name}")
        kept.acquire()
        waits = threading.Thread(target=holdfast.Lock(client, "{name}").__enter__, daemon=True)
        waits.start()
        for number in range(20):
            threading.Thread(target=holdfast.Lock(client, "{name}").__enter__, daemon=True).start()
        info = []
        end = time.monotonic() + 20
        while len(client.execute_command("LOCK.WAITERS", "{name}")) < 21:
            assert time.monotonic() < end
            time.sleep(0.01)
        print("all wait", flush=True)
        os._exit(0)
        """,
    )
    assert program_.communicate(timeout=40) == ("all wait\n", "")

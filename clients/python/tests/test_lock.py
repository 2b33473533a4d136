"""What every lock does, for both kinds of client."""

import threading
import time

import pytest
import redis

import holdfast
from holdfast._hold import Hold, State
from kinds import Blocking
from servers import until, waiters


def in_thread(function):
    """Runs it, and gives back how to wait for its result."""
    result = []

    def work():
        try:
            result.append((function(), None))
        except BaseException as error:
            result.append((None, error))

    thread = threading.Thread(target=work, daemon=True)
    thread.start()

    def join(seconds=20):
        thread.join(seconds)
        assert result, f"still at it after {seconds} s"
        value, error = result[0]
        if error is not None:
            raise error
        return value

    return join


def test_takes_and_gives_back(kind, client, admin, name):
    lock = kind.Lock(client, name)
    assert lock.acquire() is True
    assert lock.locked()
    assert lock.owned()
    assert lock.fence == int(admin.hget(name, "#fence"))
    lock.release()
    assert not lock.locked()
    assert not lock.owned()
    assert lock.fence is None
    assert not admin.exists(name)


def test_one_holder_and_a_growing_fence(kind, client, name):
    fences = []
    for _ in range(3):
        with kind.Lock(client, name) as lock:
            fences.append(lock.fence)
            assert kind.Lock(client, name).acquire(blocking=False) is False
            assert not kind.Lock(client, name).owned()
    assert fences == sorted(set(fences))


def test_waits_in_the_servers_queue(kind, client, admin, name):
    order = []
    first = kind.Lock(client, name)
    first.acquire()
    joins = []
    for number in range(5):
        lock = kind.Lock(client, name, thread_local=False)

        def take(lock=lock, number=number):
            with lock:
                order.append(number)

        joins.append(in_thread(take))
        until(lambda n=number: waiters(admin, name) == n + 1, "it waits")
    first.release()
    for join in joins:
        join()
    assert order == [0, 1, 2, 3, 4]


def test_gives_up_in_time(kind, client, admin, name):
    holder = kind.Lock(client, name)
    holder.acquire()
    begin = time.monotonic()
    assert kind.Lock(client, name).acquire(blocking_timeout=0.2) is False
    assert 0.2 <= time.monotonic() - begin < 1
    assert waiters(admin, name) == 0
    assert kind.Lock(client, name, blocking_timeout=0).acquire() is False
    assert kind.Lock(client, name, blocking=False).acquire() is False


def test_a_block_that_is_not_entered_in_time(kind, client, name):
    holder = kind.Lock(client, name)
    holder.acquire()
    with pytest.raises(holdfast.NotGranted) as caught, kind.Lock(client, name, blocking_timeout=0.05):
        pytest.fail("it was entered")
    assert caught.value.lock_name == name
    assert isinstance(caught.value, redis.exceptions.LockError)


def test_watched_without_a_timeout(kind, admin, own_server, name):
    client = kind.client(own_server.port)
    lock = kind.Lock(client, name)
    lock.acquire()
    # The server's default lease is three seconds here.
    time.sleep(3.5)
    lock.check()
    assert lock.owned()
    lock.release()


def test_a_timeout_is_a_lease(kind, client, admin, name):
    lock = kind.Lock(client, name, timeout=0.2)
    lock.acquire()
    assert 0 < admin.pttl(name) <= 200
    assert lock.lost.wait(5)
    with pytest.raises(holdfast.LockLost) as caught:
        lock.check()
    assert caught.value.reason == "expired"
    with pytest.raises(holdfast.LockLost):
        lock.release()
    with pytest.raises(holdfast.NotHeld):
        lock.release()


def test_extend_and_reacquire(kind, client, admin, name):
    lock = kind.Lock(client, name, timeout=10)
    lock.acquire()
    assert lock.extend(10) is True
    assert 19_000 < admin.pttl(name) <= 20_000
    assert lock.extend(5, replace_ttl=True) is True
    assert 4_000 < admin.pttl(name) <= 5_000
    assert lock.reacquire() is True
    assert 9_000 < admin.pttl(name) <= 10_000
    lock.release()


def test_extending_what_cannot_be_extended(kind, client, admin, name):
    with pytest.raises(holdfast.NotHeld):
        kind.Lock(client, name, timeout=1).extend(1)
    watched = kind.Lock(client, name)
    watched.acquire()
    with pytest.raises(holdfast.LockError):
        watched.extend(1)
    watched.release()
    lock = kind.Lock(client, name, timeout=10)
    lock.acquire()
    admin.delete(name)
    with pytest.raises(holdfast.LockLost):
        lock.extend(1)
    with pytest.raises(holdfast.LockLost):
        lock.release()


def test_a_token_of_ones_own_is_the_owner(kind, client, admin, name):
    lock = kind.Lock(client, name)
    lock.acquire(token="mine")
    assert admin.hget(name, "mine") == b"1"
    lock.release()


def test_release_tells_that_somebody_else_has_it(kind, client, admin, name):
    lock = kind.Lock(client, name, timeout=10)
    lock.acquire()
    admin.execute_command("LOCK.FORCE", name)
    other = kind.Lock(client, name)
    other.acquire()
    with pytest.raises(holdfast.LockLost) as caught:
        lock.release()
    assert isinstance(caught.value, redis.exceptions.LockNotOwnedError)
    assert other.owned()
    other.release()


def test_a_block_may_be_told_not_to_raise(kind, client, admin, name):
    with kind.Lock(client, name, raise_on_release_error=False):
        admin.execute_command("LOCK.FORCE", name)
    with pytest.raises(holdfast.LockLost), kind.Lock(client, name):
        admin.execute_command("LOCK.FORCE", name)


def test_the_error_of_the_body_goes_first(kind, client, admin, name):
    with pytest.raises(ZeroDivisionError), kind.Lock(client, name):
        admin.execute_command("LOCK.FORCE", name)
        raise ZeroDivisionError


def test_a_key_that_is_no_lock(kind, client, admin, name):
    admin.set(name, "text")
    with pytest.raises(holdfast.WrongType):
        kind.Lock(client, name).acquire()
    admin.delete(name)
    lock = kind.Lock(client, name)
    lock.acquire()
    admin.set(name, "text")
    with pytest.raises(holdfast.LockLost) as caught:
        lock.release()
    assert caught.value.reason == "changed"


def test_semaphore(kind, client, name):
    one, two, three = (kind.Semaphore(client, name, 2) for _ in range(3))
    assert one.acquire()
    assert two.acquire()
    assert one.fence < two.fence
    assert not three.acquire(blocking=False)
    one.release()
    assert three.acquire(blocking_timeout=5)
    three.release()
    two.release()


def test_one_semaphore_object_takes_many_permits(kind, client, name):
    semaphore = kind.Semaphore(client, name, 2)
    assert semaphore.acquire()
    assert semaphore.acquire()
    assert not semaphore.acquire(blocking=False)
    semaphore.release()
    assert semaphore.acquire(blocking=False)
    semaphore.release()
    semaphore.release()
    assert not semaphore.locked()


def test_readers_and_writers(kind, client, admin, name):
    lock = kind.RWLock(client, name, thread_local=False)
    with lock.read(), lock.read():
        assert not lock.write().acquire(blocking=False)
        writer = lock.write()
        join = in_thread(lambda: writer.acquire())
        until(lambda: waiters(admin, name) == 1, "the writer waits")
        # Readers do not pass a writer.
        assert not lock.read().acquire(blocking=False)
    assert join()
    assert not lock.read().acquire(blocking=False)


def test_several_at_once(kind, client, admin, name):
    names = [f"{name}:a", f"{name}:b"]
    with kind.LockAll(client, names) as lock:
        assert lock.owned()
        assert int(admin.hget(names[0], "#fence")) == int(admin.hget(names[1], "#fence")) == lock.fence
        assert not kind.Lock(client, names[1]).acquire(blocking=False)
        assert not kind.LockAll(client, reversed(names)).acquire(blocking_timeout=0.05)
    assert not lock.locked()
    assert not admin.exists(*names)


def test_several_at_once_are_lost_one_by_one(kind, client, admin, name):
    names = [f"{name}:a", f"{name}:b"]
    lock = kind.LockAll(client, names)
    lock.acquire()
    admin.execute_command("LOCK.FORCE", names[1])
    assert lock.lost.wait(5)
    with pytest.raises(holdfast.LockLost):
        lock.release()
    until(lambda: not admin.exists(*names), "the other one was given back")


@pytest.mark.parametrize("names", ["one", b"one", []])
def test_several_are_several(kind, client, names):
    with pytest.raises((TypeError, ValueError), match="name"):
        kind.LockAll(client, names)


def test_loss_is_told_at_once(kind, client, admin, name):
    told = []
    lock = kind.Lock(client, name, on_lost=told.append)
    lock.acquire()
    lost = lock.lost
    assert not lost.is_set()
    admin.execute_command("LOCK.FORCE", name)
    assert lost.wait(5)
    until(lambda: told, "on_lost is called")
    assert told[0].reason == "forced"
    assert told[0].lock_name == name
    with pytest.raises(holdfast.LockLost, match="forced"):
        lock.check()
    with pytest.raises(holdfast.LockLost, match="forced"):
        lock.release()


@pytest.mark.parametrize(
    ("command", "reason"),
    [(("DEL",), "changed"), (("SET",), "changed"), (("PEXPIRE",), "expired"), (("LOCK.FORCE",), "forced")],
)
def test_why_it_was_lost(kind, client, admin, name, command, reason):
    # A watched lock would be renewed again.
    lock = kind.Lock(client, name, timeout=60, ephemeral=True)
    lock.acquire()
    lost = lock.lost
    more = {"SET": ("x",), "PEXPIRE": (1,)}.get(command[0], ())
    admin.execute_command(*command, name, *more)
    assert lost.wait(5)
    with pytest.raises(holdfast.LockLost) as caught:
        lock.release()
    assert caught.value.reason == reason
    assert caught.value.owner
    assert caught.value.fence


def test_its_own_release_is_no_loss(kind, client, name):
    told = []
    for _ in range(50):
        with kind.Lock(client, name, on_lost=told.append):
            pass
    with kind.Lock(client, name, timeout=0.3, on_lost=told.append):
        pass
    time.sleep(0.5)
    assert told == []


def test_an_on_lost_that_fails_harms_nobody(kind, client, admin, name):
    lock = kind.Lock(client, name, on_lost=lambda _: 1 / 0)
    lock.acquire()
    lost = lock.lost
    admin.execute_command("LOCK.FORCE", name)
    assert lost.wait(5)
    with kind.Lock(client, name, blocking_timeout=5):
        pass


def test_what_is_not_held_cannot_be_watched(kind, client, name):
    lock = kind.Lock(client, name)
    for use in (lock.check, lock.release, lambda: lock.lost):
        with pytest.raises(holdfast.NotHeld, match=name):
            use()


@pytest.mark.parametrize(
    "settings", [{"timeout": 0.0001}, {"timeout": -1}, {"limit": -1}, {"replicas": -1}], ids=lambda s: next(iter(s))
)
def test_settings_that_make_no_sense(kind, client, name, settings):
    with pytest.raises(ValueError, match=next(iter(settings))):
        kind.Lock(client, name, **settings)


def test_no_replicas(kind, client, name):
    lock = kind.Lock(client, name, replicas=1)
    with pytest.raises(holdfast.NoReplicas):
        lock.acquire()
    assert not lock.locked()


def test_decoded_responses(kind, server, admin, name):
    client = kind.client(server.port, decode_responses=True)
    with kind.Lock(client, name) as lock:
        assert lock.owned()
    with kind.LockAll(client, [name]) as lock:
        assert lock.owned()


@pytest.mark.parametrize("protocol", [2, 3])
def test_both_protocols(kind, server, admin, name, protocol):
    client = kind.client(server.port, protocol=protocol)
    with kind.Lock(client, name) as lock:
        assert lock.owned()
        lost = lock.lost
        other = kind.Lock(client, name)
        join = in_thread(other.acquire)
        until(lambda: waiters(admin, name) == 1, "it waits")
        assert not lost.is_set()
    assert join()


def test_bytes_as_a_name(kind, client, admin):
    with kind.Lock(client, b"lock:\xff\x00"):
        assert admin.exists(b"lock:\xff\x00")


def test_another_database(kind, server, admin, name):
    client = kind.client(server.port, db=3)
    lock = kind.Lock(client, name)
    lock.acquire()
    assert not admin.exists(name)
    lost = lock.lost
    other = server.client(db=3)
    other.execute_command("LOCK.FORCE", name)
    assert lost.wait(5)


def made_by_the_client(kind, client, name):
    def make():
        return client.lock(name, timeout=600, blocking_timeout=60, lock_class=kind.api.Lock)

    if kind.name == "threads":
        lock = make()
        assert type(lock) is holdfast.Lock
        return lock
    lock = kind._in_loop(make)
    assert type(lock) is holdfast.asyncio.Lock
    return Blocking(kind, lock)


def takes_turns(kind, client, name):
    with made_by_the_client(kind, client, name) as lock:
        assert lock.fence
        assert lock.timeout == 600
        assert lock.blocking_timeout == 60
        assert not kind.Lock(client, name).acquire(blocking=False)
        with pytest.raises(redis.exceptions.LockError), kind.Lock(client, name, blocking=False):
            pass
    assert not lock.locked()


def test_made_by_the_client(kind, client, name):
    takes_turns(kind, client, name)


def test_locks_of_clients_that_share_a_pool_share_a_session(kind, own_server, name):
    client = kind.client(own_server.port)
    admin = own_server.client()
    locks = [kind.Lock(client, name)]
    locks[0].acquire()
    # The one by which the server was tried after its start is gone then.
    before = 3
    until(lambda: len(admin.client_list()) == before, "there are its two and the one that looks")
    for number in range(5):
        if kind.name == "threads":
            other = redis.Redis(connection_pool=client.connection_pool)
        else:
            other = kind._in_loop(lambda: redis.asyncio.Redis(connection_pool=client.connection_pool))
        locks.append(kind.Lock(other, f"{name}:{number}"))
        locks[-1].acquire()
    assert len(admin.client_list()) == before


def test_many_wait_with_few_connections(kind, own_server, name):
    client = kind.client(own_server.port)
    admin = own_server.client()
    holder = kind.Lock(client, name)
    holder.acquire()
    if kind.name == "threads":
        joins = [in_thread(lambda: kind.Lock(client, name).__enter__().release()) for _ in range(100)]
    else:
        import asyncio

        async def take():
            async with kind.api.Lock(client, name):
                pass

        joins = [asyncio.run_coroutine_threadsafe(take(), kind.loop).result for _ in range(1000)]
    until(lambda: waiters(admin, name) == len(joins), "all wait")
    assert len(admin.client_list()) <= 40
    holder.release()
    for join in joins:
        join(60)


def test_a_server_without_the_module(kind, name):
    from servers import Server

    server = Server(module=False)
    try:
        with pytest.raises(redis.ResponseError, match="LOCK"):
            kind.Lock(kind.client(server.port), name).acquire()
    finally:
        server.close()


def test_no_server(kind, name):
    from servers import free_port

    begin = time.monotonic()
    with pytest.raises(redis.ConnectionError):
        kind.Lock(kind.client(free_port()), name).acquire()
    assert time.monotonic() - begin < 5


def test_a_lock_object_that_threads_share_loses_no_hold(server, name):
    """While one looks whether the newest has been given back, another one takes a permit."""
    semaphore = holdfast.Semaphore(server.client(), name, 8, thread_local=False)
    holds = semaphore._held().holds
    taken = Hold(name, (b"",), semaphore._terms, 1, b"")
    taken.state = State.HELD

    class GivenBack(Hold):
        @property
        def state(self):
            if taken not in holds:
                holds.append(taken)
            return State.OVER

    holds.append(GivenBack(name, (b"",), semaphore._terms, 2, b""))
    assert semaphore._current("release") is taken
    # There is nothing of it at the server.
    holds.clear()

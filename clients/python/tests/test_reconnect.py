"""The session's connection ends: everything is taken along, or told to be lost."""

import signal
import threading
import time

import pytest
import redis

import holdfast
from holdfast import _shell
from holdfast._clock import now
from proxy import Proxy
from servers import HOST, Stalls, holder, pairs, until, waiters
from test_lock import in_thread


@pytest.fixture
def admin(own_server):
    client = own_server.client()
    yield client
    client.close()


@pytest.fixture
def proxy(own_server):
    proxy = Proxy(own_server.port)
    yield proxy
    proxy.close()


@pytest.fixture
def client(kind, own_server):
    return kind.client(own_server.port)


def sessions(admin):
    """The connections that read LOCK.NEXT."""
    return [one["id"] for one in admin.client_list() if one["cmd"] == "lock.next"]


def kill_session(admin):
    [session] = until(lambda: sessions(admin), "there is a session")
    admin.client_kill_filter(_id=session)


def tied_anew(admin, name):
    """Waits until a lock belongs to the next session. (Who gives it back before that may hear that it is not held: the
    request may have arrived over the old connections, and is sent once more.)"""
    until(lambda: str(holder(admin, name)[b"client"]) in sessions(admin), "tied anew")


def test_many_who_are_the_first_to_ask(own_server, admin, name, monkeypatch):
    """Threads that use a client for the first time in the same instant share its session, and its thread."""

    class Slow(_shell.Node):
        def __init__(self, *args):
            super().__init__(*args)
            time.sleep(0.05)

    monkeypatch.setattr(_shell, "Node", Slow)
    client, others = redis.Redis(host=HOST, port=own_server.port), session_threads()
    for join in [in_thread(holdfast.Lock(client, f"{name}:{number}").acquire) for number in range(8)]:
        assert join()
    assert len(sessions(admin)) == 1
    assert len(session_threads() - others) == 1


def session_threads():
    return {one for one in threading.enumerate() if one.name == "holdfast-session"}


def test_a_watched_lock_is_taken_along(kind, client, admin, name):
    told = []
    lock = kind.Lock(client, name, on_lost=told.append)
    lock.acquire()
    fence = lock.fence
    kill_session(admin)
    tied_anew(admin, name)
    assert holder(admin, name)[b"watchdog"]
    # Longer than the lease: it is watched again.
    time.sleep(3.5)
    lock.check()
    assert lock.fence == fence
    lock.release()
    assert told == []


def test_several_are_taken_along(kind, client, admin, name):
    lock = kind.LockAll(client, [f"{name}:a", f"{name}:b"])
    lock.acquire()
    kill_session(admin)
    for one in lock.name:
        tied_anew(admin, one)
    lock.release()


def test_a_wait_is_taken_along(kind, client, admin, name):
    first = kind.Lock(client, name)
    first.acquire()
    second = kind.Lock(client, name, thread_local=False)
    join = in_thread(lambda: second.acquire(blocking_timeout=20))
    until(lambda: waiters(admin, name) == 1, "it waits")
    kill_session(admin)
    until(lambda: waiters(admin, name) == 1, "it waits again")
    first.release()
    assert join() is True
    second.release()


def test_a_wait_that_is_taken_along_keeps_its_place(kind, own_server, admin, name):
    def queue():
        waiting = map(pairs, admin.execute_command("LOCK.WAITERS", name))
        return {one[b"owner"]: one[b"client"] for one in waiting}

    first = kind.Lock(kind.client(own_server.port), name)
    first.acquire()
    waiting = []
    for number in 1, 2, 3:
        lock = kind.Lock(kind.client(own_server.port), name, thread_local=False)
        waiting.append((lock, in_thread(lambda lock=lock: lock.acquire(blocking_timeout=60))))
        until(lambda number=number: waiters(admin, name) == number, "it waits")
    places = queue()
    for owner, session in list(places.items())[:2]:
        admin.client_kill_filter(_id=session)
        until(lambda owner=owner, session=session: queue().get(owner, session) != session, "it waits again")
        assert list(queue()) == list(places)
    first.release()
    for lock, join in waiting:
        assert join() is True
        lock.release()


def test_an_ephemeral_lock_is_lost(kind, client, admin, name):
    lock = kind.Lock(client, name, ephemeral=True)
    lock.acquire()
    lost = lock.lost
    kill_session(admin)
    assert lost.wait(5)
    with pytest.raises(holdfast.LockLost) as caught:
        lock.release()
    assert caught.value.reason == "disconnected"
    assert not admin.exists(name)


def test_a_lock_that_was_taken_away_meanwhile_is_lost(kind, proxy, admin, name):
    lock = kind.Lock(kind.client(proxy.port), name)
    lock.acquire()
    lost = lock.lost
    proxy.cut()
    admin.execute_command("LOCK.FORCE", name)
    assert not lost.is_set()
    proxy.mend()
    assert lost.wait(5)
    with pytest.raises(holdfast.LockLost, match="disconnected"):
        lock.check()


def counts_until(lock, end):
    """In doubt it counts as held: only on a machine that stood still for so long may it be lost by now."""
    try:
        lock.check()
    except holdfast.LockLost:
        assert now() >= end


def test_in_doubt_it_is_lost_once_its_lease_could_have_run_out(kind, proxy, admin, name):
    with Stalls() as stalls:
        told = []

        def on_lost(_):
            told.append((now(), stalls.clock()))

        lock = kind.Lock(kind.client(proxy.port), name, on_lost=on_lost)
        begin = now()
        lock.acquire()
        proxy.cut()
        # Until here it may have heard once more that it is alive.
        heard_before = stalls.clock()
        counts_until(lock, begin + 2.999)
        until(lambda: told, "on_lost is called")
    # A lease of three seconds, in whole milliseconds, counted from before it was asked for; and a moment more in which
    # this process could run.
    [(at, running)] = told
    assert begin + 2.999 <= at
    assert running < heard_before + 3.1
    with pytest.raises(holdfast.LockLost, match="disconnected"):
        lock.check()


def test_a_pair_of_which_one_has_ended_before_it_is_whole_is_none(kind, proxy, name):
    first = []

    def end_the_first(request):
        if not first:
            first.extend(proxy.links)
        elif first[0] in proxy.links and len(proxy.links) == 2:
            # The other one is logging in.
            first[0].close()
            time.sleep(0.2)

    proxy.rule = end_the_first
    begin = now()
    with kind.Lock(kind.client(proxy.port), name, blocking_timeout=8):
        # Whoever does not notice waits for an answer until his time is over.
        assert now() - begin < 5


def test_a_silent_server_is_gone(kind, own_server, name):
    """The connection stands, and nobody answers: as when the cable is cut, or the server frozen."""
    lock = kind.Lock(kind.client(own_server.port, socket_timeout=1), name)
    lock.acquire()
    lost = lock.lost
    own_server.signal(signal.SIGSTOP)
    try:
        assert lost.wait(10)
    finally:
        own_server.signal(signal.SIGCONT)


# The user `locker` of docs/operations.md.
LOCKER = """+lock.acquire +lock.release +lock.renew +lock.macquire +lock.mrelease +lock.mrenew +lock.next +lock.cancel
            +lock.owner +lock.info +lock.waiters +lock.top +lock.help"""


def test_a_user_who_may_only_lock(kind, own_server, admin, name):
    admin.execute_command("ACL", "SETUSER", "locker", "on", ">secret", f"~{name}", "-@all", *LOCKER.split())
    lock = kind.Lock(kind.client(own_server.port, username="locker", password="secret", socket_timeout=1), name)
    lock.acquire()
    kill_session(admin)
    until(lambda: sessions(admin), "there is another session")
    # Longer than the lease: it is watched again.
    time.sleep(3.5)
    lock.check()
    lost = lock.lost
    own_server.signal(signal.SIGSTOP)
    try:
        # It knows how long the lease is that it did not name.
        assert lost.wait(10)
    finally:
        own_server.signal(signal.SIGCONT)


def test_a_default_lease_that_changes_counts_for_what_comes_after(kind, own_server, admin, name):
    # A session that a busy machine breaks takes its hold along with the lease that is the default then.
    client = kind.client(own_server.port, socket_timeout=5)
    old = kind.Lock(client, f"{name}:old")
    old.acquire()
    admin.config_set("holdfast.default-lease", 300_000)
    # Heard with the next sign of life: of the next two answers, the first may have been under way.
    asked = admin.info("commandstats")["cmdstat_lock.next"]["calls"]
    until(lambda: admin.info("commandstats")["cmdstat_lock.next"]["calls"] >= asked + 2, "two signs of life")
    new = kind.Lock(client, f"{name}:new")
    new.acquire()
    lost = old.lost
    own_server.signal(signal.SIGSTOP)
    try:
        assert lost.wait(10)
        new.check()
    finally:
        own_server.signal(signal.SIGCONT)


def test_a_lock_with_a_timeout_needs_no_session(kind, client, admin, name):
    lock = kind.Lock(client, name, timeout=30)
    lock.acquire()
    kill_session(admin)
    lock.check()
    assert lock.owned()
    tied_anew(admin, name)
    lock.release()


def test_who_looks_while_the_session_ends_is_answered_by_the_next(kind, client, admin, name):
    lock = kind.Lock(client, name, timeout=30)
    lock.acquire()
    for _ in range(20):
        kill_session(admin)
        assert lock.owned()
    tied_anew(admin, name)
    lock.release()


def test_the_server_restarts_empty(kind, own_server, name):
    client = kind.client(own_server.port)
    lock = kind.Lock(client, name)
    lock.acquire()
    lost = lock.lost
    waiting = kind.Lock(client, name, thread_local=False)
    admin = own_server.client()
    join = in_thread(lambda: waiting.acquire(blocking_timeout=30))
    until(lambda: waiters(admin, name) == 1, "it waits")
    own_server.kill()
    own_server.start()
    # Who of the two is there first has it; a server without memory can't know better.
    assert join() is True
    assert lost.wait(10)
    waiting.check()
    waiting.release()


def test_acquire_fails_while_the_server_is_gone_and_works_after_it(kind, own_server, name):
    from redis.backoff import NoBackoff
    from redis.exceptions import ConnectionError, TimeoutError

    if kind.name == "threads":
        from redis.retry import Retry
    else:
        from redis.asyncio.retry import Retry
    client = kind.client(own_server.port, retry=Retry(NoBackoff(), 0))
    lock = kind.Lock(client, name)
    with lock:
        pass
    own_server.kill()
    with pytest.raises((ConnectionError, TimeoutError)):
        lock.acquire()
    own_server.start()

    def works():
        # A pool of asyncio does not see at once that its connections are dead.
        try:
            return lock.acquire()
        except ConnectionError:
            return False

    until(works, "it works again")
    lock.check()
    lock.release()

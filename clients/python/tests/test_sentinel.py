"""Sentinel: the master dies, and the client finds the next one by itself."""

import pytest
import redis

import holdfast
from servers import Sentinels, holder, until, waiters
from test_lock import in_thread, takes_turns


@pytest.fixture
def client(kind, sentinels):
    return kind.sentinel(sentinels.sentinel.port, Sentinels.NAME)


def is_master(server):
    # In the moment of the change it closes its connections.
    try:
        return server.client().info("replication")["role"] == "master"
    except redis.ConnectionError:
        return False


def failover(sentinels):
    try:
        return sentinels.sentinel.client().execute_command("SENTINEL", "FAILOVER", Sentinels.NAME)
    except redis.ResponseError:
        # NOGOODSLAVE: it has not heard from the replica for a while.
        return None


def watched(server, name):
    one = holder(server.client(), name)
    return one and one[b"watchdog"]


def test_made_by_a_client_of_sentinel(kind, client, name):
    takes_turns(kind, client, name)


def test_a_failover(kind, client, sentinels, name):
    told = []
    # On a busy machine the replica may take more than the second that is usual.
    sentinels.master.client().config_set("holdfast.replicas-timeout", 10000)
    held = kind.Lock(client, name, replicas=1, on_lost=told.append)
    held.acquire()
    fence = held.fence
    waiting = kind.Lock(client, name, thread_local=False)
    join = in_thread(lambda: waiting.acquire(blocking_timeout=50))
    until(lambda: waiters(sentinels.master.client(), name) == 1, "it waits")

    sentinels.kill_master()
    until(lambda: is_master(sentinels.replica), "the replica took over", 30)

    # The wait goes on at the new master, and the hold, which the replica had, is watched there: without its replicas=1,
    # which nobody can confirm any more, it is only in doubt until its lease is over.
    until(lambda: waiters(sentinels.replica.client(), name) == 1, "it waits at the new master", 30)
    held.check()
    assert held.fence == fence
    held.release()
    assert join() is True
    assert waiting.fence > fence
    waiting.release()
    assert told == []


def test_a_watched_lock_goes_along(kind, client, sentinels, name):
    lock = kind.Lock(client, name)
    lock.acquire()
    until(lambda: sentinels.replica.client().exists(name), "the replica has it")
    sentinels.kill_master()
    until(lambda: is_master(sentinels.replica), "the replica took over", 30)

    until(lambda: watched(sentinels.replica, name), "it is watched at the new master", 30)
    lock.check()
    lock.release()


def test_a_demoted_master_is_left(kind, client, sentinels, name):
    lock = kind.Lock(client, name)
    lock.acquire()
    until(lambda: sentinels.replica.client().exists(name), "the replica has it")
    until(lambda: failover(sentinels), "the Sentinel takes the replica for good")
    until(lambda: is_master(sentinels.replica), "the replica took over", 30)

    def taken():
        try:
            return kind.Lock(client, f"{name}:other").acquire(blocking_timeout=5)
        except redis.RedisError:
            return False

    until(taken, "locks are granted again", 30)

    until(lambda: watched(sentinels.replica, name), "it is watched at the new master", 30)
    lock.check()
    lock.release()
    with pytest.raises(holdfast.NotHeld):
        lock.release()

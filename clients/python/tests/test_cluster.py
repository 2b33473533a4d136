"""A cluster: a session for each node that is used, and slots that move."""

import asyncio
import time

import pytest
import redis
import redis.asyncio
from test_process import ends, program

import holdfast
import holdfast.asyncio
from kinds import closed
from servers import HOST, Cluster, holder, until, waiters
from test_lock import in_thread, takes_turns


@pytest.fixture
def client(kind, cluster):
    return kind.cluster(cluster.nodes[0].port)


def names_of_each_master(cluster, name):
    """A name in a slot of each master."""
    found = {}
    for number in range(1000):
        found.setdefault(cluster.owner(f"{name}:{number}"), f"{name}:{number}")
        if len(found) == len(cluster.masters):
            return [found[index] for index in sorted(found)]
    raise AssertionError("the slots are unevenly shared")


def test_locks_on_every_master(kind, client, cluster, name):
    for one in names_of_each_master(cluster, name):
        first, second = kind.Lock(client, one), kind.Lock(client, one, thread_local=False)
        first.acquire()
        assert not second.acquire(blocking=False)
        join = in_thread(second.acquire)
        admin = cluster.masters[cluster.owner(one)].client()
        until(lambda a=admin, n=one: waiters(a, n) == 1, "it waits")
        first.release()
        assert join()
        assert second.owned()
        second.release()


def test_one_thread_for_all_nodes(cluster, name):
    names = [f"{{{one}}}:{number}" for one in names_of_each_master(cluster, name) for number in range(3)]
    # A program of its own: here, clients of earlier tests may still look for their servers, each in a thread.
    source = f"""
        client = redis.RedisCluster(host="127.0.0.1", port={cluster.nodes[0].port})
        before = set(threading.enumerate())
        locks = [holdfast.Lock(client, one, timeout=30) for one in {names}]
        for lock in locks:
            lock.acquire()
        threads = set(threading.enumerate()) - before
        print(sorted(thread.name for thread in threads if thread.name != "holdfast"))
        assert all(thread.daemon for thread in threads)
        sys.stdout.flush()
        os._exit(0)
    """
    assert ends(program(cluster.nodes[0], source)) == "['holdfast-session']\n"


def test_made_by_the_client_of_a_cluster(kind, client, name):
    if not hasattr(client, "lock"):
        pytest.skip("redis-py's asyncio client of a cluster has no lock()")
    takes_turns(kind, client, name)


def test_several_of_one_slot(kind, client, cluster, name):
    with kind.LockAll(client, [f"{{{name}}}:a", f"{{{name}}}:b"]) as lock:
        assert lock.owned()
    with pytest.raises(redis.RedisError):
        kind.LockAll(client, names_of_each_master(cluster, name)).acquire()


def test_loss_is_told_by_every_master(kind, client, cluster, name):
    for one in names_of_each_master(cluster, name):
        lock = kind.Lock(client, one)
        lock.acquire()
        lost = lock.lost
        cluster.masters[cluster.owner(one)].client().execute_command("LOCK.FORCE", one)
        assert lost.wait(5)


@pytest.fixture
def own_cluster():
    cluster = Cluster()
    yield cluster
    cluster.close()


def test_a_slot_moves(kind, own_cluster, name):
    cluster = own_cluster
    client = kind.cluster(cluster.nodes[0].port)
    source = cluster.masters[cluster.owner(name)]
    target = cluster.masters[1 - cluster.owner(name)]
    free = f"{{{name}}}:free"
    assert cluster.owner(free) == cluster.owner(name)
    told = []
    held = kind.Lock(client, name, on_lost=told.append)
    held.acquire()
    leased = kind.Lock(client, f"{{{name}}}:leased", timeout=60)
    leased.acquire()
    waiting = kind.Lock(client, name, thread_local=False)
    join = in_thread(lambda: waiting.acquire(blocking_timeout=30))
    until(lambda: waiters(source.client(), name) == 1, "it waits")

    cluster.begin_move(cluster.slot(name), source, target)
    # What is not there is asked for where it will be.
    with kind.Lock(client, free) as lock:
        assert lock.owned()
    leased.reacquire()
    cluster.finish_move(cluster.slot(name), source, target)

    # The wait goes on at the other node, and the hold is watched there.
    until(lambda: waiters(target.client(), name) == 1, "it waits at the other node")
    until(lambda: holder(target.client(), name)[b"watchdog"], "it is watched there")
    assert held.owned()
    held.check()
    held.release()
    assert join() is True
    waiting.release()
    leased.release()
    assert told == []


def test_a_master_dies(kind, name):
    cluster = Cluster(3, replicas=True)
    try:
        client = kind.cluster(cluster.nodes[0].port)
        with kind.Lock(client, name):
            pass
        lock = kind.Lock(client, name)
        lock.acquire()
        master, replica = cluster.masters[cluster.owner(name)], cluster.nodes[3 + cluster.owner(name)]
        # WAIT on a connection that has written nothing says how many replicas there are, not what they have.
        until(lambda: replica.client().dbsize() == 1, "the replica has it")
        master.kill()
        begin = time.monotonic()

        def again():
            try:
                return kind.Lock(client, f"{{{name}}}:other").acquire(blocking_timeout=5)
            except (redis.RedisError, redis.exceptions.RedisClusterException):
                return False

        until(again, "the replica took over", 30)
        assert time.monotonic() - begin < 20
        # It was taken along, by its replica.
        lock.check()
        assert lock.owned()
        lock.release()
    finally:
        cluster.close()


@pytest.mark.skipif(
    5 < int(redis.VERSION[0]) < 8, reason="redis-py 6 and 7 stumble themselves over connections that they close there"
)
def test_requests_of_threads_while_the_client_reads_the_topology_anew(cluster, name):
    client = cluster.client()
    lock = holdfast.Lock(client, name, thread_local=False)
    lock.acquire()
    joins = [in_thread(lambda: [lock.owned() for _ in range(40)]) for _ in range(4)]
    for _ in range(20):
        client.nodes_manager.initialize()
    assert [join() for join in joins] == [[True] * 40] * 4
    lock.release()


@pytest.mark.usefixtures("end_tasks")
async def test_requests_under_way_while_the_client_reads_the_topology_anew(cluster, name):
    """redis-py then closes connections on which somebody waits for a reply."""
    client = redis.asyncio.RedisCluster(host=HOST, port=cluster.nodes[0].port)
    lock = holdfast.asyncio.Lock(client, name)
    await lock.acquire()
    for _ in range(30):
        assert await asyncio.gather(lock.owned(), client.nodes_manager.initialize(), lock.owned()) == [True, None, True]
    await lock.release()
    await closed(client)


def test_release_during_a_move(kind, own_cluster, name):
    cluster = own_cluster
    client = kind.cluster(cluster.nodes[0].port)
    source = cluster.masters[cluster.owner(name)]
    target = cluster.masters[1 - cluster.owner(name)]
    lock = kind.Lock(client, name)
    lock.acquire()
    cluster.begin_move(cluster.slot(name), source, target)
    source.client().execute_command("MIGRATE", "127.0.0.1", target.port, name, 0, 5000)
    # The key is at the one node, its slot still at the other.
    lock.release()
    with pytest.raises(holdfast.NotHeld):
        lock.release()
    cluster.finish_move(cluster.slot(name), source, target)
    with kind.Lock(client, name) as lock:
        assert lock.owned()

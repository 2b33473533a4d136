"""Locks at several servers: all or none, in an order that all share, so that nobody waits in a cycle."""

import random
import threading
from types import SimpleNamespace

import pytest
import simulated

import holdfast
from holdfast import _multilock
from holdfast._core.step import Terms
from holdfast._hold import Hold
from holdfast._lock import FOREVER
from holdfast._order import place, server_name
from servers import Server, until, waiters
from test_lock import in_thread


@pytest.fixture(scope="module")
def others():
    servers = [Server(), Server()]
    yield servers
    for one in servers:
        one.close()


@pytest.fixture
def everywhere(server, others):
    """Three servers, in the order that all clients share."""
    return sorted([server, *others], key=lambda one: str(one.port))


@pytest.fixture
def clients(kind, everywhere):
    return [kind.client(one.port) for one in everywhere]


def test_all_are_held_and_given_back(kind, clients, everywhere, name):
    locks = [kind.Lock(client, name) for client in clients]
    both = kind.MultiLock(locks[::-1])
    assert both.acquire()
    assert both.owned()
    assert both.locked()
    assert all(lock.locked() for lock in locks)
    tokens = [int(one.client().hget(name, "#fence")) for one in everywhere]
    assert both.fences == tuple(reversed(tokens))
    both.check()
    both.release()
    assert not any(one.client().exists(name) for one in everywhere)
    assert both.fences == ()
    with pytest.raises(holdfast.NotHeld):
        both.release()


def test_none_is_held_when_one_cannot_be_had(kind, clients, everywhere, name):
    for taken in range(3):
        with kind.Lock(clients[taken], name):
            several = kind.MultiLock([kind.Lock(client, name) for client in clients])
            assert several.acquire(blocking=False) is False
            assert several.acquire(blocking_timeout=0.05) is False
            held = [one.client().exists(name) for one in everywhere]
            assert held == [index == taken for index in range(3)]
            assert waiters(everywhere[taken].client(), name) == 0


def test_one_request_for_each_server_and_database(kind, everywhere, name):
    admin = everywhere[0].client()
    one, two = kind.client(everywhere[0].port), kind.client(everywhere[0].port, db=1)
    with kind.MultiLock([kind.Lock(one, "x")]):
        pass
    admin.config_resetstat()
    with kind.MultiLock([kind.Lock(two, "b"), kind.Lock(one, "c"), kind.Lock(two, "a"), kind.Lock(one, "a")]) as all_:
        assert all_.fences[0] == all_.fences[2]
        assert all_.fences[1] == all_.fences[3]
    calls = admin.info("commandstats")
    assert calls["cmdstat_lock.macquire"]["calls"] == 2
    assert calls["cmdstat_lock.mrelease"]["calls"] == 2


def test_several_slots_of_a_cluster(kind, cluster, clients, name):
    client = kind.cluster(cluster.nodes[0].port)
    names = [f"{name}:{number}" for number in range(6)]
    with kind.MultiLock([kind.Lock(clients[0], name), *(kind.Lock(client, one) for one in names)]) as lock:
        assert lock.owned()
        assert all(cluster.masters[cluster.owner(one)].client().exists(one) for one in names)
    assert not any(cluster.masters[cluster.owner(one)].client().exists(one) for one in names)


def test_waits_in_the_queue_of_the_first_and_then_of_the_next(kind, clients, everywhere, name):
    first, last = kind.Lock(clients[0], name), kind.Lock(clients[2], name)
    first.acquire()
    last.acquire()
    several = kind.MultiLock([kind.Lock(client, name) for client in reversed(clients)], thread_local=False)
    join = in_thread(lambda: several.acquire(blocking_timeout=20))
    until(lambda: waiters(everywhere[0].client(), name) == 1, "it waits at the first")
    assert not everywhere[1].client().exists(name)
    first.release()
    until(lambda: waiters(everywhere[2].client(), name) == 1, "it waits at the last")
    last.release()
    assert join()
    several.release()


def test_lost_when_one_is_lost(kind, clients, everywhere, name):
    told = []
    several = kind.MultiLock([kind.Lock(client, name) for client in clients], on_lost=told.append)
    several.acquire()
    lost = several.lost
    several.check()
    everywhere[1].client().execute_command("LOCK.FORCE", name)
    assert lost.wait(5)
    until(lambda: told, "it is told")
    assert [one.reason for one in told] == ["forced"]
    with pytest.raises(holdfast.LockLost, match="forced"):
        several.check()
    with pytest.raises(holdfast.LockLost, match="forced"):
        several.release()
    assert not any(one.client().exists(name) for one in everywhere)


def test_what_was_lost_while_it_waited_for_the_last_is_taken_again(kind, clients, everywhere, name):
    last = kind.Lock(clients[2], name)
    several = kind.MultiLock([kind.Lock(client, name) for client in clients], thread_local=False)
    # The word of the loss and the grant come from two servers, in any order.
    for _ in range(20):
        last.acquire()
        join = in_thread(lambda: several.acquire(blocking_timeout=20))
        until(lambda: waiters(everywhere[2].client(), name) == 1, "it waits at the last")
        everywhere[0].client().execute_command("LOCK.FORCE", name)
        last.release()
        assert join()
        several.check()
        assert several.owned()
        several.release()


def test_the_time_of_all_begins_when_the_last_is_there(kind, clients, everywhere, name):
    last = kind.Lock(clients[2], name)
    last.acquire()
    several = kind.MultiLock([kind.Lock(client, name, timeout=9) for client in clients], thread_local=False)
    join = in_thread(lambda: several.acquire(blocking_timeout=20))
    first = everywhere[0].client()
    until(lambda: 0 < first.pttl(name) < 8900 and waiters(everywhere[2].client(), name) == 1, "its time runs")
    last.release()
    assert join()
    assert first.pttl(name) > 8900
    several.extend(10)
    assert first.pttl(name) > 15_000
    several.reacquire()
    assert first.pttl(name) < 9001
    several.release()


def test_what_cannot_be_taken_together(kind, clients, name):
    lock = kind.Lock(clients[0], name)
    for locks, error, words in (
        ([], ValueError, "at least one"),
        ([lock, kind.Lock(clients[0], name)], ValueError, "twice"),
        ([lock, kind.Lock(clients[1], name, timeout=3)], ValueError, "same timeout"),
        ([kind.Semaphore(clients[0], name, 3)], ValueError, "limit=3"),
        ([kind.RedLock(clients, name)], TypeError, "of one server each"),
        ([name], TypeError, "of one server each"),
    ):
        with pytest.raises(error, match=words):
            kind.MultiLock(locks)
    with pytest.raises(ValueError, match="token must be None"):
        kind.MultiLock([lock]).acquire(token="mine")


def test_the_names_of_servers(kind, cluster):
    import redis.asyncio

    library = redis if kind.name == "threads" else redis.asyncio
    for url, expected in (
        ("redis://localhost:6380/3", (b"localhost:6380", 3)),
        ("redis://127.0.0.1", (b"127.0.0.1:6379", 0)),
        ("unix:///run/redis.sock?db=2", (b"/run/redis.sock", 2)),
    ):
        assert place(library.Redis.from_url(url), b"key") == expected
    with pytest.MonkeyPatch.context():
        sentinel = kind.sentinel(cluster.nodes[0].port, "locks", db=4)
        assert place(sentinel, b"key") == (b"locks", 4)
    client = kind.cluster(cluster.nodes[0].port)
    assert server_name(client).startswith(b"127.0.0.1:")
    assert place(client, b"{user1000}.following")[1] == 3443


# Nobody waits in a cycle: the flows as they are, with played servers and a played clock.


def run_once(monkeypatch, seed):
    """Clients take random locks in random orders, are killed and run out of time; everyone else gets theirs."""
    rng = random.Random(seed)
    world = simulated.World(monkeypatch)
    servers = [simulated.Server(world) for _ in range(rng.randint(2, 4))]
    names = [f"server{number}" for number in rng.sample(range(100), len(servers))]
    patient = {}
    for number in range(rng.randint(2, 6)):
        client = simulated.Client(world, servers, rng)
        wait = FOREVER if rng.random() < 0.6 else rng.uniform(0.01, 5)
        turns = rng.randint(1, 4)
        if wait == FOREVER:
            patient[number] = client
        world.at(rng.uniform(0, 0.1), turn(world, client, number, names, rng, wait, turns, patient))
        if rng.random() < 0.2:
            patient.pop(number, None)
            world.at(rng.uniform(0, 1), client.kill)
    # Each turn takes at most a lease of somebody killed, and a moment.
    world.run(world.now + 3600)
    assert not patient, f"seed {seed}: {len(patient)} clients wait for ever"
    assert not any(server.held or server.queue for server in servers), f"seed {seed}: something is left behind"


def turn(world, client, number, names, rng, wait, turns, patient):
    def begin():
        if turns == 0:
            patient.pop(number, None)
            return
        chosen = rng.sample(range(len(names)), rng.randint(1, len(names)))
        keys = {index: rng.sample([b"a", b"b", b"c"], rng.randint(1, 3)) for index in chosen}
        # As a program names them, in any order; the groups are made by what makes them for MultiLock.
        locks = [
            SimulatedLock(SimpleNamespace(name=names[index], home=client.homes[index]), key)
            for index in chosen
            for key in keys[index]
        ]
        rng.shuffle(locks)
        groups = _multilock._groups(locks)
        parts = [
            (group[0].redis.home, Hold("x", tuple(one.key for one in group), Terms(), next(world.numbers), b""))
            for group in groups
        ]
        for _, hold in parts:
            hold.owner = b"%d:%d" % (number, turns)
        until = world.now + wait

        def taken(granted):
            if granted:
                world.at(
                    rng.uniform(0, 0.5),
                    lambda: client.run(_multilock._give_back([part for _, part in parts], []), again),
                )
            else:
                again(None)

        client.run(_multilock._take(parts, until), taken)

    def again(_):
        world.at(rng.uniform(0, 0.01), turn(world, client, number, names, rng, wait, turns - 1, patient))

    return begin


class SimulatedLock(_multilock.LockBase):
    """One key at a played server."""

    def __init__(self, client, key):
        self.redis, self.key, self.name = client, key, key
        self.limit, self.timeout, self.watched, self.replicas, self.ephemeral = 1, None, None, 0, False
        self._terms, self._keys = Terms(), (key,)


@pytest.mark.parametrize("block", range(4))
def test_nobody_waits_in_a_cycle(monkeypatch, block):
    monkeypatch.setattr(_multilock, "place", lambda client, key: (client.name.encode(), 0))
    for seed in range(block * 150, block * 150 + 150):
        run_once(monkeypatch, seed)


def test_in_the_order_of_their_naming_somebody_would(monkeypatch):
    """What the test above must notice: that the order is each client's own."""
    monkeypatch.setattr(_multilock, "place", lambda client, key: (client.name.encode(), 0))
    in_order = _multilock._groups
    rng = random.Random(1)
    monkeypatch.setattr(_multilock, "_groups", lambda locks: rng.sample(groups := in_order(locks), len(groups)))
    with pytest.raises(AssertionError, match="wait for ever"):
        for seed in range(200):
            run_once(monkeypatch, seed)


def test_a_crowd_on_real_servers(kind, clients, everywhere, name):
    """Random sets in random orders, some with little time; in the end everyone has had their turns."""
    counts = [0] * 9
    held = [threading.Lock() for _ in counts]

    def work(seed):
        mine = random.Random(seed)
        turns = 0
        while turns < 5:
            chosen = mine.sample(range(9), mine.randint(1, 5))
            locks = [kind.Lock(clients[index % 3], f"{name}:{index // 3}") for index in chosen]
            several = kind.MultiLock(locks, thread_local=False)
            if not several.acquire(blocking_timeout=mine.choice([None, None, 0.002])):
                continue
            for index in chosen:
                assert held[index].acquire(blocking=False), "held twice"
                counts[index] += 1
            for index in chosen:
                held[index].release()
            several.release()
            turns += 1
        return turns

    joins = [in_thread(lambda seed=seed: work(seed)) for seed in range(8)]
    assert [join(50) for join in joins] == [5] * 8
    assert not any(one.client().exists(f"{name}:{number}") for one in everywhere for number in range(3))

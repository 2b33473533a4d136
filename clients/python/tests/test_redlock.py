"""RedLock: a majority of independent servers, of which some are down, slow, or late."""

import collections
import signal
import threading
import time

import pytest
import redis

import holdfast
from holdfast._clock import now
from holdfast._home import Home
from holdfast._order import server_name
from holdfast._redlock import Vote, drift, majority
from proxy import Proxy
from servers import Server, Stalls, until, waiters
from test_lock import in_thread
from test_reconnect import counts_until

PATIENCE = 1.0
# Where every server answers, none is left out, on however busy a machine.
LONG = 30.0
# A lease is counted in whole ones.
MILLISECOND = 0.001


@pytest.fixture(scope="module")
def shared():
    servers = [Server() for _ in range(5)]
    yield servers
    for one in servers:
        one.close()


@pytest.fixture(params=[3, 5])
def servers(shared, request):
    """So many, in the order that all clients share."""
    return in_order(shared[: request.param])


@pytest.fixture
def own_servers():
    """Three that the test may do anything to."""
    servers = [Server(("holdfast.default-lease", "3000")) for _ in range(3)]
    yield in_order(servers)
    for one in servers:
        one.close()


def in_order(servers):
    return sorted(servers, key=lambda one: str(one.port))


def clients_of(kind, servers, **settings):
    return [kind.client(one.port, **settings) for one in servers]


@pytest.fixture
def clients(kind, servers):
    return clients_of(kind, servers)


def holders(servers, name):
    return sum(one.client().exists(name) for one in servers)


def votes(lock, servers, name):
    with lock:
        return holders(servers, name)


def timed(function):
    begin = time.monotonic()
    result = function()
    return result, time.monotonic() - begin


def works(lock):
    """Takes and gives back; how long that took."""
    (granted, seconds) = timed(lock.acquire)
    assert granted
    lock.check()
    lock.release()
    return seconds


def test_takes_all_and_gives_all_back(kind, clients, servers, name):
    lock = kind.RedLock(clients[::-1], name, server_timeout=LONG)
    assert lock.acquire()
    assert lock.owned()
    assert lock.locked()
    assert holders(servers, name) == len(servers)
    assert {int(one.client().hget(name, "#fence")) for one in servers} == {lock.fence}
    lock.release()
    assert not lock.locked()
    assert not lock.owned()
    assert holders(servers, name) == 0
    with pytest.raises(holdfast.NotHeld):
        lock.release()


def test_one_holder_and_a_growing_fence(kind, clients, name):
    fences = []
    for _ in range(3):
        with kind.RedLock(clients, name, server_timeout=LONG) as lock:
            fences.append(lock.fence)
            assert kind.RedLock(clients, name, server_timeout=LONG).acquire(blocking=False) is False
            assert kind.RedLock(clients, name, server_timeout=LONG).acquire(blocking_timeout=0.05) is False
    assert fences == sorted(set(fences))


def test_the_fence_grows_whichever_majority_it_is(kind, own_servers, name):
    """One server's clock is ten minutes ahead; the next majority, without it, has a greater token all the same."""
    clients = clients_of(kind, own_servers)
    ahead = kind.Lock(clients[0], name)
    ahead.acquire()
    far = ahead.fence + 600 * 1_000_000
    admin = own_servers[0].client()
    admin.execute_command("LOCK.RENEW", name, holder_of(admin, name), "FENCE", far)
    admin.execute_command("LOCK.FORCE", name)
    with kind.RedLock(clients, name, server_timeout=LONG) as lock:
        assert lock.fence > far
        first = lock.fence
    own_servers[0].kill()
    with kind.RedLock(clients, name, server_timeout=PATIENCE) as lock:
        assert lock.fence > first


def holder_of(admin, name):
    [owner] = [field for field in admin.hgetall(name) if not field.startswith(b"#")]
    return owner


def test_stands_in_line_instead_of_racing(kind, clients, servers, name):
    order = []
    first = kind.RedLock(clients, name, server_timeout=LONG)
    first.acquire()
    joins = []
    for number in range(4):
        # Named in another order each time.
        lock = kind.RedLock(clients[number:] + clients[:number], name, server_timeout=LONG, thread_local=False)

        def take(lock=lock, number=number):
            with lock:
                order.append(number)

        joins.append(in_thread(take))
        until(lambda n=number: waiters(servers[0].client(), name) == n + 1, "it waits at the first server")
    assert all(waiters(one.client(), name) == 0 for one in servers[1:])
    first.release()
    for join in joins:
        join()
    assert order == [0, 1, 2, 3]


def test_a_crowd(kind, clients, servers, name):
    inside = threading.Lock()
    fences = []

    def work():
        for _ in range(6):
            # Those who got in each other's way begin anew within this time.
            lock = kind.RedLock(clients, name, server_timeout=PATIENCE, thread_local=False)
            lock.acquire()
            assert inside.acquire(blocking=False), "held twice"
            fences.append(lock.fence)
            inside.release()
            lock.release()

    for join in [in_thread(work) for _ in range(8)]:
        join(40)
    assert fences == sorted(set(fences))
    assert len(fences) == 48


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_server_that_is_gone_costs_one_short_timeout_once(kind, own_servers, name, which, how):
    lock = kind.RedLock(clients_of(kind, own_servers), name, server_timeout=PATIENCE)
    works(lock)
    own_servers[which].signal(how)
    if how == signal.SIGKILL:
        own_servers[which].process.wait()
    assert works(lock) < 2 * PATIENCE
    others = [works(lock) for _ in range(5)]
    assert sorted(others)[2] < PATIENCE / 2, others

    # It is tried again in the background, and counts again.
    if how == signal.SIGKILL:
        own_servers[which].start()
    else:
        own_servers[which].signal(signal.SIGCONT)

    until(lambda: votes(lock, own_servers, name) == 3, "it has a vote again")


def test_a_slow_server_is_left_out(kind, own_servers, name):
    proxy = Proxy(own_servers[0].port)
    try:
        clients = [kind.client(proxy.port), *clients_of(kind, own_servers[1:])]
        lock = kind.RedLock(clients, name, server_timeout=PATIENCE)
        works(lock)
        proxy.delay = PATIENCE * 2
        assert works(lock) < 2 * PATIENCE
        others = [works(lock) for _ in range(5)]
        assert sorted(others)[2] < PATIENCE / 2, others
        # What it was asked for late is given back there.
        until(lambda: not own_servers[0].client().exists(name), "nothing is left there")
        proxy.delay = 0
        until(lambda: votes(lock, own_servers, name) == 3, "it has a vote again")
    finally:
        proxy.close()


def test_the_caller_reads_the_answers_of_all_servers(shared, name, monkeypatch):
    """No other thread has to run for a RedLock that nobody else wants."""
    reads = collections.Counter()
    read = Home._read

    def count(self, node, link, wire):
        reads[wire is link.requests and threading.current_thread().name] += 1
        read(self, node, link, wire)

    monkeypatch.setattr(Home, "_read", count)
    # However busy the machine is, the caller gives up reading for no other reason than that he has his answer.
    monkeypatch.setattr(holdfast._home, "_READS_FOR", int(LONG * 1000))
    lock = holdfast.RedLock([redis.Redis(port=one.port) for one in shared], name, timeout=LONG)
    for _ in range(50):
        with lock:
            pass
    assert reads[threading.current_thread().name] > 4 * reads["holdfast-session"], reads


def test_a_late_request_finds_nobody(kind, own_servers, name):
    """The connection breaks, and the server hears the request when everything is over."""
    proxy = Proxy(own_servers[0].port)
    try:
        clients = [kind.client(proxy.port), *clients_of(kind, own_servers[1:])]
        lock = kind.RedLock(clients, name, server_timeout=PATIENCE)
        works(lock)
        admin = own_servers[0].client()
        proxy.rule = lambda request: "late" if request[0] == b"LOCK.ACQUIRE" and not proxy.late else None
        works(lock)
        proxy.rule = lambda request: None
        # Its connection is replaced by another one, which ends the session of the first.
        until(lambda: votes(lock, own_servers, name) == 3, "it has a vote again")
        [reply] = proxy.deliver()
        assert reply.startswith(b"-NOSESSION")
        assert not admin.exists(name)
    finally:
        proxy.close()


def test_a_lost_reply_leaves_nothing_behind(kind, own_servers, name):
    proxy = Proxy(own_servers[1].port)
    try:
        clients = [kind.client(own_servers[0].port), kind.client(proxy.port), kind.client(own_servers[2].port)]
        lock = kind.RedLock(clients, name, server_timeout=PATIENCE)
        works(lock)
        for verb in (b"LOCK.ACQUIRE", b"LOCK.RENEW", b"LOCK.RELEASE"):
            until(lambda: votes(lock, own_servers, name) == 3, "all have a vote")
            lose = [verb]
            proxy.rule = lambda request, lose=lose: "reply" if request[0] in lose and not lose.clear() else None
            works(lock)
            assert not lose, f"{verb} was not sent"
            until(lambda: holders(own_servers, name) == 0, f"nothing is left of {verb}")
    finally:
        proxy.close()


def test_no_majority(kind, own_servers, name):
    import redis

    lock = kind.RedLock(clients_of(kind, own_servers), name, server_timeout=PATIENCE)
    works(lock)
    for one in own_servers[:2]:
        one.kill()
    with pytest.raises(redis.ConnectionError, match="2 of 3 servers do not answer"):
        lock.acquire()
    until(lambda: holders(own_servers[2:], name) == 0, "nothing is left")
    own_servers[0].start()

    def again():
        try:
            return works(lock)
        except redis.ConnectionError:
            return None

    until(again, "it works again")


def test_lost_when_no_majority_is_left(kind, own_servers, name):
    told = []
    lock = kind.RedLock(clients_of(kind, own_servers), name, server_timeout=LONG, on_lost=told.append)
    lock.acquire()
    fence, lost = lock.fence, lock.lost
    own_servers[1].client().execute_command("LOCK.FORCE", name)
    until(lambda: [part.held for part in hold_of(kind, lock).parts].count(False) == 1, "one is lost")
    lock.check()
    assert not lost.is_set()
    own_servers[0].client().execute_command("LOCK.FORCE", name)
    assert lost.wait(5)
    [loss] = until(lambda: told, "it is told")
    assert (loss.reason, loss.fence) == ("forced", fence)
    with pytest.raises(holdfast.LockLost, match="forced"):
        lock.check()
    with pytest.raises(holdfast.LockLost, match="forced"):
        lock.release()
    assert holders(own_servers, name) == 0


def hold_of(kind, lock):
    if kind.name == "threads":
        return lock._holds()[-1]
    return kind._in_loop(lambda: lock._inner._holds()[-1])


def test_lost_when_the_majority_dies(kind, own_servers, name):
    with Stalls() as stalls:
        lock = kind.RedLock(clients_of(kind, own_servers), name, server_timeout=LONG)
        begin = now()
        lock.acquire()
        lost, end = lock.lost, begin + 3 - drift(3) - MILLISECOND
        own_servers[0].kill()
        own_servers[1].kill()
        heard_before = stalls.clock()
        # In doubt until the lease of three seconds could be over, less the drift; that is said within a moment in which
        # this process could run.
        counts_until(lock, end)
        assert lost.wait(30)
        assert now() >= end
        assert stalls.clock() < heard_before + 3.1
    with pytest.raises(holdfast.LockLost, match="disconnected"):
        lock.check()


def test_renewed_by_the_servers(kind, own_servers, name):
    lock = kind.RedLock(clients_of(kind, own_servers), name, server_timeout=LONG)
    lock.acquire()
    fence = lock.fence
    # Longer than the lease; meanwhile one server loses its connections, and the hold is taken along.
    own_servers[1].client().client_kill_filter(_type="normal", skipme=True)
    time.sleep(3.5)
    lock.check()
    assert lock.owned()
    assert lock.fence == fence
    assert holders(own_servers, name) == 3
    lock.release()


def test_a_timeout_is_a_lease_less_the_drift(kind, clients, servers, name):
    lock = kind.RedLock(clients, name, timeout=600, server_timeout=LONG)
    lock.acquire()
    since = now()
    assert all(0 < one.client().pttl(name) <= 600_000 for one in servers)
    # The lease began before the majority was there, and counts less the drift.
    assert hold_of(kind, lock).until / 1000 < since + 600 - drift(600)
    lock.release()


def test_a_timeout_runs_out(kind, clients, servers, name):
    lock = kind.RedLock(clients, name, timeout=2, server_timeout=LONG)
    begin = now()
    lock.acquire()
    lost = lock.lost
    assert lost.wait(30)
    assert now() >= begin + 2 - drift(2) - MILLISECOND
    with pytest.raises(holdfast.LockLost, match="expired"):
        lock.release()
    until(lambda: holders(servers, name) == 0, "nothing is left")


def test_not_held_when_nothing_would_be_left_of_the_lease(kind, clients, servers, name):
    """A lease that is over by the time the majority has answered, or by the drift alone, is none."""
    lock = kind.RedLock(clients, name, timeout=0.002, server_timeout=LONG)
    assert lock.acquire(blocking=False) is False
    assert lock.fence is None


def test_whoever_stood_still_asks_before_he_judges(kind, clients, name, monkeypatch):
    listen, has_slept = Vote.listen, []

    def listens_late(vote, seconds):
        if not has_slept:
            has_slept.append(True)
            time.sleep(1.5 * PATIENCE)
        return listen(vote, seconds)

    monkeypatch.setattr(Vote, "listen", listens_late)
    assert kind.RedLock(clients, name, server_timeout=PATIENCE).acquire(blocking=False)
    assert has_slept


def test_extend_and_reacquire(kind, clients, servers, name):
    lock = kind.RedLock(clients, name, timeout=10, server_timeout=LONG)
    lock.acquire()
    assert lock.extend(10)
    assert all(18_000 < one.client().pttl(name) <= 20_000 for one in servers)
    assert lock.reacquire()
    assert all(9_000 < one.client().pttl(name) <= 10_000 for one in servers)
    for one in servers[: majority(len(servers))]:
        one.client().execute_command("LOCK.FORCE", name)
    with pytest.raises(holdfast.LockLost):
        lock.extend(10)
    with pytest.raises(holdfast.LockLost):
        lock.release()


def test_released_although_some_had_lost_it(kind, clients, servers, name):
    lock = kind.RedLock(clients, name, timeout=10, server_timeout=LONG)
    lock.acquire()
    servers[0].client().execute_command("LOCK.FORCE", name)
    lock.release()
    lock.acquire()
    lost = lock.lost
    for one in servers[: majority(len(servers))]:
        one.client().execute_command("LOCK.FORCE", name)
    # Every session hears of what it loses, whatever its lease.
    assert lost.wait(5)
    with pytest.raises(holdfast.LockLost, match="forced"):
        lock.release()


def test_a_minority_that_somebody_holds_does_not_matter(kind, clients, servers, name):
    taken = [kind.Lock(one, name, timeout=60) for one in clients[majority(len(servers)) :]]
    for one in taken:
        one.acquire()
    with kind.RedLock(clients, name, server_timeout=PATIENCE) as lock:
        assert lock.owned()
    for one in servers:
        one.client().execute_command("LOCK.FORCE", name)


def test_a_majority_that_others_hold_is_waited_for(kind, clients, servers, name):
    taken = [kind.Lock(one, name) for one in clients[1:]]
    for one in taken:
        one.acquire()
    lock = kind.RedLock(clients, name, server_timeout=PATIENCE, thread_local=False)
    join = in_thread(lambda: lock.acquire(blocking_timeout=30))
    until(lambda: waiters(servers[1].client(), name) == 1, "it has asked")
    # Having asked once in vain, it stands in line where somebody has it, and not at the first any more.
    until(lambda: not servers[0].client().exists(name), "it has given the first one back")
    until(lambda: waiters(servers[1].client(), name) == 1, "it stands in line there")
    for one in taken:
        one.release()
    assert join()
    lock.release()


def test_a_key_that_is_no_lock(kind, clients, servers, name):
    servers[-1].client().set(name, "x")
    with pytest.raises(holdfast.WrongType):
        kind.RedLock(clients, name, server_timeout=LONG).acquire()
    # What the others have granted is given back in the background.
    until(lambda: holders(servers[:-1], name) == 0, "all is given back")
    servers[-1].client().delete(name)


def test_what_it_cannot_be_made_of(kind, clients, cluster, name):
    for made_of, error, words in (
        ([], ValueError, "at least one"),
        ([*clients, clients[0]], ValueError, "twice"),
        ([*clients, kind.cluster(cluster.nodes[0].port)], TypeError, "single servers"),
    ):
        with pytest.raises(error, match=words):
            kind.RedLock(made_of, name)
    with pytest.raises(ValueError, match="server_timeout must be at least"):
        kind.RedLock(clients, name, server_timeout=0)
    with pytest.raises(ValueError, match="token must be None"):
        kind.RedLock(clients, name).acquire(token="mine")


def test_the_rules_that_all_clients_share(kind, clients, servers):
    assert [majority(servers) for servers in range(1, 8)] == [1, 2, 2, 3, 3, 4, 4]
    assert drift(10) == pytest.approx(0.102)
    assert [server_name(client) for client in clients] == [b"127.0.0.1:%d" % one.port for one in servers]

"""Lost replies and late requests: nothing is held twice, waited for twice, or left behind."""

import contextlib
import time

import pytest
import redis
from redis.backoff import NoBackoff

import holdfast
from proxy import Proxy
from servers import HOST, until, waiters
from test_lock import in_thread


def retrying(kind, proxy, times):
    """A client that repeats what failed, behind one's back, so many times."""
    if kind.name == "threads":
        from redis.retry import Retry
    else:
        from redis.asyncio.retry import Retry
    return kind.client(proxy.port, retry=Retry(NoBackoff(), times), socket_timeout=5)


def once(verb, fate):
    """A rule: this happens to the first request of its kind."""
    seen = []

    def rule(request):
        if request[0].upper() == verb and not seen:
            seen.append(request)
            return fate
        return None

    rule.seen = seen
    return rule


def count(proxy, verb):
    return sum(request[0].upper() == verb for request in proxy.requests)


@pytest.mark.parametrize("fate", ["reply", "request"])
def test_acquire_repeated_by_the_library(kind, proxy, admin, name, fate):
    lock = kind.Lock(retrying(kind, proxy, 3), name)
    proxy.rule = once(b"LOCK.ACQUIRE", fate)
    assert lock.acquire()
    assert count(proxy, b"LOCK.ACQUIRE") == 2
    # Held once.
    assert [value for field, value in admin.hgetall(name).items() if not field.startswith(b"#")] == [b"1"]
    assert lock.fence == int(admin.hget(name, "#fence"))
    lock.release()
    assert not admin.exists(name)


def release_once(lock, fate):
    """If the reply is lost, the next request does not find it, and whether it was lost before nobody can say."""
    if fate == "reply":
        with pytest.raises(holdfast.NotHeld) as raised:
            lock.release()
        assert not isinstance(raised.value, holdfast.LockLost)
    else:
        lock.release()


@contextlib.contextmanager
def released_or_not_known():
    """The connection may end under a release whose reply is on its way. A loss is none of that."""
    try:
        yield
    except holdfast.LockLost:
        raise
    except holdfast.NotHeld:
        pass


@pytest.mark.parametrize("fate", ["reply", "request"])
def test_release_repeated_by_the_library(kind, proxy, admin, name, fate):
    told = []
    lock = kind.Lock(retrying(kind, proxy, 3), name, on_lost=told.append)
    lock.acquire()
    proxy.rule = once(b"LOCK.RELEASE", fate)
    release_once(lock, fate)
    assert count(proxy, b"LOCK.RELEASE") == 2
    assert not admin.exists(name)
    assert told == []


@pytest.mark.parametrize("fate", ["reply", "request"])
def test_a_wait_repeated_by_the_library_keeps_its_place(kind, proxy, server, admin, name, fate):
    holder = holdfast.Lock(server.client(), name)
    holder.acquire()
    second = kind.Lock(retrying(kind, proxy, 3), name, thread_local=False)
    proxy.rule = once(b"LOCK.ACQUIRE", fate)
    join = in_thread(second.acquire)
    until(lambda: count(proxy, b"LOCK.ACQUIRE") == 2, "it was sent twice")
    until(lambda: waiters(admin, name) == 1, "it waits once")
    third = holdfast.Lock(server.client(), name, thread_local=False)
    join_third = in_thread(third.acquire)
    until(lambda: waiters(admin, name) == 2, "another one waits behind it")
    holder.release()
    assert join()
    assert not third.owned()
    second.release()
    assert join_third()
    third.release()


@pytest.mark.parametrize("fate", ["reply", "request", "late"])
def test_acquire_that_fails_leaves_nothing_behind(kind, proxy, admin, name, fate):
    """Who does not wait is not made to wait for another session."""
    lock = kind.Lock(retrying(kind, proxy, 0), name)
    proxy.rule = once(b"LOCK.ACQUIRE", fate)
    with pytest.raises((redis.ConnectionError, redis.TimeoutError)):
        lock.acquire(blocking=False)
    until(lambda: count(proxy, b"LOCK.RELEASE") == 1, "it is taken back")
    until(lambda: not admin.exists(name) and waiters(admin, name) == 0, "nothing is left")
    # What arrives after all is refused.
    assert all(reply.startswith(b"-NOSESSION") for reply in proxy.deliver())
    assert not admin.exists(name)
    with lock:
        pass


@pytest.mark.parametrize("fate", ["reply", "request", "late"])
def test_a_wait_whose_request_is_lost_is_over_in_time_and_leaves_nothing_behind(kind, proxy, server, admin, name, fate):
    holder = holdfast.Lock(server.client(), name)
    holder.acquire()
    lock = kind.Lock(retrying(kind, proxy, 0), name, thread_local=False)
    proxy.rule = once(b"LOCK.ACQUIRE", fate)
    assert lock.acquire(blocking_timeout=0.5) is False
    assert count(proxy, b"LOCK.ACQUIRE") == 2
    assert all(reply.startswith(b"-NOSESSION") for reply in proxy.deliver())
    until(lambda: waiters(admin, name) == 0, "nobody waits")
    holder.release()
    assert not admin.exists(name)


@pytest.mark.parametrize("fate", ["reply", "request", "late"])
def test_a_release_that_is_lost_is_said_again(kind, proxy, admin, name, fate):
    told = []
    lock = kind.Lock(retrying(kind, proxy, 0), name, on_lost=told.append)
    lock.acquire()
    proxy.rule = once(b"LOCK.RELEASE", fate)
    release_once(lock, fate)
    assert not admin.exists(name)
    with pytest.raises(holdfast.NotHeld):
        lock.release()
    other = holdfast.Lock(redis.Redis(port=proxy.target), name)
    with other:
        # A late release does not touch what somebody else has by now.
        proxy.deliver()
        assert other.owned()
    assert told == []


def test_what_is_taken_back_is_said_until_it_is_answered(kind, proxy, admin, name):
    lock = kind.Lock(retrying(kind, proxy, 0), name)
    releases = []

    def rule(request):
        verb = request[0].upper()
        if verb == b"LOCK.RELEASE":
            releases.append(request)
            return "request" if len(releases) < 4 else None
        return "reply" if verb == b"LOCK.ACQUIRE" else None

    proxy.rule = rule
    with pytest.raises((redis.ConnectionError, redis.TimeoutError)):
        lock.acquire(blocking=False)
    until(lambda: len(releases) == 4, "it was said until it was heard")
    until(lambda: not admin.exists(name), "nothing is left")


class Way:
    """A client with a proxy before each server."""

    def __init__(self, kind, servers):
        self.servers = servers
        self.proxies = [Proxy(server.port) for server in servers]
        ports = {proxy.target: proxy.port for proxy in self.proxies}
        if len(servers) == 1:
            self.client = retrying(kind, self.proxies[0], 3)
        else:
            # Where the nodes say that they are, the proxies are not.
            self.client = kind.cluster(
                self.proxies[0].port, address_remap=lambda address: (HOST, ports.get(address[1], address[1]))
            )

    def obey(self, rule):
        for proxy in self.proxies:
            proxy.rule = rule

    def close(self):
        for proxy in self.proxies:
            proxy.close()


@pytest.fixture(params=["single", "cluster"])
def way(request, kind):
    fixture = request.getfixturevalue("server" if request.param == "single" else "cluster")
    way = Way(kind, getattr(fixture, "masters", [fixture]))
    yield way
    way.close()


@pytest.mark.parametrize("verb", [b"LOCK.ACQUIRE", b"LOCK.RELEASE", b"LOCK.RENEW", b"LOCK.NEXT", b"LOCK.OWNER"])
def test_each_reply_lost_once_while_many_take_turns(kind, way, name, verb):
    # The session opens beforehand, unless its own beginning is what goes wrong.
    if verb != b"LOCK.OWNER":
        first = kind.Lock(way.client, f"{{{name}}}:first")
        first.acquire()
    rule = once(verb, "reply")
    way.obey(rule)
    inside = []
    turns = []

    def work(number):
        lock = kind.Lock(way.client, name, timeout=30, thread_local=False, on_lost=lambda lost: turns.append(lost))
        for _ in range(5):
            with released_or_not_known(), lock:
                inside.append(number)
                assert len(inside) == 1
                lock.reacquire()
                inside.pop()
                turns.append(number)

    joins = [in_thread(lambda n=number: work(n)) for number in range(4)]
    for join in joins:
        join()
    assert sorted(turns) == sorted(list(range(4)) * 5)
    assert rule.seen
    # Nobody holds it at any of them; LOCK.INFO would only be answered by the one whose slot it is.
    assert not any(name.encode() in server.client().keys(name) for server in way.servers)


def test_a_wait_ends_in_time_though_the_server_says_nothing(kind, proxy, server, name):
    holder = holdfast.Lock(server.client(), name)
    holder.acquire()
    client = retrying(kind, proxy, 0)
    first = kind.Lock(client, f"{name}:first")
    first.acquire()
    # The session's own question may be on its way still: it breaks with the one that is asked once the wait was.
    asked = []

    def rule(request):
        asked.append(request[0].upper() == b"LOCK.ACQUIRE")
        return "request" if any(asked) and request[0].upper() == b"LOCK.NEXT" else None

    proxy.rule = rule
    begin = time.monotonic()
    assert kind.Lock(client, name).acquire(blocking_timeout=0.3) is False
    assert time.monotonic() - begin < 5


def test_what_is_overwritten_is_lost_whichever_word_of_it_comes_first(kind, proxy, admin, name):
    """The answer to a renewal may overtake the event, since that comes over the other connection."""
    client, overwritten = kind.client(proxy.port), []

    def overwrite(request):
        if request[0].upper() == b"LOCK.RENEW":
            admin.set(request[1], "something else")
            overwritten.append(request[1])

    proxy.rule = overwrite
    for number in range(20):
        lock = kind.Lock(client, f"{name}:{number}", timeout=30)
        lock.acquire()
        with pytest.raises(holdfast.LockLost) as lost:
            lock.extend(10)
        assert lost.value.reason == "changed"
        until(lambda n=number: len(overwritten) == n + 1, "nobody else uses the other client")

"""Connections that break at any message, and callers that cancel at any moment, at a real server."""

import asyncio
import contextlib
import itertools
import random
import threading
import time

import pytest
import redis

import holdfast
import holdfast.asyncio
from kinds import closed
from proxy import Proxy
from servers import Server, until


class Nth:
    """A rule of the proxy: applies `fate` to the nth request of a kind."""

    def __init__(self, verb, number, fate):
        self.verb, self.left, self.fate = verb, number, fate

    def __call__(self, request):
        if request[0].endswith(self.verb):
            self.left -= 1
            if self.left == -1:
                return self.fate
        return None


@pytest.fixture
def proxied(kind, proxy):
    return kind.open(kind.redis(proxy.port))


@pytest.mark.parametrize("fate", ["request", "reply", "late"])
@pytest.mark.parametrize(("verb", "number"), [(b".ACQUIRE", 0), (b".RENEW", 0), (b".RENEW", 1), (b".RELEASE", 0)])
def test_hold_survives_a_cut_at_any_message(proxied, proxy, admin, name, verb, number, fate, quick):
    proxied.lock(name).acquire().release()
    proxy.rule = Nth(verb, number, fate)
    hold = proxied.lock(name, lease=60).acquire(45)
    until(lambda: sum(request[0] == b"LOCK.RENEW" for request in proxy.requests) >= 3, "it is renewed")
    assert hold.is_held()
    hold.check()
    if verb != b".RELEASE":
        proxy.deliver()
    hold.release()
    assert not hold.lost.is_set()
    proxy.deliver()
    assert admin.exists(name) == 0
    with proxied.lock(name).acquire(45):
        pass


@pytest.mark.parametrize("fate", ["request", "reply", "late"])
def test_waiter_keeps_its_place_when_cut(proxied, client, proxy, name, fate):
    blocker = client.lock(name).acquire()
    proxy.rule = Nth(b".ACQUIRE", 0, fate)
    order = []

    def wait(opened, who):
        with opened.lock(name).acquire(45):
            order.append(who)

    first = threading.Thread(target=wait, args=(proxied, "first"))
    first.start()
    # A repeated request is queued by the time that it has waited, less what it takes to the server on a busy machine.
    until(lambda: any(one["waited"] >= 500 for one in client.waiters(name)), "it waits, and has waited for long")
    second = threading.Thread(target=wait, args=(client, "second"))
    second.start()
    until(lambda: len(client.waiters(name)) == 2, "both wait")
    before = client.waiters(name)[0]["client"]
    proxy.cut()
    time.sleep(0.1)
    proxy.mend()

    def both_wait_again():
        waiters = client.waiters(name)
        return len(waiters) == 2 and before not in [one["client"] for one in waiters]

    until(both_wait_again, "both wait again")
    blocker.release()
    first.join(60)
    second.join(60)
    assert order == ["first", "second"]


@pytest.mark.parametrize("fate", ["request", "reply"])
@pytest.mark.parametrize("number", [0, 1])
def test_wait_that_times_out_during_a_cut_leaves_nothing(proxied, client, proxy, admin, name, number, fate):
    blocker = client.lock(name).acquire()
    proxy.rule = Nth(b".ACQUIRE" if number == 0 else b".RELEASE", 0, fate)
    with pytest.raises(holdfast.NotAcquiredError):
        proxied.lock(name, lease=3).acquire(0.3)
    blocker.release()
    until(lambda: not client.waiters(name) and not admin.exists(name), "nothing is left")


def test_waiter_keeps_its_place_when_its_connection_is_silent(proxied, client, proxy, name, impatient):
    blocker = client.lock(name).acquire()
    got = []
    thread = threading.Thread(target=lambda: got.append(proxied.lock(name).acquire(45)))
    thread.start()
    until(lambda: client.waiters(name), "it waits")
    before = client.waiters(name)[0]["client"]
    # The client receives nothing any more, and the server does not notice.
    for link in list(proxy.links):
        link.mute = True
    until(lambda: [one["client"] for one in client.waiters(name)] not in ([before], []), "it asks over another one")
    # The first request has waited for 500 ms, less what it took to the server.
    assert client.waiters(name)[0]["waited"] >= 250
    blocker.release()
    thread.join(60)
    assert got[0].is_held()
    got[0].release()


async def _cancels(opened, rival, name, count, rng):
    """Cancels acquisitions and releases at random moments, while another client acquires the same lock."""
    stop = asyncio.Event()

    async def compete():
        while not stop.is_set():
            # A lock that a cancelled call has left is held for its lease, which is longer.
            async with await rival.lock(name).acquire(45):
                await asyncio.sleep(rng.uniform(0, 0.1))

    competing = asyncio.create_task(compete())
    for _ in range(count):
        task = asyncio.create_task(opened.lock(name, lease=120).acquire(rng.choice([0.05, None])))
        await asyncio.sleep(rng.uniform(0, 0.04))
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, holdfast.NotAcquiredError):
            hold = await task
            releasing = asyncio.create_task(hold.release())
            await asyncio.sleep(rng.uniform(0, 0.01))
            releasing.cancel()
            await releasing
    stop.set()
    await competing


async def test_cancelled_calls_leave_nothing(end_tasks):
    server = Server(("io-threads", "4"))
    clients = [redis.asyncio.Redis(port=server.port) for _ in range(2)]
    try:
        async with holdfast.asyncio.Holdfast(clients[0]) as opened, holdfast.asyncio.Holdfast(clients[1]) as rival:
            names = [f"k{number}" for number in range(20)]
            rng = random.Random(1)
            await asyncio.gather(*(_cancels(opened, rival, name, 100, rng) for name in names))
            end = time.monotonic() + 30
            while left := [info for name in names if (info := await rival.info(name))]:
                assert time.monotonic() < end, f"left: {left}"
                await asyncio.sleep(0.01)
            # Each object's pool, and the client that asks.
            assert len(await clients[1].client_list()) <= 2 * 32 + 1
    finally:
        for client in clients:
            await closed(client)
        server.close()


def test_holders_never_overlap_under_cuts(kind, server, name):
    proxies = [Proxy(server.port) for _ in range(2)]
    rng = random.Random(7)
    for proxy in proxies:
        proxy.rule = lambda _: rng.choice(["request", "reply"]) if rng.random() < 0.05 else None
    opened = [kind.open(kind.redis(proxy.port)) for proxy in proxies]
    spans, end = [], time.monotonic() + 60

    def work(number):
        while len(spans) < 100 and time.monotonic() < end:
            try:
                hold = opened[number % 2].lock(name, lease=1).acquire(2)
            except holdfast.NotAcquiredError:
                continue
            began = time.monotonic()
            time.sleep(0.002)
            ended = time.monotonic()
            if hold.is_held():
                spans.append((began, ended, hold.fence))
            with contextlib.suppress(holdfast.LockLostError, redis.ConnectionError, redis.TimeoutError):
                hold.release()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for proxy in proxies:
        proxy.rule = lambda _: None
    spans.sort()
    assert len(spans) >= 100
    for (_, ended, fence), (began, _, later) in itertools.pairwise(spans):
        assert ended <= began
        assert fence < later
    for proxy in proxies:
        proxy.close()

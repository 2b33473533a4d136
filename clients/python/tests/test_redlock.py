"""RedLock over independent servers, in both flavours."""

import asyncio
import collections
import os
import signal
import threading
import time

import pytest
import redis

import holdfast
from fake import Fake, error, granted
from holdfast import _engine as engine
from holdfast import _rules as rules
from holdfast import redlock
from holdfast._rules import State
from kinds import Tasks, Threads
from servers import Server, close_all, until


@pytest.fixture(scope="module")
def three():
    servers = [Server() for _ in range(3)]
    yield servers
    close_all(servers)


@pytest.fixture
def own_three():
    servers = [Server() for _ in range(3)]
    yield servers
    close_all(servers)


def opened(kind, servers):
    return [kind.open(kind.redis(server.port)) for server in servers]


def test_majority_grants_and_excludes_others(kind, three, name):
    first = kind.redlock(opened(kind, three), name, lease=60, server_timeout=20)
    second = kind.redlock(opened(kind, three), name, lease=60, server_timeout=20)
    with first.acquire(45) as hold:
        assert hold.is_held()
        hold.check()
        hold.renew()
        assert second.try_acquire() is None
        with pytest.raises(holdfast.NotAcquiredError):
            second.acquire(0.2)
        fences = {int(server.client().hget(name, "#fence")) for server in three}
        assert fences == {hold.fence}
    with second.acquire(45) as later:
        assert later.fence > hold.fence
    assert all(not server.client().exists(name) for server in three)


def test_majority_grants_and_renews_when_a_minority_is_down(kind, own_three, name, quick):
    lock = kind.redlock(opened(kind, own_three), name, lease=60)
    own_three[0].kill()
    with lock.acquire(45) as hold:
        certain = time.monotonic() + hold.remaining()
        until(lambda: time.monotonic() + hold.remaining() > certain + 0.1, "it is renewed")
        hold.check()
        assert hold.is_held()


def test_acquire_raises_when_no_majority_answers(kind, own_three, name):
    lock = kind.redlock(opened(kind, own_three), name, lease=2)
    for server in own_three[:2]:
        server.kill()
    with pytest.raises(redis.ConnectionError, match="no majority"):
        lock.acquire(0.5)


def test_hold_is_lost_when_a_majority_lost_it(kind, own_three, name, quick):
    hold = kind.redlock(opened(kind, own_three), name, lease=60).acquire(45)
    own_three[0].client().execute_command("LOCK.FORCE", name)
    until(lambda: sum(part.state is State.LOST for part in hold._parts.values()) == 1, "one server's part is lost")
    assert hold.is_held()
    own_three[1].client().execute_command("LOCK.FORCE", name)
    assert hold.lost.wait(30)
    assert not hold.is_held()
    with pytest.raises(holdfast.LockLostError):
        hold.release()


def test_many_clients_never_overlap(kind, three, name):
    count, most, held = [0], [0], [0]
    guard = threading.Lock()

    def work():
        lock = kind.redlock(opened(kind, three), name, lease=60)
        for _ in range(3):
            with lock.acquire(45) as hold:
                assert hold.is_held()
                with guard:
                    held[0] += 1
                    most[0] = max(most[0], held[0])
                    count[0] += 1
                time.sleep(0.002)
                with guard:
                    held[0] -= 1

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (count[0], most[0]) == (12, 1)


def test_hold_stays_certain_while_its_token_is_raised(kind, three, name, monkeypatch):
    renewed, seen = rules.Grant.renewed, []

    def spy(grant, began, lease):
        if grant.state is State.HELD:
            seen.append(grant.remaining())
        renewed(grant, began, lease)

    monkeypatch.setattr(rules.Grant, "renewed", spy)
    kind.redlock(opened(kind, three), name, lease=60, server_timeout=20).acquire(45).release()
    assert len(seen) >= 2
    assert min(seen) > 30, "the timer would end it"


@pytest.mark.parametrize("verb", ["check", "renew"])
def test_call_raises_when_a_majority_refuses_it(kind, verb, monkeypatch):
    monkeypatch.setattr(engine, "RELEASE_TIME", 1.0)
    servers = [Fake() for _ in range(3)]
    try:
        hold = kind.redlock([kind.open(kind.redis(server.port)) for server in servers], "k", lease=60).acquire(30)
        for server in servers[:2]:
            server.script["INFO"] = collections.deque([error("NOPERM no permission")])
            server.script["RENEW"].append(error("NOPERM no permission"))
        with pytest.raises(redis.exceptions.NoPermissionError):
            getattr(hold, verb)()
        assert hold.is_held()
    finally:
        for server in servers:
            server.close()


def test_servers_are_ordered_by_name_and_must_differ(kind, three, name):
    one, two, _ = opened(kind, three)
    with pytest.raises(ValueError, match="different servers"):
        kind.redlock([one, one], name)
    lock = kind.redlock([two, one], name)
    engines = lock._inner.engines if hasattr(lock, "_inner") else lock.engines
    assert [engine.source.server_name for engine in engines] == sorted(engine.source.server_name for engine in engines)


def test_redlock_raises_when_an_argument_is_wrong(kind, three, name):
    other = Tasks() if isinstance(kind, Threads) else Threads()
    try:
        mine, its = opened(kind, three[:1])[0], opened(other, three[:1])[0]
        kind_of_lock = redlock.RedLock if isinstance(kind, Threads) else redlock.AsyncRedLock
        for wrong in (None, getattr(its, "_inner", its)):
            with pytest.raises(TypeError, match=r"holdfasts must be instances of .*Holdfast'>, got"):
                kind_of_lock([getattr(mine, "_inner", mine), wrong], name)
        with pytest.raises(ValueError, match=r"server_timeout must be between .*, got nan"):
            kind.redlock([mine], name, server_timeout=float("nan"))
        lock = kind.redlock([mine], name)
        with pytest.raises(ValueError, match="wait must be a number of seconds, got nan"):
            lock.acquire(float("nan"))
        hold = lock.acquire(30)
        with pytest.raises(ValueError, match="timeout must be a number of seconds, got nan"):
            hold.release(float("nan"))
        hold.release()
    finally:
        other.close()


def test_release_leaves_nothing_at_any_server(kind, own_three, name):
    hold = kind.redlock(opened(kind, own_three), name, lease=2).acquire(45)
    hold.release()
    until(lambda: all(not server.client().exists(name) for server in own_three), "nothing is left")


def test_acquire_says_that_it_was_cancelled(kind, three, name):
    cancel = kind.inside(asyncio.Event) if isinstance(kind, Tasks) else threading.Event()
    cancel.set()
    with pytest.raises(holdfast.NotAcquiredError, match="the wait was cancelled"):
        kind.redlock(opened(kind, three), name).acquire(cancel=cancel)


def test_interrupted_acquisition_leaves_nothing():
    servers, kind = [Fake() for _ in range(3)], Threads()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    last = max(servers, key=lambda server: str(server.port))

    def interrupt(_):
        os.kill(os.getpid(), signal.SIGINT)
        # The client now releases what it was granted; this grant comes late.
        end = time.monotonic() + 1
        while time.monotonic() < end and not any(server.of("RELEASE") for server in servers):
            time.sleep(0.01)
        return granted(7)

    try:
        last.script["ACQUIRE"].append(interrupt)
        opened = [kind.open(kind.redis(server.port)) for server in servers]
        with pytest.raises(KeyboardInterrupt):
            kind.redlock(opened, "k", lease=60, server_timeout=20).acquire(30)
        for server in servers:
            until(lambda server=server: server.of("RELEASE"), "it is released")
    finally:
        signal.signal(signal.SIGINT, before)
        for server in servers:
            server.close()
        kind.close()

"""A time that is given is a bound, also when the server stands still; and so is the time of what is given none."""

import contextlib
import signal

import pytest
import redis

import holdfast
from proxy import Proxy
from servers import HOST, Server, Stalls, until, waiters
from test_lock import in_thread

# What a call may take beyond the time that it was given, and one that was given none. A busy machine needs a moment,
# in which the process can run.
MORE = 2
NONE_GIVEN = 5
MOMENT = 3


@pytest.fixture
def still(kind):
    """A server that stands still from the moment on that the test says so, and a client that knows it."""
    server = Server()

    class Still:
        def __init__(self, **settings):
            # Without a limit of the application's own: before version 8, redis-py has none.
            self.client = kind.client(server.port, socket_timeout=None, **settings)
            self.admin = server.client()

        def stop(self):
            server.signal(signal.SIGSTOP)

    yield Still
    server.signal(signal.SIGCONT)
    server.close()


@pytest.fixture
def clock():
    """Stands still while this process is kept from running."""
    with Stalls() as stalls:
        yield stalls.clock


@pytest.fixture
def takes(clock):
    def takes(seconds, call):
        """It ends within this time, well or not."""
        begin = clock()
        try:
            result = in_thread(call)(50)
        except (redis.ConnectionError, redis.TimeoutError):
            result = None
        assert clock() - begin < seconds + MOMENT
        return result

    return takes


@pytest.mark.parametrize("known", [True, False], ids=["known", "unknown"])
def test_an_acquire_with_a_time(kind, still, takes, name, known):
    still = still()
    if known:
        with kind.Lock(still.client, f"{name}:first"):
            pass
    still.stop()
    for _ in range(3):
        # More than once: the connections of before are no use any more.
        assert not takes(1 + MORE, lambda: kind.Lock(still.client, name).acquire(blocking_timeout=1))


def test_a_wait_with_a_time(kind, still, clock, name):
    still = still()
    first = kind.Lock(still.client, name)
    first.acquire()
    begin = clock()
    join = in_thread(lambda: kind.Lock(still.client, name).acquire(blocking_timeout=1))
    until(lambda: waiters(still.admin, name) == 1, "it waits")
    still.stop()
    with contextlib.suppress(redis.ConnectionError, redis.TimeoutError):
        assert join(50) is False
    assert clock() - begin < 1 + MORE + MOMENT


def test_what_is_given_no_time(kind, still, takes, name):
    still = still()
    locks = [kind.Lock(still.client, f"{name}:{n}", timeout=300, thread_local=False) for n in range(5)]
    for lock in locks:
        lock.acquire()
    still.stop()
    calls = [
        locks[0].release,
        lambda: locks[1].extend(1),
        locks[2].reacquire,
        locks[3].locked,
        locks[4].owned,
        lambda: kind.Lock(still.client, name).acquire(blocking=False),
    ]
    joins = [in_thread(lambda c=call: takes(NONE_GIVEN, c)) for call in calls]
    for join in joins:
        join(60)
    # Once more, now that nobody knows a connection that works.
    takes(NONE_GIVEN, lambda: locks[1].extend(1))


def test_many_who_ask_a_server_that_stands_still(kind, still, takes, name):
    """Not one after the other."""
    still = still()
    with kind.Lock(still.client, name):
        pass
    still.stop()

    def ask(number):
        return takes(1 + MORE, lambda: kind.Lock(still.client, f"{name}:{number}").acquire(blocking_timeout=1))

    for join in [in_thread(lambda n=number: ask(n)) for number in range(80)]:
        assert not join(60)


def test_it_works_again_when_the_server_goes_on(kind, takes, name):
    server = Server()
    try:
        client = kind.client(server.port, socket_timeout=None)
        with kind.Lock(client, f"{name}:first"):
            pass
        server.signal(signal.SIGSTOP)
        takes(1 + MORE, lambda: kind.Lock(client, name).acquire(blocking_timeout=1))
        server.signal(signal.SIGCONT)
        with kind.Lock(client, name, blocking_timeout=30) as lock:
            lock.check()
        admin = server.client()
        until(lambda: not admin.exists(name), "what was asked for while it stood still has been taken back")
    finally:
        server.close()


def test_a_server_that_swallows_what_it_is_told(kind, takes, name):
    """As a firewall that forgets a connection: it stands, and nothing comes."""
    server = Server()
    proxy = Proxy(server.port)
    try:
        client = kind.client(proxy.port, socket_timeout=None)
        with kind.Lock(client, f"{name}:first"):
            pass
        proxy.delay = 1000
        assert not takes(1 + MORE, lambda: kind.Lock(client, name).acquire(blocking_timeout=1))
    finally:
        proxy.close()
        server.close()


def test_nothing_at_the_address(kind, takes, name):
    """Where nobody answers to a connection: its queue is full, as behind a firewall that drops what comes."""
    import socket

    with socket.socket() as full:
        full.bind((HOST, 0))
        full.listen(0)
        port = full.getsockname()[1]
        others = []
        for _ in range(4):
            other = socket.socket()
            other.setblocking(False)
            other.connect_ex((HOST, port))
            others.append(other)
        assert not takes(1 + MORE, lambda: kind.Lock(kind.client(port), name).acquire(blocking_timeout=1))
        for other in others:
            other.close()


def test_a_short_time_is_no_error(kind, client, admin, name):
    holder = kind.Lock(client, name)
    holder.acquire()
    for seconds in (0, 0.001, 0.01):
        assert kind.Lock(client, name).acquire(blocking_timeout=seconds) is False
    assert isinstance(holder.fence, int)
    assert holdfast.LockError

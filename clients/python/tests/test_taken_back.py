"""What was given back or given up is free, also when the server can't be told for a while: it would renew for ever."""

import asyncio

import pytest
import redis

import holdfast
import holdfast.asyncio
from proxy import Proxy
from servers import Server, holder, until, waiters
from test_reconnect import sessions

LEASE = 1.5


@pytest.fixture
def full_server():
    """One that takes no new connections if told so. What runs out there, does so soon."""
    server = Server(("holdfast.default-lease", str(int(LEASE * 1000))))
    yield server
    server.close()


@pytest.fixture
def admin(full_server):
    client = full_server.client()
    client.ping()
    yield client
    client.close()


def take_no_more(admin):
    """Requests have no connection any more, and nobody gets another one."""
    admin.config_set("maxclients", 1)
    own = admin.client_id()
    for one in admin.client_list():
        if one["cmd"] != "lock.next" and int(one["id"]) != own:
            admin.client_kill_filter(_id=one["id"])


def take_more(admin):
    admin.config_set("maxclients", 1000)


def ready(admin):
    return until(lambda: sessions(admin), "there is a session")


def test_a_release_that_cannot_be_said_is_said_later(kind, patient_server, name):
    admin = patient_server.client()
    client = kind.client(patient_server.port)
    lock, other = kind.Lock(client, name), kind.Lock(client, f"{name}:other")
    lock.acquire()
    other.acquire()
    ready(admin)
    take_no_more(admin)
    with pytest.raises(redis.RedisError):
        lock.release()
    assert holder(admin, name)
    take_more(admin)
    until(lambda: not admin.exists(name), "it is free")
    # Nobody else suffered: it was taken along.
    other.check()
    until(lambda: str(holder(admin, f"{name}:other")[b"client"]) in sessions(admin), "tied anew")
    other.release()


def test_a_release_that_can_never_be_said_ends_the_session(kind, full_server, admin, name):
    client = kind.client(full_server.port)
    lock = kind.Lock(client, name)
    lock.acquire()
    ready(admin)
    take_no_more(admin)
    with pytest.raises(redis.RedisError):
        lock.release()
    until(lambda: not sessions(admin), "the session ended", 40)
    until(lambda: not admin.exists(name), "its lease ran out")
    take_more(admin)

    def taken():
        # A connection that was refused before may be heard of only now.
        try:
            with lock:
                return True
        except redis.RedisError:
            return False

    until(taken, "it can be taken again")


async def test_a_wait_that_was_given_up_is_granted_to_nobody(full_server, admin, name):
    # In no session, which would break with the other one's.
    admin.execute_command("LOCK.ACQUIRE", name, "first", "LEASE", 600_000)
    client = redis.asyncio.Redis(port=full_server.port)
    task = asyncio.create_task(holdfast.asyncio.Lock(client, name).acquire())
    while not waiters(admin, name):
        await asyncio.sleep(0.01)
    take_no_more(admin)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.sleep(3 * LEASE)
    take_more(admin)
    admin.execute_command("LOCK.RELEASE", name, "first")

    def nobody():
        return not admin.exists(name)

    # What was granted to somebody who gave it up would be renewed.
    for _ in range(2000):
        if nobody():
            break
        await asyncio.sleep(0.01)
    assert nobody(), "it is held by somebody who gave it up"
    await holdfast.asyncio.Session(client).close()
    await getattr(client, "aclose", client.close)()


def test_a_session_that_the_server_does_not_see_end_is_ended_by_the_next_one(kind, full_server, admin, name):
    """As behind a firewall that forgets a connection: the server has it still, and would grant to it."""
    proxy = Proxy(full_server.port)
    try:
        client = kind.client(proxy.port)
        lock = kind.Lock(client, name, ephemeral=True)
        lock.acquire()
        lost = lock.lost
        ready(admin)
        proxy.forget()
        assert lost.wait(20)
        assert admin.exists(name)
        with kind.Lock(client, f"{name}:other"):
            assert not admin.exists(name)
    finally:
        proxy.close()

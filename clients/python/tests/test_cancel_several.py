"""asyncio: RedLock and MultiLock may be cancelled anywhere, and nothing stays behind at any server."""

import asyncio

import pytest
import redis.asyncio
from test_cancel import at_every_await, nothing, until

import holdfast
import holdfast.asyncio
from kinds import closed
from servers import HOST, Server

pytestmark = pytest.mark.usefixtures("end_tasks")


@pytest.fixture(scope="module")
def servers():
    servers = [Server() for _ in range(3)]
    yield sorted(servers, key=lambda one: str(one.port))
    for one in servers:
        one.close()


@pytest.fixture
async def clients(servers):
    clients = [redis.asyncio.Redis(host=HOST, port=one.port) for one in servers]
    yield clients
    for client in clients:
        await closed(client)


@pytest.fixture(params=["RedLock", "MultiLock"])
def make(request, clients, name):
    """Makes a lock at all three."""

    def lock():
        if request.param == "RedLock":
            return holdfast.asyncio.RedLock(clients, name)
        return holdfast.asyncio.MultiLock([holdfast.asyncio.Lock(client, name) for client in clients])

    return lock


def nothing_anywhere(clients, name):
    async def condition():
        return all([await nothing(client, name)() for client in clients])

    return condition


async def test_an_uncontended_acquire_at_every_await(make, clients, name):
    locks = []

    def acquire():
        locks.append(make())
        return locks[-1].acquire()

    async def settle(step, result):
        if result:
            await locks[-1].release()
        await until(nothing_anywhere(clients, name), f"cancelled at step {step}, nothing is left")

    await at_every_await(acquire, settle)


@pytest.mark.parametrize("where", [0, 2])
async def test_a_contended_acquire_at_every_await(make, clients, name, where):
    holder = holdfast.asyncio.Lock(clients[where], name)
    await holder.acquire()
    others = [client for client in clients if client is not clients[where]]

    async def settle(step, result):
        async def alone():
            waiters = await clients[where].execute_command("LOCK.WAITERS", name)
            return not waiters and await nothing_anywhere(others, name)()

        if result:
            # Two of three are enough for a RedLock.
            await locks[-1].release()
        await until(alone, f"cancelled at step {step}, nobody waits")
        assert await holder.owned()

    locks = []

    def acquire():
        locks.append(make())
        return locks[-1].acquire(blocking_timeout=0.1)

    await at_every_await(acquire, settle)
    await holder.release()


async def test_a_release_at_every_await(make, clients, name):
    locks = []

    async def make_held():
        locks.append(make())
        await locks[-1].acquire()

    async def settle(step, result):
        # It may be released once more, whatever was heard of the first time.
        lock = locks.pop()
        if lock.fence is not None:
            await lock.release()
        await until(nothing_anywhere(clients, name), f"cancelled at step {step}, nothing is left")
        await make_held()

    await make_held()
    await at_every_await(lambda: locks[-1].release(), settle)
    await locks.pop().release()


async def test_cancelled_in_the_instant_of_the_grant(make, clients, name):
    granted = 0
    for round_ in range(60):
        holder = make()
        await holder.acquire()
        lock = make()
        task = asyncio.create_task(lock.acquire())

        async def waits():
            return len(await clients[0].execute_command("LOCK.WAITERS", name)) == 1

        await until(waits, "it waits")
        release = asyncio.create_task(holder.release())
        # From one turn of the loop to the next, the grant comes nearer.
        for _ in range(round_):
            await asyncio.sleep(0)
        task.cancel()
        await release
        try:
            assert await task
        except asyncio.CancelledError:
            assert lock.fence is None
        else:
            granted += 1
            await lock.release()
        await until(nothing_anywhere(clients, name), f"nothing is left in round {round_}")
    assert granted < 60


async def test_while_held(make, servers, clients, name):
    with pytest.raises(holdfast.LockLost) as caught:
        async with make().while_held() as lock:
            assert await lock.owned()
            for one in servers[:2]:
                one.client().execute_command("LOCK.FORCE", name)
            await asyncio.sleep(10)
    assert caught.value.reason == "forced"
    await until(nothing_anywhere(clients, name), "it was given back")

"""asyncio: a call may be cancelled anywhere, and nothing stays behind."""

import asyncio
import contextlib
import gc
import time
import types

import pytest
import redis.asyncio

import holdfast
import holdfast.asyncio
from kinds import closed, end_others
from servers import HOST

pytestmark = pytest.mark.usefixtures("end_tasks")


@pytest.fixture(params=["single", "cluster"])
def make_client(request):
    if request.param == "cluster":
        cluster = request.getfixturevalue("cluster")
        return lambda **settings: redis.asyncio.RedisCluster(host=HOST, port=cluster.nodes[0].port, **settings)
    server = request.getfixturevalue("server")
    return lambda **settings: redis.asyncio.Redis(host=HOST, port=server.port, **settings)


@pytest.fixture
async def client(make_client):
    client = make_client()
    yield client
    await closed(client)


@pytest.fixture
async def other(make_client):
    client = make_client()
    yield client
    await closed(client)


async def disconnected(client):
    """Has no connections any more, so the next request has the longest way."""
    for pool in client.get_nodes() if hasattr(client, "get_nodes") else [client.connection_pool]:
        await pool.disconnect()


@types.coroutine
def cancelled_at(awaitable, step, when_done):
    """Awaits, and cancels its own task at the given suspension. Counts those there were.

    `when_done`: in the moment in which that has come which it waits for, before it can go on.
    """
    task = asyncio.current_task()
    inner = awaitable.__await__()
    steps = 0
    try:
        yielded = inner.send(None)
        while True:
            steps += 1
            if steps == step and when_done and yielded is not None:
                # Called before the task's own callback, which is yet to be added.
                yielded.add_done_callback(lambda _: task.cancel())
            elif steps == step:
                task.cancel()
            try:
                value = yield yielded
            except BaseException as error:
                yielded = inner.throw(error)
            else:
                yielded = inner.send(value)
    except StopIteration as end:
        return end.value, steps


async def at_every_await(make, settle):
    """Runs what `make` makes again and again, cancelled at its first suspension, its second, and so on.

    Then once more, cancelled in the instant in which each has what it waits for.
    """
    for when_done in (False, True):
        await _at_every_await(make, settle, when_done)


async def _at_every_await(make, settle, when_done, most=200):
    for step in range(1, most):

        async def run(step=step):
            return await cancelled_at(make(), step, when_done)

        task = asyncio.create_task(run())
        done, _ = await asyncio.wait({task}, timeout=10)
        assert done, f"cancelled at step {step}, it goes on"
        if task.cancelled():
            await settle(step, None)
            continue
        result, steps = task.result()
        await settle(step, result)
        assert steps < step, f"cancelled at step {step}, it went on as if it had not been"
        assert step > 1, "there was nothing to cancel"
        return
    raise AssertionError(f"more than {most} steps")


async def until(condition, what):
    async with _limit(10, what):
        while not await condition():
            await asyncio.sleep(0.002)


class _limit:
    def __init__(self, seconds, what):
        self.seconds, self.what = seconds, what

    async def __aenter__(self):
        self.timer = asyncio.get_running_loop().call_later(self.seconds, asyncio.current_task().cancel)

    async def __aexit__(self, kind, error, traceback):
        self.timer.cancel()
        assert kind is not asyncio.CancelledError, f"not within {self.seconds} s: {self.what}"


def nothing(other, name):
    """Whether nobody holds it and nobody waits."""

    async def condition():
        return await other.execute_command("LOCK.INFO", name) is None

    return condition


async def test_an_uncontended_acquire_at_every_await(client, other, name):
    locks = []

    def make():
        locks.append(holdfast.asyncio.Lock(client, name))
        return locks[-1].acquire()

    async def settle(step, result):
        if result:
            await locks[-1].release()
        await until(nothing(other, name), f"cancelled at step {step}, nothing is left")
        await disconnected(client)

    await at_every_await(make, settle)


async def test_an_acquire_with_health_checks_at_every_await(make_client, other, name):
    client = make_client(health_check_interval=60)

    async def settle(step, result):
        await until(nothing(other, name), f"cancelled at step {step}, nothing is left")

    async def acquire_and_release():
        lock = holdfast.asyncio.Lock(client, name)
        await lock.acquire()
        await lock.release()

    await acquire_and_release()
    await at_every_await(lambda: _Await(acquire_and_release()), settle)
    await closed(client)


async def test_the_first_acquire_of_a_client_at_every_await(make_client, other, name):
    clients, locks = [], []

    def make():
        clients.append(make_client())
        locks.append(holdfast.asyncio.Lock(clients[-1], name, ephemeral=True))
        return locks[-1].acquire()

    async def settle(step, result):
        if not result:
            await until(nothing(other, name), f"cancelled at step {step}, nothing is left")
        client = clients.pop()
        await getattr(client, "aclose", client.close)()
        locks.clear()
        del client
        # Errors and their frames know each other.
        gc.collect()
        await until(nothing(other, name), "the lock goes with its client")

    await at_every_await(make, settle)


async def test_a_contended_acquire_at_every_await(client, other, name):
    holder = holdfast.asyncio.Lock(other, name)
    locks = []

    def make():
        locks.append(holdfast.asyncio.Lock(client, name))
        return locks[-1].acquire(blocking_timeout=0.1)

    async def settle(step, result):
        async def alone():
            info = await other.execute_command("LOCK.WAITERS", name)
            return not info

        await until(alone, f"cancelled at step {step}, nobody waits")
        assert await holder.owned()

    await holder.acquire()
    await at_every_await(make, settle)
    await holder.release()
    await until(nothing(other, name), "nothing is left")


async def granted_out_of_queues(client, name):
    """How often the server that serves this lock has granted one to somebody who waited."""
    node = {"target_nodes": client.get_node_from_key(name)} if hasattr(client, "get_nodes") else {}
    return (await client.info("holdfast", **node))["holdfast_grants_queued"]


async def test_cancelled_in_the_instant_of_the_grant(client, other, name):
    """300 rounds: each time the server grants it, and the client is cancelled before or after it hears of that."""
    # The client is ready before somebody counts.
    async with holdfast.asyncio.Lock(other, name):
        before = await granted_out_of_queues(other, name)
    heard = 0
    for round_ in range(300):
        holder = holdfast.asyncio.Lock(other, name)
        await holder.acquire()
        lock = holdfast.asyncio.Lock(client, name)
        task = asyncio.create_task(lock.acquire())

        async def waits():
            return len(await other.execute_command("LOCK.WAITERS", name)) == 1

        await until(waits, "it waits")
        release = asyncio.create_task(holder.release())
        # From one turn of the loop to the next, the grant comes nearer.
        for _ in range(round_ % 20):
            await asyncio.sleep(0)
        task.cancel()
        await release
        try:
            assert await task
        except asyncio.CancelledError:
            assert lock.fence is None
        else:
            heard += 1
            await lock.release()
        await until(nothing(other, name), f"nothing is left in round {round_}")
    granted = await granted_out_of_queues(other, name) - before
    assert heard < granted, "none was cancelled that the server had granted"


async def test_whoever_cancels_all_tasks_of_the_loop_ends_the_session(client, other, name):
    told = []
    lock = holdfast.asyncio.Lock(client, name, ephemeral=True, on_lost=told.append)
    await lock.acquire()
    await end_others()
    with pytest.raises(holdfast.LockLost):
        lock.check()
    await until(nothing(other, name), "its connection is closed")
    assert told


async def test_release_at_every_await(client, other, name):
    locks = []

    async def make_held():
        lock = holdfast.asyncio.Lock(client, name)
        await lock.acquire()
        locks.append(lock)

    await make_held()

    async def settle(step, result):
        # It may be released once more, whatever was heard of the first time.
        lock = locks.pop()
        if lock.fence is not None:
            await lock.release()
        await until(nothing(other, name), f"cancelled at step {step}, nothing is left")
        await make_held()

    await at_every_await(lambda: locks[-1].release(), settle)
    await locks.pop().release()


async def test_extend_at_every_await(client, other, name):
    lock = holdfast.asyncio.Lock(client, name, timeout=30)
    await lock.acquire()

    async def settle(step, result):
        # Whatever the server has heard, it is held, and can be extended again.
        lock.check()
        assert await lock.owned()

    await at_every_await(lambda: lock.extend(1), settle)
    await lock.release()
    await until(nothing(other, name), "it was given back")


@pytest.mark.parametrize("enter", [lambda lock: lock, lambda lock: lock.while_held()], ids=["lock", "while_held"])
async def test_a_block_at_every_await(client, other, name, enter):
    async def block():
        async with enter(holdfast.asyncio.Lock(client, name)):
            await asyncio.sleep(0)

    async def settle(step, result):
        await until(nothing(other, name), f"cancelled at step {step}, nothing is left")

    await at_every_await(lambda: _Await(block()), settle)


class _Await:
    def __init__(self, coroutine):
        self.coroutine = coroutine

    def __await__(self):
        return self.coroutine.__await__()


async def test_wait_for(client, other, name):
    holder = holdfast.asyncio.Lock(other, name)
    await holder.acquire()
    for _ in range(20):
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(holdfast.asyncio.Lock(client, name).acquire(), 0.01)
    assert await other.execute_command("LOCK.WAITERS", name) == []
    await holder.release()


async def test_others_go_on_when_the_one_who_opens_the_session_is_cancelled(client, name):
    tasks = [asyncio.create_task(holdfast.asyncio.Lock(client, f"{name}:{n}").acquire()) for n in range(5)]
    await asyncio.sleep(0)
    tasks[0].cancel()
    assert await asyncio.gather(*tasks[1:]) == [True] * 4


async def test_while_held_stops_the_block(client, other, name):
    reached = False
    with pytest.raises(holdfast.LockLost) as caught:
        async with holdfast.asyncio.Lock(client, name).while_held() as lock:
            assert await lock.owned()
            await other.execute_command("LOCK.FORCE", name)
            await asyncio.sleep(10)
            reached = True
    assert caught.value.reason == "forced"
    assert not reached
    # The task is not cancelled: it goes on after the block.
    await asyncio.sleep(0)


async def test_while_held_and_check_in_the_task_that_finds_the_loss_itself(client, other, name):
    with pytest.raises(holdfast.LockLost) as caught:
        async with holdfast.asyncio.Lock(client, name, timeout=1.5).while_held() as lock:
            # The loop stands still, so nobody else hears of it before.
            time.sleep(1.6)
            lock.check()
            pytest.fail("it is lost")
    assert caught.value.reason == "expired"
    # The task was not cancelled, also not for what it awaits next.
    await asyncio.sleep(0.01)


async def test_while_held_of_a_task_that_finds_the_loss_and_goes_on(client, other, name):
    with pytest.raises(holdfast.LockLost):
        async with holdfast.asyncio.Lock(client, name, timeout=1.5).while_held() as lock:
            time.sleep(1.6)
            with contextlib.suppress(holdfast.LockLost):
                lock.check()
            await asyncio.sleep(20)
            pytest.fail("it was not stopped")


async def test_while_held_without_a_loss(client, other, name):
    async with holdfast.asyncio.Lock(client, name).while_held():
        assert not await holdfast.asyncio.Lock(other, name).acquire(blocking=False)
    await until(nothing(other, name), "it was given back")


async def test_while_held_of_what_is_held(client, other, name):
    async with holdfast.asyncio.Lock(client, name) as lock:
        async with lock.while_held():
            pass
        assert await lock.owned()
        with pytest.raises(holdfast.LockLost):
            async with lock.while_held():
                await other.execute_command("LOCK.FORCE", name)
                await asyncio.sleep(10)
        lock.raise_on_release_error = False


async def test_while_held_is_cancelled_from_outside(client, other, name):
    async def work():
        async with holdfast.asyncio.Lock(client, name).while_held():
            await asyncio.sleep(10)

    task = asyncio.create_task(work())

    async def held():
        return not await nothing(other, name)()

    await until(held, "it works")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(nothing(other, name), "it was given back")


async def test_the_error_of_a_block_goes_before_its_loss(client, other, name):
    with pytest.raises(ZeroDivisionError):
        async with holdfast.asyncio.Lock(client, name).while_held():
            try:
                await other.execute_command("LOCK.FORCE", name)
                await asyncio.sleep(10)
            except asyncio.CancelledError:
                raise ZeroDivisionError from None


async def test_a_locked_function_is_stopped(client, other, name):
    @holdfast.asyncio.locked(client, name + ":{number}")
    async def work(number):
        await other.execute_command("LOCK.FORCE", f"{name}:{number}")
        await asyncio.sleep(10)

    with pytest.raises(holdfast.LockLost):
        await work(7)


async def test_re_entrant_for_a_task(client, other, name):
    lock = holdfast.asyncio.RLock(client, name)

    async def another():
        return await lock.acquire(blocking=False)

    async with lock, lock:
        assert await asyncio.create_task(another()) is False
        await lock.acquire()
        await lock.release()
        assert await lock.owned()
    await until(nothing(other, name), "it was given back")


async def test_a_re_entrant_lock_can_be_taken_again_after_a_loss(client, other, name):
    lock = holdfast.asyncio.RLock(client, name)
    await lock.acquire()
    lost = lock.lost
    await other.execute_command("LOCK.FORCE", name)
    await asyncio.wait_for(lost.wait(), 10)
    assert await lock.acquire()
    lock.check()
    await lock.release()
    await until(nothing(other, name), "it was given back")
    with pytest.raises(holdfast.LockLost):
        await lock.release()

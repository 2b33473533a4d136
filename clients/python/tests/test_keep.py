"""Kept locks: what is given back stays at hand, and whoever in this process comes next asks the server nothing."""

import asyncio
import gc
import linecache
import math
import os
import signal
import sys
import threading

import pytest
import redis
import redis.asyncio
from test_given_back import Interruptible, interrupt
from test_process import ends, program

import holdfast
import holdfast.asyncio
from kinds import end_others
from servers import HOST, Cluster, Server, holder, until, waiters
from test_lock import in_thread
from test_reconnect import kill_session, sessions

LONG = 300


@pytest.fixture
def server(patient_server):
    """One whose requests can be counted, and whose leases do not run out meanwhile."""
    return patient_server


@pytest.fixture
def own_cluster():
    cluster = Cluster()
    yield cluster
    cluster.close()


@pytest.fixture
def other(server):
    """Another process's client."""
    client = server.client()
    yield client
    holdfast.Session(client).close()
    client.close()


def requests(admin):
    """How many of which were asked for locks, but for the events."""
    stats = admin.info("commandstats")
    words = ("acquire", "macquire", "release", "mrelease", "renew", "mrenew", "cancel", "info")
    counts = {word: stats.get(f"cmdstat_lock.{word}", {"calls": 0})["calls"] for word in words}
    return {word: count for word, count in counts.items() if count and word != "info"}


def in_line(kind, client):
    """How many of this process wait in the lines of this client."""
    return sum(len(line._waiting) for line in list(kind.home(client).lines.values()))


def kept(kind, client, name, **settings):
    return kind.Lock(client, name, **{"keep": LONG, "thread_local": False, **settings})


def queue(kind, client, name, count, order, **settings):
    """So many that wait one behind the other, and note who had his turn."""
    joins = []
    for number in range(count):
        before = in_line(kind, client)

        def use(number=number):
            with kept(kind, client, name, **settings):
                order.append(number)

        joins.append(in_thread(use))
        until(lambda before=before: in_line(kind, client) == before + 1, "it waits in the line")
    return joins


# Nothing is sent.


@pytest.mark.parametrize("what", ["Lock", "LockAll", "ephemeral", "RLock"])
def test_whoever_comes_next_asks_the_server_nothing(kind, client, admin, name, what):
    if what == "LockAll":
        make, words = lambda: kind.LockAll(client, [name, f"{name}:2"], keep=LONG), ("macquire", "mrelease")
    elif what == "RLock" and kind.name == "threads":
        make, words = lambda: kind.RLock(client, name, keep=LONG), ("acquire", "release")
    else:
        make, words = lambda: kind.Lock(client, name, keep=LONG, ephemeral=what != "Lock"), ("acquire", "release")
    lock, fences = make(), set()
    for _ in range(50):
        with lock:
            fences.add(lock.fence)
            lock.check()
        # Another object is the same lock.
        with make() as another:
            fences.add(another.fence)
    assert requests(admin) == {words[0]: 1}
    assert len(fences) == 1
    assert admin.exists(name)
    kind.Session(client).close()
    assert not admin.exists(name)
    assert requests(admin) == {words[0]: 1, words[1]: 1}


def test_what_replicas_have_confirmed_is_kept_without_asking_them_again(kind, server, client, admin, name):
    replica = Server(("replicaof", f"{HOST} {server.port}"))
    try:
        until(lambda: admin.info("replication").get("slave0", {}).get("state") == "online", "the replica is in sync")
        lock = kept(kind, client, name, replicas=1)
        with lock:
            fence = lock.fence
        replica.signal(signal.SIGSTOP)
        with lock:
            assert lock.fence == fence
        assert requests(admin) == {"acquire": 1}
        kind.Session(client).close()
        until(lambda: not admin.exists(name), "it is given back")
        # What is asked for anew is not confirmed, and so not held.
        with pytest.raises(holdfast.NoReplicas):
            lock.acquire()
        until(lambda: not admin.exists(name), "it is not held")
    finally:
        replica.signal(signal.SIGCONT)
        replica.close()


@pytest.mark.parametrize("keep", [None, 0])
def test_what_is_not_kept_is_given_back_as_before(kind, client, admin, name, keep):
    lock = kind.Lock(client, name, keep=keep)
    for number in (1, 2):
        with lock:
            pass
        assert not admin.exists(name)
        assert requests(admin) == {"acquire": number, "release": number}
    assert not kind.home(client).lines


def test_other_terms_are_another_line(kind, client, admin, name):
    with kept(kind, client, name):
        pass
    with kept(kind, client, name, ephemeral=True):
        assert requests(admin)["acquire"] == 2
    # For how long, is everybody's own affair.
    with kept(kind, client, name, ephemeral=True, keep=1, keep_uses=7):
        assert requests(admin)["acquire"] == 2


def test_its_time_is_over(kind, client, admin, name):
    with kept(kind, client, name, keep=0.2) as lock:
        fence = lock.fence
    until(lambda: not admin.exists(name), "it was given back")
    with lock:
        assert lock.fence > fence


def test_in_use_it_has_no_time(kind, client, admin, name):
    short = kept(kind, client, name, keep=0.2)
    with short:
        pass
    with short:
        until(lambda: not admin.set("passed", 1, px=600, nx=True) and not admin.pttl("passed") > 200, "time passes")
        assert short.owned()
    assert admin.exists(name)


def test_for_ever(kind, client, admin, name):
    with kept(kind, client, name, keep=math.inf):
        pass
    with kept(kind, client, name, keep=math.inf):
        assert requests(admin) == {"acquire": 1}


def test_the_owner_names_no_actor(kind, client, admin, name):
    with kept(kind, client, name):
        assert b"##" not in holder(admin, name)[b"owner"]


# The line.


def test_those_who_wait_are_served_in_the_order_of_asking(kind, client, admin, name):
    order, first = [], kept(kind, client, name)
    first.acquire()
    joins = queue(kind, client, name, 5, order)
    assert waiters(admin, name) == 0
    assert order == []
    first.release()
    for join in joins:
        join()
    assert order == [0, 1, 2, 3, 4]
    assert requests(admin) == {"acquire": 1}


def test_one_asks_and_the_others_wait_behind_him(kind, client, other, admin, name):
    holds = holdfast.Lock(other, name)
    holds.acquire()
    order = []

    def ask():
        with kept(kind, client, name):
            order.append("asks")

    joins = [in_thread(ask)]
    until(lambda: waiters(admin, name) == 1, "he asks")
    joins += queue(kind, client, name, 3, order)
    assert waiters(admin, name) == 1
    holds.release()
    for join in joins:
        join()
    assert order == ["asks", 0, 1, 2]
    assert requests(admin)["acquire"] == 2


def test_who_does_not_wait_is_told_at_once(kind, client, admin, name):
    first = kept(kind, client, name)
    first.acquire()
    assert kept(kind, client, name).acquire(blocking=False) is False
    assert requests(admin) == {"acquire": 1}
    first.release()
    second = kept(kind, client, name)
    assert second.acquire(blocking=False) is True
    assert requests(admin) == {"acquire": 1}


def test_who_does_not_wait_while_another_process_has_it(kind, client, other, name):
    holds = holdfast.Lock(other, name)
    holds.acquire()
    lock = kept(kind, client, name)
    assert lock.acquire(blocking=False) is False
    assert lock.acquire(blocking_timeout=0.05) is False
    holds.release()
    assert lock.acquire(blocking=False) is True


def test_who_waits_in_the_line_waits_no_longer_than_his_time(kind, client, admin, name):
    first, order = kept(kind, client, name), []
    first.acquire()
    late = in_thread(lambda: kept(kind, client, name).acquire(blocking_timeout=0.2))
    until(lambda: in_line(kind, client) == 1, "it waits")
    joins = queue(kind, client, name, 2, order)
    assert late() is False
    assert requests(admin) == {"acquire": 1}
    first.release()
    for join in joins:
        join()
    assert order == [0, 1]


def test_an_asker_whose_time_is_over_makes_the_next_one_ask(kind, client, other, admin, name):
    holds = holdfast.Lock(other, name)
    holds.acquire()
    late = in_thread(lambda: kept(kind, client, name).acquire(blocking_timeout=0.3))
    until(lambda: waiters(admin, name) == 1, "he asks")
    order = []
    joins = queue(kind, client, name, 2, order)
    assert late() is False
    until(lambda: waiters(admin, name) == 1, "the next one asks")
    until(lambda: in_line(kind, client) == 1, "and one waits behind him")
    holds.release()
    for join in joins:
        join()
    assert order == [0, 1]


def test_the_time_of_who_becomes_the_asker_goes_on(kind, client, other, admin, name):
    first = kept(kind, client, name)
    first.acquire()
    second = in_thread(lambda: kept(kind, client, name).acquire(blocking_timeout=1))
    until(lambda: in_line(kind, client) == 1, "it waits")
    admin.execute_command("LOCK.FORCE", name)
    holds = holdfast.Lock(other, name)
    if not holds.acquire(blocking=False):
        assert second() is True
        return
    assert second(4) is False


def test_an_error_is_that_of_who_asked(kind, client, other, admin, name):
    holds = holdfast.Lock(other, name)
    holds.acquire()
    asks = in_thread(kept(kind, client, name).acquire)
    until(lambda: waiters(admin, name) == 1, "he asks")
    waits = in_thread(kept(kind, client, name).acquire)
    until(lambda: in_line(kind, client) == 1, "another one waits")
    admin.set(name, "no lock")
    for join in (asks, waits):
        with pytest.raises(holdfast.WrongType):
            join()
    admin.delete(name)
    with kept(kind, client, name):
        pass


# Whoever goes in the middle.


def test_an_interrupted_waiter_holds_up_nobody(server, name):
    client = server.client()
    kind = type("Kind", (), {"home": staticmethod(holdfast._home.home_of), "Lock": holdfast.Lock})
    first, order = kept(kind, client, name), []
    first.acquire()
    interrupted = Interruptible(kept(kind, client, name, blocking_timeout=0.5))
    until(lambda: in_line(kind, client) == 1, "it waits")
    joins = queue(kind, client, name, 2, order)
    interrupt(interrupted.thread.ident)
    interrupted.thread.join(20)
    assert interrupted.outcome == "interrupted"
    first.release()
    for join in joins:
        join()
    assert order == [0, 1]


class Limit(Exception):
    """From outside, as a soft time limit."""


def interrupted_at(line, call):
    """Calls it, and interrupts it before this line of holdfast's. Whether it came so far."""
    seen = 0

    def trace(frame, event, _):
        nonlocal seen
        code = frame.f_code.co_filename
        if not code.startswith(os.path.dirname(holdfast.__file__)):
            return None
        # On leaving a block that line comes once more, and then nobody could leave it.
        if event == "line" and not linecache.getline(code, frame.f_lineno).strip().startswith("with "):
            seen += 1
            if seen == line:
                raise Limit
        return trace

    sys.settrace(trace)
    try:
        call()
    except Limit:
        pass
    finally:
        sys.settrace(None)
    return seen >= line


@pytest.fixture
def little_to_collect():
    """Collections look at what comes from now on, and not each time at all that pytest has loaded."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def at_every_line(call, then):
    line = 1
    while interrupted_at(line, call):
        then()
        line += 1
    then()
    return line


@pytest.mark.usefixtures("little_to_collect")
def test_whoever_is_interrupted_anywhere_leaves_a_line_that_goes_on(server, admin, name):
    client = server.client()
    lock = None

    def use():
        lock.acquire()
        lock.release()

    def goes_on():
        nonlocal lock
        # What is interrupted after it was taken, or before it is given back, is the object's.
        lock = None
        gc.collect()
        lock = holdfast.Lock(client, name, keep=LONG)
        assert lock.acquire(blocking_timeout=10)
        lock.release()

    goes_on()
    assert at_every_line(use, goes_on) > 50
    holdfast.Session(client).close()
    assert not admin.exists(name)


@pytest.mark.usefixtures("little_to_collect")
def test_whoever_is_interrupted_anywhere_lets_the_next_one_have_it(server, admin, name):
    client = server.client()
    kind = type("Kind", (), {"home": staticmethod(holdfast._home.home_of), "Lock": holdfast.Lock})
    lock, joins = None, []

    def begin():
        nonlocal lock
        lock = kept(kind, client, name)
        assert lock.acquire(blocking_timeout=10)
        joins.append(in_thread(lambda: kept(kind, client, name, blocking_timeout=20).acquire()))
        until(lambda: in_line(kind, client) == 1, "it waits")

    def goes_on():
        nonlocal lock
        lock = None
        gc.collect()
        assert joins.pop()() is True
        gc.collect()
        begin()

    begin()
    assert at_every_line(lambda: lock.release(), goes_on) > 50
    lock.release()
    assert joins.pop()() is True
    holdfast.Session(client).close()
    assert not admin.exists(name)


async def test_a_cancelled_waiter_holds_up_nobody(server, admin, name):
    client = redis.asyncio.Redis(host=HOST, port=server.port)

    def lock():
        return holdfast.asyncio.Lock(client, name, keep=LONG)

    try:
        first = lock()
        await first.acquire()
        waits = [asyncio.create_task(lock().acquire()) for _ in range(3)]
        await asyncio.sleep(0)
        waits[0].cancel()
        await asyncio.wait(waits[:1])
        assert waits[0].cancelled()
        await first.release()
        # Given to him, and cancelled in that instant.
        waits[1].cancel()
        await asyncio.wait(waits[1:2])
        assert waits[1].cancelled()
        assert await asyncio.wait_for(waits[2], 10)
        assert requests(admin) == {"acquire": 1}
    finally:
        await holdfast.asyncio.Session(client).close()
        await getattr(client, "aclose", client.close)()
    assert not admin.exists(name)


async def test_a_cancelled_asker_makes_the_next_one_ask(server, other, admin, name):
    client = redis.asyncio.Redis(host=HOST, port=server.port)
    holds = holdfast.Lock(other, name, thread_local=False)
    holds.acquire()
    try:
        locks = [holdfast.asyncio.Lock(client, name, keep=LONG) for _ in range(3)]
        tasks = [asyncio.create_task(lock.acquire()) for lock in locks]
        for _ in range(2000):
            if waiters(admin, name):
                break
            await asyncio.sleep(0.005)
        tasks[0].cancel()
        await asyncio.wait(tasks[:1])
        for _ in range(2000):
            if waiters(admin, name):
                break
            await asyncio.sleep(0.005)
        await asyncio.to_thread(holds.release) if hasattr(asyncio, "to_thread") else holds.release()
        assert await asyncio.wait_for(tasks[1], 10)
        await locks[1].release()
        assert await asyncio.wait_for(tasks[2], 10)
    finally:
        await holdfast.asyncio.Session(client).close()
        await getattr(client, "aclose", client.close)()
    assert not admin.exists(name)


@pytest.mark.parametrize("waits", [False, True])
def test_a_handle_that_is_collected_gives_it_to_the_next_one(kind, client, admin, name, waits):
    lock, order, joins = kept(kind, client, name), [], []
    lock.acquire()
    if waits:
        joins = queue(kind, client, name, 1, order)
    del lock
    gc.collect()
    for join in joins:
        join()
    with kept(kind, client, name, blocking_timeout=10):
        assert requests(admin) == {"acquire": 1}


async def test_who_takes_it_again_and_again_lets_others_go_on(server, other, admin, name):
    client = redis.asyncio.Redis(host=HOST, port=server.port)
    uses = 0

    async def work():
        nonlocal uses
        while True:
            async with holdfast.asyncio.Lock(client, name, keep=LONG):
                uses += 1

    task = asyncio.create_task(work())
    for _ in range(20):
        before = uses
        await asyncio.sleep(0.001)
        assert not task.done()
    assert uses > before > 100
    task.cancel()
    await asyncio.wait([task])
    await holdfast.asyncio.Session(client).close()
    await getattr(client, "aclose", client.close)()
    assert requests(admin) == {"acquire": 1, "release": 1}


def test_closing_ends_the_line(kind, client, admin, name):
    told = []
    first = kept(kind, client, name, on_lost=told.append)
    first.acquire()
    joins = [in_thread(kept(kind, client, name).acquire) for _ in range(3)]
    until(lambda: in_line(kind, client) == 3, "they wait")
    kind.Session(client).close()
    for join in joins:
        with pytest.raises(holdfast.LockError, match="closed"):
            join()
    with pytest.raises(holdfast.LockLost):
        first.release()
    until(lambda: told, "he was told")
    assert not admin.exists(name)
    # It begins anew.
    with kept(kind, client, name):
        assert admin.exists(name)


def test_closing_ends_the_line_behind_one_who_asks(kind, client, other, admin, name):
    holds = holdfast.Lock(other, name)
    holds.acquire()
    joins = [in_thread(kept(kind, client, name).acquire)]
    until(lambda: waiters(admin, name) == 1, "he asks")
    joins += [in_thread(kept(kind, client, name).acquire) for _ in range(3)]
    until(lambda: in_line(kind, client) == 3, "they wait")
    kind.Session(client).close()
    for join in joins:
        with pytest.raises(holdfast.LockError, match="closed"):
            join()
    assert holds.owned()


def test_a_loop_that_ends_with_some_waiting(server, admin, name):
    async def use(lock):
        async with lock:
            await asyncio.sleep(3600)

    async def main():
        client = redis.asyncio.Redis(host=HOST, port=server.port)
        locks = [holdfast.asyncio.Lock(client, name, keep=LONG, ephemeral=True) for _ in range(4)]
        tasks = [asyncio.create_task(use(lock)) for lock in locks]
        at_hand = holdfast.asyncio.Lock(client, f"{name}:at-hand", keep=LONG)
        async with at_hand:
            pass
        for _ in range(2000):
            if locks[0].fence is not None:
                break
            await asyncio.sleep(0.005)
        await end_others()
        assert all(task.cancelled() for task in tasks)
        await getattr(client, "aclose", client.close)()

    in_thread(lambda: asyncio.run(main()))(20)
    until(lambda: not admin.exists(name), "it went with the loop", 10)
    # What nobody used was given back.
    until(lambda: not admin.exists(f"{name}:at-hand"), "this one, too", 10)


def test_a_program_that_ends_gives_back_what_is_at_hand(server, admin, name):
    source = f"""
        with holdfast.Lock(client, "{name}", keep=300):
            pass
        assert client.exists("{name}")
        threading.Thread(target=holdfast.Lock(client, "{name}:held", keep=300).acquire).start()
        """
    assert ends(program(server, source)) == ""
    assert not admin.exists(name)


def test_a_program_that_ends_with_some_waiting(server, name):
    source = f"""
        first = holdfast.Lock(client, "{name}", keep=300)
        first.acquire()
        for _ in range(3):
            threading.Thread(target=holdfast.Lock(client, "{name}", keep=300).acquire, daemon=True).start()
        from holdfast._home import home_of
        [line] = home_of(client).lines.values()
        while len(line._waiting) < 3:
            time.sleep(0.01)
        """
    assert ends(program(server, source)) == ""


def test_a_program_that_is_interrupted_while_it_waits(server, name):
    source = f"""
        first = holdfast.Lock(client, "{name}", keep=300, thread_local=False)
        first.acquire()
        from holdfast._home import home_of
        [line] = home_of(client).lines.values()

        def interrupt():
            while not line._waiting:
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGINT)

        threading.Thread(target=interrupt).start()
        try:
            with holdfast.Lock(client, "{name}", keep=300):
                raise AssertionError
        except KeyboardInterrupt:
            pass
        first.release()
        with holdfast.Lock(client, "{name}", keep=300, blocking_timeout=10):
            pass
        print(client.info("commandstats")["cmdstat_lock.acquire"]["calls"])
        """
    assert ends(program(server, source)) == "1\n"


def test_a_fork_while_other_threads_use_kept_locks(server, name):
    source = f"""
        def work(number):
            lock = holdfast.Lock(client, f"{name}:{{number % 2}}", keep=300)
            while True:
                with lock:
                    pass

        for number in range(4):
            threading.Thread(target=work, args=(number,), daemon=True).start()
        mine = holdfast.Lock(client, "{name}:mine", keep=300)
        with mine:
            pass
        for _ in range(30):
            child = os.fork()
            if child == 0:
                # A client of its own: redis-py's pool has a mutex, too.
                client = redis.Redis(host="127.0.0.1", port={server.port})
                with holdfast.Session(client), holdfast.Lock(client, "{name}:child", keep=300) as lock:
                    lock.check()
                del mine
                os._exit(0)
            until = time.monotonic() + 30
            while os.waitpid(child, os.WNOHANG) == (0, 0):
                if time.monotonic() > until:
                    os.kill(child, signal.SIGKILL)
                    print("a child hangs", flush=True)
                    os._exit(1)
                time.sleep(0.001)
        with mine:
            mine.check()
        print("done", flush=True)
        os._exit(0)
        """
    assert ends(program(server, source), 50) == "done\n"


def test_the_child_of_a_fork_starts_afresh(server, admin, name):
    source = f"""
        lock = holdfast.Lock(client, "{name}", keep=300)
        in_use = holdfast.Lock(client, "{name}:in-use", keep=300)
        in_use.acquire()
        with lock:
            fence = lock.fence
        if os.fork() == 0:
            assert in_use.fence is None
            try:
                in_use.release()
            except holdfast.NotHeld:
                pass
            assert not in_use.acquire(blocking=False)
            # What is at hand is so in the parent, who gives it back.
            with lock:
                assert lock.fence > fence
            with lock:
                pass
            holdfast.Session(client).close()
            os._exit(0)
        assert os.wait()[1] == 0
        in_use.check()
        assert in_use.owned()
        in_use.release()
        with lock:
            pass
        print("done")
        """
    assert ends(program(server, source)) == "done\n"


# Handles.


def test_a_client_that_is_collected_gives_back_what_is_at_hand(server, admin, name):
    client = server.client()
    lock = holdfast.Lock(client, name, keep=LONG)
    with lock:
        pass
    del client, lock
    gc.collect()
    until(lambda: not admin.exists(name), "it was given back")


def test_each_use_has_a_handle_of_its_own(kind, client, name):
    first, second = kept(kind, client, name), kept(kind, client, name)
    first.acquire()
    fence = first.fence
    first.release()
    second.acquire()
    assert second.fence == fence
    assert first.fence is None
    assert not first.owned()
    for use in (first.check, first.release):
        with pytest.raises(holdfast.NotHeld) as caught:
            use()
        assert not isinstance(caught.value, holdfast.LockLost)
    second.check()
    assert second.owned()
    second.release()
    with pytest.raises(holdfast.NotHeld):
        second.release()


@pytest.mark.parametrize("who", ["nobody", "another"])
def test_two_threads_that_release_the_same_use(kind, client, admin, name, who):
    """The second of them does not give back what somebody else has by then."""
    lock, another = kept(kind, client, name), kept(kind, client, name)
    lock.acquire()
    inner = getattr(lock, "_inner", lock)
    hold = inner._held().holds[-1]
    lock.release()
    if who == "another":
        another.acquire()
    inner._held().holds.append(hold)
    hold.unheard = False
    with pytest.raises(holdfast.NotHeld):
        lock.release()
    if who == "another":
        another.check()
        assert another.owned()
    assert requests(admin) == {"acquire": 1}


def test_a_re_entrant_one(server, admin, name):
    client = server.client()
    lock = holdfast.RLock(client, name, keep=LONG)
    with lock, lock:
        lock.check()
        assert in_thread(lambda: holdfast.RLock(client, name, keep=LONG).acquire(blocking=False))() is False
    assert in_thread(lambda: holdfast.RLock(client, name, keep=LONG).acquire(blocking=False))() is True
    assert requests(admin) == {"acquire": 1}


async def test_a_re_entrant_one_of_tasks(server, admin, name):
    client = redis.asyncio.Redis(host=HOST, port=server.port)
    lock = holdfast.asyncio.RLock(client, name, keep=LONG)
    for _ in range(3):
        async with lock, lock:
            lock.check()
    assert requests(admin) == {"acquire": 1}
    await holdfast.asyncio.Session(client).close()
    await getattr(client, "aclose", client.close)()


# Others want it.


def test_wanted_while_nobody_uses_it(kind, client, other, name):
    with kept(kind, client, name) as lock:
        fence = lock.fence
    with holdfast.Lock(other, name, blocking_timeout=20) as theirs:
        assert theirs.fence > fence
        assert lock.acquire(blocking=False) is False


def test_refused_because_it_is_at_hand(kind, client, other, name):
    """Also who does not wait has it soon."""
    with kept(kind, client, name):
        pass
    until(lambda: holdfast.Lock(other, name, thread_local=False).acquire(blocking=False), "it is given back")


def test_wanted_in_use(kind, client, other, admin, name):
    lock, theirs = kept(kind, client, name), holdfast.Lock(other, name, thread_local=False)
    lock.acquire()
    join = in_thread(lambda: theirs.acquire(blocking_timeout=20))
    until(lambda: claims(kind, client)[0].called, "it is known here")
    lock.check()
    lock.release()
    assert join() is True
    again = in_thread(lambda: lock.acquire(blocking_timeout=20))
    until(lambda: waiters(admin, name) == 1, "it asks anew")
    theirs.release()
    assert again() is True


def claims(kind, client):
    """What the core knows."""
    return [claim for node in kind.home(client).nodes.values() for claim in node.core._claims.values()]


@pytest.mark.parametrize("keep_uses", [1, 2, 3])
def test_so_many_uses_in_a_row_while_others_wait(kind, client, other, admin, name, keep_uses):
    first, order = kept(kind, client, name, keep_uses=keep_uses), []
    first.acquire()
    joins = queue(kind, client, name, 4, order, keep_uses=keep_uses)

    def theirs():
        with holdfast.Lock(other, name, blocking_timeout=20):
            order.append("theirs")

    joins.append(in_thread(theirs))
    until(lambda: claims(kind, client)[0].called, "it is known that they want it")
    first.release()
    for join in joins:
        join()
    expected = [0, 1, 2, 3]
    expected.insert(keep_uses - 1, "theirs")
    assert order == expected


def test_two_processes_take_turns(kind, client, other, name):
    """Both keep it, and neither keeps the other one waiting."""
    turns, over = {"ours": 0, "theirs": 0}, threading.Event()

    def work(make, who):
        while not over.is_set():
            with make():
                turns[who] += 1

    joins = [
        in_thread(lambda: work(lambda: kept(kind, client, name), "ours")),
        in_thread(lambda: work(lambda: holdfast.Lock(other, name, keep=LONG), "theirs")),
    ]
    try:
        until(lambda: min(turns.values()) >= 50, "both have had their turns")
    finally:
        over.set()
    for join in joins:
        join()


def test_one_at_a_time_whoever_it_is(kind, client, other, name):
    inside, seen, errors = [0], [0], []

    def work(make):
        for _ in range(100):
            with make():
                inside[0] += 1
                if inside[0] != 1:
                    errors.append(inside[0])
                seen[0] += 1
                inside[0] -= 1

    joins = [in_thread(lambda: work(lambda: kept(kind, client, name, keep_uses=3))) for _ in range(4)]
    joins += [in_thread(lambda: work(lambda: holdfast.Lock(other, name, keep=0.01))) for _ in range(2)]
    joins += [in_thread(lambda: work(lambda: holdfast.Lock(other, name)))]
    for join in joins:
        join(50)
    assert (seen, errors) == ([700], [])


def test_an_unkept_lock_of_the_same_process_wants_it_too(kind, client, name):
    with kept(kind, client, name):
        pass
    with kind.Lock(client, name, blocking_timeout=20):
        pass


def test_it_is_shown_as_held(kind, client, admin, name):
    lock = kept(kind, client, name)
    with lock:
        pass
    assert lock.locked()
    assert not lock.owned()
    assert holder(admin, name)[b"wanted"] == 1
    with kind.Lock(client, f"{name}:other"):
        assert holder(admin, f"{name}:other")[b"wanted"] == 0


# Losses.


def test_a_loss_in_use_is_told_to_who_uses_it(kind, client, admin, name):
    told, others = [], []
    earlier = kept(kind, client, name, on_lost=others.append)
    with earlier:
        pass
    lock = kept(kind, client, name, on_lost=told.append)
    lock.acquire()
    lost = lock.lost
    later = kept(kind, client, name, on_lost=others.append)
    join = in_thread(lambda: later.acquire(blocking_timeout=20))
    until(lambda: in_line(kind, client) == 1, "another one waits")
    admin.execute_command("LOCK.FORCE", name)
    # He need not wait until the one who has lost it is done.
    assert join() is True
    assert lost.wait(10)
    until(lambda: told, "he was told")
    assert (told[0].reason, told[0].fence) == ("forced", lock.fence)
    with pytest.raises(holdfast.LockLost):
        lock.check()
    with pytest.raises(holdfast.LockLost):
        lock.release()
    with pytest.raises(holdfast.NotHeld):
        lock.release()
    later.check()
    assert later.owned()
    later.release()
    assert not others
    assert requests(admin) == {"acquire": 2}


def test_a_loss_while_nobody_uses_it_is_told_to_nobody(kind, client, admin, name):
    told = []
    with kept(kind, client, name, on_lost=told.append) as lock:
        lost, fence = lock.lost, lock.fence
    admin.execute_command("LOCK.FORCE", name)
    until(lambda: not claims(kind, client), "it is known here")
    with lock:
        assert lock.fence > fence
    assert not told
    assert not lost.is_set()


def test_who_could_have_lost_it_asks_before_he_is_done(kind, own_server, name):
    lock = kept(kind, kind.client(own_server.port), name)
    lock.acquire()
    hold = getattr(lock, "_inner", lock)._held().holds[-1]
    own_server.signal(signal.SIGSTOP)
    try:
        until(lambda: hold.doubtful, "its lease is over")
        join = in_thread(lock.release)
        with pytest.raises(AssertionError):
            join(0.2)
    finally:
        own_server.signal(signal.SIGCONT)
    with pytest.raises(holdfast.LockLost):
        join()
    # Whoever is next goes on.
    with kept(kind, lock.redis if kind.name == "threads" else lock._inner.redis, name):
        pass


@pytest.mark.parametrize("is_used", [True, False])
def test_it_is_taken_along_as_any_other(kind, client, admin, name, is_used):
    lock = kept(kind, client, name)
    lock.acquire()
    fence, before = lock.fence, holder(admin, name)[b"client"]
    if not is_used:
        lock.release()
    kill_session(admin)
    until(lambda: holder(admin, name)[b"client"] not in (None, before), "it was taken along")
    if is_used:
        lock.release()
    with lock:
        assert lock.fence == fence
        lock.check()
    assert requests(admin) == {"acquire": 1, "renew": 1}


def test_an_ephemeral_one_is_lost_with_its_session(kind, client, admin, name):
    lock = kept(kind, client, name, ephemeral=True)
    with lock:
        fence = lock.fence
    kill_session(admin)
    until(lambda: not admin.exists(name), "it is gone")
    until(lambda: not any(claim.wanted for claim in claims(kind, client)), "it is known here")
    with lock:
        assert lock.fence > fence


def test_who_looks_at_each_use_leaves_no_look_behind(server, name):
    client = server.client()
    lock = holdfast.Lock(client, name, keep=LONG, on_lost=print)
    for _ in range(200):
        with lock:
            assert not lock.lost.is_set()
    assert len(holdfast._home.home_of(client)._looks) < 10


@pytest.mark.parametrize("gone", ["collected", "kept"])
def test_what_is_kept_no_more_is_forgotten(kind, client, admin, name, gone):
    locks = []
    for number in range(400):
        lock = kept(kind, client, f"{name}:{number}", keep=0.001)
        with lock:
            pass
        until(lambda number=number: not admin.exists(f"{name}:{number}"), "it was given back")
        if gone == "kept":
            locks.append(lock)
    del lock
    gc.collect()
    home = kind.home(client)
    assert len(home.holds) <= 200
    if gone == "collected":
        assert len(home.lines) <= 200


def test_in_a_cluster(kind, cluster, name):
    client = kind.cluster(cluster.nodes[0].port)
    for number in range(8):
        lock = kind.Lock(client, f"{name}:{number}", keep=LONG)
        fences = set()
        for _ in range(3):
            with lock:
                fences.add(lock.fence)
        assert len(fences) == 1
    kind.Session(client).close()


@pytest.mark.parametrize("is_used", [True, False])
def test_its_slot_moves(kind, own_cluster, name, is_used):
    cluster = own_cluster
    client = kind.cluster(cluster.nodes[0].port)
    source = cluster.masters[cluster.owner(name)]
    target = cluster.masters[1 - cluster.owner(name)]
    lock = kept(kind, client, name)
    lock.acquire()
    fence = lock.fence
    if not is_used:
        lock.release()
    cluster.begin_move(cluster.slot(name), source, target)
    cluster.finish_move(cluster.slot(name), source, target)
    until(lambda: holder(target.client(), name)[b"client"], "it was taken along")
    until(lambda: any(one.sent is None for one in claims(kind, client)), "it is known here")
    if is_used:
        lock.release()
    with lock:
        assert lock.fence == fence
        lock.check()
        assert lock.owned()


async def test_a_block_that_is_stopped(server, admin, name):
    client = redis.asyncio.Redis(host=HOST, port=server.port)

    def lock():
        return holdfast.asyncio.Lock(client, name, keep=LONG)

    async with lock().while_held():
        pass
    with pytest.raises(holdfast.LockLost):
        async with lock().while_held():
            admin.execute_command("LOCK.FORCE", name)
            await asyncio.sleep(50)
    async with lock().while_held() as one:
        one.check()
    assert requests(admin) == {"acquire": 2}
    await holdfast.asyncio.Session(client).close()
    await getattr(client, "aclose", client.close)()


# What can't be kept.


def test_what_is_not_watched_or_not_a_mutex_is_not_kept(kind, client, name):
    for settings, word in (({"timeout": 5}, "timeout"), ({"limit": 2}, "limit"), ({"limit": 0}, "limit")):
        with pytest.raises(ValueError, match=f"{word} must be"):
            kind.Lock(client, name, keep=1, **settings)
        # It says nothing without `keep`.
        kind.Lock(client, name, keep_uses=3, **settings)
    kind.Lock(client, name, keep=1, watched=5, ephemeral=True, replicas=1)
    for settings, word in (
        ({"keep": -1}, "keep"),
        ({"keep": 0.0001}, "keep"),
        ({"keep": 1, "keep_uses": 0}, "keep_uses"),
    ):
        with pytest.raises(ValueError, match=f"{word} must be"):
            kind.Lock(client, name, **settings)


def test_kinds_that_are_not_kept(kind, client, name):
    for make in (
        lambda: kind.Semaphore(client, name, 1, keep=1),
        lambda: kind.RWLock(client, name, keep=1),
        lambda: kind.MultiLock([kind.Lock(client, name, keep=1)]),
    ):
        with pytest.raises(ValueError, match="keep"):
            make()
    for make in (
        lambda: kind.RedLock([client], name, keep=1),
        lambda: kind.MultiLock([kind.Lock(client, name)], keep=1),
    ):
        with pytest.raises(TypeError, match="keep"):
            make()
    # None says nothing.
    kind.Semaphore(client, name, 1, keep=None)
    kind.RWLock(client, name, keep=None)


def test_an_owner_of_ones_own_is_not_kept(kind, client, name):
    with pytest.raises(ValueError, match="token must be None"):
        kind.Lock(client, name, keep=1).acquire(token="mine")
    with kind.Lock(client, name, keep=1):
        pass


def test_a_function_under_a_kept_lock(kind, client, admin, name):
    if kind.name == "threads":

        @holdfast.locked(client, name + ":{number}", keep=LONG)
        def run(number):
            return number
    else:

        @holdfast.asyncio.locked(client, name + ":{number}", keep=LONG)
        async def work(number):
            return number

        def run(number):
            return kind.run(work(number))

    assert [run(1) for _ in range(5)] == [1] * 5
    assert requests(admin) == {"acquire": 1}


def test_a_session_of_its_own_begins_with_the_first(kind, client, admin, name):
    kept(kind, client, name)
    assert not sessions(admin)
    assert not requests(admin)

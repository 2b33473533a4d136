"""The client in its process: fork, garbage collection, the end of the program, interrupts, gevent."""

import gc
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest

import holdfast
from servers import until, waiters
from test_lock import in_thread
from test_reconnect import sessions


def program(server, source, first="", **kwargs):
    """Runs a program with `client`, in an interpreter of its own; `first` before all imports."""
    head = f"""
        {first}
        import os, signal, sys, threading, time
        import redis, redis.asyncio, holdfast, holdfast.asyncio
        # Whoever runs the tests in the background may have it ignored.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        client = redis.Redis(host="127.0.0.1", port={server.port})
    """
    code = textwrap.dedent(head) + textwrap.dedent(source)
    return subprocess.Popen(
        [sys.executable, "-X", "dev", "-W", "error", "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **kwargs,
    )


def ends(process, seconds=20):
    """Its output; it must end well, in time, and silently."""
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        raise AssertionError(f"it did not end in {seconds} s: {process.communicate()}") from None
    assert process.returncode == 0, err
    assert err == ""
    return out


@pytest.fixture
def admin(own_server):
    client = own_server.client()
    yield client
    client.close()


def test_the_child_of_a_fork_starts_afresh(own_server, admin, name):
    process = program(
        own_server,
        f"""
        lock = holdfast.Lock(client, "{name}", on_lost=lambda lost: print("lost", lost, flush=True))
        lock.acquire()
        parent = os.getpid()
        heard, told = os.pipe()
        if os.fork() == 0:
            assert not lock.owned()
            try:
                lock.release()
            except holdfast.NotHeld:
                print("not the child's", flush=True)
            assert not holdfast.Lock(client, "{name}").acquire(blocking=False)
            with holdfast.Lock(client, "{name}:child") as own:
                assert own.owned()
            os.write(told, b".")
            # It outlives the parent, and does not keep the parent's connection open.
            while os.getppid() == parent:
                time.sleep(0.01)
            os._exit(0)
        os.read(heard, 1)
        # Still watched: the server renews it.
        deadline = client.pexpiretime("{name}")
        while client.pexpiretime("{name}") == deadline:
            time.sleep(0.01)
        lock.check()
        assert lock.owned()
        print("held", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
        """,
    )
    out, err = process.communicate(timeout=20)
    assert (out, err) == ("not the child's\nheld\n", "")
    # Nobody renews it any more.
    until(lambda: not admin.exists(name), "the parent's lease ran out", 5)


def test_the_child_of_a_fork_is_told_of_its_own_losses(own_server, name):
    """Also if its parent was told of one before: the thread that calls is not there any more."""
    source = f"""
        def lose(name):
            told = threading.Event()
            with holdfast.Lock(client, name, on_lost=lambda lost: told.set(), raise_on_release_error=False):
                client.execute_command("LOCK.FORCE", name)
                assert told.wait(10)

        import logging
        logging.disable()
        lose("{name}")
        child = os.fork()
        lose(f"{name}:{{child}}")
        if child != 0:
            assert os.waitpid(child, 0)[1] == 0
            print("both were told")
        """
    assert ends(program(own_server, source), 40) == "both were told\n"


def test_an_ephemeral_lock_ends_with_the_parent_and_not_with_the_child(own_server, admin, name):
    process = program(
        own_server,
        f"""
        lock = holdfast.Lock(client, "{name}", ephemeral=True)
        lock.acquire()
        if os.fork() == 0:
            os._exit(0)
        os.wait()
        lock.check()
        assert lock.owned()
        if os.fork() == 0:
            # As gunicorn's workers: it lives on with all that it inherited.
            os.close(1), os.close(2)
            time.sleep(5)
            os._exit(0)
        print("ready", flush=True)
        sys.stdin.read()
        """,
        stdin=subprocess.PIPE,
    )
    assert process.stdout.readline() == "ready\n"
    assert admin.exists(name)
    process.kill()
    until(lambda: not admin.exists(name), "it ended with the parent", 3)
    process.communicate()


def test_a_fork_while_other_threads_use_locks(patient_server, name):
    """A mutex that one of them has in that moment is never given back in the child."""
    process = program(
        patient_server,
        f"""
        def work(number):
            # Two kinds of alarm: one that waits for a lease, and none.
            lock = holdfast.Lock(client, f"{name}:{{number}}", timeout=600 if number % 2 else None)
            while True:
                with lock:
                    lock.lost

        for number in range(4):
            threading.Thread(target=work, args=(number,), daemon=True).start()
        time.sleep(0.2)
        for _ in range(60):
            child = os.fork()
            if child == 0:
                # A client of its own: redis-py's pool has such a mutex, too.
                with holdfast.Lock(redis.Redis(host="127.0.0.1", port={patient_server.port}), "{name}:child") as lock:
                    lock.check()
                os._exit(0)
            until = time.monotonic() + 30
            while os.waitpid(child, os.WNOHANG) == (0, 0):
                if time.monotonic() > until:
                    os.kill(child, signal.SIGKILL)
                    print("a child hangs", flush=True)
                    os._exit(1)
                time.sleep(0.001)
        print("done", flush=True)
        os._exit(0)
        """,
    )
    assert ends(process, 50) == "done\n"


@pytest.mark.parametrize(
    "several",
    [
        "holdfast.MultiLock([holdfast.Lock(client, '{0}'), holdfast.Lock(client, '{0}:2')], {1})",
        "holdfast.RedLock([client], '{0}', {1})",
    ],
    ids=["MultiLock", "RedLock"],
)
@pytest.mark.parametrize("thread_local", [True, False])
def test_what_is_held_at_several_servers_is_the_parents_too(own_server, admin, name, several, thread_local):
    several = several.format(name, f"thread_local={thread_local}, on_lost=told.append")
    process = program(
        own_server,
        f"""
        told = []
        lock = {several}
        lock.acquire()
        if os.fork() == 0:
            assert lock.fence is None
            assert not lock.owned()
            for use in (lock.check, lock.release):
                try:
                    use()
                except holdfast.LockLost as error:
                    os._exit(1)
                except holdfast.NotHeld:
                    pass
            os._exit(len(told))
        assert os.wait()[1] == 0
        lock.check()
        assert lock.owned()
        lock.release()
        print("done")
        """,
    )
    assert ends(process) == "done\n"


def test_multiprocessing(own_server, admin, name):
    process = program(
        own_server,
        f"""
        import multiprocessing

        def work(number):
            with holdfast.Lock(client, "{name}") as lock:
                return lock.fence

        with holdfast.Lock(client, "{name}:parent"):
            with multiprocessing.get_context("fork").Pool(3) as pool:
                fences = pool.map(work, range(12), chunksize=1)
        assert len(set(fences)) == 12
        print("done")
        """,
    )
    assert ends(process) == "done\n"


def test_asyncio_and_fork(own_server, admin, name):
    process = program(
        own_server,
        f"""
        import asyncio

        async def main():
            client = redis.asyncio.Redis(host="127.0.0.1", port={own_server.port})
            lock = holdfast.asyncio.Lock(client, "{name}")
            await lock.acquire()
            if os.fork() == 0:
                os._exit(lock.fence is not None)
            assert os.wait()[1] == 0
            await asyncio.sleep(3.5)
            lock.check()
            await lock.release()
            await getattr(client, "aclose", client.close)()
            print("done")

        asyncio.run(main(), debug=False)
        """,
    )
    assert ends(process) == "done\n"


@pytest.mark.parametrize(
    "ending",
    ["", "sys.exit()", "waiting()", "raise_in_thread()", "holdfast.Lock(client, 'second').acquire()"],
)
def test_the_end_of_a_program(own_server, admin, name, ending):
    process = program(
        own_server,
        f"""
        lock = holdfast.Lock(client, "{name}", ephemeral=True)
        lock.acquire()

        def waiting():
            threading.Thread(target=holdfast.Lock(client, "{name}").acquire, daemon=True).start()
            while not client.execute_command("LOCK.WAITERS", "{name}"):
                time.sleep(0.01)

        def raise_in_thread():
            def run():
                with holdfast.Lock(client, "other"):
                    pass
            thread = threading.Thread(target=run)
            thread.start()

        {ending}
        """,
    )
    begin = time.monotonic()
    assert ends(process) == ""
    assert time.monotonic() - begin < 10
    until(lambda: not admin.exists(name), "it ended with the program", 2)


def test_who_waits_when_a_program_ends_is_granted_nothing(own_server, admin, name):
    # Its threads have half a second more (what is registered first is called last), and see each connection's end
    # before it is closed.
    process = program(
        own_server,
        f"""
        disconnect = redis.Connection.disconnect
        redis.Connection.disconnect = lambda *args: (time.sleep(0.05), disconnect(*args))
        lock = holdfast.Lock(client, "{name}", ephemeral=True)
        lock.acquire()
        threading.Thread(target=holdfast.Lock(client, "{name}").acquire, daemon=True).start()
        while not client.execute_command("LOCK.WAITERS", "{name}"):
            time.sleep(0.01)
        """,
        first="import atexit, time; atexit.register(time.sleep, 0.5)",
    )
    assert ends(process) == ""
    assert not sessions(admin)
    until(lambda: not admin.exists(name), "its hold ended with it", 2)


def test_the_end_of_a_program_with_a_server_that_is_silent(own_server, name):
    process = program(
        own_server,
        f"""
        lock = holdfast.Lock(client, "{name}")
        lock.acquire()
        print("ready", flush=True)
        sys.stdin.readline()
        """,
        stdin=subprocess.PIPE,
    )
    assert process.stdout.readline() == "ready\n"
    own_server.signal(signal.SIGSTOP)
    try:
        begin = time.monotonic()
        process.communicate("\n", timeout=10)
        assert time.monotonic() - begin < 5
        assert process.returncode == 0
    finally:
        own_server.signal(signal.SIGCONT)


def test_an_interrupt_leaves_nothing_behind(own_server, admin, name):
    with holdfast.Lock(own_server.client(), name):
        process = program(
            own_server,
            f"""
            print("ready", flush=True)
            try:
                holdfast.Lock(client, "{name}").acquire()
            except KeyboardInterrupt:
                print("interrupted", flush=True)
            sys.stdin.readline()
            """,
            stdin=subprocess.PIPE,
        )
        assert process.stdout.readline() == "ready\n"
        until(lambda: waiters(admin, name) == 1, "it waits")
        process.send_signal(signal.SIGINT)
        until(lambda: waiters(admin, name) == 0, "it waits no more")
        assert process.stdout.readline() == "interrupted\n"
        process.communicate("\n", timeout=10)
        assert process.returncode == 0
    assert not admin.exists(name)


def test_event_loops_that_take_turns_have_a_session_each(own_server, admin, name):
    process = program(
        own_server,
        f"""
        import asyncio
        client = redis.asyncio.Redis(host="127.0.0.1", port={own_server.port})
        lock = holdfast.asyncio.Lock(client, "{name}")

        async def pair():
            async with lock:
                pass

        loops = [asyncio.new_event_loop() for _ in range(2)]
        for _ in range(5):
            for loop in loops:
                loop.run_until_complete(pair())
        print("done", flush=True)
        sys.stdin.read()
        for loop in loops:
            loop.run_until_complete(holdfast.asyncio.Session(client).close())
            loop.close()
        """,
        stdin=subprocess.PIPE,
    )
    assert process.stdout.readline() == "done\n"
    assert len(sessions(admin)) == 2
    assert ends(process) == ""
    until(lambda: not sessions(admin), "each was closed in its loop")


def test_of_event_loops_that_are_closed_without_a_word_only_the_last_is_remembered(own_server, name):
    process = program(
        own_server,
        f"""
        import asyncio, gc, warnings
        # Of what was left to the collector.
        warnings.simplefilter("ignore")
        client = redis.asyncio.Redis(host="127.0.0.1", port={own_server.port})

        async def pair():
            async with holdfast.asyncio.Lock(client, "{name}"):
                pass

        for _ in range(5):
            loop = asyncio.new_event_loop()
            loop.run_until_complete(pair())
            loop.close()
        gc.collect()
        print(sum(isinstance(it, asyncio.AbstractEventLoop) for it in gc.get_objects()))
        """,
    )
    assert ends(process) == "1\n"


def test_the_session_ends_with_its_client(own_server, admin, name):
    client = own_server.client()
    lock = holdfast.Lock(client, name, ephemeral=True)
    lock.acquire()
    until(lambda: len(sessions(admin)) == 1, "there is a session")
    threads = threading.active_count()
    del lock, client

    def ended():
        # Pools of redis-py know their connections, and those know them; and the lock is being given back by way of it.
        gc.collect()
        return not sessions(admin)

    until(ended, "the session ended")
    until(lambda: threading.active_count() < threads, "its thread ended")
    until(lambda: not admin.exists(name), "what was ephemeral is free")


def test_one_thread_for_many_locks(own_server, admin, name):
    client = own_server.client()
    locks = [holdfast.Lock(client, f"{name}:{number}") for number in range(50)]
    locks[0].acquire()
    before = threading.active_count()
    for lock in locks[1:]:
        lock.acquire()
    assert threading.active_count() <= before
    for lock in locks:
        lock.release()


def test_re_entrant_for_a_thread(own_server, admin, name):
    lock = holdfast.RLock(own_server.client(), name)
    with lock, lock:
        assert in_thread(lambda: lock.acquire(blocking=False))() is False
        lock.acquire()
        lock.release()
        assert lock.owned()
    assert not admin.exists(name)
    with pytest.raises(holdfast.NotHeld):
        lock.release()
    with pytest.raises(holdfast.LockLost), lock:
        admin.execute_command("LOCK.FORCE", name)
        until(lambda: lock.lost.is_set(), "the loss is told")
        with lock:
            lock.check()
            assert lock.owned()
        with pytest.raises(holdfast.LockLost):
            lock.check()


def test_a_re_entrant_lock_can_be_taken_again_after_a_loss(own_server, admin, name):
    lock = holdfast.RLock(own_server.client(), name)
    for _ in range(3):
        lock.acquire()
        lock.acquire()
        admin.execute_command("LOCK.FORCE", name)
        until(lambda: lock.lost.is_set(), "the loss is told")
        with pytest.raises(holdfast.LockLost):
            lock.check()
    assert lock.acquire()
    lock.check()
    lock.release()
    assert not admin.exists(name)
    # Whoever did not give back what was lost is told so.
    with pytest.raises(holdfast.LockLost):
        for _ in range(6):
            lock.release()
    with pytest.raises(holdfast.NotHeld):
        lock.release()


def test_what_a_thread_holds_is_its_own_unless_told_otherwise(own_server, name):
    client = own_server.client()
    lock = holdfast.Lock(client, name)
    lock.acquire()
    with pytest.raises(holdfast.NotHeld):
        in_thread(lock.release)()
    lock.release()
    shared = holdfast.Lock(client, name, thread_local=False)
    in_thread(shared.acquire)()
    shared.release()


def test_a_locked_function(own_server, admin, name):
    client = own_server.client()

    @holdfast.locked(client, name + ":{order_id}:{more[0]}", timeout=5)
    def work(order_id, *, more=("x",), **rest):
        """Works."""
        return admin.exists(f"{name}:{order_id}:{more[0]}")

    assert work(5) == 1
    assert work(order_id=6, more="y") == 1
    assert not admin.keys(f"{name}*")
    assert work.__name__ == "work"
    assert work.__doc__ == "Works."


def test_closing_the_client_does_not_end_its_locks(own_server, admin, name):
    client = own_server.client()
    lock = holdfast.Lock(client, name)
    lock.acquire()
    client.close()
    lock.check()
    assert lock.owned()
    lock.release()


def test_gevent(own_server, admin, name):
    pytest.importorskip("gevent")
    process = program(
        own_server,
        f"""
        import subprocess
        code = '''
        from gevent import monkey; monkey.patch_all()
        import gevent, redis, holdfast, time
        client = redis.Redis(host="127.0.0.1", port={own_server.port})
        order, ticks = [], []

        def work(number):
            with holdfast.Lock(client, "{name}") as lock:
                order.append(number)
                gevent.sleep(0.01)
                lock.check()

        def tick():
            while True:
                ticks.append(1)
                gevent.sleep(0.01)

        holder = holdfast.Lock(client, "{name}")
        holder.acquire()
        ticker = gevent.spawn(tick)
        greenlets = [gevent.spawn(work, number) for number in range(20)]
        # Longer than the lease: a greenlet that computes starves no watchdog here.
        until = time.monotonic() + 3.5
        gevent.sleep(0.5)
        while time.monotonic() < until:
            pass
        holder.check()
        assert holder.owned()
        before = len(ticks)
        holder.release()
        gevent.joinall(greenlets, timeout=20, raise_error=True)
        assert sorted(order) == list(range(20))
        assert len(ticks) > before, "the loop stood still"
        print("done")
        '''
        import textwrap
        print(subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=30))
        """,
    )
    out = ends(process, 40)
    assert "stdout='done\\n'" in out, out

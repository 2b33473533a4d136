"""A process, or its machine, that stood still: what it believes of its locks afterwards is true."""

import asyncio
import contextlib
import signal
import subprocess
import sys
import time

import pytest
import redis
from test_process import program

import holdfast
import holdfast.asyncio
from servers import Server, holder, until


def starts(server, name, **settings):
    """A process that looks at its lock all the time. At its loss it prints until when it believed to hold it."""
    process = program(
        server,
        f"""
        lock = holdfast.Lock(client, "{name}")
        lock.acquire()
        lock.check()
        print("ready", flush=True)
        sys.stdin.readline()
        print("goes on", flush=True)
        last = 0
        try:
            while True:
                before = time.time()
                lock.check()
                last = before
        except holdfast.LockLost as lost:
            print(last, lost.reason, flush=True)
        os._exit(0)
        """,
        stdin=subprocess.PIPE,
    )
    assert process.stdout.readline() == "ready\n"
    return process


def test_whoever_was_frozen_does_not_believe_to_hold_what_another_one_has(name):
    server = Server(("holdfast.default-lease", "1500"))
    try:
        admin = server.client()
        for round_ in range(5):
            key = f"{name}:{round_}"
            process = starts(server, key)
            process.stdin.write("\n")
            process.stdin.flush()
            assert process.stdout.readline() == "goes on\n"
            process.send_signal(signal.SIGSTOP)
            # Nobody renews what belongs to a process that reads nothing.
            until(lambda k=key: admin.execute_command("LOCK.ACQUIRE", k, "other", "LEASE", 60000), "it ran out")
            taken = time.time()
            process.send_signal(signal.SIGCONT)
            last, _ = process.communicate(timeout=20)[0].split()
            assert float(last) < taken
    finally:
        server.close()


def test_whoever_was_frozen_for_less_than_the_lease_asks_and_holds(name):
    server = Server(("holdfast.default-lease", "12000"))
    try:
        process = program(
            server,
            f"""
            lock = holdfast.Lock(client, "{name}", on_lost=lambda lost: print(lost, flush=True))
            lock.acquire()
            # The server renews it every four seconds.
            time.sleep(5)
            print("ready", flush=True)
            sys.stdin.readline()
            lock.check()
            lock.release()
            print("held", flush=True)
            """,
            stdin=subprocess.PIPE,
        )
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGSTOP)
        # For a lease it is certain; after that the server knows.
        time.sleep(12.8)
        process.send_signal(signal.SIGCONT)
        assert process.communicate("\n", timeout=20) == ("held\n", "")
    finally:
        server.close()


async def test_with_asyncio_whoever_was_frozen_does_not_hold_until_the_server_has_said_so(name):
    server = Server(("holdfast.default-lease", "12000"))
    try:
        client = redis.asyncio.Redis(port=server.port)
        lock = holdfast.asyncio.Lock(client, name)
        await lock.acquire()
        # The server renews it every four seconds. Then the loop stands still for longer than the lease.
        await asyncio.sleep(5)
        time.sleep(12.8)
        with pytest.raises(holdfast.LockLost, match="in doubt"):
            lock.check()
        assert holder(server.client(), name)
        for _ in range(1000):
            await asyncio.sleep(0.01)
            with contextlib.suppress(holdfast.LockLost):
                lock.check()
                break
        lock.check()
        await lock.release()
        await holdfast.asyncio.Session(client).close()
        await getattr(client, "aclose", client.close)()
    finally:
        server.close()


@pytest.mark.skipif(sys.platform not in ("linux", "darwin"), reason="there Python's own clock goes on")
def test_a_lease_runs_on_while_the_machine_sleeps(kind, client, name, monkeypatch):
    told = []
    lock = kind.Lock(client, name, timeout=60, on_lost=told.append)
    lock.acquire()
    lock.check()
    clock = time.clock_gettime
    # As after an hour in which nothing ran: only this clock knows.
    monkeypatch.setattr(time, "clock_gettime", lambda which: clock(which) + 3600)
    with pytest.raises(holdfast.LockLost, match="expired"):
        lock.check()
    until(lambda: told, "it is told")


@pytest.mark.skipif(sys.platform not in ("linux", "darwin"), reason="there Python's own clock goes on")
def test_what_ran_out_while_the_machine_slept_is_told_without_being_asked(kind, client, name, monkeypatch):
    told = []
    lock = kind.Lock(client, name, timeout=60, on_lost=told.append)
    lock.acquire()
    clock = time.clock_gettime
    monkeypatch.setattr(time, "clock_gettime", lambda which: clock(which) + 3600)
    until(lambda: told, "it is told")
    assert told[0].reason == "expired"

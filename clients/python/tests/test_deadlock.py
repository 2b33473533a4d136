"""Two who take two locks in opposite order: one of them is told, with who waits for whom, and the other one goes on."""

import asyncio
import os
import re
import socket
import subprocess

import pytest
import redis.asyncio
from test_process import ends, program

import holdfast
import holdfast.asyncio
from kinds import closed
from servers import HOST, holder, until, waiters
from test_lock import in_thread


@pytest.fixture
def pair(name):
    return f"{name}:1", f"{name}:2"


def owners(admin, pair):
    """Who holds them, as people read it."""
    return [holder(admin, lock)[b"owner"].decode() for lock in pair]


def names_the_cycle(error, pair, owners):
    """Whether it says of each which lock he waits for, and who has that. Each acquisition has a number of its own."""
    actors = [re.escape(owner.partition("##")[0]) for owner in owners]
    return all(
        re.search(rf"owner '{waits}##\d+' waits for '{lock}' held by '{has}##\d+'", str(error))
        for waits, lock, has in zip(reversed(actors), pair, actors)
    )


def test_two_threads(server, admin, pair):
    client, held, told = server.client(), [], []

    def work(first, second):
        try:
            with holdfast.Lock(client, first):
                held.append(first)
                until(lambda: len(held) == 3, "both have one, and it is known who")
                with holdfast.Lock(client, second):
                    pass
        except holdfast.Deadlock as error:
            told.append(error)

    joins = [in_thread(lambda locks=locks: work(*locks)) for locks in (pair, pair[::-1])]
    until(lambda: len(held) == 2, "both have one")
    who = owners(admin, pair)
    held.append(None)
    for join in joins:
        join()
    assert len(told) == 1
    assert names_the_cycle(told[0], pair, who), str(told[0])
    assert all(owner.startswith(f"{socket.gethostname()}:{os.getpid()}:") for owner in who)
    assert not admin.exists(*pair)
    assert waiters(admin, pair[0]) == waiters(admin, pair[1]) == 0


async def test_two_tasks(server, admin, pair):
    client, go_on, begun = redis.asyncio.Redis(host=HOST, port=server.port), asyncio.Event(), asyncio.Queue()

    async def work(first, second):
        async with holdfast.asyncio.Lock(client, first):
            begun.put_nowait(first)
            await go_on.wait()
            async with holdfast.asyncio.Lock(client, second):
                pass

    try:
        tasks = [asyncio.create_task(work(*locks)) for locks in (pair, pair[::-1])]
        for _ in tasks:
            await asyncio.wait_for(begun.get(), 10)
        who = owners(admin, pair)
        go_on.set()
        told = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 20)
        assert sorted(map(type, told), key=str) == [type(None), holdfast.Deadlock]
        assert names_the_cycle(next(filter(None, told)), pair, who), list(map(str, told))
        assert not admin.exists(*pair)
    finally:
        await closed(client)


def test_two_processes(server, admin, pair):
    source = """
        with holdfast.Lock(client, {0!r}):
            print("has one", flush=True)
            sys.stdin.readline()
            try:
                with holdfast.Lock(client, {1!r}):
                    print("has both")
            except holdfast.Deadlock as error:
                print(error)
        """
    programs = [program(server, source.format(*locks), stdin=subprocess.PIPE) for locks in (pair, pair[::-1])]
    assert [one.stdout.readline() for one in programs] == ["has one\n"] * 2
    who = owners(admin, pair)
    for one in programs:
        one.stdin.write("\n")
        one.stdin.flush()
    said = [ends(one) for one in programs]
    assert sum(one == "has both\n" for one in said) == 1, said
    assert sum(names_the_cycle(one, pair, who) for one in said) == 1, said
    assert [int(owner.split(":")[1]) for owner in who] == [one.pid for one in programs]
    assert not admin.exists(*pair)

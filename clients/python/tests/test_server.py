"""The client at real servers, in both flavours."""

import asyncio
import gc
import itertools
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import redis
import redis.asyncio

import holdfast
import holdfast.asyncio
from holdfast import LossReason
from holdfast import _io as io
from holdfast import _rules as rules
from kinds import closed
from servers import HOST, Cluster, Server, renewed, until

TESTS = Path(__file__).parent


def test_lock_excludes_others(client, admin, name):
    lock = client.lock(name)
    with lock as hold:
        assert hold.is_held()
        hold.check()
        assert lock.try_acquire() is None
        with pytest.raises(holdfast.NotAcquiredError):
            lock.acquire(0.05)
        [holder] = client.info(name)["holders"]
        assert holder["owner"] == hold.owner
        assert holder["token"] == hold.fence
    assert admin.exists(name) == 0
    assert client.info(name) is None


def test_fences_grow(client, name):
    fences = []
    for _ in range(5):
        with client.lock(name) as hold:
            fences.append(hold.fence)
    assert fences == sorted(set(fences))


def test_waiters_are_served_in_order(client, kind, server, name):
    hold = client.lock(name).acquire()
    served = []

    def wait(number):
        with kind.open(kind.redis(server.port)).lock(name).acquire(45):
            served.append(number)

    threads = []
    for number in range(3):
        threads.append(threading.Thread(target=wait, args=(number,)))
        threads[-1].start()
        until(lambda number=number: len(client.waiters(name)) == number + 1, "it waits")
    hold.release()
    for thread in threads:
        thread.join()
    assert served == [0, 1, 2]


def test_many_waiters_of_one_client_need_few_connections(client, admin, name):
    before = len(admin.client_list())
    counter = [0]

    def work():
        for _ in range(5):
            with client.lock(name) as hold:
                seen = counter[0]
                hold.is_held()
                counter[0] = seen + 1

    threads = [threading.Thread(target=work) for _ in range(40)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counter == [200]
    assert len(admin.client_list()) - before <= 32


def test_pool_used_up_by_waiters_still_serves_a_holder(kind, server, client, name, monkeypatch):
    monkeypatch.setattr(rules, "POLL_EVERY", 0.1)
    few = kind.open(kind.redis(server.port), max_connections=4)
    blocker = client.lock(f"{name}:second").acquire()
    hold = few.lock(name).acquire()
    got = []

    def wait(number):
        with few.lock(name, shared=True).acquire(45):
            got.append(number)

    threads = [threading.Thread(target=wait, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    until(lambda: len(client.waiters(name)) >= 2, "they wait")
    with few.lock(f"{name}:free").acquire(45):
        pass
    threading.Timer(0.3, blocker.release).start()
    with few.lock(f"{name}:second").acquire(45):
        pass
    hold.release()
    for thread in threads:
        thread.join()
    assert sorted(got) == list(range(6))


def _left(client, name):
    """What is left of the lease according to the server, in ms."""
    return client.info(name)["holders"][0]["ttl"]


def test_renewals_lengthen_the_lease_at_the_server(client, name, quick):
    with client.lock(name, lease=60) as hold:
        for _ in range(3):
            least = until(lambda: (left := _left(client, name)) < 59_950 and left, "time goes on")
            until(lambda least=least: _left(client, name) > least, "it is renewed")
        assert hold.is_held()
        hold.check()


def test_forced_lock_is_lost(client, name, quick):
    hold = client.lock(name, lease=60).acquire()
    assert client.force(name) == 1
    assert hold.lost.wait(30)
    with pytest.raises(holdfast.LockLostError) as lost:
        hold.release()
    assert lost.value.reason is LossReason.GONE
    assert isinstance(lost.value, redis.exceptions.LockNotOwnedError)


def test_check_sees_a_loss_at_once(client, admin, name):
    hold = client.lock(name).acquire()
    admin.delete(name)
    with pytest.raises(holdfast.LockLostError):
        hold.check()
    assert hold.lost.is_set()


def test_several_names_are_all_or_none(client, admin, name):
    names = [f"{name}:{number}" for number in range(3)]
    with client.lock(names[1]):
        assert client.lock(names).try_acquire() is None
        assert admin.exists(names[0]) == 0
    with client.lock(names) as hold:
        assert all(client.lock(one).try_acquire() is None for one in names)
        hold.check()
        hold.renew()
    assert admin.exists(*names) == 0


def test_readers_share_and_a_writer_does_not(client, name):
    both = client.read_write_lock(name)
    with both.read, both.read:
        assert both.write.try_acquire() is None
    with both.write:
        assert both.read.try_acquire() is None


def test_semaphore_has_a_limit(client, name):
    permits = [client.semaphore(name, 2).acquire() for _ in range(2)]
    assert client.semaphore(name, 2).try_acquire() is None
    permits.pop().release()
    assert client.semaphore(name, 2).try_acquire() is not None


async def test_reentrant_lock_belongs_to_a_task(server, name):
    client = redis.asyncio.Redis(port=server.port)
    async with holdfast.asyncio.Holdfast(client) as opened:
        lock = opened.reentrant_lock(name)
        async with lock as outer, lock as inner:
            assert inner is outer
            assert (await opened.info(name))["holders"][0]["holds"] == 1
            assert await asyncio.create_task(lock.try_acquire()) is None
        assert await opened.info(name) is None
    await closed(client)


def test_reentrant_lock_belongs_to_a_thread(server, name):
    with holdfast.Holdfast(server.client()) as opened:
        lock = opened.reentrant_lock(name)
        with lock as outer, lock as inner:
            assert inner is outer
            assert opened.info(name)["holders"][0]["holds"] == 1
            seen = []
            thread = threading.Thread(target=lambda: seen.append(lock.try_acquire()))
            thread.start()
            thread.join()
            assert seen == [None]
        assert opened.info(name) is None
        with pytest.raises(holdfast.NotHeldError):
            lock.release()


def test_one_of_two_threads_that_wait_for_each_other_gets_a_deadlock_error(server, name):
    opened = holdfast.Holdfast(server.client())
    a, b = opened.reentrant_lock(f"{name}:a"), opened.reentrant_lock(f"{name}:b")
    errors, ready = [], threading.Barrier(2)

    def work(first, second):
        with first:
            ready.wait()
            try:
                with second:
                    pass
            except holdfast.DeadlockError as error:
                errors.append(error)

    threads = [threading.Thread(target=work, args=pair) for pair in ((a, b), (b, a))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(errors) == 1
    opened.close()


def test_ephemeral_lock_ends_with_its_connection(client, admin, name, quick):
    hold = client.lock(name, ephemeral=True, lease=60).acquire()
    [holder] = client.info(name)["holders"]
    admin.client_kill_filter(_id=holder["client"])
    until(lambda: admin.exists(name) == 0, "the server releases it")
    assert hold.lost.wait(30)


def test_ephemeral_lock_with_a_long_lease_stays_when_the_server_closes_idle_connections(kind, own_server):
    with own_server.client() as admin, own_server.client() as idle:
        # With the 3 s that the specification allows, a pause of this process of a second could end it.
        admin.config_set("timeout", 5)
        hold = kind.open(kind.redis(own_server.port)).lock("k", ephemeral=True, lease=60).acquire()
        idle_id = idle.client_id()
        until(lambda: idle_id not in [int(one["id"]) for one in admin.client_list()], "the server closes it")
        assert admin.exists("k") == 1
        assert hold.is_held()


def test_ephemeral_connections_are_used_again(client, name):
    used = set()
    for _ in range(20):
        hold = client.lock(name, ephemeral=True).acquire()
        used.add(client.info(name)["holders"][0]["client"])
        hold.release()
    assert len(used) <= 3


def test_leader_is_elected_and_hands_over(kind, client, server, name):
    first, second = client, kind.open(kind.redis(server.port))
    log = []
    a = first.elect(name, lambda hold: log.append(("a", hold.fence)), value="node#a%")
    until(lambda: log, "the first leads")
    b = second.elect(name, lambda hold: log.append(("b", hold.fence)), value="node:b")
    leader = client.leader(name)
    assert (leader.value, leader.fence) == ("node#a%", log[0][1])
    assert a.is_leader
    assert not b.is_leader
    until(lambda: client.waiters(name), "the second waits")
    a.close()
    until(lambda: len(log) == 2, "the second leads")
    assert client.leader(name).value == "node:b"
    assert log[1][1] > log[0][1]
    b.close()
    until(lambda: client.leader(name) is None, "nobody leads")


def test_leader_is_notified_when_its_lock_is_forced(client, name, quick):
    lost = []
    election = client.elect(name, lambda _: None, lost.append, lease=60)
    until(lambda: client.leader(name), "it leads")
    client.force(name)
    until(lambda: lost, "the callback is called")
    assert lost == [LossReason.GONE]
    until(lambda: election.is_leader, "it leads again")
    election.close()


def test_ephemeral_leader_is_replaced_when_its_connection_ends(kind, client, server, admin, name, quick):
    other, log = kind.open(kind.redis(server.port)), []
    # The lease is longer than the test: only the end of the connection ends the term.
    first = client.elect(name, lambda _: log.append("first"), ephemeral=True, lease=60)
    until(lambda: log == ["first"], "the first leads")
    second = other.elect(name, lambda _: log.append("second"), ephemeral=True)
    until(lambda: client.waiters(name), "the second waits")
    [holder] = client.info(name)["holders"]
    admin.client_kill_filter(_id=holder["client"])
    until(lambda: log == ["first", "second"], "the second leads")
    second.close()
    until(lambda: log == ["first", "second", "first"], "the first leads again")
    first.close()
    until(lambda: client.leader(name) is None, "nobody leads")


def test_leader_with_replicas_is_known_to_the_replica_and_nobody_is_elected_without_it(kind, own_server, name):
    replica = Server(("replicaof", f"{HOST} {own_server.port}"))
    try:
        with own_server.client() as admin, replica.client() as there:
            until(lambda: admin.info("replication").get("slave0", {}).get("state") == "online", "it follows")
            client, log = kind.open(kind.redis(own_server.port)), []
            first = client.elect(name, lambda hold: log.append(hold.fence), replicas=1, lease=60)
            until(lambda: log, "it leads")
            assert int(there.hget(name, "#fence")) == log[0]
            first.close()
            replica.kill()

            def asked():
                return admin.info("commandstats")["cmdstat_lock.acquire"]["calls"]

            before = asked()
            second = client.elect(name, lambda hold: log.append(hold.fence), replicas=1, lease=60)
            until(lambda: asked() >= before + 2, "it was refused, and has asked again", 60)
            assert len(log) == 1
            assert not second.is_leader
            second.close()
    finally:
        replica.close()


def test_observe_yields_each_change(server, name):
    with holdfast.Holdfast(server.client()) as opened:
        changes = opened.observe(name, every=0.02)
        assert next(changes) is None
        election = opened.elect(name, lambda _: None, value="x")
        assert next(changes).value == "x"
        election.close()
        assert next(changes) is None


async def test_closed_connection_is_disconnected_when_all_tasks_are_cancelled(server, end_tasks):
    client = redis.asyncio.Redis(host=HOST, port=server.port)
    line = await io.Tasks().open(io.Source(client), None)
    assert line.raw.is_connected
    line.close()
    # asyncio.run does so at its end, before any of them has started.
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        task.cancel()
    await asyncio.sleep(0)
    assert not line.raw.is_connected
    await closed(client)


async def test_asyncio_observe_yields_each_change(server, name):
    async with holdfast.asyncio.Holdfast(redis.asyncio.Redis(port=server.port)) as opened:
        changes = opened.observe(name, every=0.02)
        assert await anext(changes) is None
        election = opened.elect(name, lambda _: None, value="x")
        assert (await anext(changes)).value == "x"
        await election.close()
        assert await anext(changes) is None


def test_close_releases_holds_and_notifies_their_holders(kind, server, admin, name):
    opened = kind.open(kind.redis(server.port))
    hold = opened.lock(name).acquire()
    opened.close()
    assert admin.exists(name) == 0
    assert hold.lost.is_set()
    with pytest.raises(holdfast.LockLostError) as lost:
        hold.release()
    assert lost.value.reason is LossReason.CLOSED
    with pytest.raises(holdfast.HoldfastError, match="closed"):
        opened.lock(name).acquire(45)


def test_close_ends_waits(kind, client, server, name):
    client.lock(name).acquire()
    opened = kind.open(kind.redis(server.port))
    raised = []

    def wait():
        try:
            opened.lock(name).acquire(45)
        except Exception as error:
            raised.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    until(lambda: client.waiters(name), "it waits")
    opened.close()
    thread.join(60)
    assert len(raised) == 1
    until(lambda: not client.waiters(name), "it waits no more")


def test_released_hold_is_neither_renewed_nor_checked(client, name):
    hold = client.lock(name, lease=60).acquire()
    hold.release()
    for call in (hold.renew, hold.check):
        with pytest.raises(holdfast.NotHeldError, match="was released"):
            call()
    hold.release()


def test_dropped_hold_is_not_released(client, name, caplog, quick):
    hold = client.lock(name, lease=60).acquire()
    owner = hold.owner
    del hold
    gc.collect()
    least = until(lambda: (left := _left(client, name)) < 59_950 and left, "time goes on")
    until(lambda: _left(client, name) > least, "it is still renewed")
    assert client.info(name)["holders"][0]["owner"] == owner
    until(lambda: "dropped without a release" in caplog.text, "it is logged")


def test_paused_server_keeps_every_lock(kind, own_server, quick, impatient):
    opened = kind.open(kind.redis(own_server.port))
    holds = [opened.lock(f"k{number}", lease=60).acquire() for number in range(20)]
    own_server.signal(signal.SIGSTOP)
    until(lambda: any(hold._grant.broke for hold in holds), "a renewal had no reply")
    own_server.signal(signal.SIGCONT)
    renewed(*holds)
    for hold in holds:
        hold.check()
        hold.release()


def test_restarted_server_loses_locks_and_is_used_again(kind, own_server, quick):
    opened = kind.open(kind.redis(own_server.port))
    hold = opened.lock("k", lease=60).acquire()
    own_server.kill()
    own_server.start()
    assert hold.lost.wait(30)
    with opened.lock("k").acquire(45):
        pass


def test_wait_survives_a_restart(kind, own_server):
    opened = kind.open(kind.redis(own_server.port))
    other = kind.open(kind.redis(own_server.port))
    other.lock("k", lease=120, renew=False).acquire()
    got = []
    thread = threading.Thread(target=lambda: got.append(opened.lock("k").acquire(45)))
    thread.start()
    until(lambda: other.waiters("k"), "it waits")
    own_server.kill()
    time.sleep(0.3)
    own_server.start()
    thread.join(60)
    assert got[0].is_held()


def test_unreachable_server_raises_in_time(kind, fake):
    fake.close()
    opened = kind.open(kind.redis(fake.port))
    with pytest.raises(redis.ConnectionError):
        opened.lock("k").try_acquire()
    began = time.monotonic()
    with pytest.raises(holdfast.NotAcquiredError) as raised:
        opened.lock("k").acquire(0.5)
    assert isinstance(raised.value.__cause__, redis.ConnectionError)
    assert time.monotonic() - began < 10


def test_lock_works_over_a_unix_socket(kind, name):
    server = Server(("unixsocket", "redis.sock"))
    try:
        with kind.open(kind.unix(f"{server.directory}/redis.sock")).lock(name) as hold:
            hold.check()
    finally:
        server.close()


def test_acl_user_needs_only_the_commands(kind, server, admin, name, quick):
    admin.acl_setuser(
        "locker", enabled=True, passwords=["+secret"], keys=["lock:*"],
        commands=["-@all", "+lock.acquire", "+lock.renew", "+lock.release", "+lock.version", "+lock.info"],
    )  # fmt: skip
    opened = kind.open(kind.redis(server.port, username="locker", password="secret"))
    with opened.lock(name, lease=60) as hold:
        renewed(hold)
        hold.check()
    with pytest.raises(redis.exceptions.NoPermissionError):
        opened.lock("elsewhere").acquire(45)
    with pytest.raises(redis.exceptions.AuthenticationError):
        kind.open(kind.redis(server.port, username="locker", password="wrong")).lock(name).acquire(45)


def test_lock_is_in_the_database_of_the_application(kind, server, name):
    with kind.open(kind.redis(server.port, db=3, decode_responses=True)).lock(name):
        assert server.client(db=3).exists(name) == 1
        assert server.client(db=0).exists(name) == 0


def test_lock_works_over_tls(kind, tmp_path, name, quick):
    certificate, key = tmp_path / "cert", tmp_path / "key"
    made = subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", key, "-out", certificate, "-days", "2",
         "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"],
        capture_output=True, check=False,
    )  # fmt: skip
    assert made.returncode == 0, made.stderr
    server = Server(
        ("tls-cert-file", str(certificate)),
        ("tls-key-file", str(key)),
        ("tls-ca-cert-file", str(certificate)),
        ("tls-auth-clients", "no"),
    )
    try:
        import socket

        with socket.create_server((HOST, 0)) as free:
            port = free.getsockname()[1]
        server.client().config_set("tls-port", port)
        opened = kind.open(kind.redis(port, ssl=True, ssl_ca_certs=str(certificate)))
        with opened.lock(name, lease=60) as hold:
            renewed(hold)
            hold.check()
    finally:
        server.close()


def test_cluster_serves_locks_on_all_nodes(kind, cluster, name, quick):
    opened = kind.open(kind.cluster(cluster.nodes[0].port))
    holds = [opened.lock(f"{name}:{number}", lease=60).acquire(45) for number in range(10)]
    assert len({cluster.owner(f"{name}:{number}") for number in range(10)}) == 2
    renewed(*holds)
    for hold in holds:
        hold.check()
        hold.release()
    with opened.lock([f"{{{name}}}:a", f"{{{name}}}:b"]) as hold:
        hold.check()


def test_cluster_lock_follows_its_slot(kind, cluster, name, quick):
    opened = kind.open(kind.cluster(cluster.nodes[0].port))
    key = f"moving:{name}"
    slot, owner = cluster.slot(key), cluster.owner(key)
    source, target = cluster.masters[owner], cluster.masters[1 - owner]
    hold = opened.lock(key, lease=60).acquire(45)
    waits = []
    thread = threading.Thread(target=lambda: waits.append(opened.lock(key).acquire(45)))
    thread.start()
    until(lambda: opened.waiters(key), "it waits")
    cluster.begin_move(slot, source, target)
    cluster.finish_move(slot, source, target)
    try:
        renewed(hold)
        hold.check()
        hold.release()
        thread.join(60)
        assert waits[0].is_held()
        waits[0].release()
    finally:
        cluster.begin_move(slot, target, source)
        cluster.finish_move(slot, target, source)


def test_hold_in_a_slot_that_is_moving_is_renewed_and_released(kind, cluster, name, quick):
    opened = kind.open(kind.cluster(cluster.nodes[0].port))
    key = f"{name}:{kind.name}"
    slot, owner = cluster.slot(key), cluster.owner(key)
    source, target = cluster.masters[owner], cluster.masters[1 - owner]
    hold = opened.lock(key, lease=60).acquire()
    waiting = opened.lock(key, lease=60)
    cluster.begin_move(slot, source, target)
    try:
        source.client().execute_command("MIGRATE", HOST, target.port, key, 0, 5000)
        renewed(hold)
        hold.renew()
        hold.check()
        assert waiting.try_acquire() is None
        hold.release()
    finally:
        cluster.finish_move(slot, source, target)
        cluster.begin_move(slot, target, source)
        cluster.finish_move(slot, target, source)


def test_hold_is_renewed_at_the_new_primary_when_the_program_sends_nothing_else(kind, quick):
    cluster = Cluster(replicas=True)
    try:
        opened = kind.open(kind.cluster(cluster.nodes[0].port))
        # It is served by the only node that was configured.
        owner = 0
        name = next(name for name in map("lock:{}".format, itertools.count()) if cluster.owner(name) == owner)
        hold = opened.lock(name, lease=60).acquire(30)
        replica = cluster.nodes[len(cluster.masters) + owner].client()
        until(lambda: replica.info("keyspace"), "the replica has it")
        cluster.masters[owner].kill()
        replica.execute_command("CLUSTER", "FAILOVER", "TAKEOVER")
        renewed(hold)
        assert hold.is_held()
    finally:
        cluster.close()


def test_hold_follows_the_primary_that_sentinel_names(kind, sentinels):
    opened = kind.open(kind.sentinel(sentinels.sentinel.port, sentinels.NAME))
    hold = opened.lock("k", lease=60).acquire(45)
    until(lambda: sentinels.replica.client().exists("k"), "the replica has it")
    sentinels.kill_master()
    with opened.lock("j").acquire(45):
        pass
    hold.check()
    hold.release()


def test_run_fails_when_the_module_reports_an_internal_error():
    server = Server()
    with open(Path(server.directory, "log"), "a") as log:
        log.write("# holdfast: internal error: a waiter has no lane. Please report it.\n")
    with pytest.raises(AssertionError, match="a waiter has no lane"):
        server.close()


# Processes


def _program(port, text, before=""):
    header = (
        f"{before}\n"
        "import sys, os, time, asyncio\n"
        f"sys.path.insert(0, {str(TESTS)!r})\n"
        "import redis, redis.asyncio, holdfast, holdfast.asyncio\n"
        # As the fixtures `quick` and `_patient` set them.
        "rules = holdfast._rules\n"
        "rules.RENEW_AT, rules.LEAST_SILENCE, rules.LONGEST_SILENCE, rules.WAIT_SILENCE = 0.0025, 20, 20, 20\n"
        "holdfast.EXIT_TIME = holdfast.asyncio.EXIT_TIME = holdfast._engine.EXIT_TIME = 20\n"
        "def renewed(hold):\n"
        "    for _ in range(2):\n"
        "        before = hold._grant.certain\n"
        "        while hold._grant.certain <= before: time.sleep(0.005)\n"
        f"port = {port}\n"
    )
    return subprocess.run(
        [sys.executable, "-c", header + text], timeout=90, capture_output=True, text=True, check=False
    )


def _succeeds(*program, **more):
    done = _program(*program, **more)
    assert done.returncode == 0, done.stderr


THREADS = """
opened = holdfast.Holdfast(redis.Redis(port=port))
hold = opened.lock("exit").acquire()
print("held", flush=True)
"""
TASKS = """
async def main():
    global opened, hold
    opened = holdfast.asyncio.Holdfast(redis.asyncio.Redis(port=port))
    hold = await opened.lock("exit").acquire()
    print("held", flush=True)
asyncio.run(main())
"""
LOOP = TASKS.replace("asyncio.run(main())", "loop = asyncio.new_event_loop(); loop.run_until_complete(main())")


@pytest.mark.parametrize("text", [THREADS, TASKS, LOOP], ids=["threads", "asyncio.run", "loop"])
@pytest.mark.parametrize("end", ["", "sys.exit(3)", "raise RuntimeError('boom')"], ids=["end", "exit", "error"])
def test_normal_exit_releases(own_server, text, end):
    found = _program(own_server.port, text + end)
    assert "held" in found.stdout, found.stderr
    assert own_server.client().exists("exit") == 0, found.stderr


def test_normal_exit_releases_at_the_primary_that_sentinels_named(sentinels):
    client = f"redis.asyncio.sentinel.Sentinel([('localhost', port)], socket_timeout=1).master_for({sentinels.NAME!r})"
    program = "import redis.asyncio.sentinel\n" + LOOP.replace("redis.asyncio.Redis(port=port)", client)
    found = _program(sentinels.sentinel.port, program)
    assert "held" in found.stdout, found.stderr
    assert sentinels.master.client().exists("exit") == 0, found.stderr


def test_killed_process_blocks_others_for_its_lease_only(own_server, kind):
    _program(own_server.port, THREADS.replace('"exit"', '"exit", lease=1') + "os.kill(os.getpid(), 9)")
    with kind.open(kind.redis(own_server.port)).lock("exit").acquire(45):
        pass


def test_forked_child_holds_nothing(own_server):
    _succeeds(
        own_server.port,
        """
opened = holdfast.Holdfast(redis.Redis(port=port))
hold = opened.lock("k", lease=60).acquire()
child = os.fork()
if child == 0:
    assert not hold.is_held()
    try:
        hold.release()
        os._exit(1)
    except holdfast.LockLostError as lost:
        assert lost.reason is holdfast.LossReason.FORKED
    assert opened.lock("k").try_acquire() is None
    with opened.lock("j"):
        pass
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
renewed(hold)
hold.check()
assert hold.is_held()
hold.release()
""",
    )


def test_forked_child_does_not_hold_the_reentrant_lock_of_its_parent(own_server):
    _succeeds(
        own_server.port,
        """
lock = holdfast.Holdfast(redis.Redis(port=port)).reentrant_lock("k", lease=60)
lock.acquire()
child = os.fork()
if child == 0:
    assert lock.try_acquire() is None
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
lock.release()
""",
    )


def test_forked_child_does_not_own_the_redis_py_lock_of_its_parent(own_server):
    _succeeds(
        own_server.port,
        """
from holdfast.redis_py import lock_class
client = redis.Redis(port=port)
lock = client.lock("k", lock_class=lock_class(holdfast.Holdfast(client)))
lock.acquire()
child = os.fork()
if child == 0:
    os._exit(lock.owned())
assert os.waitpid(child, 0)[1] == 0
assert lock.owned()
lock.release()
""",
    )


def test_forked_child_shares_no_connection_with_its_parent(own_server):
    _succeeds(
        own_server.port,
        """
import threading
opened = holdfast.Holdfast(redis.Redis(port=port))
opened.lock("k").acquire().release()
parents = opened._engine.router
urandom = os.urandom
child = os.fork()
if child == 0:
    is_asked, goes_on = threading.Event(), threading.Event()
    os.urandom = lambda count: (is_asked.set(), goes_on.wait(5), urandom(count))[2]
    first = threading.Thread(target=opened._engine.enter)
    first.start()
    is_asked.wait(1)
    opened._engine.enter()
    ends = opened._engine.router is parents
    goes_on.set()
    first.join()
    os._exit(ends)
assert os.waitpid(child, 0)[1] == 0
""",
    )


def test_connections_of_the_parent_stay_open_when_a_forked_child_collects_garbage(own_server):
    _succeeds(
        own_server.port,
        """
import gc
loop = asyncio.new_event_loop()
async def begin():
    global opened
    opened = holdfast.asyncio.Holdfast(redis.asyncio.Redis(port=port))
    await use()
async def use():
    await (await opened.lock("k", lease=60).acquire()).release()
loop.run_until_complete(begin())
child = os.fork()
if child == 0:
    async def main():
        await use()
        gc.collect()
    asyncio.run(main())
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
before = opened._engine.router.known(b"k")._idle[:]
loop.run_until_complete(use())
assert opened._engine.router.known(b"k")._idle == before
os._exit(0)
""",
    )


def test_acquire_raises_when_no_thread_can_be_started(server, name, monkeypatch):
    opened = holdfast.Holdfast(server.client())

    def start(self):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(RuntimeError, match="thread"):
        opened.lock(name).acquire(45)
    monkeypatch.undo()
    with opened.lock(name).acquire(45):
        monkeypatch.setattr(threading.Thread, "start", start)
        # The timer runs already; the calling thread opens the connections.
        with opened.lock(f"{name}:2").acquire(45), opened.lock(f"{name}:3", ephemeral=True).acquire(45):
            pass
    monkeypatch.undo()
    opened.close()


def test_interrupted_wait_leaves_nothing(own_server):
    found = _program(
        own_server.port,
        """
import threading, signal
# A shell starts background jobs with SIGINT ignored, which their children inherit.
signal.signal(signal.SIGINT, signal.default_int_handler)
opened = holdfast.Holdfast(redis.Redis(port=port))
other = opened.lock("k").acquire()
def interrupt():
    while not opened.waiters("k"):
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGINT)
threading.Thread(target=interrupt).start()
try:
    holdfast.Holdfast(redis.Redis(port=port)).lock("k").acquire()
except KeyboardInterrupt:
    print("interrupted")
end = time.time() + 30
while opened.waiters("k") and time.time() < end:
    time.sleep(0.01)
print(opened.waiters("k"))
""",
    )
    assert found.stdout == "interrupted\n[]\n", found.stderr


def test_import_loads_nothing_that_redis_py_has_not_loaded():
    command = (
        "import sys, redis; before = set(sys.modules); import holdfast; "
        "print(*(name for name in set(sys.modules) - before if not name.startswith('holdfast')))"
    )
    done = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, check=True)
    # Old versions of redis-py do without these.
    assert set(done.stdout.split()) <= {"__future__", "dataclasses"}


def test_lock_works_with_gevent(own_server):
    _succeeds(
        own_server.port,
        """
import gevent
opened = holdfast.Holdfast(redis.Redis(port=port))
lock, served = opened.lock("k", lease=60), []
def work(number):
    with lock:
        served.append(number)
        gevent.sleep(0.01)
hold = lock.acquire()
workers = [gevent.spawn(work, number) for number in range(20)]
gevent.sleep(0.1)
renewed(hold)
hold.check()
hold.release()
gevent.joinall(workers, timeout=60)
assert sorted(served) == list(range(20))
""",
        before="from gevent import monkey; monkey.patch_all()",
    )

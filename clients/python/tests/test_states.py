"""Every cell of the table of states and inputs in docs/client-protocol.md, against a server that follows a script."""

import asyncio
import collections
import concurrent.futures
import contextlib
import decimal
import errno
import gc
import itertools
import queue
import sys
import threading
import time

import pytest
import redis

import holdfast
from fake import CUT, NIL, SILENCE, VERSION, Fake, array, error, granted, integer
from holdfast import LossReason
from holdfast import _api as api
from holdfast import _engine as engine
from holdfast import _io as io
from holdfast import _rules as rules
from holdfast.redis_py import lock_class
from kinds import Tasks, Threads, closed
from servers import until

PASSING = [
    "LOADING Redis is loading the dataset in memory",
    "BUSY Redis is busy running a script",
    "TRYAGAIN Multiple keys request during rehashing of slot",
    "MASTERDOWN Link with MASTER is down",
    "MISCONF Redis is configured to save RDB snapshots",
    "NOREPLICAS Not enough good replicas to write",
    "CLUSTERDOWN The cluster is down",
    "OOM command not allowed when used memory > 'maxmemory'",
    "UNCONFIRMED 0 of 1 replicas confirmed",
    "READONLY You can't write against a read only replica.",
    "UNBLOCKED client unblocked",
    "SUPERSEDED by a later request",
    "ERR too many waiters",
    "ERR another request of this owner is being confirmed",
]
FATAL = [
    ("DEADLOCK a waits for b", holdfast.DeadlockError),
    ("WRONGTYPE the key holds no lock", holdfast.WrongTypeError),
    ("NOPERM this user has no permissions", redis.exceptions.NoPermissionError),
    ("ERR LEASE must be at least 1 ms", redis.ResponseError),
    ("ERR unknown command 'LOCK.ACQUIRE'", holdfast.ModuleNotLoadedError),
]


def option(words, name):
    return int(words[words.index(name) + 1])


def withdrawals(fake):
    return [words for words in fake.of("RELEASE") if words[-1] == b"ALL"]


def until_all_are_read(faked):
    pool = faked._engine.router.known(b"k")
    until(lambda: len(pool._idle) == len(pool._lines), "no connection waits for a reply")


# Waiting


def test_acquire_holds_when_granted(faked, fake):
    hold = faked.lock("k", lease=80).acquire(30)
    assert hold.fence == 101
    assert hold.is_held()
    assert 40 < hold.remaining() <= 80 * 0.99
    [words] = fake.of("ACQUIRE")
    assert words[:2] == [b"LOCK.ACQUIRE", b"k"]
    assert words[3:7] == [b"HOLDS", b"1", b"LEASE", b"80000"]
    assert 1 <= option(words, b"WAIT") <= 30_000
    assert b"WAITED" not in words
    assert words[-1] == b"WITHWAITED"


def test_certainty_counts_from_the_grant_when_the_request_waited(faked, fake):
    fake.script["ACQUIRE"].append(granted(5, 60_000))
    assert 0.99 * 8 < faked.lock("k", lease=8).acquire(30).remaining() <= 0.99 * 8 + 60


def test_acquire_raises_when_the_reply_is_nil(faked, fake, monkeypatch):
    # A reply may be late on a busy machine. Nothing has to be withdrawn even then.
    monkeypatch.setattr(engine, "GRACE", 30.0)
    fake.script["ACQUIRE"].append(lambda words: time.sleep(option(words, b"WAIT") / 1000) or NIL)
    with pytest.raises(holdfast.NotAcquiredError):
        faked.lock("k").acquire(0.2)
    assert fake.of("RELEASE") == []


def test_try_acquire_never_waits(faked, fake):
    fake.script["ACQUIRE"].append(NIL)
    assert faked.lock("k").try_acquire() is None
    [words] = fake.of("ACQUIRE")
    assert b"WAIT" not in words


async def test_polls_wait_shorter_the_more_are_due(fake, end_tasks, monkeypatch):
    monkeypatch.setattr(rules, "WAIT_SILENCE", 60.0)
    all_due = threading.Event()

    def reply(words):
        if b"WAIT" not in words:
            return NIL
        return SILENCE if option(words, b"WAIT") > 1000 else all_due.wait(60) and NIL

    fake.script["ACQUIRE"].extend([reply] * 1000)
    client = redis.asyncio.Redis(port=fake.port)
    async with holdfast.asyncio.Holdfast(client, max_connections=3) as opened:
        # One has a connection of its own.
        waits = [asyncio.create_task(opened.lock("k", shared=True).acquire(300)) for _ in range(27)]
        due = opened._engine._lines
        await _until(lambda: len(due.get(engine.POLLS, ())) == 26, "they are due")
        monkeypatch.setattr(rules, "POLL_EVERY", 300.0)
        all_due.set()

        def polled():
            asked = [option(words, b"WAIT") for words in fake.of("ACQUIRE") if b"WAIT" in words]
            return [wait for wait in asked if wait <= 1000]

        await _until(lambda: len(polled()) >= 2, "the second one is sent")
        assert polled()[1] == 40
        for wait in waits:
            wait.cancel()
        await asyncio.gather(*waits, return_exceptions=True)
    await closed(client)


async def test_polls_wait_no_longer_than_the_caller(fake, end_tasks, monkeypatch):
    monkeypatch.setattr(rules, "poll_wait", lambda due: 1000.0)
    monkeypatch.setattr(rules, "POLL_EVERY", 0.01)
    own = fake.script["ACQUIRE"]
    own.append(SILENCE)
    own.extend([NIL] * 2)
    client = redis.asyncio.Redis(port=fake.port)
    async with holdfast.asyncio.Holdfast(client, max_connections=3) as opened:
        first = asyncio.create_task(opened.lock("k", shared=True).acquire(300))
        await _until(lambda: len(fake.of("ACQUIRE")) == 1, "the first has a connection of its own")
        polls = asyncio.create_task(opened.lock("k", shared=True).acquire(60))
        await _until(lambda: len(fake.of("ACQUIRE")) >= 3, "the second polls")
        assert option(fake.of("ACQUIRE")[2], b"WAIT") <= 60_000
        for wait in (first, polls):
            wait.cancel()
        await asyncio.gather(first, polls, return_exceptions=True)
    await closed(client)


@pytest.mark.parametrize(("due", "wait"), [(1, 0.1), (10, 0.1), (50, 0.02), (1000, 0.005)])
def test_wait_of_polls_has_bounds(due, wait):
    assert rules.poll_wait(due) == wait


@pytest.mark.parametrize("text", PASSING, ids=lambda text: text.split()[0] + text[-6:])
def test_acquire_asks_again_when_the_error_passes(faked, fake, text):
    fake.script["ACQUIRE"].extend([error(text)] * 2)
    began = time.monotonic()
    assert faked.lock("k").acquire(30).is_held()
    first, second, third = fake.of("ACQUIRE")
    assert first[2] == second[2] == third[2], "the owner stays"
    assert 1 <= option(second, b"WAITED") < option(third, b"WAITED") <= (time.monotonic() - began) * 1000 + 1


def test_acquire_gives_up_in_time_when_errors_go_on(faked, fake):
    fake.script["ACQUIRE"].extend([error(PASSING[0])] * 1000)
    with pytest.raises(holdfast.NotAcquiredError) as raised:
        faked.lock("k").acquire(0.5)
    assert len(fake.of("ACQUIRE")) <= 12, "there is a pause"
    assert not fake.of("ACQUIRE") or "loading" in str(raised.value)


def test_pause_doubles_while_errors_go_on(faked, fake):
    fake.script["ACQUIRE"].extend([error(PASSING[0])] * 5)
    faked.lock("k").acquire(30)
    times = [at for at, _, _ in fake.seen]
    for number, (one, next_one) in enumerate(itertools.pairwise(times)):
        assert next_one - one >= 0.02 * 2**number * 0.7


def test_acquire_asks_again_when_cut_and_release_then_withdraws(faked, fake):
    fake.script["ACQUIRE"].append(CUT)
    hold = faked.lock("k").acquire(30)
    assert len(fake.of("ACQUIRE")) == 2
    hold.release()
    by_token, everything = fake.of("RELEASE")
    assert by_token[3:] == [b"TOKEN", b"101"]
    assert everything[3:] == [b"ALL"]


def test_dead_idle_connection_is_replaced_at_once(faked, fake):
    faked.lock("k").acquire(30).release()
    fake.script["ACQUIRE"].append(CUT)
    assert faked.lock("k").try_acquire() is not None


def test_acquire_asks_again_over_another_connection_when_silent(faked, fake, impatient):
    fake.script["ACQUIRE"].append(SILENCE)
    assert faked.lock("k").acquire(30).is_held()
    (at, one, first), (later, other, second) = fake.seen[:2]
    assert other != one
    assert first[2] == second[2]
    assert later - at > 0.4
    assert option(second, b"WAITED") >= 500
    assert option(second, b"WAIT") <= 29_500


def test_superseded_connection_is_used_again(faked, fake, monkeypatch):
    monkeypatch.setattr(rules, "WAIT_SILENCE", 0.3)
    replies = threading.Event()
    fake.script["ACQUIRE"].append(lambda _: replies.wait(60) and error("SUPERSEDED by a later request"))
    fake.script["ACQUIRE"].append(lambda _: replies.set() or granted(7))
    hold = faked.lock("k").acquire(30)
    until_all_are_read(faked)
    before = fake.connections
    hold.release()
    for _ in range(3):
        faked.lock("k").acquire(30).release()
    assert fake.connections == before
    assert len(fake.of("RELEASE")) == 4, "no connection broke, so nothing was withdrawn"


def test_superseded_connection_is_used_again_when_the_lock_is_granted_first(faked, fake, monkeypatch):
    monkeypatch.setattr(rules, "WAIT_SILENCE", 0.3)
    is_granted = threading.Event()
    fake.script["ACQUIRE"].append(lambda _: is_granted.wait(60) and error("SUPERSEDED by a later request"))
    fake.script["ACQUIRE"].append(granted(7))
    hold = faked.lock("k").acquire(30)
    is_granted.set()
    until_all_are_read(faked)
    hold.release()
    [by_token] = fake.of("RELEASE")
    assert by_token[3:] == [b"TOKEN", b"7"], "no connection broke, so nothing was withdrawn"


def test_superseded_request_that_was_answered_first_is_not_withdrawn(faked, fake, monkeypatch):
    monkeypatch.setattr(rules, "WAIT_SILENCE", 0.3)

    async def never(grant):
        """In the place of what is read in the background, perhaps late."""

    def grant(_):
        answered = fake.answered
        is_asked_again.set()
        until(lambda: fake.answered > answered, "the first request is answered")
        return granted(7)

    monkeypatch.setattr(faked._engine, "_read_older", never)
    is_asked_again = threading.Event()
    fake.script["ACQUIRE"].append(lambda _: is_asked_again.wait(60) and error("SUPERSEDED by a later request"))
    fake.script["ACQUIRE"].append(grant)
    faked.lock("k").acquire(30).release()
    [by_token] = fake.of("RELEASE")
    assert by_token[3:] == [b"TOKEN", b"7"]


def test_superseded_request_is_withdrawn_when_granted_after_the_release(faked, fake, monkeypatch):
    monkeypatch.setattr(rules, "WAIT_SILENCE", 0.3)
    is_released = threading.Event()
    fake.script["ACQUIRE"].append(lambda _: is_released.wait(60) and granted(9))
    fake.script["ACQUIRE"].append(granted(7))
    faked.lock("k").acquire(30).release()
    assert len(withdrawals(fake)) == 1, "its reply was not read"
    is_released.set()
    until(lambda: len(withdrawals(fake)) == 2, "it is withdrawn")


@pytest.mark.parametrize(
    ("text", "kind_of"), FATAL, ids=lambda value: value.split()[0] if isinstance(value, str) else ""
)
def test_acquire_raises_when_the_error_is_fatal(faked, fake, text, kind_of):
    fake.script["ACQUIRE"].append(error(text))
    with pytest.raises(kind_of):
        faked.lock("k").acquire(30)
    assert len(fake.of("ACQUIRE")) == 1
    assert fake.of("RELEASE") == []


def test_acquire_ends_in_its_time_when_replicas_may_take_longer(faked, fake):
    fake.script["VERSION"].append(VERSION.replace(b":1000\r", b":3600000\r"))
    fake.script["ACQUIRE"].append(SILENCE)
    with pytest.raises(holdfast.NotAcquiredError):
        faked.lock("k", replicas=1).acquire(0.3)


@pytest.mark.parametrize("redirect", ["MOVED 1 127.0.0.1:1", "ASK 1 127.0.0.1:1"])
def test_redirect_raises_when_the_client_is_for_one_server(faked, fake, redirect):
    fake.script["ACQUIRE"].append(error(redirect))
    with pytest.raises(redis.ResponseError, match=r"RedisCluster.*1 127\.0\.0\.1:1"):
        faked.lock("k").acquire(30)
    assert len(fake.of("ACQUIRE")) == 1
    faked.lock("k").acquire(30)
    fake.script["RELEASE"].append(error(redirect))
    hold = faked.lock("j").acquire(30)
    with pytest.raises(redis.ResponseError, match="RedisCluster"):
        hold.release()


def test_acquire_withdraws_when_a_fatal_error_follows_a_cut(faked, fake):
    fake.script["ACQUIRE"].extend([CUT, error("DEADLOCK a waits for b")])
    with pytest.raises(holdfast.DeadlockError):
        faked.lock("k", lease=60).acquire(30)
    until(lambda: len(withdrawals(fake)) == 2, "it is withdrawn twice, a second apart")


def test_acquire_raises_and_withdraws_when_its_time_is_over(faked, fake):
    faked.lock("j").try_acquire()
    fake.script["ACQUIRE"].append(SILENCE)
    with pytest.raises(holdfast.NotAcquiredError):
        faked.lock("k", lease=60).acquire(0.3)
    # On a busy machine, the time may be over before anything was sent.
    until(lambda: withdrawals(fake) or len(fake.of("ACQUIRE")) == 1, "it is withdrawn")
    assert len(fake.of("ACQUIRE")) <= 2


def test_acquire_holds_when_it_is_granted_shortly_after_its_time_is_over(faked, fake, monkeypatch):
    monkeypatch.setattr(engine, "GRACE", 30.0)

    def grant_late(_):
        [grant] = faked._engine._asking
        until(lambda: rules.now() > grant.until, "the caller's time is over")
        return granted(7)

    fake.script["ACQUIRE"].append(grant_late)
    assert faked.lock("k", lease=60).acquire(0.3).fence == 7


def test_acquire_sends_nothing_when_its_time_is_over_before_it_has_a_connection(faked, fake):
    connects = threading.Event()
    fake.script["VERSION"].append(lambda _: connects.wait(60) and VERSION)
    with pytest.raises(holdfast.NotAcquiredError):
        # Time enough to begin with a connection: without one, there is nothing to wait for below.
        faked.lock("k").acquire(1)
    connects.set()
    until(lambda: faked._engine.router.known(b"k")._idle, "the connection is there")
    assert fake.seen == []


def test_late_grant_is_renewed_before_it_counts(faked, fake):
    fake.script["ACQUIRE"].append(granted(9, -31_000))
    hold = faked.lock("k", lease=60).acquire(30)
    assert hold.is_held()
    assert len(fake.of("RENEW")) == 1
    assert hold.remaining() > 30
    hold.release()
    assert withdrawals(fake) == [], "no connection broke"


def test_acquire_ends_in_time_when_only_a_part_of_the_reply_comes(kind, fake, monkeypatch):
    # redis-py's own timeout.
    monkeypatch.setattr(io, "HANDSHAKE", 90.0)
    opened = kind.open(kind.redis(fake.port, socket_connect_timeout=90))
    opened.lock("j").acquire(30).release()
    fake.script["ACQUIRE"].append(b"*2\r\n:1")
    with concurrent.futures.ThreadPoolExecutor() as executor:
        acquired = executor.submit(opened.lock("k").acquire, 0.3)
        with pytest.raises(holdfast.NotAcquiredError):
            acquired.result(60)
    until(lambda: withdrawals(fake), "it is withdrawn")


@pytest.mark.parametrize("reply", [b"+OK\r\n", integer(5), b"*1\r\n:5\r\n", b"*2\r\n$1\r\nx\r\n:0\r\n"], ids=repr)
def test_acquire_asks_again_when_the_reply_is_neither_token_nor_nil(faked, fake, reply):
    fake.script["ACQUIRE"].append(reply)
    hold = faked.lock("k").acquire(30)
    assert hold.fence == 101
    hold.release()
    assert len(withdrawals(fake)) == 1, "what the server meant is unknown"
    until_all_are_read(faked)


def test_waits_for_one_mutex_queue_in_the_client(faked, kind, fake):
    held = threading.Event()
    fake.script["ACQUIRE"].append(lambda _: held.wait(60) and granted(1))
    got = []

    def work():
        got.append(faked.lock("k").acquire(30))

    threads = [threading.Thread(target=work) for _ in range(10)]
    for thread in threads:
        thread.start()
    until(lambda: fake.of("ACQUIRE"), "the first is at the server")
    time.sleep(0.1)
    assert len(fake.of("ACQUIRE")) == 1, "the others wait here"
    held.set()
    for thread in threads:
        thread.join(40)
    assert len(got) == 10
    assert all(b"WAITED" not in words for words in fake.of("ACQUIRE")[:1])


@pytest.mark.parametrize("name", [bytearray(b"k"), memoryview(b"k"), "k"], ids=lambda name: type(name).__name__)
def test_name_may_be_text_or_bytes(faked, fake, name):
    faked.lock(name).acquire(30)
    assert fake.of("ACQUIRE")[0][1] == b"k"


# Held and renewing


@pytest.mark.parametrize("client", [None, "redis://localhost"])
def test_holdfast_raises_type_error_when_it_gets_no_client(kind, client):
    with pytest.raises(TypeError, match=r"redis must be a redis\.\S+\.Redis or .*, got a builtins"):
        kind.open(client)


@pytest.mark.parametrize("make", ["redis", "cluster"])
def test_holdfast_raises_type_error_when_the_client_is_of_the_other_flavour(kind, cluster, make):
    other = Tasks() if isinstance(kind, Threads) else Threads()
    try:
        client = getattr(other, make)(cluster.nodes[0].port)
        with pytest.raises(TypeError, match=rf"redis must be a \S+\.Redis or \S+, got a {type(client).__module__}"):
            kind.open(client)
    finally:
        other.close()


@pytest.mark.parametrize("limit", [0, 2.5, "3", None])
def test_lock_raises_value_error_when_its_limit_is_no_positive_integer(faked, limit):
    with pytest.raises(ValueError, match=f"limit must be an integer of at least 1, got {limit!r}"):
        faked.lock("k", limit=limit)


@pytest.mark.parametrize("replicas", [-1, 1.5])
def test_lock_raises_value_error_when_its_replicas_are_no_number(faked, replicas):
    with pytest.raises(ValueError, match=f"replicas must be an integer of at least 0, got {replicas!r}"):
        faked.lock("k", replicas=replicas)


@pytest.mark.parametrize("count", [2, "9", float("nan")])
def test_holdfast_raises_value_error_when_it_may_open_too_few_connections(kind, fake, count):
    with pytest.raises(ValueError, match=f"max_connections must be an integer of at least 3, got {count!r}"):
        kind.open(kind.redis(fake.port), max_connections=count)


def test_acquire_raises_type_error_when_cancel_is_no_event_of_its_flavour(faked, kind):
    with pytest.raises(TypeError, match=r"cancel must be an instance of .*Event"):
        faked.lock("k").acquire(cancel=asyncio.Event() if isinstance(kind, Threads) else threading.Event())


def test_elect_raises_type_error_when_an_argument_is_of_a_wrong_type(faked):
    for callbacks in [(None,), (print, 5)]:
        with pytest.raises(TypeError, match="on_elected and on_lost must be callable, got"):
            faked.elect("k", *callbacks)
    with pytest.raises(TypeError, match="value must be a str, got b'host'"):
        faked.elect("k", print, value=b"host")


def test_lock_class_raises_when_an_argument_is_wrong(fake):
    client = redis.Redis(port=fake.port)
    with pytest.raises(TypeError, match="holdfast must be a Holdfast object, got"):
        lock_class(client)
    with holdfast.Holdfast(client) as opened:
        with pytest.raises(ValueError, match=r"timeout must be between .*, got '10'"):
            lock_class(opened)(client, "k", timeout="10")
        lock = lock_class(opened)(client, "k", timeout=10)
        lock.acquire()
        with pytest.raises(ValueError, match="additional_time must be a number of seconds, got '10'"):
            lock.extend("10")


def test_lock_raises_value_error_when_it_is_shared_and_has_a_limit(faked):
    with pytest.raises(ValueError, match=r"shared=True .* no limit, got limit=3"):
        faked.lock("k", shared=True, limit=3)


@pytest.mark.parametrize("name", [None, 5, ["a", 5], 1.5], ids=str)
def test_lock_raises_type_error_when_a_name_is_neither_text_nor_bytes(faked, fake, name):
    with pytest.raises(TypeError, match="a name must be str or bytes, got"):
        faked.lock(name)
    with pytest.raises(TypeError, match="a name must be str or bytes, got"):
        faked.info(name)
    assert fake.of("ACQUIRE") == fake.of("INFO") == []


def test_renewal_is_due_at_a_quarter_of_the_lease():
    grant = rules.Grant(rules.Terms((b"k",), "k", lease=8.0))
    grant.granted([1, 500], 1000.0)
    assert grant.due == pytest.approx(1000.5 + 2)
    assert grant.certain == pytest.approx(1000.5 + 8 * 0.99)


def test_renewal_of_an_ephemeral_hold_is_due_after_two_seconds_when_its_lease_is_long():
    grant = rules.Grant(rules.Terms((b"k",), "k", lease=60.0, ephemeral=True))
    grant.granted([1, 500], 1000.0)
    assert grant.due == pytest.approx(1000.5 + 2)


def test_hold_is_renewed_again_and_again(faked, fake, quick):
    hold = faked.lock("k", lease=60).acquire(30)
    until(lambda: len(fake.of("RENEW")) >= 3, "it is renewed")
    assert hold.is_held()
    [acquired] = fake.of("ACQUIRE")
    for words in fake.of("RENEW"):
        assert words == [b"LOCK.RENEW", b"k", acquired[2], b"TOKEN", b"101", b"LEASE", b"60000"]


@pytest.mark.parametrize(
    ("names", "reply"),
    [
        ("k", b"+OK\r\n"),
        ("k", integer(5)),
        ("k", array(101)),
        (["a", "b"], integer(101)),
        (["a", "b"], array(101)),
        (["a", "b"], array(101, 5)),
        (["a", "b"], array(101, 101, 101)),
    ],
    ids=repr,
)
def test_renewal_is_repeated_when_the_reply_is_neither_token_nor_nil_for_each_name(faked, fake, names, reply):
    hold = faked.lock(names, lease=60).acquire(30)
    fake.script["RENEW"].append(reply)
    hold.renew()
    first, second = (connection for _, connection, words in fake.seen if words[0].endswith(b"RENEW"))
    assert first != second
    hold.release()
    assert len(withdrawals(fake)) == 1, "what the server meant is unknown"


def test_hold_that_is_not_renewed_expires(faked, fake):
    hold = faked.lock("k", lease=60, renew=False).acquire(30)
    hold.renew(0.3)
    assert hold.lost.wait(30)
    assert not hold.is_held()
    assert len(fake.of("RENEW")) == 1, "only the caller's"
    with pytest.raises(holdfast.LockLostError) as lost:
        hold.release()
    assert lost.value.reason is LossReason.EXPIRED
    assert fake.of("RELEASE")[0][3:] == [b"TOKEN", b"101"], "a release still sends RELEASE"


@pytest.mark.parametrize("reply", [NIL, error("WRONGTYPE the key holds no lock")], ids=["nil", "WRONGTYPE"])
def test_hold_is_lost_when_its_renewal_finds_nothing(faked, fake, quick, reply):
    fake.script["RENEW"].append(reply)
    hold = faked.lock("k", lease=60).acquire(30)
    assert hold.lost.wait(30)
    with pytest.raises(holdfast.LockLostError) as lost:
        hold.check()
    assert lost.value.reason is LossReason.GONE
    time.sleep(0.2)
    assert len(fake.of("RENEW")) == 1, "a lost hold is not renewed"


@pytest.mark.parametrize(
    "trouble",
    [CUT, SILENCE, *map(error, PASSING), error("NOPERM no permission"), error("ERR something")],
    ids=["cut", "silence", *(text.split()[0] + text[-6:] for text in PASSING), "NOPERM", "ERR"],
)
def test_renewal_is_repeated_when_it_fails(faked, fake, quick, impatient, trouble):
    fake.script["RENEW"].extend([trouble] * 2)
    hold = faked.lock("k", lease=60).acquire(30)
    until(lambda: len(fake.of("RENEW")) >= 4, "it is renewed after all")
    assert hold.is_held()
    assert not hold.lost.is_set()


@pytest.mark.parametrize("trouble", [CUT, SILENCE, error(PASSING[0])], ids=["cut", "silence", "error"])
def test_hold_expires_when_its_renewals_fail_for_a_lease(faked, fake, impatient, trouble):
    fake.script["RENEW"].extend([trouble] * 1000)
    hold = faked.lock("k", lease=0.8).acquire(30)
    certain = hold._grant.certain
    assert hold.lost.wait(30)
    assert hold._grant.certain == certain <= rules.now(), "not before the lease is over"
    assert 1 <= len(fake.of("RENEW")) <= 60, "there is a pause"
    with pytest.raises(holdfast.LockLostError) as lost:
        hold.renew()
    assert lost.value.reason is LossReason.EXPIRED


def test_renew_sets_another_lease(faked, fake):
    hold = faked.lock("k", lease=50, renew=False).acquire(30)
    hold.renew(90)
    assert 50 < hold.remaining() <= 90 * 0.99
    hold.renew(20)
    assert hold.remaining() <= 20 * 0.99
    assert [option(words, b"LEASE") for words in fake.of("RENEW")] == [90_000, 20_000]


def test_renew_keeps_the_former_lease_when_the_server_refuses_the_new_one(faked, fake, quick):
    hold = faked.lock("k", lease=60).acquire(30)
    fake.script["RENEW"].append(error("ERR LEASE must be between 1 and 60000 ms, got 90000"))
    with pytest.raises(redis.ResponseError, match="LEASE must be"):
        hold.renew(90)
    sent = len(fake.of("RENEW"))
    until(lambda: len(fake.of("RENEW")) > sent, "it is renewed again")
    assert option(fake.of("RENEW")[-1], b"LEASE") == 60_000
    assert hold.is_held()


@pytest.mark.parametrize("lease", [0, -1, 1e12, float("nan"), float("inf"), "10", decimal.Decimal(10)])
def test_lease_is_refused_when_it_is_out_of_range_or_no_number(faked, fake, lease):
    hold = faked.lock("k", lease=50).acquire(30)
    for wrong in (lambda: hold.renew(lease), lambda: faked.lock("j", lease=lease)):
        with pytest.raises(ValueError, match=r"lease must be between 0\.001 and 315360000 s"):
            wrong()
    assert 40 < hold.remaining() <= 50 * 0.99
    assert fake.of("RENEW") == []
    hold.renew()


@pytest.mark.parametrize("seconds", [float("nan"), "5", decimal.Decimal(5), []], ids=str)
def test_time_is_refused_when_it_is_no_number(faked, fake, seconds):
    with pytest.raises(ValueError, match="wait must be a number of seconds, got"):
        faked.lock("k").acquire(seconds)
    hold = faked.lock("k").acquire(30)
    with pytest.raises(ValueError, match="timeout must be a number of seconds, got"):
        hold.release(seconds)
    assert hold.is_held()
    hold.release()
    assert len(fake.of("RELEASE")) == 1


def test_renewal_counts_with_the_lease_that_it_sent(faked, kind, fake):
    hold = faked.lock("k", lease=50, renew=False).acquire(30)

    def lengthen(_):
        grant.lease = 9000.0
        return integer(101)

    # renew(9000) in another thread does this.
    grant = hold._grant

    fake.script["RENEW"].append(lengthen)
    hold.renew()
    assert hold.remaining() <= 50 * 0.99


def test_renewals_name_the_replicas(faked, fake, quick):
    faked.lock("k", lease=60, replicas=2).acquire(30)
    until(lambda: fake.of("RENEW"), "it is renewed")
    assert option(fake.of("ACQUIRE")[0], b"REPLICAS") == 2
    assert option(fake.of("RENEW")[0], b"REPLICAS") == 2


def test_renewals_due_together_share_a_connection(faked, fake, monkeypatch):
    # Renewals that are due within 3 s are sent together here. No reply takes that long, so the next ones find the
    # connection idle. A lease of 300 s is renewed every 3 s.
    monkeypatch.setattr(engine, "TICK", 3.0)
    monkeypatch.setattr(rules, "RENEW_AT", 0.01)
    for number in range(300):
        faked.lock(f"k{number}", lease=300).acquire(30)
    until(lambda: len(fake.of("RENEW")) >= 300, "all are renewed")
    assert fake.connections <= 3


# Releasing


def test_released_hold_is_not_renewed(faked, fake, quick):
    hold = faked.lock("k", lease=60).acquire(30)
    until(lambda: fake.of("RENEW"), "it is renewed")
    hold.release()
    seen = [words[0] for _, _, words in fake.seen]
    time.sleep(0.3)
    assert [words[0] for _, _, words in fake.seen] == seen
    assert seen[-1] == b"LOCK.RELEASE"
    assert not hold.is_held()
    hold.release()
    assert len(fake.of("RELEASE")) == 1, "a second release does nothing"


@pytest.mark.parametrize(
    ("names", "reply"),
    [
        ("k", b"+OK\r\n"),
        ("k", array(1)),
        (["a", "b"], integer(1)),
        (["a", "b"], array(1)),
        (["a", "b"], b"*2\r\n:1\r\n+OK\r\n"),
        (["a", "b"], array(1, 1, 1)),
    ],
    ids=repr,
)
def test_release_is_repeated_when_the_reply_is_neither_number_nor_nil_for_each_name(faked, fake, names, reply):
    fake.script["RELEASE"].append(reply)
    hold = faked.lock(names).acquire(30)
    hold.release()
    first, second, _ = (connection for _, connection, words in fake.seen if words[0].endswith(b"RELEASE"))
    assert first != second
    assert len(withdrawals(fake)) == 1, "what the server meant is unknown"


def test_release_raises_when_the_first_reply_is_nil(faked, fake):
    fake.script["RELEASE"].append(NIL)
    hold = faked.lock("k").acquire(30)
    with pytest.raises(holdfast.LockLostError) as lost:
        hold.release()
    assert lost.value.reason is LossReason.GONE
    assert hold.lost.is_set()


@pytest.mark.parametrize("trouble", [CUT, SILENCE], ids=["cut", "silence"])
def test_release_succeeds_when_the_reply_to_its_repetition_is_nil(faked, fake, impatient, trouble):
    fake.script["RELEASE"].extend([trouble, NIL, NIL])
    hold = faked.lock("k").acquire(30)
    hold.release()
    assert not hold.lost.is_set()
    first, again, everything, *_ = fake.of("RELEASE")
    assert first == again
    assert everything[3:] == [b"ALL"]


@pytest.mark.parametrize("text", PASSING, ids=lambda text: text.split()[0] + text[-6:])
def test_release_is_repeated_when_the_error_passes(faked, fake, text):
    fake.script["RELEASE"].extend([error(text)] * 2)
    faked.lock("k").acquire(30).release()
    assert len(fake.of("RELEASE")) == 3


def test_release_raises_when_the_error_is_fatal(faked, fake):
    fake.script["RELEASE"].append(error("NOPERM no permission"))
    hold = faked.lock("k").acquire(30)
    with pytest.raises(redis.exceptions.NoPermissionError):
        hold.release()
    hold.release()
    assert len(fake.of("RELEASE")) == 2, "it may be tried again"


def test_release_raises_a_loss_when_the_key_was_overwritten(faked, fake):
    fake.script["RELEASE"].append(error("WRONGTYPE the key holds no lock"))
    with pytest.raises(holdfast.LockLostError):
        faked.lock("k").acquire(30).release()


def test_release_goes_on_in_the_background_when_its_time_is_over(faked, fake, impatient):
    fake.script["RELEASE"].extend([SILENCE] * 3)
    hold = faked.lock("k", lease=60).acquire(30)
    with pytest.raises((redis.ConnectionError, redis.TimeoutError)):
        hold.release(timeout=0.3)
    until(lambda: len([words for words in fake.of("RELEASE") if b"TOKEN" in words]) >= 3, "it goes on")


# Withdrawing, and the caller who cancels


async def _cancelled(fake, lease=60.0):
    """Cancels an acquisition while it waits."""
    client = redis.asyncio.Redis(port=fake.port)
    async with holdfast.asyncio.Holdfast(client) as opened:
        task = asyncio.create_task(opened.lock("k", lease=lease).acquire(30))
        while not fake.of("ACQUIRE"):
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        yield opened
    await closed(client)


async def _until(condition, what, seconds=30):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, what
        await asyncio.sleep(0.005)


async def test_cancel_withdraws_and_keeps_both_connections(fake, end_tasks):
    ended = threading.Event()
    fake.script["ACQUIRE"].append(lambda _: ended.wait(60) and NIL)
    fake.script["RELEASE"].append(lambda _: ended.set() or integer(1))
    async for opened in _cancelled(fake):
        await _until(lambda: withdrawals(fake), "it is withdrawn")
        await (await opened.lock("j").acquire(30)).release()
        await (await opened.lock("j").acquire(30)).release()
        assert fake.connections <= 3
        assert len(withdrawals(fake)) == 1


async def test_cancel_withdraws_again_when_a_token_comes_after_the_withdrawal(fake, end_tasks):
    ended = threading.Event()
    fake.script["ACQUIRE"].append(lambda _: ended.wait(60) and granted(5))
    fake.script["RELEASE"].append(lambda _: ended.set() or NIL)
    async for _ in _cancelled(fake):
        await _until(lambda: len(withdrawals(fake)) == 2, "a token came: once more")


async def test_cancel_withdraws_twice_when_the_connection_broke(fake, end_tasks):
    go = threading.Event()
    fake.script["ACQUIRE"].append(lambda _: go.wait(60) and CUT)
    fake.script["RELEASE"].append(lambda _: go.set() or NIL)
    async for _ in _cancelled(fake):
        await _until(lambda: len(withdrawals(fake)) == 2, "twice")
    times = [at for at, _, words in fake.seen if words[-1] == b"ALL"]
    assert times[1] - times[0] > 0.9


@pytest.mark.parametrize("trouble", [CUT, SILENCE, error(PASSING[0])], ids=["cut", "silence", "error"])
async def test_withdrawal_is_repeated_when_it_fails(fake, impatient, trouble, end_tasks):
    fake.script["ACQUIRE"].append(lambda _: time.sleep(0.1) or NIL)
    fake.script["RELEASE"].extend([trouble] * 2)
    async for _ in _cancelled(fake):
        await _until(lambda: len(withdrawals(fake)) >= 3, "it is repeated")


async def test_withdrawal_ends_when_the_lease_is_over(fake, impatient, end_tasks):
    fake.script["ACQUIRE"].append(SILENCE)
    fake.script["RELEASE"].extend([error(PASSING[0])] * 1000)
    async for _ in _cancelled(fake, lease=0.5):
        await _until(lambda: fake.seen[-1][0] < time.monotonic() - 0.5, "no more is sent")


def test_wait_is_withdrawn_when_it_was_longer_than_its_lease(faked, fake):
    # A connection is idle then.
    faked.lock("j").acquire(30).release()
    ended = threading.Event()
    fake.script["ACQUIRE"].append(lambda _: ended.wait(60) and NIL)
    fake.script["RELEASE"].append(lambda _: ended.set() or integer(1))
    with pytest.raises(holdfast.NotAcquiredError):
        faked.lock("k", lease=0.3).acquire(0.8)
    until(lambda: withdrawals(fake), "it is withdrawn")


@pytest.mark.parametrize("trouble", [SILENCE, error("NOPERM no permission")], ids=["silence", "NOPERM"])
def test_withdrawal_that_fails_closes_the_connection_of_the_wait(faked, fake, monkeypatch, trouble):
    # For how long a withdrawal waits for its reply.
    monkeypatch.setattr(rules, "LEAST_SILENCE", 3.0)
    faked.lock("j").acquire(30).release()
    fake.script["ACQUIRE"].append(SILENCE)
    fake.script["RELEASE"].extend([trouble] * 10)
    with pytest.raises(holdfast.NotAcquiredError):
        faked.lock("k", lease=0.3).acquire(0.8)
    until(lambda: withdrawals(fake), "it is withdrawn")
    until_all_are_read(faked)


async def test_cancelled_release_goes_on_in_the_background(fake, end_tasks):
    client = redis.asyncio.Redis(port=fake.port)
    async with holdfast.asyncio.Holdfast(client) as opened:
        hold = await opened.lock("k", lease=60).acquire(30)
        fake.script["RELEASE"].append(error(PASSING[0]))
        task = asyncio.create_task(hold.release())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await _until(lambda: len(fake.of("RELEASE")) >= 2, "it goes on")
    await closed(client)


def test_wait_ends_soon_when_another_thread_cancels(faked, kind, fake):
    if isinstance(kind, Tasks):
        cancel = kind.inside(asyncio.Event)
        fake.script["ACQUIRE"].append(lambda _: kind.loop.call_soon_threadsafe(cancel.set) and SILENCE)
    else:
        cancel = threading.Event()
        fake.script["ACQUIRE"].append(lambda _: cancel.set() or SILENCE)
    with pytest.raises(holdfast.NotAcquiredError, match="cancelled"):
        faked.lock("k").acquire(cancel=cancel)
    until(lambda: withdrawals(fake), "it is withdrawn")


# Lost, several keys, ephemeral, versions


def test_loss_is_notified_once(kind, fake, quick):
    losses = []

    class Hooks(holdfast.Hooks):
        def lost(self, name, fence, reason):
            losses.append((name, fence, reason))

    opened = kind.open(kind.redis(fake.port), hooks=Hooks())
    fake.script["RENEW"].append(NIL)
    hold = opened.lock("k", lease=60).acquire(30)
    assert hold.lost.wait(30)
    for _ in range(3):
        with pytest.raises(holdfast.LockLostError):
            hold.release()
    assert losses == [("k", 101, LossReason.GONE)]


def test_hooks_are_called_and_may_fail(kind, fake):
    calls = collections.Counter()

    class Hooks(holdfast.Hooks):
        def acquired(self, name, fence, waited):
            calls["acquired"] += 1
            raise ValueError("a hook that fails")

        def released(self, name, fence, held):
            calls["released"] += 1

    opened = kind.open(kind.redis(fake.port), hooks=Hooks())
    opened.lock("k").acquire(30).release()
    assert calls == {"acquired": 1, "released": 1}


def test_acquisition_is_withdrawn_when_it_is_interrupted_in_its_hook(fake, quick):
    class Hooks(holdfast.Hooks):
        def acquired(self, name, fence, waited):
            raise KeyboardInterrupt

    with holdfast.Holdfast(redis.Redis(port=fake.port), hooks=Hooks()) as opened:
        with pytest.raises(KeyboardInterrupt):
            opened.lock("k", lease=60).acquire(30)
        until(lambda: withdrawals(fake), "it is withdrawn")
        assert not opened._engine.grants, "it would be renewed for ever"


@pytest.mark.parametrize("step", ["acquisition", "granted"])
def test_acquisition_keeps_neither_connection_nor_lock_when_it_is_interrupted(fake, monkeypatch, step):
    def interrupt(*_):
        raise KeyboardInterrupt

    with holdfast.Holdfast(redis.Redis(port=fake.port)) as opened:
        opened.lock("k").acquire(30).release()
        before = len(fake.of("ACQUIRE"))
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(rules.Grant, step, interrupt)
            opened.lock("k", lease=60).acquire(30)
        if len(fake.of("ACQUIRE")) > before:
            until(lambda: withdrawals(fake), "it is withdrawn")
        until_all_are_read(opened)


def test_wait_leaves_the_queue_in_the_client_when_it_is_interrupted(fake):
    with holdfast.Holdfast(redis.Redis(port=fake.port)) as opened:
        opened.lock("k").acquire(30).release()
        engine, mutex = opened._engine, opened._engine.mutex

        class Interrupting:
            """Interrupts the thread as soon as it has joined the queue."""

            def __enter__(self):
                mutex.acquire()

            def __exit__(self, *_):
                mutex.release()
                if engine._lines:
                    engine.mutex = mutex
                    raise KeyboardInterrupt

        engine.mutex = Interrupting()
        with pytest.raises(KeyboardInterrupt):
            opened.lock("k").acquire(30)
        assert not engine._lines


# What the application's code may raise that is no Exception: by sys.exit(), or by the end of a task that it awaits.
STRAY = {"threads": SystemExit, "asyncio": asyncio.CancelledError}


def test_renewals_go_on_when_a_hook_raises_no_exception(kind, fake, quick):
    class Hooks(holdfast.Hooks):
        def lost(self, name, fence, reason):
            raise STRAY[kind.name]

    opened = kind.open(kind.redis(fake.port), hooks=Hooks())
    short = opened.lock("short", lease=60, renew=False).acquire(30)
    hold = opened.lock("k", lease=60).acquire(30)
    # The timer finds that its lease is over, and calls the hook.
    short.renew(0.2)
    assert short.lost.wait(30)
    seen = len(fake.of("RENEW"))
    until(lambda: len(fake.of("RENEW")) > seen + 2, "the other one is renewed")
    assert hold.is_held()


def test_election_goes_on_when_a_callback_raises_no_exception(faked, kind, fake):
    # Python 3.10 can't tell whether the election's own task was cancelled.
    stray = KeyError if isinstance(kind, Tasks) and sys.version_info < (3, 11) else STRAY[kind.name]
    terms = []

    def on_elected(hold):
        terms.append(hold.fence)
        raise stray

    async def on_elected_task(hold):
        on_elected(hold)

    election = faked.elect("k", on_elected_task if isinstance(kind, Tasks) else on_elected)
    until(lambda: terms, "it is elected")
    election.close()
    assert len(fake.of("RELEASE")) == 1
    assert not election.is_leader


async def test_election_that_is_cancelled_releases_its_hold(fake, end_tasks):
    client = redis.asyncio.Redis(port=fake.port)
    opened = holdfast.asyncio.Holdfast(client)
    election = opened.elect("k", lambda hold: None)
    await _until(lambda: election.is_leader, "it is elected")
    election._campaigner.cancel()
    await _until(lambda: fake.of("RELEASE"), "the hold is released")
    assert not opened._engine.grants
    await opened.close()
    await closed(client)


def test_renewals_and_elections_go_on_when_logging_fails(faked, fake, quick, monkeypatch):
    def fail(*_):
        raise ValueError("a handler that fails")

    for method in ("warning", "exception"):
        monkeypatch.setattr(engine.logger, method, fail)
    fake.script["ACQUIRE"].append(error("ERR an error that does not pass"))
    election = faked.elect("elected", lambda hold: None)
    until(lambda: election.is_leader, "it is elected")
    faked.lock("dropped", lease=60).acquire(30)
    gc.collect()
    seen = len(fake.of("RENEW"))
    until(lambda: len(fake.of("RENEW")) > seen + 5, "the holds are renewed")
    election.close()


def test_several_keys_are_lost_when_one_is(faked, fake, quick):
    fake.script["RENEW"].append(b"*2\r\n" + integer(101) + NIL)
    fake.script["RELEASE"].append(b"*2\r\n" + integer(1) + NIL)
    hold = faked.lock(["a", "b"], lease=60).acquire(30)
    assert hold.lost.wait(30)
    with pytest.raises(holdfast.LockLostError):
        hold.release()
    assert fake.of("ACQUIRE")[0][:4] == [b"LOCK.MACQUIRE", b"2", b"a", b"b"]
    assert fake.of("RENEW")[0][:4] == [b"LOCK.MRENEW", b"2", b"a", b"b"]
    assert fake.of("RELEASE")[0][:4] == [b"LOCK.MRELEASE", b"2", b"a", b"b"]


def test_ephemeral_hold_keeps_its_connection(faked, fake, quick):
    hold = faked.lock("k", lease=60, ephemeral=True).acquire(30)
    faked.lock("j").acquire(30).release()
    until(lambda: fake.of("RENEW"), "it is renewed")
    hold.release()
    mine = {number for _, number, words in fake.seen if words[1] == b"k"}
    others = {number for _, number, words in fake.seen if words[1] == b"j"}
    assert len(mine) == 1
    assert not mine & others


def test_ephemeral_hold_is_lost_with_its_connection(faked, fake, quick):
    fake.script["RENEW"].append(CUT)
    hold = faked.lock("k", lease=60, ephemeral=True).acquire(30)
    assert hold.lost.wait(30)
    with pytest.raises(holdfast.LockLostError) as lost:
        hold.check()
    assert lost.value.reason is LossReason.DISCONNECTED


def test_version_is_asked_once(faked, fake):
    faked.lock("k").acquire(30).release()
    fake.script["VERSION"].append(VERSION)
    for number in range(3):
        assert faked.lock(f"k{number}", ephemeral=True).acquire(30).is_held()
    assert fake.connections >= 3
    assert fake.script["VERSION"], "no connection asks again"


UNKNOWN = error("ERR unknown command 'LOCK.VERSION'")
TOO_NEW = b"*6\r\n$8\r\nprotocol\r\n*2\r\n:5\r\n:6\r\n$7\r\nversion\r\n$5\r\n9.0.0\r\n$16\r\nreplicas-timeout\r\n:1\r\n"


@pytest.mark.parametrize(
    ("version", "acquire", "raised", "text"),
    [
        (UNKNOWN, "ERR unknown command 'LOCK.ACQUIRE'", "ModuleNotLoadedError", "loadmodule"),
        (UNKNOWN, "ERR wrong number of arguments", "ServerTooOldError", "the server's module is too old"),
        (TOO_NEW, "", "ServerTooOldError", "this client is too old: the module is version 9.0.0"),
    ],
    ids=["not-loaded", "too-old", "too-new"],
)
def test_acquire_says_why_the_server_does_not_fit(faked, fake, version, acquire, raised, text):
    fake.script["VERSION"].append(version)
    if acquire:
        fake.script["ACQUIRE"].append(error(acquire))
    with pytest.raises(getattr(holdfast, raised), match=text):
        faked.lock("k").acquire(30)


def test_unknown_elements_and_fields_are_ignored(faked, fake):
    fake.script["VERSION"].append(
        b"*8\r\n$8\r\nprotocol\r\n*3\r\n:4\r\n:4\r\n:9\r\n$7\r\nversion\r\n$5\r\n0.4.0\r\n"
        b"$16\r\nreplicas-timeout\r\n:1000\r\n$3\r\nnew\r\n:1\r\n"
    )
    fake.script["ACQUIRE"].append(b"*3\r\n:7\r\n:0\r\n$3\r\nnew\r\n")
    assert faked.lock("k").acquire(30).fence == 7


def test_errors_say_why_the_server_can_not_be_reached(kind, monkeypatch):
    monkeypatch.setattr(engine, "RELEASE_TIME", 0.5)
    locks = kind.open(kind.redis(1))
    # (For asyncio, redis-py 5.0 has no words for it.)
    refused = f"(refused|Connect call failed|Error {errno.ECONNREFUSED} connecting)"
    with pytest.raises(redis.exceptions.RedisError, match=refused):
        locks.info("k")
    with pytest.raises(holdfast.NotAcquiredError, match=rf"was not acquired within 0\.5 s: .*{refused}"):
        locks.lock("k").acquire(0.5)


@pytest.mark.parametrize(
    ("call", "verb"),
    [
        ("try_acquire", "VERSION"),
        ("try_acquire", "ACQUIRE"),
        ("acquire", "VERSION"),
        ("info", "INFO"),
        ("check", "INFO"),
        ("release", "RELEASE"),
    ],
)
def test_silent_server_causes_the_timeout_error_of_redis_py(faked, fake, impatient, monkeypatch, call, verb):
    monkeypatch.setattr(engine, "RELEASE_TIME", 0.3)
    lock = faked.lock("k", lease=60)
    hold = lock.acquire(30) if call in ("check", "release") else None
    fake.script[verb] = collections.deque([SILENCE] * 1000)
    calls = {
        "try_acquire": lock.try_acquire,
        "acquire": lambda: lock.acquire(0.3),
        "info": lambda: faked.info("k"),
        "check": lambda: hold.check(),
        "release": lambda: hold.release(0.3),
    }
    with pytest.raises((redis.TimeoutError, holdfast.NotAcquiredError)) as raised:
        calls[call]()
    error = raised.value.__cause__ if call == "acquire" else raised.value
    assert type(error) is redis.TimeoutError, "no private class"


def test_waits_end_in_time_when_the_server_is_down(kind, fake):
    opened = kind.open(kind.redis(fake.port))
    opened.lock("k").acquire(30).release()
    fake.close()
    errors = []

    def work(number):
        try:
            opened.lock(f"k{number}").acquire(0.5)
        except holdfast.NotAcquiredError as failure:
            errors.append(failure)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(30)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(40)
    assert len(errors) == 30


def test_attempt_to_connect_that_hangs_does_not_block_a_single_request(faked, kind, fake, impatient, monkeypatch):
    io, ended = faked._engine.io, threading.Event()
    attempts, open_line = itertools.count(), io.open

    async def hang_once(source, address):
        if next(attempts) == 0:
            await asyncio.sleep(60) if isinstance(kind, Tasks) else ended.wait(60)
            raise redis.ConnectionError("too late")
        return await open_line(source, address)

    monkeypatch.setattr(io, "open", hang_once)
    try:
        assert faked.lock("k").acquire(30).is_held()
    finally:
        ended.set()


def test_server_that_accepts_and_closes_is_tried_one_connection_at_a_time(kind, fake):
    opened = kind.open(kind.redis(fake.port))
    opened.lock("k").acquire(30).release()
    fake.script["VERSION"].extend([CUT] * 10_000)
    fake.script["ACQUIRE"].append(CUT)
    # Without a time limit of the caller: on a busy machine, that could be over before the connection breaks.
    with pytest.raises(redis.ConnectionError):
        opened.lock("k").try_acquire()
    before, began = fake.connections, time.monotonic()

    def work(number):
        with pytest.raises(holdfast.NotAcquiredError):
            opened.lock(f"k{number}").acquire(3)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(1000)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(40)
    # Pauses that double from 15 ms leave room for seven attempts in the first second, and for one in each 0.6 s later.
    assert fake.connections - before <= 7 + (time.monotonic() - began) / 0.6
    fake.script["VERSION"].clear()
    assert opened.lock("k").acquire(30).is_held()


def test_given_owner_is_acquired_with_new_and_never_released_with_all(fake):
    with holdfast.Holdfast(redis.Redis(port=fake.port)) as opened:
        lock = lock_class(opened)(redis.Redis(port=fake.port), "k", timeout=60, blocking_timeout=30)
        fake.script["ACQUIRE"].append(SILENCE)
        assert not lock.acquire(blocking_timeout=0.3, token="mine")
        fake.script["ACQUIRE"].clear()
        assert lock.acquire(token="mine")
        lock.release()
    assert all(b"NEW" in words and b"HOLDS" not in words for words in fake.of("ACQUIRE"))
    assert all(words[2] == b"mine" for words in fake.of("ACQUIRE"))
    assert withdrawals(fake) == []


def test_request_with_new_is_not_repeated_when_its_reply_is_lost(fake):
    with holdfast.Holdfast(redis.Redis(port=fake.port)) as opened:
        lock = lock_class(opened)(redis.Redis(port=fake.port), "k", timeout=60, blocking_timeout=30)
        lock.acquire()
        lock.release()
        fake.script["ACQUIRE"].append(CUT)
        with pytest.raises(redis.ConnectionError, match="may be held by b'mine'"):
            lock.acquire(token="mine")
    assert len([words for words in fake.of("ACQUIRE") if words[2] == b"mine"]) == 1


# Closing


def in_thread(function):
    thread = threading.Thread(target=function)
    thread.start()
    return thread


def test_close_releases_a_lock_that_is_granted_meanwhile(faked, kind, fake):
    faked.lock("first").acquire(30)
    is_granted, goes_on = threading.Event(), threading.Event()
    fake.script["ACQUIRE"].append(lambda _: is_granted.wait(60) and granted(9))
    fake.script["RELEASE"].append(lambda _: goes_on.wait(60) and integer(1))
    raised = []

    def acquire():
        try:
            faked.lock("k").acquire(30)
        except (holdfast.HoldfastError, redis.ConnectionError) as failure:
            raised.append(failure)

    acquiring = in_thread(acquire)
    until(lambda: len(fake.of("ACQUIRE")) == 2, "it waits at the server")
    closing = in_thread(lambda: (kind.run if isinstance(kind, Tasks) else io.run)(faked._engine.close(60)))
    until(lambda: fake.of("RELEASE"), "close releases the first one")
    is_granted.set()
    until(lambda: [words[1] for words in fake.of("RELEASE")] == [b"first", b"k"], "it is released")
    goes_on.set()
    acquiring.join(60)
    closing.join(60)
    assert raised


async def test_cancel_between_the_token_and_its_renewal_withdraws(fake, end_tasks, monkeypatch):
    fake.script["ACQUIRE"].append(granted(9, -31_000))
    client = redis.asyncio.Redis(port=fake.port)
    async with holdfast.asyncio.Holdfast(client) as opened:
        sleep, sleeps = opened._engine.io.sleep, asyncio.Event()

        async def endless(seconds):
            sleeps.set()
            await asyncio.sleep(60)

        monkeypatch.setattr(opened._engine.io, "sleep", endless)
        task = asyncio.create_task(opened.lock("k", lease=60).acquire(30))
        await asyncio.wait_for(sleeps.wait(), 30)
        monkeypatch.setattr(opened._engine.io, "sleep", sleep)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await _until(lambda: len(withdrawals(fake)) == 2, "it is withdrawn twice, a second apart")
    await closed(client)


def test_exit_releases_a_hold_whose_loss_a_task_of_the_ended_loop_waits_for(fake):
    loop = asyncio.new_event_loop()

    async def hold():
        client = redis.asyncio.Redis(port=fake.port)
        opened = holdfast.asyncio.Holdfast(client)
        hold = await opened.lock("k", lease=60).acquire(30)
        waiting = asyncio.ensure_future(hold.lost.wait())
        await asyncio.sleep(0)
        for pool in opened._engine.router.all():
            pool.close()
        await closed(client)
        return opened, hold, waiting

    opened, hold, waiting = loop.run_until_complete(hold())
    timers = asyncio.all_tasks(loop) - {waiting}
    for task in timers:
        # The end of the loop releases nothing here: the exit of the process is what is tested.
        opened._engine.release_all, release_all = lambda _: asyncio.sleep(0), opened._engine.release_all
        task.cancel()
        loop.run_until_complete(asyncio.wait([task]))
        opened._engine.release_all = release_all
    loop.close()
    opened._at_exit()
    assert [words[3:] for words in fake.of("RELEASE")] == [[b"TOKEN", b"101"]]
    assert not hold.is_held()


def test_reentrant_lock_is_acquired_anew_when_its_hold_was_released(fake):
    with holdfast.Holdfast(redis.Redis(port=fake.port)) as opened:
        lock = opened.reentrant_lock("k")
        for _ in range(2):
            with lock.acquire(30) as hold:
                assert hold.is_held()
            assert not hold.is_held()
        with lock as hold:
            assert hold.is_held()
    assert len(fake.of("ACQUIRE")) == len(fake.of("RELEASE")) == 3


def test_error_of_the_block_has_precedence_over_the_loss_of_a_reentrant_lock(fake):
    with holdfast.Holdfast(redis.Redis(port=fake.port)) as opened:
        fake.script["RELEASE"].append(NIL)
        with pytest.raises(KeyError), opened.reentrant_lock("k"):
            raise KeyError


def test_force_is_not_repeated_when_its_reply_is_lost(faked, fake):
    faked.lock("k").acquire(30).release()
    fake.script["FORCE"] = collections.deque([CUT])
    with pytest.raises(redis.ConnectionError):
        faked.force("k")
    assert len(fake.of("FORCE")) == 1


def test_force_replaces_a_dead_idle_connection(faked, fake):
    faked.lock("k").acquire(30).release()
    fake.script["VERSION"].append(CUT)
    fake.script["FORCE"] = collections.deque([integer(1)])
    assert faked.force("k") == 1


def test_close_withdraws_an_acquisition_again_when_its_grant_comes_late(faked, fake, monkeypatch):
    # Nothing in this test takes so long, but the machine may be busy.
    monkeypatch.setattr(engine.Engine.close, "__defaults__", (60.0,))
    withdrawn = threading.Event()
    fake.script["ACQUIRE"].append(lambda _: withdrawn.wait(60) and granted(7))
    fake.script["RELEASE"].append(lambda _: withdrawn.set() or NIL)
    with concurrent.futures.ThreadPoolExecutor() as executor:
        acquired = executor.submit(faked.lock("k").acquire, 60)
        until(lambda: fake.of("ACQUIRE"), "it is asked for")
        faked.close()
        with pytest.raises(holdfast.HoldfastError, match="is closed"):
            acquired.result(60)
    first, *later = fake.of("RELEASE")
    assert first[3:] == [b"ALL"]
    assert later, "RELEASE ALL had overtaken the request"


def test_close_sends_nothing_of_acquisitions_that_wait_in_the_client(faked, fake, monkeypatch):
    monkeypatch.setattr(engine.Engine.close, "__defaults__", (60.0,))
    withdrawn = threading.Event()
    fake.script["ACQUIRE"].append(lambda _: withdrawn.wait(60) and NIL)
    fake.script["RELEASE"].append(lambda _: withdrawn.set() or integer(1))
    with concurrent.futures.ThreadPoolExecutor() as executor:
        acquired = [executor.submit(faked.lock("k").acquire, 60) for _ in range(3)]
        until(lambda: fake.of("ACQUIRE"), "the first is asked for")
        faked.close()
        for one in acquired:
            with pytest.raises(holdfast.HoldfastError, match="is closed"):
                one.result(60)
    assert len(fake.of("ACQUIRE")) == 1


def test_close_releases_and_withdraws_at_other_nodes_when_one_is_silent(faked, kind, fake, monkeypatch):
    other = Fake()
    try:
        elsewhere = kind.open(kind.redis(other.port))._engine.router.known(b"k")
        router, known = faked._engine.router, faked._engine.router.known
        monkeypatch.setattr(router, "known", lambda key: known(key) if key == b"silent" else elsewhere)
        for name in ("silent", "held"):
            faked.lock(name).acquire(30)
        fake.script["RELEASE"].append(SILENCE)
        ended = threading.Event()
        other.script["ACQUIRE"].append(lambda _: ended.wait(60) and NIL)
        with concurrent.futures.ThreadPoolExecutor() as executor:
            acquired = executor.submit(faked.lock("asked").acquire, 60)
            until(lambda: len(other.of("ACQUIRE")) == 2, "it is asked for")
            closing = in_thread(lambda: (kind.run if isinstance(kind, Tasks) else io.run)(faked._engine.close(120)))
            try:
                until(lambda: len(other.of("RELEASE")) >= 2, "it is released and withdrawn")
            finally:
                fake.close()
                ended.set()
            with pytest.raises(holdfast.HoldfastError, match="is closed"):
                acquired.result(60)
        closing.join(60)
        assert {(words[1], words[3]) for words in other.of("RELEASE")} == {(b"held", b"TOKEN"), (b"asked", b"ALL")}
    finally:
        other.close()


def test_close_closes_the_connection_of_an_ephemeral_hold(faked, fake):
    hold = faked.lock("k", ephemeral=True).acquire(30)
    pool = hold._grant.pool
    assert pool._lines
    faked.close()
    assert [words[3:] for words in fake.of("RELEASE")] == [[b"TOKEN", b"101"]]
    assert not pool._lines


def test_ephemeral_hold_ends_with_its_connection_when_its_release_is_refused(faked, fake):
    fake.script["RELEASE"].append(error("NOPERM no permission"))
    hold = faked.lock("k", ephemeral=True).acquire(30)
    pool = hold._grant.pool
    with pytest.raises(redis.exceptions.NoPermissionError):
        hold.release()
    assert not pool._lines


@pytest.mark.parametrize("holders", [1, 2])
def test_hold_that_a_check_does_not_find_is_lost_only_if_all_holders_are_listed(faked, fake, holders):
    hold = faked.semaphore("k", 2).acquire(30)
    other = b"*4\r\n$5\r\nowner\r\n$4\r\nelse\r\n$5\r\ntoken\r\n:9\r\n"
    info = b"*4\r\n$7\r\nholders\r\n*1\r\n" + other + b"$12\r\nholder_count\r\n" + integer(holders)
    fake.script["INFO"] = collections.deque([info])
    with contextlib.nullcontext() if holders > 1 else pytest.raises(holdfast.LockLostError):
        hold.check()
    assert hold.is_held() == (holders > 1)


def test_lost_ephemeral_hold_closes_its_connection(faked, fake, quick):
    fake.script["RENEW"].append(NIL)
    hold = faked.lock("k", lease=60, ephemeral=True).acquire(30)
    pool = hold._grant.pool
    assert hold.lost.wait(30)
    until(lambda: not pool._lines, "it is closed")


def test_election_may_be_closed_by_its_callback(faked, kind, fake, monkeypatch):
    monkeypatch.setattr(api, "RELEASE_TIME", 60.0)
    elections = queue.Queue()
    is_closed = threading.Event()

    def on_elected(hold):
        elections.get(timeout=30).close()
        is_closed.set()

    async def on_elected_task(hold):
        await (await asyncio.to_thread(elections.get, timeout=30)).close()
        is_closed.set()

    election = faked.elect("k", on_elected_task if isinstance(kind, Tasks) else on_elected)
    elections.put(getattr(election, "_inner", election))
    assert is_closed.wait(30)


async def _connecting(fake):
    """A client, its Holdfast object, an acquisition whose attempt to connect hangs, and an event that ends that."""
    client = redis.asyncio.Redis(port=fake.port)
    opened = holdfast.asyncio.Holdfast(client)
    asked, goes_on = threading.Event(), threading.Event()
    fake.script["VERSION"].append(lambda _: asked.set() or (goes_on.wait(60) and CUT))
    acquiring = asyncio.create_task(opened.lock("k").acquire(30))
    await _until(asked.is_set, "a connection is being opened")
    return client, opened, acquiring, goes_on


async def test_close_cancels_attempts_to_connect(fake, end_tasks):
    client, opened, acquiring, goes_on = await _connecting(fake)
    await opened.close()
    try:
        assert opened._engine.router.known(b"k")._opening == 0
    finally:
        goes_on.set()
        with pytest.raises((holdfast.HoldfastError, redis.ConnectionError)):
            await acquiring
        await closed(client)


async def test_close_waits_for_the_end_of_its_connections(fake, end_tasks):
    client = redis.asyncio.Redis(port=fake.port)
    opened = holdfast.asyncio.Holdfast(client)
    await (await opened.lock("k").acquire(30)).release()
    [line] = opened._engine.router.known(b"k")._idle
    transport = line.raw._writer.transport
    lose, goes_on = transport._call_connection_lost, asyncio.get_running_loop().call_later
    transport._call_connection_lost = lambda error: goes_on(0.1, lose, error)
    await opened.close()
    assert transport._sock is None
    await closed(client)


async def test_interrupted_attempt_to_connect_is_repeated(fake, end_tasks):
    client, opened, acquiring, goes_on = await _connecting(fake)
    for task in opened._engine.router.known(b"k").attempts:
        task.cancel()
    assert (await acquiring).is_held()
    goes_on.set()
    await opened.close()
    await closed(client)


def test_redlock_withdraws_when_a_connection_breaks_while_the_token_is_raised(kind):
    servers = [Fake() for _ in range(3)]
    try:
        opened = [kind.open(kind.redis(server.port)) for server in servers]
        servers[0].script["RENEW"].append(CUT)
        kind.redlock(opened, "k", lease=60).acquire(30).release()
        for server in servers:
            until(lambda server=server: server.of("RELEASE"), "it is released")
        until(lambda: withdrawals(servers[0]), "nothing is left in the queue")
    finally:
        for server in servers:
            server.close()

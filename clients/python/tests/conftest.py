import itertools
import os
import sys

import pytest
import redis

from fake import Fake
from holdfast import _rules as rules
from kinds import Tasks, Threads, end_others
from proxy import Proxy
from servers import Cluster, Sentinels, Server

# The interpreter switches threads 500 times as often as by default, so that tests find more races.
sys.setswitchinterval(0.00001)

_names = itertools.count(1)


def pytest_configure(config):
    # Before version 8, redis-py leaves the connections of a cluster's nodes that it replaces to the garbage collector.
    if int(redis.VERSION[0]) < 8:
        config.addinivalue_line("filterwarnings", "ignore::pytest.PytestUnraisableExceptionWarning")


def _note_skip(report):
    """Writes skips to the file that HOLDFAST_SKIPS names, for tests/skips.py."""
    path = os.environ.get("HOLDFAST_SKIPS")
    # The workers of xdist report to the process that started them.
    if path and report.skipped and "PYTEST_XDIST_WORKER" not in os.environ:
        why = str(report.longrepr[2]).removeprefix("Skipped: ")
        with open(path, "a", encoding="utf-8") as file:
            file.write(f"{report.nodeid}\t{why}\n")


pytest_runtest_logreport = pytest_collectreport = _note_skip


@pytest.fixture(autouse=True)
def _patient(monkeypatch):
    """Lets no busy machine look like a silent server, unless the test has `impatient`."""
    for name in ("LEAST_SILENCE", "LONGEST_SILENCE", "WAIT_SILENCE", "SUPERSEDED_WITHIN"):
        monkeypatch.setattr(rules, name, 20.0)


@pytest.fixture
def impatient(_patient, monkeypatch):
    """The client soon notices that a server is silent."""
    monkeypatch.setattr(rules, "LEAST_SILENCE", 0.05)
    monkeypatch.setattr(rules, "LONGEST_SILENCE", 0.3)
    monkeypatch.setattr(rules, "WAIT_SILENCE", 0.5)
    monkeypatch.setattr(rules, "SUPERSEDED_WITHIN", 1.0)


@pytest.fixture
def quick(monkeypatch):
    """A hold with a lease of 60 s, longer than any pause of this process, is renewed every 0.15 s."""
    monkeypatch.setattr(rules, "RENEW_AT", 0.0025)


@pytest.fixture(scope="session")
def server():
    """A server that the tests share: each uses names of its own."""
    server = Server()
    yield server
    server.close()


@pytest.fixture
def own_server():
    """A server that the test may do anything to."""
    server = Server(("holdfast.default-lease", "3000"))
    yield server
    server.close()


@pytest.fixture(scope="session")
def cluster():
    cluster = Cluster()
    yield cluster
    cluster.close()


@pytest.fixture
def sentinels():
    sentinels = Sentinels()
    yield sentinels
    sentinels.close()


@pytest.fixture
def name():
    return f"lock:{next(_names)}"


@pytest.fixture(params=[Threads, Tasks], ids=["threads", "asyncio"])
def kind(request):
    kind = request.param()
    yield kind
    kind.close()


@pytest.fixture
def admin(server):
    """A client of redis-py for the shared server."""
    client = server.client()
    yield client
    client.close()


@pytest.fixture
def client(kind, server):
    return kind.open(kind.redis(server.port))


@pytest.fixture
def fake():
    fake = Fake()
    yield fake
    fake.close()


@pytest.fixture
def faked(kind, fake):
    """A Holdfast object at the fake server."""
    return kind.open(kind.redis(fake.port))


@pytest.fixture
def proxy(server):
    proxy = Proxy(server.port)
    yield proxy
    proxy.close()


@pytest.fixture
async def end_tasks():
    """Ends the other tasks of the test's loop, as asyncio.run does."""
    yield
    await end_others()

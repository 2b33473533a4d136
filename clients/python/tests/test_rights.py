"""The user `locker` of docs/operations.md: its rights are enough alone, in a cluster and with Sentinel."""

import re
from pathlib import Path

import pytest
from test_cluster import names_of_each_master

from servers import Sentinels
from test_lock import takes_turns

DOCUMENT = Path(__file__).resolve().parents[3] / "docs" / "operations.md"
LOGIN = {"username": "locker", "password": "secret"}


def make_locker(servers):
    block = DOCUMENT.read_text().split("```acl every-server\n")[1].split("```")[0]
    rights = re.search("^user (locker .*)$", block, re.MULTILINE)[1].split()
    for server in servers:
        server.client().execute_command("ACL", "SETUSER", *rights)


@pytest.fixture
def name(name):
    return f"app:{name}"


def test_alone(kind, own_server, name):
    make_locker([own_server])
    client = kind.client(own_server.port, **LOGIN)
    takes_turns(kind, client, name)
    both = kind.MultiLock([kind.Lock(client, name), kind.Lock(client, f"{name}:other")])
    assert both.acquire()
    both.release()


def test_in_a_cluster(kind, cluster, name):
    make_locker(cluster.nodes)
    client = kind.cluster(cluster.nodes[0].port, **LOGIN)
    for one in names_of_each_master(cluster, name):
        takes_turns(kind, client, one)


def test_with_sentinel(kind, sentinels, name):
    make_locker([sentinels.master, sentinels.replica])
    takes_turns(kind, kind.sentinel(sentinels.sentinel.port, Sentinels.NAME, **LOGIN), name)

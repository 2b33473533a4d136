"""The order of servers that all clients share, in every language: see docs/redlock.md. No I/O."""

from __future__ import annotations

from typing import Any

from redis.crc import key_slot


def server_name(client: Any) -> bytes:
    """What a client's server is called: as it was configured, for nothing is looked up."""
    if is_cluster(client):
        return min(str(name).encode() for name in client.nodes_manager.startup_nodes)
    pool = client.connection_pool
    if hasattr(pool, "service_name"):
        return str(pool.service_name).encode()
    settings = pool.connection_kwargs
    return str(settings.get("path") or f"{settings.get('host', 'localhost')}:{settings.get('port', 6379)}").encode()


def place(client: Any, key: bytes) -> tuple[bytes, int]:
    """Server, and slot in a cluster or else database: what may be taken together, and what is taken first."""
    if is_cluster(client):
        return server_name(client), key_slot(key)
    return server_name(client), int(client.connection_pool.connection_kwargs.get("db") or 0)


def slot_of(key: bytes) -> int:
    """A key's slot in a cluster."""
    return int(key_slot(key))


def is_cluster(client: Any) -> bool:
    """Whether it is a client of a cluster, of either kind."""
    return hasattr(client, "nodes_manager")

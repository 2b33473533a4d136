"""A SQL update that is guarded by a token: a holder that lost its lock without noticing changes nothing.

    DATABASE_URL=postgresql://… python sql_update.py AMOUNT

The row keeps the token of its last writer, and `fence <= token` is part of the update: one row changed, or none. The lock makes writers
wait for each other instead of failing; the token makes sure. A process that is killed blocks others for its lease.
"""
import os
import sys

import holdfast
import psycopg
import redis

client = redis.Redis.from_url(os.environ.get("REDIS_URL", "redis://127.0.0.1:6379"))


def write(database: psycopg.Connection, balance: int, fence: int) -> bool:
    """False if a later holder has written already."""
    done = database.execute("UPDATE account SET balance = %s, fence = %s WHERE id = 7 AND fence <= %s", (balance, fence, fence))
    return done.rowcount == 1


with psycopg.connect(os.environ["DATABASE_URL"], autocommit=True) as database, holdfast.Holdfast(client) as locks:
    database.execute("CREATE TABLE IF NOT EXISTS account (id int PRIMARY KEY, balance int NOT NULL, fence bigint NOT NULL DEFAULT 0)")
    database.execute("INSERT INTO account (id, balance) VALUES (7, 0) ON CONFLICT DO NOTHING")
    with locks.lock("account:7").acquire(30) as hold:
        (balance,) = database.execute("SELECT balance FROM account WHERE id = 7").fetchone()
        print(f"read {balance}", flush=True)
        if sys.stdin.readable() and os.environ.get("PAUSE"):
            sys.stdin.readline()  # Here a process may be paused for longer than its lease.
        if not write(database, balance + int(sys.argv[1]), hold.fence):
            sys.exit("refused: a later holder has written")
print("written", flush=True)

"""An idempotent payment: a customer who clicks twice, and a worker that is killed in the middle, charge once.

    python payment.py PAYMENT CENTS

The lock lets one worker at a time look at a payment. What makes it idempotent is the record: it is written before the provider is called,
and the provider gets the payment's own name as its idempotency key. So the next worker after a killed one repeats the call, and the
provider answers with the charge that there is.
"""
import os
import sys
import time

import holdfast
import redis

payment, cents = sys.argv[1], int(sys.argv[2])
client = redis.Redis.from_url(os.environ.get("REDIS_URL", "redis://127.0.0.1:6379"), decode_responses=True)


def charge(key: str, amount: int) -> str:
    """What stands for the provider: it knows idempotency keys."""
    if client.hsetnx("provider:charges", key, amount):
        client.incrby("provider:total", amount)
    time.sleep(float(os.environ.get("PROVIDER_SECONDS", "0")))
    return f"charge-of-{key}"


with holdfast.Holdfast(client) as locks, locks.lock(f"payment:{payment}", lease=5).acquire(60) as hold:
    record = f"payment:{payment}:record"
    if client.hget(record, "state") == "paid":
        print("paid already:", client.hget(record, "charge"), flush=True)
        sys.exit()
    client.hset(record, mapping={"state": "charging", "cents": cents, "fence": hold.fence})
    print("charging", flush=True)
    done = charge(payment, cents)
    hold.check()  # LockLostError: another worker goes on with it.
    client.hset(record, mapping={"state": "paid", "charge": done})
    print("paid:", done, flush=True)

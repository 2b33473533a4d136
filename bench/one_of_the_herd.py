"""One of the processes of the section herd, with the client for Python: PORT NUMBER HOLDS WAITS."""

import asyncio
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "clients/python/src"))

import holdfast.asyncio as holdfast
import redis.asyncio


async def main(port, number, holds, waits):
    client = redis.asyncio.Redis(port=port)
    held = [holdfast.Lock(client, f"own:{number}:{hold}") for hold in range(holds)]
    for lock in held:
        await lock.acquire()
    locks = [holdfast.Lock(client, f"wanted:{key}") for key in range(waits)]
    waiting = [asyncio.create_task(lock.acquire()) for lock in locks]
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    lost = 0
    for lock in held:
        try:
            lock.check()
        except holdfast.LockError:
            lost += 1
    print(lost, sum(task.done() for task in waiting), flush=True)
    await asyncio.to_thread(sys.stdin.readline)


asyncio.run(main(*map(int, sys.argv[1:])))

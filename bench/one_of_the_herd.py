"""A process of the section herd, with the Python client: PORT NUMBER HOLDS WAITS."""

import asyncio
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "clients/python/src"))

import holdfast.asyncio as holdfast
import redis.asyncio


async def main(port, number, holds, waits):
    client = redis.asyncio.Redis(port=port)
    locks = holdfast.Holdfast(client)
    held = [await locks.lock(f"own:{number}:{hold}").acquire() for hold in range(holds)]
    waiting = [asyncio.create_task(locks.lock(f"wanted:{key}").acquire()) for key in range(waits)]
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    lost = 0
    for hold in held:
        lost += not hold.is_held()
    print(lost, sum(task.done() for task in waiting), flush=True)
    await asyncio.to_thread(sys.stdin.readline)


asyncio.run(main(*map(int, sys.argv[1:])))

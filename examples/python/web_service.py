"""A web service with a lock for each order: two requests for one order run one after the other, on whatever host; others run at once.

    uvicorn web_service:app

A request that would wait for more than two seconds gets 409. A worker that is killed during a request blocks its order for a lease.
"""
import asyncio
import contextlib
import os
from collections.abc import AsyncIterator

import holdfast
import holdfast.asyncio
import redis.asyncio
from fastapi import FastAPI, HTTPException

client = redis.asyncio.Redis.from_url(os.environ.get("REDIS_URL", "redis://127.0.0.1:6379"), decode_responses=True)


@contextlib.asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    async with holdfast.asyncio.Holdfast(client) as locks:
        app.state.locks = locks
        yield
    await client.aclose()


app = FastAPI(lifespan=lifespan)


@app.post("/orders/{order}/items")
async def add_item(order: str) -> dict[str, int]:
    try:
        hold = await app.state.locks.lock(f"order:{order}", lease=5).acquire(2)
    except holdfast.NotAcquiredError:
        raise HTTPException(409, "this order is being changed") from None
    async with hold:
        # Read, compute, write: without the lock, two requests would count one item.
        items = int(await client.get(f"items:{order}") or 0)
        await asyncio.sleep(0.01)
        await client.set(f"items:{order}", items + 1)
        return {"items": items + 1}

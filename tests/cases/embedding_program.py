"""A program whose schedulers are made at import and live through three event loops.

Run as `python -X dev -W error -m cases.embedding_program URL`.
"""

from __future__ import annotations

import asyncio
import signal
import sys
import threading

from sqlalchemy import text
from sqlalchemy.ext.asyncio import create_async_engine

from asyncjobq import Handlers, JobContext, Scheduler

URL = sys.argv[1]
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

handlers = Handlers()


@handlers.handler
async def double(number: int) -> int:
    """Return twice the number."""
    return 2 * number


@handlers.handler
async def double_there(ctx: JobContext, number: int) -> int:
    """Let the database return twice the number."""
    async with ctx.session() as session:
        doubled: int = (await session.execute(text(f"SELECT 2 * {number:d}"))).scalar_one()
        return doubled


closed = Scheduler(URL, handlers=[handlers], queues=["closed"], poll_interval=0.2)
left_open = Scheduler(URL, handlers=[handlers], queues=["left_open"], poll_interval=0.2)
on_engine = Scheduler(
    create_async_engine(URL), handlers=[handlers], queues=["on_engine"], poll_interval=0.2
)


async def serve_once(number: int) -> None:
    """Enqueue, run and wait with each of the schedulers, on a loop that ends afterwards."""
    before = [signal.getsignal(which) for which in SIGNALS]
    async with closed, closed.serving(), left_open.serving(), on_engine.serving():
        for scheduler in (closed, left_open):
            (queue,) = scheduler.settings.queues
            job = await scheduler.enqueue(double_there.job(number), queue=queue)
            assert await scheduler.wait(job, timeout=10) == 2 * number
        job = await on_engine.enqueue(double.job(number), queue="on_engine")
        assert await on_engine.wait(job, timeout=10) == 2 * number
        assert [signal.getsignal(which) for which in SIGNALS] == before
    assert [signal.getsignal(which) for which in SIGNALS] == before


for turn in range(3):
    asyncio.run(serve_once(turn))
    for thread in threading.enumerate():
        if thread is not threading.main_thread():
            thread.join(timeout=5.0)
    assert threading.active_count() == 1, threading.enumerate()
print("done", flush=True)

"""A notification has a size limit, and a failing one takes the transaction of the user with it.

However large the arguments, however long the names and however many the jobs, an enqueue sends at
most a few small notifications.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from sqlalchemy import make_url
from sqlalchemy.ext.asyncio import AsyncSession

from asyncjobq import Handlers, Scheduler
from asyncjobq.backends.postgresql import channel
from asyncjobq.models import tables_for
from cases.workers import POLL, SLACK, MakeEngine, wait_until

MakeDatabase = Callable[[str], str]
JOBS = 1000


async def test_large_jobs_with_long_names(
    make_database: MakeDatabase, make_engine: MakeEngine
) -> None:
    url = make_database("postgresql")
    schema = "s" * 63
    handlers = Handlers()

    @handlers.handler("t" * 128)
    async def measure(text: str) -> int:
        return len(text)

    async with (
        listening(url, schema) as heard,
        Scheduler(url, handlers=[handlers], schema=schema, poll_interval=POLL) as scheduler,
    ):
        await scheduler.create_schema()
        large = await scheduler.enqueue(measure.job("x" * 100_000), group_key="g" * 255)
        await wait_until(lambda: heard, 5.0, "a notification is heard")
        assert len(heard) <= 3
        heard.clear()

        engine = make_engine(url)
        async with AsyncSession(engine) as session:
            specs = [measure.job("x" * 200).options(group_key="g" * 255) for _ in range(JOBS)]
            jobs = await scheduler.enqueue_many(specs, session=session)
            for _ in range(20):
                await scheduler.enqueue(measure.job("alone"), session=session)
            await session.commit()
        await wait_until(lambda: heard, 5.0, "a notification is heard")
        await asyncio.sleep(0.1)
        assert len(heard) <= 3
        assert all(len(payload) < 100 for payload in heard)

        async with scheduler.serving():
            assert await scheduler.wait(large, timeout=10) == 100_000
            assert await scheduler.wait(jobs[-1], timeout=30) == 200
            fresh = await scheduler.enqueue(measure.job("fresh"))
            assert await scheduler.wait(fresh, timeout=2 * POLL + SLACK) == 5


@asynccontextmanager
async def listening(url: str, schema: str) -> AsyncIterator[list[str]]:
    """Listen to what is told of the tables in this schema."""
    import asyncpg

    heard: list[str] = []
    dsn = make_url(url).set(drivername="postgresql").render_as_string(hide_password=False)
    connection = await asyncpg.connect(dsn)
    try:
        await connection.add_listener(
            channel(tables_for(schema)), lambda *parts: heard.append(parts[-1])
        )
        yield heard
    finally:
        await connection.close()

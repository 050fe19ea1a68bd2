"""Callers and jobs are cancelled in the middle of a database call.

The connection must go back to its pool or be closed, and never be handed on with a half-read
reply: the next user would read another's rows. What was being enqueued is there as a whole or not
at all.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import random
from contextlib import suppress

import pytest
from sqlalchemy import func, literal, select, text
from sqlalchemy.ext.asyncio import AsyncEngine
from sqlalchemy.pool import NullPool

from asyncjobq import JobContext, JobRow, JobSpec, Scheduler
from cases.workers import FULL, POLL, SLACK, MakeEngine, wait_until

ROUNDS = 200 if FULL else 40
SLEEP = {"postgresql": "SELECT pg_sleep(1)", "mysql": "SELECT SLEEP(1)"}
SLEEP["mariadb"] = SLEEP["mysql"]
SESSIONS = {
    "postgresql": "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()",
    "mysql": "SELECT count(*) FROM information_schema.processlist WHERE db = DATABASE()",
}
SESSIONS["mariadb"] = SESSIONS["mysql"]


@pytest.mark.requires("server")
async def test_no_connection_is_lost_or_mixed_up(
    prepared_url: str, make_engine: MakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR, "sqlalchemy.pool")
    engine = make_engine(prepared_url, pool_size=2, max_overflow=0)
    observer = make_engine(prepared_url, poolclass=NullPool)
    scheduler = Scheduler(engine, poll_interval=POLL)
    sleep = text(SLEEP[engine.dialect.name])

    @scheduler.handler(timeout=0.05, max_attempts=1)
    async def slow(ctx: JobContext) -> None:
        async with ctx.session() as session:
            await session.execute(sleep)

    @scheduler.handler
    async def trivial() -> int:
        return 7

    async with scheduler, scheduler.serving():
        assert await scheduler.wait(await scheduler.enqueue(trivial.job()), timeout=10) == 7
        before = await count_sessions(observer)
        returned = set()
        for turn in range(ROUNDS):
            slow_job = await scheduler.enqueue(slow.job())
            if await enqueue_and_cancel(scheduler, turn):
                returned.add(f"round {turn}")
            assert (await scheduler.get(slow_job)).type == "slow"
            await check_answer(engine)
        await wait_until(lambda: nothing_runs(scheduler), 30.0, "the slow jobs end")
        assert {job.state for job in await scheduler.find(type="slow", limit=ROUNDS)} == {"failed"}
        found = await batches(observer)
        assert set(found.values()) <= {3}, found
        assert returned <= found.keys()
        assert len(returned) < ROUNDS, "nothing was cancelled in time"
        assert engine.pool.checkedout() == 0  # type: ignore[attr-defined]
        await wait_until(lambda: sessions_are(observer, before + 3), 5.0, f"{before} sessions")
        job = await scheduler.enqueue(trivial.job())
        assert await scheduler.wait(job, timeout=2 * POLL + SLACK) == 7
    await engine.dispose()
    gc.collect()
    assert [record for record in caplog.records if not is_of_opening(record)] == []


async def enqueue_and_cancel(scheduler: Scheduler, turn: int) -> bool:
    """Enqueue three jobs that nobody runs, cancelling it soon; tell whether the call returned."""
    spec = JobSpec[None]("parked").options(name=f"round {turn}")
    task = asyncio.create_task(scheduler.enqueue_many([spec] * 3))
    await asyncio.sleep(random.uniform(0.0, 0.02))
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
        return True
    return False


def is_of_opening(record: logging.LogRecord) -> bool:
    """Tell whether asyncpg speaks of a connection whose opening was cancelled: nobody has it."""
    error = record.exc_info[1] if record.exc_info else None
    return isinstance(error, ConnectionError) and "unexpected connection_lost()" in str(error)


async def check_answer(engine: AsyncEngine) -> None:
    number = random.randrange(2**31)
    async with engine.connect() as connection:
        assert await connection.scalar(select(literal(number))) == number


async def nothing_runs(scheduler: Scheduler) -> bool:
    return not await scheduler.find(type="slow", state=["ready", "leased", "running"], limit=1)


async def batches(observer: AsyncEngine) -> dict[str, int]:
    """Return how many jobs of each round exist."""
    query = select(JobRow.name, func.count()).where(JobRow.type == "parked").group_by(JobRow.name)
    async with observer.connect() as connection:
        return {str(name): count for name, count in await connection.execute(query)}


async def count_sessions(observer: AsyncEngine) -> int:
    async with observer.connect() as connection:
        return int((await connection.execute(text(SESSIONS[observer.dialect.name]))).scalar_one())


async def sessions_are(observer: AsyncEngine, at_most: int) -> bool:
    return await count_sessions(observer) <= at_most

"""The application's pool is smaller than the number of slots, and handlers hold all of it.

The library has connections of its own: leases are renewed and ends are written meanwhile, so that
nothing runs twice and all is done in about the time that the pool allows.
"""

from __future__ import annotations

import asyncio

from sqlalchemy import text

from asyncjobq import JobContext, Scheduler
from cases.log import by_label
from cases.workers import FULL, POLL, SLACK, Case, MakeEngine

POOL, PARENTS, LEASE = 3, 6, 1.0
HOLD = (2.0 if FULL else 1.4) * LEASE


async def test_handlers_hold_every_connection(case: Case, make_engine: MakeEngine) -> None:
    engine = make_engine(case.url, pool_size=POOL, max_overflow=0, pool_timeout=30)
    scheduler = Scheduler(engine, concurrency=10, lease_ttl=LEASE, poll_interval=POLL)

    @scheduler.handler
    async def parent(ctx: JobContext, label: str) -> int:
        case.log.write(label, ctx.attempt, "start")
        async with ctx.session() as session:
            await session.execute(text("SELECT 1"))
            await asyncio.sleep(HOLD)
            child_job = await ctx.enqueue(child.job(label=f"child {label}"), session=session)
            await session.commit()
        return child_job.id

    @scheduler.handler
    async def child(ctx: JobContext, label: str) -> int:
        case.log.write(label, ctx.attempt, "start")
        return ctx.attempt

    async with scheduler, scheduler.serving():
        parents = await scheduler.enqueue_many([parent.job(label=str(n)) for n in range(PARENTS)])
        async with asyncio.timeout(PARENTS / POOL * HOLD + SLACK):
            children = [await scheduler.wait(job) for job in parents]
            assert [await scheduler.wait(job_id) for job_id in children] == [1] * PARENTS
        assert await case.states() == {"done": 2 * PARENTS}
        assert {len(starts) for starts in by_label(case.log.starts()).values()} == {1}
        fresh = await scheduler.enqueue(child.job(label="fresh"))
        assert await scheduler.wait(fresh, timeout=2 * POLL + SLACK) == 1

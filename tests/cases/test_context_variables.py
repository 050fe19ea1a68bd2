"""Context variables of a request, of the lifespan or of another job do not reach a job.

Background tasks inherit the context of whoever makes them: log ids and tenants would be those of
the request that happened to start or wake the worker.
"""

from __future__ import annotations

import asyncio
from contextvars import ContextVar
from typing import Any

from asyncjobq import JobContext, Scheduler
from cases.workers import POLL, SLACK

TENANT: ContextVar[str] = ContextVar("TENANT", default="nobody")


async def test_each_job_begins_with_an_empty_context(prepared_url: str) -> None:
    scheduler = Scheduler(prepared_url, concurrency=3, poll_interval=POLL)

    @scheduler.handler
    async def first(name: str) -> str:
        seen = TENANT.get()
        TENANT.set(name)
        await asyncio.sleep(0)
        return seen

    @scheduler.handler
    async def reports() -> str:
        await asyncio.sleep(0)
        return TENANT.get()

    @scheduler.handler
    def reports_in_a_thread() -> str:
        seen = TENANT.get()
        TENANT.set("left behind in a thread")
        return seen

    @scheduler.handler
    async def sets_for_its_thread(name: str) -> list[str]:
        TENANT.set(name)
        return [TENANT.get(), await asyncio.to_thread(TENANT.get)]

    async def request(number: int) -> str:
        """Enqueue as a web request does, which wakes the worker from this context."""
        TENANT.set(f"request {number}")
        handler = reports if number % 2 else reports_in_a_thread
        return await scheduler.wait(await scheduler.enqueue(handler.job()), timeout=10)

    TENANT.set("lifespan")
    async with scheduler, scheduler.serving():
        job = await scheduler.enqueue(first.job("job 1"))
        assert await scheduler.wait(job, timeout=10) == "nobody"
        seen = await asyncio.gather(*map(request, range(25)))
        assert set(seen) == {"nobody"}
        job_of_own = await scheduler.enqueue(sets_for_its_thread.job("own"))
        assert await scheduler.wait(job_of_own, timeout=10) == ["own", "own"]
        assert TENANT.get() == "lifespan"
        fresh = await scheduler.enqueue(reports.job())
        assert await scheduler.wait(fresh, timeout=2 * POLL + SLACK) == "nobody"


async def test_what_a_middleware_sets_is_its_jobs_in_both_kinds_of_handlers(
    prepared_url: str,
) -> None:
    scheduler = Scheduler(prepared_url, concurrency=3, poll_interval=POLL)

    @scheduler.around
    async def with_tenant(job: JobContext, call: Any) -> Any:
        if "tenant" in job.meta:
            TENANT.set(job.meta["tenant"])
        await asyncio.sleep(0)
        return await call()

    scheduler.meta_from(lambda: {"tenant": TENANT.get()} if TENANT.get() != "nobody" else {})

    @scheduler.handler
    async def reports() -> str:
        await asyncio.sleep(0)
        return TENANT.get()

    @scheduler.handler
    def reports_in_a_thread() -> str:
        seen = TENANT.get()
        TENANT.set("left behind in a thread")
        return seen

    async def request(number: int) -> tuple[str, str]:
        tenant = f"tenant {number}" if number % 3 else "nobody"
        TENANT.set(tenant)
        handler = reports if number % 2 else reports_in_a_thread
        job = await scheduler.enqueue(handler.job())
        return tenant, await scheduler.wait(job, timeout=10)

    async with scheduler, scheduler.serving():
        for tenant, seen in await asyncio.gather(*map(request, range(24))):
            assert seen == tenant

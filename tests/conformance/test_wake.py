"""A scheduler that sleeps: woken by whatever makes a job runnable, long before its next poll."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta

import pytest

from asyncjobq import (
    JobContext,
    Scheduler,
    Snooze,
    constant,
)
from asyncjobq.clock import monotonic
from conformance.kit import Jobs
from conformance.running import serving
from conformance.steps import enqueuing, spec

pytestmark = pytest.mark.asyncio(loop_scope="module")


class TestAnIdleScheduler:
    """Whose next poll is half a minute away."""

    @pytest.fixture
    def idle(self, jobs: Jobs) -> Scheduler:
        return jobs.another(poll_interval=30, concurrency=2)

    @staticmethod
    @asynccontextmanager
    async def asleep(scheduler: Scheduler) -> AsyncIterator[None]:
        async with serving(scheduler, seconds=8):
            await asyncio.sleep(0.15)
            yield

    async def test_starts_at_once_what_is_enqueued_here(self, jobs: Jobs, idle: Scheduler) -> None:
        @idle.handler
        async def work() -> int:
            return 1

        async with self.asleep(idle):
            for scheduler in (idle, jobs.scheduler):
                job = await scheduler.enqueue("work")
                assert await idle.wait(job) == 1

    @pytest.mark.requires("wake")
    async def test_starts_at_once_what_is_enqueued_by_another_process(
        self, jobs: Jobs, idle: Scheduler
    ) -> None:
        @idle.handler
        async def work() -> int:
            return 1

        async with self.asleep(idle):
            (job,) = jobs.elsewhere(enqueuing(spec()))
            assert await idle.wait(job) == 1

    async def test_starts_what_is_due_when_it_is(self, idle: Scheduler) -> None:
        @idle.handler
        async def work() -> int:
            return 1

        async with self.asleep(idle):
            begun = monotonic()
            job = await idle.enqueue(work.job(), run_after=0.3)
            assert await idle.wait(job) == 1
        assert monotonic() - begun >= 0.3

    @pytest.mark.requires("wake")
    async def test_starts_when_it_is_due_what_another_process_put_before_the_rest(
        self, jobs: Jobs, idle: Scheduler
    ) -> None:
        @idle.handler
        async def work() -> int:
            return 1

        async with self.asleep(idle):
            await idle.enqueue(work.job(), run_after=timedelta(hours=1))
            moment = await jobs.now() + timedelta(seconds=0.4)
            (job,) = jobs.elsewhere(enqueuing(spec(run_after=moment)))
            assert await idle.wait(job) == 1
        started = (await jobs.row(job)).started_at
        assert started >= moment

    async def test_retries_when_the_time_has_come(self, idle: Scheduler) -> None:
        @idle.handler(retry=constant(0.1))
        async def work(ctx: JobContext) -> int:
            await asyncio.sleep(0.1)  # until the worker is asleep again
            if ctx.attempt < 3:
                raise ValueError("not yet")
            return ctx.attempt

        async with self.asleep(idle):
            assert await idle.wait(await idle.enqueue(work.job())) == 3

    async def test_wakes_a_job_that_snoozed(self, idle: Scheduler) -> None:
        calls: list[int] = []

        @idle.handler(max_attempts=1)
        async def work(ctx: JobContext) -> int:
            calls.append(ctx.attempt)
            await asyncio.sleep(0.1)  # until the worker is asleep again
            if len(calls) < 3:
                raise Snooze(0.1)
            return ctx.attempt

        async with self.asleep(idle):
            assert await idle.wait(await idle.enqueue(work.job())) == 1
        assert calls == [1, 1, 1]

    async def test_follows_a_chain(self, jobs: Jobs, idle: Scheduler) -> None:
        @idle.handler
        async def work() -> None: ...

        async with self.asleep(idle):
            job = await idle.enqueue(work.job())
            for _ in range(3):
                job = await idle.enqueue(work.job(), depends_on=[job])
            later = await idle.enqueue(work.job(), depends_on=[job], run_after=0.2)
            await idle.wait(later)
        assert await jobs.unsettled() == []

    async def test_finds_what_is_due_by_its_next_poll_if_nobody_wakes_it(self, jobs: Jobs) -> None:
        """And then sleeps no longer than until that."""
        polling = jobs.another(poll_interval=1)

        @polling.handler
        async def work() -> int:
            return 1

        async with self.asleep(polling):
            moment = await jobs.now() + timedelta(seconds=1.3)
            (job,) = jobs.elsewhere(enqueuing(spec(run_after=moment)))
            assert await polling.wait(job) == 1
        assert (await jobs.row(job)).started_at >= moment

    async def test_fills_a_slot_that_becomes_free(self, idle: Scheduler) -> None:
        @idle.handler
        async def work() -> None: ...

        async with self.asleep(idle):
            made = await idle.enqueue_many([work.job()] * 9)
            await asyncio.gather(*(idle.wait(job) for job in made))

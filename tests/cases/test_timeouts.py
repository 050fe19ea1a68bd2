"""A job's deadline, told apart from cancelling and from the handler's own TimeoutError.

In other systems a job that ran out of time was shown as cancelled by the user, or retried without
end; a TimeoutError of an HTTP call looked like the job's own; and what swallowed its cancellation,
or ran in a thread, held the slot for ever or overlapped with its next attempt.
"""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from asyncjobq import Cancelled, Ending, Job, JobContext, Scheduler, State, constant, events
from cases.workers import FULL, LEASE, POLL, SLACK, Case

JOBS = 100 if FULL else 20
TIMEOUT = 0.3


@asynccontextmanager
async def serving(scheduler: Scheduler) -> AsyncIterator[None]:
    """Run jobs in this process, check that fresh ones run at the end, and that it stops in time."""

    @scheduler.handler
    async def fresh() -> int:
        return 7

    async with scheduler, asyncio.timeout(60.0):
        async with scheduler.serving():
            yield
            job = await scheduler.enqueue(fresh.job())
            assert await scheduler.wait(job, timeout=2 * POLL + SLACK) == 7


def worker(case: Case, **settings: Any) -> Scheduler:
    return Scheduler(case.url, lease_ttl=LEASE, poll_interval=POLL, stop_timeout=1.0, **settings)


async def ended(scheduler: Scheduler, job: Job[Any]) -> Job[Any]:
    (found,) = [one async for one in scheduler.as_completed([job], timeout=20.0)]
    return found


async def endings(scheduler: Scheduler, job: Job[Any]) -> list[Ending]:
    return [attempt.ending for attempt in await scheduler.attempts(job)]


async def test_of_the_handlers_own_is_a_failure_like_others(case: Case) -> None:
    scheduler = worker(case)

    @scheduler.handler(timeout=60.0, max_attempts=1)
    async def work() -> None:
        raise TimeoutError("the other side did not answer")

    async with serving(scheduler):
        job = await ended(scheduler, await scheduler.enqueue(work.job()))
        assert job.state == State.FAILED
        assert "the other side did not answer" in (job.error or "")
        assert await endings(scheduler, job) == [Ending.FAILED]


async def test_that_is_past_ends_each_attempt(case: Case) -> None:
    scheduler = worker(case)

    @scheduler.handler(timeout=TIMEOUT, max_attempts=2, retry=constant(0))
    async def work() -> None:
        await asyncio.Event().wait()

    async with serving(scheduler):
        job = await ended(scheduler, await scheduler.enqueue(work.job()))
        assert (job.state, job.error) == (State.FAILED, f"timed out after {TIMEOUT:g} s")
        assert await endings(scheduler, job) == [Ending.TIMED_OUT] * 2


async def test_and_a_request_to_cancel_at_the_same_moment_have_one_reason(case: Case) -> None:
    scheduler = worker(case, concurrency=JOBS)
    started: dict[int, asyncio.Event] = {}
    told: list[events.Event] = []
    scheduler.on(events.TimedOut, events.Failed, events.Cancelled, events.Succeeded)(told.append)

    @scheduler.handler(timeout=TIMEOUT, max_attempts=1)
    async def work(ctx: JobContext) -> None:
        started.setdefault(ctx.job_id, asyncio.Event()).set()
        await asyncio.Event().wait()

    async def cancel(job: Job[Any]) -> Cancelled:
        await started.setdefault(job.id, asyncio.Event()).wait()
        await asyncio.sleep(TIMEOUT + random.uniform(-0.02, 0.02))
        return await scheduler.cancel(job)

    async with serving(scheduler):
        jobs = await scheduler.enqueue_many([work.job()] * JOBS)
        answers = await asyncio.gather(*map(cancel, jobs))
        async for _ in scheduler.as_completed(jobs, timeout=20.0):
            pass
        for made, answer in zip(jobs, answers, strict=True):
            job = await scheduler.get(made)
            late = job.state == State.FAILED
            assert late or (job.state, answer) == (State.CANCELLED, Cancelled.REQUESTED)
            assert job.error == (
                f"timed out after {TIMEOUT:g} s" if late else "cancelled on request"
            )
            reason = Ending.TIMED_OUT if late else Ending.CANCELLED
            assert await endings(scheduler, job) == [reason]
    for made in jobs:
        kinds = [type(event) for event in told if event.job_id == made.id]
        assert kinds in ([events.TimedOut, events.Failed], [events.Cancelled])


async def test_that_is_swallowed_ends_the_attempt_all_the_same(case: Case) -> None:
    """The handler goes on, but without its slot; what it returns at last is ignored."""
    scheduler = worker(case, concurrency=1)
    release, returned = asyncio.Event(), asyncio.Event()

    @scheduler.handler(timeout=TIMEOUT, max_attempts=1)
    async def work() -> str:
        while not release.is_set():
            try:
                await release.wait()
            except asyncio.CancelledError:
                continue
        returned.set()
        return "late"

    @scheduler.handler
    async def behind() -> str:
        return "it has the slot"

    async with serving(scheduler):
        job = await scheduler.enqueue(work.job())
        waiting = await scheduler.enqueue(behind.job())
        before = await ended(scheduler, job)
        assert (before.state, before.result) == (State.FAILED, None)
        assert await scheduler.wait(waiting, timeout=SLACK) == "it has the slot"
        assert not returned.is_set()
        release.set()
        await returned.wait()
        await asyncio.sleep(0)
        assert await scheduler.get(job) == before
        assert await endings(scheduler, job) == [Ending.TIMED_OUT]


async def test_of_a_thread_leaves_it_behind(case: Case) -> None:
    """Both attempts are in their threads at the end, and neither counts as a success."""
    scheduler = worker(case, concurrency=1)
    release, returned = threading.Event(), threading.Semaphore(0)

    @scheduler.handler(timeout=TIMEOUT, max_attempts=2, retry=constant(0))
    def work() -> str:
        release.wait()
        returned.release()
        return "late"

    try:
        async with serving(scheduler):
            job = await ended(scheduler, await scheduler.enqueue(work.job()))
            assert job.state == State.FAILED
            assert await endings(scheduler, job) == [Ending.TIMED_OUT] * 2
            release.set()
            for _ in range(2):
                await asyncio.to_thread(returned.acquire)
            assert await scheduler.get(job) == job
    finally:
        release.set()


async def test_that_is_swallowed_for_ever_does_not_hold_up_the_end(case: Case) -> None:
    """Stopping waits for what has a slot, and for its stop timeout."""
    scheduler = worker(case, concurrency=1)
    running, release = asyncio.Event(), asyncio.Event()

    @scheduler.handler(timeout=60.0, max_attempts=1)
    async def work() -> None:
        running.set()
        while not release.is_set():
            try:
                await release.wait()
            except asyncio.CancelledError:
                continue

    async with scheduler, asyncio.timeout(1.0 + LEASE + 2 * SLACK):
        async with scheduler.serving():
            job = await scheduler.enqueue(work.job())
            await running.wait()
        assert (await scheduler.get(job)).state in (State.LEASED, State.RUNNING)
        release.set()
    await asyncio.sleep(0)
    async with serving(second := worker(case)):
        second.handler("work", max_attempts=1)(lambda: None)
        assert (await ended(second, job)).state == State.FAILED
        assert await endings(second, job) == [Ending.LEASE_LOST]

"""Settling in a worker: at once after an end, and soon where somebody held a row."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import Any

import pytest
from sqlalchemy import Connection, select

from asyncjobq import Job, Scheduler, State
from asyncjobq.backends.base import Backend
from asyncjobq.finalize import Finished
from asyncjobq.outbox import Outbox
from asyncjobq.settle import Settled, Sweep
from asyncjobq.writer import OutcomeWriter
from conformance.kit import Jobs
from conformance.running import until
from conformance.runs import given
from conformance.steps import Step, failed, succeeded

pytestmark = pytest.mark.asyncio(loop_scope="module")

READY, BLOCKED, DONE, CANCELLED = State.READY, State.BLOCKED, State.DONE, State.CANCELLED


async def write(jobs: Jobs, outbox: Outbox, item: Finished) -> Any:
    """Have a writer write one outcome; return what it was told."""
    writer = OutcomeWriter(jobs.database, outbox)
    told = given(writer, item)
    await asyncio.sleep(0)
    async with jobs.limited_time():
        await writer.write_once()
        return await told


class TestAnEnd:
    async def test_is_settled_before_its_slot_is_free(self, jobs: Jobs) -> None:
        first = await jobs.leased()
        behind = await jobs.enqueue(depends_on=[first.lease.job_id])
        outbox, seen = Outbox(jobs.database), list[Settled]()
        outbox.on_settled = seen.append
        assert await write(jobs, outbox, Finished(first.lease, succeeded(1))) is DONE
        assert await jobs.state(behind) == READY
        assert [settled.promoted for settled in seen] == [1]

    async def test_leaves_nothing_to_a_sweep_if_all_is_told(self, jobs: Jobs) -> None:
        first = await jobs.leased()
        await jobs.enqueue(depends_on=[first.lease.job_id])
        await jobs.settle()
        outbox = Outbox(jobs.database)
        await write(jobs, outbox, Finished(first.lease, succeeded(1)))
        assert not outbox.left.is_set()
        assert await jobs.unsettled() == []

    async def test_leaves_to_a_sweep_what_follows_from_what_followed(self, jobs: Jobs) -> None:
        first = await jobs.leased()
        second = await jobs.enqueue(depends_on=[first.lease.job_id])
        third = await jobs.enqueue(depends_on=[second])
        outbox, sweep = Outbox(jobs.database), Sweep()
        await write(jobs, outbox, Finished(first.lease, failed()))
        assert await jobs.states(second, third) == [CANCELLED, BLOCKED]
        assert outbox.left.is_set()
        while not sweep.over:
            await outbox.sweep(sweep)
        assert await jobs.state(third) == CANCELLED
        assert not sweep.held

    async def test_is_written_although_it_cannot_be_settled(self, jobs: Jobs) -> None:
        first = await jobs.leased()
        await jobs.enqueue(depends_on=[first.lease.job_id])
        outbox = Outbox(jobs.database)

        def broken(*_: object, **_which: object) -> Settled:
            raise RuntimeError("no settling today")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("asyncjobq.outbox.settle_once", broken)
            assert await write(jobs, outbox, Finished(first.lease, succeeded(1))) is DONE
        assert outbox.left.is_set()
        assert first.lease.job_id in await jobs.unsettled()

    async def test_of_a_job_alone_is_not_settled_at_all(self, jobs: Jobs) -> None:
        alone = await jobs.leased()
        outbox, seen = Outbox(jobs.database), list[Settled]()
        outbox.on_settled = seen.append
        assert await write(jobs, outbox, Finished(alone.lease, succeeded(1))) is DONE
        await asyncio.sleep(0)
        assert seen == []
        assert not outbox.left.is_set()


@pytest.mark.requires("row_locks")
class TestWhatSomebodyHolds:
    async def test_is_settled_soon_after(self, jobs: Jobs) -> None:
        """Without waiting for the poll, which is a minute off."""
        scheduler = jobs.another(poll_interval=60.0, concurrency=1)

        @scheduler.handler("work")
        async def work() -> None: ...

        first = await jobs.enqueue()
        held = await jobs.enqueue("other", depends_on=[first])
        await jobs.settle()
        async with jobs.limited_time(), AsyncExitStack() as stack:
            async with jobs.transaction() as take:
                await take(locking(held))
                await stack.enter_async_context(scheduler.serving())
                await tried_to_settle(scheduler)
                assert await jobs.states(first, held) == [DONE, BLOCKED]
            await until(lambda: is_ready(jobs, held))


async def tried_to_settle(scheduler: Scheduler) -> None:
    """Wait for the next settling of a scheduler's worker."""
    assert scheduler._worker is not None
    outbox, tried = scheduler._worker._outbox, asyncio.Event()
    note = outbox.on_settled
    outbox.on_settled = lambda settled: (note(settled), tried.set())[1]
    await tried.wait()


def locking(job: Job[Any]) -> Step[None]:
    """Lock a job's row, as an operator at a prompt might."""

    def step(connection: Connection, backend: Backend) -> None:
        jobs = backend.tables.jobs
        connection.execute(select(jobs.c.id).where(jobs.c.id == job.id).with_for_update())

    return step


async def is_ready(jobs: Jobs, job: Job[Any]) -> bool:
    return await jobs.state(job) == READY

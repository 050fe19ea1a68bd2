"""Cancelling what runs, long before the next renewal of its lease; and many jobs by filter."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import pytest
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession

from asyncjobq import (
    Cancelled,
    ConfigurationError,
    Ending,
    JobCancelled,
    JobContext,
    Scheduler,
    State,
)
from asyncjobq.control import cancel_job, retry_job
from asyncjobq.control_many import cancel_once, retry_once, to_cancel, to_retry
from asyncjobq.heartbeat import Heartbeat
from asyncjobq.inspection import Filter
from asyncjobq.lease import asked_to_end
from conformance.kit import ISOLATION_LEVELS, Jobs
from conformance.meanwhile import moments_of_a_caller
from conformance.running import Latch, serving
from conformance.steps import (
    TTL,
    claiming,
    enqueuing,
    failed,
    holding,
    ids_of,
    impostor,
    settling,
    spec,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")

READY, BLOCKED, DONE = State.READY, State.BLOCKED, State.DONE
FAILED, CANCELLED = State.FAILED, State.CANCELLED


def patient(jobs: Jobs, *, concurrency: int = 1, poll_interval: float = 30) -> Scheduler:
    """Return a worker whose leases last for hours, and that looks for news twice a minute."""
    times: dict[str, Any] = {"lease_ttl": 3 * 3600, "stop_timeout": 0.5}
    return jobs.another(concurrency=concurrency, poll_interval=poll_interval, **times)


class TestRunning:
    """Whose lease is not renewed, by which it would hear of it too."""

    @pytest.fixture(autouse=True)
    def unrenewed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        async def nothing(_: Heartbeat) -> None: ...

        monkeypatch.setattr(Heartbeat, "renew_once", nothing)

    @pytest.mark.parametrize("by", ["the same scheduler", "another in the process"])
    async def test_in_this_process(self, jobs: Jobs, by: str) -> None:
        worker = patient(jobs)
        latch = Latch(worker)
        async with serving(worker):
            job = await latch.enqueue(worker)
            caller = worker if by == "the same scheduler" else jobs.scheduler
            assert await caller.cancel(job) is Cancelled.REQUESTED
            with pytest.raises(JobCancelled):
                await worker.wait(job)
            assert latch.cancelled == 1
            (attempt,) = await worker.attempts(job)
            assert attempt.ending is Ending.CANCELLED

    @pytest.mark.requires("wake")
    async def test_by_another_process(self, jobs: Jobs) -> None:
        await self.cancelled_from_elsewhere(jobs, poll_interval=30)

    async def test_by_another_process_at_the_next_poll(self, jobs: Jobs) -> None:
        await self.cancelled_from_elsewhere(jobs, poll_interval=0.1)

    @staticmethod
    async def cancelled_from_elsewhere(jobs: Jobs, poll_interval: float) -> None:
        worker = patient(jobs, poll_interval=poll_interval)
        latch = Latch(worker)
        async with serving(worker):
            await asyncio.sleep(0.1)  # until it listens
            job = await latch.enqueue(worker)
            answer = jobs.elsewhere(lambda c, b: cancel_job(c, b, job.id))
            assert answer is Cancelled.REQUESTED
            with pytest.raises(JobCancelled):
                await worker.wait(job)

    async def test_with_its_container(self, jobs: Jobs) -> None:
        worker = patient(jobs)
        latch = Latch(worker)
        async with serving(worker):
            async with worker.workflow("nightly") as nightly:
                nightly.add(latch.handler.job())
            await latch.running.wait()
            assert await worker.cancel(nightly) is Cancelled.REQUESTED
            with pytest.raises(JobCancelled):
                await worker.wait(nightly)
            assert latch.cancelled == 1

    async def test_by_the_failure_of_another_in_its_container(self, jobs: Jobs) -> None:
        worker = patient(jobs, concurrency=2)
        latch = Latch(worker)

        @worker.handler(max_attempts=1)
        async def fail() -> None:
            await latch.running.wait()
            raise ValueError

        async with serving(worker):
            async with worker.workflow("nightly", fail_fast=True) as nightly:
                other = nightly.add(latch.handler.job())
                nightly.add(fail.job())
            with pytest.raises(JobCancelled):
                await worker.wait(other)

    async def test_that_cleans_up_keeps_its_lease_meanwhile(self, jobs: Jobs) -> None:
        worker = patient(jobs, poll_interval=0.1)
        running, cleaned, asked = asyncio.Event(), asyncio.Event(), asyncio.Event()

        @worker.handler
        async def work(ctx: JobContext) -> None:
            try:
                running.set()
                await asyncio.sleep(60)
            finally:
                assert ctx.cancel_requested
                asked.set()
                await cleaned.wait()

        async with serving(worker):
            job = await worker.enqueue(work.job())
            await running.wait()
            await worker.cancel(job)
            await asked.wait()
            assert await worker.cancel(job) is Cancelled.REQUESTED
            assert (await jobs.row(job)).in_flight
            cleaned.set()
            with pytest.raises(JobCancelled):
                await worker.wait(job)

    async def test_in_a_transaction_that_is_rolled_back(
        self, jobs: Jobs, session: AsyncSession
    ) -> None:
        claimed = await jobs.leased()
        answer = await jobs.scheduler.cancel(claimed.lease.job_id, session=session)
        assert answer is Cancelled.REQUESTED
        await session.rollback()
        assert not (await jobs.row(claimed)).cancel_requested
        await jobs.finish(claimed)
        assert await jobs.state(claimed) == DONE

    @pytest.mark.parametrize("wrong", ["owner", "token", "id"])
    async def test_asks_nothing_of_a_later_lease(self, jobs: Jobs, wrong: str) -> None:
        claimed = await jobs.leased()
        await jobs.do(lambda c, b: cancel_job(c, b, claimed.lease.job_id))
        both = [claimed.lease, impostor(claimed.lease, wrong)]
        for lease in both:
            asked = await jobs.do(partial(asked_to_end, leases=[lease]))
            assert asked == ({lease} if lease == claimed.lease else set())

    async def test_does_not_reach_the_run_after_a_retry(self, jobs: Jobs) -> None:
        claimed = await jobs.leased()
        await jobs.finish(claimed, outcome=failed())
        assert await jobs.scheduler.cancel(claimed.lease.job_id) is Cancelled.ENDED
        await jobs.scheduler.retry(claimed.lease.job_id)
        await jobs.settle()
        again = await jobs.claim_one()
        assert await jobs.do(partial(asked_to_end, leases=[again.lease])) == set()
        await jobs.finish(again)
        assert await jobs.state(again) == DONE


@pytest.mark.requires("server")
async def test_what_a_caller_cannot_see_is_cancelled_too(
    jobs: Jobs, application: AsyncEngine
) -> None:
    """An old snapshot of the caller's lacks a dependant that was enqueued meanwhile."""
    for level in ISOLATION_LEVELS[jobs.backend_name]:
        if level == "SERIALIZABLE" and jobs.backend_name != "postgresql":
            continue  # there it locks all that it reads
        first = await jobs.enqueue()
        container = (await jobs.do(enqueuing(spec())))[0]
        engine = application.execution_options(isolation_level=level)
        async with AsyncSession(engine) as session:
            await session.execute(select(jobs.tables.jobs.c.id))
            behind = await jobs.enqueue(depends_on=[first])
            await jobs.settle()
            await jobs.scheduler.cancel(first, session=session)
            await session.commit()
        await jobs.settle()
        assert await jobs.states(first, behind, container) == [CANCELLED, CANCELLED, READY]


class TestManyAreCancelled:
    async def test_as_far_as_they_match(self, jobs: Jobs) -> None:
        running = await jobs.leased(group_key="acme")
        ready = await jobs.enqueue(group_key="acme")
        scheduled = await jobs.enqueue(group_key="acme", run_after=60.0)
        blocked = await jobs.enqueue(depends_on=[scheduled])
        others = [
            await jobs.enqueue(group_key="Acme"),
            await jobs.enqueue("other", group_key="acme"),
            await jobs.enqueue(group_key="acme", queue="other"),
        ]
        done = await jobs.scheduler.cancel_many(group_key="acme", type="work", queue="default")
        assert done == {Cancelled.CANCELLED: 2, Cancelled.REQUESTED: 1}
        await jobs.settle()
        assert await jobs.states(ready, scheduled, blocked) == [CANCELLED] * 3
        assert (await jobs.row(running)).cancel_requested
        assert await jobs.states(*others) == [READY] * 3
        done = await jobs.scheduler.cancel_many(group_key="acme", type="work", queue="default")
        assert set(done.values()) == {0}

    async def test_of_some_states(self, jobs: Jobs) -> None:
        ready, scheduled = await jobs.enqueue(), await jobs.enqueue(run_after=60.0)
        await jobs.scheduler.cancel_many(state=["scheduled", State.BLOCKED])
        assert await jobs.states(ready, scheduled) == [READY, CANCELLED]

    async def test_in_steps(self, jobs: Jobs) -> None:
        made = await jobs.enqueue_many(5)
        series = to_cancel(Filter(type="work"))
        counts = []
        while not series.over:
            answers, series = await jobs.do(partial(cancel_once, series=series, limit=2))
            counts.append(len(answers))
            await jobs.enqueue()  # comes too late
        assert counts == [2, 2, 1]
        assert await jobs.states(*made) == [CANCELLED] * 5

    async def test_with_containers(self, jobs: Jobs) -> None:
        async with jobs.scheduler.workflow("nightly", queue="night") as nightly:
            inside = nightly.add(spec())
        await jobs.scheduler.cancel_many(queue="night")
        await jobs.settle()
        assert await jobs.states(nightly.id, inside.id) == [CANCELLED] * 2

    @pytest.mark.requires("row_locks")
    async def test_and_what_somebody_holds_at_the_end(self, jobs: Jobs) -> None:
        held = await jobs.leased()
        free = await jobs.enqueue_many(3)
        series = to_cancel(Filter(queue="default"))
        async with jobs.limited_time():
            async with jobs.transaction() as take:
                await take(holding(held))
                answers, series = await jobs.do(partial(cancel_once, series=series))
                assert answers == {job.id: Cancelled.CANCELLED for job in free}
                assert series.held == (held.lease.job_id,)
            answers, series = await jobs.do(partial(cancel_once, series=series))
        assert (answers, series.over) == ({held.lease.job_id: Cancelled.REQUESTED}, True)
        assert await jobs.states(*free) == [CANCELLED] * 3

    async def test_in_a_transaction_of_the_caller(self, jobs: Jobs, session: AsyncSession) -> None:
        made = await jobs.enqueue_many(3)
        cancel = partial(jobs.scheduler.cancel_many, type="work", session=session)
        assert (await cancel())[Cancelled.CANCELLED] == 3
        await session.rollback()
        assert await jobs.states(*made) == [READY] * 3
        await cancel()
        await session.commit()
        assert await jobs.states(*made) == [CANCELLED] * 3

    async def test_and_told_what_became_of_them_at_any_moment_of_a_claim(
        self, jobs: Jobs, application: AsyncEngine
    ) -> None:
        """Also in a transaction of the caller that has read before it locks anything."""
        job = await jobs.enqueue()
        async for moment in moments_of_a_caller(jobs, application, claiming()):
            answers = await jobs.scheduler.cancel_many(type="work", session=moment.session)
            await moment.session.commit()
            row = await jobs.row(job)
            if moment.result:
                assert (row.state, row.cancel_requested) == (State.LEASED, True)
                assert answers == {Cancelled.CANCELLED: 0, Cancelled.REQUESTED: 1}
            else:
                assert row.state == CANCELLED
                assert answers == {Cancelled.CANCELLED: 1, Cancelled.REQUESTED: 0}
            job = await jobs.enqueue()

    async def test_but_not_by_mistake(self, jobs: Jobs) -> None:
        job = await jobs.enqueue()
        wrong: list[dict[str, Any]] = [{}, {"state": "done"}, {"state": "bogus"}]
        for filters in wrong:
            with pytest.raises(ConfigurationError):
                await jobs.scheduler.cancel_many(**filters)
        assert await jobs.state(job) == READY


class TestManyAreRetried:
    async def test_as_far_as_they_match(self, jobs: Jobs) -> None:
        chosen = [await jobs.leased(group_key="acme"), await jobs.leased(group_key="acme")]
        others = [await jobs.leased(), await jobs.leased("other", group_key="Acme")]
        behind = await jobs.enqueue(depends_on=[chosen[0].lease.job_id])
        await jobs.settle()
        await jobs.finish(*chosen, *others, outcome=failed())
        await jobs.settle()
        assert await jobs.state(behind) == CANCELLED
        assert await jobs.scheduler.retry_many(group_key="acme") == 2
        await jobs.settle()
        assert await jobs.states(*chosen, behind) == [READY, READY, BLOCKED]
        assert await jobs.states(*others) == [FAILED] * 2
        assert await jobs.scheduler.retry_many(group_key="acme") == 0

    async def test_of_the_states_that_are_named(self, jobs: Jobs) -> None:
        bad, cancelled = await jobs.leased(), await jobs.enqueue()
        await jobs.finish(bad, outcome=failed())
        await jobs.scheduler.cancel(cancelled)
        assert await jobs.scheduler.retry_many(state="cancelled") == 1
        await jobs.settle()
        assert await jobs.states(bad, cancelled) == [FAILED, READY]
        assert await jobs.scheduler.retry_many(state=["failed", "cancelled"]) == 1

    async def test_with_their_container(self, jobs: Jobs) -> None:
        async with jobs.scheduler.workflow("nightly") as nightly:
            inside = [nightly.add(spec()) for _ in range(3)]
        claimed = await jobs.claim(3)
        await jobs.finish(*claimed[:2], outcome=failed())
        await jobs.finish(claimed[2])
        await jobs.settle()
        assert await jobs.state(nightly.id) == FAILED
        assert await jobs.scheduler.retry_many(type="work") == 2
        await jobs.settle()
        assert await jobs.states(nightly.id) == [State.WAITING]
        await jobs.run_all()
        assert await jobs.states(nightly.id, *(node.id for node in inside)) == [DONE] * 4

    @pytest.mark.requires("row_locks")
    @pytest.mark.parametrize("which", ["the job", "its container"])
    async def test_and_what_somebody_holds_at_the_end(self, jobs: Jobs, which: str) -> None:
        async with jobs.scheduler.workflow("nightly") as nightly:
            inside = nightly.add(spec())
        await jobs.run_all(failed())
        held = inside.id if which == "the job" else nightly.id
        series = to_retry(Filter(state="failed"))

        async def locked(take: Callable[[Any], Awaitable[Any]]) -> None:
            row = select(jobs.tables.jobs.c.id).where(jobs.tables.jobs.c.id == held)
            await take(lambda c, _: c.execute(row.with_for_update()))

        async with jobs.limited_time():
            async with jobs.transaction() as take:
                await locked(take)
                retried, series = await jobs.do(partial(retry_once, series=series))
                assert (retried, series.held) == (0, (inside.id,))
            retried, series = await jobs.do(partial(retry_once, series=series))
        assert (retried, series.over) == (1, True)
        await jobs.settle()
        assert await jobs.states(inside.id, nightly.id) == [READY, State.WAITING]

    async def test_in_steps(self, jobs: Jobs) -> None:
        made = await jobs.enqueue_many(5)
        await jobs.run_all(failed())
        series, counts = to_retry(Filter()), []
        while not series.over:
            count, series = await jobs.do(partial(retry_once, series=series, limit=2))
            counts.append(count)
        assert counts == [2, 2, 1]
        await jobs.settle()
        assert ids_of(await jobs.claim(5)) == ids_of(made)

    async def test_in_a_transaction_of_the_caller(self, jobs: Jobs, session: AsyncSession) -> None:
        bad = await jobs.leased()
        await jobs.finish(bad, outcome=failed())
        assert await jobs.scheduler.retry_many(session=session) == 1
        await session.rollback()
        assert await jobs.state(bad) == FAILED
        await jobs.scheduler.retry_many(session=session)
        await session.commit()
        await jobs.settle()
        assert await jobs.state(bad) == READY

    async def test_once_at_any_moment_of_another_retry(
        self, jobs: Jobs, application: AsyncEngine
    ) -> None:
        """What is run again by somebody else, and claimed, is not taken from its worker."""

        def retry_and_claim(connection: Any, backend: Any) -> list[Any]:
            retry_job(connection, backend, job.lease.job_id)
            settling(connection, backend)
            return claiming()(connection, backend)

        job = await jobs.leased()
        await jobs.finish(job, outcome=failed())
        engine = application
        if jobs.backend_name != "sqlite":
            engine = engine.execution_options(isolation_level="READ COMMITTED")
        async for moment in moments_of_a_caller(jobs, engine, retry_and_claim):
            await jobs.scheduler.retry_many(session=moment.session)
            await moment.session.commit()
            await jobs.settle()
            (claimed,) = moment.result or await jobs.claim()
            assert (await jobs.row(job)).lease_token == claimed.lease.token
            assert len((await jobs.finish(claimed)).written) == 1
            job = await jobs.leased()
            await jobs.finish(job, outcome=failed())

    @pytest.mark.parametrize("state", ["done", "ready", "bogus", ["failed", "running"]])
    async def test_but_not_what_cannot_be(self, jobs: Jobs, state: Any) -> None:
        with pytest.raises(ConfigurationError):
            await jobs.scheduler.retry_many(state=state)


async def test_lost_workers_jobs_that_were_to_be_cancelled_are(jobs: Jobs) -> None:
    claimed = await jobs.leased()
    await jobs.scheduler.cancel(claimed.lease.job_id)
    jobs.later(TTL + 1)
    await jobs.reclaim()
    assert await jobs.state(claimed) == CANCELLED
    (attempt,) = await jobs.scheduler.attempts(claimed.lease.job_id)
    assert attempt.ending is Ending.LEASE_LOST

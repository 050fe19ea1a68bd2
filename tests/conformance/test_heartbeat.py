"""Keeping leases: which are renewed and when, and what becomes of a job whose lease is not."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from sqlalchemy import update

from asyncjobq import DatabaseUnavailableError, JobCancelled, State
from asyncjobq.clock import monotonic
from asyncjobq.heartbeat import Heartbeat
from asyncjobq.lease import Claimed
from asyncjobq.outcomes import Ending
from asyncjobq.run import JobRun, Stop
from conformance.kit import Jobs
from conformance.running import serving, until
from conformance.runs import ended, run_of, wait_for_ever
from conformance.steps import TTL, holding

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture
def heartbeat(jobs: Jobs) -> Heartbeat:
    return Heartbeat(jobs.database, TTL)


def kept(heartbeat: Heartbeat, claimed: Claimed, *, age: float, timeout: float = 60.0) -> JobRun:
    """Keep a lease that was claimed `age` seconds ago."""
    run = run_of(wait_for_ever, timeout=timeout)
    run.claimed = claimed
    heartbeat.add(run, monotonic())
    heartbeat._beats[claimed.lease].leased_at -= age
    return run


async def expires_in(jobs: Jobs, claimed: Claimed) -> float:
    left = (await jobs.row(claimed)).lease_expires - await jobs.now()
    return float(left.total_seconds())


async def test_renews_soon_after_the_start_and_then_at_a_third(
    jobs: Jobs, heartbeat: Heartbeat
) -> None:
    claimed = await jobs.leased()
    kept(heartbeat, claimed, age=0)
    await heartbeat.renew_once()
    assert await jobs.state(claimed) == State.LEASED
    heartbeat.remove(claimed.lease)
    kept(heartbeat, claimed, age=2)
    jobs.later(5)
    await heartbeat.renew_once()
    assert await jobs.state(claimed) == State.RUNNING
    assert await expires_in(jobs, claimed) == pytest.approx(TTL, abs=2)
    jobs.later(5)
    await heartbeat.renew_once()
    assert await expires_in(jobs, claimed) == pytest.approx(TTL - 5, abs=2)


async def test_renews_all_that_are_due_in_one_transaction(
    jobs: Jobs, heartbeat: Heartbeat, monkeypatch: pytest.MonkeyPatch
) -> None:
    await jobs.enqueue_many(4)
    claimed = await jobs.claim(4)
    for job in claimed:
        kept(heartbeat, job, age=2)
    calls: list[Any] = []
    run = jobs.database.run

    async def counted(work: Any, **how: Any) -> Any:
        calls.append(work)
        return await run(work, **how)

    monkeypatch.setattr(jobs.database, "run", counted)
    await heartbeat.renew_once()
    assert len(calls) == 1
    monkeypatch.undo()
    assert await jobs.states(*claimed) == [State.RUNNING] * 4


async def test_does_not_renew_after_the_deadline_of_the_job(
    jobs: Jobs, heartbeat: Heartbeat
) -> None:
    """A handler that hangs loses its job, even one that swallows its cancellation."""
    hung, healthy = await jobs.leased(), await jobs.leased()
    kept(heartbeat, hung, age=2, timeout=1e-9)
    kept(heartbeat, healthy, age=2)
    jobs.later(5)
    await heartbeat.renew_once()
    assert await expires_in(jobs, hung) == pytest.approx(TTL - 5, abs=2)
    assert await expires_in(jobs, healthy) == pytest.approx(TTL, abs=2)
    jobs.later(TTL - 4)
    assert await jobs.reclaim() == [hung.lease.job_id]


async def test_stops_the_handler_of_a_lease_that_is_lost(jobs: Jobs, heartbeat: Heartbeat) -> None:
    lost, healthy = await jobs.leased(), await jobs.leased()
    runs = [kept(heartbeat, claimed, age=2) for claimed in (lost, healthy)]
    await jobs.finish(lost)
    await heartbeat.renew_once()
    assert [run.stopped for run in runs] == [Stop.LEASE_LOST, None]


async def test_stops_the_handler_of_a_job_that_is_to_be_cancelled(
    jobs: Jobs, heartbeat: Heartbeat
) -> None:
    claimed = await jobs.leased()
    run = kept(heartbeat, claimed, age=2)
    await jobs.spoil(claimed, cancel_requested=True)
    await heartbeat.renew_once()
    assert run.stopped is Stop.CANCELLED


async def test_says_nothing_of_a_lease_whose_job_has_just_ended(
    jobs: Jobs, heartbeat: Heartbeat, caplog: pytest.LogCaptureFixture
) -> None:
    """Its outcome is committed, and those behind it are being told: its slot is not free yet."""
    ended = await jobs.leased()
    run = kept(heartbeat, ended, age=2 * TTL)
    run.over = True
    await jobs.finish(ended)
    await heartbeat.renew_once()
    await heartbeat.expire_once()
    assert caplog.messages == []


@pytest.mark.requires("row_locks")
async def test_a_lease_whose_row_somebody_holds_is_not_lost(
    jobs: Jobs, heartbeat: Heartbeat
) -> None:
    """However long: nobody else can take it, and it is renewed as soon as it is free."""
    claimed = await jobs.leased()
    run = kept(heartbeat, claimed, age=TTL * 2)
    async with jobs.limited_time(), jobs.transaction() as take:
        await take(holding(claimed))
        await heartbeat.renew_once()
        await heartbeat.expire_once()
    assert run.stopped is None
    await heartbeat.renew_once()
    await heartbeat.expire_once()
    assert run.stopped is None
    assert await jobs.state(claimed) == State.RUNNING


async def test_a_lease_whose_row_was_held_a_while_ago_is_lost_in_time(
    jobs: Jobs, heartbeat: Heartbeat
) -> None:
    run = kept(heartbeat, await jobs.leased(), age=TTL * 2)
    (beat,) = heartbeat._beats.values()
    beat.held_at = monotonic() - 3 * heartbeat.step
    await heartbeat.expire_once()
    assert run.stopped is Stop.LEASE_LOST


async def test_a_lease_that_could_not_be_renewed_in_time_stops_its_handler(
    jobs: Jobs, heartbeat: Heartbeat, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the clock of this process: the database cannot be asked."""
    first, second = await jobs.leased(), await jobs.leased()
    late = kept(heartbeat, first, age=TTL * 0.95)
    soon = kept(heartbeat, second, age=TTL * 0.8)

    async def away(*_: object, **__: object) -> None:
        raise DatabaseUnavailableError("away")

    with monkeypatch.context() as patch:
        patch.setattr(jobs.database, "run", away)
        with pytest.raises(DatabaseUnavailableError):
            await heartbeat.renew_once()
    await heartbeat.expire_once()
    assert (late.stopped, soon.stopped) == (Stop.LEASE_LOST, None)


async def test_a_claim_that_is_told_too_late_starts_nothing(heartbeat: Heartbeat) -> None:
    """The loop stood still while it was committed; the job may be another's by now."""
    started: list[bool] = []

    async def work() -> None:
        started.append(True)

    run = run_of(work)
    heartbeat.add(run, monotonic() - TTL)
    assert (await ended(run)).ending == Ending.LEASE_LOST
    assert started == []


class TestInAWorker:
    async def test_a_long_job_keeps_its_lease(self, jobs: Jobs) -> None:
        scheduler = jobs.another(lease_ttl=1.0)
        running = asyncio.Event()

        @scheduler.handler
        async def work() -> int:
            running.set()
            await asyncio.sleep(1.3)
            return 1

        async with serving(scheduler):
            job = await scheduler.enqueue(work.job())
            await running.wait()

            async def ended_or_taken() -> bool:
                return (await scheduler.get(job)).ended or bool(await jobs.reclaim())

            await until(ended_or_taken)
            assert await scheduler.wait(job) == 1
        assert (await jobs.row(job)).attempt == 1

    async def test_a_job_that_another_has_taken_is_stopped_and_not_written(
        self, jobs: Jobs
    ) -> None:
        scheduler = jobs.another(lease_ttl=1.0)
        running, stopped = asyncio.Event(), asyncio.Event()

        @scheduler.handler
        async def work() -> None:
            running.set()
            try:
                await asyncio.sleep(60)
            finally:
                stopped.set()

        table = jobs.tables.jobs
        async with serving(scheduler):
            job = await scheduler.enqueue(work.job())
            await running.wait()
            thief = {"lease_owner": "thief", "lease_token": table.c.lease_token + 1}
            theft = update(table).where(table.c.id == job.id).values(thief)
            await jobs.do(lambda c, _: c.execute(theft))
            await stopped.wait()
        row = await jobs.row(job)
        assert (row.lease_owner, row.lease_token, row.in_flight) == ("thief", 2, True)

    async def test_a_request_to_cancel_stops_the_handler(self, jobs: Jobs) -> None:
        scheduler = jobs.another(lease_ttl=1.0)
        running = asyncio.Event()

        @scheduler.handler
        async def work() -> None:
            running.set()
            await asyncio.sleep(60)

        async with serving(scheduler):
            job = await scheduler.enqueue(work.job())
            await running.wait()
            await jobs.spoil(job, cancel_requested=True)
            with pytest.raises(JobCancelled):
                await scheduler.wait(job)

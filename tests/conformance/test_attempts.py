"""The history of attempts that did not succeed: written with the state, and for nothing else."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import Connection, event, func, select

from asyncjobq import (
    Attempt,
    Cancel,
    ConfigurationError,
    Ending,
    Fail,
    JobNotFoundError,
    Retry,
    State,
    constant,
)
from asyncjobq.backends.base import Backend
from asyncjobq.finalize import Finished, failed_instead
from asyncjobq.lease import Claimed
from asyncjobq.outcomes import LONGEST_MESSAGE, Failure, Outcome
from conformance.kit import Jobs
from conformance.running import serving
from conformance.runs import outcome_of, raising, wait_for_ever
from conformance.steps import TTL, Step, failed, finishing, succeeded

pytestmark = pytest.mark.asyncio(loop_scope="module")

ODD = Failure("Böse", "🙂 it's broken", 'Traceback:\n  File "ä.py"')


async def kept(jobs: Jobs, claimed: Claimed) -> list[Attempt]:
    return await jobs.scheduler.attempts(claimed.lease.job_id)


async def endings(jobs: Jobs, claimed: Claimed) -> list[tuple[int, Ending]]:
    return [(attempt.attempt, attempt.ending) for attempt in await kept(jobs, claimed)]


class TestKept:
    @pytest.mark.parametrize("ending", [Ending.FAILED, Ending.TIMED_OUT, Ending.CANCELLED])
    async def test_of_an_end(self, jobs: Jobs, ending: Ending) -> None:
        claimed = await jobs.leased("the worker")
        await jobs.finish(claimed, outcome=Outcome(ending, error="the error", failure=ODD))
        (attempt,) = await kept(jobs, claimed)
        row = await jobs.row(claimed)
        assert (attempt.job_id, attempt.attempt, attempt.ending) == (row.id, 1, ending)
        assert (attempt.error_type, attempt.message) == (ODD.type, ODD.message)
        assert (attempt.traceback, attempt.worker) == (ODD.traceback, "the worker")
        assert attempt.started_at == row.started_at
        assert row.started_at <= attempt.finished_at <= await jobs.now()
        assert row.error == "the error"

    async def test_of_each_retry_in_order(self, jobs: Jobs) -> None:
        claimed = await jobs.leased()
        for _ in range(2):
            await jobs.finish(claimed, outcome=failed("again", retry_after=0.0))
            claimed = await jobs.claim_one()
        await jobs.finish(claimed)
        assert await endings(jobs, claimed) == [(1, Ending.FAILED), (2, Ending.FAILED)]
        last = await jobs.scheduler.attempts(claimed.lease.job_id, limit=1)
        assert [attempt.attempt for attempt in last] == [2]
        assert last[0].message == "again"

    async def test_of_lost_workers(self, jobs: Jobs) -> None:
        claimed = await jobs.leased("first", max_attempts=2)
        for owner in ("second", "nobody"):
            jobs.later(TTL + 1)
            await jobs.reclaim()
            for again in await jobs.claim(owner=owner):
                assert again.attempt == 2
        first, second = await kept(jobs, claimed)
        assert (first.ending, first.worker) == (Ending.LEASE_LOST, "first")
        assert (second.ending, second.worker) == (Ending.LEASE_LOST, "second")
        assert second.message is not None
        assert "attempt 2 of 2" in second.message
        assert await jobs.state(claimed) == State.FAILED

    async def test_of_an_outcome_that_the_database_refuses(self, jobs: Jobs) -> None:
        claimed = await jobs.leased()
        instead = failed_instead(Finished(claimed.lease, succeeded(1)), "no such luck")
        await jobs.finish(claimed, outcome=instead.outcome)
        (attempt,) = await kept(jobs, claimed)
        assert (attempt.ending, attempt.error_type) == (Ending.FAILED, None)
        assert attempt.message is not None
        assert "no such luck" in attempt.message

    @pytest.mark.parametrize("ending", [Ending.SNOOZED, Ending.INTERRUPTED])
    async def test_of_what_was_cut_short_when_its_end_was_asked(
        self, jobs: Jobs, ending: Ending
    ) -> None:
        claimed = await jobs.leased()
        await jobs.spoil(claimed, cancel_requested=True)
        await jobs.finish(claimed, outcome=Outcome(ending, retry_after=0.0))
        assert await endings(jobs, claimed) == [(1, Ending.CANCELLED)]


class TestNotKept:
    @pytest.mark.parametrize("ending", [Ending.SNOOZED, Ending.INTERRUPTED])
    async def test_of_what_costs_no_attempt(self, jobs: Jobs, ending: Ending) -> None:
        claimed = await jobs.leased()
        await jobs.finish(claimed, outcome=Outcome(ending, retry_after=0.0))
        assert await kept(jobs, claimed) == []

    async def test_of_a_success(self, jobs: Jobs) -> None:
        claimed = await jobs.leased()
        await jobs.finish(claimed)
        assert await kept(jobs, claimed) == []

    async def test_of_a_late_owner(self, jobs: Jobs) -> None:
        late = await jobs.leased()
        jobs.later(TTL + 1)
        await jobs.reclaim()
        await jobs.claim_one("another")
        await jobs.finish(late, outcome=failed())
        assert await endings(jobs, late) == [(1, Ending.LEASE_LOST)]

    async def test_without_the_state(self, jobs: Jobs) -> None:
        claimed = await jobs.leased()

        def broken(connection: Connection, backend: Backend) -> None:
            finishing(claimed, outcome=failed())(connection, backend)
            raise LookupError("before COMMIT")

        with pytest.raises(LookupError):
            await jobs.do(broken)
        assert await kept(jobs, claimed) == []
        assert await jobs.state(claimed) == State.LEASED

    @pytest.mark.parametrize("limit", [-1, 2**70, "all", True])
    async def test_of_a_number_that_is_none(self, jobs: Jobs, limit: Any) -> None:
        job = await jobs.enqueue()
        with pytest.raises(ConfigurationError):
            await jobs.scheduler.attempts(job, limit=limit)

    async def test_of_a_job_that_there_is_not(self, jobs: Jobs) -> None:
        with pytest.raises(JobNotFoundError):
            await jobs.scheduler.attempts(10**12)


class TestCost:
    @staticmethod
    async def statements_of(jobs: Jobs, step: Step[Any]) -> list[str]:
        counted: list[str] = []

        def work(connection: Connection, backend: Backend) -> None:
            def note(*details: Any) -> None:
                counted.append(details[2])

            event.listen(connection, "before_cursor_execute", note)
            step(connection, backend)
            event.remove(connection, "before_cursor_execute", note)

        await jobs.do(work)
        return counted

    async def test_of_successes_is_nothing_and_of_failures_two_statements(self, jobs: Jobs) -> None:
        await jobs.enqueue_many(6)
        claimed = await jobs.claim(6)
        successes = await self.statements_of(jobs, finishing(*claimed[:2]))
        # Lock, look for neighbours, write; and tell other processes, where that can be.
        assert len(successes) == 3 + jobs.backend.listens
        for count in (1, 3):
            batch, claimed = claimed[2 : 2 + count], claimed[:2] + claimed[2 + count :]
            failures = await self.statements_of(jobs, finishing(*batch, outcome=failed()))
            assert len(failures) == len(successes) + 2

    async def test_in_a_batch_of_all_sorts(self, jobs: Jobs) -> None:
        await jobs.enqueue_many(700)
        claimed = await jobs.claim(700)
        await jobs.do(finishing(*claimed, outcome=failed()))
        count = select(func.count()).select_from(jobs.tables.attempts)
        assert await jobs.do(lambda c, _: c.scalar(count)) == 700


class TestWhatIsSaid:
    async def test_of_an_error(self) -> None:
        for error, ending in (
            (ValueError("bad\nvalue"), Ending.FAILED),
            (Fail("final"), Ending.FAILED),
            (Retry("later"), Ending.FAILED),
            (Cancel("enough"), Ending.CANCELLED),
        ):
            outcome = await outcome_of(raising(error))
            assert outcome.ending is ending
            assert outcome.failure is not None
            assert outcome.failure.type == type(error).__name__
            assert outcome.failure.message == str(error)
            assert outcome.failure.traceback == outcome.error
            assert "Traceback" in str(outcome.error)

    async def test_of_a_timeout(self) -> None:
        outcome = await outcome_of(wait_for_ever, timeout=0.01)
        assert outcome.kept_failure == Failure("TimeoutError", "timed out after 0.01 s")

    async def test_is_bounded_and_can_be_stored(self, jobs: Jobs) -> None:
        class Odd(Exception):
            def __str__(self) -> str:
                return "\x00\ud800" + "ä" * 1_000_000

        class Mute(Exception):
            def __str__(self) -> str:
                raise LookupError

        for error in (Odd(), Mute(), type("T" * 1000, (Exception,), {})("named")):
            outcome = await outcome_of(raising(error), attempt=3)
            claimed = await jobs.leased()
            await jobs.finish(claimed, outcome=outcome)
            (attempt,) = await kept(jobs, claimed)
            assert len(attempt.message or "") < LONGEST_MESSAGE + 50
            assert len(attempt.traceback or "") < 11_000
            assert len(attempt.error_type or "") <= 255
            assert (await jobs.row(claimed)).error == outcome.error


async def test_of_a_job_that_succeeds_at_last(jobs: Jobs) -> None:
    scheduler = jobs.scheduler
    tries = iter(["first", "second"])

    @scheduler.handler(retry=constant(0))
    async def work() -> str:
        for problem in tries:
            raise ConnectionError(problem)
        return "good"

    async with serving(scheduler):
        job = await scheduler.enqueue(work.job())
        assert await scheduler.wait(job) == "good"
    first, second = await scheduler.attempts(job)
    assert [first.message, second.message] == ["first", "second"]
    assert first.error_type == second.error_type == "ConnectionError"
    assert first.worker == scheduler.settings.worker_id
    assert first.traceback is not None
    assert "test_attempts.py" in first.traceback

"""How attempts end: under their fence, together with their result, and each for itself."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import Connection, select

from asyncjobq import State
from asyncjobq.backends.base import Backend
from asyncjobq.finalize import Finished, finalize_once
from asyncjobq.lease import Claimed, reclaim_once
from asyncjobq.outcomes import Ending, Outcome
from conformance.kit import Jobs
from conformance.steps import (
    TTL,
    Step,
    assert_one_of_them,
    failed,
    finishing,
    holding,
    impostor,
    renewing,
    succeeded,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")


NEAR = timedelta(seconds=2)


class TestEnd:
    async def test_of_a_success(self, jobs: Jobs) -> None:
        claimed = await jobs.leased()
        jobs.later(10)
        written = await jobs.finish(claimed, outcome=succeeded({"a": [1, "ä"]}))
        job, row = await jobs.scheduler.get(claimed.lease.job_id), await jobs.row(claimed)
        assert [item.lease for item in written.written] == [claimed.lease]
        assert (job.state, job.result, job.error) == (State.DONE, {"a": [1, "ä"]}, None)
        assert (row.in_flight, row.lease_owner, row.lease_expires) == (False, None, None)
        assert (row.settled, row.lease_token, row.attempt) == (True, 1, 1)
        assert await jobs.now() - row.finished_at < NEAR

    async def test_of_a_result_of_none(self, jobs: Jobs) -> None:
        claimed = await jobs.leased()
        await jobs.finish(claimed, outcome=succeeded(None))
        job = await jobs.scheduler.get(claimed.lease.job_id)
        assert (job.state, job.result) == (State.DONE, None)

    async def test_of_a_large_result(self, jobs: Jobs) -> None:
        claimed, other = await jobs.leased(), await jobs.leased()
        value = "ä\\'\"" * 1_000_000
        await jobs.finish(claimed, outcome=succeeded(value))
        await jobs.finish(other)
        assert (await jobs.scheduler.get(claimed.lease.job_id)).result == value

    async def test_of_a_failure(self, jobs: Jobs) -> None:
        claimed = await jobs.leased()
        await jobs.finish(claimed, outcome=failed("ä🙂 broken" * 1000))
        job = await jobs.scheduler.get(claimed.lease.job_id)
        assert (job.state, job.error, job.result) == (State.FAILED, "ä🙂 broken" * 1000, None)

    async def test_of_a_cancelled_attempt(self, jobs: Jobs) -> None:
        claimed = await jobs.leased()
        await jobs.finish(claimed, outcome=Outcome(Ending.CANCELLED, error="on request"))
        assert await jobs.state(claimed) == State.CANCELLED

    async def test_releases_a_unique_key(self, jobs: Jobs) -> None:
        claimed = await jobs.leased()
        await jobs.spoil(claimed, unique_held="key")
        await jobs.finish(claimed)
        assert (await jobs.row(claimed)).unique_held is None

    async def test_leaves_it_unsettled_only_where_somebody_waits(self, jobs: Jobs) -> None:
        waited_for, alone = await jobs.leased(), await jobs.leased()
        dependant = await jobs.enqueue(depends_on=[waited_for.lease.job_id])
        await jobs.settle()
        written = await jobs.finish(waited_for, alone)
        assert written.unsettled
        assert await jobs.unsettled() == [waited_for.lease.job_id]
        assert await jobs.state(dependant) == State.BLOCKED


class TestReturn:
    async def test_of_a_failure_to_be_retried(self, jobs: Jobs) -> None:
        claimed = await jobs.leased()
        jobs.later(86_400)
        await jobs.finish(claimed, outcome=failed("broken", retry_after=60.5))
        row = await jobs.row(claimed)
        assert (row.state, row.error, row.attempt) == (State.SCHEDULED, "broken", 1)
        assert (row.in_flight, row.lease_owner, row.finished_at) == (False, None, None)
        due = row.run_after - await jobs.now()
        assert due == pytest.approx(timedelta(seconds=60.5), abs=NEAR)
        jobs.later(62)
        await jobs.promote()
        assert (await jobs.claim_one()).attempt == 2

    async def test_at_once(self, jobs: Jobs) -> None:
        claimed = await jobs.leased()
        await jobs.finish(claimed, outcome=failed(retry_after=0.0))
        assert (await jobs.claim_one()).lease.token == 2

    @pytest.mark.parametrize("ending", [Ending.SNOOZED, Ending.INTERRUPTED])
    async def test_that_costs_no_attempt(self, jobs: Jobs, ending: Ending) -> None:
        claimed = await jobs.leased(max_attempts=1)
        for token in (2, 3):
            await jobs.finish(claimed, outcome=Outcome(ending, retry_after=0.0))
            claimed = await jobs.claim_one()
            assert (claimed.attempt, claimed.lease.token) == (1, token)

    async def test_cancels_where_that_was_asked(self, jobs: Jobs) -> None:
        claimed = await jobs.leased()
        await jobs.spoil(claimed, cancel_requested=True)
        await jobs.finish(claimed, outcome=failed(retry_after=5.0))
        assert await jobs.state(claimed) == State.CANCELLED

    async def test_a_success_is_one_although_its_end_was_asked(self, jobs: Jobs) -> None:
        claimed = await jobs.leased()
        await jobs.spoil(claimed, cancel_requested=True)
        await jobs.finish(claimed)
        assert await jobs.state(claimed) == State.DONE


class TestBatch:
    async def test_of_every_kind(self, jobs: Jobs) -> None:
        outcomes = [
            succeeded(1),
            failed(),
            failed(retry_after=9.0),
            Outcome(Ending.SNOOZED, retry_after=0.0),
            Outcome(Ending.CANCELLED, error="no"),
        ]
        await jobs.enqueue_many(len(outcomes))
        claimed = await jobs.claim(10)
        batch = [Finished(job.lease, end) for job, end in zip(claimed, outcomes, strict=True)]
        written = await jobs.do(lambda c, b: finalize_once(c, b, batch))
        assert len(written.written) == len(outcomes)
        states = [State.DONE, State.FAILED, State.SCHEDULED, State.READY, State.CANCELLED]
        assert await jobs.states(*claimed) == states
        assert [(await jobs.row(job)).attempt for job in claimed] == [1, 1, 1, 0, 1]

    async def test_of_many(self, jobs: Jobs) -> None:
        await jobs.enqueue_many(1200)
        claimed = await jobs.claim(1200)
        written = await jobs.finish(*claimed)
        assert len(written.written) == 1200
        assert len(await jobs.scheduler.find(state=State.DONE, limit=2000)) == 1200

    @pytest.mark.parametrize("wrong", ["owner", "token", "id"])
    async def test_of_anybody_else_is_lost(self, jobs: Jobs, wrong: str) -> None:
        claimed = await jobs.leased()
        before = await jobs.row(claimed)
        lease = impostor(claimed.lease, wrong)
        for outcome in (succeeded(1), failed(retry_after=1.0)):
            written = await jobs.finish(lease, outcome=outcome)
            assert [item.lease for item in written.lost] == [lease]
            assert not written.written
        assert await jobs.row(claimed) == before

    async def test_with_some_that_are_lost(self, jobs: Jobs) -> None:
        lost, kept = await jobs.leased(), await jobs.leased()
        jobs.later(TTL + 1)
        await jobs.renew(kept)
        await jobs.reclaim()
        written = await jobs.finish(lost, kept)
        assert [item.lease for item in written.lost] == [lost.lease]
        assert [item.lease for item in written.written] == [kept.lease]
        assert await jobs.states(lost, kept) == [State.READY, State.DONE]

    async def test_with_an_old_and_a_new_attempt_of_one_job(self, jobs: Jobs) -> None:
        """Outcomes may wait for a database that is away until their job comes back."""
        old = await jobs.leased()
        jobs.later(TTL + 1)
        for order in (1, -1):
            await jobs.reclaim()
            new = await jobs.claim_one()
            written = await jobs.finish(*[old, new][::order], outcome=failed(retry_after=0.0))
            assert [item.lease for item in written.lost] == [old.lease]
            assert [item.lease for item in written.written] == [new.lease]
            old = new

    @pytest.mark.requires("row_locks")
    async def test_with_one_that_somebody_holds(self, jobs: Jobs) -> None:
        held, free = await jobs.leased(), await jobs.leased()
        async with jobs.limited_time(), jobs.transaction() as take:
            await take(holding(held))
            written = await jobs.finish(held, free)
        assert [item.lease for item in written.held] == [held.lease]
        assert await jobs.states(held, free) == [State.LEASED, State.DONE]
        assert len((await jobs.finish(held)).written) == 1


class TestAgain:
    """The answer to a COMMIT can be lost on the way, and the outcome is written once more."""

    @pytest.mark.parametrize(
        "outcome",
        [
            succeeded(1),
            failed(),
            failed(retry_after=0.0),
            failed(retry_after=9.0),
            Outcome(Ending.CANCELLED, error="no"),
        ],
    )
    async def test_is_known_as_written(self, jobs: Jobs, outcome: Outcome) -> None:
        claimed, other = await jobs.leased(), await jobs.leased()
        await jobs.finish(claimed, outcome=outcome)
        before = await jobs.row(claimed)
        written = await jobs.finish(claimed, other, outcome=outcome)
        assert {item.lease for item in written.written} == {claimed.lease, other.lease}
        assert await jobs.row(claimed) == before

    async def test_of_one_that_waits_for_its_children(self, jobs: Jobs) -> None:
        claimed = await jobs.leased()
        child = await jobs.enqueue("another")
        await jobs.spoil(child, parent_id=claimed.lease.job_id)
        for _ in range(2):
            written = await jobs.finish(claimed)
            assert len(written.written) == 1
            assert written.waiting == {claimed.lease.job_id}
            assert written.unsettled

    async def test_is_lost_where_another_wrote_the_end(self, jobs: Jobs) -> None:
        retried = await jobs.leased()
        used_up = await jobs.leased(max_attempts=1)
        jobs.later(TTL + 1)
        await jobs.reclaim()
        assert await jobs.states(retried, used_up) == [State.READY, State.FAILED]
        for outcome in (succeeded(1), failed(), failed(retry_after=0.0)):
            written = await jobs.finish(retried, used_up, outcome=outcome)
            assert {item.lease for item in written.lost} == {retried.lease, used_up.lease}

    async def test_is_lost_where_the_job_was_claimed_again(self, jobs: Jobs) -> None:
        first = await jobs.leased()
        await jobs.finish(first, outcome=failed(retry_after=0.0))
        second = await jobs.claim_one()
        await jobs.finish(second, outcome=failed())
        assert (await jobs.finish(first, outcome=failed())).lost


def seen(claimed: Claimed) -> Step[Any]:
    def step(connection: Connection, backend: Backend) -> Any:
        jobs = backend.tables.jobs
        columns = (jobs.c.state, jobs.c.result, jobs.c.in_flight, jobs.c.lease_owner)
        query = select(*columns).where(jobs.c.id == claimed.lease.job_id)
        return connection.execute(query).one()

    return step


class TestAtAnyMoment:
    async def test_the_result_is_seen_with_its_state_or_not_at_all(self, jobs: Jobs) -> None:
        async for moment in jobs.moments():
            claimed = await jobs.leased()
            await moment.of(finishing(claimed), meanwhile=seen(claimed))
            assert tuple(moment.other) == (State.LEASED, None, True, "worker")
            assert tuple(await jobs.do(seen(claimed))) == (State.DONE, 1, False, None)

    @pytest.mark.requires("row_locks")
    async def test_of_a_finish_comes_a_reclaim(self, jobs: Jobs) -> None:
        async for moment in jobs.moments():
            claimed = await jobs.leased()
            jobs.later(TTL + 1)
            written = await moment.of(finishing(claimed), meanwhile=reclaim_once)
            assert_one_of_them(written.written, moment.other)
            assert await jobs.state(claimed) == (State.DONE if written.written else State.READY)

    @pytest.mark.requires("row_locks")
    async def test_of_a_reclaim_comes_a_finish(self, jobs: Jobs) -> None:
        async for moment in jobs.moments():
            claimed = await jobs.leased()
            jobs.later(TTL + 1)
            taken = await moment.of(reclaim_once, meanwhile=finishing(claimed))
            assert_one_of_them(moment.other.written, taken)
            assert await jobs.state(claimed) == (State.READY if taken else State.DONE)
            if taken:
                assert (await jobs.finish(claimed)).lost

    @pytest.mark.requires("row_locks")
    async def test_of_a_finish_comes_another(self, jobs: Jobs) -> None:
        async for moment in jobs.moments():
            claimed = await jobs.leased()
            again = finishing(claimed, outcome=failed())
            written = await moment.of(finishing(claimed), meanwhile=again)
            assert_one_of_them(written.written, moment.other.written)
            assert await jobs.state(claimed) == (State.DONE if written.written else State.FAILED)

    @pytest.mark.requires("row_locks")
    async def test_of_a_finish_comes_a_renewal(self, jobs: Jobs) -> None:
        async for moment in jobs.moments():
            claimed = await jobs.leased()
            written = await moment.of(finishing(claimed), meanwhile=renewing(claimed))
            assert len(written.written) == 1
            assert not moment.other.lost
            assert await jobs.state(claimed) == State.DONE

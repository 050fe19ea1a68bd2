"""A lease that ran out: taken back by anybody, once, and its late owner changes nothing more."""

from __future__ import annotations

from functools import partial

import pytest

from asyncjobq import State
from asyncjobq.lease import Lease, extend, reclaim_once
from asyncjobq.transition import End, Return, end_jobs, return_jobs
from conformance.kit import Jobs
from conformance.steps import TTL, assert_one_of_them, holding, ids_of, impostor, renewing

pytestmark = pytest.mark.asyncio(loop_scope="module")


class TestReclaim:
    async def test_takes_back_what_ran_out_and_nothing_else(self, jobs: Jobs) -> None:
        lost = await jobs.leased()
        jobs.later(TTL - 5)
        alive = await jobs.leased()
        assert await jobs.reclaim() == []
        jobs.later(6)
        assert await jobs.reclaim() == [lost.lease.job_id]
        assert await jobs.states(lost, alive) == [State.READY, State.LEASED]
        row = await jobs.row(lost)
        assert (row.in_flight, row.lease_owner, row.lease_expires) == (False, None, None)
        assert (row.lease_token, row.attempt) == (1, 1)

    async def test_of_a_running_job(self, jobs: Jobs) -> None:
        lost = await jobs.leased()
        await jobs.renew(lost)
        jobs.later(TTL + 1)
        assert await jobs.reclaim() == [lost.lease.job_id]

    async def test_counts_the_attempt(self, jobs: Jobs) -> None:
        lost = await jobs.leased(max_attempts=2)
        jobs.later(TTL + 1)
        await jobs.reclaim()
        assert await jobs.state(lost) == State.READY
        assert (await jobs.claim_one()).attempt == 2

    async def test_fails_a_job_whose_attempts_are_used_up(self, jobs: Jobs) -> None:
        lost = await jobs.leased(max_attempts=1)
        jobs.later(TTL + 1)
        assert await jobs.reclaim() == [lost.lease.job_id]
        job = await jobs.scheduler.get(lost.lease.job_id)
        assert job.state == State.FAILED
        assert job.error is not None
        assert "worker was lost" in job.error
        assert "attempt 1 of 1" in job.error
        assert job.finished_at is not None

    async def test_fails_it_for_its_dependants_too(self, jobs: Jobs) -> None:
        lost = await jobs.leased(max_attempts=1)
        dependant = await jobs.enqueue(depends_on=[lost.lease.job_id])
        jobs.later(TTL + 1)
        await jobs.reclaim()
        await jobs.settle()
        assert await jobs.state(dependant) == State.CANCELLED

    async def test_cancels_where_that_was_asked(self, jobs: Jobs) -> None:
        lost = await jobs.leased()
        await jobs.spoil(lost, cancel_requested=True)
        jobs.later(TTL + 1)
        await jobs.reclaim()
        assert await jobs.state(lost) == State.CANCELLED

    async def test_more_than_one_call_takes(self, jobs: Jobs) -> None:
        made = await jobs.enqueue_many(700)
        await jobs.claim(700)
        jobs.later(TTL + 1)
        first, second, third = [await jobs.reclaim() for _ in range(3)]
        assert sorted(first + second) == ids_of(made)
        assert third == []

    @pytest.mark.requires("row_locks")
    async def test_goes_round_what_somebody_holds(self, jobs: Jobs) -> None:
        held, free = await jobs.leased(), await jobs.leased()
        jobs.later(TTL + 1)
        async with jobs.limited_time(), jobs.transaction() as take:
            await take(holding(held))
            assert await jobs.reclaim() == [free.lease.job_id]
        assert await jobs.reclaim() == [held.lease.job_id]

    @pytest.mark.requires("row_locks")
    async def test_with_a_renewal_at_any_moment(self, jobs: Jobs) -> None:
        async for moment in jobs.moments():
            claimed = await jobs.leased()
            jobs.later(TTL + 1)
            taken = await moment.of(reclaim_once, meanwhile=renewing(claimed))
            assert_one_of_them(moment.other.renewed, taken)
            state = State.READY if taken else State.RUNNING
            assert await jobs.state(claimed) == state

    @pytest.mark.requires("row_locks")
    async def test_with_another_reclaim_at_any_moment(self, jobs: Jobs) -> None:
        async for moment in jobs.moments():
            lost = await jobs.leased()
            jobs.later(TTL + 1)
            taken = await moment.of(reclaim_once, meanwhile=reclaim_once)
            assert_one_of_them(taken, moment.other)
            assert (await jobs.claim_one()).lease == Lease(lost.lease.job_id, "worker", 2)


class TestLateOwner:
    """After its job was reclaimed and has another owner, or the same one again."""

    @pytest.mark.parametrize("next_owner", ["another", "worker"])
    async def test_changes_nothing(self, jobs: Jobs, next_owner: str) -> None:
        late = await jobs.leased("worker")
        jobs.later(TTL + 1)
        await jobs.reclaim()
        current = await jobs.claim_one(next_owner)
        before = await jobs.row(late)
        assert (await jobs.renew(late)).lost == {late.lease}
        assert [item.lease for item in (await jobs.finish(late)).lost] == [late.lease]
        assert await jobs.row(late) == before
        assert (await jobs.renew(current)).renewed == {current.lease}

    async def test_changes_nothing_before_the_next_claim(self, jobs: Jobs) -> None:
        late = await jobs.leased()
        jobs.later(TTL + 1)
        await jobs.reclaim()
        assert (await jobs.renew(late)).lost == {late.lease}
        assert (await jobs.finish(late)).written == []
        assert await jobs.state(late) == State.READY


@pytest.mark.parametrize("wrong", ["owner", "token"])
async def test_every_write_for_a_lease_carries_its_fence(jobs: Jobs, wrong: str) -> None:
    claimed, other = await jobs.leased(), await jobs.leased()
    await jobs.spoil(other, lease_token=7)
    before = await jobs.row(claimed)
    lease = impostor(claimed.lease, wrong)
    stale = lease.row
    others = Lease(other.lease.job_id, other.lease.owner, 7)
    for leases in ([lease], [lease, others]):
        await jobs.do(partial(extend, leases=leases, ttl=TTL))
    assert (await jobs.row(other)).state == State.RUNNING
    await jobs.do(lambda c, b: end_jobs(c, b, [End(stale, State.DONE)]))
    await jobs.do(lambda c, b: return_jobs(c, b, [Return(stale)]))
    assert await jobs.row(claimed) == before
